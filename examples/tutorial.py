"""The agents of docs/tutorial.md: a guide, and a critic of its plans. Run: python examples/tutorial.py MODEL"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcomm import Engine, Slot, System

CITIES = ("Lisbon", "Oslo", "Kyoto", "Quito")
FACTS = "The travellers are two adults and a child of six. They walk slowly, like boats and food, and hate queues. "


def main(name: str) -> None:
    """Four trips: by the third, the facts and the plan are reused in the critic's prompt."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name).eval(), AutoTokenizer.from_pretrained(name)
    engine = Engine(model, tokenizer)

    guide = engine.agent("guide", [System("You plan trips."), Slot("facts"), "\nPlan a day in ", Slot("city"), "."])
    critic = engine.agent(
        "critic",
        [
            System("You look for what will go wrong."),
            Slot("facts"),
            "\nThe plan:\n",
            Slot("plan"),
            "\nName its worst flaw.",
        ],
    )

    for city in CITIES:
        plan = guide.generate(facts=FACTS * 3, city=city, max_new_tokens=64)
        flaw = critic.generate(facts=FACTS * 3, plan=plan, max_new_tokens=32)
        print(f"{city}: {flaw.usage.approximate} of {flaw.usage.prompt_tokens} tokens reused, {flaw.ttft_s:.2f} s")
    print(flaw.plan)

    talk = [{"role": "system", "content": "You answer in one sentence."}]
    for question in ("What is a good month for Lisbon?", "And for Oslo?"):
        talk.append({"role": "user", "content": question})
        answer = engine.chat(talk, max_new_tokens=32)
        talk.append({"role": "assistant", "content": answer.text})
        print(f"{question} {answer.text} [{answer.usage.exact} of {answer.usage.prompt_tokens} tokens exact]")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/tutorial.py MODEL   (python -m eval model prints a folder)")
    main(sys.argv[1])
