"""Finds and loads the compiled kernels, libheadwise, if they are there: `library()`.

pip and `make native` put the library beside this file. HEADWISE_NATIVE_LIBRARY=path loads another one, such as a
build with sanitizers. HEADWISE_TARGET=name selects the target (the set of
instructions that it uses) in place of the library's own choice.
"""

import ctypes
import os
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import takewhile
from pathlib import Path

from headwise.errors import KernelError

ABI = 10  # HEADWISE_ABI in native/headwise.h
NAME = {"darwin": "libheadwise.dylib", "win32": "libheadwise.dll"}.get(sys.platform, "libheadwise.so")
OVERRIDE = "HEADWISE_NATIVE_LIBRARY"
TARGET = "HEADWISE_TARGET"
TARGETS = ("portable", "avx2", "avx512", "avx512bf16", "amx")  # all targets that exist, each with more instructions


@dataclass(frozen=True)
class Library:
    """The loaded library, or why there is none: either `handle` or `reason` is None."""

    path: Path
    handle: ctypes.CDLL | None
    reason: str | None

    def target(self) -> str | None:
        """The target in use, one of `TARGETS`; None if no library is loaded."""
        return None if self.handle is None else self.handle.headwise_target_name().decode()

    @cached_property
    def statistics(self) -> dict[str, int]:
        """The codes of the statistics that it computes, by signature (`headwise.stats.Compiled`)."""
        if self.handle is None:
            return {}
        return {name.decode(): code for code, name in enumerate(takewhile(bool, self.handle.headwise_statistics()))}

    def targets(self) -> list[str]:
        """The targets that were compiled in, in the order in which they are chosen."""
        return [] if self.handle is None else self.handle.headwise_targets().decode().split(",")

    def refusal(self, target: str) -> str | None:
        """Why this target does not run here; None if it does."""
        assert self.handle is not None
        reason = self.handle.headwise_refusal(target.encode())
        return f"{self.path.name} was compiled without it" if reason is None else reason.decode() or None


@cache
def library() -> Library:
    """The library of this process, looked for once.

    Raises:
        KernelError: if HEADWISE_NATIVE_LIBRARY names one that does not load, or HEADWISE_TARGET instructions that the
            library or the CPU does not have; nothing else takes their place.
    """
    chosen = os.environ.get(OVERRIDE)
    found = load(path())
    if chosen and found.reason:
        raise KernelError(f"{OVERRIDE}={chosen!r}: {found.reason}; name a build of libheadwise, or unset the variable")
    if reason := wrong_target(os.environ.get(TARGET), found):
        raise KernelError(f"{reason}, or unset the variable")
    return found


def path() -> Path:
    """Where the library of this process is looked for."""
    return Path(os.environ.get(OVERRIDE) or Path(__file__).with_name(NAME))


def wrong_target(wanted: str | None, found: Library) -> str | None:
    """Returns why HEADWISE_TARGET=wanted cannot be used, and which targets can; None if it can, or is not set."""
    if not wanted or (found.handle is None and wanted in TARGETS):
        return None
    if wanted not in TARGETS:
        why: str | None = "there is no such target"
    else:
        why = found.refusal(wanted)
    if why is None:
        return None
    here = list(TARGETS) if found.handle is None else [name for name in found.targets() if found.refusal(name) is None]
    return f"{TARGET}={wanted!r}: {why}; name one that runs here ({', '.join(here)})"


def load(path: Path) -> Library:
    """The library at `path`; one that is missing, does not load or is of another version has a reason instead."""
    if not path.exists():
        return Library(path, None, f"there is no {path.name}: headwise was installed without a C++ compiler that fits")
    try:
        handle = ctypes.CDLL(str(path.resolve()))
        version = int(handle.headwise_abi_version())
    except OSError as error:
        return Library(path, None, f"it does not load: {error}")
    except AttributeError:
        return Library(path, None, "it is no libheadwise: it has no headwise_abi_version")
    if version != ABI:
        return Library(path, None, f"it has interface {version}, and this headwise needs {ABI}: build it again")
    handle.headwise_target_name.restype = ctypes.c_char_p
    handle.headwise_targets.restype = handle.headwise_refusal.restype = ctypes.c_char_p
    handle.headwise_statistics.restype = ctypes.POINTER(ctypes.c_char_p)
    handle.headwise_again.argtypes = [ctypes.c_void_p, ctypes.c_int, *[ctypes.c_void_p] * 4]
    handle.headwise_peak.restype = handle.headwise_bandwidth.restype = ctypes.c_double
    _share_threads(handle)
    return Library(path, handle, None)


def _share_threads(handle: ctypes.CDLL) -> None:
    """Run on the OpenMP threads that PyTorch has, if its runtime is GNU's or speaks its language, as LLVM's does."""
    try:
        handle.headwise_set_openmp(ctypes.CDLL(None).GOMP_parallel)
    except (AttributeError, OSError, TypeError):
        return  # no such runtime: threads of its own
