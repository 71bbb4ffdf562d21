"""Promise 1 on the real model: with Exact, greedy tokens are the dense run's, save where its two best logits tie."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eval.tasks import make_task
from kvcomm import Engine, Exact, Segment, Slot, System
from kvcomm.closeness import common_run, is_tie

PROMPTS, PARTS, NEW_TOKENS, TASK_TOKENS = 50, 5, 16, 40
MAX_TIES = 1
"""More would mean that ties excuse something else."""


def dense_run(model: Any, prompt: tuple[int, ...], reply: tuple[int, ...], generated: bool) -> tuple[list[int], Any]:
    """Tokens and logits of the dense run: from model.generate itself, or, several times faster, from one forward over
    the reply, whose choices are those of a greedy run up to the first one that differs.
    """
    ids = torch.tensor([prompt])
    if generated:
        options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        run = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, **options)
        return run.sequences[0, len(prompt) :].tolist(), torch.cat(run.logits)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *reply[:-1]]]), logits_to_keep=len(reply)).logits[0]
    return logits.argmax(-1).tolist(), logits


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_greedy_tokens_are_the_dense_runs(smollm: tuple[Any, Any], part: int) -> None:
    """Two agents get each of 13 texts twice: the second run of a text, and every prompt's fixed head, hit a prefix.
    In parts of ten prompts with an engine each, so that none takes long on a busy machine.
    """
    model, tokenizer = smollm
    engine = Engine(model, tokenizer, policy=Exact(), weights="real")
    agents = [
        engine.agent("coder", [System("You write Python."), Slot("task"), Slot("note"), "\nContinue the code."]),
        engine.agent(
            "tester", [System("You test Python."), "Write tests for this:\n", Slot("task"), Slot("note"), "\n"]
        ),
    ]
    texts = [problem.task_text for problem in make_task("humaneval").problems()]
    hits, ties, wrong, prompts = 0, 0, [], set()
    chosen = [n for n in range(PROMPTS) if n % (PROMPTS // 2) * PARTS // (PROMPTS // 2) == part]
    for n in chosen:
        agent, text = agents[n % 2], texts[n % (PROMPTS // 2) // 2 * 3]
        task = agent.template.text_segment(text)
        slots: dict[str, Any] = {"task": Segment(task.token_ids[:TASK_TOKENS]), "note": f"\nNote {n // 25}."}
        reply = agent.generate(max_new_tokens=NEW_TOKENS, options={"do_sample": False}, **slots)
        prompt = reply.plan.prompt.token_ids
        prompts.add(prompt)
        expected, logits = dense_run(model, prompt, reply.token_ids, generated=n % 10 == 7)
        hits += reply.usage.exact > 0
        run = common_run(expected, reply.token_ids)
        if run < max(len(expected), len(reply.token_ids)):
            if is_tie(logits[run]):
                ties += 1
            else:
                wrong.append((n, run))
    assert len(prompts) == len(chosen) == PROMPTS // PARTS and hits >= len(chosen) // 2
    assert not wrong
    assert ties <= MAX_TIES, f"{ties} of {len(chosen)} answers differ at a tie"
