"""Writing files so that a crash, a full disk or a `kill -9` never leaves half a file behind."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headwise.errors import CheckpointError


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it over `path` if the block succeeds, remove it if not.

    The file at `path` is at every moment either the old one or the whole new one. The folder is made
    if it is missing.

    Raises:
        CheckpointError: naming `path`, if it cannot be written, because the disk is full for example.
    """
    with writing(path), _whole(Path(path)) as temporary:
        yield temporary


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """A block that writes `path`: what the system refuses there is a CheckpointError that names it."""
    try:
        yield
    except OSError as error:
        why = error.strerror or " ".join(str(error).split())
        raise CheckpointError(
            f"{os.fspath(path)!r} could not be written ({why}); what was there before is untouched"
        ) from error


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        # mkstemp makes files only the owner can read; give what a plain open() would have given.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
