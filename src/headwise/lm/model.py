"""A small decoder-only Transformer in one short file."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.cache import Cache
from headwise.cache.base import Mark
from headwise.errors import ConfigError, DTypeError, ShapeError, check_choice
from headwise.masks import Causal, Mask
from headwise.nn.base import AttentionLayer
from headwise.nn.block import ORDERS, TransformerBlock
from headwise.nn.layout import check_cache
from headwise.nn.registry import STANDARD, build, design_of, options_of
from headwise.parallel.heads_held import held_heads
from headwise.stats import Measure

# Options that the decoder sets. Dropout is applied to the residual branches instead of the attention weights, so that
# fused kernels are used in training.
SET_HERE = frozenset({"num_kv_heads", "context_dim", "dropout", "rotary"})
# Options that may differ between layers besides those of the design, and sizes that `headwise.edit` may change.
OF_LAYER = ("num_heads", "num_kv_heads")
SIZES = (*OF_LAYER, "head_dim", "value_dim", "latent_dim", "rope_dim")
LARGEST = 1 << 24  # maximum of a size, so that products of sizes do not overflow in PyTorch


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder.

    Attributes:
        vocab_size: number of token ids. d_model: width of the model. num_layers: number of blocks.
        num_heads, num_kv_heads: of the attention; num_kv_heads defaults to num_heads.
        d_ff: width of the feed-forward network. dropout: on the residual branches.
        context: the length that it is trained at; rotary positions also allow longer inputs.
        design: the name of a design that supports causal masks, as in `headwise.nn.registry`.
        options: options of the design besides the sizes here, numbers and strings, such as {"top_k": 2}.
        order: norm placement of the blocks, "pre" or "post", as in `TransformerBlock`.
        layers: differences between layers, one mapping per layer with num_heads, num_kv_heads and options of the
            design, such as {"num_heads": 5, "head_dim": 32}; empty if all layers are equal.
    """

    vocab_size: int
    d_model: int = 256
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int | None = None
    d_ff: int = 640
    context: int = 256
    dropout: float = 0.0
    design: str = STANDARD
    options: Mapping[str, Any] = field(default_factory=dict)
    order: str = "pre"
    layers: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "num_layers", "num_heads", "d_ff", "context"):
            _check_size("", name, getattr(self, name))
        if self.num_kv_heads is not None:
            _check_size("", "num_kv_heads", self.num_kv_heads)
        if not isinstance(self.dropout, int | float) or not 0.0 <= self.dropout < 1.0:
            raise ConfigError(
                f"dropout={self.dropout!r}: expected 0 <= dropout < 1",
                f"dropout={self.dropout!r}：应满足 0 <= dropout < 1",
            )
        if not isinstance(self.design, str):
            raise ConfigError(f"design={self.design!r}: expected the name of a head design")
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"options={self.options!r}: expected a mapping")
        check_choice("order", self.order, ORDERS)
        known = [name for name in options_of(self.design) if name not in SET_HERE]
        self._check("options", self.options, known)
        if isinstance(self.layers, str | Mapping) or not isinstance(self.layers, Sequence):
            raise ConfigError(f"layers={self.layers!r}: expected a list of mappings, one for each layer")
        object.__setattr__(self, "layers", tuple(self.layers))  # a list, where it was read from JSON
        if self.layers and len(self.layers) != self.num_layers:
            raise ConfigError(f"layers: {len(self.layers)} mappings for num_layers={self.num_layers}")
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, Mapping):
                raise ConfigError(f"layers[{i}]={layer!r}: expected a mapping")
            self._check(f"layers[{i}]", layer, [*OF_LAYER, *known])
            for name in (name for name in OF_LAYER if name in layer):
                _check_size(f"layers[{i}]: ", name, layer[name])

    def _check(self, where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
        for name, value in given.items():
            if name not in known:
                raise ConfigError(
                    f"{where}: {name!r} is not an option of {self.design}; expected one of {', '.join(known)}",
                    f"{where}：{name!r} 不是 {self.design} 的选项；应为 {'、'.join(known)} 之一",
                )
            if not isinstance(value, bool | int | float | str | None):
                raise ConfigError(f"{where}: {name}={value!r}: expected a number, a string or None")
            if isinstance(value, int) and abs(value) > LARGEST:
                raise ConfigError(f"{where}: {name}={value!r}: expected at most {LARGEST}")

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint's header; without `layers` if all layers are equal."""
        values = asdict(self)
        if not self.layers:
            del values["layers"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DecoderConfig":
        """The inverse of `to_dict`; missing keys have their defaults. ConfigError for an unknown key, and without
        vocab_size."""
        known = [entry.name for entry in fields(cls)]
        unknown = [key for key in values if key not in known]
        if unknown:
            raise ConfigError(f"config: unknown key {unknown[0]!r}; expected {', '.join(known)}")
        if "vocab_size" not in values:
            raise ConfigError("config: vocab_size is missing", "config：缺少 vocab_size")
        return cls(**values)

    def attention(self, layer: int = 0) -> AttentionLayer:
        """Build the attention of a layer, with rotary positions if the design supports them. ConfigError if it cannot
        be causal."""
        own = dict(self.layers[layer]) if self.layers else {}
        num_heads, num_kv_heads = own.pop("num_heads", self.num_heads), own.pop("num_kv_heads", self.num_kv_heads)
        design, options = design_of(self.design), {**self.options, **own}
        if not design.takes_mask:
            raise ConfigError(
                f"design={self.design!r}: a decoder requires a causal mask, which {design.__name__} does not support",
                f"design={self.design!r}：解码器需要因果掩码，{design.__name__} 不支持",
            )
        if num_kv_heads is not None:
            options["num_kv_heads"] = num_kv_heads
        if "rotary" in options_of(self.design):
            options["rotary"] = True
        made = build(self.design, self.d_model, num_heads, options)
        if made.reads_ahead:
            raise ConfigError(f"options: {made.reads_ahead}")
        return made


class Decoder(nn.Module):
    """Maps token ids to logits of the next token; the embedding is also the output matrix (Press & Wolf 2017)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self._config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            TransformerBlock(config.attention(i), config.d_ff, order=config.order, dropout=config.dropout)
            for i in range(config.num_layers)
        )
        self._sizes = [_sizes(attention) for attention in self._attentions()]
        # A post-norm block already ends with its norm.
        self.norm = nn.RMSNorm(config.d_model) if config.order == "pre" else nn.Identity()
        if not self.embedding.weight.is_meta:
            self._initialise()

    @property
    def config(self) -> DecoderConfig:
        """The present sizes; `layers` contains the differences after heads were removed or merged."""
        now = [_sizes(attention) for attention in self._attentions()]
        if now == self._sizes:
            return self._config
        known = {"num_heads", *options_of(self._config.design)}
        layers = [dict(layer) for layer in self._config.layers] or [{} for _ in now]
        for layer, sizes, built in zip(layers, now, self._sizes, strict=True):
            if sizes != built:
                layer.update({name: value for name, value in sizes.items() if name in known})
        return replace(self._config, layers=layers)

    @property
    def strange_layers(self) -> list[str]:
        """Names of the layers whose attention is of another design than `config.design`."""
        own = design_of(self._config.design)
        found = enumerate(self._attentions())
        return [f"blocks.{i}.attention" for i, attention in found if type(attention) is not own]

    def forward(
        self,
        ids: Tensor,
        *,
        mask: Mask | Sequence[Mask] | None = None,
        caches: Sequence[Cache] | None = None,
        return_maps: bool = False,
        measures: Sequence[str | Measure] = (),
    ) -> Any:
        """Compute logits [b, n, vocab]; with `return_maps`, also return one `AttentionMap` per layer.

        Args:
            ids: token ids [b, n].
            mask: combined with `Causal()`, such as `Documents(ids)` for packed texts; or one for each layer.
            caches: one per layer; ids are then the next n tokens. A call that raises leaves them as they were.
            return_maps: whether to return maps. measures: statistics to accumulate in the same pass.
        """
        x, maps = self.hidden(ids, mask=mask, caches=caches, return_maps=return_maps, measures=measures)
        logits = nn.functional.linear(x, self.embedding.weight)
        return (logits, maps) if return_maps else logits

    def new_caches(self, window: int | None = None) -> list[Cache]:
        """Return an empty cache for each layer, of all tokens or of the last `window` ones."""
        return [attention.new_cache(window) for attention in self._attentions()]

    def hidden(
        self,
        ids: Tensor,
        *,
        mask: Mask | Sequence[Mask] | None = None,
        caches: Sequence[Cache] | None = None,
        return_maps: bool = False,
        measures: Sequence[str | Measure] = (),
    ) -> tuple[Tensor, list[Any]]:
        """The last hidden states [b, n, d_model], before the output matrix, and the maps (empty without `return_maps`).
        Arguments as in `forward`."""
        if ids.ndim != 2:
            raise ShapeError(f"ids: expected [batch, seq], got shape {tuple(ids.shape)}")
        if caches is not None and not isinstance(caches, Sequence):
            given = type(caches).__name__
            raise DTypeError(f"caches: expected one for each layer, as of decoder.new_caches(), got {given}")
        if caches is not None and len(caches) != len(self.blocks):
            raise ShapeError(f"caches: expected one for each of the {len(self.blocks)} layers, got {len(caches)}")
        held: Sequence[Cache | None] = [None] * len(self.blocks) if caches is None else caches
        masks, marks = self._masks(mask), [] if torch.compiler.is_compiling() else _marked(held)
        x = self.dropout(self.embedding(ids))  # [b, n] -> [b, n, d]
        maps = []
        try:
            for block, one, cache in zip(self.blocks, masks, held, strict=True):
                found = block(x, mask=one, cache=cache, return_map=return_maps, measures=measures)
                x, amap = found if return_maps else (found, None)
                maps.append(amap)
        except BaseException:
            for mark in marks:
                mark.restore()
            raise
        return self.norm(x), maps if return_maps else []

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding of the token ids, under the name that transformers uses."""
        return self.embedding

    @property
    def num_parameters(self) -> int:
        """Number of parameters; the tied embedding counts once."""
        return sum(p.numel() for p in self.parameters())

    def _masks(self, mask: Mask | Sequence[Mask] | None) -> list[Mask]:
        """The mask of each layer."""
        layers = len(self.blocks)
        if mask is None or isinstance(mask, Mask):
            return [Causal() if mask is None else Causal() & mask] * layers
        if len(mask) != layers:
            raise ShapeError(f"mask: expected one for each of the {layers} layers, or one for all, got {len(mask)}")
        return [Causal() & each for each in mask]

    def _attentions(self) -> list[AttentionLayer]:
        return [block.attention for block in self.blocks if isinstance(block, TransformerBlock)]

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1.0 / math.sqrt(module.in_features))
        # Logits start near zero, and branches that add to the residual stream start small (GPT-2, §2.3).
        nn.init.normal_(self.embedding.weight, std=1.0 / math.sqrt(self.config.d_model))
        with torch.no_grad():
            for block in self.modules():
                if not isinstance(block, TransformerBlock):
                    continue
                for weight in _own_weights(block.attention):
                    weight.mul_(math.sqrt(3.0))
                for weight in (*block.attention.last_weights(), block.ff_out.weight):
                    weight.mul_(1.0 / math.sqrt(2 * self.config.num_layers))


def _marked(caches: Sequence[Cache | None]) -> list[Mark]:
    """The states of the caches; ConfigError if they do not hold the same tokens, or two layers have one cache."""
    first: dict[int, int] = {}
    for layer, cache in enumerate(caches):
        check_cache(cache)
        if cache is not None and (other := first.setdefault(id(cache), layer)) != layer:
            raise ConfigError(
                f"caches: layers {other} and {layer} have the same cache; expected one for each layer, as of "
                f"decoder.new_caches()"
            )
    if len(seen := {cache.seen for cache in caches if cache is not None}) > 1:
        raise ConfigError(f"caches: have seen {sorted(seen)} tokens; expected as many in each layer")
    return [Mark(cache) for cache in caches]


def _check_size(where: str, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
        raise ConfigError(
            f"{where}{name}={value!r}: expected a whole number, 1 to {LARGEST}",
            f"{where}{name}={value!r}：应为 1 到 {LARGEST} 的整数",
        )


def _sizes(attention: AttentionLayer) -> dict[str, int]:
    """The sizes of a layer that `headwise.edit` may change; those of the whole layer if its heads are partitioned."""
    held = held_heads(attention)
    whole = {} if held is None else {name: getattr(held, name) for name in OF_LAYER}
    return {name: getattr(attention, name) for name in SIZES if hasattr(attention, name)} | whole


def _own_weights(attention: AttentionLayer) -> list[Tensor]:
    """Weights that a design initialises itself, uniform in ±1/√inputs; scaled by √3 they have the standard deviation
    1/√inputs of the linear maps, as in all designs. Maps initialised to the identity are excluded."""
    linear = {id(m.weight) for m in attention.modules() if isinstance(m, nn.Linear)}
    matrices = [p for p in attention.parameters() if p.ndim >= 2 and id(p) not in linear]
    return [p for p in matrices if p.shape[0] != p.shape[-1] or not torch.equal(p, torch.eye(len(p)).to(p))]
