"""The tables of docs/models.md, made of what the tests build.

    python -m tests.hf.models_table            write them to docs/models.md
    python -m tests.hf.models_table --check    fail if docs/models.md has others; writes nothing

A row of the first is read off a tiny model of the family and the backend that accepted it; one of the second is the
error that a model was refused with; one of the third names the test that shows it.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

from kvcomm.errors import UnsupportedModel
from kvcomm.hf.backend import HFBackend
from tests.hf.test_support import REFUSED
from tests.reuse.scene import backend_of
from tests.tiny_models import FAMILIES, KNOWN_AS, WITHOUT_ROPE
from tests.tiny_tokenizer import tiny_tokenizer

DOC = Path(__file__).resolve().parent.parent.parent / "docs" / "models.md"

SETTINGS: tuple[tuple[str, str, str], ...] = (
    ("float32", "supported", "tests/hf/test_exact.py::test_greedy_tokens_are_the_dense_runs"),
    (
        "bfloat16, float16",
        "supported, loaded with `from_pretrained(dtype=...)`",
        "tests/hf/test_backend.py::test_half_precision_loaded_as_it_should_be_works",
    ),
    (
        "`model.to(dtype)` afterwards",
        "refused: it rounds the rotary frequencies",
        "tests/hf/test_support.py::test_rounded_rotary_buffers_are_refused",
    ),
    ("eager attention", "supported", "tests/hf/test_backend.py::test_eager_attention_computes_the_same"),
    (
        "flash attention, flex attention",
        "refused: no masks over chosen positions",
        "tests/hf/test_support.py::test_attention_without_masks_is_refused",
    ),
    (
        "score caps, attention sinks",
        "supported, in the model's own attention",
        "tests/hf/test_attention.py::test_caps_and_sinks_keep_the_models_own_path",
    ),
    (
        "sliding windows shorter than the prompt",
        "supported",
        "tests/hf/test_backend.py::test_generate_goes_on_from_the_cache",
    ),
    (
        "PEFT adapters",
        "supported inside the model (`get_base_model()`, `add_adapter`); part of the fingerprint, and switching one is noticed",  # noqa: E501
        "tests/hf/test_adapters.py::test_switching_an_adapter_changes_the_fingerprint_and_is_noticed",
    ),
    (
        "`PeftModel` itself",
        "refused: pass the model inside",
        "tests/hf/test_adapters.py::test_a_peft_model_is_refused",
    ),
    (
        "GGUF, dequantised when loaded",
        "supported: the real model of the tests is one",
        "tests/hf/test_exact.py::test_greedy_tokens_are_the_dense_runs",
    ),
    (
        "quantised tensors (torchao, bitsandbytes)",
        "refused",
        "tests/hf/test_support.py::test_quantised_tensors_are_refused_by_name",
    ),
    (
        "several devices (`device_map` over two, offloading)",
        "refused",
        "tests/hf/test_support.py::test_a_model_in_several_places_is_refused",
    ),
    ("`torch.compile`", "refused", "tests/hf/test_support.py::test_a_compiled_model_is_refused"),
    ("training mode", "refused", "tests/hf/test_support.py::test_training_mode_is_refused"),
)
"""Ways to load a model: what it is, what becomes of it, the test."""


def families() -> str:
    """The supported families."""
    head = ("family", "known as", "class", "layers", "positions", "chosen positions run")
    rows = []
    for family in FAMILIES:
        backend = backend_of(family)
        windows = Counter("full" if window is None else "sliding" for window in backend.spec.windows)
        layers = ", ".join(f"{count} {kind}" for kind, count in sorted(windows.items()))
        ropes = sorted({layer.rope_type for layer in backend.spec.rope.layers if layer is not None})
        without = len(WITHOUT_ROPE.get(family, ()))
        rows.append(
            (
                family,
                KNOWN_AS[family],
                f"`{type(backend.model).__name__}`",
                layers,
                ", ".join(ropes) + (f"; {without} layer without" if without else ""),
                "grouped attention" if backend.grouped else f"the model's own ({backend._implementation})",
            )
        )
    return _table(head, rows)


def refusals() -> str:
    """The refused ones and what is said of each."""
    rows = []
    for name, (build, _) in REFUSED.items():
        try:
            HFBackend(build(), tiny_tokenizer())
        except UnsupportedModel as error:
            said = re.sub(r"by \d\.\de[+-]\d+ ", "", str(error))  # a measured difference is not the same everywhere
            rows.append((name, said.replace("|", "\\|")))
        else:
            raise SystemExit(f"{name} is accepted: move it to FAMILIES in tests/tiny_models.py")
    return _table(("model", "what the error says"), rows)


def settings() -> str:
    """Ways to load a model; a row whose test is gone is an error."""
    for what, _, test in SETTINGS:
        path, _, name = test.partition("::")
        if f"def {name}(" not in (DOC.parent.parent / path).read_text(encoding="utf-8"):
            raise SystemExit(f"{what}: there is no {test}")
    rows = [(what, verdict, f"`{test.removeprefix('tests/')}`") for what, verdict, test in SETTINGS]
    return _table(("loaded as", "", "test"), rows)


def current(text: str) -> str:
    """``text`` with each table between its markers."""
    for name, made in (("families", families()), ("refusals", refusals()), ("settings", settings())):
        begin, end = f"<!-- {name}: python -m tests.hf.models_table -->\n", f"\n<!-- end of {name} -->"
        head, rest = text.split(begin)
        text = head + begin + made + end + rest.split(end)[1]
    return text


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *rows))


if __name__ == "__main__":
    before = DOC.read_text(encoding="utf-8")
    after = current(before)
    if "--check" in sys.argv[1:]:
        sys.exit(before != after and "docs/models.md is not current: run python -m tests.hf.models_table")
    DOC.write_text(after, encoding="utf-8")
