"""The order in which heads are removed: by importance, in groups that share KV heads, and never a whole layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headwise.analysis.importance import (
    HeadImportance,
    ablation_importance,
    gradient_importance,
    learn_gates,
    taylor_importance,
)
from headwise.analysis.importance.losses import Head
from headwise.compress.words import term
from headwise.errors import ConfigError, check_choice
from headwise.lm.model import mean_loss
from headwise.models import HeadSite
from headwise.progress import Progress, part
from headwise.table import HeadColumn

METHODS = {by: term(by) for by in ("ablation", "gradient", "taylor", "gates")}
Unit = tuple[Head, ...]  # heads that are removed together


@dataclass(frozen=True)
class Order:
    """Units in the order of removal.

    going: those that can be removed. last: the one of each layer that is kept regardless of its importance; `skipped`:
    those of them that are less important than some removed ones.
    """

    going: tuple[Unit, ...]
    last: tuple[Unit, ...]
    skipped: tuple[Unit, ...]

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
        raise ConfigError(
            f"--penalty {penalty}: expected a finite number of at least 0",
            f"--penalty {penalty}：应为不小于 0 的有限数",
        )
    if steps < 1:
        raise ConfigError(f"--gate-steps {steps}: expected at least 1", f"--gate-steps {steps}：应不小于 1")


def units_of(site: HeadSite, layer: int) -> list[Unit]:
    """Heads of a layer that are removed together: those that share a KV head, if there are several KV heads."""
    group = site.num_heads // site.num_kv_heads if site.num_kv_heads > 1 else 1
    return [tuple((layer, head) for head in range(i, i + group)) for i in range(0, site.num_heads, group)]


def order_of(values: HeadColumn, sites: Sequence[HeadSite]) -> Order:
    """The least important unit first, by the sum over its heads; the last one of a layer is kept."""
    units = [unit for layer, site in enumerate(sites) for unit in units_of(site, layer)]
    by_value = sorted(units, key=lambda unit: sum(float(values[layer][head]) for layer, head in unit))
    left = [sum(unit[0][0] == layer for unit in units) for layer in range(len(sites))]
    going: list[Unit] = []
    last: list[tuple[int, Unit]] = []  # with the number of units before it
    for unit in by_value:
        layer = unit[0][0]
        if left[layer] == 1:
            last.append((len(going), unit))
        else:
            going.append(unit)
            left[layer] -= 1
    skipped = tuple(unit for before, unit in last if before < len(going))
    return Order(tuple(going), tuple(unit for _, unit in last), skipped)


def parsed_heads(text: str) -> list[Head]:
    """ "0.1,3.5" as (layer, head) pairs; ConfigError for anything else."""
    found: list[Head] = []
    for word in (word.strip() for word in text.split(",")):
        layer, point, head = word.partition(".")
        if not (point and layer.isdecimal() and head.isdecimal()):
            raise ConfigError(
                f"--heads {word!r}: expected LAYER.HEAD, counted from 0, such as 0.1,3.5",
                f"--heads {word!r}：应为“层.头”，从 0 数起，例如 0.1,3.5",
            )
        found.append((int(layer), int(head)))
    return found


def named_heads(text: str, sites: Sequence[HeadSite]) -> list[Head]:
    """ "0.1,3.5" as (layer, head) pairs, counted from 0; ConfigError for names of no head, and for duplicates."""
    found: list[Head] = []
    for at in parsed_heads(text):
        word = f"{at[0]}.{at[1]}"
        if at[0] >= len(sites):
            raise ConfigError(
                f"--heads {word}: there is no layer {at[0]}; expected 0 to {len(sites) - 1}",
                f"--heads {word}：没有第 {at[0]} 层；应为 0 到 {len(sites) - 1}",
            )
        if at[1] >= sites[at[0]].num_heads:
            most = sites[at[0]].num_heads - 1
            raise ConfigError(
                f"--heads {word}: layer {at[0]} has no head {at[1]}; expected 0 to {most}",
                f"--heads {word}：第 {at[0]} 层没有头 {at[1]}；应为 0 到 {most}",
            )
        if at in found:
            raise ConfigError(f"--heads {word}: is given twice", f"--heads {word}：重复给出")
        found.append(at)
    for layer_number, site in enumerate(sites):
        if sum(layer == layer_number for layer, _ in found) == site.num_heads:
            raise ConfigError(
                f"--heads: all {site.num_heads} heads of layer {layer_number} would be removed; keep at least one",
                f"--heads：第 {layer_number} 层的全部 {site.num_heads} 个头都会被移除；至少保留一个",
            )
    return found
