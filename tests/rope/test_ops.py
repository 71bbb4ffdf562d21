"""Wrong input is refused with value, limit and remedy, and nothing is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcomm.errors import InvalidInput
from kvcomm.rope import LayerRope, RopeSpec, ops, rotate, rotate_add, unrotate
from tests.rope.oracle import make_spec

SPEC = make_spec(2, 16)
KEYS = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"keys": KEYS[0]}, r"\[3, 5, 16\].*\[layers, kv heads, tokens, head_dim\]"),
        ({"keys": KEYS.double()}, "float64.*pass float32, bfloat16 or float16"),
        ({"keys": KEYS.long()}, "int64"),
        ({"keys": KEYS[:1]}, "1 layers, the spec 2"),
        ({"keys": KEYS[..., :8]}, "head_dim 8, the spec 16"),
        ({"positions": POSITIONS[:4]}, r"\[4\].*pass \[5\] torch.int64"),
        ({"positions": POSITIONS[None]}, r"\[1, 5\].*pass \[5\]"),
        ({"positions": POSITIONS.int()}, "int32.*torch.int64"),
        ({"positions": POSITIONS.float()}, "float32.*torch.int64"),
        ({"positions": POSITIONS - 1}, "position -1 is below 0"),
        ({"positions": POSITIONS + 2**24}, "16777220.*limit 16777216"),
        ({"positions": POSITIONS.to("meta")}, "on meta, keys on cpu"),
    ],
)
def test_bad_keys_and_positions(changes: dict[str, Any], says: str) -> None:
    arguments = {"keys": KEYS, "positions": POSITIONS, "spec": SPEC, **changes}
    for function in (rotate, unrotate):
        out = torch.full(arguments["keys"].shape, 7.0, dtype=arguments["keys"].dtype)
        with pytest.raises(InvalidInput, match=says):
            function(**arguments, out=out)
        assert bool((out == 7).all())


@pytest.mark.parametrize(
    ("out", "says"),
    [
        (torch.empty(2, 3, 6, 16), "make them agree"),
        (torch.empty(2, 3, 5, 16, dtype=torch.bfloat16), "bfloat16.*make them agree"),
        (torch.empty(2, 3, 5, 16, device="meta"), "on meta.*make them agree"),
        (torch.empty(2, 1, 5, 16).expand(2, 3, 5, 16), "not expanded"),
        (KEYS, "shares memory with keys"),
        (KEYS.transpose(0, 0), "shares memory with keys"),
    ],
)
def test_bad_out(out: torch.Tensor, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        rotate(KEYS, POSITIONS, SPEC, out=out)


def test_out_may_be_another_part_of_one_storage() -> None:
    pool = torch.randn(4, 3, 5, 16)
    want = rotate(pool[:2].clone(), POSITIONS, SPEC)
    assert torch.equal(rotate(pool[:2], POSITIONS, SPEC, out=pool[2:]), want)
    with pytest.raises(InvalidInput, match="shares memory"):
        rotate(pool[:2], POSITIONS, SPEC, out=pool[1:3])


@pytest.mark.parametrize("offset", [KEYS[:, :1], KEYS.double(), KEYS.long(), KEYS.to("meta")])
def test_bad_offset(offset: torch.Tensor) -> None:
    with pytest.raises(InvalidInput, match="does not go with base"):
        rotate_add(KEYS, offset, POSITIONS, SPEC)


def test_out_sharing_memory_with_the_offset() -> None:
    offset = torch.zeros_like(KEYS)
    with pytest.raises(InvalidInput, match="shares memory with offset"):
        rotate_add(KEYS, offset, POSITIONS, SPEC, out=offset)


def test_positions_past_the_switch_are_refused_under_the_short_set() -> None:
    layer = LayerRope("longrope", (1.0, 0.1), 1.0, 16)
    short, long = RopeSpec((layer, layer), "short", 4), RopeSpec((layer, layer), "long", 4)
    with pytest.raises(InvalidInput, match="position 4 is not below this rope's limit 4; recompute"):
        rotate(KEYS, POSITIONS, short)
    rotate(KEYS[:, :, :4], POSITIONS[:4], short)
    rotate(KEYS, POSITIONS, long)


def test_an_implementation_is_chosen_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def other(keys: torch.Tensor, *_: Any, **named: Any) -> torch.Tensor:
        calls.append(named)
        return keys

    monkeypatch.setitem(ops.IMPLEMENTATIONS, "cpu", other)
    assert unrotate(KEYS, POSITIONS, SPEC) is KEYS
    assert rotate_add(KEYS, KEYS, POSITIONS, SPEC) is KEYS
    assert [call["inverse"] for call in calls] == [True, False]
    assert calls[0]["offset"] is None and calls[1]["offset"] is KEYS
