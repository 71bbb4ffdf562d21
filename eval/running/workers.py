"""Parts measured in processes of their own, each with a copy of the model and its share of the threads."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
from tqdm import tqdm

from eval.running.setting import Setting
from kvcomm.errors import InvalidInput


@dataclass(frozen=True)
class Job:
    """A part: ``call(setting, *arguments)`` returns what JSON can hold.

    Attributes:
        name: what it is kept under, different for each part.
        cost: how long it takes, in units of the run's own: for the time left.
        call, arguments: of module level, so that another process can be told of them.
    """

    name: str
    cost: float
    call: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Failure:
    """A part that could not be measured, and why."""

    name: str
    error: str


Outcomes = Generator[tuple[Job, Any], None, None]


def outcome_of(job: Job, setting: Setting) -> Any:
    try:
        part = job.call(setting, *job.arguments)
        json.dumps(part, allow_nan=False)  # a figure that is no number is found here, not when all is written
        return part
    except Exception as error:  # whatever it is, the other parts are worth having
        return Failure(job.name, f"{type(error).__name__}: {error}")


def threads_each(count: int) -> int:
    """Threads of torch in each of ``count`` processes: those of this one, shared out.

    Raises:
        InvalidInput: no process, or more than the machine has cores.
    """
    cores = os.cpu_count() or 1
    if not 1 <= count <= cores:
        raise InvalidInput(f"jobs is {count}; give 1 to {cores}, the cores of this machine")
    return max(1, torch.get_num_threads() // count)


@dataclass(frozen=True)
class _Worker:
    process: SpawnProcess
    connection: Connection
    job: Job


def in_processes(setting: Setting, jobs: Sequence[Job], count: int, begin: Callable[[Job], None]) -> Outcomes:
    """One process for each of ``count`` jobs at a time; it takes the next one, and where it died a new one does.

    Args:
        begin: told of each job when it begins.
    """
    waiting, working = list(jobs), dict[Connection, _Worker]()

    def give(process: SpawnProcess, connection: Connection) -> None:
        job = waiting.pop(0)
        working[connection] = _Worker(process, connection, job)
        begin(job)
        with suppress(OSError):  # it is dead already, which waiting for it shows
            connection.send(job)

    try:
        while waiting or working:
            while waiting and len(working) < count:
                give(*_start(setting, threads_each(count)))
            ready = wait(list(working))
            for worker in [worker for connection, worker in working.items() if connection in ready]:
                del working[worker.connection]
                try:
                    outcome = worker.connection.recv()
                except (EOFError, OSError):
                    worker.process.join()
                    outcome = Failure(worker.job.name, f"its process ended with status {worker.process.exitcode}")
                yield worker.job, outcome
                if waiting and worker.process.is_alive():
                    give(worker.process, worker.connection)
                else:
                    _end(worker)
    finally:
        for worker in working.values():
            _end(worker)


def _end(worker: _Worker) -> None:
    """Kill it: it has nothing of its own to put away, and need not be waited for while it unloads a model."""
    worker.process.kill()
    worker.process.join()
    worker.connection.close()


def _start(setting: Setting, threads: int) -> tuple[SpawnProcess, Connection]:
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads as locks that nobody frees
    mine, its = context.Pipe()
    process = context.Process(target=_work, args=(its, setting.source, setting.digest, threads), daemon=True)
    process.start()
    its.close()
    return process, mine


def _work(connection: Connection, source: str | None, digest: str, threads: int) -> None:
    """What another process does: jobs that come, one at a time, until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process has it too, and ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    tqdm.set_lock(threading.RLock())  # its own one is a semaphore that outlives a process that is killed
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  bars of several processes would mix
    torch.set_num_threads(threads)
    setting: Setting | None = None
    with suppress(EOFError, OSError):
        while True:
            job = connection.recv()
            try:
                setting = setting or _same(source, digest)
            except Exception as error:  # no model: each job says so
                connection.send(Failure(job.name, f"{type(error).__name__}: {error}"))
                continue
            connection.send(outcome_of(job, setting))


def _end_with_parent() -> None:
    """End this process when the first one ends, however it does: nobody would take what it measures."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _same(source: str | None, digest: str) -> Setting:
    setting = Setting.load(source)
    if setting.digest != digest:
        raise InvalidInput(f"the model {setting.name} changed while it was measured: weights {setting.digest[:16]}…")
    return setting
