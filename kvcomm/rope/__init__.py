"""Rotary position embedding of keys: what each layer does, and putting it on and taking it off.

Everything stored or sent is in the unrotated frame. ``unrotate`` takes keys there from the position at which a model
computed them; ``rotate`` and ``rotate_add`` take them to the position at which they are used, once per splice.
"""

from kvcomm.rope.ops import rotate, rotate_add, unrotate
from kvcomm.rope.spec import FactorSet, LayerRope, RopeSpec

__all__ = ["FactorSet", "LayerRope", "RopeSpec", "rotate", "rotate_add", "unrotate"]
