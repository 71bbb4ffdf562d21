"""A writer and a critic as smolagents agents on one engine. Run: python examples/smolagents_agents.py MODEL"""

import sys

from smolagents import ToolCallingAgent
from smolagents.monitoring import LogLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcomm import Engine
from kvcomm.integrations.smolagents import KVCommModel

TASK = "Say in one sentence why the sky is blue."


def agent(engine: Engine, name: str, instructions: str) -> ToolCallingAgent:
    """An agent of smolagents' own kind, with a model of its own on the engine that all share."""
    model = KVCommModel(engine, name, max_new_tokens=32)
    quiet = LogLevel.OFF
    return ToolCallingAgent(tools=[], model=model, instructions=instructions, max_steps=2, verbosity_level=quiet)


def main(name: str) -> None:
    """The critic's prompt begins as the writer's does: a long system text that is not computed again."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    engine = Engine(AutoModelForCausalLM.from_pretrained(name).eval(), tokenizer)
    writer = agent(engine, "writer", "You write for children.")
    critic = agent(engine, "critic", "You judge texts for children.")

    text = writer.run(TASK)
    verdict = critic.run(f"Judge this text: {text}")
    print(f"writer: {text}\ncritic: {verdict}")
    for one in (writer, critic):
        for step in one.memory.steps:
            message = getattr(step, "model_output_message", None)
            if message is not None:
                print(f"{one.model.name}: {message.raw.usage}, first token after {message.raw.ttft_s:.2f} s")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/smolagents_agents.py MODEL   (python -m eval model prints a folder)")
    main(sys.argv[1])
