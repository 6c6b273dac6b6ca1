"""Removing heads: which, in which order and why, the expected loss, and the model without them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from headwise.analysis.importance.ablation import ablation_importance
from headwise.analysis.importance.curve import PruningCurve, pruning_curve
from headwise.analysis.importance.gradients import gradient_importance, learn_gates, taylor_importance
from headwise.analysis.importance.losses import Head, HeadImportance
from headwise.base.run import Progress, part
from headwise.compress.source import Heads, Source, Texts, cost_table, expected
from headwise.edit import prune
from headwise.edit.pruning import check_independent, removed_together
from headwise.errors import ConfigError, check_choice
from headwise.lm.model import Decoder, mean_loss
from headwise.models import HeadSite, find_heads
from headwise.plan.tables import Column, Plan, Table, Value
from headwise.stats.base import unit_of
from headwise.table import HeadColumn
from headwise.wording import LIST, joined, tr

METHODS = {
    "ablation": tr("increase of the loss without it, one head at a time"),
    "gradient": tr("|dL/dξ| of a factor ξ on its output"),
    "taylor": tr("Σ|o · dL/do| over tokens"),
    "gates": tr("log α of a learned gate with a penalty on open gates"),
}
Unit = tuple[Head, ...]  # heads that are removed together


@dataclass(frozen=True)
class Order:
    """Units in the order of removal."""

    going: tuple[Unit, ...]  # those that can be removed
    last: tuple[Unit, ...]  # the one of each layer that is kept regardless of its importance
    skipped: tuple[Unit, ...]  # those of them that are less important than some removed ones
    counts: tuple[int, ...]  # the numbers of heads after which removal may stop

    @property
    def heads(self) -> list[Head]:
        """All heads."""
        return [head for unit in (*self.going, *self.last) for head in unit]


def rank(
    by: str, model: torch.nn.Module, batches: Sequence[torch.Tensor], *, penalty: float, steps: int, seed: int,
    progress: Progress,
) -> HeadImportance:  # fmt: skip
    """Importance of every head for the loss on these batches. penalty, steps, seed: of "gates", as in `learn_gates`."""
    check_ranking(by, penalty, steps)
    running = part(progress, f"ranking heads by {by}")
    if by == "ablation":
        return ablation_importance(model, batches, mean_loss, progress=running)
    if by == "gates":
        found = learn_gates(model, batches, mean_loss, penalty, steps=steps, seed=seed, progress=running)
        return found.importance
    asked = gradient_importance if by == "gradient" else taylor_importance
    return asked(model, batches, mean_loss, progress=running)


def check_ranking(by: str, penalty: float, steps: int) -> None:
    """Raise ConfigError for an unknown method, and for options of learned gates that are out of range."""
    check_choice("--by", by, METHODS)
    if not 0.0 <= penalty < math.inf:
        raise ConfigError("--penalty {penalty}: expected a finite number of at least 0", penalty=penalty)
    if steps < 1:
        raise ConfigError("--gate-steps {steps}: expected at least 1", steps=steps)


def units_of(site: HeadSite, layer: int) -> list[Unit]:
    """Heads of a layer that are removed together: those that share a KV head, if there are several KV heads."""
    group = removed_together(site)
    return [tuple((layer, head) for head in range(i, i + group)) for i in range(0, site.num_heads, group)]


def order_of(values: HeadColumn, sites: Sequence[HeadSite], *, uniform: bool = False) -> Order:
    """The least important unit first, by the sum over its heads; the last one of a layer is kept. uniform: in rounds of
    one unit of each layer, after which all layers have equally many."""
    units = [unit for layer, site in enumerate(sites) for unit in units_of(site, layer)]
    by_value = sorted(units, key=lambda unit: sum(float(values[layer][head]) for layer, head in unit))
    left = [sum(unit[0][0] == layer for unit in units) for layer in range(len(sites))]
    if uniform:
        ranks = [[unit for unit in by_value if unit[0][0] == layer] for layer in range(len(sites))]
        by_value.sort(key=lambda unit: ranks[unit[0][0]].index(unit) - left[unit[0][0]])  # the fullest layers first
    going: list[Unit] = []
    counts: list[int] = []
    last: list[tuple[int, Unit]] = []  # with the number of units before it
    for unit in by_value:
        layer = unit[0][0]
        if left[layer] == 1:
            last.append((len(going), unit))
        else:
            going.append(unit)
            left[layer] -= 1
            if not uniform or len(set(left)) == 1:
                counts.append(sum(map(len, going)))
    skipped = tuple(unit for before, unit in last if before < len(going))
    return Order(tuple(going), tuple(unit for _, unit in last), skipped, tuple(counts))


def parsed_heads(text: str) -> list[Head]:
    """ "0.1,3.5" as (layer, head) pairs; ConfigError for anything else."""
    found: list[Head] = []
    for word in (word.strip() for word in text.split(",")):
        layer, point, head = word.partition(".")
        if not (point and layer.isdecimal() and head.isdecimal()):
            raise ConfigError("--heads {word!r}: expected LAYER.HEAD, counted from 0, such as 0.1,3.5", word=word)
        found.append((int(layer), int(head)))
    return found


def named_heads(text: str, sites: Sequence[HeadSite]) -> list[Head]:
    """ "0.1,3.5" as (layer, head) pairs, counted from 0; ConfigError for names of no head, and for duplicates."""
    found: list[Head] = []
    for at in parsed_heads(text):
        layer, head = at
        word, last = f"{layer}.{head}", len(sites) - 1
        if layer > last:
            raise ConfigError(
                "--heads {word}: there is no layer {layer}; expected 0 to {last}", word=word, layer=layer, last=last
            )
        if head > (most := sites[layer].num_heads - 1):
            raise ConfigError(
                "--heads {word}: layer {layer} has no head {head}; expected 0 to {most}",
                word=word, layer=layer, head=head, most=most,
            )  # fmt: skip
        if at in found:
            raise ConfigError("--heads {word}: is given twice", word=word)
        found.append(at)
    for layer_number, site in enumerate(sites):
        if sum(layer == layer_number for layer, _ in found) == site.num_heads:
            raise ConfigError(
                "--heads: all {num_heads} heads of layer {layer_number} would be removed; keep at least one",
                num_heads=site.num_heads,
                layer_number=layer_number,
            )
    return found


MOST_POINTS = 32  # of the curve, in addition to the whole model
GOING = (Column(tr("layer")), Column(tr("heads")), Column(tr("removed"), key="gone"))
CURVE = (
    Column(tr("kept"), "count"),
    Column(tr("loss"), "number"),
    Column(tr("rise"), "share"),
    Column("±", "share"),
    Column(tr("random"), "number"),
    Column(tr("lowest"), "number"),
    Column(tr("highest"), "number"),
    Column(tr("better")),
)


@dataclass(frozen=True)
class Choice:
    """The heads to remove, by one of these. max_loss: as many as the curve allows for this relative increase of it."""

    heads: str | None = None  # their names, such as "0.1,3.5"
    remove: int | None = None  # their number
    share: float | None = None  # of all heads
    max_loss: float | None = None
    uniform: bool = False  # as many of every layer

    def __post_init__(self) -> None:
        ways = {name: value for name, value in vars(self).items() if name != "uniform"}
        given = [f"--{name.replace('_', '-')}" for name, value in ways.items() if value is not None]
        if len(given) != 1:
            options = joined(given, tr(" and ", sense="options")) if given else tr("nothing", sense="options")
            raise ConfigError(
                "{options} given; expected one of --heads, --remove, --share and --max-loss", options=options
            )
        if self.heads is not None:
            parsed_heads(self.heads)
        if self.remove is not None and self.remove < 1:
            raise ConfigError("--remove {remove}: expected at least 1", remove=self.remove)
        if self.share is not None and not 0.0 < self.share < 1.0:
            raise ConfigError(
                "--share {share:g}: expected more than 0 and less than 1, or 0 % and 100 %", share=self.share
            )
        if self.max_loss is not None and not (self.max_loss > 0.0 and math.isfinite(self.max_loss)):
            raise ConfigError(
                "--max-loss {max_loss:g}: expected more than 0, such as 1% or 0.01", max_loss=self.max_loss
            )


@dataclass(frozen=True)
class Pruning:
    """A plan: the heads to remove, and the expected effect."""

    source: Source
    texts: Texts
    heads: tuple[Head, ...]  # to remove, in order
    by: str
    importance: HeadImportance | None  # of all heads, None if heads were named
    order: Order | None  # None if heads were named
    curve: PruningCurve  # the loss in that order and in random orders
    uniform: bool = False  # whether every layer keeps as many

    @property
    def after(self) -> dict[int, Heads]:
        """Numbers of query heads and KV heads of each layer in which heads are removed."""
        found = {}
        for layer, site in enumerate(find_heads(self.source.decoder)):
            gone = {head for at, head in self.heads if at == layer}
            group = site.num_heads // site.num_kv_heads
            kept = [head for head in range(site.num_heads) if head not in gone]
            if gone:
                found[layer] = (len(kept), len({head // group for head in kept}))
        return found

    @property
    def loss(self) -> float:
        """The expected loss: that of the curve with this number of heads removed."""
        return float(self.curve.loss[list(self.curve.removed).index(len(self.heads))])

    def apply(self) -> Decoder:
        """The model without these heads, a copy."""
        model = prune(self.source.decoder, self.heads, copy=True).model
        assert isinstance(model, Decoder)
        return model

    def shown(self) -> Plan:
        """As tables."""
        source, curve = self.source, self.curve
        total = curve.total
        why = tr("by name")
        if self.importance:
            why = tr("by {by}: {what}, lowest first", by=self.by, what=METHODS[self.by])
        if self.uniform:
            why = tr("{why}; equally many in every layer", why=why)
        gone = len(self.heads)
        facts: list[tuple[str, str]] = [
            (tr("model"), source.described),
            (tr("text"), self.texts.described(decided=self.importance is not None)),
            (tr("selected", sense="plan"), why),
            (tr("remove"), tr("{count} of {of} heads ({share:.1%})", count=gone, of=total, share=gone / total)),
        ]
        title = tr("Expected: loss from the curve, other numbers by formula")
        losses = float(curve.loss[0]), self.loss
        tables = [self._going(), cost_table(title, source.decoder, tr("expected"), self.after, losses)]
        if self.order is not None:
            tables.append(Table("curve", tr("Loss against heads kept"), CURVE, tuple(curve_rows(self.curve))))
        return Plan(tr("Plan: heads to remove"), tuple(facts), tuple(tables), tuple(self._notes()))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        source = self.source
        return {
            "command": "prune", "model": source.name, "text": self.texts.name, "by": self.by,
            "heads": [list(head) for head in self.heads],
            "importance": None if self.importance is None else self.importance.to_dict(),
            "expected": {"loss": self.loss, **expected(source.decoder, self.after)},
            "curve": self.curve.to_dict(),
        }  # fmt: skip

    def _going(self) -> Table:
        rows: list[tuple[Value, ...]] = []
        for layer, site in enumerate(find_heads(self.source.decoder)):
            gone = sorted(head for at, head in self.heads if at == layer)
            if not gone:
                rows.append((str(layer), str(site.num_heads), "—"))
                continue
            words = [
                f"{layer}.{head}" + (f"({float(self.importance.column[layer][head]):+.4f})" if self.importance else "")
                for head in gone
            ]
            heads, kv = self.after[layer]
            count = f"{site.num_heads} → {heads}"
            if kv != heads:
                count = tr(
                    "{before} → {after}, KV heads {kv} → {kv_after}", before=site.num_heads, after=heads,
                    kv=site.num_kv_heads, kv_after=kv,
                )  # fmt: skip
            rows.append((str(layer), count, "  ".join(words)))
        title = tr("Heads, as LAYER.HEAD")
        if self.importance:
            unit = unit_of(self.importance.column.unit)
            title = tr("Heads, as LAYER.HEAD, with their importance ({unit})", unit=unit)
        return Table("heads", title, GOING, tuple(rows))

    def _skipped(self) -> list[Head]:
        """Heads that are kept as the last ones of their layers, and are less important than some that are removed."""
        if self.order is None or self.importance is None:
            return []
        values = self.importance.column

        def value(unit: Unit) -> float:
            return sum(float(values[layer][head]) for layer, head in unit)

        most = max((value(unit) for unit in self.order.going if unit[0] in self.heads), default=-math.inf)
        return [head for unit in self.order.skipped if value(unit) < most for head in unit]

    def _notes(self) -> list[str]:
        curve = self.curve
        notes: list[str] = []
        if skipped := self._skipped():
            names = joined((f"{layer}.{head}" for layer, head in skipped), LIST)
            notes.append(tr(
                "A layer keeps at least one head (or group that shares keys): {names} are kept, each as the last one "
                "of its layer; the next heads in the order are removed instead.", names=names,
            ))  # fmt: skip
        chance, count = curve.random, len(curve.random)
        if self.order is None:
            least, most = float(chance[:, -1].min()), float(chance[:, -1].max())
            notes.append(tr(
                "The same number of random heads, {count} times: loss {least:.4f} to {most:.4f}.", count=count,
                least=least, most=most,
            ))  # fmt: skip
            return notes
        points = int(((curve.removed > 0) & (curve.removed < curve.total)).sum())
        better, every = int(curve.better.sum()), int(curve.better_than_all.sum())
        notes.append(tr(
            "Random: mean, minimum and maximum of {count} random orders of single heads, which may empty a layer. "
            "Better than their mean at {mean} of {points} points, than each at {every}; {removable} of {total} heads "
            "can be removed for at most 1 %.",
            count=count, mean=better, points=points, every=every, removable=curve.removable(), total=curve.total,
        ))  # fmt: skip
        return notes


def plan_pruning(
    source: Source,
    texts: Texts,
    choice: Choice,
    progress: Progress,
    *,
    by: str = "ablation",
    orders: int = 4,
    penalty: float = 0.01,
    gate_steps: int = 200,
    seed: int = 0,
) -> Pruning:
    """Select heads to remove, ranked on one part of the text, the curve on another; those of a KV head together."""
    check_options(by, orders, penalty, gate_steps)
    decoder, sites = source.decoder, find_heads(source.decoder)
    for site in sites:
        check_independent(site)
    drawing = part(progress, "computing the curve")
    if choice.heads is not None:
        named = named_heads(choice.heads, sites)
        prune(decoder, named, copy=True)  # raises for uneven groups, before any long computation
        rest = [(i, head) for i, site in enumerate(sites) for head in range(site.num_heads) if (i, head) not in named]
        curve = pruning_curve(
            decoder, texts.foretell, mean_loss, [*named, *rest], points=[len(named)], random_orders=orders, seed=seed,
            progress=drawing,
        )  # fmt: skip
        return Pruning(source, texts, tuple(named), "named", None, None, curve)
    wanted = _wanted(choice, sites)
    importance = rank(by, decoder, texts.decide, penalty=penalty, steps=gate_steps, seed=seed, progress=progress)
    order = order_of(importance.column, sites, uniform=choice.uniform)
    counts = list(order.counts)
    wanted = None if wanted is None else max((count for count in counts if count <= wanted), default=0)
    if wanted == 0 and choice.uniform:
        raise ConfigError(
            "--uniform: every layer loses equally many, {least} heads in all at a time; expected at least as many",
            least=counts[0],
        )
    if wanted == 0:
        raise ConfigError(
            "--share {share:g}, --remove {remove}: heads that share a KV head are removed together, {group} at a "
            "time; expected at least one such group",
            share=choice.share or 0, remove=choice.remove or 0, group=counts[0],
        )  # fmt: skip
    if len(counts) > MOST_POINTS:  # evenly spaced, the last included
        counts = [counts[i] for i in np.linspace(0, len(counts) - 1, MOST_POINTS).astype(int)]
    points = sorted({*counts, *([wanted] if wanted else [])})
    curve = pruning_curve(
        decoder, texts.foretell, mean_loss, order.heads, points=points, random_orders=orders, seed=seed,
        progress=drawing,
    )  # fmt: skip
    curve = replace(curve, method=importance.method)
    gone = curve.removable(choice.max_loss) if choice.max_loss is not None else wanted
    assert gone is not None
    return Pruning(source, texts, tuple(order.heads[:gone]), by, importance, order, curve, choice.uniform)


def check_options(by: str, orders: int, penalty: float, gate_steps: int) -> None:
    """Raise ConfigError for options of `plan_pruning` that are invalid for any model and text."""
    check_ranking(by, penalty, gate_steps)
    if orders < 1:
        raise ConfigError("--orders {orders}: expected at least 1 random order to compare with", orders=orders)


def curve_rows(curve: PruningCurve) -> list[tuple[Value, ...]]:
    """The rows of `CURVE`."""
    rows: list[tuple[Value, ...]] = []
    for i, kept in enumerate(curve.kept):
        chance, rise = curve.random[:, i], curve.loss[i] / curve.loss[0] - 1
        error = "" if not i or np.isnan(curve.errors[i]) else f"{100 * curve.errors[i] / curve.loss[0]:.2f} %"
        against: tuple[str, ...] = ("", "", "", "")
        if i:
            word = tr("than all") if curve.better_than_all[i] else tr("than mean") if curve.better[i] else tr("no")
            against = (f"{chance.mean():.4f}", f"{chance.min():.4f}", f"{chance.max():.4f}", word)
        rows.append((int(kept), f"{curve.loss[i]:.4f}", f"{100 * rise:+.2f} %" if i else "", error, *against))
    return rows


def _wanted(choice: Choice, sites: list[HeadSite]) -> int | None:
    """The largest number of heads to remove; None if it depends on the curve."""
    total = sum(site.num_heads for site in sites)
    if choice.max_loss is not None:
        return None
    count = choice.remove if choice.remove is not None else math.floor(round((choice.share or 0.0) * total, 9))
    most = sum(site.num_heads - removed_together(site) for site in sites)
    if count > most:
        raise ConfigError(
            "--remove {count}: of {total} heads in {layers} layers at most {most} can be removed, as each layer keeps "
            "one",
            count=count, total=total, layers=len(sites), most=most,
        )  # fmt: skip
    if count < 1:
        raise ConfigError(
            "--share {share:g}: of {total} heads this is none; expected at least 1", share=choice.share, total=total
        )
    return count
