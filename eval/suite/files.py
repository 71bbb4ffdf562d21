"""Results files of the suite, read with what is wrong named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eval.files.reading import read_file, strict_json
from eval.suite.valid import check_suite
from kvcomm.errors import InvalidInput

KIND = "kvcomm evaluation suite"
_WANTED = "a results file of `eval run`"


def read_suite(path: Path) -> dict[str, Any]:
    """A results file of ``eval run``.

    Raises:
        InvalidInput: it cannot be read, or is something else; the message says what is wrong and where.
    """
    try:
        result = strict_json(read_file(path, _WANTED))
    except ValueError as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"{path} cannot be read ({error}); give {_WANTED}") from None
    if not isinstance(result, dict) or result.get("kind") != KIND:
        raise InvalidInput(f"{path} is not {_WANTED}: its 'kind' is not {KIND!r}")
    try:
        check_suite(result)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from None
    return result
