"""A short form of the soak."""

from pathlib import Path

from tests.soak.keys import run


def test_many_keys(tmp_path: Path) -> None:
    found = run(tmp_path / "store", 2000, samples=4)
    assert found["limits_exceeded"] == 0
    first, most = found["first"], found["most"]
    assert isinstance(first, dict) and isinstance(most, dict)
    assert most["handles"] <= first["handles"] + 10
    assert most["threads"] <= first["threads"] + 1
    assert int(str(found["hits"])) > 300
