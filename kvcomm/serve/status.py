"""The service's state as one value, and as a page for people: no script, nothing from elsewhere, everything escaped."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files

from kvcomm.serve.tally import MAX_NAMESPACES, OTHER, Latency, Slow, Tally

_WORDS = ' class="words"'


@dataclass(frozen=True)
class TierState:
    """A tier and what it may hold."""

    name: str
    nbytes: int
    max_bytes: int
    entries: int


@dataclass(frozen=True)
class NamespaceState:
    """A namespace's counts since the start, and what it holds now.

    ``hits`` and ``nbytes`` are by tier; an entry that is held in two tiers counts twice in ``entries``.
    """

    name: str
    entries: int = 0
    nbytes: Mapping[str, int] = field(default_factory=dict)
    hits: Mapping[str, int] = field(default_factory=dict)
    misses: int = 0
    received: int = 0
    sent: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Hits over look-ups; None before the first."""
        looked = sum(self.hits.values()) + self.misses
        return sum(self.hits.values()) / looked if looked else None


@dataclass(frozen=True)
class Snapshot:
    """All that the page and the metrics show. Times are Unix times in seconds."""

    version: str
    address: str
    started_s: float
    taken_s: float
    healthy: bool
    namespaces: Sequence[NamespaceState]
    tiers: Sequence[TierState]
    latency: Mapping[str, Latency]
    slowest: Sequence[Slow]
    refusals: Mapping[str, int]
    leases: int
    connections: int


@dataclass(frozen=True)
class Held:
    """What the store and catalogue know, for ``snapshot``: ``usage`` is (namespace, tier) -> (entries, bytes)."""

    tiers: Sequence[TierState]
    usage: Mapping[tuple[str, str], tuple[int, int]]
    leases: int
    connections: int


def snapshot(tally: Tally, held: Held, *, version: str, address: str, healthy: bool) -> Snapshot:
    """The counts of ``tally`` and what is held, together. Namespaces beyond the tally's 64 are one, ``other``."""
    with tally.lock:
        traffic = {name: (dict(t.hits), t.misses, t.received, t.sent) for name, t in tally.traffic.items()}
        latency = {o: Latency(list(v.counts), v.total_s, v.calls) for o, v in sorted(tally.latency.items())}
        refusals = dict(sorted(tally.refusals.items()))
    entries: dict[str, int] = {}
    nbytes: dict[str, dict[str, int]] = {}
    for (space, tier), (count, size) in sorted(held.usage.items()):
        known = space in traffic or space in nbytes or len({*traffic, *nbytes}) < MAX_NAMESPACES
        name = space if known else OTHER
        entries[name] = entries.get(name, 0) + count
        by_tier = nbytes.setdefault(name, {})
        by_tier[tier] = by_tier.get(tier, 0) + size
    namespaces = [
        NamespaceState(name, entries.get(name, 0), nbytes.get(name, {}), *traffic.get(name, ({}, 0, 0, 0)))
        for name in sorted({*traffic, *nbytes})
    ]
    return Snapshot(
        version, address, tally.started_s, tally.clock(), healthy, namespaces, held.tiers, latency, tally.slowest(),
        refusals, held.leases, held.connections,
    )  # fmt: skip


def page(now: Snapshot) -> str:
    """The whole document."""
    style = files("kvcomm.serve").joinpath("page.css").read_text(encoding="utf-8")
    looked = sum(sum(n.hits.values()) + n.misses for n in now.namespaces)
    hits = sum(sum(n.hits.values()) for n in now.namespaces)
    lead = f"{now.address}, version {now.version}, up {_duration(now.taken_s - now.started_s)}"
    tiles = [
        (_share(hits / looked if looked else None), "of look-ups hit", f"{hits:,} of {looked:,}"),
        (_size(sum(t.nbytes for t in now.tiers)), "held", f"in {len(now.tiers)} tiers"),
        (f"{now.leases:,}", "leases", f"{now.connections:,} connections"),
        (f"{sum(now.refusals.values()):,}", "refused", _largest(now.refusals)),
    ]
    state = "healthy" if now.healthy else "not healthy: a put or get of the last check failed"
    title = "kvcomm anchor service"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title><style>\n{style}</style></head>\n<body><main>\n"
        f'<header><h1>{title}</h1><p class="lead">{escape(lead)}</p>'
        f'<p class="state {"good" if now.healthy else "bad"}">{escape(state)}</p></header>\n'
        + _tiles(tiles)
        + _tiers(now.tiers)
        + _namespaces(now.namespaces)
        + _latencies(now.latency)
        + _slowest(now.slowest)
        + f"<footer>{escape(_date(now.taken_s))}. Counts are since the start; reload for newer ones.</footer>\n"
        "</main></body></html>\n"
    )


