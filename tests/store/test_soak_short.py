"""A short form of the soak."""

from pathlib import Path

from tests.soak.keys import run


def test_many_keys(tmp_path: Path) -> None:
    found = run(tmp_path / "store", 2000, samples=4)
    assert found["limits_exceeded"] == 0
    most = found["most"]
    assert isinstance(most, dict)
    assert most["handles"] < 100
    assert most["threads"] <= 2
    assert int(str(found["hits"])) > 300
