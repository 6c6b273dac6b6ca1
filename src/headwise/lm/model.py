"""A small decoder-only Transformer in one file: the model, its loss, and text that it generates."""

import codecs
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headwise.cache import BudgetCache, Cache
from headwise.cache.base import Mark
from headwise.edit.budgets import Budget
from headwise.errors import ConfigError, DTypeError, ShapeError, TextError, check_choice
from headwise.lm.texts import BYTES, CharTokenizer
from headwise.masks import Causal, Mask
from headwise.models import find_heads
from headwise.nn.base import AttentionLayer
from headwise.nn.block import ORDERS, TransformerBlock
from headwise.nn.layout import check_cache
from headwise.nn.registry import STANDARD, build, design_of, options_of
from headwise.parallel.heads_held import held_heads
from headwise.stats import Measure
from headwise.wording import LIST, joined, tr

ROWS = 1024  # tokens whose logits are stored at a time; they fit in the CPU's cache


def next_token_loss(hidden: Tensor, weight: Tensor, targets: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Mean cross-entropy of softmax(hidden weightᵀ) in nats per token, differentiable: hidden [tokens, d], weight
    [vocab, d], targets [tokens]. Softmax and sums are float32, products `dtype`."""
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _Loss.apply(hidden, weight, targets, dtype)
    total = hidden.new_zeros((), dtype=torch.float32)
    for rows, wanted in zip(hidden.split(ROWS), targets.split(ROWS), strict=True):
        logits = (rows.to(dtype) @ weight.to(dtype).T).float()
        total += nn.functional.cross_entropy(logits, wanted, reduction="sum")
    return total / len(targets)


def mean_loss(model: nn.Module, windows: Tensor, precision: str = "float32") -> Tensor:
    """Mean loss of a `Decoder` on windows [w, tokens + 1] in nats per token; products in "float32" or "bfloat16"."""
    assert isinstance(model, Decoder)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        hidden, _ = model.hidden(windows[:, :-1])
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    return next_token_loss(hidden.flatten(0, 1), model.embedding.weight, windows[:, 1:].flatten(), dtype=dtype)


class _Loss(torch.autograd.Function):
    """Computes the gradients, p − onehot, in the forward pass, one block of rows at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        w = weight.to(dtype)
        d_hidden = torch.empty_like(hidden, dtype=torch.float32)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        total = hidden.new_zeros((), dtype=torch.float32)
        blocks = zip(hidden.split(ROWS), targets.split(ROWS), d_hidden.split(ROWS), strict=True)
        for rows, wanted, d_rows in blocks:
            x = rows.to(dtype)
            logits = (x @ w.T).float()
            lse = logits.logsumexp(-1, keepdim=True)
            index = wanted[:, None]
            total += (lse - logits.gather(1, index)).sum()
            p = logits.sub_(lse).exp_()
            p.scatter_add_(1, index, torch.full_like(lse, -1.0))
            p = p.to(dtype)
            d_rows.copy_(p @ w)
            d_weight += p.T @ x
        d_hidden, d_weight = d_hidden.div_(len(targets)), d_weight.div_(len(targets))
        ctx.save_for_backward(d_hidden.to(hidden.dtype), d_weight.to(weight.dtype))
        return total / len(targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return grad * d_hidden, grad * d_weight, None, None


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
            raise ConfigError("dropout={dropout!r}: expected 0 <= dropout < 1", dropout=self.dropout)
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
                    "{where}: {name!r} is not an option of {design}; expected one of {known}",
                    where=where,
                    name=name,
                    design=self.design,
                    known=joined(known, LIST),
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
            raise ConfigError(tr("config: vocab_size is missing"))
        return cls(**values)

    def attention(self, layer: int = 0) -> AttentionLayer:
        """Build the attention of a layer, with rotary positions if the design supports them. ConfigError if it cannot
        be causal."""
        own = dict(self.layers[layer]) if self.layers else {}
        num_heads, num_kv_heads = own.pop("num_heads", self.num_heads), own.pop("num_kv_heads", self.num_kv_heads)
        design, options = design_of(self.design), {**self.options, **own}
        if not design.takes_mask:
            raise ConfigError(
                "design={design!r}: a decoder requires a causal mask, which {kind} does not support",
                design=self.design,
                kind=design.__name__,
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
                # Those that a design initialises itself are uniform in ±1/√inputs: scaled by √3, they have the standard
                # deviation of the linear maps. Maps initialised to the identity are excluded.
                linear = {id(m.weight) for m in block.attention.modules() if isinstance(m, nn.Linear)}
                own = [p for p in block.attention.parameters() if p.ndim >= 2 and id(p) not in linear]
                own = [p for p in own if p.shape[0] != p.shape[-1] or not torch.equal(p, torch.eye(len(p)).to(p))]
                for weight in own:
                    weight.mul_(math.sqrt(3.0))
                for last in (*block.attention.last_weights(), block.ff_out.weight):
                    last.mul_(1.0 / math.sqrt(2 * self.config.num_layers))


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
            "{where}{name}={value!r}: expected a whole number, 1 to {largest}",
            where=where,
            name=name,
            value=value,
            largest=LARGEST,
        )


def _sizes(attention: AttentionLayer) -> dict[str, int]:
    """The sizes of a layer that `headwise.edit` may change; those of the whole layer if its heads are partitioned."""
    held = held_heads(attention)
    whole = {} if held is None else {name: getattr(held, name) for name in OF_LAYER}
    return {name: getattr(attention, name) for name in SIZES if hasattr(attention, name)} | whole


def write(
    decoder: Decoder,
    tokenizer: CharTokenizer,
    prompt: str,
    length: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = 0.95,
    seed: int | None = None,
    budget: Budget | None = None,
) -> Iterator[str]:
    """Yield the continuation of `prompt`, `length` characters, each from the last `context` tokens through a sliding
    cache. `top_p`: nucleus sampling (Holtzman et al. 2019). `budget`: tokens that each KV head keeps."""
    check_sampling(prompt, length, temperature, top_k, top_p)
    context = decoder.config.context
    if budget is not None and budget.sinks and len(tokenizer.encode(prompt)) + length > context:
        raise ConfigError(
            "length={length}: with the prompt that is more than the context of {context} tokens, and the budget's "
            "first {sinks} tokens would be further back than the model was trained for; give a shorter length, or "
            "make the budget with --sinks 0",
            length=length,
            context=context,
            sinks=budget.sinks,
        )
    caches = _caches(decoder.eval(), budget)
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)

    def pieces() -> Iterator[str]:
        ids = torch.from_numpy(tokenizer.encode(prompt))[None]
        # Byte tokens are joined to characters; invalid UTF-8 becomes U+FFFD.
        assemble = codecs.getincrementaldecoder("utf-8")("replace")
        written = 0
        while written < length:
            with torch.no_grad():
                hidden, _ = decoder.hidden(ids, caches=caches)
                logits = torch.nn.functional.linear(hidden[0, -1], decoder.embedding.weight)
            token = _sample(logits.float(), temperature, top_k, top_p, generator)
            data = bytes((token,)) if token < BYTES else tokenizer.decode([token]).encode()
            piece = assemble.decode(data)[: length - written]
            if piece:
                written += len(piece)
                yield piece
            ids = torch.tensor([[token]])

    return pieces()


def check_sampling(prompt: str, length: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise as `write` does for these arguments, which do not depend on the model."""
    if not prompt:
        raise TextError(tr("prompt: is empty; give at least one character to begin with"))
    if length < 0:
        raise ConfigError("length={length}: expected at least 0", length=length)
    if not temperature >= 0:
        raise ConfigError("temperature={temperature}: expected 0 or more", temperature=temperature)
    if top_k is not None and top_k < 1:
        raise ConfigError("top_k={top_k}: expected at least 1", top_k=top_k)
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError("top_p={top_p}: expected 0 < top_p <= 1", top_p=top_p)


def _caches(decoder: Decoder, budget: Budget | None) -> Sequence[Cache]:
    """New caches, one per layer."""
    context = decoder.config.context
    if budget is None:
        return decoder.new_caches(context)
    if budget.model:
        raise ConfigError(
            "budget: was made for a {model}; hw.cache.for_transformers makes caches of it", model=budget.model
        )
    expected, has = [len(windows) for windows in budget.windows], [site.num_kv_heads for site in find_heads(decoder)]
    if expected != has:
        raise ConfigError(
            "budget: was made for layers of {expected} KV heads; this model has {found}", expected=expected, found=has
        )
    return [
        BudgetCache([context if w is None else min(w, context) for w in windows], budget.sinks)
        for windows in budget.windows
    ]


def _sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> int:
    if temperature == 0:
        return int(logits.argmax())
    # The largest becomes 0, in float64: at very small temperatures the others become −inf, never NaN.
    values, order = ((logits - logits.max()).double() / temperature).sort(descending=True)
    if top_k is not None:
        values[top_k:] = -torch.inf
    p = values.softmax(-1)
    if top_p is not None:
        p[p.cumsum(-1) - p >= top_p] = 0.0  # keeps the token that reaches top_p
    return int(order[torch.multinomial(p, 1, generator=generator)])
