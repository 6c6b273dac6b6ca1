"""Limits of the process that runs a reader's code.

What is guarded, and by what:

    time, memory, file size     rlimits, on POSIX; memory on Linux only
    writing and deleting files  Landlock (Linux 5.13 or newer), and an audit hook of Python everywhere
    network                     a network namespace of its own where Linux allows one, Landlock (TCP, from ABI 4), and
                                the audit hook
    other programs, signals     Landlock, and the audit hook

The audit hook alone is no barrier for code that wants to harm: it holds what Python code does by its own means, such as
`os.remove`, and not machine code. Reading files is not guarded; without network, what is read stays here.
"""

import ctypes
import os
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

FILE_BYTES = 16 << 20  # of a file that the code may write
_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_NO_NEW_PRIVILEGES, _DEATH_SIGNAL, _SIGKILL = 38, 1, 9
_CREATE, _ADD, _RESTRICT = 444, 445, 446  # Landlock's system calls, the same numbers on every architecture
_WRITE_FILE, _EXECUTE, _ALL_WRITES = 1 << 1, 1 << 0, sum(1 << bit for bit in (1, *range(4, 13)))
_REFER, _TRUNCATE, _TCP, _SCOPED = 1 << 13, 1 << 14, 0b11, 0b11


class Refused(PermissionError):
    """What an exercise may not do."""


def isolate(folder: Path) -> list[str]:
    """Guards of the kernel, applied before PyTorch starts threads. Returns the names of those in force."""
    if not sys.platform.startswith("linux"):
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_DEATH_SIGNAL, _SIGKILL, 0, 0, 0)
    found = []
    if hasattr(libc, "unshare") and libc.unshare(_NEW_USER | _NEW_NET) == 0:
        found.append("network namespace")
    if _landlock(libc, folder):
        found.append("Landlock")
    return found


def limit(seconds: float, memory: int) -> list[str]:
    """Limits of CPU time and memory beyond what the process has used so far. Returns the names of those in force."""
    if resource is None:
        return []
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = int(used.ru_utime + used.ru_stime + seconds) + 1
    _lower(resource.RLIMIT_CPU, cpu)
    _lower(resource.RLIMIT_FSIZE, FILE_BYTES)
    _lower(resource.RLIMIT_CORE, 0)
    size = _virtual_bytes()
    if size is None:
        return ["rlimits"]
    _lower(resource.RLIMIT_AS, size + memory)
    return ["rlimits", "memory limit"]


def audit(folder: Path) -> None:
    """From now on, refuse what Python code would do outside `folder`: write, delete, connect, start programs."""
    inside = os.path.realpath(folder) + os.sep
    busy: list[bool] = []

    def allowed(path: Any) -> bool:
        if isinstance(path, int) or path is None:
            return True
        place = os.path.realpath(os.fsdecode(path))
        return (place + os.sep).startswith(inside) or place == os.devnull

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if busy:
            return
        busy.append(True)
        try:
            check = _EVENTS.get(event)
            if check is not None:
                check(event, args, allowed)
            elif event.partition(".")[0] in _NEVER or event in _NEVER_EVENTS:
                raise Refused(f"{event}: exercises have no network and start no programs")
        finally:
            busy.pop()

    sys.addaudithook(hook)


def _opened(event: str, args: tuple[Any, ...], allowed: Callable[[Any], bool]) -> None:
    path, mode, flags = args
    writes = set(mode or "") & set("wax+") or (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR))
    if writes and not allowed(path):
        raise Refused(f"writing {os.fsdecode(path)!r}: exercises write only in their own temporary folder")


def _changed(event: str, args: tuple[Any, ...], allowed: Callable[[Any], bool]) -> None:
    for path in args[: 2 if event in ("os.rename", "os.link", "os.symlink", "shutil.move") else 1]:
        if isinstance(path, str | bytes | os.PathLike) and not allowed(path):
            raise Refused(
                f"{event} of {os.fsdecode(path)!r}: exercises change files only in their own temporary folder"
            )


_EVENTS = {"open": _opened} | dict.fromkeys(
    (
        "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
        "os.chown", "os.utime", "os.setxattr", "os.removexattr", "shutil.rmtree", "shutil.move", "shutil.chown",
        "sqlite3.connect",
    ),
    _changed,
)  # fmt: skip
_NEVER = frozenset({"socket", "subprocess", "ftplib", "smtplib", "urllib", "http", "pty", "ctypes"})
_NEVER_EVENTS = frozenset({"os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.kill",
    "os.killpg", "os.startfile", "signal.pthread_kill"})  # fmt: skip


def _lower(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    most = value + 2 if hard == resource.RLIM_INFINITY else min(value + 2, hard)  # SIGXCPU comes before SIGKILL
    with suppress(ValueError, OSError):
        resource.setrlimit(which, (min(value, most), most))


def _virtual_bytes() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return None
    return pages * resource.getpagesize()


def _landlock(libc: Any, folder: Path) -> bool:
    """Writing below `folder` and to /dev/null only, and neither programs nor TCP nor signals to other processes."""
    version = libc.syscall(_CREATE, None, 0, 1)
    if version < 1:
        return False
    writes = _ALL_WRITES | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    attributes = struct.pack("=Q", writes | _EXECUTE)
    if version >= 4:
        attributes += struct.pack("=Q", _TCP)
    if version >= 6:
        attributes += struct.pack("=Q", _SCOPED)
    rules = libc.syscall(_CREATE, attributes, len(attributes), 0)
    if rules < 0:
        return False
    try:
        for path, rights in ((str(folder), writes), (os.devnull, _WRITE_FILE)):
            handle = os.open(path, getattr(os, "O_PATH", 0) | getattr(os, "O_CLOEXEC", 0))
            try:
                if libc.syscall(_ADD, rules, 1, struct.pack("=Qi", rights, handle), 0):
                    return False
            finally:
                os.close(handle)
        return not libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) and not libc.syscall(_RESTRICT, rules, 0)
    finally:
        os.close(rules)
