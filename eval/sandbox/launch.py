"""Builds the sandbox around itself and starts two processes in it. Standard library only; run by program.py.

With namespaces: this process, outside; process 1 of the new namespaces; the tests' process; the answer's. Without:
this, the tests' process, the answer's. Each dies with the one before it, and the first ends all at the wall limit
even if nobody asks for it any more. Exits with ``TIMED_OUT`` then, else as the tests' process did. What goes wrong
before the sandbox stands is written to stdout as it is; ``ready`` comes only afterwards, and then a job is expected.

``sys.argv[1]`` is JSON: the limits, ``isolation``, ``parent`` (process), ``folder`` (empty, ours; without namespaces),
``filter`` (hexadecimal, may be empty), ``driver`` and ``tester`` (their source texts).
"""

import ctypes
import json
import os
import resource
import shutil
import signal
import sys
import time
from typing import Any, NoReturn

from eval.sandbox.landlock import restrict
from eval.sandbox.landlock import version as landlock_version
from eval.sandbox.root import build_root, check, libc, readable, unshare

TIMED_OUT = 124
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 8, 22, 38, 47
CAP_DAC_READ_SEARCH = 2
AWAITED = {signal.SIGCHLD, signal.SIGTERM}


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send ``number`` when ``parent`` ends; it may have ended already."""
    check(libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl")
    if os.getppid() != parent:
        os._exit(1)


def set_limits(settings: dict[str, Any]) -> None:
    """Limits on CPU, memory, file size, open files and processes; the last after every fork of our own."""
    cpu = settings["cpu_s"]
    for what, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, settings["memory_bytes"], settings["memory_bytes"]),
        (resource.RLIMIT_FSIZE, settings["file_bytes"], settings["file_bytes"]),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NOFILE, 64, 64),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_NPROC, settings["processes"], settings["processes"]),
    ):
        resource.setrlimit(what, (soft, hard))


def drop_root(user: int, to_read: list[str]) -> None:
    """Become ``user``, which only this sandbox is; an exec then has no capability left.

    Except where Python lies behind a folder that only root may enter and no namespace shows it elsewhere: then the one
    to read what others may not, which Landlock confines to the installation.
    """
    if os.getuid() != 0:
        return
    closed = any(not os.stat(path).st_mode & 1 for path in to_read)
    if closed and not landlock_version():
        raise OSError("only root may read the Python installation, and there is no Landlock")
    libc.prctl(PR_SET_KEEPCAPS, int(closed), 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    if closed:
        bit = 1 << CAP_DAC_READ_SEARCH
        header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(bit, bit, bit, 0, 0, 0)
        check(libc.capset(header, data), "capset")
        check(libc.prctl(PR_CAP_AMBIENT, 2, CAP_DAC_READ_SEARCH, 0, 0), "ambient capability")


def filter_calls(program: bytes) -> None:
    """Install a seccomp filter for this process and its children."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_char_p)]

    if program:
        whole = Program(len(program) // 8, program)
        check(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(whole), 0, 0), "seccomp")


def follow(child: int, until: float, folder: str) -> NoReturn:
    """Wait for ``child`` no longer than ``until``, or until our parent ends; clean up, exit as the child did."""
    ended = None
    while ended is None:
        signaled = signal.sigtimedwait(AWAITED, max(0.0, until - time.monotonic()))
        if signaled is None or signaled.si_signo == signal.SIGTERM:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        while ended is None:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended = status if pid == child else None
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    code = TIMED_OUT if ended is None else os.waitstatus_to_exitcode(ended)
    os._exit(code if code >= 0 else 128 - code)


def fork_and_follow(until: float, folder: str = "") -> int:
    """Go on in a child; the parent follows it. Returns the parent's process as the child sees it."""
    ours = os.getpid()
    child = os.fork()
    if child:
        follow(child, until, folder)
    return ours


def enter(settings: dict[str, Any], user: int, parent: int, paths: list[str], landlock: str = "") -> None:
    """The last steps before an exec: no root, no way up, limits."""
    drop_root(user, [above for path in paths for above in _and_above(path)])
    die_with(parent)  # a change of user forgets it
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if landlock:
        restrict(landlock, paths)
    set_limits(settings)
    filter_calls(bytes.fromhex(settings["filter"]))


def start(settings: dict[str, Any], python: str, user: int, parent: int) -> None:
    """Become the tests' process, with the answer's as its child; two pipes join them."""
    folder = settings["folder"]
    paths = readable(python) if folder else []
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    (calls, to_answer), (from_answer, answers) = os.pipe(), os.pipe()
    ours = os.getpid()
    answer = os.fork()
    run = [python, "-I", "-S", "-B", "-c"]
    if answer == 0:
        os.dup2(calls, 0)
        os.dup2(answers, 1)
        enter(settings, user, ours, paths, folder)
        os.execve(python, [*run, settings["driver"], folder, json.dumps(paths)], {"LC_ALL": "C.UTF-8"})
    os.close(calls)
    os.close(answers)
    enter(settings, user, parent, paths)
    for descriptor in (from_answer, to_answer):
        os.set_inheritable(descriptor, True)
    numbers = [str(number) for number in (from_answer, to_answer, answer)]
    os.execve(python, [*run, settings["tester"], *numbers], {"LC_ALL": "C.UTF-8"})


def _and_above(path: str) -> list[str]:
    """A path and all folders above it."""
    path = os.path.realpath(path)
    return [path] if path == "/" else [path, *_and_above(os.path.dirname(path))]


def main() -> None:
    """Isolate, limit, start."""
    settings, python = json.loads(sys.argv[1]), os.path.realpath(sys.executable)
    until = time.monotonic() + settings["wall_s"]
    user = os.getuid() or 61184 + os.getpid() % 4096
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    die_with(settings["parent"], signal.SIGTERM)
    try:
        if settings["isolation"] == "namespaces":
            unshare()
            fork_and_follow(until + 1)  # to be process 1 of the new namespace
            die_with(0)
            build_root(python, settings["file_bytes"], user)
        elif os.getuid() == 0:
            os.chown(settings["folder"], user, user)
        start(settings, python, user, fork_and_follow(until, settings["folder"]))
    except Exception as error:
        os.write(1, str(error).encode())
        os._exit(1)


main()
