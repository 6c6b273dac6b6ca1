"""Validated reading of untrusted files: JSON value by value, tensors with a checksum, folders that would run code.

A reader uses a file in a `reading` block and accesses JSON values through an `Entry`: any defect of the file, damaged,
truncated, of another version or malicious, then raises one CheckpointError; other exceptions are bugs in the library.

Model folders are refused that make transformers run code from elsewhere, such as an attention kernel from the hub or
the loader of a quantization library, read weights other than safetensors, or allocate what the weights do not fill:
before transformers reads config.json, and once more in the configuration that it made.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from threading import get_ident
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from headwise.base.files import atomic_path, check_regular
from headwise.errors import CheckpointError, HeadwiseError, reason
from headwise.wording import Bilingual, tr

LARGEST = (1 << 63) - 1  # the largest whole number of a tensor
LONGEST = 300  # characters of messages of other libraries
Read = TypeVar("Read")


@contextmanager
def reading(path: str | os.PathLike[str], what: str, *, missing: str = "", way_out: str = "") -> Iterator[None]:
    """CheckpointError that names the file, `what` kind it is, and the `way_out`, if its contents are invalid; if it is
    `missing`, how to create it."""
    named = tr("{what} {path!r}", what=what, path=os.fspath(path))
    more = tr("; {way_out}", way_out=way_out) if way_out else ""
    try:
        check_regular(path)
        yield
    except FileNotFoundError:
        more = tr("; {way_out}", way_out=missing) if missing else more
        raise CheckpointError("{file} does not exist{more}", file=named, more=more) from None
    except (OSError, HeadwiseError) as error:
        why = reason(error) if isinstance(error, OSError) else one_line(error)
        raise CheckpointError("{file} cannot be read: {why}{more}", file=named, why=why, more=more) from None


@contextmanager
def theirs(folder: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Every exception of another library for invalid files, a panic in Rust included, becomes a CheckpointError."""
    try:
        yield
    except HeadwiseError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{os.fspath(folder)!r}: {what}: {one_line(error)}") from None


def text_of(path: str | os.PathLike[str]) -> str:
    """Read a UTF-8 file; for use in a `reading` block."""
    try:
        return Path(path).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise CheckpointError("byte {start} is not UTF-8", start=error.start) from None


