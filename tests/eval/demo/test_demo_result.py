"""The demo's results file: what it must hold, and what is said when it does not."""

from __future__ import annotations

import copy
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from eval.demo.result import DemoResult, demo_result, read_demo
from kvcomm.errors import InvalidInput

FILE = Path(__file__).with_name("demo.json")


@pytest.fixture
def data() -> dict[str, Any]:
    return json.loads(FILE.read_text())  # type: ignore[no-any-return]


def test_figures_by_hand(data: dict[str, Any]) -> None:
    result = demo_result(data)
    coder = result.agents[2]
    assert coder.tokens.total == coder.prompt_tokens == 713
    assert coder.speedup == pytest.approx(1.12 / 0.29)
    assert coder.reused == pytest.approx((47 + 570) / 713)
    assert result.mean("mean_kl") == pytest.approx((0.0042 + 0.013 + 0.021 + 0.017) / 4), "agent 1 is outside the mean"


def test_a_written_file_reads_back_as_the_same(data: dict[str, Any], tmp_path: Path) -> None:
    result = demo_result(data)
    result.write(tmp_path / "results" / "demo.json")
    assert read_demo(tmp_path / "results" / "demo.json") == result
    written = json.loads((tmp_path / "results" / "demo.json").read_text())
    assert all(written[key] == data[key] for key in data if key != "a key of a later version")


def test_optional_fields_may_be_left_out(data: dict[str, Any]) -> None:
    needed = {"model", "model_digest", "threads", "versions", "seed", "agents"}
    result = demo_result({key: value for key, value in data.items() if key in needed})
    assert isinstance(result, DemoResult) and result.workflow_s == {} and result.problems == 0


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("agents", 1, "mean_kl"), None, r"agents\[1\].mean_kl is None, a number"),
        (("agents", 0, "ttft_s"), math.nan, "ttft_s is nan"),
        (("agents", 0, "ttft_s"), -1.0, "ttft_s is -1.0, a number between 1e-09 and 1e"),
        (("agents", 0, "top1_agreement"), 99.0, "top1_agreement is 99.0, a number between 0 and 1 is"),
        (("agents", 0, "tokens", "new"), "7", "new is '7'"),
        (("agents", 0, "prompt_tokens"), True, "prompt_tokens is True"),
        (("agents", 0, "name"), 3, "name is 3, a text"),
        (("agents",), [], "at least one agent"),
        (("agents",), {"a": 1}, "at least one agent"),
        (("agents", 0), 5, r"agents\[0\] is int"),
        (("workflow_s",), {"dense": None}, "workflow_s.dense is None"),
        (("versions",), "2.13", "versions is '2.13', an object"),
        (("versions",), {"torch": {"a": [1]}}, "versions.torch is .*, a text"),
        (("agents", 0, "ttft_s"), 5e-324, "ttft_s is 5e-324, a number between 1e-09"),
        (("agents", 0, "prompt_tokens"), 10**400, "prompt_tokens is 1000"),
        (("agents", 0, "tokens", "new"), 1e308, "new is 1e.308"),
        (("agents", 0, "name"), "\ud800", "name is .*, half a surrogate pair"),
        (("workflow_s",), {"\ud800": 1.0}, "half a surrogate pair"),
    ],
)
def test_what_is_wrong_is_named(path: tuple[str | int, ...], value: object, message: str, data: dict[str, Any]) -> None:
    broken: Any = copy.deepcopy(data)
    place = broken
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(InvalidInput, match=message):
        demo_result(broken)


@pytest.mark.parametrize("key", ["model", "agents", "seed"])
def test_what_is_missing_is_named(key: str, data: dict[str, Any]) -> None:
    del data[key]
    with pytest.raises(InvalidInput, match=f"demo.{key} is missing"):
        demo_result(data)


def test_unreadable_files_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text(FILE.read_text()[:100])
    (tmp_path / "deep.json").write_text("[" * 200_000)
    os.mkfifo(tmp_path / "fifo.json")
    for name in ("absent.json", "cut.json", "deep.json", "fifo.json", ""):
        with pytest.raises(InvalidInput, match="python -m eval demo"):
            read_demo(tmp_path / name)
