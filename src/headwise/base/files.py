"""Files: written atomically, and outputs that are checked before work begins, and locked by one run at a time.

with taken(path, "--out"):          # raises if it cannot be written, or if another run is writing it
    ...                             # hours of work
"""

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from headwise.errors import CheckpointError, ConfigError, TextError, reason
from headwise.wording import tr

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
    target = Path(path)
    with writing(path):
        if target.exists() and not (target.is_file() or target.is_dir()):  # such as /dev/null, which would be replaced
            raise OSError(errno.EINVAL, "it is a pipe or a device; expected a file name")
        with _beside(target) as folder:
            temporary = folder / target.name
            yield temporary
            with open(temporary, "rb") as written:
                os.fsync(written.fileno())
            # Some writers create files that only the owner can read; set the permissions of a plain open().
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o666 & ~umask)
            os.replace(temporary, target)


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
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """As `atomic_path`, for a folder that does not exist or is empty."""
    target = Path(path)
    with _beside(target) as folder:
        temporary = folder / target.name
        temporary.mkdir()
        yield temporary
        os.replace(temporary, target)


def sweep(folder: Path) -> None:
    """Remove temporary files that killed processes left in a folder: those no longer locked, if there are locks."""
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
    """Lock an open file or folder until it is closed. False: another process has it; None: there are no locks."""
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
    """TextError for a pipe, a device or a socket, whose reading may never end; for inputs, before they are opened."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # of a folder, the system's own error is clear
        name = os.fspath(path)
        raise TextError(
            "{name!r} is a pipe or a device; expected a file. A text is piped into a command that takes - as its file",
            name=name,
        )


def folder_of(path: str | os.PathLike[str]) -> Path:
    """The folder of a config.json, which may be given for it; any other path as it is."""
    path = Path(path)
    return path.parent if path.name == "config.json" and path.is_file() else path


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
    handle = None
    while True:
        folder = Path(tempfile.mkdtemp(".headwise.tmp", f".{short_name(target.name)}.", target.parent))
        if fcntl is None:
            break
        with contextlib.suppress(FileNotFoundError):  # removed by a sweep before it was locked
            handle = os.open(folder, os.O_RDONLY)
            if lock(handle) is not False and is_at(handle, folder):
                break
            os.close(handle)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if handle is not None:
            os.close(handle)


FOLDER_LOCK = ".headwise.lock"
OF_MODEL = ("*.safetensors", "*.safetensors.index.json", "*config.json", "tokenizer*", "vocab.*", "merges.txt")


def check_writable(path: str | os.PathLike[str], option: str, *, folder: bool = False) -> None:
    """Raise if `path` cannot be written, before any work begins. Nothing is changed, except that temporary files of
    killed runs are removed.

    Args:
        option: the caller's name for it, "--out" or "out". folder: whether the output is a folder instead of a file.
    Raises:
        CheckpointError: naming the option, the path and the reason.
    """
    target = Path(path)
    try:
        if folder and target.is_file():
            raise _refused(target, option, tr("it is a file; expected a folder"))
        home, missing = _there(target if folder else target.parent)
        for name in [*missing, *([] if folder else [target.name])]:
            with suppress(FileNotFoundError):
                os.lstat(home / name)  # raises for a name that is too long
        if missing and os.path.lexists(home / missing[0]):
            raise _refused(target, option, tr("{home!r} is a link to nothing", home=str(home / missing[0])))
        if not folder and target.exists() and not target.is_file():
            raise _refused(target, option, tr("it is a folder, a pipe or a device; expected a file name"))
        if not missing:
            sweep(home)
        handle, probe = tempfile.mkstemp(".headwise.tmp", ".probe.", home)
        os.close(handle)
        Path(probe).unlink(missing_ok=True)  # another run may have swept it
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _refused(target, option, reason(error)) from None


@contextmanager
def taken(path: str | os.PathLike[str], option: str, *, folder: bool = False) -> Iterator[None]:
    """Lock an output path for the block. Missing folders are created, and removed if nothing was written.

    The lock is a file next to the output, or inside it if it is a folder; the system releases it when the process ends
    for any reason. On file systems without locks, nothing is locked.

    Args:
        path, option, folder: as for `check_writable`.
    Returns:
        A context manager: the lock is held in its block.
    Raises:
        CheckpointError: as `check_writable`. ConfigError: if another run has locked it.
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


