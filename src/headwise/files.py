"""Atomic writing of files: a crash, a full disk or `kill -9` never leaves an incomplete file."""

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from headwise.errors import CheckpointError, TextError

__all__ = ["atomic_folder", "atomic_path", "write_text"]

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

LONGEST = 160  # bytes of a name from which other names are made; most file systems support 255
_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}\.headwise\.tmp", re.DOTALL)


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path; it is renamed to `path` if the block succeeds, and removed if not.

    At any time, `path` is either the old file or the complete new one. Missing folders are created. The temporary path
    is in a separate folder next to `path`, because some writers create further temporary files next to theirs. `sweep`
    removes what a killed process leaves.

    Raises:
        CheckpointError: naming `path`, if it cannot be written, for example because the disk is full.
    """
    with writing(path), _whole(Path(path)) as temporary:
        yield temporary


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8, whole or not at all. CheckpointError as `atomic_path`."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert every OSError of the block to a CheckpointError that names `path`."""
    try:
        yield
    except OSError as error:
        why = error.strerror or " ".join(str(error).split())
        raise CheckpointError(
            f"{os.fspath(path)!r} could not be written ({why}); the previous content is untouched"
        ) from error


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    if target.exists() and not (target.is_file() or target.is_dir()):  # such as /dev/null, which would be replaced
        raise OSError(errno.EINVAL, "it is a pipe or a device; expected a file name")
    with _beside(target) as folder:
        temporary = folder / target.name
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        # Some writers create files that only the owner can read; set the permissions of a plain open().
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, target)


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """As `atomic_path`, for a folder that does not exist or is empty."""
    target = Path(path)
    with _beside(target) as folder:
        temporary = folder / target.name
        temporary.mkdir()
        yield temporary
        os.replace(temporary, target)


def sweep(folder: Path) -> None:
    """Remove the temporary files of `atomic_path` and `atomic_folder` that killed processes left in a folder.

    Each is locked by its process, and the system releases the lock when the process ends. Nothing is removed on file
    systems without locks.
    """
    with contextlib.suppress(OSError):
        for path in [path for path in folder.iterdir() if is_temporary(path)]:
            with contextlib.suppress(OSError):
                handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
                try:
                    if lock(handle):
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
                finally:
                    os.close(handle)


def is_temporary(path: Path) -> bool:
    """Whether a path is a temporary file of `atomic_path` or `atomic_folder`."""
    return _TEMPORARY.fullmatch(path.name) is not None


def lock(handle: int) -> bool | None:
    """Lock an open file or folder until it is closed. Returns False if another process has locked it, and None if the
    system or the file system has no locks."""
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
    """Whether an open file or folder is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise TextError for a pipe, a device or a socket, whose reading may never end. Inputs are checked by it before
    they are opened. OSError if there is nothing at the path."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # of a folder, the system's own error is clear
        name = os.fspath(path)
        raise TextError(
            f"{name!r} is a pipe or a device; expected a file. A text is piped into a command that takes - as its file",
            f"{name!r} 是管道或设备；应为文件。若用管道传入文本，请以 - 作为文件名",
        )


def sha256_of(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file."""
    check_regular(path)
    digest = sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def short_name(name: str) -> str:
    """Return the name, or a part of it with a checksum if names made from it could be too long."""
    whole = os.fsencode(name)
    return name if len(whole) <= LONGEST else f"{name[: LONGEST // 8]}-{sha256(whole).hexdigest()[:16]}"


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """Yield a new folder next to the target, which is locked during the block and removed afterwards."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, folder = _begun(target)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _begun(target: Path) -> tuple[int | None, Path]:
    while True:
        folder = Path(tempfile.mkdtemp(".headwise.tmp", f".{short_name(target.name)}.", target.parent))
        if fcntl is None:
            return None, folder
        with contextlib.suppress(FileNotFoundError):  # removed by a sweep before it was locked
            handle = os.open(folder, os.O_RDONLY)
            if lock(handle) is not False and is_at(handle, folder):
                return handle, folder
            os.close(handle)


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
