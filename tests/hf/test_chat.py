"""Conversations: ids are the template's own, pieces are found whatever it does, only what is new is computed."""

from __future__ import annotations

from typing import Any

import pytest

from eval.cases.chat_tools import CATALOGUE, changes, shuffled
from eval.models.chat_templates import CHATML_TOOLS, DATED_TOOLS, THINKING
from kvcomm import Balanced, Engine, Exact, InvalidInput
from kvcomm.hf.chat import ChatPrompt, chat_prompt
from kvcomm.tool_text import sorted_tool
from tests.hf.engines import GREEDY, engine_of, plain, state
from tests.tiny_tokenizer import CHAT, tiny_tokenizer

TEMPLATES = {"plain": CHAT, "chatml tools": CHATML_TOOLS, "dated": DATED_TOOLS, "thinking": THINKING}
TOOLS = [sorted_tool(tool) for tool in CATALOGUE[:3]]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the day?"},
    {"role": "assistant", "content": "It is the third one."},
    {"role": "user", "content": "  user, then?\n"},
    {"role": "assistant", "content": "user"},
    {"role": "user", "content": "Go on."},
]
FEW = CATALOGUE[:9]
ENDS = frozenset({2, 5})


def tokenizer_with(template: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def pieces(tokenizer: Any, made: ChatPrompt) -> list[tuple[str, str]]:
    """Kind and text of each part that is no fixed text."""
    parts = [(part.label.partition("/")[2], part.segment.token_ids) for part in made.prompt.parts]
    return [(kind, tokenizer.decode(list(ids))) for kind, ids in parts if not kind.startswith("#")]


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_the_templates_own(name: str, tools: Any, smollm: tuple[Any, Any]) -> None:
    """Of the real tokenizer and of one whose merges reach over every edge."""
    shows_tools = name in ("chatml tools", "dated")
    for tokenizer in (tokenizer_with(TEMPLATES[name]), smollm[1]):
        given = {"chat_template": TEMPLATES[name]}
        if tools and not shows_tools:
            with pytest.raises(InvalidInput, match="does not show tools"):
                chat_prompt(tokenizer, TALK, tools, template=given)
            continue
        expected = tokenizer.apply_chat_template(TALK, tools=tools, add_generation_prompt=True, **given)["input_ids"]
        made = chat_prompt(tokenizer, TALK, tools, template=given, ends=ENDS)
        assert made.prompt.token_ids == tuple(expected) and made.rewritten is None
        kinds = [kind for kind, _ in pieces(tokenizer, made)]
        assert sorted(kinds) == sorted(
            ["system", *["definition"] * len(tools or []), *["user", "assistant"] * 2, "user"]
        )


def test_the_real_models_own_template(smollm: tuple[Any, Any]) -> None:
    tokenizer = smollm[1]
    made = chat_prompt(tokenizer, TALK, ends=frozenset({2}))
    expected = tokenizer.apply_chat_template(TALK, add_generation_prompt=True)["input_ids"]
    assert made.prompt.token_ids == tuple(expected)
    assert pieces(tokenizer, made) == [
        ("system", "Be brief."),
        ("user", "What is the day?"),
        ("assistant", "It is the third one."),
        ("user", " user, then?\n"),  # the token of the line break reaches over the first space
        ("assistant", "user"),
        ("user", "Go on."),
    ]
    with pytest.raises(InvalidInput, match="does not show tools"):
        chat_prompt(tokenizer, TALK, TOOLS)


@pytest.mark.parametrize("template", [CHATML_TOOLS, DATED_TOOLS])
def test_a_tool_is_the_same_segment_wherever_it_stands(template: str, smollm: tuple[Any, Any]) -> None:
    tokenizer = smollm[1]
    given = {"chat_template": template}
    first = chat_prompt(tokenizer, TALK, TOOLS, canonical=False, template=given).prompt
    turned = chat_prompt(tokenizer, TALK[:2], TOOLS[::-1], canonical=False, template=given).prompt
    held = [part.segment for part in first.parts if part.label == "chat/definition"]
    assert [part.segment for part in turned.parts if part.label == "chat/definition"] == held[::-1]
    assert len(set(held)) == 3


def test_canonical_tools_do_not_show_their_order() -> None:
    tokenizer = tokenizer_with(CHATML_TOOLS)
    one = chat_prompt(tokenizer, TALK, CATALOGUE).prompt
    other = [shuffled(tool) for tool in reversed(CATALOGUE)]
    assert chat_prompt(tokenizer, TALK, other).prompt == one
    assert chat_prompt(tokenizer, TALK, other, canonical=False).prompt != one
    given = chat_prompt(tokenizer, TALK, other, canonical=False).prompt.token_ids
    assert given == tuple(tokenizer.apply_chat_template(TALK, tools=other, add_generation_prompt=True)["input_ids"])


def test_functions_are_tools() -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the one
            b: the other
        """
        return a + b

    tokenizer = tokenizer_with(CHATML_TOOLS)
    made = chat_prompt(tokenizer, TALK, [add], canonical=False)
    expected = tokenizer.apply_chat_template(TALK, tools=[add], add_generation_prompt=True)["input_ids"]
    assert made.prompt.token_ids == tuple(expected)
    assert [text for kind, text in pieces(tokenizer, made) if kind == "definition"][0].startswith('{"type": "function"')


def test_a_turn_of_calls_is_an_answer_and_results_are_pieces() -> None:
    """The answer is found by the generation prompt before and the end-of-turn token behind, whatever it is made of."""
    tokenizer = tokenizer_with(CHATML_TOOLS)
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    talk = [
        {"role": "user", "content": "Call f."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "<tool_response>"},
        {"role": "assistant", "content": "Done.", "tool_calls": [call]},
        {"role": "user", "content": "Thanks."},
    ]
    shown = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    assert pieces(tokenizer, chat_prompt(tokenizer, talk, ends=ENDS)) == [
        ("user", "Call f."),
        ("assistant", shown),
        ("tool", "<tool_response>"),
        ("assistant", f"Done.{shown}"),
        ("user", "Thanks."),
    ]


def test_thinking_that_is_dropped_is_noticed() -> None:
    tokenizer = tokenizer_with(THINKING)
    thought = "<think>\nHm.\n</think>\n\nYes."
    asked = [{"role": "user", "content": "Ready?"}]
    answered = [*asked, {"role": "assistant", "content": thought}]
    result = chat_prompt(tokenizer, [*answered, {"role": "tool", "content": "ok"}], ends=ENDS)
    assert pieces(tokenizer, result)[1] == ("assistant", thought) and result.rewritten is None
    one = [*answered, {"role": "user", "content": "Sure?"}]
    made = chat_prompt(tokenizer, one, ends=ENDS)
    assert pieces(tokenizer, made) == [("user", "Ready?"), ("assistant", "Yes."), ("user", "Sure?")]
    assert made.rewritten is None  # what the answer was generated behind is as it was
    two = [*one, {"role": "assistant", "content": thought}, {"role": "tool", "content": "ok"}]
    assert chat_prompt(tokenizer, two, ends=ENDS).rewritten is None
    three = [*answered, {"role": "tool", "content": "ok"}, {"role": "assistant", "content": "Fine."}, *asked]
    made = chat_prompt(tokenizer, three, ends=ENDS)
    before = tokenizer.apply_chat_template(three[:3], add_generation_prompt=True)["input_ids"]
    assert made.rewritten is not None
    assert made.prompt.token_ids[: made.rewritten] == tuple(before[: made.rewritten])
    assert made.prompt.token_ids[made.rewritten] != before[made.rewritten]


HARD = {
    "cuts contents": "{% for m in messages %}{{ '<|im_start|>' + m.content[:9] + '<|im_end|>' }}{% endfor %}",
    "looks at one content": "{% for m in messages %}{% if m.content.startswith('Go') %}{{ 'GO!' }}{% endif %}"
    "{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}",
    "refuses marks": "{% for m in messages %}{% if '\ue0f0' in m.content %}{{ raise_exception('marks') }}{% endif %}"
    "{{ m.content + '<|im_end|>' }}{% endfor %}",
    "shows contents twice": "{% for m in messages %}{{ m.content + '<|im_end|>' + m.content }}{% endfor %}",
    "backwards": "{% for m in messages | reverse %}{{ m.content + '<|im_end|>' }}{% endfor %}",
    "drops the system text": "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("name", HARD)
def test_any_template_gives_its_own_ids(name: str) -> None:
    """Places only decide costs: templates that look at contents leave some unfound, and none is wrong."""
    tokenizer = tokenizer_with(HARD[name])
    made = chat_prompt(tokenizer, TALK, ends=ENDS)
    assert made.prompt.token_ids == tuple(tokenizer.apply_chat_template(TALK, add_generation_prompt=True)["input_ids"])
    found = [text for _, text in pieces(tokenizer, made)]
    assert all(text.strip() for text in found)
    if name == "looks at one content":
        assert "What is the day?" in found and "Go on." not in found


@pytest.mark.parametrize("talk", [TALK, [{"role": "user", "content": "\ue0f00\ue0f1 \ue0f07\ue0f2"}]])
def test_contents_that_look_like_marks_do_no_harm(talk: Any) -> None:
    tokenizer = tokenizer_with(CHAT)
    assert len(chat_prompt(tokenizer, talk).prompt) > 5


def test_parts_of_a_content_and_documents_are_pieces() -> None:
    tokenizer = tokenizer_with(
        "{% for d in documents %}{{ d.title + ': ' + d.text + '\n' }}{% endfor %}"
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    )
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    documents = [{"title": "A", "text": "The first text."}, {"title": "B", "text": "The second one."}]
    made = chat_prompt(tokenizer, [{"role": "user", "content": parts}], documents=documents)
    assert pieces(tokenizer, made) == [
        ("document", "The first text."),
        ("document", "The second one."),
        ("user", "One."),
        ("user", "Two."),
    ]
    with pytest.raises(InvalidInput, match="does not show documents"):
        chat_prompt(tokenizer_with(CHAT), TALK, documents=documents)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda t: chat_prompt(t, []), "one dict of role and content"),
        (lambda t: chat_prompt(t, "Hello"), "messages are str"),
        (lambda t: chat_prompt(t, ["Hello"]), "messages are list"),
        (lambda t: chat_prompt(t, [{"role": "user"}]), "refuses this conversation"),
        (lambda t: chat_prompt(t, [{"role": "user", "content": "a\ud800"}]), "surrogate"),
        (lambda t: chat_prompt(t, TALK, name="a/b"), "without '/'"),
        (lambda t: chat_prompt(t, TALK, ["tool"]), "a tool is str"),
        (lambda t: chat_prompt(t, TALK, [{"title": "t"}]), "a tool has no name"),
        (lambda t: chat_prompt(t, TALK, [lambda x: x]), "no JSON schema"),
        (lambda t: chat_prompt(tiny_tokenizer(chat=False), TALK), "has no chat template"),
    ],
)
def test_what_is_wrong_is_named(wrong: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        wrong(tiny_tokenizer())


def test_a_refused_call_changes_nothing() -> None:
    engine = engine_of()
    before = state(engine)
    for wrong in ({"cache_implementation": "static"}, {"max_new_tokens": 0}, {"tools": TOOLS}):
        with pytest.raises(InvalidInput):
            engine.chat(TALK, **wrong)
    assert state(engine) == before


WHOLE = [*range(6), *(tiny_tokenizer().convert_tokens_to_ids(letter) for letter in "tiaeo\n"), *range(102, 128)]
"""Ids without which a random model's answer comes back from its text as it was: no letter that begins a merge."""
PLAINLY: dict[str, Any] = {**GREEDY, "suppress_tokens": WHOLE, "max_new_tokens": 6}


def talk_on(engine: Engine, turns: int, **options: Any) -> list[Any]:
    """Replies of a conversation in which every answer is said back as it came."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You answer questions about the sea."}]
    replies = []
    for n in range(turns):
        messages.append({"role": "user", "content": f"Question {n}: how deep is it there, and why?"})
        replies.append(engine.chat(messages, **PLAINLY, **options))
        messages.append({"role": "assistant", "content": replies[-1].text})
    return replies


@pytest.mark.parametrize("policy", [Exact(), Balanced(gate=False), Balanced(gate=False, learn_first=0)], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_a_growing_conversation_costs_its_new_turn(family: str, policy: Any) -> None:
    """Each prompt after the first: all that the one before held and its answer are there, exact."""
    engine = engine_of(family, policy=policy)
    replies = talk_on(engine, 5)
    for before, after in zip(replies, replies[1:], strict=False):
        held = (*before.plan.prompt.token_ids, *before.segment.token_ids)
        assert after.plan.prompt.token_ids[: len(held)] == held, "the answer's ids came back otherwise"
        assert after.usage.exact == len(held) and after.usage.approximate == 0
        assert after.plan.exact_until == len(after.plan.prompt)
    for reply in replies:
        whole = plain(engine, reply.plan.prompt, **PLAINLY)
        assert reply.token_ids == tuple(whole[0, len(reply.plan.prompt) :].tolist())


def test_a_conversation_behind_changed_tools_costs_its_new_turn_too() -> None:
    """What is approximate was settled when the tools changed: it is not corrected again at each turn."""
    engine = engine_of(policy=Balanced(gate=False, learn_first=0, dense_above=1.0))
    engine.tokenizer.chat_template = CHATML_TOOLS
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You use tools."}]
    held = 0
    for n, tools in enumerate([CATALOGUE[:3], *[CATALOGUE[:4]] * 4]):
        messages.append({"role": "user", "content": f"Question {n}: how deep is it there, and why?"})
        reply = engine.chat(messages, list(tools), canonical=False, **PLAINLY)
        counts = reply.plan.counts
        if n > 1:
            assert counts.recomputed + counts.new <= len(reply.plan.prompt) - held
            before = [part for part in reply.plan.parts if part.start < held]
            assert all(part.action == "exact" or (part.settled and not part.computed) for part in before)
            assert counts.approximate > 0
        held = len(reply.plan.prompt) + len(reply.segment)
        messages.append({"role": "assistant", "content": reply.text})


@pytest.mark.parametrize("canonical", [True, False])
@pytest.mark.parametrize("change", changes(FEW))
def test_a_changed_catalogue_costs_the_changed_segment(change: str, canonical: bool) -> None:
    k = 8
    engine = engine_of(policy=Balanced(gate=False, learn_first=0, dense_above=1.0))
    engine.tokenizer.chat_template = CHATML_TOOLS
    engine.chat(TALK, list(FEW), canonical=canonical, max_new_tokens=1, **GREEDY)
    reply = engine.fork(learn=False).chat(TALK, changes(FEW)[change], canonical=canonical, max_new_tokens=1, **GREEDY)
    new = [part for part in reply.plan.parts if part.action == "new"]
    reused = [part for part in reply.plan.parts if part.action == "approximate"]
    changed = 1 if change in ("one appended", "one inserted first") or (not canonical and "shuffled" in change) else 0
    assert [part.part.label for part in new] == ["chat/definition"] * changed
    counts = reply.plan.counts
    assert counts.new == sum(part.stop - part.start for part in new)
    # As many tokens as k a segment, the closing request among them; the prompt's last token always is.
    assert counts.recomputed == sum(min(k, part.stop - part.start) for part in reused) + (not reused)
    if canonical and change in ("nothing changed", "two swapped", "keys of one shuffled"):
        assert (counts.recomputed, counts.approximate) == (1, 0)


def test_a_template_that_rewrites_says_so_in_the_plan() -> None:
    engine = engine_of(policy=Exact())
    engine.tokenizer.chat_template = THINKING
    talk = [
        {"role": "user", "content": "Ready?"},
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."},
        {"role": "tool", "content": "ok"},
        {"role": "assistant", "content": "Fine."},
        {"role": "user", "content": "And now?"},
    ]
    engine.chat(talk[:3], max_new_tokens=1, **GREEDY)
    reply = engine.chat(talk, max_new_tokens=1, **GREEDY)
    assert "rewritten earlier turns from token" in reply.plan.why
    assert 0 < reply.usage.exact < len(reply.plan.prompt) - 1


def test_a_date_in_the_template_costs_what_stands_behind_it() -> None:
    engine = engine_of(policy=Balanced(gate=False, learn_first=0, dense_above=1.0))
    engine.tokenizer.chat_template = DATED_TOOLS
    for date in ("1 May 2026", "1 May 2026", "2 May 2026"):
        reply = engine.chat(TALK, template={"date_string": date}, max_new_tokens=1, **GREEDY)
    assert reply.plan.parts[0].action == "new" and reply.usage.exact == 0 and reply.usage.approximate > 0
