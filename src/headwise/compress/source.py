"""The checkpoint to change and the new one: its text in three parts, its sizes, what it was made of."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.base.files import contents, folder_of, sha256_of
from headwise.costs import Counts
from headwise.errors import CheckpointError, ConfigError, TextError
from headwise.lm.checkpoint import MODEL_FILE, load_checkpoint, read, save_model, unpack
from headwise.lm.loading import LoadedModel, load_model
from headwise.lm.model import SIZES, Decoder
from headwise.lm.texts import HELD_OUT, CharTokenizer, Corpus
from headwise.map import AttentionMap
from headwise.models import find_heads
from headwise.nn.registry import counts_of, sizes_of
from headwise.plan.tables import Column, Table, Value
from headwise.wording import tr

MOST = 2048  # tokens of a window of a model of transformers, which may be trained on many more


@dataclass(frozen=True)
class Source:
    """A model as read from its checkpoint."""

    name: str  # as shown
    file: Path  # the checkpoint
    decoder: Any  # a `Decoder`; or a model of transformers, attached
    tokenizer: CharTokenizer
    info: dict[str, Any]  # the metadata of the checkpoint
    dtype: torch.dtype  # of its weights, and of the result's
    sha256: str  # of the file
    loaded: LoadedModel | None = None  # that of transformers

    @property
    def context(self) -> int:
        """Tokens of a window, unless the user gives another number."""
        if self.loaded is None:
            return int(self.decoder.config.context)
        return min(self.loaded.context or MOST, MOST, MOST if self.loaded.limit is None else self.loaded.limit - 1)

    def maps(self, ids: Tensor) -> list[AttentionMap]:
        """The map of each layer."""
        if self.loaded is not None:
            return list(self.loaded.maps(ids).values())
        found: list[AttentionMap] = self.decoder(ids, return_maps=True)[1]
        return found

    @property
    def sizes(self) -> str:
        """Layers and heads in words."""
        if self.loaded is not None:
            return self.loaded.about
        heads = [site.num_heads for site in find_heads(self.decoder)]
        alike = str(heads[0]) if len(set(heads)) == 1 else " ".join(map(str, heads))
        design = self.decoder.config.design
        return tr("{layers} layers × {heads} heads ({design})", layers=len(heads), heads=alike, design=design)

    @property
    def described(self) -> str:
        """Name and sizes."""
        return tr("{name}, {sizes}", name=self.name, sizes=self.sizes)


def open_source(model: str | os.PathLike[str] | None, *, transformers: bool = False) -> Source:
    """The model of a folder or file, or the embedded one. CheckpointError if it cannot be read, or is one of
    transformers, unless the command supports it."""
    if model is None:
        with as_file(files("headwise.lm") / "pretrained" / MODEL_FILE) as path:
            return _opened(tr("the embedded model"), path)
    path = folder_of(model)
    theirs = path.is_dir() and (path / "config.json").is_file()
    if theirs and transformers:
        loaded: Any = load_model(path)
        if not loaded.causal or loaded.loss_fn is None:
            raise CheckpointError("--model {path!r}: predicts no next tokens, so it has no KV cache", path=str(path))
        weights = [path / "config.json", *sorted(path.glob("*.safetensors"))]
        digest = sha256(" ".join(map(sha256_of, weights)).encode()).hexdigest()
        tokens: Any = Tokens(loaded)
        return Source(loaded.name, weights[-1], loaded.model, tokens, {}, loaded.model.dtype, digest, loaded)
    if theirs:
        raise CheckpointError(
            "--model {path!r}: is a model of transformers; expected a checkpoint of headwise. In Python, "
            "hw.edit.prune, hw.edit.merge_kv and hw.edit.save_pruned change models of transformers",
            path=str(path),
        )
    return _opened(str(path), path / MODEL_FILE if path.is_dir() else path)


class Tokens:
    """The tokenizer of a model of transformers, as `Corpus` calls one."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def encode(self, text: str, **_: Any) -> np.ndarray:
        """Token ids."""
        return self._loaded.read(text).ids.numpy()