def check_apart(outputs: Iterable[tuple[str, Path | None]], others: Mapping[str, Path | None]) -> None:
    """ConfigError if two of (option, file) `outputs` are the same, or one is another file of the run by its option; of
    a folder in `others`, the files of a model. None is skipped."""
    there = [(option, _files(path)) for option, path in others.items() if path is not None]
    for option, path in outputs:
        if path is None:
            continue
        for other, files in there:
            if any(_is_same(path, file) for file in files):
                raise ConfigError(
                    "{named}: is the file of {other}; expected another one", named=_named(path, option), other=other
                )
        there.append((option, [path]))


def contents(folder: Path) -> list[Path]:
    """The contents of a folder without the temporary files of runs."""
    return [path for path in folder.iterdir() if path.name != FOLDER_LOCK and not is_temporary(path)]


def _there(folder: Path) -> tuple[Path, list[str]]:
    """The nearest existing folder, and the missing names below it, from the top."""
    missing: list[str] = []
    while True:
        try:
            if not stat.S_ISDIR(os.stat(folder).st_mode):
                raise NotADirectoryError(0, tr("{folder!r} is not a folder", folder=str(folder)))
            return folder, missing[::-1]
        except FileNotFoundError:
            missing.append(folder.name)
            folder = folder.parent
        except NotADirectoryError as error:
            if error.errno == 0:
                raise
            folder = folder.parent  # something above it is a file


def _locked(file: Path, home: Path, made: list[Path], target: Path, option: str) -> int | None:
    """The open lock file; None without locks."""
    while True:
        try:
            _make(home, made)
            if fcntl is None:
                return None
            handle = _opened(file)
        except FileNotFoundError:  # the folder was just removed by a run that ended
            continue
        except OSError as error:
            raise _refused(target, option, reason(error)) from None
        got = lock(handle)
        if got is False:
            holder = os.read(handle, 100).decode("utf-8", "replace").strip()
            os.close(handle)
            by = tr(" ({holder})", holder=holder) if holder else ""
            raise ConfigError(
                "{file}: another run{by} is writing it; wait until it ends, or give another name",
                file=_named(target, option),
                by=by,
            )
        if got is None or is_at(handle, file):
            with suppress(OSError):
                os.ftruncate(handle, 0)
                os.write(handle, f"process {os.getpid()}".encode())
            return handle
        os.close(handle)  # the lock file was just removed by a run that ended


def _opened(file: Path) -> int:
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        return os.open(file, os.O_RDONLY)  # another user's, left by a killed run


def _make(folder: Path, made: list[Path]) -> None:
    """Create a folder and its parents; the created ones are appended to `made`."""
    if folder.is_dir():
        return
    _make(folder.parent, made)
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():  # not a folder that another run just created
            raise
    else:
        made.append(folder)


def _files(path: Path) -> list[Path]:
    """The path, or the files of the model in the folder."""
    with suppress(OSError):  # a name that is too long, which whoever reads or writes it names
        path = folder_of(path)
        return [file for name in OF_MODEL for file in sorted(path.glob(name))] if path.is_dir() else [path]
    return [path]


def _is_same(path: Path, other: Path) -> bool:
    """Whether both are one file, or would be."""
    try:
        return os.path.samefile(path, other)
    except OSError:  # one is missing
        return os.path.realpath(path) == os.path.realpath(other)  # not `resolve`, which raises for a link to itself


def _named(path: Path, option: str) -> str:
    return f"{option} {str(path)!r}" if option.startswith("--") else f"{option}={str(path)!r}"


def _refused(path: Path, option: str, why: str) -> CheckpointError:
    return CheckpointError("{file}: cannot be written: {why}", file=_named(path, option), why=why)
