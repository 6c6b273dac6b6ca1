"""Runs a program apart from everything else, and ends all of it with its parent: python -I -S apart.py JSON

Where Linux allows it, the program has namespaces of its own: a file system in memory, in which what it needs is
read-only and everything else (other files, sockets, devices) is absent; processes that all end with the first one; no
network; and no capabilities, also where root starts it. Elsewhere it is an ordinary process, and the variable
HEADWISE_APART gives it the reason. This file uses the standard library only.
"""

import ctypes
import json
import os
import shutil
import signal
import struct
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

POLL = 0.02  # seconds between looks for the parent
NOBODY = 65534
WORK = "exercise"  # the folder in which the program runs
DISK = 64 << 20  # bytes that all files together may have
_USER, _MOUNT, _PID, _NET, _IPC = 0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000
_BIND, _RECURSIVE, _PRIVATE, _DETACH = 4096, 16384, 1 << 18, 2
_SETATTR, _AT_RECURSIVE, _READ_ONLY, _NO_SUID, _NO_DEVICES = 442, 0x8000, 1, 2, 4  # the same on every architecture
_DEATH_SIGNAL, _NO_NEW_PRIVILEGES = 1, 38
_FILES = ("/usr", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache", "/sys/devices/system/cpu")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


def main() -> None:
    """Run the program, and end as it ends."""
    task = json.loads(sys.argv[1])
    parent, folder = os.getppid(), task["folder"]
    reports, reported = os.pipe()
    asks, asked = os.pipe()
    answers, answered = os.pipe()
    child = os.fork()
    if child == 0:
        _close(reports, asks, answered)
        _in_namespaces(task, reported, asked, answers)
    _close(reported, asked, answers)
    if os.read(asks, 1):
        with suppress(OSError):  # let the user be known there; root is nobody there before the program begins
            for kind, own in (("uid", os.getuid()), ("gid", os.getgid())):
                if os.getuid():
                    with open(f"/proc/{child}/setgroups", "w") as file:
                        file.write("deny")
                with open(f"/proc/{child}/{kind}_map", "w") as file:
                    file.write(f"{own} {own} 1\n" + ("" if os.getuid() else f"{NOBODY} {NOBODY} 1\n"))
        os.write(answered, b"!")
    said = _watched(child, parent, folder, reports)
    if said.get("why"):
        os.environ["HEADWISE_APART"] = said["why"]
        child = os.fork()
        if child == 0:
            os.setsid()
            os.chdir(folder)
            os.execvpe(task["program"][0], task["program"], os.environ)
        said = {"status": _watched(child, parent, folder)["status"]}
    shutil.rmtree(folder, ignore_errors=True)
    status = said.get("status", 0)
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def _watched(child: int, parent: int, folder: str, reports: int | None = None) -> dict[str, Any]:
    """Wait for the end of a process, and end it with our own parent. Returns what it reported, or its status."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            said = b"" if reports is None else os.read(reports, 1 << 16)
            return json.loads(said) if said else {"status": status}
        if os.getppid() != parent:
            with suppress(OSError):
                os.killpg(child, signal.SIGKILL)
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)
        time.sleep(POLL)


def _in_namespaces(task: dict[str, Any], reported: int, asked: int, answers: int) -> NoReturn:
    """Enter them and run the program there; report its status, or why it cannot run there."""
    said: dict[str, Any] = {}
    try:
        if not sys.platform.startswith("linux"):
            raise OSError(f"{sys.platform} has no namespaces")
        libc = ctypes.CDLL(None, use_errno=True)
        missing = [name for name in ("unshare", "pivot_root", "mount", "umount2") if not hasattr(libc, name)]
        if missing:
            raise OSError(f"the C library has no {missing[0]}")
        libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        _checked("unshare", libc.unshare(_USER | _MOUNT | _PID | _NET | _IPC))
        os.write(asked, b"?")
        os.read(answers, 1)
        _new_root(libc, task)
        said = {"status": _first(libc, task)}
    except OSError as error:
        said = {"why": str(error)}
    os.write(reported, json.dumps(said).encode())
    os._exit(0)


def _new_root(libc: Any, task: dict[str, Any]) -> None:
    """A file system of memory with what the program needs."""
    root = task["folder"]
    _mount(libc, "none", "/", None, _RECURSIVE | _PRIVATE)
    _mount(libc, "tmpfs", root, "tmpfs", _NO_SUID | _NO_DEVICES, f"size={DISK},nr_inodes=10000,mode=755")
    shown: list[str] = []
    for path in sorted({*_FILES, *_DEVICES, *map(os.path.abspath, task["shown"])}):
        if os.path.exists(path) and not any(path.startswith(f"{one}/") for one in shown):
            _show(libc, path, root + path)
            shown.append(path)
    for path in task["hidden"]:
        _mount(libc, "tmpfs", root + path, "tmpfs", _NO_DEVICES, "size=4k,mode=555")
    for name in (WORK, "proc", ".old"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    _set(libc, root, _AT_RECURSIVE, _READ_ONLY | _NO_SUID | _NO_DEVICES, 0)
    _set(libc, root, 0, 0, _READ_ONLY)
    for path in _DEVICES:
        _set(libc, root + path, 0, 0, _NO_DEVICES | _READ_ONLY)
    if os.getuid() == 0:
        os.chown(f"{root}/{WORK}", NOBODY, NOBODY)
    _checked("pivot_root", libc.pivot_root(root.encode(), f"{root}/.old".encode()))
    os.chdir("/")


def _show(libc: Any, path: str, target: str) -> None:
    """Have a file or a folder at the same path; what a link leads to has to be shown too."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
    _mount(libc, path, target, None, _BIND | _RECURSIVE)


def _first(libc: Any, task: dict[str, Any]) -> int:
    """The first process of the namespace, which ends all others with it. Returns the program's status."""
    statuses, status = os.pipe()
    first = os.fork()
    if first == 0:
        libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        with suppress(OSError):  # some containers do not allow it, and the program can do without
            _mount(libc, "proc", "/proc", "proc", _NO_SUID | _NO_DEVICES)
        if libc.umount2(b"/.old", _DETACH):
            os._exit(1)
        if os.getuid() == 0:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)  # another user clears it
        libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        program = os.fork()
        if program == 0:
            os.chdir(f"/{WORK}")
            environment = {**os.environ, "HOME": os.getcwd(), "TMPDIR": os.getcwd()}
            os.execvpe(task["program"][0], task["program"], environment)
        while (ended := os.wait())[0] != program:  # others that have lost their parent
            pass
        os.write(status, struct.pack("i", ended[1]))
        os._exit(0)
    os.close(status)
    os.waitpid(first, 0)
    said = os.read(statuses, 4)
    return int(struct.unpack("i", said)[0]) if said else int(signal.SIGKILL)


def _mount(libc: Any, source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = (source.encode(), target.encode(), None if kind is None else kind.encode())
    _checked(f"mount {target}", libc.mount(*encoded, ctypes.c_ulong(flags), data.encode() or None))


def _set(libc: Any, path: str, flags: int, on: int, off: int) -> None:
    attributes = struct.pack("=QQQQ", on, off, 0, 0)
    _checked(f"mount_setattr {path}", libc.syscall(_SETATTR, -100, path.encode(), flags, attributes, len(attributes)))


def _checked(what: str, result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _close(*handles: int) -> None:
    for handle in handles:
        os.close(handle)


if __name__ == "__main__":
    main()
