"""Cache budgets: heads that attend to the first and the last tokens only keep just those.

>>> import torch, headwise as hw
>>> layer, x = hw.MultiHeadAttention(64, 8, num_kv_heads=2), torch.randn(1, 200, 64)
>>> _, amap = layer(x, mask=hw.Causal(), return_map=True)
>>> found = budget([amap], window=64, sinks=4, threshold=0.95)
>>> found.masks()[0], found.caches()[0].windows == found.windows[0]
(HeadWindows([None, None, None, None, None, None, None, None], sinks=4), True)
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.base.files import write_text
from headwise.base.read import Entry, number, parsed, reading, text_of, whole
from headwise.cache import BudgetCache, for_transformers
from headwise.edit.pruning import aligned, change
from headwise.errors import CheckpointError, ConfigError, ShapeError, check_whole
from headwise.map import AttentionMap
from headwise.masks import HeadWindows, is_causal
from headwise.rule.tiles import Tile
from headwise.stats import RowMeasure
from headwise.wording import tr


class OutsideMass(RowMeasure):
    """Σ p_ij over keys that are neither among the first `sinks` nor less than `window` before the query."""

    name, unit, range = "outside_mass", "mass", "0 to 1"
    source = tr("the mass that a short cache loses: Xiao et al. 2023, 2309.17453")

    def __init__(self, window: int, sinks: int) -> None:
        self.window, self.sinks = window, sinks

    def partial(self, tile: Tile) -> Tensor:
        far = _outside(tile, self.window, self.sinks)
        return tile.lse.new_zeros(tile.lse.shape) if far is None else (tile.weights * far).sum(-1)


class OutsideKeys(RowMeasure):
    """How many of these keys a query may attend to."""

    name, unit, range = "outside_keys", "keys", "0 to keys"
    source = OutsideMass.source

    def __init__(self, window: int, sinks: int) -> None:
        self.window, self.sinks = window, sinks

    def partial(self, tile: Tile) -> Tensor:
        far = _outside(tile, self.window, self.sinks)
        if far is None:
            return tile.lse.new_zeros(tile.lse.shape)
        return (far & (tile.log_weights > -torch.inf)).sum(-1).to(tile.lse)  # a bias of −∞ hides keys too


def _outside(tile: Tile, window: int, sinks: int) -> Tensor | None:
    """Which pairs are outside of the window and the sinks, boolean [r, c]; None if none is."""
    if int(tile.positions[-1]) - tile.tokens.start < window or tile.tokens.stop <= sinks:
        return None
    return (tile.positions[:, None] - tile.keys >= window) & (tile.keys >= sinks)


class AheadMass(RowMeasure):
    """Σ p_ij over keys that come after the query: 0 in causal attention, exactly."""

    name, unit, range = "ahead_mass", "mass", "0 to 1"
    source = "headwise"

    def partial(self, tile: Tile) -> Tensor:
        if tile.tokens.stop <= int(tile.positions[0]) + 1:
            return tile.lse.new_zeros(tile.lse.shape)
        return (tile.weights * (tile.keys > tile.positions[:, None])).sum(-1)


@dataclass(frozen=True)
class Budget:
    """The number of tokens that each head keeps. It prints as a table.

    Attributes:
        windows: for each layer, one entry per KV head: the number of last tokens, or None for all.
        kept: for each layer [h], the mean attention mass of each query head on the window and the sinks, over the
            queries with other visible keys.
        sinks: number of first tokens that every head keeps. window, threshold: the arguments of `budget`.
        widths: for each layer, the sizes of a key and of a value. tokens: the length of the longest text.
        model: what model of transformers it was made for, "" if not known.
    """

    windows: tuple[tuple[int | None, ...], ...]
    kept: tuple[Tensor, ...]
    window: int
    sinks: int
    threshold: float
    widths: tuple[tuple[int, int], ...]
    tokens: int
    model: str = ""

    def caches(self, *, stored: str | None = None) -> list[BudgetCache]:
        """New caches, one per layer, for `layer(x, cache=…)` and `Decoder`, which mask dropped tokens. Models of
        transformers take that of `hw.cache.for_transformers` instead."""
        return [BudgetCache(windows, self.sinks, stored=stored) for windows in self.windows]

    def masks(self) -> list[HeadWindows]:
        """Return the mask of each layer for a full pass; combine it with `Causal()`, as `Decoder` does."""
        found = []
        for windows, kept in zip(self.windows, self.kept, strict=True):
            group = len(kept) // len(windows)
            found.append(HeadWindows([window for window in windows for _ in range(group)], self.sinks))
        return found

    def cache_bytes(self, tokens: int, *, batch: int = 1, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the caches after `tokens` tokens: batch · Σ_heads min(tokens, sinks + window − 1) · (d_k + d_v) ·
        bytes per number, the sum of `BudgetCache.nbytes` over layers."""
        return self._bytes(self.windows, tokens, batch, dtype)

    def full_cache_bytes(self, tokens: int, *, batch: int = 1, dtype: torch.dtype = torch.float32) -> int:
        """Return the bytes of caches that keep all tokens."""
        return self._bytes([[None] * len(windows) for windows in self.windows], tokens, batch, dtype)

    def _bytes(self, windows: Sequence[Sequence[int | None]], tokens: int, batch: int, dtype: torch.dtype) -> int:
        if tokens < 0 or batch < 1:
            raise ConfigError(f"tokens={tokens}, batch={batch}: expected tokens >= 0 and batch >= 1")
        numbers = sum(
            sum(tokens if w is None else min(tokens, self.sinks + w - 1) for w in layer) * sum(widths)
            for layer, widths in zip(windows, self.widths, strict=True)
        )
        return batch * numbers * dtype.itemsize

    def __repr__(self) -> str:
        heads = [window for layer in self.windows for window in layer]
        short = sum(window is not None for window in heads)
        first = (
            f"{short} of {len(heads)} KV heads keep {self.sinks} + {self.window} tokens; at {self.tokens} tokens in "
            f"float32 {change(self.full_cache_bytes(self.tokens), self.cache_bytes(self.tokens))} bytes"
        )
        rows = [
            (
                i, f"{sum(window is not None for window in layer)} of {len(layer)}", f"{float(kept.min()):.3f}",
                f"{float(kept.mean()):.3f}", " ".join("all" if window is None else str(window) for window in layer),
            )
            for i, (layer, kept) in enumerate(zip(self.windows, self.kept, strict=True))
        ]  # fmt: skip
        return f"{first}\n{aligned(('layer', 'short', 'least kept', 'mean kept', 'tokens of each KV head'), rows)}"


