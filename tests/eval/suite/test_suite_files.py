"""Results files of the suite that are not as they should be: each is refused with what is wrong and where."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest

from eval.suite.doc import write_doc
from eval.suite.files import KIND, read_suite
from eval.suite.metrics import pooled
from eval.suite.report import report, write_report
from kvcomm.errors import InvalidInput
from tests.eval.suite.test_suite_doc import cell


@pytest.fixture(scope="module")
def good() -> dict[str, Any]:
    cells = [cell("needle", "full"), cell("tools", "chain")]
    return {
        "kind": KIND, "model": "m", "model_digest": "d" * 64, "threads": 1, "versions": {"torch": "9"},
        "machine": "abacus", "preset": "standard", "command": "python -m eval run", "cells": cells, "failed": [],
        "pooled": pooled(cells, lambda one: one["topology"] == "full"),
    }  # fmt: skip


def changed(good: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    """``good`` with the value at a place like ``cells/0/name``; ``...`` takes it out."""
    result = copy.deepcopy(good)
    *path, last = [int(part) if part.isdigit() else part for part in place.split("/")]
    inside: Any = result
    for part in path:
        inside = inside[part]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    return result


def refused(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(text)
    with pytest.raises(InvalidInput) as raised:
        read_suite(path)
    assert str(raised.value).startswith(str(path)) and said in str(raised.value), raised.value


BAD: list[tuple[str, Any, str]] = [
    ("cells", None, "cells is None, it must be a list"),
    ("cells", 3, "cells is 3, it must be a list"),
    ("cells/0", 5, "cells[0] is 5, it must be an object"),
    ("cells", [], "pooled is {"),
    ("failed", ["x"], "failed[0] is 'x', it must be an object"),
    ("failed", [{"cell": "c"}], "lacks failed[0].error"),
    ("threads", "2", "threads is '2', it must be a whole number of at least 1"),
    ("versions", "9", "versions is '9', it must be an object"),
    ("command", ..., "lacks command"),
    ("remark", 3, "remark is 3, it must be a text"),
    ("model", "\ud800", "model is '\\ud800', it must be whole characters"),
    ("other", [{"\udfff": 1}], "a field's name in other[0]"),
    ("cells/0/seconds", ..., "lacks cells[0].seconds"),
    ("cells/0/trial/prompts", ..., "lacks cells[0].trial.prompts"),
    ("cells/1/name", "needle, full", "cells[1].name is 'needle, full', it must be another name"),
    ("cells/0/yardstick", {}, "lacks cells[0].yardstick.mean_kl"),
    ("cells/0/methods", ["kvcomm"], "cells[0].methods is ['kvcomm'], it must be an object"),
    ("cells/0/methods/kvcomm/mean_kl", ..., "lacks cells[0].methods.kvcomm.mean_kl"),
    ("cells/0/methods/kvcomm/mean_kl/n", -1, "mean_kl.n is -1, it must be a whole number of at least 0"),
    ("cells/0/methods/kvcomm/speedup/low", None, "speedup.low is None, it must be a number"),
    ("cells/0/methods/kvcomm/mcnemar_p", ..., "lacks cells[0].methods.kvcomm.mcnemar_p"),
    ("pooled/kvcomm/reuse/n", -2, "pooled.kvcomm.reuse.n is -2"),
    ("cells/0/rows", [7], "cells[0].rows[0] is 7, it must be an object"),
    ("cells/0/rows/0/agent", ..., "lacks cells[0].rows[0].agent"),
    ("cells/0/rows/0/case", ..., "lacks cells[0].rows[0].case"),
    ("cells/0/rows/0/method", ..., "lacks cells[0].rows[0].method"),
    ("cells/0/rows/0/method", "magic", "rows[0].method is 'magic', it must be one of cells[0].methods"),
    ("cells/0/rows/0/mean_kl", "much", "rows[0].mean_kl is 'much', it must be a number"),
    ("cells/0/rows/0/ttft_s", [0], "rows[0].ttft_s[0] is 0, it must be above 0"),
    ("cells/0/rows/0/choice", "x", "lacks cells[0].rows[0].dense_choice"),
    ("cells/0/rows", [], "cells[0].rows of dense is []"),
]


@pytest.mark.parametrize(("place", "value", "said"), BAD)
def test_what_is_wrong_is_named(good: dict[str, Any], tmp_path: Path, place: str, value: Any, said: str) -> None:
    refused(tmp_path, json.dumps(changed(good, place, value)).encode(), said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[" * 100_000, "nested too deep"),
        (b'{"kind": NaN}', "NaN is not a finite number"),
        (b'{"kind": 1e999}', "1e999 is not a finite number"),
        (b"\xff", "cannot be read"),
        (b"5", "'kind' is not"),
        (b'{"kind": 9' + b"9" * 5000 + b"}", "cannot be read"),
    ],
)
def test_what_is_no_such_json_is_refused(tmp_path: Path, text: bytes, said: str) -> None:
    refused(tmp_path, text, said)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InvalidInput, match="no regular file"):
        read_suite(tmp_path / "fifo")


def test_texts_of_a_file_stay_texts(good: dict[str, Any], tmp_path: Path) -> None:
    bad = "a|b\n# <script>"
    result = changed(good, "failed", [{"cell": bad, "error": bad}])
    for place in ("machine", "preset", "remark", "cells/0/name", "cells/0/about/kvcomm", "command"):
        result = changed(result, place, bad)
    path = tmp_path / "results.json"
    path.write_text(json.dumps(result))
    page, summary = write_report(path)
    written = [summary.read_text(), write_doc(read_suite(path), path, tmp_path / "doc.md")[0].read_text()]
    for text in written:
        assert "\n# <" not in text and "\n# &lt;" not in text
        outside = text.replace("`a|b # <script>`", "")  # as code it is none
        assert "<script>" not in outside
    assert "| a\\|b # &lt;script> | a\\|b # &lt;script> |" in written[1]
    assert "<script>a" not in page.read_text()


@pytest.mark.parametrize("name", ["run.json", "run.md", "run.html", "link.md"])
def test_a_document_replaces_no_results(good: dict[str, Any], tmp_path: Path, name: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(good))
    (tmp_path / "link.md").symlink_to(path)
    with pytest.raises(InvalidInput, match="is the same file for doc as for"):
        report(path, again=False, doc=tmp_path / name)
    assert json.loads(path.read_text()) == good
