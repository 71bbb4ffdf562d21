"""Two agents: a planner's task and answer are reused in a coder's prompt. Run: python examples/two_agents.py MODEL"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcomm import Engine, Slot, System

TASKS = (
    "Write a Python function that returns the n-th prime number, and explain its running time.",
    "Write a Python function that merges two sorted lists without using sort, and explain its running time.",
    "Write a Python function that counts the vowels of a text, whatever their case, and explain its running time.",
    "Write a Python function that removes duplicates from a list and keeps its order, and explain its running time.",
)


def main(model: str) -> None:
    """Four rounds: the first ones are dense and teach, the later ones reuse."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    engine = Engine(AutoModelForCausalLM.from_pretrained(model).eval(), tokenizer)
    planner = engine.agent(
        "planner", [System("You plan. You do not write code."), "Task:\n", Slot("task"), "\n\nWrite a short plan."]
    )
    coder = engine.agent(
        "coder",
        [
            System("You write Python and nothing else."),
            "Task:\n",
            Slot("task"),
            "\n\nPlan:\n",
            Slot("plan"),
            "\n\nCode:",
        ],
    )
    for task in TASKS:
        plan = planner.generate(task=task, max_new_tokens=48)
        code = coder.generate(task=task, plan=plan, max_new_tokens=48)
        print(f"{code.ttft_s * 1000:.0f} ms to the first token; {code.usage}")
        print(code.plan)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/two_agents.py MODEL   (python -m eval model prints a folder)")
    main(sys.argv[1])
