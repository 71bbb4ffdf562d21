"""The tokens whose values deviate most at an early layer (CacheBlend, arXiv 2405.16444).

Tokens that deviate at one layer tend to deviate at the next, so that an early layer, computed for all tokens, tells
which to go on with.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcomm.errors import InvalidInput
from kvcomm.reuse.select.scene import Scene
from kvcomm.reuse.select.score import ByScore, Score


@dataclass(frozen=True)
class Deviation(ByScore):
    """Computes the layers up to ``layer`` for every token not exact, and compares the values there with the spliced.

    The score of a token is the squared distance between fresh and spliced values at that layer, summed over heads and
    dimensions, as in the published code. The fresh KV of these layers, those of a dense run, stay in the cache. Each
    token not chosen counts as recomputed in ``layer + 1`` of all layers.

    Attributes:
        layer: whose values are compared, counted from 0; the published choice is the second layer.

    Raises:
        InvalidInput: share or layer are out of range.
    """

    layer: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer < 1:
            raise InvalidInput(f"layer is {self.layer}; give 1 or more: values of layer 0 depend on the token alone")

    def score(self, scene: Scene) -> Score:
        layers = scene.backend.spec.fingerprint.n_layers
        values = scene.buffer.values[self.layer] if self.layer < layers else None
        if values is None:
            raise InvalidInput(f"layer {self.layer} of a model of {layers} layers: give less")
        at = list(scene.approximate)
        spliced = values[:, at].clone()
        fresh = sorted((*scene.approximate, *scene.new))
        scene.backend.forward_first(
            scene.buffer, [scene.plan.prompt.token_ids[p] for p in fresh], fresh, layers=self.layer
        )
        deviation = (values[:, at].float() - spliced.float()).square().sum((0, 2))
        return Score(deviation, partial=(self.layer + 1) / layers)
