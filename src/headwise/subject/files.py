"""What has to be in a folder of transformers before anything of it is loaded, and the messages for what is not."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwise.adapters.huggingface.library import library
from headwise.errors import CheckpointError

PICKLED = "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack"
INDEX = "model.safetensors.index.json"


@contextmanager
def quiet() -> Iterator[None]:
    """Within it, transformers shows no progress bars and logs errors only; afterwards it is as it was."""
    logging = library("utils.logging")
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def check_weights(folder: Path) -> None:
    """CheckpointError if there are no safetensors, or a part of them is missing or lies elsewhere."""
    if (folder / "model.safetensors").is_file():
        return
    index = folder / INDEX
    if index.is_file():
        for name in sorted(_parts(index)):
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise CheckpointError(f"{str(index)!r} names {name!r}, which is no safetensors file of this folder")
            if not (folder / name).is_file():
                raise CheckpointError(f"{str(folder)!r}: {name} is missing, which {INDEX} names")
        return
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{str(folder)!r} has its weights in {pickled[0]} alone, and headwise reads no pickled files: they can run "
            f"code. Open them where you trust them, and write model.safetensors with model.save_pretrained(…)"
        )
    raise CheckpointError(f"{str(folder)!r} has no weights: expected model.safetensors, or {INDEX} and its parts")


def _parts(index: Path) -> set[str]:
    try:
        parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if not parts or not all(isinstance(name, str) for name in parts):
            raise ValueError("weight_map names no files")
        return parts
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{str(index)!r} cannot be read: {error}") from None


def one_line(error: BaseException) -> str:
    """The first lines of a message of theirs, as one that is not too long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "…"


def read_config(folder: Path) -> Any:
    """The configuration. CheckpointError if it cannot be read, is not known, or is of a model that is no one text
    model."""
    auto = library("models.auto")
    try:
        with quiet():
            config = auto.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a file of others may be wrong in any way
        raise CheckpointError(
            f"{str(folder)!r}: its config.json is of no model that this version of transformers knows, or cannot be "
            f"read: {one_line(error)}"
        ) from None
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(
            f"{str(folder)!r} is an encoder with a decoder ({config.model_type}), which needs two texts; open models "
            f"of one text, or watch this one with headwise.watch"
        )
    return config


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer. CheckpointError if there is none."""
    auto = library("models.auto")
    try:
        with quiet():
            tokenizer = auto.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise CheckpointError(f"{str(folder)!r}: it has no tokenizer that can be read: {one_line(error)}") from None
    if not len(tokenizer) > len(tokenizer.added_tokens_decoder):
        raise CheckpointError(
            f"{str(folder)!r}: it has no tokenizer, such as tokenizer.json or vocab.txt; save one with "
            f"tokenizer.save_pretrained(…)"
        )
    return tokenizer
