"""Calls about learned sums: a node's epoch, its snapshot in, the others' sum out; forgetting labels, retiring nodes."""

from __future__ import annotations

from collections.abc import Mapping

from kvcomm.errors import InvalidInput
from kvcomm.serve.call import Call
from kvcomm.serve.learned import Subject

_PAGE_BYTES = 4 << 20
MAX_NAME = 128


def sums_open(call: Call) -> None:
    """Begin a new epoch of a node; the answer carries its own snapshot as kept."""
    subject, node = _subject(call), call.asked.text("node", MAX_NAME)
    call.no_payload()
    with call.core.admission.slot():
        opened = call.core.learned.open(subject, node)
    header = {
        "epoch": opened.epoch, "kept_epoch": opened.kept[0], "kept_sequence": opened.kept[1],
        "found": opened.data is not None,
    }  # fmt: skip
    _answer(call, header, opened.data)


def sums_put(call: Call) -> None:
    """Keep a node's snapshot, which was uploaded in parts; the upload ends, kept or refused."""
    subject, node = _subject(call), call.asked.text("node", MAX_NAME)
    epoch, sequence = call.asked.integer("epoch", 0, 2**53), call.asked.integer("sequence", 1, 2**53)
    name = call.asked.digest("upload", 32)
    call.no_payload()
    with call.core.uploads.whole(call.grant.namespace, name) as upload:
        data = bytes(upload.data)
    with call.core.admission.slot():
        kept = call.core.learned.put(subject, node, epoch, sequence, data)
    call.answer({"kept": kept})


def sums_others(call: Call) -> None:
    """The sum over all other nodes, or that it is what the node knows already."""
    subject, node = _subject(call), call.asked.text("node", MAX_NAME)
    epoch, known = call.asked.integer("epoch", 0, 2**53), call.asked.text("known", 64)
    call.no_payload()
    with call.core.admission.slot():
        found = call.core.learned.others(subject, node, epoch, known)
    _answer(call, {"version": found.version, "found": found.data is not None}, found.data)


def sums_forget(call: Call) -> None:
    """Drop what all nodes learned at an agent's labels, ``agent/...``."""
    subject, agent = _subject(call), call.asked.text("agent", MAX_NAME)
    call.no_payload()
    if not agent:
        raise InvalidInput("no agent is named; name one, or delete the namespace")
    with call.core.admission.slot():
        count = call.core.learned.forget(subject, lambda label: label.partition("/")[0] == agent)
    call.core.on_admin("forget", call.grant, {"count": count})
    call.answer({"count": count})


def sums_retire(call: Call) -> None:
    """Forget a node and what it learned."""
    subject, node = _subject(call), call.asked.text("node", MAX_NAME)
    call.no_payload()
    with call.core.admission.slot():
        found = call.core.learned.retire(subject, node)
    call.core.on_admin("retire_node", call.grant, {"nodes": int(found)})
    call.answer({"found": found})


def _subject(call: Call) -> Subject:
    return Subject(call.namespace, call.fingerprint(), call.asked.text("template", MAX_NAME))


def _answer(call: Call, header: Mapping[str, object], data: bytes | None) -> None:
    view = memoryview(data or b"")
    call.answer_pages(header, (view[at : at + _PAGE_BYTES] for at in range(0, len(view), _PAGE_BYTES)))
