"""The live table and the waiting message, in a terminal and in a log."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from eval.demo.console import LiveTable
from eval.demo.result import Tokens
from eval.files.progress import waiting

ROW = {"prompt_tokens": 1204, "ttft_dense_s": 2.04, "ttft_exact_s": 1.95, "ttft_s": 0.37}


def shown(terminal: bool, width: int = 100) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, color_system=None)
    with LiveTable(["planner", "coder"], steps=3, title="Five agents", console=console) as table:
        table.step("measuring")
        table.update("coder", **ROW)  # type: ignore[arg-type]
        table.step("closeness")
        time.sleep(0.3 if terminal else 0)
        table.update("coder", tokens=Tokens(48, 1028, 96, 32), mean_kl=0.0171, top1_agreement=0.988)
        table.update("coder", first_token_agreement=1.0)
        table.step("done")
    return out.getvalue().replace("\u00a0", " ")


@pytest.mark.parametrize("terminal", [True, False])
def test_the_last_table_has_all_figures(terminal: bool) -> None:
    last = shown(terminal)[-1500:]
    words = "planner coder 1204 2.040 1.950 0.370 5.5× 48/1028/96/32 100_% 0.017 99_%"
    assert not [word for word in words.split() if word.replace("_", " ") not in last]


def test_a_terminal_of_80_columns_is_wide_enough() -> None:
    text = shown(terminal=False, width=80)
    assert "48/1028/96/32" in text and "…" not in text and max(map(len, text.splitlines())) <= 80


def test_a_log_says_how_far_it_is() -> None:
    assert "33 %  measuring" in shown(terminal=False)


def test_a_terminal_shows_a_bar_while_it_runs() -> None:
    assert "2/3" in shown(terminal=True)


def test_unknown_agents_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(KeyError), LiveTable(["a"], 1, console=Console(file=io.StringIO())) as table:
        table.update("b", prompt_tokens=1)


def test_waiting_is_silent_when_short_and_speaks_when_long(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting("a short thing", after_s=5.0):
        pass
    assert capsys.readouterr() == ("", "")
    with waiting("a long thing", after_s=0.05):
        time.sleep(0.3)
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("a long thing") == 2
