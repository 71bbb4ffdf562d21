"""Builds the sandbox around itself, then becomes the driver. Standard library only; run by eval/sandbox.py.

``sys.argv[1]`` is JSON: the limits, ``isolation``, ``folder`` (empty, ours) and ``driver`` (its source text).
"""

import ctypes
import json
import os
import resource
import signal
import sys

NO_NAMESPACES = 71
NOBODY = 65534

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise OSError with errno's text unless a libc call returned 0."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """mount(2)."""
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    check(libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def read_only(target: str) -> None:
    """mount_setattr(2) on a mount and all below it; it is the same number on every architecture."""
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    call = (SYS_MOUNT_SETATTR, AT_FDCWD, target.encode(), AT_RECURSIVE, attributes, ctypes.c_size_t(32))
    check(libc.syscall(*call), f"read-only {target}")


def unshare() -> None:
    """Leave the shared namespaces; who is not root needs a user namespace for that, and stays the same user in it."""
    flags = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    user, group = os.getuid(), os.getgid()
    if user == 0:
        return check(libc.unshare(flags), "unshare")
    check(libc.unshare(flags | CLONE_NEWUSER), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as handle:
            handle.write(text)


def build_root(root: str, python: str, bytes_for_files: int) -> None:
    """A file system in memory at ``root``: the Python installation read-only, /work for the program."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={2 * bytes_for_files + 2**20},nr_inodes=1024,mode=755")
    for path in sorted({"/usr/lib", "/usr/lib64", "/lib", "/lib64", sys.base_prefix, os.path.dirname(python)}):
        inner = root + path
        if not os.path.exists(path) or os.path.exists(inner):
            continue
        os.makedirs(os.path.dirname(inner), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), inner)
            continue
        os.mkdir(inner)
        mount(path, inner, None, MS_BIND | MS_REC)
        read_only(inner)
    os.mkdir(root + "/dev")
    open(root + "/dev/null", "w").close()
    mount("/dev/null", root + "/dev/null", None, MS_BIND)
    os.mkdir(root + "/work")
    if os.getuid() == 0:
        os.chown(root + "/work", NOBODY, NOBODY)
    os.chroot(root)
    os.chdir("/work")


def set_limits(settings: dict[str, int]) -> None:
    """Limits on CPU, memory, file size, open files and processes; the last after every fork of our own."""
    cpu = settings["cpu_s"]
    for what, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, settings["memory_bytes"], settings["memory_bytes"]),
        (resource.RLIMIT_FSIZE, settings["file_bytes"], settings["file_bytes"]),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NOFILE, 64, 64),
        (resource.RLIMIT_NPROC, settings["processes"], settings["processes"]),
    ):
        resource.setrlimit(what, (soft, hard))


def drop_root() -> None:
    """Become nobody, for whom the limit on processes holds; an exec then has no capability left."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def end_like(status: int) -> None:
    """Exit as a child did; a signal n becomes 128 + n."""
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def fork_and_follow() -> None:
    """Go on in a child that dies with us; the parent waits and ends as the child did."""
    child = os.fork()
    if child:
        end_like(os.waitpid(child, 0)[1])
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    """Isolate, limit, and exec the driver."""
    settings = json.loads(sys.argv[1])
    python = os.path.realpath(sys.executable)
    watched = settings["folder"]
    if settings["isolation"] == "namespaces":
        try:
            unshare()
            fork_and_follow()  # to be process 1 of the new namespace
            build_root(settings["folder"], python, settings["file_bytes"])
        except OSError as error:
            os.write(1, str(error).encode())
            os._exit(NO_NAMESPACES)
        fork_and_follow()  # process 1 ignores some signals, the program must not
        drop_root()
        watched = ""
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    set_limits(settings)
    os.execve(python, [python, "-I", "-S", "-B", "-c", settings["driver"], watched], {"LC_ALL": "C.UTF-8"})


main()
