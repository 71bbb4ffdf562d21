"""Calls that change no entry: open, read and release one, look it up, list, count."""

from __future__ import annotations

import time

from kvcomm.errors import CorruptEntry, InvalidInput
from kvcomm.serve.call import Call
from kvcomm.serve.value import Value
from kvcomm.store.base import MAX_LEASE_S
from kvcomm.transfer.frame import Kind, pack
from kvcomm.transfer.names import MAX_LOOK_UP_BYTES, MAX_NBYTES, left_ms, listing_lines, read_look_up

_LEASE_MS = int(MAX_LEASE_S * 1000)


def open_entry(call: Call) -> None:
    """Pin an entry; the answer carries its bytes before the first layer."""
    key, lease_ms = (
        call.key(),
        call.asked.integer("lease_ms", 1, _LEASE_MS),
    )
    call.no_payload()
    call.leases.room()
    with call.core.admission.slot():
        handle = call.core.store.get(key, lease_s=lease_ms / 1000, deadline_s=call.left_s())
        if handle is None:
            call.outcome = "miss"
            call.answer({"found": False})
            return
        try:
            value = Value(handle, time.time())
        except BaseException:
            handle.release()
            raise
    number = call.leases.add(value)
    lead = value.lead_bytes
    header = {"found": True, "lease": number, "nbytes": value.nbytes, "left_ms": left_ms(handle.expires_s)}
    head = pack(Kind.ANSWER, call.preamble.number, header, payload_bytes=lead)
    call.answered = True
    value.send_one(call.wire, head, 0, lead, call.deadline)


def read(call: Call) -> None:
    """Bytes of a pinned entry."""
    number, start = call.asked.integer("lease", 1, 2**53), call.asked.integer("start", 0, MAX_NBYTES)
    nbytes = call.asked.integer("nbytes", 1, MAX_NBYTES)
    call.no_payload()
    call.leases.find(number).send(call.wire, call.preamble.number, start, nbytes, call.deadline)
    call.answered = True


def release(call: Call) -> None:
    """Unpin."""
    number = call.asked.integer("lease", 1, 2**53)
    call.no_payload()
    call.answer({"found": call.leases.release(number)})


def suspect(call: Call) -> None:
    """A client got bytes of an entry that fail their check: read it here, so that a bad one is set aside."""
    key = call.key()
    call.no_payload()
    bad = False
    with call.core.admission.slot():
        try:
            handle = call.core.store.get(key, deadline_s=call.left_s())
            if handle is not None:
                with handle:
                    handle.read()
        except CorruptEntry:
            bad = True
    call.answer({"bad": bad})


def contains(call: Call) -> None:
    """Whether an entry is held."""
    key = call.key()
    call.no_payload()
    with call.core.admission.slot():
        call.answer({"found": call.core.store.contains(key, deadline_s=call.left_s())})


def contains_many(call: Call) -> None:
    """Which of up to 256 keys are held, by their places in the payload."""
    call.asked.end()
    nbytes = call.preamble.payload_bytes
    if nbytes > MAX_LOOK_UP_BYTES:
        raise InvalidInput(f"a look-up of {nbytes} bytes exceeds {MAX_LOOK_UP_BYTES}; ask for fewer keys at once")
    keys = read_look_up(call.payload(), call.namespace)
    with call.core.admission.slot():
        held = call.core.store.contains_many(keys, deadline_s=call.left_s())
    call.answer({"found": [place for place, there in enumerate(held) if there]})


def entries(call: Call) -> None:
    """List what is held, in pages."""
    fingerprint = call.fingerprint() if call.asked.truth("chosen") else None
    call.no_payload()
    with call.core.admission.slot():
        call.answer_pages({"now_s": time.time()}, listing_lines(call.core.store.entries(call.namespace, fingerprint)))


def stats(call: Call) -> None:
    """Counts and sizes of the namespace."""
    call.no_payload()
    with call.core.admission.slot():
        found = call.core.store.stats(call.namespace)
    call.answer(
        {
            "entries": found.entries, "nbytes": found.nbytes, "max_bytes": found.max_bytes,
            "max_entries": found.max_entries, "counters": dict(found.counters), "durable": call.core.store.durable,
        }
    )  # fmt: skip


def blob_read(call: Call) -> None:
    """A named blob, in pages."""
    model, name = call.fingerprint(), call.asked.text("name", 64)
    call.no_payload()
    with call.core.admission.slot():
        found = call.core.store.blobs.read((call.namespace, model), name)
    size = 4 << 20
    view = memoryview(found or b"")
    call.answer_pages({"found": found is not None}, (view[at : at + size] for at in range(0, len(view), size)))


def blob_names(call: Call) -> None:
    """Names of the blobs held."""
    model = call.fingerprint()
    call.no_payload()
    with call.core.admission.slot():
        call.answer({"names": sorted(call.core.store.blobs.names((call.namespace, model)))})
