"""The tokens that the question attends to most (after ProphetKV, ICML 2026)."""

from __future__ import annotations

from dataclasses import dataclass

from kvcomm.reuse.select.scene import Scene
from kvcomm.reuse.select.score import ByScore, Score, certain


@dataclass(frozen=True)
class Attended(ByScore):
    """Runs the question over the spliced cache and takes the tokens that it attends to most.

    The question is the prompt's last part that has tokens. The score of a token is the attention probability that it
    receives from a token of the question, averaged over these, heads and layers. The question's own tokens, where they
    were spliced too, come first and count within the share: the method always computes them. Whatever else is new must
    be run with it, since the question sees it. All tokens of this pass are counted on top: they are computed once more
    when the chosen ones are.
    """

    def score(self, scene: Scene) -> Score:
        prompt = scene.plan.prompt
        question = scene.closing
        run = sorted({*scene.new, *question})
        attention = scene.backend.attended(scene.buffer, [prompt.token_ids[p] for p in run], run, question)
        received = attention.mean(0)[list(scene.approximate)]
        return Score(certain(scene, received), extra_tokens=float(len(run)))
