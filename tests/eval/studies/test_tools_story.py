"""The tools story, small, on a tiny model: what a prefix cache loses is what stands behind the change."""

from __future__ import annotations

import json

import pytest

from eval.running.setting import Setting
from eval.studies import tools_story
from kvcomm import Balanced
from tests.eval.tiny_setting import tiny_setting


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, float]]:
    out = tmp_path_factory.mktemp("story") / "story.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Setting, "load", lambda name: tiny_setting())
        patch.setitem(tools_story.POLICIES, "kvcomm", Balanced(gate=False))  # on so small a model dense may be faster
        tools_story.tools_story(questions=1, repeats=1, learned=2, model=None, out=out)
    table = json.loads(out.read_text())["table"]
    return {(entry["form"], entry["change"]): entry for entry in table}


def test_a_prefix_cache_loses_what_stands_behind_the_change(story: dict[tuple[str, str], dict[str, float]]) -> None:
    def hit(form: str, change: str, method: str = "exact") -> float:
        return story[form, change][f"hit_{method}"]["value"]  # type: ignore[index]

    assert hit("as given", "nothing changed") > 0.9
    assert hit("as given", "one inserted first") < 0.05
    assert 0.2 < hit("as given", "one removed") < 0.6
    assert hit("as given", "two swapped") < hit("canonical", "two swapped") > 0.9
    assert hit("canonical", "keys of one shuffled") > 0.9
    for form in tools_story.FORMS:
        assert hit(form, "one inserted first", "kvcomm") > 0.7


def test_every_line_has_times(story: dict[tuple[str, str], dict[str, float]]) -> None:
    assert len(story) == 12
    assert all(entry["ttft_exact"] > 0 and entry["ttft_kvcomm"] > 0 for entry in story.values())
