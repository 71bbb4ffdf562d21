"""A seccomp filter for what namespaces and limits do not cover: system calls that programs here never need.

Known are x86_64 and aarch64. On any other machine there is no filter and nothing is refused by one: what remains there
are namespaces, resource limits and the sysctls of the IPC namespace.
"""

from __future__ import annotations

import platform
import struct

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_NEW_NAMESPACE, _THREAD, _PR_SET_PDEATHSIG = 0x7E020080, 0x00010000, 1
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# name: number on x86_64, on aarch64 (None: it has none)
_NUMBERS: dict[str, tuple[int, int | None]] = {
    "socket": (41, 198), "socketpair": (53, 199), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "shmget": (29, 194), "shmctl": (31, 195), "shmat": (30, 196), "shmdt": (67, 197), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "userfaultfd": (323, 282),
    "perf_event_open": (298, 241), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97),
    "setns": (308, 268), "chroot": (161, 51), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "kcmp": (312, 272), "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "personality": (135, 92),
    "init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "mknod": (133, None), "mknodat": (259, 33),
    # Pages in a pipe count for nobody, and a gifted byte holds all of a huge one.
    "vmsplice": (278, 75), "splice": (275, 76), "tee": (276, 77),
    # The tester's share of the processors, and locks on the machine's own files.
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "flock": (73, 32),
}  # fmt: skip
# Refused too where the kernel keeps processes and files no further apart than users.
_NUMBERS_WITHOUT_NAMESPACES: dict[str, tuple[int, int | None]] = {
    "fork": (57, None), "vfork": (58, None), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "setsid": (112, 157), "setpgid": (109, 154),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "symlink": (88, None), "symlinkat": (266, 36),
    "link": (86, None), "linkat": (265, 37), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
}  # fmt: skip
_CLONE, _PRCTL, _PRLIMIT, _CLONE3, _FCNTL = (56, 220), (157, 167), (302, 261), (435, 435), (72, 25)
_NEWER, _F_SETLEASE = 463, 1024
"""Calls from this number on, the same everywhere, are not known here, and so not there."""


def filter_program(namespaces: bool, machine: str | None = None) -> bytes | None:
    """The BPF program, its instructions one after another; ``None`` for a machine that is not known.

    Args:
        namespaces: whether they hold the program; without them more is refused.
        machine: ``platform.machine()`` if not given.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        return None
    column = 0 if machine == "x86_64" else 1
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCHITECTURES[machine]), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    if machine == "x86_64":  # the x32 numbers
        steps += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _ENOSYS)]
    table = _NUMBERS if namespaces else _NUMBERS | _NUMBERS_WITHOUT_NAMESPACES
    for numbers in table.values():
        number = numbers[column]
        if number is not None:
            steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    steps += [(_AT_LEAST, 0, 1, _NEWER), (_RETURN, 0, 0, _ENOSYS)]
    steps += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ENOSYS)]  # libc then takes clone, whose flags show
    clone = (_ANY_BIT, 0, 1, _NEW_NAMESPACE) if namespaces else (_ANY_BIT, 1, 0, _THREAD)
    for number, argument, test in (
        (_CLONE[column], 0, clone),
        (_PRCTL[column], 0, (_EQUAL, 0, 1, _PR_SET_PDEATHSIG)),
        (_PRLIMIT[column], 0, (_EQUAL, 1, 0, 0)),  # the limits of another process
        (_FCNTL[column], 1, (_EQUAL, 0, 1, _F_SETLEASE)),
    ):
        load = (_LOAD, 0, 0, 16 + 8 * argument)
        steps += [(_EQUAL, 0, 4, number), load, test, (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
