"""Refusal of model folders that make transformers run code from elsewhere, read weights other than safetensors, or
allocate what the weights do not fill.

A config.json is data, but some of its entries make transformers download and run code, such as an attention kernel from
the hub or the loader of a quantization library. headwise opens untrusted folders, so these entries are refused before
transformers reads them, and once more in the configuration that it made of them, from which a model is built.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from threading import get_ident
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from headwise.errors import CheckpointError
from headwise.files import check_regular

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
    """Raise CheckpointError, naming the entry, if a configuration of transformers refers to code or to other weights.

    Args:
        config: the contents of config.json. path: of the file, for messages. unused: entries that the caller removes.
    """
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
    """As `check_config`, for a configuration that transformers made, with all configurations in it: the proof that no
    entry arrived by another name."""
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
    """Within it, building a model raises CheckpointError once it has many more parameters than there are tensors in its
    files: a number in config.json may ask for millions of layers. tensors: None if the files are not read."""
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
    """Raise CheckpointError if a model on the meta device is far larger than the numbers in its files, before memory is
    allocated for it."""
    size = sum(x.numel() for x in chain(model.parameters(), model.buffers()))
    if size > NUMBERS * numbers + SMALL:
        raise _unfilled(folder, f"{size:,} numbers", f"{numbers:,}")


def _unfilled(folder: str | os.PathLike[str], asked: str, held: str) -> CheckpointError:
    name = os.fspath(folder)
    return CheckpointError(
        f"{name!r}: config.json describes a model of {asked} (weights: {held}); the files are incomplete or belong to "
        f"another model",
        f"{name!r}：config.json 描述的模型有 {asked}（权重：{held}）；文件不完整，或属于另一个模型",
    )


def check_folder(folder: Path) -> None:
    """Raise CheckpointError if a folder contains an adapter, whose base model would be downloaded, and TextError for a
    pipe or a device in it."""
    for path in [*folder.iterdir(), *folder.glob("*template*/*")]:
        if path.exists():  # not a link to nothing
            check_regular(path)
    if (folder / ADAPTER).exists():
        raise CheckpointError(
            f"{str(folder)!r} contains an adapter ({ADAPTER}); merge it into its model and save the result, "
            f"or remove the file",
            f"{str(folder)!r} 中有适配器（{ADAPTER}）；请把它合并进模型再保存，或删除该文件",
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
