"""What the engine itself expects to be off, known before anything is computed: to be held against the true KL."""

from __future__ import annotations

from kvcomm.anchors.book import OffsetBook
from kvcomm.reuse.plan import Plan


def expected_error(book: OffsetBook, plan: Plan) -> float:
    """Expected squared error of the spliced KV, averaged over the prompt's tokens; 0 while nothing was observed.

    In units of each layer's mean squared keys and values (kvcomm/anchors/variance.py). Tokens that are computed, or
    reused exactly, have none.
    """
    errors = book.errors()
    if errors is None:
        return 0.0
    total = 0.0
    for part in plan.parts:
        if part.action == "approximate":
            computed = set(part.computed)
            expected = errors.expect(part.pair, part.stop - part.start).tolist()
            total += sum(e for place, e in enumerate(expected, part.start) if place not in computed)
    return total / len(plan.prompt)
