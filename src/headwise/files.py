"""Writing files so that a crash, a full disk or a `kill -9` never leaves half a file behind."""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

LONGEST = 160  # bytes of a name that other names are made of: most file systems take 255
_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}\.headwise\.tmp", re.DOTALL)


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it over `path` if the block succeeds, remove it if not.

    The file at `path` is at every moment either the old one or the whole new one. The folder is made
    if it is missing. A temporary file that a killed process left is removed by `sweep`.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _held(target, folder=False) as temporary:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        # mkstemp makes files only the owner can read; give what a plain open() would have given.
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, target)


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """As `atomic_path`, for a folder that is not there yet, or is empty."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _held(target, folder=True) as temporary:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        os.replace(temporary, target)


def sweep(folder: Path) -> None:
    """Remove the temporary files that killed processes left in a folder, those of `atomic_path` and `atomic_folder`.

    Each is locked by the process that writes it, and the system releases the lock when that process ends; nothing is
    removed where the file system has no locks.
    """
    with contextlib.suppress(OSError):
        for path in [path for path in folder.iterdir() if is_temporary(path)]:
            with contextlib.suppress(OSError):
                handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
                try:
                    if lock(handle):
                        remove(path)
                finally:
                    os.close(handle)


def is_temporary(path: Path) -> bool:
    """Whether a name is one that `atomic_path` and `atomic_folder` give to what they are writing."""
    return _TEMPORARY.fullmatch(path.name) is not None


def lock(handle: int) -> bool | None:
    """Lock an open file or folder for as long as it is open: True, or False if another process has locked it, or None
    where the system or the file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_at(handle: int, path: Path) -> bool:
    """Whether an open file or folder is the one that `path` names now."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Of all bytes of a file."""
    digest = sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def short_name(name: str) -> str:
    """The name, or a part of it with a checksum where it is so long that a name made of it might be too long."""
    whole = os.fsencode(name)
    return name if len(whole) <= LONGEST else f"{name[: LONGEST // 8]}-{sha256(whole).hexdigest()[:16]}"


def remove(path: Path) -> None:
    """Remove a file or a folder with all that it holds."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


@contextmanager
def _held(target: Path, *, folder: bool) -> Iterator[Path]:
    """A new temporary file or folder beside the target, locked while the block runs, and gone if it fails."""
    handle, temporary = _begun(target, folder)
    try:
        yield temporary
    except BaseException:
        remove(temporary)
        raise
    finally:
        if handle is not None:
            os.close(handle)


def _begun(target: Path, folder: bool) -> tuple[int | None, Path]:
    prefix, suffix = f".{short_name(target.name)}.", ".headwise.tmp"
    while True:
        if folder:
            path = Path(tempfile.mkdtemp(suffix, prefix, target.parent))
        else:
            made, name = tempfile.mkstemp(suffix, prefix, target.parent)
            os.close(made)
            path = Path(name)
        if fcntl is None:  # nor could an open file be renamed there
            return None, path
        with contextlib.suppress(FileNotFoundError):  # a sweep came between its making and its lock
            handle = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
            if lock(handle) is not False and is_at(handle, path):
                return handle, path
            os.close(handle)


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
