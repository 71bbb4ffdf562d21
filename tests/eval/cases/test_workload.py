"""Cases: as long as asked for, fill and measured ones apart, a problem's own documents first and its answer kept."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from eval.cases.case_text import Tokens, fitted
from eval.cases.workload import Case, Workload, build
from eval.models.default import resolve
from eval.tasks import TASKS, Problem, make_task
from eval.tasks.prose import sentences
from eval.topologies import TOPOLOGIES
from kvcomm import Segment
from kvcomm.errors import InvalidInput
from kvcomm.hf.template import Template


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve(None))


@pytest.fixture(scope="module")
def problems() -> dict[str, list[Problem]]:
    return {name: make_task(name).problems() for name in TASKS}


def built(problems: Sequence[Problem], tokenizer: Any, topology: str = "full", **changed: int) -> Workload:
    sizes = dict(agents=5, prompt_tokens=1500, answer_tokens=64, measured=4, fill=8, seed=0) | changed
    if topology == "trading":
        sizes["agents"] = 19
    return build(problems, TOPOLOGIES[topology], tokenizer, **sizes)  # type: ignore[arg-type]


def length(workload: Workload, case: Case, tokenizer: Any) -> int:
    last = workload.nodes[-1]
    template = Template(last.name, last.template(), tokenizer)
    heard = {slot: case.references[name] for slot, name in last.slots.items()}
    return len(template.fill(case.slots | heard))


def texts(cases: Sequence[Case]) -> set[Segment]:
    return {segment for case in cases for segment in (*case.slots.values(), *case.references.values())}


SIZES = [(name, tokens, topology) for name in sorted(TASKS) for tokens in (800, 1500) for topology in ("full", "chain")]
SIZES += [("documents", 800, topology) for topology in sorted(set(TOPOLOGIES) - {"full", "chain"})]


@pytest.mark.parametrize(("name", "prompt_tokens", "topology"), SIZES)
def test_prompts_have_the_length_asked_for(
    name: str, prompt_tokens: int, topology: str, tokenizer: Any, problems: dict[str, list[Problem]]
) -> None:
    workload = built(problems[name], tokenizer, topology, prompt_tokens=prompt_tokens)
    for case in workload.measured + workload.fill:
        assert abs(length(workload, case, tokenizer) - prompt_tokens) <= 0.15 * prompt_tokens, case.problem.id
        assert len(case.slots) == 1 + workload.nodes[0].documents


@pytest.mark.parametrize("prompt_tokens", [800, 1500])
@pytest.mark.parametrize("name", sorted(TASKS))
def test_fill_and_measured_share_nothing(
    name: str, prompt_tokens: int, tokenizer: Any, problems: dict[str, list[Problem]]
) -> None:
    workload = built(problems[name], tokenizer, prompt_tokens=prompt_tokens, measured=20, fill=24)
    assert (len(workload.measured), len(workload.fill)) == (20, 24)
    assert not texts(workload.measured) & texts(workload.fill)
    shown = [
        {text for case in cases for text in case.problem.documents} for cases in (workload.measured, workload.fill)
    ]
    assert not shown[0] & shown[1]
    own = {s for case in workload.measured for text in case.problem.documents for s in sentences(text) if len(s) > 60}
    filled = "\n".join(tokenizer.decode(s.token_ids) for case in workload.fill for s in case.slots.values())
    assert not [sentence for sentence in own if sentence in filled]


@pytest.mark.parametrize("name", sorted(TASKS))
def test_no_text_stands_in_messages_of_both(name: str, tokenizer: Any, problems: dict[str, list[Problem]]) -> None:
    workload = built(problems[name], tokenizer, measured=6, fill=6)
    said = [
        "\n".join(tokenizer.decode(m.token_ids) for case in cases for m in case.references.values())
        for cases in (workload.measured, workload.fill)
    ]
    starts = Counter(problem.message[:40] for problem in problems[name] if len(problem.message) >= 40)
    both = [start for start, times in starts.items() if times == 1 and start in said[0] and start in said[1]]
    assert both == [] and all(any(start in text for start in starts) for text in said)


def test_short_messages_are_apart_too(tokenizer: Any, problems: dict[str, list[Problem]]) -> None:
    for name in ("humaneval", "maths"):
        workload = built(problems[name], tokenizer, measured=8, fill=8, answer_tokens=5)
        said = [{m for case in cases for m in case.references.values()} for cases in (workload.measured, workload.fill)]
        assert not said[0] & said[1]


@pytest.mark.parametrize("name", sorted(TASKS))
def test_the_same_seed_gives_the_same_cases(name: str, tokenizer: Any, problems: dict[str, list[Problem]]) -> None:
    first = built(problems[name], tokenizer, prompt_tokens=900, seed=3)
    assert first == built(problems[name], tokenizer, prompt_tokens=900, seed=3)
    assert first.measured != built(problems[name], tokenizer, prompt_tokens=900, seed=4).measured


@pytest.mark.parametrize("prompt_tokens", [800, 1500])
@pytest.mark.parametrize("name", ["documents", "needle", "tools"])
def test_own_documents_come_first_and_the_answering_one_is_whole(
    name: str, prompt_tokens: int, tokenizer: Any, problems: dict[str, list[Problem]]
) -> None:
    workload = built(problems[name], tokenizer, prompt_tokens=prompt_tokens, measured=12, fill=12)
    text = Tokens(tokenizer)
    for case in workload.measured + workload.fill:
        whole = [text.segment(document).token_ids for document in case.problem.documents]
        shown = [case.slots[f"document_{n + 1}"].token_ids for n in range(len(case.slots) - 1)]
        assert sum(any(full[: len(ids)] == ids for full in whole) for ids in shown) >= 3
        assert case.problem.answered_in is not None and whole[case.problem.answered_in] in shown[:5], case.problem.id


def test_documents_are_cut_by_hand(tokenizer: Any) -> None:
    text = Tokens(tokenizer)
    documents = tuple(
        f"{letter} " + "one two three four five " * times for letter, times in zip("ABCD", (8, 40, 40, 9), strict=True)
    )
    lengths = [len(text.segment(document)) for document in documents]
    problem = Problem("p", "?", documents, "", answered_in=2)
    assert [len(s) for s in fitted(problem, text, 9, 10_000)] == lengths
    room = lengths[0] + lengths[2] + lengths[3] + 50
    assert [len(s) for s in fitted(problem, text, 4, room)] == [lengths[0], 50, lengths[2], lengths[3]]
    two = fitted(problem, text, 2, 10_000)
    assert [s.token_ids[0] for s in two] == [text.segment(documents[n]).token_ids[0] for n in (0, 2)]
    assert [len(s) for s in fitted(problem, text, 3, 100)] == [32, 32, 36]


def own_task(folder: Path, count: int, shared: bool) -> list[Problem]:
    path = folder / "own.jsonl"
    handbook = "The handbook says that doors open at nine and close at five, save on Fridays, when nobody comes. " * 3
    with open(path, "w") as out:
        for n in range(count):
            mine = handbook if shared else f"{n} doors are painted in colour {n * 7}. " * (n % 3 + 3)
            record = {"question": f"What about door {n}?", "segments": [mine] * (n % 2), "answer": f"It is {n}."}
            out.write(json.dumps(record) + "\n")
    return make_task(str(path)).problems()


def test_an_own_task_without_problems_to_spare(tmp_path: Path, tokenizer: Any) -> None:
    workload = built(own_task(tmp_path, 12, shared=False), tokenizer, prompt_tokens=900)
    assert not texts(workload.measured) & texts(workload.fill)
    for case in workload.measured + workload.fill:
        assert abs(length(workload, case, tokenizer) - 900) <= 135


def test_problems_that_share_a_document_are_not_learned_from(tmp_path: Path, tokenizer: Any) -> None:
    mine = own_task(tmp_path, 12, shared=True)
    workload = built(mine, tokenizer, prompt_tokens=900, measured=3, fill=4)
    assert not texts(workload.measured) & texts(workload.fill)
    with pytest.raises(InvalidInput, match="3 measured and 9 fill problems were asked for; only"):
        built(mine, tokenizer, prompt_tokens=900, measured=3, fill=9)


@pytest.mark.parametrize("changed", [{"measured": 0}, {"fill": -1}, {"measured": 100, "fill": 65}])
def test_numbers_that_cannot_be_are_refused(
    changed: dict[str, int], tokenizer: Any, problems: dict[str, list[Problem]]
) -> None:
    with pytest.raises(InvalidInput, match="the task has 164"):
        built(problems["humaneval"], tokenizer, **changed)


def test_prompts_that_cannot_be_so_short_are_refused(tokenizer: Any, problems: dict[str, list[Problem]]) -> None:
    with pytest.raises(InvalidInput, match="300 prompt tokens are too few"):
        built(problems["tools"], tokenizer, prompt_tokens=300)
    with pytest.raises(InvalidInput, match="fit into 470 tokens"):
        built(problems["humaneval"], tokenizer, prompt_tokens=470, measured=40)


def of_segments(folder: Path, segments: Sequence[Sequence[str]]) -> list[Problem]:
    path = folder / "own.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"Q{n}?", "segments": s}) for n, s in enumerate(segments)))
    return make_task(str(path)).problems()


@pytest.mark.parametrize("prompt_tokens", [300, 500, 1000, 3000])
def test_many_short_segments_fill_the_prompt(tmp_path: Path, tokenizer: Any, prompt_tokens: int) -> None:
    mine = of_segments(tmp_path, [[f"Item {n} {k} is up." for k in range(10_000)] for n in range(4)])
    workload = built(mine, tokenizer, agents=2, prompt_tokens=prompt_tokens, answer_tokens=16, measured=2, fill=2)
    for case in workload.measured + workload.fill:
        assert abs(length(workload, case, tokenizer) - prompt_tokens) <= 0.15 * prompt_tokens


def test_lengths_that_cannot_be_reached_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    short = [[f"Item {n} {k} is up." for k in range(400)] for n in range(3)]
    mine = of_segments(tmp_path, [*short, ["only one here " * 300]])
    with pytest.raises(InvalidInput, match=r"problem '\d' makes a prompt of \d+ tokens where 1000 were asked for"):
        built(mine, tokenizer, agents=2, prompt_tokens=1000, answer_tokens=16, measured=2, fill=2)
