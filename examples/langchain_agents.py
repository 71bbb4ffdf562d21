"""A writer and a critic as LangChain chat models on one engine. Run: python examples/langchain_agents.py MODEL"""

import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcomm import Engine
from kvcomm.integrations.langchain import ChatKVComm

FACTS = "The travellers are two adults and a child of six. They walk slowly, like boats and food, and hate queues. "
CITIES = ("Lisbon", "Oslo", "Kyoto", "Quito")


def main(name: str) -> None:
    """Four trips: a chain of two agents, the second reads what the first was told and what it wrote."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    engine = Engine(AutoModelForCausalLM.from_pretrained(name).eval(), tokenizer)

    guide = ChatPromptTemplate([("system", "You plan trips."), ("user", "{facts}"), ("user", "Plan a day in {city}.")])
    critic = ChatPromptTemplate(
        [
            ("system", "You look for what will go wrong."),
            ("user", "{facts}"),
            ("user", "{plan}"),
            ("user", "Name the plan's worst flaw."),
        ]
    )
    plans = guide | ChatKVComm(engine=engine, agent="guide", options={"max_new_tokens": 48}) | StrOutputParser()
    flaws = critic | ChatKVComm(engine=engine, agent="critic", options={"max_new_tokens": 24})

    for city in CITIES:
        plan = plans.invoke({"facts": FACTS * 3, "city": city})
        flaw = flaws.invoke({"facts": FACTS * 3, "plan": plan})
        tokens, own = flaw.usage_metadata["input_tokens"], flaw.response_metadata["kvcomm"]
        print(f"{city}: {tokens} prompt tokens, reused {own['exact']} exact and {own['approximate']} approximate")
    print(own["plan"])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/langchain_agents.py MODEL   (python -m eval model prints a folder)")
    main(sys.argv[1])
