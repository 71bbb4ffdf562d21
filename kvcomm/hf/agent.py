"""An agent: a template on an engine, called with its slots filled."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from kvcomm.hf.arguments import check_generate_arguments
from kvcomm.hf.reply import Reply
from kvcomm.hf.template import SlotValue, Template
from kvcomm.reuse.plan import Plan
from kvcomm.reuse.policy import Policy
from kvcomm.reuse.prompt import Prompt

if TYPE_CHECKING:
    from kvcomm.hf.engine import Engine


class Agent:
    """An agent's template on an engine."""

    def __init__(self, engine: Engine, template: Template) -> None:
        self.engine, self.template = engine, template

    @property
    def name(self) -> str:
        """The agent's name."""
        return self.template.name

    def prompt(self, **slots: SlotValue) -> Prompt:
        """The filled template; each slot takes a str, a Segment or another agent's Reply."""
        return self.template.fill(slots)

    @property
    def label(self) -> str:
        """The place that the agent's answers are filed under."""
        return f"{self.name}/reply"

    def generate(
        self,
        *,
        max_new_tokens: int | None = None,
        policy: Policy | None = None,
        options: Mapping[str, Any] | None = None,
        **slots: SlotValue,
    ) -> Reply:
        """Answer with the slots filled.

        Args:
            max_new_tokens, policy: see Engine.generate.
            options: further arguments for model.generate, such as ``{"do_sample": True}``.
            slots: a value for each slot of the template.

        Raises:
            InvalidInput, PromptTooLong: nothing was changed.
        """
        started = time.perf_counter()
        check_generate_arguments(options if options is not None else {})
        return self.engine.generate(
            self.prompt(**slots),
            label=self.label,
            max_new_tokens=max_new_tokens,
            policy=policy,
            started=started,
            **(options or {}),
        )

    async def agenerate(
        self,
        *,
        max_new_tokens: int | None = None,
        policy: Policy | None = None,
        options: Mapping[str, Any] | None = None,
        **slots: SlotValue,
    ) -> Reply:
        """As generate, from asyncio; cancelling the task stops the generation. See Engine.agenerate."""
        started = time.perf_counter()
        check_generate_arguments(options if options is not None else {})
        return await self.engine.agenerate(
            self.prompt(**slots),
            label=self.label,
            max_new_tokens=max_new_tokens,
            policy=policy,
            started=started,
            **(options or {}),
        )

    def force(
        self, answer: SlotValue, *, policy: Policy | None = None, **slots: SlotValue
    ) -> tuple[torch.Tensor, Plan]:
        """Teacher-force an answer: see Engine.force."""
        segment = self.template.segment("answer", answer)
        return self.engine.force(self.prompt(**slots), segment, label=self.label, policy=policy)

    def study(self, *, answer: SlotValue | None = None, **slots: SlotValue) -> int:
        """Learn from a call without generating: see Engine.study."""
        segment = None if answer is None else self.template.segment("answer", answer)
        return self.engine.study(self.prompt(**slots), segment, self.label)
