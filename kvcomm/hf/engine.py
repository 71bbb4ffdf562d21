"""The Engine: one model, one namespace, one pool; agents ask it for answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria

from kvcomm.anchors import poolfile
from kvcomm.anchors.pool import BasePool
from kvcomm.checks import need, need_all
from kvcomm.errors import InvalidInput
from kvcomm.hf.agent import Agent
from kvcomm.hf.asynchronous import in_thread
from kvcomm.hf.chat import Tool, chat
from kvcomm.hf.chat_text import Message
from kvcomm.hf.core import Core
from kvcomm.hf.exactness import force_healing
from kvcomm.hf.forget import Conversation, Forgotten, forget
from kvcomm.hf.generation import Call, generate
from kvcomm.hf.reply import Reply
from kvcomm.hf.stopping import criteria_of
from kvcomm.hf.template import Template, TemplatePart, check_label
from kvcomm.hf.turns import turn
from kvcomm.keys import Recipe
from kvcomm.reuse.arriving import again_if_lost
from kvcomm.reuse.backend import KVBuffer
from kvcomm.reuse.healing import Healed, planning
from kvcomm.reuse.plan import Plan
from kvcomm.reuse.policy import Exact, Policy, check_policy
from kvcomm.reuse.prompt import Prompt
from kvcomm.reuse.run import prepare
from kvcomm.reuse.splice import cut
from kvcomm.types import Namespace, Segment


class Engine(Core):
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
        calibration: from a call's errors to its closeness; unless given, the one that ``kvcomm calibrate`` kept for
            this model, or one that came with the package. Without any, bounds are cautious.
        costs: what prefill and reuse take on this machine; unless given, measured behind the first answer.

    Raises:
        UnsupportedModel: naming what cannot be reused correctly.
        FingerprintMismatch: pool or book belong to another model, dtype, adapter or tokenizer.
    """

    def agent(self, name: str, parts: Sequence[TemplatePart]) -> Agent:
        """Register an agent's template.

        Raises:
            InvalidInput: the template is malformed, or another one has this name already.
        """
        template = Template(name, parts, self.tokenizer, self._plain)
        known = self._agents.get(name)
        if known is not None and (known.template.fixed, known.template.slots) != (template.fixed, template.slots):
            raise InvalidInput(f"an agent named {name!r} with another template exists; choose another name")
        return self._agents.setdefault(name, Agent(self, template))

    @property
    def agents(self) -> Mapping[str, Agent]:
        """The registered agents by name."""
        return dict(self._agents)

    def fork(self, *, policy: Policy | None = None, learn: bool = True) -> Engine:
        """An engine on the same model that reads this pool and these offsets but writes to a scratch pool of its own.

        For measuring, and for a session whose texts shall not outlive it. Offsets are not learned in a fork; bases are
        kept in its scratch pool unless ``learn`` is False.
        """
        if policy is not None:
            check_policy(policy)
        other = object.__new__(Engine)
        other.__dict__.update(self.__dict__)
        other.pool = BasePool(
            self.namespace, self.pool.fingerprint, self.pool.max_bytes, self.pool.max_entries, self.pool
        )
        other.policy = policy if policy is not None else self.policy
        other.learn, other._teaches = learn, False
        other._agents = {name: Agent(other, agent.template) for name, agent in self._agents.items()}
        return other

    def generate(
        self,
        prompt: Prompt,
        *,
        label: str = "",
        max_new_tokens: int | None = None,
        policy: Policy | None = None,
        stopping_criteria: Sequence[StoppingCriteria] | None = None,
        started: float | None = None,
        **generate_kwargs: Any,
    ) -> Reply:
        """Generate an answer with the model's own generate.

        Threads may call this at once; a reply is then the one that the call alone would have given, as far as the pool
        is the same (``learn=False``).

        Args:
            label: the place to file the answer's KV under, so that other agents can reuse it; empty files nothing.
            max_new_tokens: at most so many tokens; without it what a generation config says, the caller's or the
                model's, else 256 or as many as the model has positions for.
            policy: for this call only.
            started: ``time.perf_counter()`` when the caller had its text in hand, if that was earlier.
            stopping_criteria, generate_kwargs: handed to model.generate; docs/generate.md lists what cannot be.

        Raises:
            PromptTooLong: prompt and new tokens exceed the model's positions; nothing was changed.
            InvalidInput: as prefill, ``max_new_tokens`` is below 1, or an argument for model.generate does not go with
                the prepared cache; nothing was changed.
        """
        criteria = stopping_criteria if stopping_criteria is not None else ()
        call = Call([prompt], [label], max_new_tokens, policy, criteria, started, generate_kwargs)
        return generate(self, call)[0]

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        labels: Sequence[str] | None = None,
        max_new_tokens: int | None = None,
        policy: Policy | None = None,
        stopping_criteria: Sequence[StoppingCriteria] | None = None,
        started: float | None = None,
        **generate_kwargs: Any,
    ) -> list[Reply]:
        """Generate answers to several prompts, of any agents and lengths, in one run of the model's own generate.

        Each prompt is planned and prefilled by itself, against the pool as it is at the call; then all are decoded
        together, padded on the left.

        Args:
            labels: for each prompt, as ``label`` in generate.

        Returns:
            a reply for each prompt, with a plan and usage of its own; the times are the batch's.

        Raises:
            as generate; InvalidInput also where there is no prompt, labels are not as many, or LongRoPE would compute
            some of the prompts with its other frequencies.
        """
        need_all(prompts, Prompt, "prompts", "pass a list of prompts, each made with agent.prompt(slot=...)")
        if labels is not None:
            need_all(labels, str, "labels", "pass a list of texts, or nothing")
        filed = list(labels) if labels is not None else [""] * len(prompts)
        if not prompts or len(filed) != len(prompts):
            raise InvalidInput(
                f"{len(prompts)} prompts and {len(filed)} labels; give one or more prompts, a label each"
            )
        criteria = stopping_criteria if stopping_criteria is not None else ()
        call = Call(list(prompts), filed, max_new_tokens, policy, criteria, started, generate_kwargs)
        return generate(self, call)

    async def agenerate(self, prompt: Prompt, **arguments: Any) -> Reply:
        """As generate, from asyncio, in a thread of the event loop's executor.

        Cancelling the task stops the generation at its next token, keeps nothing of it, and returns when it has ended.
        """
        criteria = criteria_of(arguments)
        return await in_thread(lambda stop: self.generate(prompt, stopping_criteria=(*criteria, stop), **arguments))

    async def agenerate_batch(self, prompts: Sequence[Prompt], **arguments: Any) -> list[Reply]:
        """As generate_batch, from asyncio; see agenerate."""
        criteria = criteria_of(arguments)
        return await in_thread(
            lambda stop: self.generate_batch(prompts, stopping_criteria=(*criteria, stop), **arguments)
        )

    def chat(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, **options: Any) -> Reply:
        """Answer a conversation written for the tokenizer's chat template: see kvcomm.hf.chat.chat."""
        return chat(self, messages, tools, **options)

    async def achat(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, **options: Any) -> Reply:
        """As chat, from asyncio; see agenerate."""
        criteria = criteria_of(options)
        return await in_thread(lambda stop: self.chat(messages, tools, stopping_criteria=(*criteria, stop), **options))

    def force(
        self, prompt: Prompt, answer: Segment, *, label: str = "", policy: Policy | None = None
    ) -> tuple[torch.Tensor, Plan]:
        """Teacher-force an answer: the logits with which the model, reusing as planned, would have chosen each token.

        Bases are kept as a generated answer's would be, if the engine learns. Under ``Healed()`` the cache is made
        exact on the way, as it is in generation.

        Returns:
            logits [len(answer), vocabulary], float32, and the plan that was carried out.

        Raises:
            InvalidInput: the answer is empty, or with it the prompt crosses the length at which LongRoPE changes its
                frequencies; the policy is ``Verified()``, whose answer is the dense one; otherwise as prefill.
        """
        need(prompt, Prompt, "the prompt", "make one with agent.prompt(slot=...)")
        need(answer, Segment, "the answer", "pass a Segment, such as reply.segment")
        check_label(label)
        if not len(answer):
            raise InvalidInput("the answer has 0 tokens; there is nothing to force")
        token_ids = (*prompt.token_ids, *answer.token_ids)
        self._check(token_ids, len(token_ids))
        if self._crosses(len(token_ids)) and not self._crosses(len(prompt)):
            raise InvalidInput(
                f"a prompt of {len(prompt)} and an answer of {len(answer)} tokens cross the length of "
                f"{self.backend.spec.rope.switch_length} at which LongRoPE changes its frequencies; shorten the answer"
            )
        chosen = policy or self.policy
        heals = isinstance(chosen, Healed)
        prefilled = self.prefill(prompt, room=len(answer), policy=planning(chosen) if heals else policy)
        plan, buffer = prefilled.plan, prefilled.buffer
        taught, start = plan, buffer.length
        with turn(self.model, self.backend.spec):
            if isinstance(chosen, Healed) and plan.exact_until < len(prompt):
                logits, taught = force_healing(self.backend, prefilled, answer.token_ids, chosen.piece)
            else:
                logits = self.backend.forward(buffer, token_ids[start:], range(start, len(token_ids)), len(answer) + 1)
        if self.learn and not self._crosses(len(prompt)):
            self._learn_from(taught, buffer, answer, label, planning(chosen))
        return logits[:-1].float(), plan

    def study(self, prompt: Prompt, answer: Segment | None = None, label: str = "") -> int:
        """Learn from a prompt, and an answer to it if there is one, by a dense prefill alone; nothing is generated.

        Returns:
            how many offsets were observed; 0, and nothing is computed, beyond the length at which LongRoPE changes its
            frequencies.

        Raises:
            as prefill.
        """
        need(prompt, Prompt, "the prompt", "make one with agent.prompt(slot=...)")
        need(answer, (Segment, type(None)), "the answer", "pass a Segment, such as reply.segment, or nothing")
        check_label(label)
        reply = answer if answer is not None else Segment(())
        token_ids = (*prompt.token_ids, *reply.token_ids)
        self._check(token_ids, len(token_ids))
        if self._crosses(len(token_ids)):
            return 0

        def work() -> tuple[Plan, KVBuffer]:
            plan = Exact().plan(prompt, self.pool, self.book)
            with turn(self.model, self.backend.spec):
                return prepare(self.backend, plan, Exact(), self.book, len(reply))

        plan, buffer = again_if_lost(work)
        self._finish(buffer, token_ids)
        return self._learn_from(plan, buffer, reply, label, planning(self.policy))

    def isolate(self, segments: Sequence[Segment], behind: Segment | None = None) -> int:
        """Compute bases of texts known before they are needed, each alone behind a short neutral prefix.

        Args:
            behind: the prefix, cut off afterwards; the tokenizer's beginning and a line break unless given.

        Returns:
            how many bases were added. A text that LongRoPE would compute with its other frequencies gets none.

        Raises:
            as prefill; nothing was added.
        """
        need_all(segments, Segment, "segments", "pass a list of Segment, such as reply.segment")
        need(behind, (Segment, type(None)), "behind", "pass a Segment, or nothing")
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

    def forget(self, what: Segment | Agent | Conversation | Namespace) -> Forgotten:
        """Drop what a text, an agent or this engine's namespace left behind, in memory and in the store.

        Segment: every stored KV of this text, whoever captured it. Agent: the KV captured in its places, its answers'
        too, and the mean offsets and tests of these places; the agent itself stays. Conversation: the same for a
        ``name`` that ``chat`` was called with (kvcomm.hf.forget). Namespace: everything, of other models in the store
        too.

        What stays. KV of other texts that were computed behind it attended to it: forget those too, or the namespace.
        The map that all places share was taught by it: its sums add and cannot be taken apart; only forgetting the
        namespace clears them. Replies, files written by ``save`` and calls under way are the caller's.

        Raises:
            InvalidInput: it is something else, another namespace, or the engine is a fork.
            StoreError: the store could not delete or write; in memory it is gone.
        """
        return forget(self, what)

    def save(self, path: Path | str) -> int:
        """Write the bases held in memory and the learned offsets into one file (docs/format.md), for ``load``.

        Returns:
            how many bases were written.

        Raises:
            StoreUnavailable: the file could not be written; what was there stays.
        """
        return poolfile.save(path, self.pool, self.book)

    def load(self, path: Path | str) -> int:
        """Add the bases of a file, and go on from its offsets; for a new engine, before it has learned anything.

        An engine with a store puts the bases there too.

        Returns:
            how many bases were added.

        Raises:
            FingerprintMismatch: the file is of another model, dtype, adapter or tokenizer.
            InvalidInput: it is of another namespace, or offsets were learned here already.
            CorruptEntry: it is damaged; nothing of it is used.
            StoreUnavailable: it could not be read.
        """
        return poolfile.load(path, self.pool, self.book, self.backend.spec.device)
