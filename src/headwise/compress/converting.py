"""Merging KV heads: the plan with its errors, and the merged model, with or without healing."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.base.run import Progress
from headwise.compress.source import Heads, Source, Texts, cost_table, expected, term
from headwise.edit import heal, merge_kv
from headwise.edit.healing import HealingStep
from headwise.edit.merging import Merge
from headwise.errors import ConfigError, check_choice
from headwise.lm.model import Decoder, mean_loss
from headwise.lm.train import heldout_loss
from headwise.models import find_heads
from headwise.plan.tables import Column, Plan, Table, Value


def check_healing(steps: int, lr: float) -> None:
    """Raise ConfigError for options of `healed` that are out of range."""
    if steps < 0:
        raise ConfigError(
            f"--heal {steps}: expected a number of steps, or 0 for none", f"--heal {steps}：应为步数，0 表示不训练"
        )
    if not 0.0 < lr < math.inf:
        raise ConfigError(f"--lr {lr}: expected a finite number above 0", f"--lr {lr}：应为大于 0 的有限数")


def healed(decoder: Decoder, texts: Texts, steps: int, lr: float, progress: Progress, *, seed: int = 0) -> Decoder:
    """A trained copy, as returned by `heal`, on windows of the first 95 % of the text, drawn by `seed`."""

    def watch(done: HealingStep) -> None:
        progress(f"healing, loss {done.loss:.3f}", done.step, done.steps)

    batches = texts.healing(steps, seed)
    model = heal(decoder, batches, mean_loss, steps, lr=lr, seed=seed, watch=watch, copy=True).model
    assert isinstance(model, Decoder)
    return model.eval()


WHAT = {method: term(method) for method in ("mean", "first", "cluster", "svd")}
MERGED = (
    Column(term("layer")),
    Column(term("key heads")),
    Column(term("error of W_Q W_Kᵀ"), "share"),
    Column(term("error of W_V W_O"), "share"),
    Column(term("shared by")),
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
            (term("model"), self.source.described),
            (term("text"), self.texts.described(decided=False)),
            (term("method"), term("how", method=self.method, what=WHAT[self.method])),
        )
        rows: list[tuple[Value, ...]] = [
            (
                str(i), f"{sum(map(len, merge.groups))} → {len(merge.groups)}", merge.lost_scores, merge.lost_values,
                " ".join(f"({' '.join(map(str, group))})" for group in merge.groups),
            )
            for i, merge in enumerate(self.merges.values())
        ]  # fmt: skip
        note, title = term("merges_note"), term("expected_measured")
        tables = (
            Table("merges", term("key_heads"), MERGED, tuple(rows), note=note),
            cost_table(title, self.source.decoder, "merged", self.after, self.losses),
        )
        return Plan(term("plan_convert"), facts, tables)

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


def check_options(num_kv_heads: int, method: str) -> None:
    """Raise ConfigError for options of `plan_conversion` that are invalid for any model."""
    check_choice("--method", method, WHAT)
    if num_kv_heads < 1:
        raise ConfigError(
            f"--num-kv-heads {num_kv_heads}: expected at least 1", f"--num-kv-heads {num_kv_heads}：应不小于 1"
        )


def plan_conversion(
    source: Source, texts: Texts, num_kv_heads: int, progress: Progress, *, method: str = "svd"
) -> Conversion:
    """Merge KV heads of a copy by `method` of `merge_kv`, and predict its loss; ConfigError if `merge_kv` refuses."""
    check_options(num_kv_heads, method)
    if all(site.num_kv_heads == num_kv_heads for site in find_heads(source.decoder)):
        raise ConfigError(
            f"--num-kv-heads {num_kv_heads}: each layer has {num_kv_heads} KV heads already; expected a proper divisor",
            f"--num-kv-heads {num_kv_heads}：每层已经是 {num_kv_heads} 个键值头；应为更小的约数",
        )
    merged = merge_kv(source.decoder, num_kv_heads, method, copy=True)
    assert isinstance(merged.model, Decoder)
    losses = []
    for i, (name, decoder) in enumerate((("the model as it is", source.decoder), ("the merged model", merged.model))):
        progress(f"estimating the loss: {name}", i, 2)
        losses.append(float(np.mean(heldout_loss(decoder, texts.foretell))))
    return Conversion(source, texts, method, merged.model, merged.merges, (losses[0], losses[1]))
