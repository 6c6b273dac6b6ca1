"""Finds and loads the compiled kernels, libheadwise, if they are installed: `library()`.

pip and `make native` put the library next to this file. HEADWISE_NATIVE_LIBRARY=path loads another one, such as a
build with sanitizers. HEADWISE_TARGET=name selects the target (instruction set) instead of the library.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import takewhile
from pathlib import Path

from headwise.errors import KernelError

ABI = 13  # HEADWISE_ABI in native/headwise.h
NAME = {"darwin": "libheadwise.dylib", "win32": "libheadwise.dll"}.get(sys.platform, "libheadwise.so")
OVERRIDE = "HEADWISE_NATIVE_LIBRARY"
TARGET = "HEADWISE_TARGET"
TARGETS = ("portable", "avx2", "avx512", "avx512bf16", "amx")  # all targets, each a larger instruction set


@dataclass(frozen=True)
class Library:
    """The loaded library, or the reason why there is none: either `handle` or `reason` is None."""

    path: Path
    handle: ctypes.PyDLL | None
    reason: str | None

    def target(self) -> str | None:
        """The target in use, one of `TARGETS`; None if no library is loaded."""
        return None if self.handle is None else self.handle.headwise_target_name().decode()

    @cached_property
    def statistics(self) -> dict[str, int]:
        """The codes of the statistics that it supports, by signature (`headwise.stats.Compiled`)."""
        if self.handle is None:
            return {}
        return {name.decode(): code for code, name in enumerate(takewhile(bool, self.handle.headwise_statistics()))}

    def targets(self) -> list[str]:
        """The compiled targets, in the order of preference."""
        return [] if self.handle is None else self.handle.headwise_targets().decode().split(",")

    def refusal(self, target: str) -> str | None:
        """Return the reason why this target does not run here, or None if it does."""
        assert self.handle is not None
        reason = self.handle.headwise_refusal(target.encode())
        return f"{self.path.name} was compiled without it" if reason is None else reason.decode() or None

    def runnable(self) -> list[str]:
        """The compiled targets that run here, in the order of preference."""
        return [name for name in self.targets() if self.refusal(name) is None]

    @contextmanager
    def using(self, target: str) -> Iterator[None]:
        """Within it, all threads of the process use this target, one of `runnable`."""
        assert self.handle is not None
        before = self.handle.headwise_target_name()
        status = self.handle.headwise_set_target(target.encode())
        assert status == 0
        try:
            yield
        finally:
            self.handle.headwise_set_target(before)


@cache
def library() -> Library:
    """The library of this process, searched for once; none with HEADWISE_NATIVE_LIBRARY=none. KernelError if a variable
    names a file that does not load, or a target that the library or the CPU does not support: there is no fallback."""
    chosen = os.environ.get(OVERRIDE)
    if chosen == "none":
        return Library(path(), None, f"{OVERRIDE}=none: unset it to use the compiled kernels")
    found = load(path())
    if chosen and found.reason:
        raise KernelError(f"{OVERRIDE}={chosen!r}: {found.reason}; name a build of libheadwise, or unset the variable")
    if reason := wrong_target(os.environ.get(TARGET), found):
        raise KernelError(f"{reason}, or unset the variable")
    return found


def path() -> Path:
    """The path where the library is searched for."""
    return Path(os.environ.get(OVERRIDE) or Path(__file__).with_name(NAME))


def wrong_target(wanted: str | None, found: Library) -> str | None:
    """Return why HEADWISE_TARGET=wanted cannot be used, and which targets can; None if it can or is not set."""
    if not wanted or (found.handle is None and wanted in TARGETS):
        return None
    if wanted not in TARGETS:
        why: str | None = "there is no such target"
    else:
        why = found.refusal(wanted)
    if why is None:
        return None
    here = list(TARGETS) if found.handle is None else found.runnable()
    return f"{TARGET}={wanted!r}: {why}; name one that runs here ({', '.join(here)})"


def load(path: Path) -> Library:
    """Load the library at `path`; `reason` is set if it is missing, does not load or has another ABI version."""
    if not path.exists():
        return Library(path, None, f"{path.name} is missing: headwise was installed without a suitable C++ compiler")
    try:
        handle = ctypes.PyDLL(str(path.resolve()))  # releases the GIL itself, and looks for signals: _share_signals
        version = int(handle.headwise_abi_version())
    except OSError as error:
        return Library(path, None, f"it does not load: {error}")
    except AttributeError:
        return Library(path, None, "it is not libheadwise: it has no headwise_abi_version")
    if version != ABI:
        return Library(path, None, f"it has ABI version {version}, expected {ABI}: rebuild it")
    handle.headwise_target_name.restype = ctypes.c_char_p
    handle.headwise_targets.restype = handle.headwise_refusal.restype = ctypes.c_char_p
    handle.headwise_statistics.restype = ctypes.POINTER(ctypes.c_char_p)
    handle.headwise_again.argtypes = [ctypes.c_void_p, ctypes.c_int, *[ctypes.c_void_p] * 4]
    handle.headwise_again_measured.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int] + [ctypes.c_void_p] * 9
    handle.headwise_peak.restype = handle.headwise_bandwidth.restype = ctypes.c_double
    # Run on PyTorch's OpenMP threads if its runtime has GNU's interface, as LLVM's has; else on threads of its own.
    with suppress(AttributeError, OSError, TypeError):
        handle.headwise_set_openmp(ctypes.CDLL(None).GOMP_parallel)
    _share_signals(handle)
    return Library(path, handle, None)


def _share_signals(handle: ctypes.PyDLL) -> None:
    """Run without the GIL, and call the handlers of signals during long calls in the main thread, as between bytecodes:
    where one raises, as that of Ctrl-C does, the call ends with its exception."""
    functions = (
        getattr(ctypes.pythonapi, f"Py{name}") for name in ("Eval_SaveThread", "Eval_RestoreThread", "Err_CheckSignals")
    )
    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    handle.headwise_set_python(*(ctypes.cast(function, ctypes.c_void_p) for function in functions), main)
