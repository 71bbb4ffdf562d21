"""A short form of the soak by SIGKILL."""

from pathlib import Path

from kvcomm.store import Keyring
from tests.soak.kill import run


def test_writers_and_readers_killed_at_random(tmp_path: Path) -> None:
    found = run(tmp_path / "plain", kills=12, workers=2)
    assert found["lost"] == found["wrong_bytes"] == found["corrupt"] == 0
    assert int(str(found["puts"])) > 50


def test_the_same_sealed(tmp_path: Path) -> None:
    assert run(tmp_path / "sealed", kills=6, workers=1, keyring=Keyring(b"k" * 32))["lost"] == 0
