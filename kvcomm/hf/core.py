"""What every call of an engine is made of: a checked prompt, a plan, a prefill, and learning afterwards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcomm.anchors.book import OffsetBook
from kvcomm.anchors.pool import BasePool
from kvcomm.anchors.saving import Saving, saving
from kvcomm.anchors.stored import StoredPool
from kvcomm.checks import need, shown
from kvcomm.errors import FingerprintMismatch, InvalidInput, PromptTooLong
from kvcomm.hf.agent import Agent
from kvcomm.hf.backend import HFBackend
from kvcomm.hf.reply import Prefilled
from kvcomm.hf.support import cache_argument
from kvcomm.hf.texts import PlainTexts
from kvcomm.hf.turns import turn
from kvcomm.reuse.arriving import again_if_lost
from kvcomm.reuse.backend import KVBuffer
from kvcomm.reuse.calibration import UNCALIBRATED, Calibration, find
from kvcomm.reuse.cost import Costs, FrozenCosts
from kvcomm.reuse.healing import planning
from kvcomm.reuse.plan import Plan
from kvcomm.reuse.policy import Balanced, Dense, Exact, Policy, Reuse, check_policy
from kvcomm.reuse.prompt import Prompt
from kvcomm.reuse.run import Estimates, keep, keep_reply, observe, prepare
from kvcomm.reuse.trust import ratios_by_pair
from kvcomm.store.base import Store
from kvcomm.types import Namespace, Segment


class Core:
    """One model, one namespace, one pool, one book of offsets; see Engine, which is what callers use."""

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
        calibration: Calibration | None = None,
        costs: Costs | None = None,
    ) -> None:
        need(tokenizer, PreTrainedTokenizerBase, "the tokenizer", "pass the model's own from transformers")
        need(pool, (BasePool, type(None)), "pool", "pass a BasePool, or nothing")
        need(book, (OffsetBook, type(None)), "book", "pass an OffsetBook, or nothing")
        need(calibration, (Calibration, type(None)), "calibration", "pass a Calibration, or nothing")
        need(costs, (Costs, type(None)), "costs", "pass Costs, or nothing")
        need(learn, bool, "learn", "pass True or False")
        need(weights, (str, type(None)), "weights", "pass a digest as text, or nothing")
        if store is not None and not all(callable(getattr(store, name, None)) for name in ("get", "put", "entries")):
            raise InvalidInput(f"store is {shown(store)}; pass one of kvcomm.store, or nothing")
        if policy is not None:
            check_policy(policy)
        self.namespace = Namespace(namespace)
        self.model, self.tokenizer = model, tokenizer
        self.backend = HFBackend(model, tokenizer, weights)
        self._plain = PlainTexts(tokenizer)
        fingerprint = self.backend.spec.fingerprint
        for held in (pool, book):
            if held is not None and held.fingerprint != fingerprint:
                raise FingerprintMismatch(
                    f"the {type(held).__name__} has fingerprint {held.fingerprint.digest[:12]}, the model "
                    f"{fingerprint.digest[:12]}: KV of another model, dtype, adapter or tokenizer is never used"
                )
        if pool is not None and pool.namespace != self.namespace:
            raise InvalidInput(f"the pool belongs to namespace {pool.namespace}, the engine to {self.namespace}")
        self._offsets: Saving | None = None
        if store is not None:
            if pool is not None or book is not None:
                raise InvalidInput("an engine takes a store, or a pool and a book, not both; pass the store alone")
            pool = StoredPool(self.namespace, fingerprint, store, self.backend.spec.device, frozen=not learn)
            self._offsets = saving(store, self.namespace, fingerprint, learn, ask=pool.guard.open)
            book = self._offsets.book
            book.solve()
        self.store = store
        self.pool = pool if pool is not None else BasePool(self.namespace, fingerprint)
        self.book = book if book is not None else OffsetBook(fingerprint)
        self.policy: Policy = policy if policy is not None else Balanced()
        found = calibration if calibration is not None else find(fingerprint)
        self.calibration = found if found is not None else UNCALIBRATED
        self.costs = costs if costs is not None else Costs()
        self.learn = learn
        self._teaches = learn
        if not learn and _gates(self.policy):
            self.costs.measure(self.backend)  # behind no answer anything is measured, and calls are decided alike
        self._agents: dict[str, Agent] = {}

    def flush(self) -> None:
        """Save what was learned since the last time, and wait until the store holds all that it was given.

        Where nodes meet in the store, what others learned is fetched too.

        Raises:
            StoreError: the store could not write; what was learned is kept and saved next time.
        """
        if self.store is None:
            return
        self.pool.flush()
        if self._offsets is not None:
            self._offsets.save()
        self.store.flush()

    def close(self) -> None:
        """Flush, and follow the store no more; the store is the caller's to close."""
        try:
            self.flush()
        finally:
            self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

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
        need(prompt, Prompt, "the prompt", "make one with agent.prompt(slot=...)")
        check_policy(chosen)
        need(room, int, "room", "give 0 or more tokens")
        if planning(chosen) is not chosen:
            raise InvalidInput(
                f"{type(chosen).__name__}() works while an answer is generated; call engine.generate, or prefill with "
                f"policy={type(planning(chosen)).__name__}()"
            )
        if room < 0:
            raise InvalidInput(f"room is {room}; give 0 or more tokens")
        self._check(prompt.token_ids, len(prompt) + room)
        estimates = Estimates(self.calibration, self.costs if self.learn else FrozenCosts(self.costs))

        def work() -> tuple[Plan, KVBuffer]:
            plan = self._plan(prompt, chosen)
            with turn(self.model, self.backend.spec):
                return prepare(self.backend, plan, chosen, self.book, room, estimates)

        plan, buffer = again_if_lost(work)
        spent = time.perf_counter() - started
        return Prefilled.of(plan, buffer, cache_argument(self.model), spent, self.backend.layout)

    @property
    def version(self) -> str:
        """Changes whenever bases or offsets that later calls could use do."""
        return f"{self.pool.version}.{self.book.statistics.version}"

    def _plan(self, prompt: Prompt, policy: Policy) -> Plan:
        if self._crosses(len(prompt)):
            return Dense("the prompt is beyond the length at which LongRoPE changes its frequencies").plan(
                prompt, self.pool, self.book
            )
        if not isinstance(policy, Dense):
            self.pool.look_up([part.segment for part in prompt.parts])
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

    def _took(self, plan: Plan, seconds: float) -> None:
        """Learn from the time that a prefill took that was left to the model's own generate."""
        if self.learn and self.costs.rates is not None and len(plan.computed) == len(plan.prompt):
            token_bytes = self.backend.spec.fingerprint.bytes_per_token
            self.costs.refine("dense", self.costs.forecast(plan, "", token_bytes), seconds)

    def _finish(self, buffer: KVBuffer, token_ids: Sequence[int]) -> None:
        """Compute the KV of the ids that ``buffer`` does not hold yet."""
        start = buffer.length
        if start < len(token_ids):
            with turn(self.model, self.backend.spec):
                self.backend.forward(buffer, token_ids[start:], range(start, len(token_ids)), logits=0)

    def _learn_from(self, plan: Plan, buffer: KVBuffer, reply: Segment, label: str, policy: Policy) -> int:
        """Observe offsets for the engine's policy, and keep what a call under ``policy`` can be served from again."""
        asked, teaches = planning(self.policy), self._teaches
        if _gates(self.policy) or _gates(policy):
            self.costs.measure(self.backend)  # behind the answer, so that no call's first token waits for it
        if teaches and plan.judgement is not None:
            self.book.notice(ratios_by_pair(plan))
        observed = observe(self.book, self.backend, buffer, plan, self.pool, asked) if teaches else 0
        keep(self.pool, self.backend, buffer, plan, every_exact=isinstance(policy, Exact))
        if label:
            keep_reply(self.pool, self.backend, buffer, plan, reply, label)
        return observed


def _gates(policy: Policy) -> bool:
    planned = planning(policy)
    return isinstance(planned, Reuse) and planned.gate