def _tiles(entries: Sequence[tuple[str, str, str]]) -> str:
    cells = "".join(
        f'<div class="tile"><b>{escape(number)}</b><span>{escape(what)}</span><small>{escape(more)}</small></div>'
        for number, what, more in entries
    )
    return f'<section class="tiles">{cells}</section>\n'


def _tiers(tiers: Sequence[TierState]) -> str:
    rows = "".join(
        f'<div class="bar"><span>{escape(t.name)}</span>'
        f'<meter min="0" max="1" value="{min(1.0, t.nbytes / max(1, t.max_bytes)):.4f}"></meter>'
        f"<small>{_size(t.nbytes)} of {_size(t.max_bytes)}, {t.entries:,} entries</small></div>"
        for t in tiers
    )
    return f"<section><h2>Bytes by tier</h2>{rows or '<p>No tier is open.</p>'}</section>\n"


def _namespaces(namespaces: Sequence[NamespaceState]) -> str:
    rows = [
        (n.name, _share(n.hit_rate), f"{n.misses:,}", f"{n.entries:,}", _size(sum(n.nbytes.values())),
         _size(n.received), _size(n.sent), ", ".join(f"{t} {hits:,}" for t, hits in n.hits.items() if hits) or "none")
        for n in namespaces
    ]  # fmt: skip
    columns = ("namespace", "hit rate", "misses", "entries", "held", "received", "sent", "hits by tier")
    return _table("Namespaces", columns, rows, "Nothing was asked or held yet.", words=7)


def _latencies(latency: Mapping[str, Latency]) -> str:
    rows = [
        (name, f"{v.calls:,}", _time(v.total_s / max(1, v.calls)), _below(v.quantile(0.5)), _below(v.quantile(0.99)))
        for name, v in latency.items()
    ]
    return _table("Calls", ("operation", "calls", "mean", "half", "99 %"), rows, "None yet.")


def _slowest(slowest: Sequence[Slow]) -> str:
    rows = [(s.operation, _time(s.seconds), _size(s.nbytes), _date(s.at_s), s.namespace) for s in slowest]
    columns = ("operation", "took", "bytes", "ended", "namespace")
    return _table("Slowest calls", columns, rows, "None yet.", words=4)


def _table(heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]], empty: str, words: int = 0) -> str:
    """A table that scrolls sideways by itself; column 0 names the row, column ``words`` is text and no number."""
    if not rows:
        return f"<section><h2>{escape(heading)}</h2><p>{escape(empty)}</p></section>\n"

    def cell(number: int, text: str) -> str:
        if number == 0:
            return f'<th scope="row">{escape(text)}</th>'
        return f"<td{_WORDS if number == words else ''}>{escape(text)}</td>"

    head = "".join(
        f'<th scope="col"{_WORDS if 0 < n == words else ""}>{escape(name)}</th>' for n, name in enumerate(columns)
    )
    body = "".join("<tr>" + "".join(cell(n, text) for n, text in enumerate(row)) + "</tr>" for row in rows)
    return (
        f'<section><h2>{escape(heading)}</h2><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{escape(heading)}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        "</section>\n"
    )


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} TiB"


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _below(seconds: float) -> str:
    return "over 10 s" if seconds == float("inf") else f"≤ {1000 * seconds:g} ms" if seconds < 1 else f"≤ {seconds:g} s"


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{hours // 24} d {hours % 24} h" if hours >= 24 else f"{hours} h {minutes % 60} min"


def _date(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_s))


def _largest(counts: Mapping[str, int]) -> str:
    return f"most: {max(counts, key=lambda k: counts[k])}" if counts else "none so far"
