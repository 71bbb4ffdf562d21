"""Being told what is put, deleted and dropped, as it happens, and asking which held texts are nearly a given one."""

from __future__ import annotations

import array
import sys
from collections.abc import Callable

from kvcomm.errors import InvalidInput
from kvcomm.keys import CacheKey
from kvcomm.serve.call import Call
from kvcomm.serve.neighbours import MAX_COUNT, Near
from kvcomm.store.base import Deadline
from kvcomm.store.coordinator import Nearby
from kvcomm.transfer.frame import Kind
from kvcomm.transfer.news import change_lines, nearby_pages
from kvcomm.transfer.schema import MAX_TEXT
from kvcomm.types import Segment

BEAT_S = 2.0
MAX_ASKED_TOKENS = 1 << 20


def follow(call: Call) -> None:
    """Push changes of one model's entries until the connection ends, and a sign of life each two seconds.

    The first notice says from which version on; ``whole`` is false where changes since ``run``, ``since`` are not all
    known: the client then lists. It lists after that notice, so that it misses nothing.
    """
    model, run, since = call.fingerprint(), call.asked.text("run", 16), call.asked.integer("since", 0, 2**53)
    call.no_payload()
    changes, namespace = call.core.changes, call.grant.namespace
    found = changes.since(namespace, since) if run == changes.run else None
    while True:
        last, news = (changes.last(namespace), []) if found is None else found
        mine = [change for change in news if change.key is None or change.key.fingerprint == model]
        header = {"run": changes.run, "version": last, "whole": found is not None}
        pages = list(change_lines(mine))
        for number, page in enumerate(pages):
            more = {**header, "more": number < len(pages) - 1}
            call.wire.send(Kind.NOTICE, call.preamble.number, more, Deadline(5.0), [memoryview(page)])
        if call.stopping() or not call.core.holds(call.grant):
            call.answer()
            return
        changes.wait(namespace, last, Deadline(BEAT_S))
        found = changes.since(namespace, last)


def nearest(call: Call) -> None:
    """Texts that are nearly the one whose token ids are the payload, with the keys of those bases that are held now."""
    model, count = call.fingerprint(), call.asked.integer("count", 1, MAX_COUNT)
    least = call.asked.number("least")
    context = call.asked.text("context", MAX_TEXT) if call.asked.truth("chosen") else None
    call.asked.end()
    if not 4 <= call.preamble.payload_bytes <= 4 * MAX_ASKED_TOKENS or call.preamble.payload_bytes % 4:
        raise InvalidInput(
            f"{call.preamble.payload_bytes} bytes of token ids are not 4 for each of 1 to {MAX_ASKED_TOKENS}; split it"
        )
    ids = array.array("I", bytes(call.payload()))
    if sys.byteorder == "big":
        ids.byteswap()
    segment = Segment(tuple(ids))
    with call.core.admission.slot():
        call.core.neighbours.ready(call.core.store, call.namespace)
        found = _held(call, lambda: call.core.neighbours.nearest(
            call.namespace, model, segment, context=context, count=count, least=least
        ))  # fmt: skip
    call.answer_pages({}, nearby_pages(found))


def _held(call: Call, search: Callable[[], list[Near]]) -> list[Nearby]:
    """What was found and is still stored; what is not leaves the index, and the next ones are looked at."""
    gone: list[CacheKey] = []
    for _ in range(8):
        found, gone = search(), []
        for near in found:
            gone += [k for k in near.keys if not call.core.store.contains(k, deadline_s=call.left_s())]
        for key in gone:
            call.core.neighbours.remove(key)
        if not gone:
            return [Nearby(near.segment, near.cosine, near.keys) for near in found]
    left = [Nearby(n.segment, n.cosine, tuple(k for k in n.keys if k not in gone)) for n in found]
    return [near for near in left if near.keys]