def parsed(text: str) -> Any:
    """Parse JSON; for use in a `reading` block."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise CheckpointError("not JSON: {error}", error=one_line(error)) from None


def one_line(error: BaseException) -> str:
    """The message of an error as one line of limited length."""

    def cut(text: str) -> str:
        text = " ".join(text.split())
        return text if len(text) <= LONGEST else text[:LONGEST] + "…"

    text = cut(str(error)) or type(error).__name__
    return Bilingual(text, cut(error.zh)) if isinstance(error, HeadwiseError) else text


class Entry:
    """A JSON object in a file; bad values raise CheckpointError. at: its location in the file, for messages."""

    def __init__(self, value: Any, at: str = "") -> None:
        self._at = at
        self._value: dict[str, Any] = _of(dict, "an object", value, at or "the file")

    def __contains__(self, name: str) -> bool:
        return name in self._value

    def __iter__(self) -> Iterator[str]:
        return iter(self._value)

    def raw(self, name: str) -> Any:
        """Any value."""
        if name not in self._value:
            raise CheckpointError(f"{self._path(name)} is missing")
        return self._value[name]

    def plain(self) -> dict[str, Any]:
        """The object as a dict."""
        return dict(self._value)

    def word(self, name: str) -> str:
        """A string."""
        return word(self.raw(name), self._path(name))

    def whole(self, name: str, least: int = -LARGEST, most: int = LARGEST) -> int:
        """A whole number within a range."""
        return whole(self.raw(name), self._path(name), least, most)

    def number(self, name: str, least: float = -math.inf) -> float:
        """A finite number."""
        return number(self.raw(name), self._path(name), least)

    def entry(self, name: str) -> "Entry":
        """An object."""
        return Entry(self.raw(name), self._path(name))

    def entries(self, name: str) -> list["Entry"]:
        """A list of objects."""
        return self.each(name, Entry)

    def named(self, name: str, read: Callable[[Any, str], Read]) -> dict[str, Read]:
        """An object whose values are each passed to `read` with their location."""
        inner = self.entry(name)
        return {key: read(inner.raw(key), inner._path(key)) for key in inner}

    def numbers(self, name: str) -> dict[str, float]:
        """An object of finite numbers."""
        return self.named(name, number)

    def each(self, name: str, read: Callable[[Any, str], Read]) -> list[Read]:
        """A list whose values are each passed to `read` with their location."""
        return each(self.raw(name), self._path(name), read)

    def _path(self, name: str) -> str:
        return f"{self._at}.{name}" if self._at else name


def each(value: Any, at: str, read: Callable[[Any, str], Read]) -> list[Read]:
    """Check a list at the location `at`; each of its values is passed to `read`."""
    return [read(one, f"{at}[{i}]") for i, one in enumerate(_of(list, "a list", value, at))]


def word(value: Any, at: str) -> str:
    """Check a string at the location `at`."""
    found: str = _of(str, "a string", value, at)
    if any(0xD800 <= ord(c) <= 0xDFFF for c in found):
        raise CheckpointError(f"{at}: half of a surrogate pair, which is not valid text")
    return found


def whole(value: Any, at: str, least: int = -LARGEST, most: int = LARGEST) -> int:
    """Check a whole number at the location `at`."""
    found: int = _of(int, "a whole number", value, at)
    if not least <= found <= most:
        raise CheckpointError(f"{at}: expected {least} to {most}, got {_shown(found)}")
    return found


def number(value: Any, at: str, least: float = -math.inf) -> float:
    """Check a finite number at the location `at`."""
    found = _of(int | float, "a number", value, at)
    if abs(found) > LARGEST if isinstance(found, int) else not math.isfinite(found):
        raise CheckpointError(f"{at}: expected a finite number, got {_shown(found)}")
    if found < least:
        raise CheckpointError(f"{at}: expected at least {least}, got {_shown(found)}")
    return float(found)


def _of(kind: Any, expected: str, value: Any, at: str) -> Any:
    # In Python, but not in JSON, true and false are numbers.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise CheckpointError(f"{at}: expected {expected}, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number that is too large"
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "…"


# Implementations in transformers itself; any other name may be a repository with compiled code.
ATTENTION = ("eager", "sdpa", "flex_attention", "headwise")
EXPERTS = ("eager", "batched_mm", "grouped_mm")
IMPLEMENTATIONS = {"attn_implementation": ATTENTION, "experts_implementation": EXPERTS}
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
BACKBONE = "backbone"  # a plain name of the package timm is data
FETCHES = "loads a kernel from elsewhere"
REFUSED = {
    "use_kernels": FETCHES, "kernel_config": FETCHES,
    "trust_remote_code": "runs code from the folder",
    "quantization_config": "requires the library that quantized the weights",
    "use_pretrained_backbone": "downloads another model",
    BACKBONE: "downloads the configuration of another model",
    "attribute_map": "gives other names to entries, which are then not checked",
}  # fmt: skip
ADAPTER = "adapter_config.json"
# transformers makes lists of as many entries when it reads a configuration.
COUNT = re.compile("layer|block|label|depth|stage|expert")
MOST = 1 << 20  # of them
PARAMETERS, NUMBERS = 8, 8  # of a model for each tensor and each number in its files, as layers may share them
SMALL = 1 << 26  # numbers that any model may have, such as tables that are not saved


def check_config(config: Mapping[str, Any], path: str | os.PathLike[str], *, unused: tuple[str, ...] = ()) -> None:
    """CheckpointError, naming the entry, if a configuration of transformers refers to code or to other weights."""
    for name, value in _entries(config):
        key = name.rpartition(".")[2].removeprefix("_").removesuffix("_internal")
        if key in IMPLEMENTATIONS and not _known(value, IMPLEMENTATIONS[key]):
            raise _refused(path, name, value, f"{FETCHES}; expected one of {', '.join(IMPLEMENTATIONS[key])}")
        if key in REFUSED and key not in unused and value not in (None, False):
            raise _refused(path, name, value, REFUSED[key])
        if COUNT.search(key) and isinstance(value, int) and abs(value) > MOST:
            raise CheckpointError(f"{os.fspath(path)!r}: {name}={str(value)[:20]}: expected at most {MOST:,}")
        if key == "transformers_weights" and value not in (None, *WEIGHTS):
            raise _refused(path, name, value, f"refers to other weight files; expected {WEIGHTS[0]}")


def check_built(config: Any, path: str | os.PathLike[str], *, unused: tuple[str, ...] = ()) -> None:
    """As `check_config`, with all configurations in one that transformers made: no entry arrived by another name."""
    waiting, seen = [config], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if hasattr(type(value), "attribute_map"):
            check_config(vars(value), path, unused=(*unused, BACKBONE))
            waiting += vars(value).values()
        elif isinstance(value, Mapping | list | tuple):
            waiting += value.values() if isinstance(value, Mapping) else value


@contextmanager
def bounded(folder: str | os.PathLike[str], tensors: int | None = None) -> Iterator[None]:
    """CheckpointError once a model has many more parameters than `tensors` in its files allow (None: not read)."""
    own, most = get_ident(), (1 << 18) if tensors is None else PARAMETERS * tensors + (1 << 12)
    held, left = "none were read" if tensors is None else f"{tensors:,} tensors", most

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal left
        left -= get_ident() == own
        if left < 0:
            raise _unfilled(folder, f"more than {most:,} parameters", held)

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def check_room(folder: str | os.PathLike[str], model: nn.Module, numbers: int) -> None:
    """CheckpointError if a model on the meta device is far larger than the numbers in its files, before it is built."""
    size = sum(x.numel() for x in chain(model.parameters(), model.buffers()))
    if size > NUMBERS * numbers + SMALL:
        raise _unfilled(folder, f"{size:,} numbers", f"{numbers:,}")


def _unfilled(folder: str | os.PathLike[str], asked: str, held: str) -> CheckpointError:
    name = os.fspath(folder)
    return CheckpointError(
        "{name!r}: config.json describes a model of {asked} (weights: {held}); the files are incomplete or belong to "
        "another model",
        name=name,
        asked=asked,
        held=held,
    )


def check_folder(folder: Path) -> None:
    """CheckpointError for an adapter, whose base model would be downloaded; TextError for a pipe or a device."""
    for path in [*folder.iterdir(), *folder.glob("*template*/*")]:
        if path.exists():  # not a link to nothing
            check_regular(path)
    if (folder / ADAPTER).exists():
        raise CheckpointError(
            "{folder!r} contains an adapter ({adapter}); merge it into its model and save the result, or remove the "
            "file",
            folder=str(folder),
            adapter=ADAPTER,
        )


def _entries(config: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """All entries with their locations, including those of nested configurations."""
    for key, value in config.items():
        name = str(key)
        if not (key == BACKBONE and config.get("model_type") == "timm_backbone" and not {*"/:"} & {*str(value)}):
            yield f"{at}{name}", value
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, Mapping):
                yield from _entries(part, f"{at}{name}.")


def _known(value: Any, names: tuple[str, ...]) -> bool:
    if isinstance(value, Mapping):  # one value for each part of the model
        return all(_known(part, names) for part in value.values())
    return value is None or value in names


def _refused(path: str | os.PathLike[str], name: str, value: Any, why: str) -> CheckpointError:
    shown = repr(value) if len(repr(value)) < 60 else "…"
    return CheckpointError(
        f"{os.fspath(path)!r}: {name}={shown} {why}. headwise only runs code of the installed transformers; remove the "
        f"entry if the model does not need it"
    )


CHECKSUM = "checksum"  # in the header: SHA-256 of the rest of the header and of all tensors


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    """Write a file atomically. CheckpointError if it cannot be written."""
    with atomic_path(path) as temporary:
        save_tensors(temporary, tensors, header)


def save_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    """Write a file in place, for callers that rename it; the same contents give the same bytes. OSError if it fails."""
    plain = _apart({name: _plain(x) for name, x in tensors.items()})
    try:
        save_file(plain, path, metadata={**header, CHECKSUM: _checksum(plain, header)})
        _put_in_order(path)
    except SafetensorError as error:  # for example, because the disk is full
        raise OSError(str(error)) from error


def read_tensors(path: str | os.PathLike[str], form: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header of a file of `write_tensors`, in a `reading` block; CheckpointError if it is not of `form`, or
    changed. Opened twice by safetensors, so read again if another process replaces it in between."""
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
        raise CheckpointError(tr("it is a folder"))
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            found = header.get("format")
            if found != form:
                raise CheckpointError(
                    "it is not of the format {form}; its header says {found!r}", form=form, found=found
                )
            # Copies, because the tensors of safetensors are mapped to the file and change with it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise CheckpointError("it is truncated or damaged: {error}", error=error) from None
    written = header.pop(CHECKSUM, None)
    if written is None or written != _checksum(tensors, header):
        raise CheckpointError(
            "it is damaged: its contents do not match the {checksum} in its header", checksum=CHECKSUM
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
