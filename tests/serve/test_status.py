"""Tally, page and metrics: right numbers, bounded, escaped, self-contained."""

import re
import sys
import threading
from html.parser import HTMLParser

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from kvcomm.errors import InvalidInput
from kvcomm.serve.metrics import Metrics
from kvcomm.serve.status import Held, Snapshot, TierState, page, snapshot
from kvcomm.serve.tally import BUCKETS_S, MAX_NAMESPACES, SLOWEST, Latency, Tally
from tests.serve.states import empty, full

EVIL = '<script src="https://evil.example/x.js">alert(1)</script>"\'&'


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def samples(now: Snapshot) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    kind, text = Metrics(lambda: now).render()
    assert kind.startswith("text/plain")
    families = text_string_to_metric_families(text.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def test_page_shows_the_numbers() -> None:
    text = Page(page(full())).text
    for expected in ("of look-ups hit", "triage", "research-team", "100.0 %", "5.0 GiB of 8.0 GiB, 412 entries",
                     "most: denied", "up 2 d 5 h", "healthy"):  # fmt: skip
        assert expected in text
    assert "not healthy" in Page(page(full(healthy=False))).text
    assert "Nothing was asked or held yet." in Page(page(empty())).text


def test_page_is_self_contained() -> None:
    for now in (full(), empty()):
        text = page(now)
        found = Page(text)
        assert not {"script", "link", "img", "iframe", "object", "form", "base", "a"} & set(found.tags)
        assert not {name for name, _ in found.attributes} & {"src", "href", "style", "action", "srcset"}
        assert not [name for name, _ in found.attributes if name.startswith("on")]
        assert not re.search(r"https?:|//|url\(|@import", text)


def test_everything_is_escaped() -> None:
    clean = page(full(namespaces=("n",)))
    tally = Tally()
    tally.hit(EVIL, "memory")
    tally.call("get", EVIL, 1.0)
    tally.refused(EVIL)
    held = Held((TierState(EVIL, 1, 2, 1),), {(EVIL, "memory"): (1, 1)}, 0, 0)
    text = page(snapshot(tally, held, version=EVIL, address=EVIL, healthy=True))
    found = Page(text)
    assert set(found.tags) <= set(Page(clean).tags)
    assert found.text.count(EVIL) >= 5 and EVIL not in text
    assert not [name for name, value in found.attributes if value and "evil" in value]


def test_metrics_show_the_numbers_and_leave_the_global_registry_alone() -> None:
    before = [family.name for family in REGISTRY.collect()]
    now = full()
    found = samples(now)
    space = now.namespaces[-1]
    assert found["kvcomm_hits_total", (("namespace", space.name), ("tier", "memory"))] == space.hits["memory"]
    assert found["kvcomm_misses_total", (("namespace", space.name),)] == space.misses
    assert found["kvcomm_refusals_total", (("reason", "denied"),)] == 3
    assert found["kvcomm_leases", ()] == 14
    calls = now.latency["open"].calls
    assert found["kvcomm_request_seconds_bucket", (("le", "+Inf"), ("operation", "open"))] == calls
    assert found["kvcomm_request_seconds_count", (("operation", "open"),)] == calls
    assert found["kvcomm_request_seconds_sum", (("operation", "open"),)] == pytest.approx(now.latency["open"].total_s)
    assert [family.name for family in REGISTRY.collect()] == before
    assert samples(empty())["kvcomm_connections", ()] == 0


def test_metrics_without_the_package_name_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(InvalidInput, match=r"kvcomm\[serve\]"):
        Metrics(full)
    assert "kvcomm anchor service" in page(full())  # the page needs nothing


def test_a_call_is_recorded_with_all_that_counts() -> None:
    tally = Tally()
    for outcome in ("ok", "ok", "miss", "denied"):
        tally.record("open", "one", outcome, 0.002, 10, 100)
    tally.record("put", "one", "ok", 0.002, 10, 100)
    traffic = tally.traffic["one"]
    assert (traffic.hits["disk"], traffic.misses, traffic.received, traffic.sent) == (2, 1, 50, 500)
    assert tally.refusals == {"denied": 1} and tally.latency["open"].calls == 4


def test_labels_are_bounded_whatever_is_asked() -> None:
    tally = Tally()
    usage = {}
    for n in range(1000):
        tally.hit(f"n{n}", f"tier{n}")
        tally.call(f"op{n}", f"n{n}", n / 100)
        tally.refused(f"why{n}")
        usage[f"m{n}", "memory"] = (1, 10)
    now = snapshot(tally, Held((), usage, 0, 0), version="1", address="x", healthy=True)
    assert len(now.namespaces) == MAX_NAMESPACES + 1
    assert sum(sum(n.hits.values()) for n in now.namespaces) == 1000
    assert sum(sum(n.nbytes.values()) for n in now.namespaces) == 10_000
    assert set(now.latency) == set(now.refusals) == {"other"}
    assert len(now.slowest) == SLOWEST and now.slowest[0].seconds == 9.99
    assert len(samples(now)) < 2000
    tally.forget("n0")
    assert "n0" not in tally.traffic


def test_quantiles_are_the_bucket_that_holds_the_call() -> None:
    latency = Latency()
    assert latency.quantile(0.5) == 0.0
    for seconds in [0.0005] * 98 + [0.2, 99.0]:
        latency.add(seconds)
    assert latency.quantile(0.5) == BUCKETS_S[0]
    assert latency.quantile(0.99) == 0.25
    assert latency.quantile(1.0) == float("inf")


def test_threads_lose_no_count() -> None:
    tally = Tally()

    def work() -> None:
        for _ in range(2000):
            tally.hit("one", "memory")
            tally.call("open", "one", 0.001)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tally.traffic["one"].hits["memory"] == tally.latency["open"].calls == 8000
