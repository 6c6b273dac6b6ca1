"""Tensors in safetensors files, written atomically and verified by a checksum when they are read."""

import hashlib
import json
import os
from collections.abc import Mapping

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headwise.errors import CheckpointError
from headwise.files import atomic_path

CHECKSUM = "checksum"  # in the header: SHA-256 of the rest of the header and of all tensors


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    """Write a file atomically. CheckpointError if it cannot be written."""
    with atomic_path(path) as temporary:
        save_tensors(temporary, tensors, header)


def save_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    """Write a file in place, for callers that rename it. The same contents give the same bytes. OSError if it cannot
    be written."""
    plain = _apart({name: _plain(x) for name, x in tensors.items()})
    try:
        save_file(plain, path, metadata={**header, CHECKSUM: _checksum(plain, header)})
        _put_in_order(path)
    except SafetensorError as error:  # for example, because the disk is full
        raise OSError(str(error)) from error


def read_tensors(path: str | os.PathLike[str], form: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors and header of a file written by `write_tensors`; for use in a `reading` block. CheckpointError if
    the format in the header is not `form`, or if any byte has changed.

    safetensors opens a file twice, for the header and for the tensors. If another process replaces it in between, it is
    read again.
    """
    while True:
        before = _identity(path)
        try:
            return _read(path, form)
        except CheckpointError:
            if before == _identity(path):
                raise


def _identity(path: str | os.PathLike[str]) -> tuple[int, ...]:
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read(path: str | os.PathLike[str], form: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    if os.path.isdir(path):
        raise CheckpointError("it is a folder", "是文件夹")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            found = header.get("format")
            if found != form:
                raise CheckpointError(
                    f"it is not of the format {form}; its header says {found!r}",
                    f"格式不是 {form}；文件头写的是 {found!r}",
                )
            # Copies, because the tensors of safetensors are mapped to the file and change with it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise CheckpointError(f"it is truncated or damaged: {error}", f"被截断或已损坏：{error}") from None
    written = header.pop(CHECKSUM, None)
    if written is None or written != _checksum(tensors, header):
        raise CheckpointError(
            f"it is damaged: its contents do not match the {CHECKSUM} in its header",
            f"已损坏：内容与文件头中的 {CHECKSUM} 不符",
        )
    return tensors, header


def tensor_like(tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """Return the tensor of that name. CheckpointError if it is missing, or differs from `like` in size or dtype."""
    found = tensors.get(name)
    if found is None or found.shape != like.shape or found.dtype != like.dtype:
        got = "is missing" if found is None else f"is {found.dtype} {tuple(found.shape)}"
        raise CheckpointError(f"{name} {got}; expected {like.dtype} {tuple(like.shape)}")
    return found


def _put_in_order(file: str | os.PathLike[str]) -> None:
    """Sort the header of a safetensors file in place; its order differs between saves."""
    with open(file, "r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        ordered = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(size)
        if len(ordered) == size:  # the same characters; trailing spaces are allowed by the format
            opened.seek(8)
            opened.write(ordered)


def _plain(x: Tensor) -> Tensor:
    """A contiguous CPU tensor with the numbers in memory; lazy conjugation and negation are resolved."""
    return x.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors without shared memory, as safetensors requires."""
    found = {}
    taken: dict[int, list[tuple[int, int]]] = {}
    for name, x in tensors.items():
        start = x.data_ptr()
        stop = start + x.nbytes
        spans = taken.setdefault(x.untyped_storage().data_ptr(), [])
        if any(start < last and first < stop for first, last in spans):
            x = x.clone()
        else:
            spans.append((start, stop))
        found[name] = x
    return found


def _checksum(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(sorted(header.items())).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(x.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
