"""KVCOMM as published (NeurIPS 2025, arXiv 2510.12872), run on kvcomm's parts to be compared with it.

Reuse is all or nothing: if every slot of a call passes the entropy test, everything but the prompt's last token is
spliced from bases and anchors' offsets, and nothing is recomputed; otherwise the call runs dense and becomes an anchor.
Key offsets are kept in the rotated frame of the anchor's position and added at another, as in the published code.

Differences, each in the published method's favour: a dense call studied beforehand becomes an anchor whether or not the
test asked for it, and a call that runs dense still reuses its exact prefix.
"""

from __future__ import annotations

import time

import torch

from eval.methods.paper_anchors import Anchor, AnchorPool
from kvcomm import Engine
from kvcomm.anchors.pool import Base, BasePool
from kvcomm.hf.reply import Prefilled
from kvcomm.hf.support import cache_argument
from kvcomm.keys import Recipe
from kvcomm.reuse.backend import KVBuffer
from kvcomm.reuse.plan import PartPlan, Plan
from kvcomm.reuse.policy import Dense, Exact, Policy
from kvcomm.reuse.prompt import Part, Prompt
from kvcomm.reuse.splice import cut, splice
from kvcomm.types import Segment, SegmentKV

GAMMA = 0.3
_ORIGINS = ("decode", "isolated")


