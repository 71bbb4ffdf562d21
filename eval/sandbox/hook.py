"""The audit hook, for where there are no namespaces: refuses what the kernel would otherwise be asked to refuse.

Its names are defaults of its own parameters and its constants are immutable, so that a program that reaches its frame
or replaces builtins changes nothing here. It remains a hook inside the process that it watches.
"""

import os
import sys
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_REFUSED = (
    "socket.", "subprocess.", "ctypes.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill",
    "os.startfile", "pty.", "signal.pthread_kill", "gc.get_", "sys.setprofile", "sys.settrace", "webbrowser.",
    "shutil.chown", "os.symlink", "os.link", "os.chdir", "os.fchdir", "os.chroot", "sqlite3.", "code.__new__",
)  # fmt: skip
_MODULES = frozenset({
    "_ctypes", "ctypes", "_posixsubprocess", "_multiprocessing", "_posixshmem", "mmap", "_testcapi",
    "_testinternalcapi", "_xxsubinterpreters", "_interpreters", "_sqlite3", "sqlite3", "readline",
    "_curses", "_dbm", "_gdbm", "fcntl",
})  # fmt: skip
_CHANGES = frozenset({
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.chmod", "os.chown", "os.truncate", "os.utime", "os.setxattr",
    "os.removexattr",
})  # fmt: skip
_READABLE_FILES = ("/dev/null", "/dev/urandom", "/etc/localtime")


def install_hook(folder: str, readable: tuple[str, ...]) -> None:
    """Refuse changes outside ``folder``, and to read other than there and under ``readable``. Cannot be taken back.

    ``folder`` has no link in its path and is the working directory. Links cannot be made and the directory cannot be
    changed, so a path without ``..`` says where it leads.
    """

    def hook(
        event: str,
        args: tuple[Any, ...],
        own: tuple[str, ...] = (folder,),
        readable: tuple[str, ...] = (folder, *readable),
        refused: tuple[str, ...] = _REFUSED,
        modules: frozenset[str] = _MODULES,
        changes: frozenset[str] = _CHANGES,
        files: tuple[str, ...] = _READABLE_FILES,
        writing: int = _WRITING,
        kind: Any = type,
        number: type = int,
        text: type = str,
        raw: type = bytes,
        denied: type[Exception] = PermissionError,
    ) -> None:
        if event.startswith(refused):
            raise denied(f"the sandbox refuses {event}")
        if event == "import":
            name, path = args[:2]
            if kind(name) is not text or not (path is None or kind(path) is text):
                raise denied("the sandbox refuses a module with such a name")
            if name.split(".")[-1] in modules or path and path.split("/")[-1].split(".")[0] in modules:
                raise denied(f"the sandbox refuses the module {name}")
            return
        if event == "open":
            changing = kind(args[2]) is not number or args[2] & writing
            if kind(args[0]) is number and args[1] is not None:
                return  # a descriptor that is open already
            # os.open, which has no mode, could give a folder's descriptor, for relative paths that point there.
            paths, allowed = args[:1], own if changing or args[1] is None else readable
            allowed = allowed if changing else (*allowed, *files)
        elif event in changes:
            if event == "os.truncate" and kind(args[0]) is number:
                return
            paths, allowed = args[: 2 if event == "os.rename" else 1], own
        elif event in ("os.listdir", "os.scandir"):
            paths, allowed = args[:1], readable
            if paths[0] is None:
                return
        else:
            return
        for path in paths:
            if kind(path) is raw:
                path = path.decode("utf-8", "surrogateescape")
            if kind(path) is not text or ".." in path.split("/"):
                raise denied(f"the sandbox refuses {event} of such a path")
            if not path.startswith("/"):
                continue
            for beginning in allowed:
                if path == beginning or path.startswith(beginning + "/"):
                    break
            else:
                raise denied(f"the sandbox refuses {event} outside its folder")

    sys.addaudithook(hook)
