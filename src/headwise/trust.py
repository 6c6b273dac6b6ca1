"""Refusal of model folders that make transformers run code from elsewhere or read weights other than safetensors.

A config.json is data, but some of its entries make transformers download and run code, such as an attention kernel from
the hub or the loader of a quantization library. headwise opens untrusted folders, so these entries are refused before
transformers reads them.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headwise.errors import CheckpointError

# Implementations in transformers itself; any other name may be a repository with compiled code.
ATTENTION = ("eager", "sdpa", "flex_attention", "headwise")
EXPERTS = ("eager", "batched_mm", "grouped_mm")
IMPLEMENTATIONS = {"attn_implementation": ATTENTION, "experts_implementation": EXPERTS}
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
FETCHES = "loads a kernel from elsewhere"
REFUSED = {
    "use_kernels": FETCHES, "kernel_config": FETCHES,
    "trust_remote_code": "runs code from the folder",
    "quantization_config": "requires the library that quantized the weights",
    "use_pretrained_backbone": "downloads another model",
}  # fmt: skip
ADAPTER = "adapter_config.json"


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
        if key == "transformers_weights" and value not in (None, *WEIGHTS):
            raise _refused(path, name, value, f"refers to other weight files; expected {WEIGHTS[0]}")


def check_folder(folder: Path) -> None:
    """Raise CheckpointError if a folder contains an adapter, whose base model would be downloaded."""
    if (folder / ADAPTER).exists():
        raise CheckpointError(
            f"{str(folder)!r} contains an adapter ({ADAPTER}); merge it into its model and save the result, "
            f"or remove the file",
            f"{str(folder)!r} 中有适配器（{ADAPTER}）；请把它合并进模型再保存，或删除该文件",
        )


def _entries(config: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """All entries with their locations, including those of nested configurations."""
    for name, value in config.items():
        yield f"{at}{name}", value
        if isinstance(value, Mapping):
            yield from _entries(value, f"{at}{name}.")


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
