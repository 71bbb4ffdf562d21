"""Calling model.generate yourself over a prefilled cache. Run: python examples/own_generate.py MODEL"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from kvcomm import Engine, Slot, System


def main(model_name: str) -> None:
    """Prefill through the engine, then sample and stream with transformers' own generate."""
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = AutoModelForCausalLM.from_pretrained(model_name).eval()
    engine = Engine(model, tokenizer)
    helper = engine.agent("helper", [System("You answer in one sentence."), Slot("question")])
    for question in ("What is the capital of France, and since when?", "What is the capital of Spain, and since when?"):
        helper.study(question=question)
    prefilled = engine.prefill(helper.prompt(question="What is the capital of Italy?"), room=32)
    print(prefilled.plan)
    model.generate(
        **prefilled.generate_kwargs(),
        do_sample=True,
        max_new_tokens=32,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/own_generate.py MODEL   (python -m eval model prints a folder)")
    main(sys.argv[1])
