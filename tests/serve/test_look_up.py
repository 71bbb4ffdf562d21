"""Many keys in one call: how many calls it takes, whose keys can be asked about, and answers that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcomm.errors import AccessDenied, ProtocolError
from kvcomm.keys import CacheKey, Recipe
from kvcomm.serve import session
from kvcomm.serve.call import Call
from kvcomm.store.base import Deadline
from kvcomm.store.testing import ONE, TWO, sample
from kvcomm.transfer.frame import Kind
from kvcomm.transfer.names import MAX_LOOK_UP_BYTES, MAX_LOOKED_UP, look_ups, read_look_up
from kvcomm.transfer.remote import RemoteStore
from kvcomm.transfer.wire import Wire
from tests.serve.here import counted_calls, service_here
from tests.transfer.test_frame import connect


def test_a_prompt_s_keys_take_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [sample(n)[0] for n in range(MAX_LOOKED_UP + 1)]
    with service_here(tmp_path) as (_, address), RemoteStore(address) as store:
        store.put(*sample(5))
        calls = counted_calls(monkeypatch)
        assert store.contains_many(keys[:-1]) == [n == 5 for n in range(MAX_LOOKED_UP)]
        assert calls["contains_many"] == 1
        assert store.contains_many(keys) == [n == 5 for n in range(MAX_LOOKED_UP + 1)]
        assert calls["contains_many"] == 3
        store.contains_many([*keys[:4], sample(5, namespace=TWO)[0]])
        assert calls["contains_many"] == 5  # a call knows one namespace, its connection's
        assert set(calls) == {"contains_many"}


def test_long_keys_are_cut_to_what_a_call_may_have() -> None:
    short = sample(1)[0]
    keys = [CacheKey(ONE, short.fingerprint, short.content, Recipe("prompt", f"{n}/" + "é" * 4000, "", True))
            for n in range(MAX_LOOKED_UP)]  # fmt: skip
    pages = list(look_ups(keys))
    assert len(pages) > 1
    assert all(len(page) <= MAX_LOOK_UP_BYTES for _, page in pages)
    assert [key for _, page in pages for key in read_look_up(page, ONE)] == keys
    assert [count for count, _ in pages] == [len(read_look_up(page, ONE)) for _, page in pages]


def asked(wire: Wire, page: bytes) -> list[int]:
    wire.send(Kind.REQUEST, 9, {"call": "contains_many"}, Deadline(5.0), [memoryview(page)])
    preamble, header = wire.receive(Deadline(5.0))
    assert preamble.kind is Kind.ANSWER
    found = header["found"]
    assert isinstance(found, list)
    return found


def test_another_namespace_s_entries_are_not_found(tmp_path: Path) -> None:
    """The same lines, asked over connections of two namespaces, are two sets of keys; a store needs both tokens."""
    mine, theirs = sample(1)[0], sample(1, namespace=TWO)[0]
    ((_, page),) = look_ups([theirs])
    with service_here(tmp_path) as (_, address), RemoteStore(address) as store:
        store.put(*sample(1, namespace=TWO))
        for token, found in (("one", []), ("two", [0])):
            wire, _ = connect(address, token)
            assert asked(wire, page) == found
            wire.close()
        assert store.contains_many([mine, theirs]) == [False, True]
        with RemoteStore(address, tokens={"one": "one"}) as only, pytest.raises(AccessDenied):
            only.contains_many([mine, theirs])


@pytest.mark.parametrize(
    "answer",
    [{"found": [2]}, {"found": [-1]}, {"found": [0, 0, 0]}, {"found": [True]}, {"found": ["0"]}, {"found": None}, {},
     {"found": [0], "more": 1}],
    ids=json.dumps,
)  # fmt: skip
def test_an_answer_that_cannot_be_is_refused(
    tmp_path: Path, answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lie(call: Call) -> None:
        call.payload()
        call.answer(answer)

    monkeypatch.setitem(session.CALLS, "contains_many", session._Known("read", lie))
    with service_here(tmp_path) as (_, address), RemoteStore(address) as store, pytest.raises(ProtocolError):
        store.contains_many([sample(1)[0], sample(2)[0]])
