"""Taking turns on a model whose forward changes it; all others run as many calls at once as there are threads.

transformers' LongRoPE keeps the frequencies of the last forward in the model: a prompt beyond the length at which they
change, in one thread, would turn those of a shorter one in another.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from kvcomm.reuse.backend import ModelSpec

_locks: WeakKeyDictionary[PreTrainedModel, threading.RLock] = WeakKeyDictionary()
_locks_lock = threading.Lock()


def turn(model: PreTrainedModel, spec: ModelSpec) -> AbstractContextManager[object]:
    """What to hold while ``model`` runs: nothing, or the one lock that all engines on it share."""
    if spec.rope.switch_length is None:
        return nullcontext()
    with _locks_lock:
        return _locks.setdefault(model, threading.RLock())
