"""Merging KV heads and shortening caches: the plans with their errors, and the merged model, healed or not."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from headwise.base.run import Progress
from headwise.cache import for_transformers
from headwise.cache.generation import described_model
from headwise.compress.judging import STEP
from headwise.compress.source import Heads, Source, Texts, cost_table, counts_in, expected
from headwise.edit import budget, budget_effect, heal, merge_kv
from headwise.edit.budgets import Budget, Effect
from headwise.edit.healing import HealingStep
from headwise.edit.merging import Merge
from headwise.errors import ConfigError, check_choice
from headwise.lm.model import Decoder, mean_loss
from headwise.lm.train import heldout_loss
from headwise.models import find_heads
from headwise.plan.tables import Column, Plan, Table, Value
from headwise.wording import joined, tr


def check_healing(steps: int, lr: float) -> None:
    """Raise ConfigError for options of `healed` that are out of range."""
    if steps < 0:
        raise ConfigError("--heal {steps}: expected a number of steps, or 0 for none", steps=steps)
    if not 0.0 < lr < math.inf:
        raise ConfigError("--lr {lr}: expected a finite number above 0", lr=lr)


def healed(decoder: Decoder, texts: Texts, steps: int, lr: float, progress: Progress, *, seed: int = 0) -> Decoder:
    """A trained copy, as returned by `heal`, on windows of the first 95 % of the text, drawn by `seed`."""

    def watch(done: HealingStep) -> None:
        progress(f"healing, loss {done.loss:.3f}", done.step, done.steps)

    batches = texts.healing(steps, seed)
    model = heal(decoder, batches, mean_loss, steps, lr=lr, seed=seed, watch=watch, copy=True).model
    assert isinstance(model, Decoder)
    return model.eval()


WHAT = {
    "mean": tr("the mean of adjacent heads"),
    "first": tr("the first of adjacent heads"),
    "cluster": tr("the mean of heads with similar W_K and W_V (cosine)"),
    "svd": tr("the smallest error of W_Q W_Kᵀ and W_V W_O, for groups of heads with similar subspaces"),
}
MERGED = (
    Column(tr("layer")),
    Column(tr("KV heads")),
    Column(tr("error of W_Q W_Kᵀ"), "share"),
    Column(tr("error of W_V W_O"), "share"),
    Column(tr("shared by")),
)


@dataclass(frozen=True)
class Conversion:
    """A plan: the KV heads to merge, and the expected effect."""

    source: Source
    texts: Texts
    method: str
    model: Decoder  # the merged one, not healed
    merges: Mapping[str, Merge]  # by the name of the layer
    losses: tuple[float, float]

    @property
    def after(self) -> dict[int, Heads]:
        """Numbers of query heads and KV heads of each layer."""
        return {i: (site.num_heads, site.num_kv_heads) for i, site in enumerate(find_heads(self.model))}

    def shown(self) -> Plan:
        """As tables."""
        facts = (
            (tr("model"), self.source.described),
            (tr("text"), self.texts.described(decided=False)),
            (tr("method"), tr("{method}: {what}", method=self.method, what=WHAT[self.method])),
        )
        rows: list[tuple[Value, ...]] = [
            (
                str(i), f"{sum(map(len, merge.groups))} → {len(merge.groups)}", merge.lost_scores, merge.lost_values,
                " ".join(f"({' '.join(map(str, group))})" for group in merge.groups),
            )
            for i, merge in enumerate(self.merges.values())
        ]  # fmt: skip
        title = tr("Expected before healing: measured loss, other numbers by formula")
        note = tr(
            "Error: relative error of the matrices W_Q W_Kᵀ and W_V W_O, the expected error for isotropic inputs."
        )
        tables = (
            Table("merges", tr("KV heads"), MERGED, tuple(rows), note=note),
            cost_table(title, self.source.decoder, tr("merged"), self.after, self.losses),
        )
        return Plan(tr("Plan: KV heads to merge"), facts, tables)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "command": "convert", "model": self.source.name, "text": self.texts.name, "method": self.method,
            "groups": [[list(group) for group in merge.groups] for merge in self.merges.values()],
            "lost_scores": [merge.lost_scores for merge in self.merges.values()],
            "lost_values": [merge.lost_values for merge in self.merges.values()],
            "expected": {
                "loss_now": self.losses[0], "loss": self.losses[1], **expected(self.source.decoder, self.after),
            },
        }  # fmt: skip


def check_conversion(num_kv_heads: int, method: str) -> None:
    """Raise ConfigError for options of `plan_conversion` that are invalid for any model."""
    check_choice("--method", method, WHAT)
    if num_kv_heads < 1:
        raise ConfigError("--num-kv-heads {num_kv_heads}: expected at least 1", num_kv_heads=num_kv_heads)


def plan_conversion(
    source: Source, texts: Texts, num_kv_heads: int, progress: Progress, *, method: str = "svd"
) -> Conversion:
    """Merge KV heads of a copy by `method` of `merge_kv`, and predict its loss; ConfigError if `merge_kv` refuses."""
    check_conversion(num_kv_heads, method)
    if all(site.num_kv_heads == num_kv_heads for site in find_heads(source.decoder)):
        raise ConfigError(
            "--num-kv-heads {num_kv_heads}: each layer has {num_kv_heads} KV heads already; expected a proper divisor",
            num_kv_heads=num_kv_heads,
        )
    merged = merge_kv(source.decoder, num_kv_heads, method, copy=True)
    assert isinstance(merged.model, Decoder)
    losses = []
    for i, (name, decoder) in enumerate((("the model as it is", source.decoder), ("the merged model", merged.model))):
        progress(f"estimating the loss: {name}", i, 2)
        losses.append(float(np.mean(heldout_loss(decoder, texts.foretell))))
    return Conversion(source, texts, method, merged.model, merged.merges, (losses[0], losses[1]))


HEADS = (
    Column(tr("layer")),
    Column(tr("short")),
    Column(tr("lowest kept"), "share"),
    Column(tr("mean kept"), "share"),
    Column(tr("last tokens kept by each KV head")),
)
BYTES = (
    Column(tr("tokens"), "count"),
    Column(tr("all kept"), "bytes", "full_bytes"),
    Column(tr("with the budget"), "bytes", "bytes"),
    Column(tr("saved"), "share"),
)


@dataclass(frozen=True)
class Budgeting:
    """A plan: the budget, the bytes of the caches at several lengths, and the expected loss."""

    source: Source
    texts: Texts
    found: Budget
    lengths: tuple[int, ...]
    effect: Effect

    def shown(self) -> Plan:
        """As tables."""
        found = self.found
        heads = [window for layer in found.windows for window in layer]
        short = sum(window is not None for window in heads)
        more = self.effect.short / self.effect.full - 1
        facts = (
            (tr("model"), self.source.described),
            (tr("text"), self.texts.described(decided=True)),
            (tr("short if"), tr(
                "the first {sinks} and the last {window} tokens hold {share:.1%} of the attention of every query head "
                "that reads the keys", sinks=found.sinks, window=found.window, share=float(found.threshold),
            )),
            (tr("short", sense="layers"), tr("{count} of {of} KV heads", count=short, of=len(heads))),
            (tr("expected"), tr(
                "loss {before:.4f} → {after:.4f} ({change:+.2f} %)", before=self.effect.full, after=self.effect.short,
                change=100 * more,
            )),
        )  # fmt: skip
        tables = (
            Table("heads", tr("KV heads"), HEADS, tuple(self._heads()), note=tr(
                "Kept: the share of a query head's attention on the window and the first tokens, minimum and mean over "
                "the heads of a layer."
            )),
            Table("bytes", tr("Keys and values of all layers, by formula, in float32"), BYTES, tuple(self._bytes())),
        )  # fmt: skip
        return Plan(tr("Plan: short caches"), facts, tables)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [
            {"tokens": n, "full_bytes": self.found.full_cache_bytes(n), "bytes": self.found.cache_bytes(n)}
            for n in self.lengths
        ]
        return {
            "command": "budget", "model": self.source.name, "text": self.texts.name,
            "windows": [list(layer) for layer in self.found.windows],
            "kept": [[float(x) for x in kept] for kept in self.found.kept], "window": self.found.window,
            "sinks": self.found.sinks, "threshold": self.found.threshold, "bytes": rows,
            "expected": {"loss_now": self.effect.full, "loss": self.effect.short},
        }  # fmt: skip

    def _heads(self) -> list[tuple[Value, ...]]:
        rows: list[tuple[Value, ...]] = []
        for i, (layer, kept) in enumerate(zip(self.found.windows, self.found.kept, strict=True)):
            short = tr("{count} of {of}", count=sum(window is not None for window in layer), of=len(layer))
            windows = joined((tr("all") if window is None else str(window) for window in layer), " ")
            rows.append((str(i), short, float(kept.min()), float(kept.mean()), windows))
        return rows

    def _bytes(self) -> list[tuple[Value, ...]]:
        rows: list[tuple[Value, ...]] = []
        for n in self.lengths:
            full, short = self.found.full_cache_bytes(n), self.found.cache_bytes(n)
            rows.append((n, full, short, 1 - short / full))
        return rows


@torch.no_grad()
def plan_budget(
    source: Source,
    texts: Texts,
    progress: Progress,
    *,
    window: int = 64,
    sinks: int = 4,
    threshold: float = 0.95,
    lengths: Sequence[int] = (),
) -> Budgeting:
    """Select KV heads with a short cache by maps of the text for planning. lengths: tokens at which to report bytes."""
    check_budget(window, sinks, threshold, lengths)
    if window + sinks >= texts.context:
        raise ConfigError(
            "--window {window}, --sinks {sinks}: expected together less than the context of {context} tokens",
            window=window,
            sinks=sinks,
            context=texts.context,
        )
    decoder, theirs = source.decoder, source.loaded is not None
    sites = find_heads(decoder)
    for layer, site in enumerate(sites if not theirs else ()):
        if counts_in(decoder, layer).cache != site.num_kv_heads * (site.head_dim + site.value_dim):
            raise ConfigError(
                f"{source.name}: a layer of the design {decoder.config.design} does not cache keys and "
                f"values per head, so heads cannot have caches of different lengths"
            )
    maps = []
    for i, batch in enumerate(texts.decide):
        progress("measuring heads", i, len(texts.decide))
        maps.append(source.maps(batch[:, :-1]))
    found = budget(maps, window, sinks, threshold, value_dim=sites[0].value_dim)
    if theirs:
        found = replace(found, model=described_model(decoder))
        for_transformers(decoder, found)  # refuses what has layers of other kinds
    progress("estimating the loss", 0, 1)
    effect = budget_effect(decoder, texts.foretell, found, step=STEP if theirs else None)
    wanted = tuple(lengths) or tuple(texts.context * factor for factor in (1, 4, 16, 64))
    return Budgeting(source, texts, found, wanted, effect)


def check_budget(window: int, sinks: int, threshold: float, lengths: Sequence[int]) -> None:
    """Raise ConfigError for options of `plan_budget` that are invalid for any model and text."""
    if any(n < 1 for n in lengths):
        raise ConfigError("--lengths: got {least}; expected numbers of tokens of at least 1", least=min(lengths))
    if window < 1 or sinks < 0:
        raise ConfigError("--window {window}, --sinks {sinks}: expected at least 1 and 0", window=window, sinks=sinks)
    if not 0.0 < threshold <= 1.0:
        raise ConfigError("--threshold {threshold}: expected more than 0 and at most 1", threshold=threshold)
