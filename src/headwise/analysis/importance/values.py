"""How much each head of a model matters, by one method."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from headwise.analysis.checks import head_name
from headwise.models.site import HeadSite
from headwise.table import HeadColumn, HeadTable
from headwise.table.show import grid, numbers

Head = tuple[int, int]  # layer and head, counted from 0 as in `find_heads`
_MOST = 5  # heads in the title


@dataclass(frozen=True)
class HeadImportance:
    """How much each head matters to a loss, by one method: a `HeadTable` with its samples.

    Attributes:
        table: one column, named after the method; larger is more important. Its layers are named as in `find_heads`.
            Means of `samples` have their standard errors, NaN for one sample. `one.table.merge(other.table)` puts
            several methods side by side.
        samples: [batches (or rows), heads of all layers]; the values are their mean (or its absolute value).
        loss: mean loss of the unchanged model; NaN if unknown.
    """

    table: HeadTable
    samples: np.ndarray | None
    loss: float

    @classmethod
    def of(
        cls,
        method: str,
        unit: str,
        names: Sequence[str],
        values: Sequence[np.ndarray],
        errors: Sequence[np.ndarray] | None = None,
        *,
        samples: np.ndarray | None = None,
        loss: float = float("nan"),
    ) -> "HeadImportance":
        """Make one from values [heads] for each layer, with standard errors of the same shapes."""
        column = HeadColumn(values, unit=unit, description="Larger is more important.", error=errors)
        return cls(HeadTable({method: column}, layers=names), samples, loss)

    @property
    def method(self) -> str:
        """The name of the table's column."""
        return next(iter(self.table))

    @property
    def column(self) -> HeadColumn:
        """The values: `importance.column[layer][head]`, and their `error`."""
        return self.table[self.method]

    @property
    def flat(self) -> np.ndarray:
        """The values of all layers, concatenated."""
        return self.column.flat.numpy().copy()

    def order(self) -> list[Head]:
        """All heads, the least important first; equal ones in the order of the model.

            hw.edit.prune(model, importance.order()[:2])        # the two that matter least

        `prune` numbers the layers of the whole model, as importance does without `sites=`.
        """
        return list(self.table.sort(self.method, descending=False).places)

    def normalised(self) -> "HeadImportance":
        """Each layer divided by the Euclidean norm of its values, so that layers are comparable (Michel et al. 2019,
        after Molchanov et al. 2017); zeros are unchanged. Without samples, as they are not those of the quotients."""
        norms = [float(row.norm()) or 1.0 for row in self.column]

        def over(rows: Iterable[Tensor]) -> list[np.ndarray]:
            return [row.numpy() / norm for row, norm in zip(rows, norms, strict=True)]

        error = self.column.error
        return HeadImportance.of(
            f"{self.method}, by layer", "share of the layer's norm", self.table.layers, over(self.column),
            None if error is None else over(error), loss=self.loss,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """For JSON: `HeadTable.to_dict`, with method and loss; NaN becomes None."""
        loss = None if np.isnan(self.loss) else self.loss
        return {"method": self.method, "loss": loss, **self.table.to_dict()}

    @property
    def title(self) -> str:
        """One line: the method, and the largest values with their standard errors."""
        top = self.table.top(self.method, _MOST)
        words = zip(top.places, numbers(top[self.method]), strict=True)
        loss = "" if np.isnan(self.loss) else f"; loss {self.loss:.4f}"
        most = ", ".join(f"{head_name(*head)} {word}" for head, word in words)
        return f"{self.method} ({self.column.unit}{loss}); most: {most}"

    def __repr__(self) -> str:
        return f"{self.title}\n{grid(self.table.layers, self.table.heads, self.column)}"

    def _repr_html_(self) -> str:
        return self.table.titled(self.title)._repr_html_()


def from_samples(
    method: str, unit: str, sites: Sequence[HeadSite], samples: np.ndarray, loss: float, *, absolute: bool = False
) -> HeadImportance:
    """Means of samples [count, heads of all layers] with their standard errors; with `absolute`, their absolute values,
    whose errors are the same unless the mean is near 0."""
    mean = samples.mean(0)
    values, errors = by_layer(np.abs(mean) if absolute else mean, sites), by_layer(standard_error(samples), sites)
    return HeadImportance.of(method, unit, [site.name for site in sites], values, errors, samples=samples, loss=loss)


def by_layer(flat: np.ndarray, sites: Sequence[HeadSite]) -> tuple[np.ndarray, ...]:
    """Values of all heads, split into layers."""
    ends = np.cumsum([site.num_heads for site in sites])[:-1]
    return tuple(np.split(np.asarray(flat, dtype=np.float64), ends))


def standard_error(samples: np.ndarray) -> np.ndarray:
    """Standard error of the mean over the first axis; NaN for one sample."""
    count = len(samples)
    return samples.std(0, ddof=1) / np.sqrt(count) if count > 1 else np.full(samples.shape[1:], np.nan)
