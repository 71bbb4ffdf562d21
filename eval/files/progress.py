"""What a person sees in the terminal while something runs. All of it goes to stderr; stdout carries results."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

QUIET_S = 2.0


def stderr_console() -> Console:
    """A console on stderr."""
    return Console(file=sys.stderr)


@contextmanager
def waiting(what: str, after_s: float = QUIET_S) -> Iterator[None]:
    """Say that ``what`` is going on once it has lasted ``after_s`` seconds, and how long it took.

    A terminal gets a spinner; a log gets one line at the start and one at the end.
    """
    console = stderr_console()
    start = time.monotonic()
    status = console.status(f"{what} …")
    shown = threading.Event()

    def show() -> None:
        shown.set()
        if console.is_terminal:
            status.start()
        else:
            console.print(f"{what} …", highlight=False)

    timer = threading.Timer(after_s, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()
    if shown.is_set():
        console.print(f"{what}: {time.monotonic() - start:.0f} s", highlight=False)
