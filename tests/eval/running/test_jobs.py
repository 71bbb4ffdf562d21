"""Parts in several processes: finished ones stay, a dead one is named, an interruption ends them all."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eval.running.finished import Finished
from eval.running.jobs import Job, run_jobs, threads_each
from eval.running.setting import Setting
from eval.suite.files import read_suite
from eval.suite.presets import preset
from eval.suite.run import run_suite
from kvcomm.errors import InvalidInput
from tests.eval.tiny_setting import tiny_setting

pytestmark = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two processes at once need two cores")


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """The tiny model in a folder, which other processes load again."""
    folder, tiny = tmp_path_factory.mktemp("model"), tiny_setting()
    tiny.model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return replace(tiny, source=str(folder))


def told(setting: Setting, what: str) -> dict[str, object]:
    """A part that says where it ran, fails, or dies."""
    if what == "fail":
        raise InvalidInput("7 [/x] is too many; give 6")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "nan":
        return {"kl": float("nan")}
    if what == "stay":
        time.sleep(600)
    return {"process": os.getpid(), "threads": torch.get_num_threads(), "digest": setting.digest}


def jobs(*names: str) -> list[Job]:
    return [Job(f"{n}: {name}", 1.0, told, (name,)) for n, name in enumerate(names)]


def test_parts_run_elsewhere_each_with_its_share_of_threads(setting: Setting, tmp_path: Path) -> None:
    finished = Finished(tmp_path / "parts.jsonl", {})
    assert run_jobs(setting, jobs("a", "b", "c"), finished, 2) == []
    parts = [finished.get(name) for name in ("0: a", "1: b", "2: c")]
    assert os.getpid() not in {part["process"] for part in parts}
    assert len({part["process"] for part in parts}) == 2  # the third part takes a process that there is
    assert {part["threads"] for part in parts} == {threads_each(2)}
    assert {part["digest"] for part in parts} == {setting.digest}
    assert multiprocessing.active_children() == []


def test_one_that_fails_and_one_that_is_killed_are_named_and_the_rest_goes_on(
    setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = Finished(tmp_path / "parts.jsonl", {})
    names = ("a", "die", "fail", "b")
    failures = run_jobs(setting, jobs(*names), finished, 2)
    assert {f.name: f.error for f in failures} == {
        "1: die": "its process ended with status -9",
        "2: fail": "InvalidInput: 7 [/x] is too many; give 6",
    }
    said = capsys.readouterr().err
    assert "left" in said and "1: die failed" in said
    assert [Finished(tmp_path / "parts.jsonl", {}).get(f"{n}: {name}") is None for n, name in enumerate(names)] == [
        False, True, True, False,
    ]  # fmt: skip
    failed = [replace(job, arguments=("well",)) for job in jobs(*names)]
    assert run_jobs(setting, failed, Finished(tmp_path / "parts.jsonl", {})) == []  # in this process now
    said = capsys.readouterr().err
    assert "0: a: done before" in said and "1: die: done before" not in said


@pytest.mark.parametrize("count", [1, 2])
def test_a_figure_that_is_no_number_fails_its_part_alone(setting: Setting, tmp_path: Path, count: int) -> None:
    finished = Finished(tmp_path / "parts.jsonl", {})
    (failure,) = run_jobs(setting, jobs("nan", "a"), finished, count)
    assert failure.name == "0: nan" and "JSON" in failure.error and finished.get("1: a") is not None


def test_without_the_same_model_each_part_says_so(setting: Setting, tmp_path: Path) -> None:
    other = replace(setting, digest="f" * 64)
    (failure,) = run_jobs(other, jobs("a"), Finished(tmp_path / "parts.jsonl", {}), 2)
    assert failure.name == "0: a" and "changed while it was measured" in failure.error


INTERRUPTED = """
import signal
import sys
from pathlib import Path
from dataclasses import replace
from eval.running.finished import Finished
from eval.running.jobs import run_jobs
from tests.eval.running.test_jobs import jobs
from tests.eval.tiny_setting import tiny_setting

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background
    setting = replace(tiny_setting(), source=sys.argv[1])
    run_jobs(setting, jobs("a", "stay", "b", "stay"), Finished(Path(sys.argv[2]), {}), 2)
"""


def alive(group: int) -> list[str]:
    """Processes of the group that run; one that ended and was not waited for yet does not."""
    every = subprocess.run(["ps", "-A", "-o", "pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    lines = [line.split(None, 2) for line in every.splitlines()]
    return [line[-1] for line in lines if line[0] == str(group) and not line[1].startswith("Z")]


def interrupt(group: int) -> None:
    """As a terminal does: every process of the group has it."""
    os.killpg(group, signal.SIGINT)


@pytest.mark.parametrize(
    ("end", "status"),
    [(interrupt, signal.SIGINT), (lambda first: os.kill(first, signal.SIGTERM), signal.SIGTERM),
     (lambda first: os.kill(first, signal.SIGKILL), signal.SIGKILL)],
    ids=["interrupted", "ended", "killed"],
)  # fmt: skip
def test_the_end_of_the_first_process_ends_all_and_leaves_what_is_done(
    setting: Setting, tmp_path: Path, end: Callable[[int], None], status: int
) -> None:
    script, parts = tmp_path / "run.py", tmp_path / "parts.jsonl"
    script.write_text(INTERRUPTED)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
    run = subprocess.Popen(
        [sys.executable, str(script), str(setting.source), str(parts)],
        start_new_session=True, env=environment, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 240
    while not (parts.exists() and len(parts.read_text().splitlines()) == 2):
        assert run.poll() is None and time.monotonic() < deadline, run.stderr and run.stderr.read()
        time.sleep(0.1)
    end(run.pid)
    said = run.communicate(timeout=240)[1]
    assert run.returncode == -status
    if status == signal.SIGINT:
        assert "2 of 4 are kept" in " ".join(said.split()) and "leaked" not in said
    while alive(run.pid):
        assert time.monotonic() < deadline + 300, alive(run.pid)
        time.sleep(0.1)
    assert {json.loads(line)["name"] for line in parts.read_text().splitlines()} == {"0: a", "2: b"}


def test_a_preset_in_two_processes_has_the_figures_of_one(setting: Setting, tmp_path: Path) -> None:
    cells = [replace(cell, trial=replace(cell.trial, prompts=1, fill_prompts=1)) for cell in preset("quick")[:2]]
    about = {"preset": "quick", "command": "python -m eval run", "seed": 0}
    results = []
    for count in (1, 2):
        out = tmp_path / f"{count}.json"
        assert run_suite(setting, cells, out, about, jobs=count) == []
        results.append(read_suite(out))
    assert [(r["jobs"], r["threads"]) for r in results] == [(1, threads_each(1)), (2, threads_each(2))]
    for one, two in zip(*(r["cells"] for r in results), strict=True):
        assert one["name"] == two["name"]
        for method, found in one["methods"].items():
            for figure in ("mean_kl", "reuse", "flops_saved"):
                assert two["methods"][method][figure]["value"] == pytest.approx(found[figure]["value"], abs=1e-5)


def test_numbers_of_processes_that_cannot_be(setting: Setting) -> None:
    for count in (0, -1, 10_000):
        with pytest.raises(InvalidInput, match="1 to"):
            threads_each(count)
