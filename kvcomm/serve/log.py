"""Logs of one JSON object a line: times, calls, namespaces, sizes; never keys, tokens, text or KV."""

from __future__ import annotations

import json
import logging
import time

from kvcomm.serve.core import Done

log = logging.getLogger("kvcomm.calls")
SLOW_S = 1.0
_LASTING = {"follow", "watch"}  # they run until the client leaves, which is no fault


class JsonLines(logging.Formatter):
    """One JSON object a line; what is passed as ``extra={"facts": {...}}`` becomes its members."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }  # fmt: skip
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = record.exc_info[0].__name__
            trace = record.exc_info[2]
            while trace is not None:
                line["at"] = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
                trace = trace.tb_next
        return json.dumps(line)


def logged(done: Done) -> None:
    """Write a call down: slow and failed ones always, the others for those who debug."""
    usual = {"ok", "miss", "overloaded"} | ({"unavailable"} if done.call in _LASTING else set())
    odd = done.outcome not in usual or (done.seconds > SLOW_S and done.call not in _LASTING)
    level = logging.INFO if odd else logging.DEBUG
    if not log.isEnabledFor(level):
        return
    facts = {
        "call": done.call, "namespace": done.namespace, "outcome": done.outcome, "ms": round(done.seconds * 1000, 3),
        "received": done.received, "sent": done.sent,
    }  # fmt: skip
    log.log(level, "call", extra={"facts": facts})


def to_stderr(verbose: bool) -> None:
    """Send this process's logs to standard error, as JSON lines; every call with ``verbose``, others' warnings only."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("kvcomm").setLevel(logging.DEBUG if verbose else logging.INFO)
