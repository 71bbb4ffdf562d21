"""Overload, what latency tells of other tenants, strangers, and clocks that jump, each in a short form.

Limits in time are those that a busy machine keeps; ``python -m tests.soak.service`` checks the promised ones.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvcomm.serve.claims import Claims
from kvcomm.store import Attributes
from kvcomm.store.testing import fingerprint, same, sample
from kvcomm.transfer.remote import RemoteStore
from tests.serve.here import service_here
from tests.soak.service_load import overload, probes, strangers

WIDE = fingerprint(16, 4, 64)


def test_ten_times_as_many_clients_are_refused_soon_and_leave_nothing_behind() -> None:
    found = overload(1.0, 3)
    assert found["refused"] == 3 * 72
    assert found["refused_p50_ms"] < 250  # 50 ms at the 99th percentile on a quiet machine
    assert found["kept"] > 0.4  # 0.95 there


def test_latency_tells_of_the_own_texts_and_not_of_others() -> None:
    found = probes(100)
    assert abs(found["auc_across"] - 0.5) < 0.17  # four standard deviations of 100 against 100
    assert found["auc_control"] > 0.8


def test_nothing_of_strangers_is_found() -> None:
    found = strangers(700)
    assert found["foreign_hits"] == 0
    assert found["own_hits"] == found["own_tries"] == 35


@pytest.mark.parametrize("jump_s", [86400.0 * 400, -86400.0 * 400])
def test_the_clock_of_day_may_jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    real, ahead = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + ahead[0])
    key, entry = sample(1, tokens=100, model=WIDE)  # 3 MiB, in parts
    with service_here(tmp_path) as (service, address), RemoteStore(address) as store:
        lived = sample(2, attributes=Attributes(ttl_s=3600.0))
        assert store.put(*lived).stored
        upload = service.core.uploads.begin("one", "ab" * 16, 1000, 5.0)
        holder = service.core.claims.take("k", 5.0)
        pinned = store.get(lived[0])
        assert pinned is not None
        ahead[0] = jump_s
        assert service.core.uploads.find("one", "ab" * 16) is upload
        assert service.core.claims.take("k", 5.0) is None
        assert service.core.claims.give_back("k", holder)
        with pinned:
            assert same(pinned.read(), lived[1].kv)
        started = time.monotonic()
        assert store.put(key, entry, deadline_s=20.0).stored
        handle = store.get(key, deadline_s=20.0)
        assert handle is not None
        with handle:
            assert same(handle.read(), entry.kv)
        assert time.monotonic() - started < 20.0


def test_leases_run_by_the_clock_that_never_jumps() -> None:
    now = [100.0]
    claims = Claims(clock=lambda: now[0])
    assert claims.take("k", 10.0) is not None
    now[0] = 109.9
    assert claims.take("k", 10.0) is None
    now[0] = 110.0
    assert claims.take("k", 10.0) is not None