class PaperEngine(Engine):
    """An engine whose prefill is the published method's.

    Attributes:
        anchors: by label of the slot, ``agent/slot``.
        fixed: bases of an agent's fixed texts by label, from a prefill of its template with ``{slot}`` in each slot.
    """

    anchors: dict[str, AnchorPool]
    fixed: dict[str, Base]

    @classmethod
    def over(cls, engine: Engine) -> PaperEngine:
        """A paper engine on the same model and agents, with anchors and bases of its own."""
        other = object.__new__(cls)
        other.__dict__.update(engine.fork(policy=Dense()).__dict__)
        other.pool = BasePool(engine.namespace, engine.pool.fingerprint, engine.pool.max_bytes)
        other.anchors, other.fixed = {}, {}
        for agent in other._agents.values():
            agent.engine = other
        return other

    def fork(self, *, policy: Policy | None = None, learn: bool = True) -> PaperEngine:
        """As Engine.fork; anchors added in a fork stay there."""
        other = object.__new__(PaperEngine)
        other.__dict__.update(super().fork(policy=policy, learn=learn).__dict__)
        other.anchors = {label: pool.copy() for label, pool in self.anchors.items()}
        for agent in other._agents.values():
            agent.engine = other
        return other

    def prefill(self, prompt: Prompt, *, room: int = 256, policy: Policy | None = None) -> Prefilled:
        """The published decision, then a splice or a dense prefill; another policy asked for is followed instead."""
        started = time.perf_counter()
        if policy is not None:
            return super().prefill(prompt, room=room, policy=policy)
        plan = self._published(prompt)
        if plan is None:
            return super().prefill(prompt, room=room, policy=Exact())
        self._check(prompt.token_ids, len(prompt) + room)
        buffer = KVBuffer(self.backend.spec, len(prompt) + room)
        for part in plan.parts:
            if part.base is not None:
                splice(buffer, self.backend.spec, part.base.kv, part.start)
        for index, part in enumerate(plan.parts):
            if part.base is not None and not _is_fixed(part.part):
                self._add_offset(buffer, plan, index, part.base.kv)
        buffer.length = len(prompt) - 1
        return Prefilled.of(plan, buffer, cache_argument(self.model), time.perf_counter() - started)

    def _published(self, prompt: Prompt) -> Plan | None:
        """The plan of a call that passes, or None."""
        if self._crosses(len(prompt)):
            return None
        parts = []
        for index, (part, start) in enumerate(zip(prompt.parts, prompt.starts, strict=True)):
            base = self.base(prompt, index)
            if base is None and len(part.segment):
                return None
            if base is not None and not _is_fixed(part):
                pool = self.anchors.get(part.label)
                if pool is None or not pool.match(base.kv, GAMMA):
                    return None
            exact = base is None or (index == 0 and _is_fixed(part))
            why = "same tokens from position 0" if exact else "all slots pass the entropy test"
            parts.append(PartPlan(part, start, "exact" if exact else "approximate", why, base))
        return Plan(prompt, tuple(parts), "all slots pass the entropy test")

    def base(self, prompt: Prompt, index: int) -> Base | None:
        """The base that the published method uses for a part, or None where it is not held."""
        part = prompt.parts[index]
        if _is_fixed(part):
            held = self.fixed.get(part.label) or self._fixed(part.label)
            return held if held.segment.token_ids == part.segment.token_ids else None
        bases = self.pool.bases(part.segment)
        return next((base for origin in _ORIGINS for base in bases if base.recipe.origin == origin), None)

    def _fixed(self, label: str) -> Base:
        """Prefill the template of the label's agent with its slots' names and keep its fixed texts."""
        agent = self._agents[label.split("/")[0]]
        prompt = agent.prompt(**{slot: f"{{{slot}}}" for slot in agent.template.slots})
        buffer = KVBuffer(self.backend.spec, len(prompt))
        self._finish(buffer, prompt.token_ids)
        for index, (part, start) in enumerate(zip(prompt.parts, prompt.starts, strict=True)):
            if _is_fixed(part):
                recipe = Recipe("prompt", part.label, prompt.preceding[index], True)
                kv = cut(buffer, self.backend.spec, start, start + len(part.segment))
                self.fixed[part.label] = Base(part.segment, recipe, kv)
        return self.fixed[label]

    def _add_offset(self, buffer: KVBuffer, plan: Plan, index: int, base: SegmentKV) -> None:
        part = plan.parts[index]
        offset = self.anchors[part.part.label].offset(base)
        buffer.keys[:, :, part.start : part.stop] += offset.keys
        buffer.values[:, :, part.start : part.stop] += offset.values
        after = _behind(plan, index)
        if after is not None:
            buffer.keys[:, :, after.start : after.stop] += offset.after_keys
            buffer.values[:, :, after.start : after.stop] += offset.after_values

    def _learn_from(self, plan: Plan, buffer: KVBuffer, reply: Segment, label: str, policy: Policy) -> int:
        known = super()._learn_from(plan, buffer, reply, label, policy)
        if plan.exact_until < len(plan.prompt):
            return known
        for index, part in enumerate(plan.parts):
            if len(part.part.segment) and not _is_fixed(part.part):
                if self.base(plan.prompt, index) is None:
                    self.isolate([part.part.segment])
                self._remember(plan, buffer, index)
        return known

    def _remember(self, plan: Plan, buffer: KVBuffer, index: int) -> None:
        """Make the dense KV of a slot, and of the fixed text behind it, an anchor."""
        part, after = plan.parts[index], _behind(plan, index)
        base = self.base(plan.prompt, index)
        if base is None:
            return
        keys, values = self._difference(buffer, part, base.kv)
        behind = self.base(plan.prompt, index + 1) if after is not None else None
        if after is not None and behind is not None:
            after_keys, after_values = self._difference(buffer, after, behind.kv)
        else:
            after_keys, after_values = keys[:, :, :0], values[:, :, :0]
        pool = self.anchors.setdefault(part.part.label, AnchorPool())
        pool.add(Anchor(base.kv, keys, values, after_keys, after_values))

    def _difference(self, buffer: KVBuffer, part: PartPlan, base: SegmentKV) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense minus base of a part, keys as they stand rotated at its position."""
        moved = KVBuffer(self.backend.spec, part.stop)
        splice(moved, self.backend.spec, base, part.start)
        where = slice(part.start, part.stop)
        keys = buffer.keys[:, :, where] - moved.keys[:, :, where]
        return keys, buffer.values[:, :, where] - base.values


def _is_fixed(part: Part) -> bool:
    return "/#" in part.label


def _behind(plan: Plan, index: int) -> PartPlan | None:
    """The fixed text right behind a slot."""
    following = plan.parts[index + 1 : index + 2]
    return following[0] if following and _is_fixed(following[0].part) else None
