"""Reading configs: every rope type, where parameters may live, what is refused, and identity."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig, GraniteSWAConfig, LlamaConfig, SmolLM3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvcomm.errors import InvalidInput, UnsupportedModel
from kvcomm.rope import LayerRope, RopeSpec
from tests.rope.oracle import make_spec


def config(rope: Any, **named: Any) -> SimpleNamespace:
    base = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096}
    return SimpleNamespace(**{**base, "rope_parameters": rope, **named})


PARAMETERS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "linear", "factor": 8, "partial_rotary_factor": 0.5},
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 128, "truncate": False, "beta_fast": 16},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 102,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 1.3},
    {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.5},
    {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    {"rope_type": "proportional", "factor": 3.0},
]


@pytest.mark.parametrize("theta", [10000, 500000.0, 1e6])
@pytest.mark.parametrize("head_dim", [16, 60, 128])
@pytest.mark.parametrize("rope", PARAMETERS, ids=lambda rope: rope["rope_type"])
def test_types_equal_transformers(rope: dict[str, Any], head_dim: int, theta: float) -> None:
    made = LlamaConfig(head_dim=head_dim, max_position_embeddings=4096, rope_parameters={"rope_theta": theta, **rope})
    made.num_hidden_layers = 2
    inv_freq, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](made)
    for layer in RopeSpec.from_config(made).layers:
        assert layer is not None and layer.matches(inv_freq, factor)


@pytest.mark.parametrize("named", [{}, {"factor": 16.0}, {"attention_factor": 1.19}])
@pytest.mark.parametrize("length", [None, 1024, 1025])
def test_longrope_equals_transformers(length: int | None, named: dict[str, float]) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 1024, **named}
    rope |= {"short_factor": [1.0 + i / 7 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
    made = LlamaConfig(head_dim=16, max_position_embeddings=4096, num_hidden_layers=2, rope_parameters=rope)
    inv_freq, factor = ROPE_INIT_FUNCTIONS["longrope"](made, seq_len=length)
    spec = RopeSpec.from_config(made, prompt_length=length)
    assert spec.layers[0] is not None and spec.layers[0].matches(inv_freq, factor)
    assert (spec.factor_set, spec.switch_length) == ("long" if length == 1025 else "short", 1024)
    assert spec.limit == (2**24 if length == 1025 else 1024)
    assert spec.crosses(1025) == (length != 1025) and spec.crosses(1024) == (length == 1025)


def test_other_types_have_no_switch() -> None:
    spec = make_spec(2, 64)
    assert (spec.factor_set, spec.switch_length, spec.limit) == (None, None, 2**24)
    assert not spec.crosses(10**6)


@pytest.mark.parametrize(
    ("made", "dims"),
    [
        (config({"rope_theta": 1e4}), (16, 16)),
        (config({"rope_theta": 1e4}, head_dim=None), (16, 16)),
        (config({"rope_theta": 1e4}, head_dim=24), (24, 24)),
        (config({"rope_theta": 1e4, "partial_rotary_factor": 0.5}), (8, 16)),
        (config({"rope_theta": 1e4}, partial_rotary_factor=0.25), (4, 16)),
        (config({"rope_type": None}, rope_theta=1e4), (16, 16)),
    ],
)
def test_where_parameters_may_live(made: Any, dims: tuple[int, int]) -> None:
    layer = RopeSpec.from_config(made).layers[0]
    assert layer is not None and (layer.rotary_dim, layer.head_dim, layer.rope_type) == (*dims, "default")


def test_reading_leaves_the_config_alone() -> None:
    rope = {"rope_theta": 1e4}
    RopeSpec.from_config(config(rope, partial_rotary_factor=0.5))
    assert rope == {"rope_theta": 1e4}


def test_layer_types() -> None:
    types = ["a", "b", "a"]
    both = {"a": {"rope_theta": 1e4}, "b": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}}
    first, second, third = RopeSpec.from_config(config(both, layer_types=types)).layers
    assert first == third and first is not None and second is not None
    assert (first.rope_type, second.rope_type) == ("default", "linear")
    none = RopeSpec.from_config(config({**both, "b": None}, layer_types=types))
    assert none.layers == (first, None, third)


def test_layers_without_rope() -> None:
    made = SmolLM3Config(num_hidden_layers=8)
    assert [layer is None for layer in RopeSpec.from_config(made).layers] == [i % 4 == 3 for i in range(8)]
    thetas = GraniteSWAConfig(num_hidden_layers=3, layer_types=["full_attention"] * 3, layer_rope_theta=[0, 1e4, 1e6])
    first, second, third = RopeSpec.from_config(thetas).layers
    assert first is None and second is not None and third is not None and second != third
    stated = RopeSpec.from_config(config({"rope_theta": 1e4}), rope_layers=[True, False, True])
    assert stated.layers[1] is None and stated.head_dim == 16
    with pytest.raises(InvalidInput, match="2 entries for 3 layers"):
        RopeSpec.from_config(config({"rope_theta": 1e4}), rope_layers=[True, False])
    assert RopeSpec((None, None)).head_dim is None


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (config({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "'dynamic'.*length of the sequence"),
        (config({"rope_theta": 1e4, "mrope_section": [2, 3, 3]}), "'mrope'.*three positions"),
        (config({"rope_type": "axial", "rope_theta": 100.0}), "'axial'.*image"),
        (config({"rope_type": "2d", "rope_theta": 100.0}), "'2d'.*image"),
        (config({"rope_type": "spiral", "rope_theta": 1e4}), "'spiral'.*not known"),
        (config(None), "no rope_parameters"),
        (config({}), "no rope_parameters"),
        (config({"main": {"rope_theta": 1e4}, "compress": {"rope_theta": 1e4}}), "nested by.*compress"),
        (config({"a": {"rope_theta": 1e4}}, layer_types=["a", "b", "a"]), "do not cover"),
        (config({"a": {"rope_theta": 1e4}}, layer_types=["a", "a"]), "do not cover"),
        (config({"rope_type": "linear", "rope_theta": 1e4}), "needs 'factor'"),
        (config({"rope_type": "default"}), "needs 'rope_theta'"),
        (config({"rope_theta": 1e4}, qk_rope_head_dim=8, kv_lora_rank=4), "multi-head latent attention"),
        (config({"rope_theta": 1e4}, no_rope_layers=[1, 0]), "no_rope_layers has 2 entries"),
        (config({"rope_theta": 1e4, "partial_rotary_factor": 2.0}), "turns 32 of 16"),
        (config({"rope_theta": 1e4, "partial_rotary_factor": 0.05}), "turns 0 of 16"),
        (config({"rope_theta": float("nan")}), "not finite"),
        (
            config({"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [1.0]}),
            "1 numbers for 8",
        ),
        (SimpleNamespace(rope_parameters={"rope_theta": 1e4}), "no num_hidden_layers"),
        (Gemma4TextConfig(num_hidden_layers=6), r"head sizes \[256, 512\]"),
    ],
)
def test_refused(made: Any, says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        RopeSpec.from_config(made)


def test_heads_of_one_size_in_a_layered_config() -> None:
    layers = RopeSpec.from_config(Gemma4TextConfig(num_hidden_layers=6, head_dim=256, global_head_dim=256)).layers
    assert [layer.rope_type for layer in layers if layer] == ["default"] * 5 + ["proportional"]


def test_digest_changes_with_every_field() -> None:
    layer = LayerRope("default", (1.0, 0.5), 1.0, 8, False)
    others = [
        LayerRope("linear", (1.0, 0.5), 1.0, 8, False),
        LayerRope("default", (1.0, 0.25), 1.0, 8, False),
        LayerRope("default", (1.0, 0.5), 1.5, 8, False),
        LayerRope("default", (1.0, 0.5), 1.0, 16, False),
        LayerRope("default", (1.0, 0.5), 1.0, 8, True),
    ]
    specs = [RopeSpec((one,)) for one in (layer, *others)]
    specs += [RopeSpec((layer, layer)), RopeSpec((layer, None)), RopeSpec((None, layer)), RopeSpec((None,))]
    specs += [RopeSpec((layer,), "short", 9), RopeSpec((layer,), "long", 9), RopeSpec((layer,), "short", 8)]
    assert len({spec.digest for spec in specs}) == len(specs) == len(set(specs))
    assert RopeSpec((layer,)).digest == RopeSpec((LayerRope("default", (1.0, 0.5), 1.0, 8),)).digest


def test_frequencies_do_not_depend_on_torch_defaults() -> None:
    made = config({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512})
    plain = RopeSpec.from_config(made)
    with torch.device("meta"):
        assert RopeSpec.from_config(made) == plain
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert RopeSpec.from_config(made) == plain
    finally:
        torch.set_default_dtype(before)


def test_transformers_is_not_imported() -> None:
    code = "import sys, kvcomm.rope; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
