"""Parts of a long run, in this process or in several: one that fails, or dies, is named, and the others go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Annotated

import typer

from eval.files.progress import stderr_console
from eval.running.finished import Finished
from eval.running.setting import Setting
from eval.running.workers import Failure, Job, Outcomes, in_processes, outcome_of, threads_each

__all__ = ["FAILED", "Failure", "Job", "JobsOption", "run_jobs", "threads_each"]

JobsOption = Annotated[int, typer.Option("--jobs", help="Parts at once, each in a process with its share of threads.")]
BEAT_S = 60.0
FAILED = 4
"""Exit status of a command in which a part failed."""


def run_jobs(setting: Setting, jobs: Sequence[Job], finished: Finished, count: int = 1) -> list[Failure]:
    """Run the jobs that ``finished`` has not, keep each there once it is done, and return those that failed.

    Progress and the time left go to stderr, where no bar moves once a minute. An interruption, or this process's end
    in any way, ends the other processes; what is done stays done.

    Args:
        count: processes, each with a copy of the model and ``threads_each`` threads; 1 is this process itself.
    """
    console = stderr_console()
    numbers = {job.name: f"{n} of {len(jobs)}: {job.name}" for n, job in enumerate(jobs, 1)}
    left = [job for job in jobs if finished.get(job.name) is None]
    for job in jobs:
        if job not in left:
            console.print(f"{numbers[job.name]}: done before", highlight=False, markup=False)
    clock = _Clock(sum(job.cost for job in left))

    def begin(job: Job) -> None:
        console.print(f"{numbers[job.name]} …{clock.left()}", highlight=False, markup=False)

    failures = []
    outcomes = _here(setting, left, begin) if count == 1 else in_processes(setting, left, count, begin)
    try:
        with closing(outcomes), _said_while(clock, console.is_terminal and count == 1):
            for job, part in outcomes:
                if isinstance(part, Failure):
                    failures.append(part)
                    console.print(f"{job.name} failed: {part.error}", highlight=False, markup=False)
                else:
                    finished.add(job.name, part)
                clock.end(job.cost)
    except KeyboardInterrupt:
        done = sum(finished.get(job.name) is not None for job in jobs)
        kept = f"{done} of {len(jobs)} are kept in {finished.path}; the same command goes on behind them"
        console.print(f"interrupted: {kept}", highlight=False, markup=False)
        raise
    return failures


def _here(setting: Setting, jobs: Sequence[Job], begin: Callable[[Job], None]) -> Outcomes:
    for job in jobs:
        begin(job)
        yield job, outcome_of(job, setting)


@contextmanager
def _said_while(clock: _Clock, quiet: bool) -> Iterator[None]:
    """Say how long it has been and how long it will be, every BEAT_S unless ``quiet``."""
    ended = threading.Event()

    def say() -> None:
        while not ended.wait(BEAT_S):
            stderr_console().print(f"{clock.been()}{clock.left()}", highlight=False, markup=False)

    if not quiet:
        threading.Thread(target=say, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class _Clock:
    """How much time is left, from costs in units of their own and the time since the first part began."""

    def __init__(self, total: float) -> None:
        self._left, self._done, self._rate = total, 0.0, 0.0
        self._started = self._last = time.monotonic()

    def end(self, cost: float) -> None:
        self._done, self._left = self._done + cost, self._left - cost
        self._last = time.monotonic()
        self._rate = (self._last - self._started) / self._done

    def been(self) -> str:
        return f"… {_minutes(time.monotonic() - self._started)} so far"

    def left(self) -> str:
        if not self._done:
            return ""
        return f", about {_minutes(max(self._rate * self._left - (time.monotonic() - self._last), 0.0))} left"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
