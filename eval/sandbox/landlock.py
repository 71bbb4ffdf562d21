"""Landlock (Linux 5.13 and later): the kernel's own limits on files, for where there are no namespaces.

Any process may lay them on itself. Only reading under some paths and changing things under one is left; with a newer
kernel, TCP, signals to others and abstract sockets are gone too.
"""

import ctypes
import os
import stat
import struct

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
READ_FILE, READ_DIR, EXECUTE, WRITE_FILE = 4, 8, 1, 2
FILES = ("/dev/null", "/dev/urandom", "/etc/localtime", "/etc/ld.so.cache")

libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """The kernel's version of Landlock, 0 where there is none."""
    return max(0, int(libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)))


def restrict(folder: str, paths: list[str]) -> None:
    """Limit this process and its children for good; needs no-new-privileges. Does nothing without Landlock."""
    known = version()
    if not known:
        return
    files = (1 << 13) - 1
    for since, bit in ((2, 13), (3, 14), (5, 15)):
        files |= (known >= since) << bit
    words = [files, 3 if known >= 4 else 0, 3 if known >= 6 else 0][: 1 if known < 4 else 2 if known < 6 else 3]
    attributes = struct.pack(f"={len(words)}Q", *words)
    rules = libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    allowed = {path: READ_FILE | READ_DIR | EXECUTE for path in paths}
    allowed |= dict.fromkeys(FILES, READ_FILE | WRITE_FILE) | {folder: files & ~EXECUTE}
    for path, access in allowed.items():
        if not os.path.exists(path):
            continue
        below = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not stat.S_ISDIR(os.fstat(below).st_mode):
            access &= READ_FILE | WRITE_FILE
        rule = struct.pack("=Qi", access, below)
        if libc.syscall(ADD_RULE, rules, 1, rule, 0):
            raise OSError(ctypes.get_errno(), f"landlock_add_rule {path}")
        os.close(below)
    if libc.syscall(RESTRICT_SELF, rules, 0):
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(rules)
