"""kvcomm: reuse the KV cache of any piece of text at any position and in any agent.

Importing this package imports neither torch nor transformers and touches no device: names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvcomm.errors import InvalidInput as InvalidInput
    from kvcomm.errors import KVCommError as KVCommError
    from kvcomm.errors import UnsupportedModel as UnsupportedModel
    from kvcomm.hf.engine import Engine as Engine
    from kvcomm.hf.reply import Reply as Reply
    from kvcomm.hf.template import Slot as Slot
    from kvcomm.hf.template import System as System
    from kvcomm.reuse.healing import Healed as Healed
    from kvcomm.reuse.healing import Verified as Verified
    from kvcomm.reuse.policy import Balanced as Balanced
    from kvcomm.reuse.policy import Dense as Dense
    from kvcomm.reuse.policy import Exact as Exact
    from kvcomm.reuse.policy import Fast as Fast
    from kvcomm.reuse.policy import Reuse as Reuse
    from kvcomm.types import Segment as Segment

_HOMES = {
    "Balanced": "kvcomm.reuse.policy",
    "Dense": "kvcomm.reuse.policy",
    "Engine": "kvcomm.hf.engine",
    "Exact": "kvcomm.reuse.policy",
    "Fast": "kvcomm.reuse.policy",
    "Healed": "kvcomm.reuse.healing",
    "InvalidInput": "kvcomm.errors",
    "KVCommError": "kvcomm.errors",
    "Reply": "kvcomm.hf.reply",
    "Reuse": "kvcomm.reuse.policy",
    "Segment": "kvcomm.types",
    "Slot": "kvcomm.hf.template",
    "System": "kvcomm.hf.template",
    "UnsupportedModel": "kvcomm.errors",
    "Verified": "kvcomm.reuse.healing",
}
__all__ = sorted([*_HOMES, "__version__"])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvcomm' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__
