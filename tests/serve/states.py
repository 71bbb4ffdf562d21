"""A service's state as it could be, for the page and the metrics."""

from kvcomm.serve.status import Held, Snapshot, TierState, snapshot
from kvcomm.serve.tally import Tally

NOW = 1_780_000_000.0


def full(namespaces: tuple[str, ...] = ("triage", "research-team", "public"), healthy: bool = True) -> Snapshot:
    """A service that has worked for two days."""
    at = [NOW - 2 * 86400 - 5 * 3600]
    tally = Tally(lambda: at[0])
    at[0] = NOW
    for n, name in enumerate(namespaces):
        for k in range(40 - 9 * (n % 4)):
            tally.hit(name, ("memory", "disk", "peer")[k % 3])
            tally.call("open", name, 0.0004 * (k + 1) ** 1.5, 3 << 20)
            tally.record("entries", name, "ok", 0.0002, 80, 9000)
            tally.moved(name, sent=3 << 20, received=k << 18)
        for _ in range(7 * (n % 3)):
            tally.miss(name)
    for reason in ("denied", "denied", "invalid", "overloaded", "denied"):
        tally.refused(reason)
    tiers = (TierState("memory", 5 << 30, 8 << 30, 412), TierState("disk", 31 << 30, 100 << 30, 9120))
    usage = {(name, tier.name): (tier.entries // (n + 2), tier.nbytes // (n + 2)) for n, name in enumerate(namespaces)
             for tier in tiers}  # fmt: skip
    held = Held(tiers, usage, leases=14, connections=9)
    return snapshot(tally, held, version="0.1.0", address="unix:/run/kvcomm/anchors.sock", healthy=healthy)


def empty() -> Snapshot:
    """A service that was just started."""
    return snapshot(Tally(lambda: NOW), Held((), {}, 0, 0), version="0.1.0", address="127.0.0.1:7080", healthy=True)
