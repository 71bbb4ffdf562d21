"""Inside the sandbox: reads a job from stdin, runs it, reports on the first stdout. Standard library only.

It is handed to a fresh interpreter as source text (``-c``); ``sys.argv[1]`` is the folder to stay in for the audit
hook, or empty where the kernel keeps the program in.
"""

import json
import os
import sys
from typing import Any

_REFUSED = (
    "socket.", "subprocess.", "ctypes.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill",
    "os.startfile", "pty.", "signal.pthread_kill", "gc.get_", "sys.setprofile", "webbrowser.", "shutil.chown",
)  # fmt: skip
_MODULES = {"_ctypes", "ctypes", "_posixsubprocess", "_multiprocessing", "mmap", "_testcapi", "_xxsubinterpreters"}
_CHANGES = {
    "os.remove": 1, "os.rename": 2, "os.mkdir": 1, "os.rmdir": 1, "os.link": 2, "os.symlink": 2, "os.chmod": 1,
    "os.chown": 1, "os.truncate": 1, "os.utime": 1, "os.setxattr": 1, "os.removexattr": 1, "os.chdir": 1,
}  # fmt: skip


def _inside(path: Any, folder: str) -> bool:
    """Whether a path of an event lies in ``folder`` once links are followed; descriptors are already open."""
    if isinstance(path, int):
        return True
    real = os.path.realpath(os.fsdecode(path))
    return real == folder or real.startswith(folder + os.sep)


def install_hook(folder: str) -> None:
    """Refuse what the kernel would otherwise be asked to refuse. Cannot be removed again."""
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "import":
            if args[0] in _MODULES:
                raise PermissionError(f"the sandbox refuses the module {args[0]}")
        elif event == "open":
            # A folder's descriptor outside would make relative paths, which later events show, point there.
            changes = isinstance(args[2], int) and args[2] & writing or args[1] is None and os.path.isdir(args[0])
            if changes and not _inside(args[0], folder):
                raise PermissionError("the sandbox refuses to write outside its folder")
        elif event in _CHANGES:
            if not all(_inside(path, folder) for path in args[: _CHANGES[event]]):
                raise PermissionError(f"the sandbox refuses {event} outside its folder")
        elif event.startswith(_REFUSED):
            raise PermissionError(f"the sandbox refuses {event}")

    sys.addaudithook(hook)


def main() -> None:
    """Run the job; the report carries the job's token, which an early exit never writes."""
    report, ours = os.dup(1), os.getpid()
    job = json.loads(sys.stdin.buffer.read())
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    failure = ""
    if sys.argv[1]:
        install_hook(os.path.realpath(sys.argv[1]))
    try:
        code = compile(job.pop("program"), "<answer>", "exec")
        exec(code, {"__name__": "__main__", "__builtins__": __builtins__})  # noqa: S102
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: an early end is not a pass
        failure = f"{type(error).__name__}: {error}"[:300]
    if os.getpid() != ours:  # a fork that the program made has nothing to say
        os._exit(1)
    said = {"token": job["token"], "ok": not failure, "reason": failure}
    os.write(report, json.dumps(said).encode())
    os._exit(0)


main()
