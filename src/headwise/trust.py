"""What a model's folder may not ask of transformers: code from elsewhere, or weights that are not safetensors.

A config.json is data, but some of its entries make transformers fetch and run code: a kernel from the hub in place of
attention, the loader of a quantization library. headwise opens folders of anybody, so these are refused by name before
transformers reads them.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headwise.errors import CheckpointError

# What transformers computes by itself; everything else may be a repository with compiled code.
ATTENTION = ("eager", "sdpa", "flex_attention", "headwise")
EXPERTS = ("eager", "batched_mm", "grouped_mm")
IMPLEMENTATIONS = {"attn_implementation": ATTENTION, "experts_implementation": EXPERTS}
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
FETCHES = "loads a kernel from elsewhere"
REFUSED = {
    "use_kernels": FETCHES, "kernel_config": FETCHES,
    "trust_remote_code": "runs code of the folder",
    "quantization_config": "needs the library that quantized the weights",
    "use_pretrained_backbone": "fetches another model",
}  # fmt: skip
ADAPTER = "adapter_config.json"


def check_config(config: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """CheckpointError, naming the entry, if a configuration of transformers asks for code or for other weights.

    Args:
        config: the values of its config.json. path: of the file, for messages.
    """
    for name, value in _entries(config):
        key = name.rpartition(".")[2].removeprefix("_").removesuffix("_internal")
        if key in IMPLEMENTATIONS and not _known(value, IMPLEMENTATIONS[key]):
            raise _refused(path, name, value, f"{FETCHES}; expected one of {', '.join(IMPLEMENTATIONS[key])}")
        if key in REFUSED and value not in (None, False):
            raise _refused(path, name, value, REFUSED[key])
        if key == "transformers_weights" and value not in (None, *WEIGHTS):
            raise _refused(path, name, value, f"refers to other weight files; expected {WEIGHTS[0]}")


def check_folder(folder: Path) -> None:
    """CheckpointError if a folder holds an adapter: its weights belong to another model, which would be fetched."""
    if (folder / ADAPTER).exists():
        raise CheckpointError(
            f"{str(folder)!r} contains an adapter ({ADAPTER}); merge it into its model and save the result, "
            f"or remove the file"
        )


def _entries(config: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """All entries with their places, those of configurations inside it too."""
    for name, value in config.items():
        yield f"{at}{name}", value
        if isinstance(value, Mapping):
            yield from _entries(value, f"{at}{name}.")


def _known(value: Any, names: tuple[str, ...]) -> bool:
    if isinstance(value, Mapping):  # one for each part of the model
        return all(_known(part, names) for part in value.values())
    return value is None or value in names


def _refused(path: str | os.PathLike[str], name: str, value: Any, why: str) -> CheckpointError:
    shown = repr(value) if len(repr(value)) < 60 else "…"
    return CheckpointError(
        f"{os.fspath(path)!r}: {name}={shown} {why}. headwise runs no code but that of the installed transformers; "
        f"remove the entry if the model needs none"
    )
