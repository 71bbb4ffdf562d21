"""Parts of a long run, in this process or in several: one that fails, or dies, is named, and the others go on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Annotated, Any

import torch
import typer

from eval.finished import Finished
from eval.progress import stderr_console
from eval.setting import Setting
from kvcomm.errors import InvalidInput

JobsOption = Annotated[int, typer.Option("--jobs", help="Parts at once, each in a process with its share of threads.")]
FAILED = 4
"""Exit status of a command in which a part failed."""


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


def threads_each(count: int) -> int:
    """Threads of torch in each of ``count`` processes: those of this one, shared out.

    Raises:
        InvalidInput: no process, or more than the machine has cores.
    """
    cores = os.cpu_count() or 1
    if not 1 <= count <= cores:
        raise InvalidInput(f"jobs is {count}; give 1 to {cores}, the cores of this machine")
    return max(1, torch.get_num_threads() // count)


def run_jobs(setting: Setting, jobs: Sequence[Job], finished: Finished, count: int = 1) -> list[Failure]:
    """Run the jobs that ``finished`` has not, keep each there once it is done, and return those that failed.

    Progress and the time left go to stderr. An interruption ends the other processes; what is done stays done.

    Args:
        count: processes, each with a copy of the model and ``threads_each`` threads; 1 is this process itself.
    """
    console = stderr_console()
    numbers = {job.name: f"{n} of {len(jobs)}: {job.name}" for n, job in enumerate(jobs, 1)}
    left = [job for job in jobs if finished.get(job.name) is None]
    for job in jobs:
        if job not in left:
            console.print(f"{numbers[job.name]}: done before", highlight=False)
    clock = _Clock(sum(job.cost for job in left))

    def begin(job: Job) -> None:
        console.print(f"{numbers[job.name]} …{clock.left()}", highlight=False)

    failures = []
    with closing(_here(setting, left, begin) if count == 1 else _apart(setting, left, count, begin)) as outcomes:
        for job, part in outcomes:
            if isinstance(part, Failure):
                failures.append(part)
                console.print(f"{job.name} failed: {part.error}", highlight=False)
            else:
                finished.add(job.name, part)
            clock.end(job.cost)
    return failures


Outcomes = Generator[tuple[Job, Any], None, None]


def _here(setting: Setting, jobs: Sequence[Job], begin: Callable[[Job], None]) -> Outcomes:
    for job in jobs:
        begin(job)
        yield job, _outcome(job, setting)


def _outcome(job: Job, setting: Setting) -> Any:
    try:
        return job.call(setting, *job.arguments)
    except Exception as error:  # whatever it is, the other parts are worth having
        return Failure(job.name, f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class _Worker:
    process: SpawnProcess
    connection: Connection
    job: Job


def _apart(setting: Setting, jobs: Sequence[Job], count: int, begin: Callable[[Job], None]) -> Outcomes:
    """One process for each of ``count`` jobs at a time; it takes the next one, and where it died a new one does."""
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
            connection.send(_outcome(job, setting))


def _same(source: str | None, digest: str) -> Setting:
    setting = Setting.load(source)
    if setting.digest != digest:
        raise InvalidInput(f"the model {setting.name} changed while it was measured: weights {setting.digest[:16]}…")
    return setting


class _Clock:
    """How much time is left, from costs in units of their own and the time since the first part began."""

    def __init__(self, total: float) -> None:
        self._left, self._done, self._started = total, 0.0, time.monotonic()

    def end(self, cost: float) -> None:
        self._done, self._left = self._done + cost, self._left - cost

    def left(self) -> str:
        if not self._done:
            return ""
        seconds = (time.monotonic() - self._started) / self._done * max(self._left, 0.0)
        return f", about {f'{seconds:.0f} s' if seconds < 90 else f'{seconds / 60:.0f} minutes'} left"
