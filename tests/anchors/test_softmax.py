"""Softmax over token embeddings: a naive loop as oracle, what counts as near, bounds, and the book around it."""

from __future__ import annotations

import math

import pytest
import torch

from kvcomm.anchors.book import Observation
from kvcomm.anchors.softmax import Anchor, SoftmaxBook, SoftmaxOffset, embedding_of
from kvcomm.anchors.statistics import Pair, features
from kvcomm.errors import InvalidInput
from kvcomm.types import SegmentKV
from tests.anchors.synthetic import DIM, FINGERPRINT, HEADS, LAYERS, WIDTH, offset_of, plus, random_kv

PAIR, UNSEEN = Pair("prompt", "coder/task", "critic/task"), Pair("prompt", "coder/task", "nobody/task")
VOCABULARY = random_kv(50, 77)  # layer 0 of each of 50 tokens


def text(ids: list[int], seed: int) -> SegmentKV:
    """A text of VOCABULARY's tokens: layer 0 is theirs, the other layers are anything."""
    kv = random_kv(len(ids), seed)
    kv.keys[0], kv.values[0] = VOCABULARY.keys[0][:, ids], VOCABULARY.values[0][:, ids]
    return kv


def add(ids: list[int], by: list[float], seed: int = 0, pair: Pair = PAIR) -> Observation:
    """An observation whose token t was moved by ``by[t]`` everywhere."""
    base = text(ids, seed)
    return Observation(pair, base, plus(base, torch.tensor(by)[:, None].expand(LAYERS - 1, HEADS, -1, WIDTH)))


def predict(book: SoftmaxBook, base: SegmentKV, pair: Pair = PAIR) -> torch.Tensor:
    predictor = book.predictor()
    found = predictor.predict(pair, base) if predictor else None
    if found is None:
        raise LookupError(pair)
    return found


def test_the_embedding_is_the_first_layer() -> None:
    kv = text([4, 9], 1)
    assert embedding_of(kv).shape == (2, HEADS * WIDTH)
    assert torch.equal(embedding_of(kv), embedding_of(text([4, 9], 2)))
    assert torch.equal(embedding_of(kv)[1, :DIM], kv.keys[0, 0, 1])


def test_it_is_a_naive_loop() -> None:
    book, temperature = SoftmaxBook(FINGERPRINT, SoftmaxOffset(temperature=0.4)), 0.4
    observed = [Observation(PAIR, random_kv(n, n), random_kv(n, 60 + n)) for n in (3, 7, 5, 6)]
    book.learn(observed)
    base = random_kv(9, 99)
    found = predict(book, base)
    near, mine = [embedding_of(seen.base) for seen in observed], embedding_of(base)
    distance = [[float((e[min(t, len(e) - 1)] - mine[t]).norm()) for t in range(9)] for e in near]
    scale = temperature * sum(map(sum, distance)) / (4 * 9)
    for t in range(9):
        reach = [n for n in range(4) if t < len(near[n])] or list(range(4))
        weight = {n: math.exp(-distance[n][t] / scale) for n in reach}
        oracle = sum(
            w / sum(weight.values()) * offset_of(observed[n].base, observed[n].true)[:, :, min(t, len(near[n]) - 1)]
            for n, w in weight.items()
        )
        torch.testing.assert_close(found[:, :, t].double(), oracle, rtol=0, atol=1e-5)


def test_the_same_token_at_the_same_index_decides() -> None:
    book = SoftmaxBook(FINGERPRINT, SoftmaxOffset(temperature=0.02))
    book.learn([add([1, 2, 3], [1.0, 2.0, 3.0]), add([7, 8, 9], [7.0, 8.0, 9.0], 1)])
    found = predict(book, text([7, 2, 9], 5))
    assert [float(found[..., t, :].mean()) for t in range(3)] == pytest.approx([7.0, 2.0, 9.0], abs=1e-3)


def test_a_hot_softmax_is_the_mean() -> None:
    book = SoftmaxBook(FINGERPRINT, SoftmaxOffset(temperature=1e6))
    book.learn([add([1, 2], [1.0, 2.0]), add([3, 4], [5.0, 8.0], 1)])
    found = predict(book, text([1, 2], 5))
    assert [float(found[..., t, :].mean()) for t in range(2)] == pytest.approx([3.0, 5.0], abs=1e-3)


def test_beyond_every_anchor_their_last_tokens_count() -> None:
    book = SoftmaxBook(FINGERPRINT)
    book.learn([add([1, 2], [1.0, 4.0])])
    assert float(predict(book, text([1, 2, 3, 4, 5], 5))[..., 4, :].mean()) == pytest.approx(4.0, abs=1e-5)


def test_a_pair_never_seen_gets_nothing() -> None:
    book = SoftmaxBook(FINGERPRINT)
    assert book.predictor() is None and book.estimate(PAIR, random_kv(2, 1)) is None
    book.learn([add([1], [1.0])])
    with pytest.raises(LookupError):
        predict(book, text([1], 2), UNSEEN)


def test_anchors_are_bounded_for_each_pair() -> None:
    book = SoftmaxBook(FINGERPRINT, SoftmaxOffset(max_anchors=3))
    for n in range(10):
        book.learn([add([n], [float(n)], n), add([n], [float(n)], n, UNSEEN)])
    assert [len(held) for held in book.anchors.values()] == [3, 3]
    one = Anchor.of(*(add([1], [1.0]).base for _ in range(2))).nbytes
    assert book.nbytes == 6 * one
    assert float(predict(book, text([0], 5)).mean()) > 6.9  # the latest three: 7, 8, 9


def test_the_book_tests_before_it_learns_and_does_no_harm() -> None:
    helpful, harmful = SoftmaxBook(FINGERPRINT), SoftmaxBook(FINGERPRINT)
    for n in range(6):
        helpful.learn([add([n, n + 1], [2.0, 3.0], n)])
        harmful.learn([add([1, 2], [1.0, 1.0] if n % 2 else [-1.0, -1.0], n)])
    assert helpful.gains[PAIR].calls == 5
    estimate = helpful.estimate(PAIR, text([9, 9], 50))
    assert estimate is not None
    assert float(features(estimate)[..., 1, :].mean()) == pytest.approx(3.0, abs=1e-4)
    assert float(estimate.keys[0].abs().max()) == 0.0
    guess = harmful.estimate(PAIR, text([1, 2], 50))
    assert guess is None or float(features(guess).abs().max()) < 0.3


def test_a_bad_observation_becomes_no_anchor() -> None:
    book, bad = SoftmaxBook(FINGERPRINT), add([1], [math.nan])
    with pytest.raises(InvalidInput, match="NaN"):
        book.learn([add([1], [1.0]), bad])
    assert not book.anchors and not book.statistics.pairs


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": -1.0}, {"max_anchors": 0}])
def test_configuration_is_checked(options: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match="above 0"):
        SoftmaxOffset(**options)  # type: ignore[arg-type]
