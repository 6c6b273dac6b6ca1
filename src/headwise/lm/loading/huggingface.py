"""Models of Hugging Face transformers: their folder is checked, and headwise computes the attention."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from headwise.base.files import check_regular
from headwise.base.read import (
    WEIGHTS,
    Entry,
    bounded,
    check_built,
    check_config,
    check_folder,
    check_room,
    one_line,
    parsed,
    reading,
    text_of,
    theirs,
    word,
)
from headwise.edit.folder import is_pruned, load_pruned
from headwise.errors import CheckpointError, ConfigError, HeadwiseError, TextError
from headwise.lm.loading.base import (
    LoadedModel,
    LossFunction,
    Maps,
    OnMap,
    TokenizedText,
    check_window,
    checked_text,
    described,
    positions_of,
    remarks_on_tokens,
)
from headwise.lm.loading.characters import BROKEN, by_decoding, by_offsets, pieces_of
from headwise.models import HeadSite, attach, find_heads
from headwise.models.adapters.huggingface.library import cache_argument, library
from headwise.models.configuration import QUANTIZATION, num_layers, trained_context, two_stacks, width
from headwise.stats import Measure
from headwise.wording import joined, scaled, tr

PICKLED = "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack"
INDEX = WEIGHTS[1]
UNEXPRESSED = tr("models with heads removed are saved by headwise.edit.save_pruned")
TOKENIZER = ("*token*", "vocab*", "merges.txt", "*.model")  # files of a tokenizer


@contextmanager
def quiet() -> Iterator[None]:
    """Let transformers show no progress bars and log only errors while the block runs."""
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


def check_weights(folder: Path, config: Any) -> list[int]:
    """The numbers in each tensor of the weights; CheckpointError if they are missing, damaged, outside the folder, or
    fewer than the model has layers."""
    sizes: list[int] = []
    for name in _files(folder):
        with reading(folder / name, "weights"):
            try:
                with safe_open(folder / name, framework="pt") as file:
                    sizes += [prod(file.get_slice(key).get_shape()) for key in file.keys()]  # noqa: SIM118
            except SafetensorError as error:
                raise CheckpointError(
                    "truncated or damaged, so the model cannot be loaded: {error}", error=error
                ) from None
    layers = num_layers(config) or 0
    if layers > len(sizes):
        raise CheckpointError(
            "{folder!r}: {layers} layers in config.json, but {count} weights",
            folder=str(folder),
            layers=layers,
            count=len(sizes),
        )
    return sizes


def check_shapes(folder: Path, model: Any) -> None:
    """CheckpointError for weights of other shapes than the parameters of a model built from the configuration.
    Quantized weights and files that cannot be read, such as pointers of Git LFS, are skipped."""
    inner = f"{model.base_model_prefix}."  # of names in a model with an output layer
    built = {name.removeprefix(inner): list(x.shape) for name, x in model.named_parameters()}
    wrong = []
    for path in sorted(filter(Path.is_file, folder.glob("model*.safetensors"))):
        with suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                weight = file.get_slice(name)
                shape, floating = weight.get_shape(), weight.get_dtype().startswith(("F", "BF"))
                if floating and built.get(name.removeprefix(inner), shape) != shape:
                    wrong.append((name, shape))
    if wrong:
        name, shape = wrong[0]
        expected = built[name.removeprefix(inner)]
        raise CheckpointError(
            "{folder!r}: {count} weights have another shape than config.json gives, for example {name} {shape} "
            "instead of {expected}; {way_out}",
            folder=str(folder),
            count=len(wrong),
            name=name,
            shape=shape,
            expected=expected,
            way_out=UNEXPRESSED,
        )


def _files(folder: Path) -> list[str]:
    if (folder / WEIGHTS[0]).is_file():
        return [WEIGHTS[0]]
    index = folder / INDEX
    if index.is_file():
        with reading(index, "index"):
            names = sorted(set(Entry(parsed(text_of(index))).named("weight_map", word).values()))
            if not names:
                raise CheckpointError(tr("weight_map lists no files"))
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise CheckpointError(
                    "{index!r} refers to {name!r}, which is not a safetensors file in this folder",
                    index=str(index),
                    name=name,
                )
            if not (folder / name).is_file():
                raise CheckpointError(
                    "{folder!r}: {name}, listed in {index}, is missing", folder=str(folder), name=name, index=INDEX
                )
        return names
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled:
        raise CheckpointError(
            "{folder!r} has its weights in {pickled} only, and headwise does not read pickled files because they can "
            "run code. If you trust the file, load it elsewhere and write model.safetensors with "
            "model.save_pretrained(…)",
            folder=str(folder),
            pickled=pickled[0],
        )
    raise CheckpointError(
        "{folder!r} has no weights: expected model.safetensors, or {index} and its parts",
        folder=str(folder),
        index=INDEX,
    )


def read_config(folder: Path, *, weights: bool = True) -> Any:
    """Read the configuration. CheckpointError if it is unreadable or the model unknown. Without `weights`, one of
    quantized weights is read too; call `without_quantization` before a model is built."""
    auto = library("models.auto")
    check_folder(folder)
    path = folder / "config.json"
    with reading(path, "configuration"):
        own = Entry(parsed(text_of(path))).plain()
    with theirs(folder, "its config.json cannot be read"), quiet():
        # The configuration may refer to another file for this version of transformers.
        kind = library("configuration_utils").PreTrainedConfig
        followed, _ = kind.get_config_dict(str(folder), local_files_only=True)
    unused = () if weights else (QUANTIZATION,)
    for values in (own, followed):
        check_config(values, path, unused=unused)
        if "auto_map" in values and str(values.get("model_type")) not in auto.CONFIG_MAPPING:
            raise CheckpointError(
                "{path!r}: auto_map={auto_map!r} refers to custom code for a model that this version of transformers "
                "does not support; headwise does not run code from model folders",
                path=str(path),
                auto_map=values["auto_map"],
            )
    unknown = "its config.json cannot be read, or its model is unknown to this version of transformers"
    with theirs(folder, unknown), quiet():
        config = auto.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    check_built(config, path, unused=unused)
    return config


def read_tokenizer(folder: Path) -> Any:
    """Load the tokenizer. CheckpointError if there is none."""
    auto = library("models.auto")
    missing = CheckpointError(
        "{folder!r}: no tokenizer found, such as tokenizer.json or vocab.txt; save one with "
        "tokenizer.save_pretrained(…). In Python, hw.show(model, text=ids) requires none",
        folder=str(folder),
    )
    path = folder / "tokenizer_config.json"
    if path.is_file():
        with reading(path, "tokenizer configuration"):
            for name, value in Entry(parsed(text_of(path))).plain().items():
                if name.endswith("_file") and isinstance(value, str) and os.path.exists(value):
                    check_regular(value)
    try:
        with theirs(folder, "it has no tokenizer that can be read"), quiet():
            tokenizer = auto.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
            empty = not len(tokenizer) > len(tokenizer.added_tokens_decoder)
    except CheckpointError:
        # Some tokenizers have no files. Where others lack theirs, the error of transformers is about packages.
        if any(path for pattern in TOKENIZER for path in folder.glob(pattern)):
            raise
        raise missing from None
    if empty:
        raise missing
    return tokenizer


LOGITS = 1 << 26  # logits stored at a time, 256 MB in float32
TRIED = 8  # tokens that every model can read
NO_MEMORY = "DefaultCPUAllocator"  # in PyTorch's error
UNREAD = ("pooler",)  # parts that do not affect attention; they may be missing from the weights


class TransformersModel(LoadedModel):
    """A model from a transformers folder."""

    kind = "transformers"
    model: Any

    def __init__(self, folder: Path, name: str = "", window: int | None = None) -> None:
        self.name = name or folder.resolve().name
        self._folder = str(folder)
        config = read_config(folder)
        if two_stacks(config):
            raise CheckpointError(
                "{folder!r} is an encoder-decoder model ({model_type}), which takes two texts; use headwise.watch for "
                "such models",
                folder=str(folder),
                model_type=config.model_type,
            )
        sizes = check_weights(folder, config)
        self._tokenizer = read_tokenizer(folder)
        unset, meta = library("initialization").no_init_weights, torch.device("meta")
        with theirs(folder, "the model cannot be built"), quiet(), bounded(folder, len(sizes)), unset(), meta:
            built = _kind(config)[0].from_config(config)
        if not is_pruned(folder):
            check_room(folder, built, sum(sizes))
        if window is not None and window > (trained_context(config) or window):
            check_window(window, positions_of(built), self.name)
        del built
        self.model, self._predicts = _load(folder, config)
        self.layers: tuple[str, ...] = ()
        self._recognised = self._attach()
        self.limit = positions_of(self.model)
        self.context = trained_context(config) if self.limit is None else self.limit
        # The maps of two tokens show the layers, the heads, and whether the model is causal.
        kind, last = type(self.model).__name__, self._vocabulary - 1
        with theirs(self._folder, f"{kind} cannot be run on token ids alone"):
            found, _ = self._run(torch.tensor([[min(5, last), min(6, last)]]), None, (), None)
        if not found:
            raise CheckpointError(
                "{folder!r}: {name} has no attention that headwise can compute", folder=self._folder, name=kind
            )
        self.layers, self.heads = tuple(found), tuple(amap.shape[1] for amap in found.values())
        self.causal = all(float(amap[0, :, 0, 1].max()) == 0.0 for amap in found.values())
        self._predicts = self._predicts and self.causal
        size = scaled(sum(p.numel() for p in self.model.parameters()))
        d = width(config)
        wide = [] if d is None else [tr("hidden size {width}", width=d)]
        self.about = joined([kind, described(self.heads), *wide, tr("{size} weights", size=size)])

    def read(self, text: str) -> TokenizedText:
        """Tokenize a text with the folder's tokenizer, including special tokens."""
        whole = checked_text(text)
        tokenizer = self._tokenizer
        fast = bool(tokenizer.is_fast)
        with theirs(self._folder, "its tokenizer cannot read a text"):
            found = tokenizer(
                whole, return_offsets_mapping=fast, return_special_tokens_mask=True, truncation=False, padding=False,
                verbose=False,
            )  # fmt: skip
            ids = list(found["input_ids"])
            special = [bool(mark) for mark in found["special_tokens_mask"]]
            shown = pieces_of(tokenizer, ids, special)
            unknown = tokenizer.unk_token_id, str(tokenizer.unk_token)
        if not ids:
            raise TextError(tr("text: the tokenizer produces no tokens; give a text with letters"))
        tokens = [piece.removeprefix(" ") for piece in shown.texts] if shown.joins else shown.texts
        if fast:
            pieces, spans = by_offsets(whole, tokens, [tuple(span) for span in found["offset_mapping"]], special)
        else:
            pieces, spans = by_decoding(whole, tokens, special)
        return TokenizedText(whole, torch.tensor(ids), pieces, spans, special, remarks_on_tokens(ids, pieces, *unknown))

    @property
    def loss_fn(self) -> LossFunction | None:
        """As in `LoadedModel`."""
        return _mean_loss if self._predicts else None

    @property
    def sites(self) -> list[HeadSite]:
        """As in `LoadedModel`."""
        found = super().sites
        return [] if self._recognised and any(site.output is None for site in found) else found

    @property
    def unembedding(self) -> Tensor | None:
        """As in `LoadedModel`."""
        matrix = self.model.get_output_embeddings() if self._predicts else None
        return None if matrix is None else matrix.weight.detach()

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """As in `LoadedModel`; part of a character as its raw token."""
        with theirs(self._folder, "its tokenizer cannot write a token"):
            tokens = [str(token) for token in self._tokenizer.convert_ids_to_tokens(list(ids))]
            pieces = [pieces_of(self._tokenizer, [i]).texts[0] for i in ids]
        return [token if BROKEN in piece else piece or token for token, piece in zip(tokens, pieces, strict=True)]

    @property
    def _vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    @torch.no_grad()
    def _run(
        self, ids: Tensor, mask: Tensor | None, measures: Sequence[str | Measure], first: int | None,
        on_map: OnMap | None = None,
    ) -> tuple[Maps, Callable[[], float | None]]:  # fmt: skip
        padding = {} if mask is None else {"attention_mask": mask.long()}
        first = ids.shape[1] if first is None or not self._predicts else first
        wants = ids.shape[1] > first
        whole = wants and ids.numel() * self._vocabulary <= LOGITS
        options = {"logits_to_keep": 0 if whole else 1} if self._predicts else {}
        with self._collected(measures, on_map) as maps, self._lengths(ids.shape[1]):
            found = self.model(input_ids=ids, use_cache=False, **padding, **options)
        if self._recognised:  # one map of all tokens from each layer
            b, n = ids.shape
            same = not self.layers or tuple(maps) == self.layers
            if not same or any((amap.shape[0], *amap.shape[2:]) != (b, n, n) for amap in maps.values()):
                raise self._depends_on_length()
        if whole:
            loss = float(_nats(found.logits[:, first - 1 : -1], ids[:, first:]))
            return maps, lambda: loss
        return maps, lambda: self._long_loss(ids, first) if wants else None

    @contextmanager
    def _lengths(self, n: int) -> Iterator[None]:
        """Convert an error of the model in a text that is longer than those it was trained on to a TextError."""
        try:
            yield
        except HeadwiseError:
            raise
        except Exception as error:
            if (
                n <= max(self.context or 0, TRIED)
                or isinstance(error, torch.OutOfMemoryError)
                or NO_MEMORY in str(error)
            ):
                raise
            trained = "" if self.context is None else tr(", which was trained on {context:,}", context=self.context)
            raise TextError(
                "{n:,} tokens at once are too many for {name}{trained}: {error}",
                n=n,
                name=type(self.model).__name__,
                trained=trained,
                error=one_line(error),
            ) from error

    def _long_loss(self, ids: Tensor, first: int) -> float:
        """The loss without storing all logits: the text is processed again in parts, with a cache."""
        b, n = ids.shape
        rows = max(1, LOGITS // (b * self._vocabulary))
        cache, total = library("cache_utils").DynamicCache(config=self.model.config), 0.0
        kept = {cache_argument(self.model): cache, "use_cache": True}
        for start in range(0, n - 1, rows):
            part = ids[:, start : start + rows]
            logits = self.model(input_ids=part, **kept).logits
            at = max(start + 1, first)
            targets = ids[:, at : start + rows + 1]
            wanted = logits[:, at - start - 1 :][:, : targets.shape[1]]
            total += float(_nats(wanted, targets, reduction="sum"))
        return total / (b * (n - first))

    def _attach(self) -> bool:
        """Have headwise compute the attention; whether it is recognised, as that of models with code of their own, such
        as BLOOM: the first pass of each form of a call is compared with the code, later ones are replaced."""
        try:
            attach(self.model)
        except ConfigError:
            before, last = list(self.model.modules()), self._vocabulary - 1
        else:
            return False
        ids = (last - torch.arange(8)[None]).clamp(min=0)  # no padding
        batch = {"input_ids": ids, "use_cache": False}
        try:
            with theirs(self._folder, f"{type(self.model).__name__} cannot be run on token ids alone"), quiet():
                with suppress(ConfigError):
                    find_heads(self.model, batch)  # so that `sites` finds them
                handle = attach(self.model, batch)
                with torch.no_grad():
                    self.model(**{**batch, "input_ids": ids[:, :1]})
                    self.model(**batch, attention_mask=(torch.arange(8)[None] < 4).long())
        except ConfigError as error:
            raise CheckpointError(f"{self._folder!r}: {error}") from None
        if handle.skipped:
            name, why = next(iter(handle.skipped.items()))
            raise CheckpointError(f"{self._folder!r}: headwise cannot compute the attention of {name}: {why}")
        if before != list(self.model.modules()):  # BigBird, whose attention is another one for short texts
            raise self._depends_on_length()
        return True

    def _depends_on_length(self) -> CheckpointError:
        name = type(self.model).__name__
        return CheckpointError(
            "{folder!r}: {name} computes its attention by itself, in other ways for texts of other lengths; "
            "hw.watch(model) records what is recognised",
            folder=self._folder,
            name=name,
        )


def _kind(config: Any) -> tuple[Any, bool, set[str]]:
    """The class of transformers that loads the model, whether it predicts the next token, and all such models."""
    auto = library("models.auto")
    names = set(library("models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    headed = any(name in names for name in getattr(config, "architectures", None) or ())
    return auto.AutoModelForCausalLM if headed else auto.AutoModel, headed, names


def _load(folder: Path, config: Any) -> tuple[Any, bool]:
    """Load the model in eval mode; also returns whether it predicts the next token."""
    with theirs(folder, "its configuration has no known architecture"):
        kind, headed, names = _kind(config)
    if is_pruned(folder):
        pruned = load_pruned(folder).float()
        headed = type(pruned).__name__ in names
        return pruned if headed else pruned.base_model, headed
    with theirs(folder, "the model cannot be loaded"), quiet():
        model, info = kind.from_pretrained(
            str(folder), config=config, local_files_only=True, trust_remote_code=False, use_safetensors=True,
            dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    missing = sorted(name for name in info["missing_keys"] if not any(part in name for part in UNREAD))
    if missing or info["mismatched_keys"]:
        wrong = missing or sorted(str(key[0]) for key in info["mismatched_keys"])
        name = type(model).__name__
        raise CheckpointError(
            "{folder!r}: {count} weights of {name} {fault} in the files, for example {example}; the files are "
            "incomplete or belong to another model{hint}",
            folder=str(folder),
            count=len(wrong),
            name=name,
            fault=tr("are missing") if missing else tr("have another shape"),
            example=wrong[0],
            hint="" if missing else tr("; {way_out}", way_out=UNEXPRESSED),
        )
    return model.eval(), headed


def _mean_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Nats per token on windows [w, tokens + 1]."""
    return _nats(model(input_ids=windows[:, :-1], use_cache=False).logits, windows[:, 1:])


def _nats(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of logits [b, n, vocabulary] for targets [b, n]."""
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)
