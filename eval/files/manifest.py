"""A finished folder's own record: names, sizes and digests of its files, checked cheaply whenever it is used."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import xxhash

from kvcomm.errors import CorruptEntry
from kvcomm.types import digest_fields

MANIFEST = "kvcomm-manifest.json"


class DamagedFolder(CorruptEntry):
    """The folder is not what was sealed."""


def _digests(path: Path) -> tuple[str, str]:
    """(SHA-256, XXH3-128) of a file, hex. The second is fast enough to check at each load."""
    strong, fast = hashlib.sha256(), xxhash.xxh3_128()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 22):
            strong.update(block)
            fast.update(block)
    return strong.hexdigest(), fast.hexdigest()


def _fast_digest(path: Path) -> str:
    fast = xxhash.xxh3_128()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 22):
            fast.update(block)
    return fast.hexdigest()


def seal_folder(folder: Path, about: dict[str, str]) -> str:
    """Write the manifest into ``folder`` and return the folder's digest."""
    files = {}
    for path in sorted(p for p in folder.iterdir() if p.is_file() and p.name != MANIFEST):
        strong, fast = _digests(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": strong, "xxh3_128": fast}
    digest = digest_fields(b"folder", *(f"{name} {entry['sha256']}".encode() for name, entry in files.items()))
    (folder / MANIFEST).write_text(json.dumps({"digest": digest, "about": about, "files": files}, indent=1))
    return digest


def _read(folder: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        if not isinstance(record["digest"], str) or not isinstance(record["files"], dict):
            raise ValueError("fields of another type")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedFolder(f"{folder} has no readable {MANIFEST} ({error})") from error
    return record


def check_folder(folder: Path) -> str:
    """The folder's digest, after comparing size and XXH3 of each file with the manifest.

    This finds damage, not malice: whoever can write the folder can write its manifest.

    Raises:
        DamagedFolder: a file is missing, shorter or different.
    """
    record = _read(folder)
    for name, entry in record["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"] or _fast_digest(path) != entry["xxh3_128"]:
            raise DamagedFolder(f"{path} is missing or is not the file that was sealed")
    return folder_digest(folder)


def folder_digest(folder: Path) -> str:
    """The digest recorded in the folder's manifest.

    Raises:
        DamagedFolder: there is no readable manifest.
    """
    return str(_read(folder)["digest"])
