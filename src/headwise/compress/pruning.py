"""Removing heads: which and why, the expected loss, and the model without them."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headwise.analysis.importance import HeadImportance, PruningCurve, pruning_curve
from headwise.analysis.importance.losses import Head
from headwise.compress.ranking import METHODS, Order, Unit, check_ranking, named_heads, order_of, parsed_heads, rank
from headwise.compress.sizes import Heads, cost_table, expected
from headwise.compress.source import Source
from headwise.compress.texts import Texts
from headwise.compress.words import term
from headwise.edit import prune
from headwise.edit.limits import check_independent
from headwise.errors import ConfigError
from headwise.lm.model import Decoder, mean_loss
from headwise.models import HeadSite, find_heads
from headwise.progress import Progress, part
from headwise.stats.base import unit_of
from headwise.textbook.plan.tables import Column, Plan, Table, Value
from headwise.wording import joined

MOST_POINTS = 32  # of the curve, in addition to the whole model
GOING = (Column(term("layer")), Column(term("heads")), Column(term("that go"), key="gone"))
CURVE = (
    Column(term("kept"), "count"),
    Column(term("loss"), "number"),
    Column(term("rise"), "share"),
    Column("±", "share"),
    Column(term("random"), "number"),
    Column(term("least"), "number"),
    Column(term("most"), "number"),
    Column(term("better")),
)


@dataclass(frozen=True)
class Choice:
    """The heads to remove, by one of these. heads: their names, such as "0.1,3.5". remove: their number. share: of all
    heads. max_loss: as many as the curve allows for this relative increase of the loss, 0.01 for one percent."""

    heads: str | None = None
    remove: int | None = None
    share: float | None = None
    max_loss: float | None = None

    def __post_init__(self) -> None:
        given = [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value is not None]
        if len(given) != 1:
            raise ConfigError(
                f"{' and '.join(given) or 'nothing'} given; expected one of --heads, --remove, --share and --max-loss",
                f"给出了{'与'.join(given) or '零个选项'}；应给出 --heads、--remove、--share、--max-loss 之一",
            )
        if self.heads is not None:
            parsed_heads(self.heads)
        if self.remove is not None and self.remove < 1:
            raise ConfigError(f"--remove {self.remove}: expected at least 1", f"--remove {self.remove}：应不小于 1")
        if self.share is not None and not 0.0 < self.share < 1.0:
            raise ConfigError(
                f"--share {self.share:g}: expected more than 0 and less than 1, or 0 % and 100 %",
                f"--share {self.share:g}：应大于 0 且小于 1，或介于 0 % 与 100 % 之间",
            )
        if self.max_loss is not None and not (self.max_loss > 0.0 and math.isfinite(self.max_loss)):
            raise ConfigError(
                f"--max-loss {self.max_loss:g}: expected more than 0, such as 1% or 0.01",
                f"--max-loss {self.max_loss:g}：应大于 0，例如 1% 或 0.01",
            )


@dataclass(frozen=True)
class Pruning:
    """A plan: the heads to remove, and the expected effect.

    heads: those to remove, in order. importance: of all heads, None if heads were named. curve: the loss in that order
    and in random orders. order: None if heads were named.
    """

    source: Source
    texts: Texts
    heads: tuple[Head, ...]
    by: str
    importance: HeadImportance | None
    order: Order | None
    curve: PruningCurve

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
        facts: list[tuple[str, str]] = [
            (term("model"), source.described),
            (term("text"), self.texts.described(decided=self.importance is not None)),
            (term("why"), term("by", by=self.by, what=METHODS[self.by]) if self.importance else term("named")),
            (term("go"), term("of_heads", count=len(self.heads), of=total, share=len(self.heads) / total)),
        ]
        title = term("expected_curve")
        losses = float(curve.loss[0]), self.loss
        tables = [self._going(), cost_table(title, source.decoder, "expected", self.after, losses)]
        if self.order is not None:
            tables.append(self._curve())
        return Plan(term("plan_prune"), tuple(facts), tuple(tables), tuple(self._notes()))

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
                count = term("keys_too", before=site.num_heads, after=heads, kv=site.num_kv_heads, kv_after=kv)
            rows.append((str(layer), count, "  ".join(words)))
        measured = self.importance and term("heads_important", unit=unit_of(self.importance.column.unit))
        return Table("heads", measured or term("heads_named"), GOING, tuple(rows))

    def _skipped(self) -> list[Head]:
        """Heads that are kept as the last ones of their layers, and are less important than some that are removed."""
        if self.order is None or self.importance is None:
            return []
        values = self.importance.column

        def value(unit: Unit) -> float:
            return sum(float(values[layer][head]) for layer, head in unit)

        most = max((value(unit) for unit in self.order.going if unit[0] in self.heads), default=-math.inf)
        return [head for unit in self.order.skipped if value(unit) < most for head in unit]

    def _curve(self) -> Table:
        return Table("curve", term("curve"), CURVE, tuple(curve_rows(self.curve)))

    def _notes(self) -> list[str]:
        curve = self.curve
        notes: list[str] = []
        if skipped := self._skipped():
            names = joined((f"{layer}.{head}" for layer, head in skipped), ", ", "、")
            notes.append(term("skipped_note", names=names))
        chance, count = curve.random, len(curve.random)
        if self.order is None:
            least, most = float(chance[:, -1].min()), float(chance[:, -1].max())
            notes.append(term("chance_note", count=count, least=least, most=most))
            return notes
        points = int(((curve.removed > 0) & (curve.removed < curve.total)).sum())
        better, every = int(curve.better.sum()), int(curve.better_than_all.sum())
        notes.append(term(
            "random_note", count=count, mean=better, points=points, every=every, removable=curve.removable(),
            total=curve.total,
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
    """Select the heads to remove: ranked on the part of the text for planning, their number by `choice`, with the curve
    on the part for prediction.

    Heads that share a KV head are removed together, by the sum of their importance; the last head (or group) of a layer
    is never removed. seed: of the random orders, and of learned gates. ConfigError for choices out of range and designs
    whose heads depend on each other.
    """
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
    order = order_of(importance.column, sites)
    counts = np.cumsum([len(unit) for unit in order.going]).tolist()
    wanted = None if wanted is None else max((count for count in counts if count <= wanted), default=0)
    if wanted == 0:
        raise ConfigError(
            f"--share {choice.share or 0:g}, --remove {choice.remove or 0}: heads that share a KV head are "
            f"removed together, {counts[0]} at a time; expected at least one such group",
            f"--share {choice.share or 0:g}、--remove {choice.remove or 0}：共享键值头的头一起移除，每次 "
            f"{counts[0]} 个；至少应为这样的一组",
        )
    points = sorted({*_spread(counts), *([wanted] if wanted else [])})
    curve = pruning_curve(
        decoder,
        texts.foretell,
        mean_loss,
        order.heads,
        points=points,
        random_orders=orders,
        seed=seed,
        progress=drawing,
    )
    curve = replace(curve, method=importance.method)
    gone = curve.removable(choice.max_loss) if choice.max_loss is not None else wanted
    assert gone is not None
    return Pruning(source, texts, tuple(order.heads[:gone]), by, importance, order, curve)


def check_options(by: str, orders: int, penalty: float, gate_steps: int) -> None:
    """Raise ConfigError for options of `plan_pruning` that are invalid for any model and text."""
    check_ranking(by, penalty, gate_steps)
    if orders < 1:
        raise ConfigError(
            f"--orders {orders}: expected at least 1 random order to compare with",
            f"--orders {orders}：至少需要 1 种随机顺序用于对照",
        )


def curve_rows(curve: PruningCurve) -> list[tuple[Value, ...]]:
    """The rows of `CURVE`."""
    rows: list[tuple[Value, ...]] = []
    for i, kept in enumerate(curve.kept):
        chance, rise = curve.random[:, i], curve.loss[i] / curve.loss[0] - 1
        error = "" if not i or np.isnan(curve.errors[i]) else f"{100 * curve.errors[i] / curve.loss[0]:.2f} %"
        against: tuple[str, ...] = ("", "", "", "")
        if i:
            word = term("than all" if curve.better_than_all[i] else "than mean" if curve.better[i] else "no")
            against = (f"{chance.mean():.4f}", f"{chance.min():.4f}", f"{chance.max():.4f}", word)
        rows.append((int(kept), f"{curve.loss[i]:.4f}", f"{100 * rise:+.2f} %" if i else "", error, *against))
    return rows


def _wanted(choice: Choice, sites: list[HeadSite]) -> int | None:
    """The largest number of heads to remove; None if it depends on the curve."""
    total = sum(site.num_heads for site in sites)
    if choice.max_loss is not None:
        return None
    count = choice.remove if choice.remove is not None else math.floor(round((choice.share or 0.0) * total, 9))
    most = sum(site.num_heads - _unit(site) for site in sites)
    if count > most:
        raise ConfigError(
            f"--remove {count}: of {total} heads in {len(sites)} layers at most {most} can be removed, as "
            f"each layer keeps one",
            f"--remove {count}：{len(sites)} 层的 {total} 个头中最多可移除 {most} 个，每层保留一个",
        )
    if count < 1:
        raise ConfigError(
            f"--share {choice.share:g}: of {total} heads this is none; expected at least 1",
            f"--share {choice.share:g}：{total} 个头的这个比例不足一个；至少应为 1 个",
        )
    return count


def _unit(site: HeadSite) -> int:
    return site.num_heads // site.num_kv_heads if site.num_kv_heads > 1 else 1


def _spread(counts: list[int]) -> list[int]:
    """At most `MOST_POINTS` of them, evenly spaced, including the last."""
    if len(counts) <= MOST_POINTS:
        return counts
    return [counts[i] for i in np.linspace(0, len(counts) - 1, MOST_POINTS).astype(int)]
