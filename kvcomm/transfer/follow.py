"""Following a namespace: one thread and one connection that hear what others put, delete and drop, as it happens."""

from __future__ import annotations

from contextlib import suppress

from kvcomm.errors import KVCommError, ProtocolError
from kvcomm.store.base import Deadline
from kvcomm.store.coordinator import Follower
from kvcomm.transfer.client import Client
from kvcomm.transfer.names import fingerprint_text, read_listings
from kvcomm.transfer.news import read_changes
from kvcomm.transfer.notices import Notices
from kvcomm.transfer.schema import Members
from kvcomm.types import ModelFingerprint, Namespace

SILENCE_S = 6.0
LIST_S = 10.0


class Follow:
    """Tells ``follower`` what changes, in order, from a listing of everything on; again from one after news were lost.

    Cheap: a listing at the start, then a frame of about 0.7 KB for each entry that anybody puts, and one of 150 bytes
    each two seconds.
    """

    def __init__(self, client: Client, fingerprint: ModelFingerprint, follower: Follower) -> None:
        self._client, self._fingerprint, self._follower = client, fingerprint, follower
        self._namespace = Namespace(client.namespace)
        self._run, self._version, self._listed = "", 0, False
        self._notices = Notices(client, "follow", self._ask, self._told, SILENCE_S)

    def close(self) -> None:
        """End; does not wait for what the follower is being told."""
        self._notices.close()

    def _ask(self) -> dict[str, object]:
        run = self._run if self._listed else ""
        return {
            "call": "follow", "fingerprint": fingerprint_text(self._fingerprint), "run": run, "since": self._version
        }  # fmt: skip

    def _told(self, notice: Members, page: bytearray) -> bool:
        before = self._run, self._version
        try:
            self._take_in(notice, page)
        except KVCommError:
            raise
        except Exception:  # of the follower's own; the next listing puts it right
            self._listed = False
            raise
        return (self._run, self._version) != before

    def _take_in(self, notice: Members, page: bytearray) -> None:
        run, version = notice.text("run", 16), notice.integer("version", 0, 2**53)
        whole, more = notice.truth("whole"), notice.truth("more")
        notice.end()
        self._client.breaker.succeeded()
        if not whole:
            self._list()
        elif not self._listed:
            raise ProtocolError("news came before a listing; the connection is closed")
        for news in read_changes(page, self._namespace):
            if news.key is None:
                self._follower.dropped(news.group)
            elif news.what == "added":
                self._follower.added(news.key, news.group)
            else:
                self._follower.removed(news.key)
        if not more:
            self._run, self._version = run, version
        self._follower.alive()

    def _list(self) -> None:
        request = {"call": "entries", "chosen": True, "fingerprint": fingerprint_text(self._fingerprint)}
        answer = self._client.call(request, Deadline(LIST_S))
        self._follower.listed(read_listings(bytes(answer.payload), self._namespace, answer.header.number("now_s")))
        self._listed = True


class Follows:
    """All that one store follows."""

    def __init__(self) -> None:
        self._held: list[Follow] = []

    def add(self, follow: Follow) -> None:
        """Close it with the store."""
        self._held.append(follow)

    def close(self) -> None:
        """End all."""
        for follow in self._held:
            with suppress(Exception):
                follow.close()
        self._held.clear()
