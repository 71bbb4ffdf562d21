"""The commands end to end on a tiny model kept in a folder; reports by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcomm.check.plot import as_svg, as_text, rank_correlation
from kvcomm.check.prompts import divided, read, shipped
from kvcomm.cli import app
from kvcomm.errors import InvalidInput
from kvcomm.reuse.calibration import read as read_calibration
from tests.tiny_models import FAMILIES
from tests.tiny_tokenizer import tiny_tokenizer

KEYS = {"model", "supported", "ok", "mean_kl", "yardstick_kl", "policy", "ttft_gain"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    model = FAMILIES["llama"]()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {
            "kind": "ab"[n % 2],
            "texts": [f"text {n} is about the {n * 7} things", "and so on, again"],
            "question": "how many?",
        }
        for n in range(12)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(path)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout


def test_one_object_and_exit_code(folder: str, prompts: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    given = ("check", "--model", folder, "--prompts", prompts, "--json", "--answer-tokens", "4")
    code, out = run(*given, "--max-kl", "1e-9", "--html", str(page))
    found = json.loads(out)
    assert KEYS <= found.keys() and found["supported"] is True and found["yardstick_kl"] > 0
    # Under a bound of next to nothing all is computed: exact, and no evidence that reuse is safe
    assert code == 1 and found["ok"] is False and found["policy"] == "Exact()"
    assert "nothing was reused" in found["reason"]
    assert found["methods"]["fast"]["above"] == 1.0 and found["methods"]["balanced"]["reuse"] == 0.0
    assert "<svg" in page.read_text(encoding="utf-8") and "<script" not in page.read_text(encoding="utf-8")
    code, out = run(*given, "--max-kl", "1000")
    assert code == 0 and json.loads(out)["ok"] is True and json.loads(out)["policy"] == "Balanced(max_kl=1000)"


def test_a_bound_that_is_not_kept_is_exit_code_one(
    folder: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A calibration that promises too much: the check measures, and is not taken in by it."""
    monkeypatch.setenv("KVCOMM_CALIBRATIONS", str(tmp_path))
    assert run("calibrate", "--model", folder, "--prompts", prompts, "--answer-tokens", "4")[0] == 0
    [path] = tmp_path.glob("*-float32.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["samples"] >= 20 and data["weights"]
    path.write_text(json.dumps(data | {"intercept": -40.0}), encoding="utf-8")
    code, out = run(
        "check", "--model", folder, "--prompts", prompts, "--json", "--answer-tokens", "4", "--max-kl", "1e-4"
    )
    assert code == 1 and json.loads(out)["ok"] is False and json.loads(out)["policy"] == "Exact()"
    assert json.loads(out)["calibrated"] is True


def test_calibrate_prints_and_plots(folder: str, prompts: str, tmp_path: Path) -> None:
    out, svg = tmp_path / "c.json", tmp_path / "c.svg"
    code, text = run(
        "calibrate",
        "--model",
        folder,
        "--prompts",
        prompts,
        "--answer-tokens",
        "4",
        "--out",
        str(out),
        "--svg",
        str(svg),
    )
    assert code == 0 and "predicted KL" in text and "rank correlation" in text
    assert read_calibration(out).dtype == "float32" and svg.read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.parametrize("extra", [("--prompts", "absent.jsonl"), ("--max-kl", "-1"), ()])
def test_errors_are_exit_code_two(extra: tuple[str, ...], tmp_path: Path) -> None:
    code, out = run("check", "--model", str(tmp_path / "no-model"), "--json", *extra)
    assert code == 2
    found = json.loads(out)
    assert KEYS <= found.keys() and found["ok"] is False and found["error"]


def test_an_unsupported_model_is_not_safe(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    code, out = run("check", "--model", str(tmp_path), "--json")
    found = json.loads(out)
    assert code == 1 and found["supported"] is False and found["reason"]


def test_shipped_prompts_are_of_several_kinds() -> None:
    examples = shipped()
    fill, measured = divided(examples)
    assert len({example.kind for example in examples}) >= 6
    assert {e.kind for e in fill} == {e.kind for e in measured} == {e.kind for e in examples}


@pytest.mark.parametrize(
    "line",
    ['{"texts": [], "question": "?"}', '{"texts": ["a"]}', "[]", "no", '{"texts": ["a"], "question": ""}',
     '{"texts": ["a"], "question": "?", "first": ["b", "c"]}', '{"texts": "abc", "question": "?"}'],
)  # fmt: skip
def test_a_wrong_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"texts": ["a"], "question": "?"}\n' + line, encoding="utf-8")
    with pytest.raises(InvalidInput, match="line 2"):
        read(path)


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(InvalidInput, match="too few"):
        divided(shipped()[:4])


def test_rank_correlation_by_hand() -> None:
    assert rank_correlation([(1, 10), (2, 20), (3, 30)]) == pytest.approx(1.0)
    assert rank_correlation([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1.0)
    assert rank_correlation([(1, 1), (2, 3), (3, 2), (3, 4)]) == pytest.approx(3 / 22.5**0.5)  # one tie
    assert rank_correlation([(1, 1), (2, 2)]) != rank_correlation([(1, 1), (2, 2)])  # not a number


def test_points_beyond_the_axes_are_drawn_at_their_edge() -> None:
    assert as_text([(1e-9, 1e3)]).count("o") == 1
    assert as_svg([(1e-9, 1e3)]).count("<circle") == 1


def example(**change: object) -> dict[str, object]:
    return {"kind": "a", "texts": ["one text", "and so on"], "question": "how many?", **change}


BAD_PROMPTS = {
    "deep": "[" * 20_000 + "]" * 20_000,
    "a very long number": "1" * 5_000,
    "zeros": "\0" * 50,
    "nothing": "",
    "half a character": json.dumps(example(question="\ud800")),
    "a text longer than the model": json.dumps(example(texts=["word " * 6000, "b"])),
}


@pytest.mark.parametrize("command", ["check", "calibrate"])
@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts_are_exit_code_two(folder: str, tmp_path: Path, command: str, name: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join([BAD_PROMPTS[name]] * 6), encoding="utf-8")
    result = CliRunner().invoke(app, [command, "--model", folder, "--prompts", str(path), "--answer-tokens", "2"])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert result.stderr.splitlines()[-1].startswith("kvcomm: ")


@pytest.mark.parametrize("command", ["check", "calibrate"])
def test_a_model_whose_files_are_damaged_is_exit_code_two(tmp_path: Path, command: str) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    result = CliRunner().invoke(app, [command, "--model", str(tmp_path)])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit) and "does not load" in result.stderr


def test_kinds_and_texts_may_hold_what_terminals_and_lines_take_for_marks(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    line = json.dumps(example(kind="[/b]", texts=["one\u2028line\u0085of", "text"]), ensure_ascii=False)
    path.write_text("\n".join([line] * 5), encoding="utf-8")
    assert len(read(path)) == 5
    result = CliRunner().invoke(app, ["check", "--model", folder, "--prompts", str(path), "--answer-tokens", "2"])
    assert result.exit_code in (0, 1) and isinstance(result.exception, SystemExit | None)
    assert "mean KL by kind: [/b]" in result.stdout


def test_a_file_of_prompts_without_an_end_is_refused() -> None:
    with pytest.raises(InvalidInput, match="more than 67108864 bytes"):
        read(Path("/dev/zero"))
