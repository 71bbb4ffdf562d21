"""The Engine: one model, one namespace, one pool; agents ask it for answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from kvcomm.anchors.book import OffsetBook
from kvcomm.anchors.pool import BasePool
from kvcomm.anchors.saved import add_to, load_from
from kvcomm.anchors.stored import StoredPool
from kvcomm.errors import FingerprintMismatch, InvalidInput, PromptTooLong, StoreError
from kvcomm.hf.agent import Agent
from kvcomm.hf.arguments import Clock, check_generate_arguments, stop_tokens
from kvcomm.hf.backend import HFBackend
from kvcomm.hf.chat import Tool, chat
from kvcomm.hf.chat_text import Message
from kvcomm.hf.reply import Prefilled, Reply, Usage
from kvcomm.hf.support import cache_argument
from kvcomm.hf.template import Template, TemplatePart
from kvcomm.keys import Recipe
from kvcomm.reuse.backend import KVBuffer
from kvcomm.reuse.plan import Plan
from kvcomm.reuse.policy import Balanced, Dense, Exact, Policy, Reuse
from kvcomm.reuse.prompt import Prompt
from kvcomm.reuse.run import keep, keep_reply, observe, prepare
from kvcomm.reuse.splice import cut
from kvcomm.store.base import Store
from kvcomm.types import Namespace, Segment

log = logging.getLogger(__name__)


class Engine:
    """Generates with reuse of KV between agents.

    Args:
        model, tokenizer: from transformers, the model in eval mode on one device.
        policy: what may be reused; ``Balanced()`` unless given.
        namespace: tenant; nothing is shared across namespaces.
        pool, book: bases and learned offsets to go on with; new ones in memory unless given.
        store: where bases and offsets outlive the process (kvcomm.store); instead of pool and book. Bases are put when
            they are computed, offsets at ``flush`` and ``close``. The caller closes the store.
        learn: whether calls add bases and offsets. With False the pool is frozen and equal greedy calls give equal
            tokens.
        weights: a digest of the weights that the caller vouches for, to skip reading them all.

    Raises:
        UnsupportedModel: naming what cannot be reused correctly.
        FingerprintMismatch: pool or book belong to another model, dtype, adapter or tokenizer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        policy: Policy | None = None,
        namespace: str = "default",
        pool: BasePool | None = None,
        book: OffsetBook | None = None,
        store: Store | None = None,
        learn: bool = True,
        weights: str | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.backend = HFBackend(model, tokenizer, weights)
        self.namespace = Namespace(namespace)
        fingerprint = self.backend.spec.fingerprint
        for held in (pool, book):
            if held is not None and held.fingerprint != fingerprint:
                raise FingerprintMismatch(
                    f"the {type(held).__name__} has fingerprint {held.fingerprint.digest[:12]}, the model "
                    f"{fingerprint.digest[:12]}: KV of another model, dtype, adapter or tokenizer is never used"
                )
        if pool is not None and pool.namespace != self.namespace:
            raise InvalidInput(f"the pool belongs to namespace {pool.namespace}, the engine to {self.namespace}")
        if store is not None:
            if pool is not None or book is not None:
                raise InvalidInput("an engine takes a store, or a pool and a book, not both; pass the store alone")
            pool = StoredPool(self.namespace, fingerprint, store, self.backend.spec.device)
            book = OffsetBook(fingerprint, learned=load_from(store, self.namespace, fingerprint))
            book.predictor()  # solved now, so that the first call's first token does not wait for it
        self.store = store
        self.pool = pool if pool is not None else BasePool(self.namespace, fingerprint)
        self.book = book if book is not None else OffsetBook(fingerprint)
        self.policy: Policy = policy if policy is not None else Balanced()
        self.learn = learn
        self._teaches = learn
        self._agents: dict[str, Agent] = {}

    def agent(self, name: str, parts: Sequence[TemplatePart]) -> Agent:
        """Register an agent's template.

        Raises:
            InvalidInput: the template is malformed, or another one has this name already.
        """
        template = Template(name, parts, self.tokenizer)
        known = self._agents.get(name)
        if known is not None and (known.template.fixed, known.template.slots) != (template.fixed, template.slots):
            raise InvalidInput(f"an agent named {name!r} with another template exists; choose another name")
        return self._agents.setdefault(name, Agent(self, template))

    def flush(self) -> None:
        """Save what was learned since the last time, and wait until the store holds all that it was given.

        Raises:
            StoreError: the store could not write; what was learned is kept and saved next time.
        """
        if self.store is None:
            return
        fresh = self.book.take_fresh()
        if fresh is not None:
            try:
                add_to(self.store, self.namespace, self.pool.fingerprint, fresh)
            except StoreError:
                self.book.put_back(fresh)
                raise
        self.store.flush()

    def close(self) -> None:
        """Flush. Nothing else is held; the store is the caller's to close."""
        self.flush()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def agents(self) -> Mapping[str, Agent]:
        """The registered agents by name."""
        return dict(self._agents)

    def fork(self, *, policy: Policy | None = None, learn: bool = True) -> Engine:
        """An engine on the same model that reads this pool and these offsets but writes to a scratch pool of its own.

        For measuring, and for a session whose texts shall not outlive it. Offsets are not learned in a fork; bases are
        kept in its scratch pool unless ``learn`` is False.
        """
        other = object.__new__(Engine)
        other.__dict__.update(self.__dict__)
        other.pool = BasePool(
            self.namespace, self.pool.fingerprint, self.pool.max_bytes, self.pool.max_entries, self.pool
        )
        other.policy = policy if policy is not None else self.policy
        other.learn, other._teaches = learn, False
        other._agents = {name: Agent(other, agent.template) for name, agent in self._agents.items()}
        return other

    def prefill(self, prompt: Prompt, *, room: int = 256, policy: Policy | None = None) -> Prefilled:
        """Plan a prompt and carry the plan out, up to the tokens that model.generate computes itself.

        Args:
            room: tokens for which the cache preallocates memory behind the prompt; more may be generated.
            policy: for this call only.

        Raises:
            PromptTooLong: prompt and room exceed the model's positions.
            InvalidInput: room is negative, a token id is outside the model's vocabulary, or the model is in training
                mode.
            FingerprintMismatch: the model's weights were changed since the engine was built.
        """
        started = time.perf_counter()
        chosen = policy if policy is not None else self.policy
        if not isinstance(prompt, Prompt):
            raise InvalidInput(f"the prompt is {type(prompt).__name__}; make one with agent.prompt(slot=...)")
        if isinstance(chosen, type) or not callable(getattr(chosen, "plan", None)):
            raise InvalidInput(f"policy is {chosen!r}; pass a value such as Exact() or Balanced()")
        if room < 0:
            raise InvalidInput(f"room is {room}; give 0 or more tokens")
        self._check(prompt.token_ids, len(prompt) + room)
        plan = self._plan(prompt, chosen)
        plan, buffer = prepare(self.backend, plan, chosen, self.book, room)
        return Prefilled.of(plan, buffer, cache_argument(self.model), time.perf_counter() - started)

    def generate(
        self,
        prompt: Prompt,
        *,
        label: str = "",
        max_new_tokens: int = 256,
        policy: Policy | None = None,
        stopping_criteria: Sequence[StoppingCriteria] = (),
        started: float | None = None,
        **generate_kwargs: Any,
    ) -> Reply:
        """Generate an answer with the model's own generate, one prompt a call.

        Args:
            label: the place to file the answer's KV under, so that other agents can reuse it; empty files nothing.
            max_new_tokens: at most so many tokens.
            policy: for this call only.
            started: ``time.perf_counter()`` when the caller had its text in hand, if that was earlier.
            stopping_criteria, generate_kwargs: handed to model.generate; see kvcomm.hf.arguments for what cannot be.

        Raises:
            PromptTooLong: prompt and new tokens exceed the model's positions; nothing was changed.
            InvalidInput: as prefill, ``max_new_tokens`` is below 1, or an argument for model.generate does not go with
                the prepared cache; nothing was changed.
        """
        began = time.perf_counter() if started is None else started
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise InvalidInput(f"max_new_tokens is {max_new_tokens}; ask for at least 1")
        check_generate_arguments(generate_kwargs)
        prefilled = self.prefill(prompt, room=max_new_tokens, policy=policy)
        prepared = time.perf_counter()
        clock = Clock()
        arguments = {**prefilled.generate_kwargs(), "max_new_tokens": max_new_tokens, **generate_kwargs}
        arguments["stopping_criteria"] = StoppingCriteriaList([*stopping_criteria, clock])
        generate: Any = self.model.generate
        with torch.inference_mode():
            output = generate(**arguments)
        finished = time.perf_counter()
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        token_ids = tuple(sequences[0, len(prompt) :].tolist())
        stops = stop_tokens(self.model, self.tokenizer, generate_kwargs)
        end = next((n for n, token in enumerate(token_ids) if token in stops), len(token_ids))
        segment = Segment(token_ids[:end])
        if self.learn:
            try:
                self._after(prefilled, segment, label, policy or self.policy)
            except Exception as error:  # the answer is there; what could not be kept or learned costs reuse only
                log.warning("not everything was kept or learned from a call: %s", error, exc_info=error)
        return Reply(
            text=str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True)),
            token_ids=token_ids,
            segment=segment,
            output=output,
            ttft_s=(clock.first or finished) - began,
            prefill_s=prepared - began,
            wall_s=finished - began,
            learn_s=time.perf_counter() - finished,
            usage=Usage.of(prefilled.plan.counts, len(token_ids)),
            plan=prefilled.plan,
            pool_version=self.version,
        )

    def chat(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, **options: Any) -> Reply:
        """Answer a conversation written for the tokenizer's chat template: see kvcomm.hf.chat.chat."""
        return chat(self, messages, tools, **options)

    def force(
        self, prompt: Prompt, answer: Segment, *, label: str = "", policy: Policy | None = None
    ) -> tuple[torch.Tensor, Plan]:
        """Teacher-force an answer: the logits with which the model, reusing as planned, would have chosen each token.

        Bases are kept as a generated answer's would be, if the engine learns.

        Returns:
            logits [len(answer), vocabulary], float32, and the plan that was carried out.

        Raises:
            InvalidInput: the answer is empty, or with it the prompt crosses the length at which LongRoPE changes its
                frequencies; otherwise as prefill.
        """
        if not len(answer):
            raise InvalidInput("the answer has 0 tokens; there is nothing to force")
        token_ids = (*prompt.token_ids, *answer.token_ids)
        self._check(token_ids, len(token_ids))
        if self._crosses(len(token_ids)) and not self._crosses(len(prompt)):
            raise InvalidInput(
                f"a prompt of {len(prompt)} and an answer of {len(answer)} tokens cross the length of "
                f"{self.backend.spec.rope.switch_length} at which LongRoPE changes its frequencies; shorten the answer"
            )
        prefilled = self.prefill(prompt, room=len(answer), policy=policy)
        plan, buffer = prefilled.plan, prefilled.buffer
        start = buffer.length
        logits = self.backend.forward(buffer, token_ids[start:], range(start, len(token_ids)), len(answer) + 1)
        if self.learn and not self._crosses(len(prompt)):
            self._learn_from(plan, buffer, answer, label, policy or self.policy)
        return logits[:-1].float(), plan

    def study(self, prompt: Prompt, answer: Segment | None = None, label: str = "") -> int:
        """Learn from a prompt, and an answer to it if there is one, by a dense prefill alone; nothing is generated.

        Returns:
            how many offsets were observed; 0, and nothing is computed, beyond the length at which LongRoPE changes its
            frequencies.

        Raises:
            as prefill.
        """
        reply = answer if answer is not None else Segment(())
        token_ids = (*prompt.token_ids, *reply.token_ids)
        self._check(token_ids, len(token_ids))
        if self._crosses(len(token_ids)):
            return 0
        plan = Exact().plan(prompt, self.pool, self.book)
        plan, buffer = prepare(self.backend, plan, Exact(), self.book, len(reply))
        self._finish(buffer, token_ids)
        return self._learn_from(plan, buffer, reply, label, self.policy)

    def isolate(self, segments: Sequence[Segment], behind: Segment | None = None) -> int:
        """Compute bases of texts known before they are needed, each alone behind a short neutral prefix.

        Args:
            behind: the prefix, cut off afterwards; the tokenizer's beginning and a line break unless given.

        Returns:
            how many bases were added. A text that LongRoPE would compute with its other frequencies gets none.

        Raises:
            as prefill; nothing was added.
        """
        prefix = behind if behind is not None else self.neutral_prefix()
        recipe = Recipe("isolated", "", prefix.digest, False)
        for segment in segments:
            self._check((*prefix.token_ids, *segment.token_ids), len(prefix) + len(segment))
        added = 0
        for segment in segments:
            if self._crosses(len(prefix) + len(segment)):
                continue
            if not len(segment) or self.pool.get(segment, recipe) is not None:
                continue
            buffer = KVBuffer(self.backend.spec, len(prefix) + len(segment))
            self._finish(buffer, [*prefix.token_ids, *segment.token_ids])
            added += self.pool.put(segment, recipe, cut(buffer, self.backend.spec, len(prefix), buffer.length))
        return added

    def neutral_prefix(self) -> Segment:
        """A few tokens that say nothing, so that a text behind them does not begin with attention sinks."""
        encoded = self.tokenizer("Text:\n", add_special_tokens=False)["input_ids"]
        first = self.tokenizer.bos_token_id
        return Segment(tuple(([first] if first is not None else []) + list(encoded)))

    @property
    def version(self) -> str:
        """Changes whenever bases or offsets that later calls could use do."""
        return f"{self.pool.version}.{self.book.statistics.version}"

    def _plan(self, prompt: Prompt, policy: Policy) -> Plan:
        if self._crosses(len(prompt)):
            return Dense("the prompt is beyond the length at which LongRoPE changes its frequencies").plan(
                prompt, self.pool, self.book
            )
        plan = policy.plan(prompt, self.pool, self.book)
        if self._teaches and isinstance(policy, Reuse) and plan.counts.approximate:
            teachers = [
                p for p in plan.parts if p.action == "approximate" and p.match is None
            ]  # a near base shows none
            total = sum(p.stop - p.start for p in teachers)
            known = sum(p.stop - p.start for p in teachers if self.book.calls(p.part.label) >= policy.learn_first)
            if 2 * known < total:
                exact = Exact().plan(prompt, self.pool, self.book)
                return replace(exact, why=f"dense, to learn offsets (the first {policy.learn_first} calls of a place)")
        return plan

    def _crosses(self, length: int) -> bool:
        """Whether the model computes a sequence of ``length`` tokens in another frame than the pool's."""
        return self.backend.spec.rope.crosses(length)

    def _check(self, token_ids: Sequence[int], length: int) -> None:
        """Refuse tokens that the model does not have, more positions than it has, and a model that was changed."""
        self.backend.check_unchanged()
        spec = self.backend.spec
        if length > spec.max_positions:
            raise PromptTooLong(
                f"{len(token_ids)} tokens and room for {length - len(token_ids)} exceed the model's "
                f"{spec.max_positions} positions; shorten a slot or ask for fewer new tokens"
            )
        highest = max(token_ids, default=0)
        if highest >= spec.vocab_size:
            raise InvalidInput(
                f"token id {highest} is outside the model's vocabulary of {spec.vocab_size}; tokenise with the model's "
                "own tokenizer"
            )

    def _after(self, prefilled: Prefilled, reply: Segment, label: str, policy: Policy) -> None:
        plan, buffer = prefilled.plan, prefilled.buffer
        if not prefilled.take_back() or self._crosses(len(plan.prompt)):
            return
        if self._crosses(len(plan.prompt) + len(reply)):
            reply = Segment(())  # the model turned to its other frequencies on the way
        self._finish(buffer, (*plan.prompt.token_ids, *reply.token_ids))
        self._learn_from(plan, buffer, reply, label, policy)

    def _finish(self, buffer: KVBuffer, token_ids: Sequence[int]) -> None:
        """Compute the KV of the ids that ``buffer`` does not hold yet."""
        start = buffer.length
        if start < len(token_ids):
            self.backend.forward(buffer, token_ids[start:], range(start, len(token_ids)), logits=0)

    def _learn_from(self, plan: Plan, buffer: KVBuffer, reply: Segment, label: str, policy: Policy) -> int:
        """Observe offsets for the engine's policy, and keep what a call under ``policy`` can be served from again."""
        observed = observe(self.book, self.backend, buffer, plan, self.pool, self.policy) if self._teaches else 0
        keep(self.pool, self.backend, buffer, plan, every_exact=isinstance(policy, Exact))
        if label:
            keep_reply(self.pool, self.backend, buffer, plan, reply, label)
        return observed
