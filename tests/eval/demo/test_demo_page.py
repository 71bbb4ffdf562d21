"""The page and the words: self-contained, well-formed, every number on it, honest where something was lost."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from eval.demo.page import demo_page
from eval.demo.report import write_page
from eval.demo.result import DemoResult, Tokens, read_demo
from eval.demo.words import as_text, plain_words
from eval.pages.quantities import NBSP, nats, percent, seconds, times
from eval.pages.svg import Bar, grouped_bars, log_dots, stacked_bars

FILE = Path(__file__).with_name("demo.json")
VOID = {"meta", "rect", "line", "circle", "br"}


class Tags(HTMLParser):
    """Checks that tags close in order; keeps the text and all attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def parsed(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    tags.close()
    assert tags.open == []
    return tags


@pytest.fixture
def result() -> DemoResult:
    return read_demo(FILE)


def test_the_page_asks_nobody_for_anything(result: DemoResult) -> None:
    html = demo_page(result)
    tags = parsed(html)
    assert not [value for name, value in tags.attributes if name in {"src", "href", "onload", "onclick", "action"}]
    assert "<script" not in html and "url(" not in html and "@import" not in html
    assert "default-src 'none'" in html and "prefers-color-scheme: dark" in html


def test_every_number_is_on_it(result: DemoResult) -> None:
    words = parsed(demo_page(result)).words
    text = " ".join(words)
    for agent in result.agents:
        assert agent.name in text and times(agent.speedup) in text and nats(agent.mean_kl) in text
        for value in (agent.ttft_dense_s, agent.ttft_exact_s, agent.ttft_s):
            assert f"{value:.3f} s" in text
        for count in dataclasses.astuple(agent.tokens):
            assert f"{count:.0f}" in text
    for word in (result.model_digest, result.policy, "2.13.0+cpu", "0.0011", "41", "30"):
        assert word in text
    assert result.command in "".join(words)


def test_text_from_outside_is_escaped(result: DemoResult) -> None:
    evil = "<script>alert(1)</script>&\"'"
    agents = tuple(dataclasses.replace(agent, name=evil) for agent in result.agents)
    html = demo_page(dataclasses.replace(result, agents=agents, model=evil, command=evil, versions={evil: evil}))
    parsed(html)
    assert "<script" not in html


def test_a_page_without_the_optional_fields(result: DemoResult) -> None:
    bare = DemoResult(result.model, result.model_digest, 2, {}, 0, result.agents[:1])
    html = demo_page(bare)
    parsed(html)
    assert "None" not in html and "nan" not in html and "bfloat16" not in html


def test_extreme_numbers_still_draw(result: DemoResult) -> None:
    zero = dataclasses.replace(
        result.agents[0], ttft_dense_s=0.0, ttft_exact_s=0.0, ttft_s=0.0, mean_kl=0.0, tokens=Tokens(0, 0, 0, 0)
    )
    huge = dataclasses.replace(result.agents[1], ttft_dense_s=1e5, mean_kl=40.0)
    for agents in ((zero,), (zero, huge), (huge, zero)):
        html = demo_page(dataclasses.replace(result, agents=agents))
        parsed(html)
        assert "nan" not in html


def test_the_page_stands_beside_its_results(tmp_path: Path) -> None:
    (tmp_path / "demo.json").write_text(FILE.read_text())
    assert write_page(tmp_path / "demo.json") == tmp_path / "demo.html"
    assert write_page(tmp_path / "demo.json", tmp_path / "other.html").read_text().startswith("<!doctype html>")


def test_words_say_gain_cost_and_next(result: DemoResult) -> None:
    text = as_text(plain_words(result)).replace(NBSP, " ")
    assert "0.37 s, 5.5 times sooner than with a full prefill (2.04 s)" in text
    assert "87 % of the prompt tokens of agents 2 to 5" in text
    assert "0.014 nats" in text and "13 times that" in text and "94 %" in text
    assert text.index("What was gained") < text.index("What it cost") < text.index("What to try next")


def test_words_admit_a_loss(result: DemoResult) -> None:
    slow = dataclasses.replace(result.agents[-1], ttft_s=3.0, mean_kl=0.9)
    text = as_text(plain_words(dataclasses.replace(result, agents=(*result.agents[:-1], slow)))).replace(NBSP, " ")
    assert "no sooner than with a full prefill (2.04 s)" in text and "policy=Exact()" in text


def test_words_for_equal_runs(result: DemoResult) -> None:
    same = dataclasses.replace(result.agents[1], mean_kl=0.0, top1_agreement=1.0)
    words = plain_words(dataclasses.replace(result, agents=(same, same)))
    assert words.cost == ["Nothing measurable: the model's distributions were those of a full prefill."]


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (seconds(0.0421), "42 ms"),
        (seconds(2.041), "2.04 s"),
        (seconds(41.3), "41 s"),
        (percent(0.5), "50 %"),
        (percent(1.0), "100 %"),
        (percent(0.9961), "99.6 %"),
        (percent(0.99999), "> 99.9 %"),
        (percent(0.004), "0.4 %"),
        (percent(0.00001), "< 0.1 %"),
        (percent(0.0), "0 %"),
        (nats(0.0), "0"),
        (nats(0.01372), "0.014"),
        (nats(0.0000042), "4e-6"),
        (times(5.513), "5.5×"),
        (times(1000.0), "1000×"),
    ],
)
def test_numbers_for_people(said: str, wanted: str) -> None:
    assert said.replace(NBSP, " ") == wanted


def widths(svg: str, css: str) -> list[float]:
    return [float(w) for w in re.findall(rf'width="([\d.]+)" height="[\d.]+" class="{css}"', svg)]


def test_bars_are_as_long_as_their_values() -> None:
    svg = grouped_bars(
        "t", [("a", [Bar("c-dense", 4.0, ""), Bar("c-reused", 1.0, "")]), ("b", [Bar("c-dense", 2.0, "")])]
    )
    (longest, half), (quarter,) = widths(svg, "c-dense"), widths(svg, "c-reused")
    assert half / longest == pytest.approx(0.5, abs=0.01) and quarter / longest == pytest.approx(0.25, abs=0.01)


def test_stacks_add_up_on_one_scale() -> None:
    svg = stacked_bars("t", [("a", [Bar("x", 30, ""), Bar("y", 70, "")], ""), ("b", [Bar("x", 50, "")], "")])
    assert widths(svg, "x") == pytest.approx([138.0, 230.0]) and widths(svg, "y") == pytest.approx([322.0])


def test_dots_stand_on_a_log_axis() -> None:
    rows = [("a", 0.001, ""), ("b", 0.01, ""), ("c", 0.1, ""), ("d", 0.0, "")]
    xs = [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', log_dots("t", rows, None))]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2) and xs[3] < xs[0]
