"""The place of a result: looked at before any work is done for it, and held by one run at a time.

with taken(path, "--out"):          # or an error: it cannot be written, or another run is writing it
    ...                             # hours of work
"""

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headwise.errors import CheckpointError, ConfigError
from headwise.files import fcntl, is_at, is_temporary, lock, short_name, sweep

FOLDER_LOCK = ".headwise.lock"


def check_writable(path: str | os.PathLike[str], option: str, *, folder: bool = False) -> None:
    """Raise if nothing can be written at `path`, so that it is known before any work is done. Nothing is changed, but
    for temporary files of killed runs, which are removed.

    Args:
        option: what the caller calls it, "--out" or "out". folder: whether it is to be a folder, and not a file.
    Raises:
        CheckpointError: naming the option, the path and what is in the way.
    """
    target = Path(path)
    try:
        if folder and target.is_file():
            raise _refused(target, option, "it is a file; expected a folder")
        home, missing = _there(target if folder else target.parent)
        for name in [*missing, *([] if folder else [target.name])]:
            with suppress(FileNotFoundError):
                os.lstat(home / name)  # raises for a name that is too long
        if missing and os.path.lexists(home / missing[0]):
            raise _refused(target, option, f"{str(home / missing[0])!r} is a link to nothing")
        if not folder and target.exists() and not target.is_file():
            raise _refused(target, option, "it is a folder, a pipe or a device; expected a file name")
        if not missing:
            sweep(home)
        handle, probe = tempfile.mkstemp(".headwise.tmp", ".probe.", home)
        os.close(handle)
        Path(probe).unlink(missing_ok=True)  # another run may have swept it
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _refused(target, option, getattr(error, "strerror", None) or str(error)) from None


@contextmanager
def taken(path: str | os.PathLike[str], option: str, *, folder: bool = False) -> Iterator[None]:
    """Hold the place of a result while the block runs: no other run can. The folders that it needs are made, and
    removed again if nothing was written.

    The lock is a file beside the result, or in it if it is a folder; the system releases it however the process ends.
    Where the file system has no locks, nothing is held.

    Raises:
        CheckpointError: as `check_writable`. ConfigError: if another run holds it.
    """
    check_writable(path, option, folder=folder)
    target = Path(path)
    home = target if folder else target.parent
    file = home / (FOLDER_LOCK if folder else f".{short_name(target.name)}{FOLDER_LOCK}")
    made: list[Path] = []
    handle = None
    try:
        handle = _locked(file, home, made, target, option)
        yield
    finally:
        if handle is not None:
            with suppress(OSError):
                file.unlink()
            os.close(handle)
        for empty in reversed(made):
            with suppress(OSError):  # it is not empty
                empty.rmdir()


def contents(folder: Path) -> list[Path]:
    """What a folder holds, without what runs put there while they last."""
    return [path for path in folder.iterdir() if path.name != FOLDER_LOCK and not is_temporary(path)]


def _there(folder: Path) -> tuple[Path, list[str]]:
    """The nearest folder above that is there, and the names below it that are not, from the top."""
    missing: list[str] = []
    while True:
        try:
            if not stat.S_ISDIR(os.stat(folder).st_mode):
                raise NotADirectoryError(0, f"{str(folder)!r} is not a folder")
            return folder, missing[::-1]
        except FileNotFoundError:
            missing.append(folder.name)
            folder = folder.parent
        except NotADirectoryError as error:
            if error.errno == 0:
                raise
            folder = folder.parent  # something above it is a file


def _locked(file: Path, home: Path, made: list[Path], target: Path, option: str) -> int | None:
    """The open lock file; None where there are no locks."""
    while True:
        try:
            _make(home, made)
            if fcntl is None:
                return None
            handle = _opened(file)
        except FileNotFoundError:  # a run that has just ended removed the folder that it had made
            continue
        except OSError as error:
            raise _refused(target, option, error.strerror or str(error)) from None
        got = lock(handle)
        if got is False:
            holder = os.read(handle, 100).decode("utf-8", "replace").strip()
            os.close(handle)
            raise ConfigError(
                f"{_named(target, option)}: another run{f' ({holder})' * bool(holder)} is writing it; wait "
                f"until it ends, or give another name"
            )
        if got is None or is_at(handle, file):
            with suppress(OSError):
                os.ftruncate(handle, 0)
                os.write(handle, f"process {os.getpid()}".encode())
            return handle
        os.close(handle)  # the run that held it has just ended and removed it


def _opened(file: Path) -> int:
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        return os.open(file, os.O_RDONLY)  # another user's, left by a run that was killed


def _make(folder: Path, made: list[Path]) -> None:
    """Make a folder and those above it; `made` gets those that were not there."""
    if folder.is_dir():
        return
    _make(folder.parent, made)
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():  # another run may have made it, but this is something else
            raise
    else:
        made.append(folder)


def _named(path: Path, option: str) -> str:
    return f"{option} {str(path)!r}" if option.startswith("--") else f"{option}={str(path)!r}"


def _refused(path: Path, option: str, why: str) -> CheckpointError:
    return CheckpointError(f"{_named(path, option)}: cannot be written: {why}")
