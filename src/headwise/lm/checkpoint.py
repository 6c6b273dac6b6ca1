"""Checkpoints: a decoder, and the state of its training, in safetensors files that are written atomically."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import Any

import torch
from torch import Tensor

from headwise.base.files import folder_of
from headwise.base.read import Entry, one_line, parsed, read_tensors, reading, tensor_like, write_tensors
from headwise.base.run import seeded, without_memory
from headwise.errors import CheckpointError, ConfigError
from headwise.lm.model import Decoder, DecoderConfig
from headwise.lm.texts import CharTokenizer
from headwise.nn.owned import check_state
from headwise.wording import tr

MODEL_FILE = "model.safetensors"
FORMAT = "headwise-decoder-2"
WHAT = tr("checkpoint")
MAKES_ONE = tr("`headwise train FILE --out DIR` makes one")


def save_model(
    path: str | os.PathLike[str],
    decoder: Decoder,
    tokenizer: CharTokenizer,
    info: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a decoder with its vocabulary to a checkpoint file.

    Layers are written with their present sizes, also after heads were removed or merged (`headwise.edit`).

    Args:
        path: of the file. decoder, tokenizer: the model to write.
        info: JSON values that describe how the model was made.
        dtype: of the weights in the file.
    Raises:
        ConfigError: if a layer is of another design than the decoder's `config`, or weights have other names.
        CheckpointError: if the file cannot be written.
    """
    if decoder.strange_layers:
        raise ConfigError(
            f"decoder: {decoder.strange_layers[0]} is not of the design {decoder.config.design!r}, which "
            f"the file format cannot store"
        )
    check_state(decoder, lambda: Decoder(decoder.config))
    header = header_of(decoder.config, tokenizer, {**info})
    write_tensors(path, {name: x.detach().to(dtype) for name, x in decoder.state_dict().items()}, header)


def load_checkpoint(path: str | os.PathLike[str]) -> tuple[Decoder, CharTokenizer, dict[str, Any]]:
    """Load a decoder in float32 and eval mode, its tokenizer and its info.

    Args:
        path: a checkpoint file, or a folder that contains model.safetensors.
    Raises:
        CheckpointError: if the file is missing, damaged or not a checkpoint.
    """
    path = folder_of(path)
    file = path / MODEL_FILE if path.is_dir() else path
    if file != path and (path / "config.json").is_file():
        raise CheckpointError("{path!r} is a model of transformers; expected a checkpoint of headwise", path=str(path))
    tensors, header = read(file)
    config, tokenizer, info = unpack(header, file)
    with reading(file, WHAT):
        # Before memory is allocated for it.
        if config.num_layers > len(tensors):
            raise CheckpointError(
                "{num_layers} layers in the configuration, but {count} tensors in the file",
                num_layers=config.num_layers, count=len(tensors),
            )  # fmt: skip
        try:
            with without_memory():
                expected = {name: tuple(x.shape) for name, x in Decoder(config).state_dict().items()}
        except (RuntimeError, OverflowError) as error:  # raised by PyTorch for impossible sizes
            raise CheckpointError("invalid sizes: {error}", error=one_line(error)) from None
        for name, shape in expected.items():
            if name not in tensors:
                raise CheckpointError("{name} is missing; the sizes require {shape}", name=name, shape=shape)
            if (found := tuple(tensors[name].shape)) != shape:
                raise CheckpointError(
                    "{name} is {found}; the sizes require {shape}", name=name, found=found, shape=shape
                )
        if strange := next((name for name in tensors if name not in expected), None):
            raise CheckpointError("{name} is not a weight of a decoder of these sizes", name=strange)
        with seeded(0):  # the weights drawn here are replaced below
            decoder = Decoder(config)
        decoder.load_state_dict({name: x.float() for name, x in tensors.items()})
    return decoder.eval(), tokenizer, info


