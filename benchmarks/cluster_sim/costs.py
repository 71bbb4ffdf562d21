"""Unit costs, each with where it comes from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from kvcomm.errors import InvalidInput

DEFAULT = Path(__file__).parent / "costs.json"


@dataclass(frozen=True)
class Costs:
    """What one unit of work costs; units in ``costs.json``.

    Attributes:
        dense_a_s, dense_b_s: computing a token behind n others takes ``dense_a_s + dense_b_s * n``.
        splice_s: moving a reused token to its place. ``recompute_share`` of the reused tokens are computed besides.
        last_token_s: what every call pays. ``decode_s``: a generated token.
        service_call_s: a look-up in a shard of the service, which moves ``service_bytes_s``, one request at a time.
    """

    dense_a_s: float
    dense_b_s: float
    splice_s: float
    recompute_share: float
    last_token_s: float
    decode_s: float
    bytes_per_token: float
    node_bytes: float
    disk_bytes: float
    disk_bytes_s: float
    service_bytes: float
    service_bytes_s: float
    service_call_s: float
    network_bytes_s: float
    network_rtt_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or value < 0:
                raise InvalidInput(f"cost {field.name}={value} is not a number of at least 0; correct the file")

    def dense_s(self, tokens: float, before: float = 0.0) -> float:
        """Seconds to compute ``tokens`` in a row behind ``before`` others."""
        return self.dense_a_s * tokens + self.dense_b_s * (before * tokens + tokens * tokens / 2)


def read(path: Path = DEFAULT) -> tuple[Costs, Mapping[str, str]]:
    """(costs, source of each). Raises InvalidInput unless each cost has a value and a source."""
    found = json.loads(path.read_text())
    names = {field.name for field in fields(Costs)}
    if set(found) != names:
        raise InvalidInput(f"{path} must name {sorted(names)}; it differs in {sorted(set(found) ^ names)}")
    for name, item in found.items():
        if not item.get("source") or not item.get("unit"):
            raise InvalidInput(f"{path}: {name} has no source or no unit; say where the number comes from")
    costs = Costs(**{name: float(item["value"]) for name, item in found.items()})
    return costs, {name: f"{item['value']:g} {item['unit']}: {item['source']}" for name, item in found.items()}
