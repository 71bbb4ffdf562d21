"""The tests' process: sends the program to the answer's process, runs the tests here, and gives the verdict.

The answer's process has neither the tests nor a descriptor of the verdict, cannot look into this one (it is not
dumpable), and what it says arrives as plain builtin values. ``sys.argv``: the descriptors to read and to write, and
the process.
"""

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any

from eval.sandbox.wire import Broken, decode, encode, receive, send

PR_SET_DUMPABLE = 4


class Ended(BaseException):
    """The answer's process is no more; no test may take that for an exception of the function."""


class AnswerError(Exception):
    """The answer's program or function raised."""


def verdict_without(answer: int, otherwise: str) -> tuple[str, str]:
    """Status and reason, once the answer's process has broken off; ``otherwise`` where it still runs."""
    for _ in range(50):
        pid, status = os.waitpid(answer, os.WNOHANG)
        if pid == 0:
            time.sleep(0.005)
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
            return "timed out", "the limit of CPU time passed"
        else:
            return "failed", f"it ended before its tests did (exit status {os.waitstatus_to_exitcode(status)})"
    return "failed", otherwise


def run(job: dict[str, Any], read: int, write: int) -> None:
    """Run program and tests; returns if all is well."""

    def ask(message: dict[str, Any]) -> Any:
        try:
            send(write, message)
            said = receive(read)
            if said.get("ok") is True:
                return decode(said.get("value"))
            reason = said.get("reason")
        except (Broken, ValueError, TypeError, RecursionError, OverflowError) as error:
            raise Ended(f"what it said cannot be read: {error}") from None
        raise AnswerError(reason if isinstance(reason, str) else "it failed")

    ask({"program": job["program"], "function": job["function"]})
    if not job["function"]:
        return

    def candidate(*args: Any, **named: Any) -> Any:
        return ask({"args": encode(args), "named": encode(named)})

    scope: dict[str, Any] = {"__name__": "tests"}
    exec(compile(job["tests"], "<tests>", "exec"), scope)  # noqa: S102
    scope[job["function"]] = candidate
    scope["check"](candidate)


def main() -> None:
    """Say ``ready`` once the answer's process runs, and not before; then one job, one verdict."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    read, write, answer = (int(text) for text in sys.argv[1:4])
    jobs, report = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    try:
        receive(read)
    except Broken:
        os.write(report, b"Python does not start in the sandbox")
        os._exit(1)
    os.write(report, b"ready\n")
    with os.fdopen(jobs, "rb") as stream:
        job = json.loads(stream.read())
    status, reason = "passed", ""
    try:
        run(job, read, write)
    except Ended as error:
        status, reason = verdict_without(answer, str(error))
    except AnswerError as error:
        status, reason = "failed", str(error)
    except BaseException as error:
        status, reason = "failed", f"{type(error).__name__}: {error}"
    reason = "".join(c if c.isprintable() else " " for c in reason[:300])
    os.write(report, json.dumps({"status": status, "reason": reason}).encode())
    os._exit(0)


main()
