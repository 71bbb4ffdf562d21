"""Files that people give: read whole, and never anything that has no end or would be waited for."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from kvcomm.errors import InvalidInput

MAX_FILE_BYTES = 256 * 2**20


def read_file(path: Path, wanted: str, limit: int = MAX_FILE_BYTES) -> bytes:
    """The bytes of a regular file; ``wanted`` says in an error what to give.

    Raises:
        InvalidInput: it cannot be read, is no regular file, or has more than ``limit`` bytes.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            about = os.fstat(handle)
            if not stat.S_ISREG(about.st_mode):
                raise InvalidInput(f"{path} cannot be read (it is no regular file); give {wanted}")
            with open(handle, "rb", closefd=False) as file:
                found = file.read(limit + 1)
        finally:
            os.close(handle)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read ({error.strerror}); give {wanted}") from None
    if len(found) > limit:
        raise InvalidInput(f"{path} has {max(about.st_size, len(found))} bytes, the limit is {limit}; split it")
    return found


def strict_json(text: bytes) -> Any:
    """Parsed JSON in UTF-8 whose numbers are all finite.

    Raises:
        ValueError: it is something else, or nested too deep.
    """
    try:
        return json.loads(text.decode("utf-8"), parse_constant=_refused, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refused(text[:20])
