"""Forgetting: what a text, an agent or a namespace left in the pool, in the learned offsets and in the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcomm.errors import InvalidInput
from kvcomm.hf.agent import Agent
from kvcomm.hf.template import check_name
from kvcomm.types import Namespace, Segment

if TYPE_CHECKING:
    from kvcomm.hf.core import Core


@dataclass(frozen=True)
class Conversation:
    """The ``name`` that Engine.chat was called with: conversations have no Agent.

    Raises:
        InvalidInput: no name of an agent.
    """

    name: str = "chat"

    def __post_init__(self) -> None:
        check_name(self.name)


@dataclass(frozen=True)
class Forgotten:
    """What was dropped.

    Attributes:
        bases: stored KV of texts, in memory and in the store, each counted once.
        pairs: pairs of places whose mean offsets and tests were dropped from memory.
    """

    bases: int
    pairs: int


def forget(engine: Core, what: Segment | Agent | Conversation | Namespace) -> Forgotten:
    """See Engine.forget."""
    if engine.pool.parent is not None:
        raise InvalidInput("a fork cannot forget what the engine that it was forked from holds; forget there")
    if isinstance(what, Segment):
        return Forgotten(engine.pool.forget(what), 0)
    if isinstance(what, Agent | Conversation):
        return _agent(engine, what.name)
    if not isinstance(what, Namespace):
        raise InvalidInput(
            f"{type(what).__name__} cannot be forgotten; pass a Segment, an Agent, a Conversation or a Namespace"
        )
    if what != engine.namespace:
        raise InvalidInput(f"the engine has namespace {engine.namespace}, not {what}; forget it on one of that name")
    bases = engine.pool.drop(lambda key: True)
    pairs = engine.book.clear()
    if engine.store is not None:
        engine.store.delete_namespace(engine.namespace)  # that of other models, and what was learned, too
    return Forgotten(bases, pairs)


def _agent(engine: Core, name: str) -> Forgotten:
    def belongs(label: str) -> bool:
        return label.partition("/")[0] == name

    bases = engine.pool.drop(lambda key: belongs(key.recipe.context))
    pairs = engine.book.forget(belongs)
    if engine._offsets is not None:
        engine._offsets.forget(name)
    return Forgotten(bases, pairs)
