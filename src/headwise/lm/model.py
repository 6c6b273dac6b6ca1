"""A small decoder-only Transformer, to be read in one sitting."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.cache import Cache
from headwise.errors import ConfigError, ShapeError
from headwise.heads.multi_head import MultiHeadAttention
from headwise.masks import Causal, Mask
from headwise.measures import Measure


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder. `context` is the length it is trained at; rotary positions let it read further."""

    vocab_size: int
    d_model: int = 256
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int | None = None
    d_ff: int = 640
    context: int = 256
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "num_layers", "num_heads", "d_ff", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r}: expected a whole number of at least 1")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout={self.dropout}: expected 0 <= dropout < 1")

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint's header."""
        return asdict(self)


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)): the pre-norm residual block."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model)
        # Dropout is on the residual branches, not on the weights: the fused kernel stays in use while training.
        self.attention = MultiHeadAttention(
            config.d_model, config.num_heads, num_kv_heads=config.num_kv_heads, rotary=True
        )
        self.ff_norm = nn.RMSNorm(config.d_model)
        self.ff_in = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.ff_out = nn.Linear(config.d_ff, config.d_model, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, mask: Mask, cache: Cache | None, return_map: bool, measures: Sequence[str | Measure]
    ) -> tuple[Tensor, Any]:
        y = self.attention(self.attention_norm(x), mask=mask, cache=cache, return_map=return_map, measures=measures)
        y, amap = y if return_map else (y, None)
        x = x + self.dropout(y)
        x = x + self.dropout(self.ff_out(nn.functional.gelu(self.ff_in(self.ff_norm(x)))))
        return x, amap


class Decoder(nn.Module):
    """Token ids in, logits of the next token out; the embedding is the output matrix too (Press & Wolf 2017)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.d_model)
        self._initialise()

    def forward(
        self,
        ids: Tensor,
        *,
        mask: Mask | None = None,
        caches: Sequence[Cache] | None = None,
        return_maps: bool = False,
        measures: Sequence[str | Measure] = (),
    ) -> Any:
        """ids [b, n] to logits [b, n, vocab]; with `return_maps`, also one `AttentionMap` a layer.

        Args:
            mask: joined to `Causal()`, such as `Documents(ids)` for packed texts.
            caches: one a layer; ids are then the next n tokens.
        """
        x, maps = self.hidden(ids, mask=mask, caches=caches, return_maps=return_maps, measures=measures)
        logits = nn.functional.linear(x, self.embedding.weight)
        return (logits, maps) if return_maps else logits

    def hidden(
        self,
        ids: Tensor,
        *,
        mask: Mask | None = None,
        caches: Sequence[Cache] | None = None,
        return_maps: bool = False,
        measures: Sequence[str | Measure] = (),
    ) -> tuple[Tensor, list[Any]]:
        """The last hidden states [b, n, d_model], before the output matrix, and the maps (empty if not asked for)."""
        if ids.ndim != 2:
            raise ShapeError(f"ids: expected [batch, seq], got shape {tuple(ids.shape)}")
        if caches is not None and len(caches) != len(self.blocks):
            raise ShapeError(f"caches: expected one for each of the {len(self.blocks)} layers, got {len(caches)}")
        mask = Causal() if mask is None else Causal() & mask
        x = self.dropout(self.embedding(ids))  # [b, n] -> [b, n, d]
        maps = []
        for i, block in enumerate(self.blocks):
            x, amap = block(x, mask, None if caches is None else caches[i], return_maps, measures)
            maps.append(amap)
        return self.norm(x), maps if return_maps else []

    @property
    def num_parameters(self) -> int:
        """All weights; the tied embedding counts once."""
        return sum(p.numel() for p in self.parameters())

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1.0 / math.sqrt(module.in_features))
        # Logits start near zero, and branches that add to the residual stream start small (GPT-2, §2.3).
        nn.init.normal_(self.embedding.weight, std=1.0 / math.sqrt(self.config.d_model))
        for block in self.modules():
            if isinstance(block, Block):
                for linear in (block.attention.o_proj, block.ff_out):
                    with torch.no_grad():
                        linear.weight.mul_(1.0 / math.sqrt(2 * self.config.num_layers))
