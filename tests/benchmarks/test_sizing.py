"""The sizing table: a model worked out by hand, and the page holds what the script gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sizing import MODELS, Load, fetch_s, node_gbit_s, put_gbit_s, table, tokens_held
from kvcomm.errors import InvalidInput


def test_llama_by_hand() -> None:
    llama, load = MODELS[0], Load(nodes=1, calls_s=1, prompt=1000, reused=0.5, remote=0.5)
    assert llama.bytes_per_token == 131_072  # 2 x 32 x 8 x 128 x 2
    assert tokens_held(llama, 131_072 * 7 + 1) == 7
    assert node_gbit_s(llama, load) == pytest.approx(250 * 131_072 * 8 / 1e9)
    assert put_gbit_s(llama, load) == pytest.approx(500 * 131_072 * 8 / 1e9)
    assert fetch_s(llama, load, 10) == pytest.approx(0.0262144)


def test_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    assert "\n".join(table()) in page


def test_impossible_loads_are_refused() -> None:
    for bad in ({"nodes": 0}, {"reused": 1.1}, {"remote": -0.1}, {"calls_s": 0}):
        with pytest.raises(InvalidInput):
            Load(**bad)  # type: ignore[arg-type]
