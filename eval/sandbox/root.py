"""Namespaces and a root file system for the sandbox. Standard library only; runs in the launcher."""

import ctypes
import os
import sys

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
ROOT = "/proc"  # covered by the new root in a mount namespace of our own, so that no folder is left behind

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
        check(libc.unshare(flags), "unshare")
    else:
        check(libc.unshare(flags | CLONE_NEWUSER), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as handle:
                handle.write(text)
    forbid_shared_memory()


def forbid_shared_memory() -> None:
    """No System V segments or queues in the new IPC namespace, where its sysctls may be written."""
    for name in ("shmall", "shmmax", "shmmni", "msgmni", "msgmnb"):
        try:
            with open(f"/proc/sys/kernel/{name}", "w") as handle:
                handle.write("0")
        except OSError:
            pass  # read-only in many containers; the seccomp filter refuses the calls themselves


def readable(python: str) -> list[str]:
    """What the Python installation needs of the file system."""
    paths = sorted({"/usr/lib", "/usr/lib64", "/lib", "/lib64", sys.base_prefix, os.path.dirname(python)})
    return [path for path in paths if os.path.exists(path)]


def build_root(python: str, bytes_for_files: int, user: int) -> None:
    """A file system in memory: the Python installation read-only, /work for the program. Enters it."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", ROOT, "tmpfs", MS_NOSUID | MS_NODEV, f"size={2 * bytes_for_files + 2**20},nr_inodes=1024,mode=755")
    for path in readable(python):
        inner = ROOT + path
        if os.path.exists(inner):
            continue
        os.makedirs(os.path.dirname(inner), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), inner)
            continue
        os.mkdir(inner)
        mount(path, inner, None, MS_BIND | MS_REC)
        read_only(inner)
    os.mkdir(ROOT + "/dev")
    open(ROOT + "/dev/null", "w").close()
    mount("/dev/null", ROOT + "/dev/null", None, MS_BIND)
    os.mkdir(ROOT + "/work")
    if os.getuid() == 0:
        os.chown(ROOT + "/work", user, user)
    os.chroot(ROOT)
    os.chdir("/work")
