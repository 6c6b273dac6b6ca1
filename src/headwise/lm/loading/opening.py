"""`open_subject`: the one door to models in folders."""

import os
from pathlib import Path

from headwise.errors import CheckpointError
from headwise.lm.checkpoint import MODEL_FILE, load_model, load_pretrained
from headwise.lm.loading.base import Subject
from headwise.lm.loading.own import DecoderSubject


def open_subject(path: str | os.PathLike[str] | None = None) -> Subject:
    """A model and its tokenizer, ready to read texts.

    Args:
        path: None for the decoder that comes with headwise; a checkpoint of `headwise train`, a folder or a file; or a
            folder of Hugging Face transformers: config.json, model.safetensors (or its parts with their index), and
            the tokenizer's files. Weights are read in float32. Causal models come with their head, so that they have a
            loss; all others are opened as `AutoModel` does.
    Raises:
        CheckpointError: saying what is missing or will not do: weights that are pickled, an architecture that is not
            known, has an encoder and a decoder, or needs code of its own.
        ConfigError: if transformers is needed and not installed.
    """
    if path is None:
        decoder, tokenizer, _ = load_pretrained()
        return DecoderSubject(decoder, tokenizer, "embedded decoder")
    folder = Path(path)
    if (folder / "config.json").is_file():
        # Imported where it is needed: the decoder's subject works without transformers.
        from headwise.lm.loading.foreign import TransformersSubject

        return TransformersSubject(folder)
    if folder.is_dir() and not (folder / MODEL_FILE).is_file():
        raise CheckpointError(_nothing_in(folder))
    try:
        decoder, tokenizer, _ = load_model(folder)
    except CheckpointError as error:
        if folder.is_dir() and "not of the format" in str(error):
            raise CheckpointError(f"{error}; a transformers folder requires config.json") from None
        raise
    return DecoderSubject(decoder, tokenizer, folder.name)


def _nothing_in(folder: Path) -> str:
    found = sorted(entry.name for entry in folder.iterdir())
    there = f"it holds {', '.join(found[:6])}{', …' if len(found) > 6 else ''}" if found else "it is empty"
    return (
        f"{str(folder)!r} is no model: expected {MODEL_FILE} of `headwise train`, or config.json, *.safetensors and a "
        f"tokenizer of transformers; {there}"
    )