def load_pretrained() -> tuple[Decoder, CharTokenizer, dict[str, Any]]:
    """Load the decoder that comes with headwise, trained on *Water Margin* (two scripts) and tiny Shakespeare."""
    with as_file(files("headwise.lm") / "pretrained" / MODEL_FILE) as path:
        return load_checkpoint(path)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header of a checkpoint. CheckpointError if it is missing, damaged or not a checkpoint."""
    with reading(path, WHAT, missing=MAKES_ONE):
        tensors, header = read_tensors(path, FORMAT)
        for name, x in tensors.items():
            # Float16 with all low bytes before all high ones: a wheel compresses them better apart.
            if x.dtype == torch.uint8 and x.shape[:1] == (2,):
                tensors[name] = (x[1].short() << 8 | x[0]).view(torch.float16)
        return tensors, header


def header_of(config: DecoderConfig, tokenizer: CharTokenizer, info: Mapping[str, Any]) -> dict[str, str]:
    """The header of a checkpoint: format, sizes, vocabulary and info as JSON."""
    return {
        "format": FORMAT,
        "config": json.dumps(config.to_dict()),
        "tokenizer": tokenizer.to_json(),
        "info": json.dumps(info, ensure_ascii=False),
    }


def unpack(
    header: Mapping[str, str], path: str | os.PathLike[str]
) -> tuple[DecoderConfig, CharTokenizer, dict[str, Any]]:
    """Sizes, vocabulary and info from a header. CheckpointError if it does not contain them."""
    with reading(path, WHAT):
        text = Entry(dict(header), "header")
        config = DecoderConfig.from_dict(Entry(parsed(text.word("config")), "config").plain())
        tokenizer = CharTokenizer.from_json(text.word("tokenizer"))
        if tokenizer.vocab_size > config.vocab_size:
            raise CheckpointError(
                "{tokens} tokens, but embeddings for {embeddings}",
                tokens=tokenizer.vocab_size, embeddings=config.vocab_size,
            )  # fmt: skip
        return config, tokenizer, Entry(parsed(text.word("info")), "info").plain()


MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, each of its parameter's size


@dataclass(frozen=True)
class TrainingState:
    """A saved run."""

    model: dict[str, Tensor]  # its `state_dict`
    optimizer: list[dict[str, Tensor]]  # the state of each parameter, in order
    step: int  # completed
    seconds: float
    best: dict[str, float]  # held-out losses of the best model
    log: list[dict[str, Any]]  # one entry per evaluation


def training_state(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], info: Mapping[str, Any], model: Mapping[str, Tensor],
    parameters: Sequence[Tensor],
) -> TrainingState:  # fmt: skip
    """The state in a file for a model of this `state_dict` and an optimizer of these parameters, or CheckpointError."""
    with reading(path, WHAT, way_out=tr("--fresh trains anew")):
        entry = Entry(dict(info), "info")
        log = entry.entries("log")
        for one in log:
            one.number("heldout_loss")
        best = entry.numbers("best")
        if best and "all" not in best:
            raise CheckpointError("info.best: expected the loss of all files")
        return TrainingState(
            {name: tensor_like(tensors, f"model.{name}", x) for name, x in model.items()},
            [_moments(tensors, i, parameter) for i, parameter in enumerate(parameters)],
            entry.whole("step", least=0), entry.number("seconds", least=0.0), best,
            [one.plain() for one in log],
        )  # fmt: skip


def _moments(tensors: Mapping[str, Tensor], i: int, parameter: Tensor) -> dict[str, Tensor]:
    prefix = f"optimizer.{i}."
    if not any(name.startswith(prefix) for name in tensors):  # saved before the first step
        return {}
    found = {name: tensor_like(tensors, f"{prefix}{name}", parameter) for name in MOMENTS}
    step = tensors.get(f"{prefix}step")
    if step is None or step.shape != ():
        raise CheckpointError(f"{prefix}step: expected one number")
    return {"step": step, **found}
