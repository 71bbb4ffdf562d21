"""Quantities as people read them: durations, shares, divergences, factors."""

from __future__ import annotations

NBSP = "\u00a0"


def seconds(value: float) -> str:
    """A duration for people: three figures at most."""
    if value < 0.0995:
        return f"{value * 1000:.0f}{NBSP}ms"
    return f"{value:.2f}{NBSP}s" if value < 9.995 else f"{value:.0f}{NBSP}s"


def percent(share: float) -> str:
    """A share, whole per cents; never 100 for what is not all, never 0 for what is not nothing."""
    rounded = round(share * 100)
    if (rounded == 100 and share < 1) or (rounded == 0 and share > 0):
        if 0.0005 <= share < 0.9995:
            return f"{share * 100:.1f}{NBSP}%"
        return f">{NBSP}99.9{NBSP}%" if share > 0.5 else f"<{NBSP}0.1{NBSP}%"
    return f"{rounded}{NBSP}%"


def nats(value: float) -> str:
    """A divergence: two figures."""
    if value < 1e-7:
        return "0" if value <= 0 else "<1e-7"
    return f"{value:.2g}" if value >= 1e-4 else f"{value:.0e}".replace("e-0", "e-")


def times(factor: float) -> str:
    """A speed-up: two or three figures."""
    return f"{factor:.1f}×" if factor < 99.5 else f"{factor:.0f}×"
