"""A worker: an engine that prefills for others, decodes what others prefilled, or both, over the project's frames."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvcomm.anchors.stored import StoredPool
from kvcomm.errors import FingerprintMismatch, InvalidInput, KVCommError
from kvcomm.hf.handover import hand_over
from kvcomm.hf.stopping import Cancelled, Until
from kvcomm.reuse.policy import Exact
from kvcomm.reuse.prompt import Part, Prompt
from kvcomm.serve.admission import Admission
from kvcomm.serve.worker_client import MAX_PARTS, WorkerClient
from kvcomm.transfer.layers import send_layer
from kvcomm.transfer.names import read_fingerprint
from kvcomm.types import Segment, pack_tokens

if TYPE_CHECKING:
    from kvcomm.hf.engine import Engine
    from kvcomm.serve.worker_session import Ask

log = logging.getLogger(__name__)
ROLES = ("prefill", "decode", "both")
_PATIENCE_S = 5.0


class Worker:
    """What a worker does with a request; ``kvcomm.serve.worker_session`` brings it.

    Args:
        role: ``prefill`` answers prefills, ``decode`` answers generations, ``both`` does both with one engine.
        prefiller: who prefills for a decoding worker; None prefills here.
        through_store: the prefiller puts KV into the store that both engines have, and nothing comes directly.
        slots: requests at work at once; others wait five seconds at most and are then refused.

    Raises:
        InvalidInput: there is no such role, or what it was given does not go with it.
    """

    def __init__(
        self, engine: Engine, role: str, *, prefiller: WorkerClient | None = None, through_store: bool = False,
        slots: int = 1,
    ) -> None:  # fmt: skip
        if role not in ROLES:
            raise InvalidInput(f"role {role!r} is none of {', '.join(ROLES)}; choose one")
        if role != "decode" and prefiller is not None:
            raise InvalidInput(f"a worker of role {role} prefills by itself; leave the prefill worker out")
        if through_store and engine.store is None:
            raise InvalidInput("a hand-over through the store needs one; pass the service's address")
        self.engine, self.role = engine, role
        self._prefiller, self._through_store = prefiller, through_store
        self._admission = Admission(slots, _PATIENCE_S)
        calls: Mapping[str, Callable[[Ask], None]] = {"prefill": self.prefill, "generate": self.generate}
        chosen = calls if role == "both" else {role: calls["prefill" if role == "prefill" else "generate"]}
        self.calls = {"generate" if name == "decode" else name: call for name, call in chosen.items()}

    def prefill(self, ask: Ask) -> None:
        """Compute a prompt's KV, and either send it layer by layer or leave it in the store."""
        model, first = read_fingerprint(ask.asked.text("fingerprint")), ask.asked.integer("first", 0, MAX_PARTS)
        push, prompt = ask.asked.truth("push"), _prompt(ask)
        mine = self.engine.pool.fingerprint
        if model != mine:
            raise FingerprintMismatch(
                f"this worker has fingerprint {mine.digest[:12]}, yours is {model.digest[:12]}; start both with one "
                "model"
            )
        if not push and self.engine.store is None:
            raise InvalidInput("this worker has no store to leave KV in; start it with a service, or have KV sent")
        with self._admission.slot():
            plan = hand_over(
                self.engine, prompt, first,
                (lambda tensors: send_layer(ask.wire, ask.number, tensors, ask.deadline)) if push else None,
            )  # fmt: skip
            if not push:
                self.engine.flush()
        ask.answer({"reused": plan.counts.exact, "computed": plan.counts.total - plan.counts.exact})

    def generate(self, ask: Ask) -> None:
        """Answer a prompt greedily, from KV that the prefill worker sends where there is one.

        It ends at the request's deadline: who asked has given up then, and others wait for the place.
        """
        tokens, label = ask.asked.integer("max_new_tokens", 1, 2**20), ask.asked.text("label", 256)
        prompt = _prompt(ask)
        with self._admission.slot():
            if self._prefiller is not None:
                self._ask_for(prompt, self._prefiller, ask.deadline.left())
            try:
                reply = self.engine.generate(
                    prompt, label=label, max_new_tokens=tokens, policy=Exact(), do_sample=False,
                    stopping_criteria=[Until(ask.deadline)],
                )  # fmt: skip
            except Cancelled:
                raise ask.deadline.error(f"an answer of up to {tokens} tokens") from None
        ask.answer(
            {"prompt_tokens": reply.usage.prompt_tokens, "reused": reply.usage.exact, "ttft_s": reply.ttft_s},
            pack_tokens(reply.token_ids),
        )

    def _ask_for(self, prompt: Prompt, prefiller: WorkerClient, left_s: float) -> None:
        """Have a prompt's KV come. Whatever goes wrong costs a prefill here."""
        try:
            if self._through_store:
                prefiller.prefill_to_store(self.engine.pool.fingerprint, prompt, deadline_s=max(left_s, 0.001))
                if isinstance(self.engine.pool, StoredPool):
                    self.engine.pool.refresh()
            else:
                prefiller.prefill(self.engine, prompt, deadline_s=max(left_s, 0.001))
        except KVCommError as error:
            log.warning("no prefill came, computing it here: %s", error)


def _prompt(ask: Ask) -> Prompt:
    """The prompt of a request: labels and lengths of its parts, and all token ids as the payload."""
    labels = ask.asked.texts("labels", 256, MAX_PARTS)
    lengths = ask.asked.integers("lengths", 0, 2**22, MAX_PARTS)
    ask.asked.end()
    ids = Segment.from_bytes(bytes(ask.payload())).token_ids
    if len(labels) != len(lengths) or sum(lengths) != len(ids):
        raise InvalidInput(f"{len(labels)} labels, {len(lengths)} lengths and {len(ids)} tokens do not make a prompt")
    parts, at = [], 0
    for label, length in zip(labels, lengths, strict=True):
        parts.append(Part(Segment(ids[at : at + length]), label))
        at += length
    return Prompt(tuple(parts))
