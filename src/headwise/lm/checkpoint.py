"""Models as single safetensors files: weights, sizes and vocabulary together, whole or not at all."""

import json
import os
from collections.abc import Mapping
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headwise.errors import CheckpointError, ConfigError, HeadwiseError
from headwise.files import atomic_path
from headwise.lm.model import Decoder, DecoderConfig
from headwise.lm.tokenizer import CharTokenizer
from headwise.seeds import seeded

MODEL_FILE = "model.safetensors"
FORMAT = "headwise-decoder-1"


def save_model(
    path: str | os.PathLike[str],
    decoder: Decoder,
    tokenizer: CharTokenizer,
    info: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a decoder with its vocabulary; `info` (JSON values) tells how it was made.

    Layers may have lost heads, or share keys, since the decoder was built (`headwise.surgery`): what is written is
    what they are. ConfigError if a layer is of another design. CheckpointError if it cannot be written.
    """
    if decoder.strange_layers:
        raise ConfigError(
            f"decoder: {decoder.strange_layers[0]} is not of the design {decoder.config.design!r}, and the file could "
            f"not say so"
        )
    header = header_of(decoder.config, tokenizer, {**info})
    write(path, {name: x.detach().to(dtype) for name, x in decoder.state_dict().items()}, header)


def load_model(path: str | os.PathLike[str]) -> tuple[Decoder, CharTokenizer, dict[str, Any]]:
    """A decoder in float32 and eval mode, its tokenizer and its info, from a file or a folder that holds
    model.safetensors. Raises CheckpointError if it is missing, truncated or something else."""
    path = Path(path)
    file = path / MODEL_FILE if path.is_dir() else path
    tensors, header = read(file)
    config, tokenizer, info = unpack(header, file)
    try:
        with seeded(0):  # which draws weights that are replaced at once
            decoder = Decoder(config)
    except HeadwiseError as error:
        raise CheckpointError(f"{str(file)!r} has sizes that no decoder can have: {error}") from None
    try:
        decoder.load_state_dict({name: x.float() for name, x in tensors.items()})
    except RuntimeError as error:
        raise CheckpointError(f"{str(file)!r} does not fit its own sizes: {error}") from None
    return decoder.eval(), tokenizer, info


def load_pretrained() -> tuple[Decoder, CharTokenizer, dict[str, Any]]:
    """The decoder that comes with headwise, trained on *Water Margin* (two scripts) and tiny Shakespeare."""
    with as_file(files("headwise.lm") / "pretrained" / MODEL_FILE) as path:
        return load_model(path)


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    """A safetensors file, atomically; what was there before survives a full disk. The same content gives the same
    bytes."""
    try:
        with atomic_path(path) as temporary:
            save_file({name: x.contiguous() for name, x in tensors.items()}, temporary, metadata=dict(header))
            _put_in_order(temporary)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{os.fspath(path)!r} could not be written ({error}); what was there before is untouched"
        ) from error


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header of a safetensors file."""
    name = os.fspath(path)
    if not os.path.isfile(name):
        raise CheckpointError(f"checkpoint {name!r} does not exist; `headwise train FILE --out DIR` makes one")
    try:
        with safe_open(name, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"checkpoint {name!r} cannot be read, it may be truncated: {error}") from None


def read_header(path: str | os.PathLike[str]) -> dict[str, str]:
    """The header of a safetensors file alone; CheckpointError if it is missing or truncated."""
    name = os.fspath(path)
    try:
        with safe_open(name, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {name!r} cannot be read, it may be truncated: {error}") from None


def _put_in_order(file: Path) -> None:
    """Sort the header of a safetensors file, in place: its texts come in another order at each save."""
    with open(file, "r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))
        ordered = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(size)
        if len(ordered) == size:  # the same characters, as JSON has it; spaces at the end are part of the format
            opened.seek(8)
            opened.write(ordered)


def header_of(config: DecoderConfig, tokenizer: CharTokenizer, info: Mapping[str, Any]) -> dict[str, str]:
    """The text part of a checkpoint."""
    return {
        "format": FORMAT,
        "config": json.dumps(config.to_dict()),
        "tokenizer": tokenizer.to_json(),
        "info": json.dumps(info, ensure_ascii=False),
    }


def unpack(
    header: Mapping[str, str], path: str | os.PathLike[str]
) -> tuple[DecoderConfig, CharTokenizer, dict[str, Any]]:
    """Sizes, vocabulary and info from a header."""
    if header.get("format") != FORMAT:
        raise CheckpointError(f"{os.fspath(path)!r} is not a headwise decoder ({FORMAT}); its header says otherwise")
    try:
        config = DecoderConfig.from_dict(json.loads(header["config"]))
        return config, CharTokenizer.from_json(header["tokenizer"]), json.loads(header["info"])
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{os.fspath(path)!r} has a header that cannot be read: {error}") from None