def check_target(source: Source, out: str | os.PathLike[str], *, force: bool = False) -> None:
    """CheckpointError if the folder `out` is the source's, no folder, or not empty beside temporary files of runs."""
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError("--out {folder!r}: is a file; expected a new folder", folder=str(folder))
    if folder.resolve() in (source.file.resolve().parent, source.file.parent.resolve()):  # of a link, both folders
        raise CheckpointError(
            "--out {folder!r}: contains {name}, and the source is never overwritten; expected another folder",
            folder=str(folder),
            name=source.name,
        )
    if not force and folder.is_dir() and contents(folder):
        raise CheckpointError(
            "--out {folder!r}: is not empty; expected a new folder, or give --force", folder=str(folder)
        )


def write_changed(
    source: Source, decoder: Decoder, out: str | os.PathLike[str], change: Mapping[str, Any], more: Mapping[str, Any]
) -> Decoder:  # fmt: skip
    """Write a changed model, and read it again for evaluation. `change` is appended to "changes", `more` is added."""
    file = Path(out) / MODEL_FILE
    info = {**source.info, "changes": [*source.info.get("changes", []), dict(change)], **more}
    save_model(file, decoder, source.tokenizer, info, dtype=source.dtype)
    return load_checkpoint(file)[0]


def _opened(name: str, file: Path) -> Source:
    decoder, tokenizer, info = load_checkpoint(file)
    dtypes = {x.dtype for x in read(file)[0].values() if x.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return Source(name, file, decoder, tokenizer, info, dtype, sha256_of(file))


KEY = "made_by"  # in the info of a checkpoint, and in a budget and the JSON of a plan
Made = Mapping[str, Any]


def made_by(command: str, source: Source, text: str | os.PathLike[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that the result of a command depends on, except the machine: plain values, as JSON returns them."""
    found: dict[str, Any] = json.loads(
        json.dumps({
            "command": command, "model": source.sha256, "text": sha256_of(text), "options": dict(options),
            "versions": {name: metadata.version(name) for name in ("headwise", "torch")},
        })
    )  # fmt: skip
    return found


def is_made(out: Path, made: Made) -> bool:
    """Whether a file, or the checkpoint in a folder, is the result of these inputs."""
    if not out.is_dir():
        return made_json(out, made)
    file = out / MODEL_FILE
    try:
        return file.is_file() and bool(unpack(read(file)[1], file)[2].get(KEY) == made)
    except CheckpointError:  # not a checkpoint
        return False


def made_json(file: Path, made: Made) -> bool:
    """Whether a JSON file belongs to that result."""
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get(KEY) == made


TOGETHER = 2  # windows in a batch: the unit of standard errors of differences
HEAL_BATCH = 8


@dataclass(frozen=True)
class Texts:
    """Batches [up to 2, context + 1] of token ids."""

    name: str
    context: int
    decide: tuple[Tensor, ...]  # of the first 95 % of the text, drawn at random
    foretell: tuple[Tensor, ...]  # alternating windows of the last 5 %, which `headwise train` holds out too
    judge: tuple[Tensor, ...]  # the others of these
    corpus: Corpus

    def described(self, *, decided: bool) -> str:
        """A description of the parts; decided: whether the first one is used."""
        decide, foretell, judge = (sum(map(len, part)) for part in (self.decide, self.foretell, self.judge))
        words = tr(
            "{name}: of the last {share:.0%}, {foretell} windows of {context} tokens to estimate the loss and {judge} "
            "for the evaluation"
        )
        if decided:
            words = tr(
                "{name}: {decide} windows of {context} tokens to choose heads; of the last {share:.0%}, {foretell} to "
                "estimate the loss and {judge} for the evaluation"
            )
        return words.filled(
            name=self.name, context=self.context, share=HELD_OUT, decide=decide, foretell=foretell, judge=judge
        )

    def healing(self, steps: int, seed: int = 0) -> Iterator[Tensor]:
        """Batches [8, context + 1] to train on, of the first 95 %."""
        return (self.corpus.batch(HEAL_BATCH, self.context, seed=seed + 1, step=step) for step in range(steps))


def check_windows(context: int | None, windows: int) -> None:
    """Raise ConfigError for sizes that are out of range. context: None for that of the model."""
    for name, value, least in (("--context", context, 2), ("--windows", windows, 1)):
        if value is not None and value < least:
            raise ConfigError("{name} {value}: expected at least {least}", name=name, value=value, least=least)


def split_text(
    file: str | os.PathLike[str], tokenizer: CharTokenizer, *, context: int, windows: int = 16
) -> Texts:  # fmt: skip
    """The parts of a UTF-8 file: `windows` for planning, at most as many for prediction, and four times for evaluation;
    TextError if it is too short. The same file gives the same parts."""
    check_windows(context, windows)
    corpus = Corpus.read([file], context=context, tokenizer=tokenizer, byte_rate=0.0)
    held = corpus.heldout_windows(context)[0]
    if len(held) < 2:
        raise TextError(
            "{file!r}: its last {held_out:.0%} hold {count} window of {context} tokens; expected at least 2, one to "
            "predict and one to evaluate: give a longer text, or a smaller --context",
            file=os.fspath(file),
            held_out=HELD_OUT,
            count=len(held),
            context=context,
        )
    decide = corpus.batch(windows, context, seed=0, step=0)
    parts = [decide, _evenly(held[0::2], windows), _evenly(held[1::2], 4 * windows)]
    batches = [tuple(part.split(TOGETHER)) for part in parts]
    return Texts(Path(file).name, context, batches[0], batches[1], batches[2], corpus)


def _evenly(windows: Tensor, most: int) -> Tensor:
    if len(windows) <= most:
        return windows
    return windows[torch.linspace(0, len(windows) - 1, most).long()]


Heads = tuple[int, int]  # query heads, and key and value heads
COST = (
    Column(tr("model")),
    Column(tr("loss"), "number"),
    Column(tr("rise"), "share"),
    Column(tr("parameters"), "count"),
    Column(tr("KV B/token"), "count"),
)


def expected_parameters(decoder: Decoder, heads: Mapping[int, Heads]) -> int:
    """Of the whole model, with these numbers of heads in these layers."""
    found = decoder.num_parameters
    for layer, count in heads.items():
        found += counts_in(decoder, layer, count).parameters - counts_in(decoder, layer).parameters
    return found


def expected_cache_bytes(decoder: Decoder, heads: Mapping[int, Heads], size: int = 4) -> int:
    """Bytes of keys and values per token in all layers, at `size` bytes per number."""
    return size * sum(counts_in(decoder, layer, heads.get(layer)).cache for layer in range(len(decoder.blocks)))


def expected(decoder: Decoder, heads: Mapping[int, Heads]) -> dict[str, int]:
    """Parameters, and bytes per token in float32 caches, of the model with these numbers of heads in these layers."""
    return {
        "parameters": expected_parameters(decoder, heads),
        "cache_bytes": expected_cache_bytes(decoder, heads),
    }


def cost_table(
    title: str, decoder: Decoder, name: str, heads: Mapping[int, Heads], losses: tuple[float, float]
) -> Table:
    """The present model and, under `name`, the changed one: predicted losses, the rest by formula."""
    now, then = losses
    rows: tuple[tuple[Value, ...], ...] = (
        (tr("now"), f"{now:.4f}", "", decoder.num_parameters, expected_cache_bytes(decoder, {})),
        (
            name, f"{then:.4f}", f"{100 * (then / now - 1):+.2f} %", expected_parameters(decoder, heads),
            expected_cache_bytes(decoder, heads),
        ),
    )  # fmt: skip
    return Table("expected", title, COST, rows)


def counts_in(decoder: Decoder, layer: int, heads: Heads | None = None) -> Counts:
    """The attention of a layer, with its own number of heads or another."""
    config = decoder.config
    attention: Any = decoder.blocks[layer].attention
    taken = sizes_of(config.design)
    sizes = {name: value for name, value in config.options.items() if name in taken}
    sizes |= {name: getattr(attention, name) for name in SIZES if name in taken and hasattr(attention, name)}
    if heads is not None:
        sizes |= {name: n for name, n in zip(("num_heads", "num_kv_heads"), heads, strict=True) if name in taken}
    return counts_of(config.design, {**sizes, "d_model": config.d_model})
