"""What passes of a model take on this machine: three rates of a prefill, two of scattered tokens, one of moving KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvcomm.checks import need, need_all
from kvcomm.errors import InvalidInput
from kvcomm.reuse.backend import KVBuffer, ModelBackend
from kvcomm.reuse.splice import cut, splice

Clock = Callable[[], float]
LARGEST_RATE_S = 1e6  # of anything that a rate stands for
_PREFILLS = (32, 128, 384)
_PASSES = (8, 64)
_REPEATS = 2


@dataclass(frozen=True)
class Rates:
    """Seconds: overhead, a token and a pair of tokens of a prefill; the same of a pass; a byte moved.

    Raises:
        InvalidInput: there are not as many, or one is no finite number of 0 or more.
    """

    prefill: tuple[float, float, float]
    recompute: tuple[float, float]
    byte: float

    def __post_init__(self) -> None:
        for name, several, count in (("prefill", self.prefill, 3), ("recompute", self.recompute, 2)):
            need_all(several, (int, float), name, f"give {count} numbers of seconds")
            if len(several) != count:
                raise InvalidInput(f"{name} has {len(several)} rates; give {count} numbers of seconds")
        need(self.byte, (int, float), "byte", "give seconds a byte")
        for seconds in (*self.prefill, *self.recompute, self.byte):
            if not 0.0 <= seconds <= LARGEST_RATE_S:
                raise InvalidInput(f"a rate is {seconds}; give seconds from 0 to {LARGEST_RATE_S:g}")

    def dense_s(self, head: int, tokens: int, byte: float) -> float:
        """Of computing a prompt of ``tokens`` behind an exact head, of ``byte`` bytes a token, that is moved."""
        a, b, c = self.prefill
        return a + b * (tokens - head) + c * (tokens**2 - head**2) + self.byte * byte * head

    def reuse_s(self, recomputed: float, tokens: int, moved_bytes: float) -> float:
        """Of moving what is held and running so many tokens, spread over a prompt of ``tokens``, and its last one."""
        a, b = self.recompute
        return a + (b + self.prefill[2] * tokens) * recomputed + self.byte * moved_bytes + self.step_s

    @property
    def step_s(self) -> float:
        """Of one token."""
        return self.prefill[0] + self.prefill[1]


@torch.inference_mode()
def measure_rates(backend: ModelBackend, clock: Clock) -> Rates:
    """Rates of ``backend``'s model, measured on it in a second or two, in about a dozen passes."""
    spec = backend.spec
    sizes = [n for n in _PREFILLS if n <= spec.max_positions] or [spec.max_positions]
    ids = [(7 * n + 1) % spec.vocab_size for n in range(sizes[-1])]

    def once(work: Callable[[], object]) -> float:
        before = clock()
        work()
        if spec.device.type == "cuda":
            torch.cuda.synchronize(spec.device)
        return max(clock() - before, 0.0)

    def timed(work: Callable[[], object]) -> float:
        return min(once(work) for _ in range(_REPEATS))  # other work on the machine only ever adds

    def prefill(tokens: int) -> KVBuffer:
        buffer = backend.buffer(tokens)
        backend.forward(buffer, ids[:tokens], range(tokens), 1)
        return buffer

    prefill(sizes[0])  # what is made at the first pass is not the rate
    dense = [timed(lambda n=n: prefill(n)) for n in sizes]  # type: ignore[misc]
    whole = prefill(sizes[-1])

    def recompute(tokens: int) -> object:
        at = sorted({(n * sizes[-1]) // tokens for n in range(tokens)})
        return backend.forward(whole, [ids[p] for p in at], at, 0)

    few = [n for n in _PASSES if n < sizes[-1]] or [1]
    recompute(few[0])
    passes = [timed(lambda n=n: recompute(n)) for n in few]  # type: ignore[misc]
    part = cut(whole, spec, 0, sizes[-1])
    splice(whole, spec, part, 0)
    moved = timed(lambda: splice(whole, spec, part, 0))
    a, b, c = _curve(sizes, dense)
    slope = (passes[-1] - passes[0]) / max(few[-1] - few[0], 1)
    per_token = max(slope - c * sizes[-1], b)  # scattered tokens never cost less than those of a prefill
    return Rates(
        (a, b, c), (max(passes[0] - (per_token + c * sizes[-1]) * few[0], 0.0), per_token), moved / max(part.nbytes, 1)
    )


def _curve(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float, float]:
    """a + b n + c n² through the points, none of the three below 0."""
    n, y = np.array(sizes, dtype=float), np.array(seconds)
    for terms in ((0, 1, 2), (0, 1), (1, 2), (1,)):
        if len(terms) > len(n):
            continue
        solved = np.linalg.lstsq(n[:, None] ** np.array(terms), y, rcond=None)[0]
        if (solved >= 0).all():
            found = dict(zip(terms, map(float, solved), strict=True))
            return found.get(0, 0.0), found.get(1, 0.0), found.get(2, 0.0)
    return 0.0, float(y[-1] / n[-1]), 0.0
