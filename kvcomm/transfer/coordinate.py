"""A remote store as a place where nodes meet: news, merged sums, claims and nearly equal texts of its service."""

from __future__ import annotations

import array
import re
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from kvcomm.keys import CacheKey
from kvcomm.store.base import Deadline
from kvcomm.store.coordinator import Follower, Nearby, Terms
from kvcomm.transfer.client import Client
from kvcomm.transfer.follow import Follow, Follows
from kvcomm.transfer.names import fingerprint_text, key_text, milliseconds
from kvcomm.transfer.news import read_nearby
from kvcomm.transfer.remote_sums import TEMPLATE, RemoteSums
from kvcomm.types import ModelFingerprint, Namespace, Segment

FORGET_S = 60.0


class RemoteCoordinator:
    """kvcomm.store.coordinator.Coordinator over the clients of a RemoteStore.

    Args:
        node: this node's name where sums are merged; the host's unless given. Two processes of one name are merged
            right, but fetch their common snapshot anew each time that they take turns.
    """

    def __init__(self, client: Callable[[Namespace], Client], terms: Terms, node: str) -> None:
        self._client, self.terms, self.node = client, terms, node or host_name()
        self._follows = Follows()

    def sums(self, namespace: Namespace, fingerprint: ModelFingerprint) -> RemoteSums:
        """Where learned sums are merged."""
        return RemoteSums(self._client(namespace), fingerprint)

    def forget_sums(self, namespace: Namespace, fingerprint: ModelFingerprint, agent: str) -> None:
        """Drop what all nodes learned at an agent's labels; needs the right ``admin``."""
        request = {
            "call": "sums_forget", "fingerprint": fingerprint_text(fingerprint), "template": TEMPLATE, "agent": agent,
        }  # fmt: skip
        self._client(namespace).call(request, Deadline(FORGET_S))

    def retire(self, namespace: Namespace, fingerprint: ModelFingerprint, node: str) -> bool:
        """Forget a node and what it learned; whether it was known. Needs the right ``admin``."""
        request = {
            "call": "sums_retire", "fingerprint": fingerprint_text(fingerprint), "template": TEMPLATE, "node": node,
        }  # fmt: skip
        return self._client(namespace).call(request, Deadline(FORGET_S)).header.truth("found")

    def follow(self, namespace: Namespace, fingerprint: ModelFingerprint, follower: Follower) -> Callable[[], None]:
        """Tell ``follower`` what changes, until what is returned is called or the store is closed."""
        follow = Follow(self._client(namespace), fingerprint, follower)
        self._follows.add(follow)
        return follow.close

    def claim(self, key: CacheKey, wait_s: float) -> tuple[bool, str]:
        """Be the one who computes ``key``, or wait up to ``wait_s`` for the one who does; see Coordinator.

        It is asked for in slices no longer than half the silence that is borne, so that a service that went silent is
        noticed as soon as in any other call.
        """
        waits, client = Deadline(wait_s), self._client(key.namespace)
        slice_s = self.terms.silence_s / 2
        request = {"call": "claim", "key": key_text(key), "lease_ms": milliseconds(self.terms.claim_s)}
        while True:
            wait_ms = milliseconds(min(slice_s, max(waits.left(), 0.001)))
            found = client.call({**request, "wait_ms": wait_ms}, Deadline(self.terms.silence_s)).header
            held, holder = found.truth("held"), found.text("holder", 32)
            if held or holder or not waits.left():
                return held, holder

    def unclaim(self, key: CacheKey, claim: str) -> None:
        """Give a claim back."""
        request = {"call": "unclaim", "key": key_text(key), "holder": claim}
        self._client(key.namespace).call(request, Deadline(self.terms.silence_s))

    def nearest(
        self, namespace: Namespace, fingerprint: ModelFingerprint, segment: Segment, count: int, least: float,
        context: str | None = None,
    ) -> list[Nearby]:  # fmt: skip
        """Up to ``count`` (1 to 64) held texts whose cosine is ``least`` or more, the nearest first."""
        ids = array.array("I", segment.token_ids)
        if sys.byteorder == "big":
            ids.byteswap()
        request: dict[str, object] = {
            "call": "nearest", "fingerprint": fingerprint_text(fingerprint), "count": count, "least": least,
            "chosen": context is not None,
        }  # fmt: skip
        if context is not None:
            request["context"] = context
        payload = [memoryview(ids).cast("B")]
        answer = self._client(namespace).call(request, Deadline(self.terms.silence_s), payload)
        return read_nearby(answer.payload, namespace)

    def close(self) -> None:
        """Follow no more."""
        with suppress(Exception):
            self._follows.close()


def host_name() -> str:
    """The host's name as a node's: characters that none may have are left out."""
    return re.sub(r"[^A-Za-z0-9._-]", "", socket.gethostname()).lstrip("._-")[:128] or "node"
