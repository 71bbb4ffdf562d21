"""What a measurement ran on and with: model, machine, versions, engines, a bfloat16 copy for the yardstick."""

from __future__ import annotations

import copy
import hashlib
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvcomm
from eval.files.progress import waiting
from eval.models.default import load, model_digest
from kvcomm import Engine

_PACKAGES = ("kvcomm", "torch", "transformers", "numpy")


@dataclass(frozen=True)
class Setting:
    """A loaded model with what the output has to say about it.

    Attributes:
        source: what ``load`` was given, for another process that loads the same.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    digest: str
    source: str | None = None

    @classmethod
    def load(cls, name: str | None) -> Setting:
        """Load a model by HuggingFace id or folder, the default one for None."""
        with waiting("Loading the model"):
            model, tokenizer = load(name)
        return cls(model, tokenizer, name or "SmolLM2-135M-Instruct", model_digest(model), name)

    def engine(self, **arguments: Any) -> Engine:
        """A new engine; the digest of the weights is computed once for all of them."""
        return Engine(self.model, self.tokenizer, weights=self.digest, **arguments)

    def rounded(self) -> Engine:
        """An engine on a bfloat16 copy of the model: its weights are rounded, its rotary buffers are not."""
        model = copy.deepcopy(self.model)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        return Engine(model, self.tokenizer, weights=f"{self.digest} in bfloat16", learn=False)

    def describe(self) -> dict[str, Any]:
        """Model, digest, threads, versions, the digest of the code and the machine, for the output."""
        return {
            "model": self.name,
            "model_digest": self.digest,
            "threads": torch.get_num_threads(),
            "versions": {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES},
            "code": code_digest(),
            "machine": machine(),
        }


def code_digest() -> str:
    """SHA-256 hex digest of the Python files of ``kvcomm/`` and ``eval/``: a version stands for many states of them."""
    hasher = hashlib.sha256()
    for package in (Path(__file__).parents[1], Path(kvcomm.__file__).parent):
        for file in sorted(package.rglob("*.py")):
            hasher.update(f"{package.name}/{file.relative_to(package).as_posix()}\n".encode())
            hasher.update(hashlib.sha256(file.read_bytes()).digest())
    return hasher.hexdigest()


def machine() -> str:
    """Processor and memory in words."""
    cpu = platform.processor() or platform.machine()
    memory = ""
    info = Path("/proc/cpuinfo")
    if sys.platform == "linux" and info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = f"{len(models)} × {models[0]}" if models else cpu
        total = Path("/proc/meminfo").read_text().split("\n", 1)[0].split()[1]
        memory = f", {int(total) / 2**20:.0f} GiB"
    return cpu + memory
