"""Two namespaces, the same tokens, every store and composition; and a noisy neighbour."""

from pathlib import Path

import pytest

from tests.soak.isolation import COMPOSITIONS, foreign, noisy


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_no_foreign_hit(tmp_path: Path, name: str) -> None:
    found = foreign(COMPOSITIONS[name](tmp_path), tries=3000)
    assert found["foreign_hits"] == 0
    assert found["own_hits"] == found["own_tries"]


@pytest.mark.parametrize("name", ["memory", "disk", "memory over disk"])
def test_noisy_neighbour(tmp_path: Path, name: str) -> None:
    found = noisy(COMPOSITIONS[name], tmp_path, rounds=150 if "disk" in name else 600)
    assert found["alone"] > 0.5
    assert found["alone"] - found["beside_noise"] <= 0.02
