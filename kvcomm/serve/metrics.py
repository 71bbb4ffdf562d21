"""The tally in Prometheus' text format. Needs prometheus-client; its global registry is left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

from kvcomm.errors import InvalidInput
from kvcomm.serve.status import Snapshot
from kvcomm.serve.tally import BUCKETS_S


class Metrics:
    """Renders snapshots; labels are tiers, operations, reasons and at most 65 namespaces, all from closed lists.

    Args:
        snapshot: gives the service's present state.

    Raises:
        InvalidInput: prometheus-client is not installed.
    """

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        try:
            from prometheus_client import CollectorRegistry
        except ImportError as error:
            raise InvalidInput("metrics need prometheus-client; install kvcomm[serve]") from error
        self._snapshot = snapshot
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> tuple[str, bytes]:
        """Content type and text."""
        from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

        return CONTENT_TYPE_LATEST, generate_latest(self._registry)

    def describe(self) -> list[Any]:
        """Nothing: asked at registration, before there is a state."""
        return []

    def collect(self) -> Iterable[Any]:
        """All families of the present state; called by prometheus-client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        now = self._snapshot()

        def counter(name: str, what: str, labels: list[str]) -> Any:
            return CounterMetricFamily(f"kvcomm_{name}", what, labels=labels)

        def gauge(name: str, what: str, labels: list[str]) -> Any:
            return GaugeMetricFamily(f"kvcomm_{name}", what, labels=labels)

        hits = counter("hits", "Entries found, by tier.", ["namespace", "tier"])
        misses = counter("misses", "Entries not found.", ["namespace"])
        moved = counter("moved_bytes", "Bytes received and sent.", ["namespace", "direction"])
        held = gauge("held_bytes", "Bytes held.", ["namespace", "tier"])
        for space in now.namespaces:
            for tier, count in space.hits.items():
                hits.add_metric([space.name, tier], count)
            for tier, nbytes in space.nbytes.items():
                held.add_metric([space.name, tier], nbytes)
            misses.add_metric([space.name], space.misses)
            moved.add_metric([space.name, "received"], space.received)
            moved.add_metric([space.name, "sent"], space.sent)
        room = gauge("limit_bytes", "Most bytes that a tier may hold.", ["tier"])
        for state in now.tiers:
            room.add_metric([state.name], state.max_bytes)
        refused = counter("refusals", "Requests refused.", ["reason"])
        for reason, count in now.refusals.items():
            refused.add_metric([reason], count)
        seconds = HistogramMetricFamily("kvcomm_request_seconds", "Seconds to the answer.", labels=["operation"])
        for operation, latency in now.latency.items():
            edges = [*map(str, BUCKETS_S), "+Inf"]
            buckets = list(zip(edges, accumulate(latency.counts), strict=True))
            seconds.add_metric([operation], buckets, latency.total_s)
        leases = gauge("leases", "Leases held now.", [])
        leases.add_metric([], now.leases)
        connections = gauge("connections", "Connections open now.", [])
        connections.add_metric([], now.connections)
        return [hits, misses, moved, held, room, refused, seconds, leases, connections]
