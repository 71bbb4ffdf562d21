"""Calls that change what is held: put in one frame or in parts, blobs, deletions, times to live, flights."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from dataclasses import replace

from kvcomm.errors import AccessDenied
from kvcomm.serve.call import Call
from kvcomm.serve.uploads import PART_BYTES
from kvcomm.store.base import MAX_GROUP_CHARS, MAX_LEASE_S, Deadline, Entry, Receipt
from kvcomm.store.codec import entry_view
from kvcomm.store.disk import DiskStore
from kvcomm.store.drafts import Draft
from kvcomm.store.format import Head
from kvcomm.transfer.names import MAX_NBYTES

_LEASE_MS = int(MAX_LEASE_S * 1000)
_MAX_MS = 2**53
CLOCKS_APART_S = 60.0
ENDS_APART_S = 1.0


def put(call: Call) -> None:
    """A whole entry in one frame."""
    left = call.asked.optional_integer("left_ms", 1, _MAX_MS)
    call.asked.end()
    data = memoryview(call.payload())
    with call.core.admission.slot():
        receipt = _keep(call, *entry_view(data, call.grant.namespace), left)
    _answer(call, receipt)


def begin(call: Call) -> None:
    """Reserve room for a value that comes in parts; tells which parts are here already."""
    name, nbytes = call.asked.digest("upload", 32), call.asked.integer("nbytes", 1, MAX_NBYTES)
    lease_ms = call.asked.integer("lease_ms", 1, _LEASE_MS)
    key = call.key() if call.asked.truth("entry") else None
    call.no_payload()
    with call.core.admission.slot():
        if key is not None and call.core.store.contains(key, deadline_s=call.left_s()):
            call.answer({"held": True, "part_bytes": PART_BYTES, "parts": [], "durable": call.core.store.durable})
            return
        upload = call.core.uploads.begin(
            call.grant.namespace, name, nbytes, lease_ms / 1000, entry=key is not None
        )  # fmt: skip
    call.answer({"held": False, "part_bytes": PART_BYTES, "parts": sorted(upload.parts), "durable": False})


def part(call: Call) -> None:
    """One part of an upload, received where it belongs."""
    name, number = call.asked.digest("upload", 32), call.asked.integer("part", 0, 2**20)
    call.asked.end()
    upload = call.core.uploads.find(call.grant.namespace, name)
    with call.core.uploads.part(upload, number, call.preamble.payload_bytes) as room:
        call.payload_into(room)
    call.answer()


def commit(call: Call) -> None:
    """Keep an entry all of whose parts arrived."""
    name, left = call.asked.digest("upload", 32), call.asked.optional_integer("left_ms", 1, _MAX_MS)
    call.no_payload()
    with call.core.uploads.whole(call.grant.namespace, name) as upload, call.core.admission.slot():
        receipt = _keep(call, *upload.checks.finish(), left, upload.draft)
    _answer(call, receipt)


def abort(call: Call) -> None:
    """Give an upload up."""
    name = call.asked.digest("upload", 32)
    call.no_payload()
    call.core.uploads.end(call.core.uploads.find(call.grant.namespace, name))
    call.answer()


def blob_write(call: Call) -> None:
    """Replace a blob by an upload, if it still is what the caller has read."""
    name, old = call.asked.digest("upload", 32), call.asked.text("old", 64)
    model, blob = call.fingerprint(), call.asked.text("name", 64)
    call.no_payload()
    same = True

    def merge(found: bytes | None) -> bytes:
        nonlocal same
        same = blob_digest(found) == old
        if not same:
            raise _Changed()
        return data

    with call.core.uploads.whole(call.grant.namespace, name) as upload:
        data = bytes(upload.data)
        with call.core.admission.slot(), suppress(_Changed):
            call.core.store.blobs.update((call.namespace, model), blob, merge, deadline_s=call.left_s())
    call.answer({"written": same})


def blob_delete(call: Call) -> None:
    """Forget a blob."""
    model, name = call.fingerprint(), call.asked.text("name", 64)
    call.no_payload()
    with call.core.admission.slot():
        call.answer({"found": call.core.store.blobs.delete((call.namespace, model), name)})


def delete(call: Call) -> None:
    """Forget an entry."""
    key = call.key()
    call.no_payload()
    with call.core.admission.slot():
        found = call.core.store.delete(key, deadline_s=call.left_s())
    call.core.removed(key)
    if found:
        call.core.on_admin("delete", call.grant, {"key": key.digest})
    call.answer({"found": found})


def delete_group(call: Call) -> None:
    """Forget a group, and tell those who watch."""
    group = call.asked.text("group", MAX_GROUP_CHARS)
    call.no_payload()
    with call.core.admission.slot():
        count = call.core.store.delete_group(call.namespace, group, deadline_s=call.left_s()) if group else 0
    if not group:
        call.answer({"count": 0, "version": call.core.drops.last(call.grant.namespace)})
        return
    version = call.core.dropped(call.namespace, group)
    call.core.on_admin("delete_group", call.grant, {"entries": count, "version": version})
    call.answer({"count": count, "version": version})


def delete_namespace(call: Call) -> None:
    """Forget everything of the namespace, and tell those who watch."""
    call.no_payload()
    with call.core.admission.slot():
        count = call.core.store.delete_namespace(call.namespace, deadline_s=call.left_s())
        nodes = call.core.learned.delete_namespace(call.namespace)
    version = call.core.dropped(call.namespace, "")
    call.core.on_admin("delete_namespace", call.grant, {"entries": count, "nodes": nodes})
    call.answer({"count": count, "version": version})


def touch(call: Call) -> None:
    """Count a use, and perhaps renew a time to live."""
    key, ttl = (
        call.key(),
        call.asked.optional_integer("ttl_ms", 1, _MAX_MS),
    )
    call.no_payload()
    with call.core.admission.slot():
        seconds = None if ttl is None else ttl / 1000
        call.answer({"found": call.core.store.touch(key, ttl_s=seconds, deadline_s=call.left_s())})


def flush(call: Call) -> None:
    """Wait until everything acknowledged is as durable as it gets."""
    call.no_payload()
    with call.core.admission.slot():
        call.core.store.flush(deadline_s=call.left_s())
    call.answer()


def claim(call: Call) -> None:
    """Be the one who computes a missing key, or wait at most ``wait_ms`` for the one who is."""
    key = call.key()
    lease_ms, wait_ms = call.asked.integer("lease_ms", 1, _LEASE_MS), call.asked.integer("wait_ms", 1, _LEASE_MS)
    call.no_payload()
    holder, waited = None, Deadline(wait_ms / 1000)
    while not (held := call.core.store.contains(key, deadline_s=call.left_s())):
        holder = call.core.claims.take(key.digest, lease_ms / 1000)
        if holder is not None or not call.core.claims.wait(key.digest, waited):
            break
    call.answer({"held": held, "holder": holder or ""})


def unclaim(call: Call) -> None:
    """Give a claim back without having put the key."""
    key, holder = call.key(), call.asked.digest("holder", 32)
    call.no_payload()
    call.answer({"found": call.core.claims.give_back(key.digest, holder)})


def blob_digest(data: bytes | None) -> str:
    """SHA-256 hex digest of a blob; the empty text for none."""
    return "" if data is None else hashlib.sha256(data).hexdigest()


class _Changed(Exception):
    """Another client replaced the blob in between."""


def _keep(call: Call, head: Head, entry: Entry, left_ms: int | None, draft: Draft | None = None) -> Receipt:
    """Keep an entry that was checked: its file as it is if there is one, else as the store writes it."""
    if head.key.namespace != call.namespace:
        raise AccessDenied(f"the entry is of another namespace than the token's, {call.namespace}; use its token")
    entry.check(head.key)
    now, store = time.time(), call.core.store
    if left_ms is not None:
        entry = replace(entry, expires_s=now + left_ms / 1000)
    if draft is not None and isinstance(store, DiskStore) and _timely(head, entry.ends(now), now):
        receipt = store.adopt(draft, head, deadline_s=call.left_s())
    else:
        receipt = store.put(head.key, entry, deadline_s=call.left_s())
    call.core.claims.give_back(head.key.digest)
    if receipt.stored:
        call.core.added(head.key, entry)
    return receipt


def _timely(head: Head, ends: float | None, now: float) -> bool:
    """Whether what the client wrote by its clock holds by this one; if not, the entry is written anew."""
    if abs(head.created_s - now) > CLOCKS_APART_S or (head.expires_s is None) != (ends is None):
        return False
    return head.expires_s is None or ends is None or abs(head.expires_s - ends) <= ENDS_APART_S


def _answer(call: Call, receipt: Receipt) -> None:
    call.answer({"stored": receipt.stored, "durable": receipt.durable, "nbytes": receipt.nbytes})
