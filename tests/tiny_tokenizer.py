"""A tiny real tokenizer for the tiny models: one id a printable character, and a few merges to cut texts in."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "th e", "i n", "a n", "e r", "o n", "\n \n")
CHAT = (
    "{{ '<bos>' }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer(*, chat: bool = True, bos: bool = True, end: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of fewer than 128 ids; bos is 1 and eos 2, as in the tiny models' configs.

    Args:
        chat: whether it has a chat template (which writes ``<bos>`` itself).
        bos: whether it puts ``<bos>`` in front of a text by itself.
        end: whether it also puts ``<eos>`` behind.
    """
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    words = [*SPECIAL, *characters, *(merge.replace(" ", "") for merge in MERGES)]
    vocabulary = {word: index for index, word in enumerate(words)}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    # No pre-tokenizer: the whole text is one word: merges cross spaces and lines
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if bos:
        single = "<bos> $A <eos>" if end else "<bos> $A"
        inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<bos>", 1), ("<eos>", 2)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHAT if chat else None
    return tokenizer