def budget(
    maps: Sequence[AttentionMap] | Sequence[Sequence[AttentionMap]],
    window: int,
    sinks: int = 4,
    threshold: float = 0.95,
    *,
    value_dim: int | None = None,
) -> Budget:
    """Select the heads with short caches from attention maps.

    A KV head gets a short cache if, for each query head that reads it, the last `window` tokens (including the query's
    own) and the first `sinks` receive at least `threshold` of the attention, on average over the queries with other
    visible keys. This is read from attention maps, instead of training gates as in DuoAttention; `budget_effect`
    measures the change of the loss.

    Args:
        maps: one causal map per layer, longer than window + sinks; or one such list per text. For layers that cache
            keys per head; `LatentAttention` caches one latent for all.
        value_dim: size of the values, that of the keys by default; it affects bytes only.
    Returns:
        `Budget`, for `BudgetCache` and `HeadWindows`. It prints as a table.
    Raises:
        ConfigError: for options out of range, maps that are not causal, and texts that are too short. ShapeError: for
            texts whose maps differ in shape.
    Source: Xiao et al. 2023, 2309.17453 (sinks and a window); Xiao et al. 2024, 2410.10819 (by head).
    """
    for name, value, least in (("window", window, 1), ("sinks", sinks, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name}={value!r}: expected a whole number of at least {least}")
    if not 0.0 < threshold <= 1.0:
        raise ConfigError(f"threshold={threshold}: expected 0 < threshold <= 1")
    if value_dim is not None:
        value_dim = check_whole("budget", "value_dim", value_dim, 1)
    if not len(maps):
        raise ConfigError("maps: empty; expected one per layer")
    given: Sequence[Any] = [maps] if isinstance(maps[0], AttentionMap) else maps
    texts: list[list[AttentionMap]] = [[*text] for text in given]
    sizes = [[(amap.shape[1], amap.k.shape[1], amap.k.shape[3]) for amap in text] for text in texts]
    for i, size in enumerate(sizes):
        if size != sizes[0]:
            raise ShapeError(f"maps: text {i} has layers (heads, KV heads, width) {size}, and text 0 {sizes[0]}")
    kept = tuple(_kept([text[i] for text in texts], window, sinks) for i in range(len(texts[0])))
    windows, widths = [], []
    for amap, share in zip(texts[0], kept, strict=True):
        least_of_group = share.view(amap.k.shape[1], -1).amin(-1)
        windows.append(tuple(window if float(x) >= threshold else None for x in least_of_group))
        d_k = amap.k.shape[-1]
        widths.append((d_k, d_k if value_dim is None else value_dim))
    longest = max(amap.shape[3] for text in texts for amap in text)
    return Budget(tuple(windows), kept, window, sinks, threshold, tuple(widths), longest)


@dataclass(frozen=True)
class Effect:
    """Mean loss in nats per token with full and with short caches."""

    full: float
    short: float
    tokens: int

    def __repr__(self) -> str:
        more = self.short - self.full
        return f"loss {self.full:.4f} → {self.short:.4f} nats per token ({more:+.4f}), {self.tokens:,} tokens"


@torch.no_grad()
def budget_effect(model: nn.Module, batches: Iterable[Tensor], found: Budget, *, step: int | None = None) -> Effect:
    """Return the next-token loss with full caches and with those of a budget.

    Args:
        model: a model in eval mode that returns logits [b, n, vocabulary] for model(ids, mask=[one per layer]) and
            model(ids, caches=[one per layer]), such as `Decoder`; or an attached model of transformers.
        batches: token ids [b, n], n at least 2.
        step: None computes a full pass with the budget's masks; a number passes this many tokens at a time through the
            budget's caches, with the same result and less memory. Models of transformers always use caches.
    """
    if model.training:
        raise ConfigError("model: is in training mode, where dropout is active; call model.eval() first")
    if step is not None and step < 1:
        raise ConfigError(f"step={step}: expected at least 1, or None")
    full, short, tokens = 0.0, 0.0, 0
    theirs = hasattr(model, "set_attn_implementation")
    for ids in batches:
        if ids.ndim != 2 or ids.shape[1] < 2:
            raise ShapeError(f"batches: expected [batch, seq of at least 2], got shape {tuple(ids.shape)}")
        if theirs:
            with_budget = {"past_key_values": for_transformers(model, found)}
            full += nats(model, ids, step, {"past_key_values": for_transformers(model)})
        else:
            with_budget = {"mask": found.masks()} if step is None else {"caches": found.caches()}
            full += nats(model, ids, None, {})
        short += nats(model, ids, step, with_budget)
        tokens += ids[:, 1:].numel()
    if not tokens:
        raise ConfigError("batches: empty; expected at least one")
    return Effect(full / tokens, short / tokens, tokens)


def nats(model: nn.Module, ids: Tensor, step: int | None, options: Mapping[str, Any]) -> float:
    """Return the sum over tokens, in nats, of a model called with `step` tokens at a time."""
    total, start = 0.0, 0
    for part in ids.split(step or ids.shape[1], 1):
        found = model(part, **options)
        logits = getattr(found, "logits", found)
        targets = ids[:, start + 1 : start + part.shape[1] + 1]
        logits = logits[:, : targets.shape[1]].float()
        total += float(nn.functional.cross_entropy(logits.mT, targets, reduction="sum"))
        start += part.shape[1]
    return total


FORMAT = "headwise-budget-1"


def save_budget(found: Budget, path: str | os.PathLike[str], more: Mapping[str, Any] | None = None) -> None:
    """Write a budget to a JSON file, whole or not at all; `read_budget` reads it.

    Args:
        found: the budget. path: of the file.
        more: further entries of the file, as JSON values.
    """
    layers = [
        {"windows": list(windows), "kept": [float(x) for x in kept], "key_width": widths[0], "value_width": widths[1]}
        for windows, kept, widths in zip(found.windows, found.kept, found.widths, strict=True)
    ]
    content = {
        "format": FORMAT, "model": found.model, "window": found.window, "sinks": found.sinks,
        "threshold": found.threshold, "tokens": found.tokens, "layers": layers, **(more or {}),
    }  # fmt: skip
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_budget(path: str | os.PathLike[str]) -> Budget:
    """Read a budget that `save_budget` or `headwise budget` wrote.

    Raises:
        CheckpointError: naming the file, if it cannot be read or is no budget.
    """
    with reading(path, tr("budget"), missing=tr("`headwise budget --file TEXT` makes one")):
        content = Entry(parsed(text_of(path)))
        if content.word("format") != FORMAT:
            raise CheckpointError(
                "expected the format {expected}, got {found!r}", expected=FORMAT, found=content.word("format")
            )
        layers = content.entries("layers")
        found = Budget(
            tuple(
                tuple(layer.each("windows", lambda x, at: None if x is None else whole(x, at, least=1)))
                for layer in layers
            ),
            tuple(torch.tensor(layer.each("kept", number), dtype=torch.float64) for layer in layers),
            content.whole("window", least=1), content.whole("sinks", least=0), content.number("threshold"),
            tuple((layer.whole("key_width", least=1), layer.whole("value_width", least=1)) for layer in layers),
            content.whole("tokens", least=0), content.word("model") if "model" in content else "",
        )  # fmt: skip
        for i, (windows, kept) in enumerate(zip(found.windows, found.kept, strict=True)):
            if not windows or len(kept) == 0 or len(kept) % len(windows):
                raise CheckpointError(f"layers[{i}]: {len(kept)} heads are not a multiple of {len(windows)} KV heads")
        found.caches()  # reports other values out of range
        return found


def _kept(maps: Sequence[AttentionMap], window: int, sinks: int) -> Tensor:
    """[h], the mean over texts, batch entries and queries that may attend to keys beyond the window and the sinks."""
    total, count = torch.zeros(2, maps[0].shape[1], dtype=torch.float64)
    for amap in maps:
        # A causal mask leaves no mass ahead; other maps are checked.
        ahead = [] if is_causal(amap.mask) else [AheadMass()]
        rows = amap.measure(OutsideMass(window, sinks), OutsideKeys(window, sinks), *ahead, rows=True).rows
        if "ahead_mass" in rows and bool((rows["ahead_mass"] > 0).any()):
            raise ConfigError(
                "maps: queries attend to later keys; expected causal maps (mask=Causal()), as a cache holds past "
                "tokens only"
            )
        total += rows["outside_mass"].double().sum((0, 2)).cpu()
        count += (rows["outside_keys"] > 0).double().sum((0, 2)).cpu()
    if not count.all():
        longest = max(amap.shape[3] for amap in maps)
        raise ConfigError(
            f"window={window}, sinks={sinks}: they cover all keys that queries of the maps, of {longest} tokens, may "
            f"attend to; give maps of longer texts, or a smaller window"
        )
    return 1.0 - total / count
