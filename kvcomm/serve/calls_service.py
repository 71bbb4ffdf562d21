"""Calls about the service itself: is it well, and what was dropped."""

from __future__ import annotations

import secrets
import time

import torch

from kvcomm.errors import StoreUnavailable
from kvcomm.keys import CacheKey, Recipe
from kvcomm.serve.call import Call
from kvcomm.store.base import Attributes, Deadline, Entry, Store
from kvcomm.transfer.frame import Kind
from kvcomm.types import ModelFingerprint, Namespace, Segment, SegmentKV

WATCH_S = 10.0
_MODEL = ModelFingerprint("health", "", "", "float32", "", "", 1, 1, 4)
HEALTH_NAMESPACE = Namespace("kvcomm.health")


def check_health(store: Store, deadline_s: float) -> float:
    """Put, get, compare and delete a small entry in a namespace of the service's own; the seconds it took.

    Raises:
        StoreError: a step failed, or other bytes came back.
    """
    started, deadline = time.perf_counter(), Deadline(deadline_s)
    segment = Segment(tuple(secrets.randbits(32) for _ in range(4)))
    key = CacheKey.of(HEALTH_NAMESPACE, _MODEL, segment, Recipe("isolated", "", "health", False))
    kv = SegmentKV(torch.rand(1, 1, 4, 4), torch.rand(1, 1, 4, 4))
    store.put(key, Entry(segment, kv, Attributes(ttl_s=60.0)), deadline_s=max(deadline.left(), 0.001))
    try:
        handle = store.get(key, lease_s=5.0, deadline_s=max(deadline.left(), 0.001))
        if handle is None:
            raise StoreUnavailable("an entry that was just put is not there; look at the service's disk and limits")
        with handle:
            found = handle.read()
        if not (torch.equal(found.keys, kv.keys) and torch.equal(found.values, kv.values)):
            raise StoreUnavailable("an entry that was just put came back as other bytes; stop the service")
    finally:
        store.delete(key, deadline_s=max(deadline.left(), 0.001))
    return time.perf_counter() - started


def health(call: Call) -> None:
    """A real put and get."""
    call.no_payload()
    with call.core.admission.slot():
        seconds = check_health(call.core.store, call.left_s())
    reserved, uploads = call.core.uploads.reserved()
    call.answer(
        {
            "put_and_get_ms": round(seconds * 1000, 3), "reserved_bytes": reserved, "uploads": uploads,
            "claims": call.core.claims.count(),
        }
    )  # fmt: skip


def watch(call: Call) -> None:
    """Push what is dropped, and a sign of life each ten seconds, until the connection ends.

    The first notice says what was dropped since version ``since``; -1 asks for the version now and nothing else.
    """
    since = call.asked.integer("since", -1, 2**53)
    call.no_payload()
    namespace = call.grant.namespace
    if since < 0:
        since = call.core.drops.last(namespace)
        _notice(call, since, [])
    found = call.core.drops.since(namespace, since)
    while True:
        version = found[-1][0] if found else since
        if version != since or found:
            _notice(call, version, [group for _, group in found])
        elif not call.stopping():
            _notice(call, since, [])
        since = version
        if call.stopping() or not call.core.holds(call.grant):
            call.answer()
            return
        found = call.core.drops.wait(namespace, since, Deadline(WATCH_S))


def _notice(call: Call, version: int, groups: list[str]) -> None:
    for at in range(0, max(len(groups), 1), 64):
        call.wire.send(
            Kind.NOTICE, call.preamble.number, {"version": version, "groups": groups[at : at + 64]}, Deadline(5.0)
        )
