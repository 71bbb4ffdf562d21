"""The answer's process: runs the program, then calls its function as often as the tests ask. Standard library only.

It is handed to a fresh interpreter as source text. ``sys.argv`` is the folder to stay in for the audit hook, or empty
where the kernel keeps the program in, and what may be read besides. Nothing here is secret: the tests and the way to
the verdict are in another process (eval/sandbox/tester.py).
"""

import json
import os
import sys
from typing import Any

from eval.sandbox.hook import install_hook
from eval.sandbox.wire import Broken, encode, receive, send
from eval.sandbox.wire import decode as plain


def reason_of(error: BaseException) -> str:
    """A line about an exception, whatever its own text does."""
    try:
        return f"{type(error).__name__}: {error}"[:300]
    except BaseException:  # noqa: B036
        return "an exception without a text"


def attempt(action: Any) -> dict[str, Any]:
    """What ``action`` returned or raised, as a message. SystemExit and KeyboardInterrupt too are failures."""
    ours = os.getpid()
    try:
        said = {"ok": True, "value": encode(action())}
        json.dumps(said)
    except BaseException as error:
        said = {"ok": False, "reason": reason_of(error)}
    if os.getpid() != ours:  # a fork that the program made has nothing to say
        os._exit(1)
    return said


def main() -> None:
    """Say hello, run the program, answer calls until there are no more."""
    calls, answers = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    send(answers, {"hello": True})
    job = receive(calls)
    if sys.argv[1]:
        install_hook(sys.argv[1], tuple(json.loads(sys.argv[2])))
    scope: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}

    def program() -> None:
        exec(compile(job["program"], "<answer>", "exec"), scope)  # noqa: S102

    try:
        send(answers, attempt(program))
        while True:
            call = receive(calls)
            send(
                answers, attempt(lambda call=call: scope[job["function"]](*plain(call["args"]), **plain(call["named"])))
            )
    except Broken:
        os._exit(0)


main()
