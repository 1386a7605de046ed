"""The script inside the sandbox: a fresh interpreter reads a program, drops its privileges and runs it.

Order matters: everything that the program may need is imported, the limits are set, then a seccomp filter leaves only
the system calls below; the kernel refuses all others with EPERM.  None of the allowed calls opens a file, makes a
socket or a process, or sends a signal.  ``READY`` on standard error confirms that the filter is in force;
without it the program is not run.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import struct
import sys
from importlib import import_module

READY = "sandbox ready"
# Modules for programs, imported first: no file can be opened once the filter is in force.
MODULES = (
    *("abc", "array", "bisect", "collections", "collections.abc", "contextlib", "copy", "dataclasses", "datetime"),
    *("decimal", "enum", "fractions", "functools", "heapq", "io", "itertools", "json", "math", "numbers", "operator"),
    *("random", "re", "statistics", "string", "textwrap", "time", "traceback", "types", "typing", "unicodedata"),
)
# Linux' names of the system calls of a running interpreter, with their numbers on x86_64 and aarch64.
CALLS = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "nanosleep": (35, 101),
    "getpid": (39, 172),
    "exit": (60, 93),
    "gettimeofday": (96, 169),
    "getrusage": (98, 165),
    "times": (100, 153),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "futex": (202, 98),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "getrandom": (318, 278),
}
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of CALLS, AUDIT_ARCH of <linux/audit.h>

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER, _SIGKILL = 1, 22, 38, 2, 9
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06  # classic BPF
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
_NUMBER_AT, _ARCH_AT = 0, 4  # offsets in struct seccomp_data


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _instructions(column: int, arch: int) -> bytes:
    """The filter: another instruction set kills, a listed call passes, all else gets EPERM."""
    numbers = [calls[column] for calls in CALLS.values()]
    code = [(_LOAD, 0, 0, _ARCH_AT), (_JUMP_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER_AT)]
    for left, number in zip(range(len(numbers), 0, -1), numbers, strict=True):
        code.append((_JUMP_EQUAL, left, 0, number))
    code += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _limit(limits: dict[str, int]) -> None:
    """CPU seconds, bytes of memory and of output; no processes, no core file."""
    import resource  # not on Windows, where only this module's tables are read

    ceilings = {
        resource.RLIMIT_CPU: limits["cpu_s"],
        resource.RLIMIT_AS: limits["memory"],
        resource.RLIMIT_FSIZE: limits["output"],
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 16,
        resource.RLIMIT_CORE: 0,
    }
    for which, ceiling in ceilings.items():
        resource.setrlimit(which, (ceiling, ceiling))


def _die_with(parent: int, libc: ctypes.CDLL) -> None:
    """Request SIGKILL at the parent's end, and exit if the parent has ended already, which sends no signal."""
    if libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0) != 0 or os.getppid() != parent:
        sys.exit("whoever started the sandbox has ended")


def _confine(libc: ctypes.CDLL) -> None:
    column, arch = MACHINES[platform.machine()]
    code = _instructions(column, arch)
    program = _Program(len(code) // 8, code)
    for call in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0)):
        if libc.prctl(*call) != 0:
            raise OSError(ctypes.get_errno(), f"prctl {call[0]}: {os.strerror(ctypes.get_errno())}")


def _confined(libc: ctypes.CDLL) -> bool:
    """Sockets, processes and files are really refused."""
    refused = []
    for call, *arguments in ((libc.socket, 2, 1, 0), (libc.kill, 0, 0), (libc.open, b"/", 0)):
        ctypes.set_errno(0)
        refused.append(call(*arguments) == -1 and ctypes.get_errno() == errno.EPERM)
    return all(refused)


def main() -> None:
    """``argv[1]``: limits, and the process that waits for this one, as JSON; standard input: the program."""
    libc, limits = ctypes.CDLL(None, use_errno=True), json.loads(sys.argv[1])
    _die_with(limits["parent"], libc)
    program = sys.stdin.buffer.read()
    for name in MODULES:
        import_module(name)
    _limit(limits)
    _confine(libc)
    if not _confined(libc):
        sys.exit("the filter is not in force")
    os.write(2, f"{READY}\n".encode())
    status = 0
    try:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}"[:500].encode(errors="replace"))
        status = 1
    try:
        sys.stdout.flush()
    finally:
        os._exit(status & 0xFF)


if __name__ == "__main__":
    main()
