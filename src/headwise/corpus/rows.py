"""The numbers of a sweep as the columns of a table: a row a head and measure."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.corpus.moments import OfRows, OfWindows
from headwise.corpus.selection import Head
from headwise.corpus.tally import Tally

COLUMNS: dict[str, type] = {
    "file": str, "layer": int, "module": str, "head": int, "measure": str, "value": float, "mean": float, "std": float,
    "min": float, "max": float, "count": int, "unit": str, "per": str, "nonfinite": int,
}  # fmt: skip


def columns(
    tally: Tally, heads: Sequence[Head], measures: Sequence[OfRows | OfWindows], file: str | None = None
) -> dict[str, list[Any]]:
    """Column name → values, head by head and measure by measure; "file" only if given. None if nothing was counted."""
    found: dict[str, list[Any]] = {name: [] for name in COLUMNS if name != "file" or file is not None}
    numbers = {name: value.T.tolist() for name, value in finished(tally.numbers, measures).items()}
    nonfinite = tally.lost[0].long().tolist()
    for i, head in enumerate(heads):
        for j, measure in enumerate(measures):
            row = {
                "layer": head.layer, "module": head.name, "head": head.head, "measure": measure.name,
                "unit": measure.unit, "per": measure.per, "nonfinite": nonfinite[i],
                **({} if file is None else {"file": file}),
            }  # fmt: skip
            count = int(numbers["count"][i][j])
            row |= {name: numbers[name][i][j] if count else None for name in ("value", "mean", "std", "min", "max")}
            row["count"] = count
            for name, into in found.items():
                into.append(row[name])
    return found


def finished(numbers: Tensor, measures: Sequence[OfRows | OfWindows]) -> dict[str, Tensor]:
    """Column → [measures, heads] float64 from moments [measures, 5, heads]. std divides by n."""
    count, mean, squares, least, largest = numbers.unbind(1)
    take = torch.tensor([measure.largest for measure in measures])[:, None]
    return {
        "value": torch.where(take, largest, mean), "mean": mean, "std": (squares / count.clamp_min(1)).sqrt(),
        "min": least, "max": largest, "count": count,
    }  # fmt: skip
