"""kvboost (PyPI), in this process on the very same weights: chunk reuse against its own baseline mode."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from eval.peers.base import Absent, Answer
from eval.running.setting import Setting
from kvcomm.reuse.prompt import Prompt

CACHE_BYTES = 2 << 30


@dataclass(frozen=True)
class KVBoost:
    """Fields: ``strategy``, what it recomputes: ``selective`` (its default), ``cacheblend`` or ``none``."""

    strategy: str = "selective"

    @property
    def name(self) -> str:
        """As it is reported."""
        return f"kvboost, {self.strategy}"

    @contextmanager
    def run(self, setting: Setting) -> Iterator[_Running]:
        """Load it over a copy of the model.

        Raises:
            Absent: it is not installed.
        """
        try:
            import kvboost
        except ImportError as error:
            raise Absent(
                f"kvboost cannot be imported ({error}); pip install --no-deps kvboost sentencepiece, or `make peers`"
            ) from None
        engine = kvboost.KVBoost(
            copy.deepcopy(setting.model), setting.tokenizer, max_cache_bytes=CACHE_BYTES, device="cpu",
            recompute_strategy=self.strategy,
        )  # fmt: skip
        yield _Running(engine, kvboost.GenerationMode, setting, metadata.version("kvboost"))


@dataclass(frozen=True)
class _Running:
    engine: Any
    modes: Any
    setting: Setting
    version: str

    def answer(self, prompt: Prompt, tokens: int, reuse: bool) -> Answer:
        """See Running; kvboost takes text and gives text."""
        mode = self.modes.CHUNK_KV_REUSE if reuse else self.modes.BASELINE
        found = self.engine.generate(self.setting.tokenizer.decode(prompt.token_ids), max_new_tokens=tokens, mode=mode)
        return Answer(found.ttft_ms / 1000, tuple(found.output_text), int(found.cached_tokens) if reuse else 0)
