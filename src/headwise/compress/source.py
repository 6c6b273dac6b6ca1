"""The checkpoint to change, and the new one."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch

from headwise.compress.words import term
from headwise.contents import folder_of
from headwise.errors import CheckpointError
from headwise.files import sha256_of
from headwise.lm.checkpoint import MODEL_FILE, load_checkpoint, read, save_model
from headwise.lm.model import Decoder
from headwise.lm.texts import CharTokenizer
from headwise.models import find_heads
from headwise.outputs import contents
from headwise.wording import Bilingual, in_language


@dataclass(frozen=True)
class Source:
    """A model as read from its checkpoint.

    name: as shown. file: the checkpoint. dtype: of its weights; the result is written in the same dtype.
    info: the metadata of the checkpoint. sha256: of the file.
    """

    name: str
    file: Path
    decoder: Decoder
    tokenizer: CharTokenizer
    info: dict[str, Any]
    dtype: torch.dtype
    sha256: str

    @property
    def sizes(self) -> str:
        """Layers and heads in words."""
        heads = [site.num_heads for site in find_heads(self.decoder)]
        alike = str(heads[0]) if len(set(heads)) == 1 else " ".join(map(str, heads))
        return term("sizes", layers=len(heads), heads=alike, design=self.decoder.config.design)

    @property
    def described(self) -> str:
        """Name and sizes."""
        return term("named_sizes", name=self.name, sizes=self.sizes)


def open_source(model: str | os.PathLike[str] | None) -> Source:
    """The model of a folder or file, or the embedded one. CheckpointError if it cannot be read."""
    if model is None:
        with as_file(files("headwise.lm") / "pretrained" / MODEL_FILE) as path:
            return _opened(Bilingual("the embedded model", "内置模型"), path)
    path = folder_of(model)
    if path.is_dir() and (path / "config.json").is_file():
        raise CheckpointError(
            f"--model {str(path)!r}: is a model of transformers; expected a checkpoint of headwise. In Python, "
            "hw.edit.prune, hw.edit.merge_kv and hw.edit.save_pruned change models of transformers",
            f"--model {str(path)!r}：是 transformers 的模型；应为 headwise 的检查点。在 Python 中，hw.edit.prune、"
            "hw.edit.merge_kv 与 hw.edit.save_pruned 可以修改 transformers 的模型",
        )
    return _opened(str(path), path / MODEL_FILE if path.is_dir() else path)


def check_target(source: Source, out: str | os.PathLike[str], *, force: bool = False) -> None:
    """Raise CheckpointError if the folder `out` is that of the source, is not empty and must not be replaced, or is not
    a folder. Temporary files of runs are ignored."""
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(
            f"--out {str(folder)!r}: is a file; expected a new folder", f"--out {str(folder)!r}：是文件；应为新文件夹"
        )
    if folder.resolve() in (source.file.resolve().parent, source.file.parent.resolve()):  # of a link, both folders
        raise CheckpointError(
            f"--out {str(folder)!r}: contains {source.name}, and the source is never overwritten; expected "
            f"another folder",
            f"--out {str(folder)!r}：其中有 {in_language(source.name, 'zh')}，原模型绝不会被覆盖；应为另一个文件夹",
        )
    if not force and folder.is_dir() and contents(folder):
        raise CheckpointError(
            f"--out {str(folder)!r}: is not empty; expected a new folder, or give --force",
            f"--out {str(folder)!r}：不是空的；应为新文件夹，或加 --force",
        )


def write_changed(
    source: Source, decoder: Decoder, out: str | os.PathLike[str], change: Mapping[str, Any], more: Mapping[str, Any]
) -> Decoder:  # fmt: skip
    """Write a changed model into the folder `out`, and read it again, so that the model on disk is evaluated.

    `change` is appended to the list "changes" in the info of the checkpoint, and `more` is added to the info.
    CheckpointError if it cannot be written.
    """
    file = Path(out) / MODEL_FILE
    info = {**source.info, "changes": [*source.info.get("changes", []), dict(change)], **more}
    save_model(file, decoder, source.tokenizer, info, dtype=source.dtype)
    return load_checkpoint(file)[0]


def _opened(name: str, file: Path) -> Source:
    decoder, tokenizer, info = load_checkpoint(file)
    dtypes = {x.dtype for x in read(file)[0].values() if x.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return Source(name, file, decoder, tokenizer, info, dtype, sha256_of(file))
