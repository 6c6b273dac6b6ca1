"""One number for each head of a model, layer by layer, that prints itself as a table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headwise.analysis.given import head_name
from headwise.models.site import HeadSite
from headwise.tables import as_html, as_text, plain

Head = tuple[int, int]  # layer and head, counted from 0: places in what `find_heads` lists
_MOST = 5  # heads that are named below a table


@dataclass(frozen=True)
class HeadImportance:
    """How much each head matters to a loss, by one method.

    Attributes:
        method: what was asked. unit: of the values.
        names: of the attention modules, one a layer, as `find_heads` lists them.
        values: [heads] float64, one array a layer; layers may differ in heads. Larger is more important.
        errors: the same for the standard error of the values over what they are a mean of (`samples`), NaN where
            there is but one, None for a method that is no mean.
        samples: [batches (or rows), heads of all layers] of which the values are the mean (or its absolute value).
        loss: mean loss of the unchanged model; NaN if it is not known.
    """

    method: str
    unit: str
    names: tuple[str, ...]
    values: tuple[np.ndarray, ...]
    errors: tuple[np.ndarray, ...] | None
    samples: np.ndarray | None
    loss: float

    @property
    def flat(self) -> np.ndarray:
        """The values of all layers, one after the other."""
        return np.concatenate(self.values)

    @property
    def heads(self) -> list[Head]:
        """(layer, head) of each entry of `flat`."""
        return [(layer, head) for layer, row in enumerate(self.values) for head in range(len(row))]

    def order(self) -> list[Head]:
        """All heads, the least important first; equal ones as they stand in the model.

            hw.edit.prune(model, importance.order()[:2])        # the two that matter least

        `prune` counts the layers of the whole model, as importance does if it was asked without `sites=`.
        """
        heads = self.heads
        return [heads[i] for i in np.argsort(self.flat, kind="stable")]

    def normalised(self) -> "HeadImportance":
        """Each layer divided by the Euclidean norm of its values, so that layers compare (Michel et al. 2019, after
        Molchanov et al. 2017); a layer of zeros stays one. The samples are left out: they are not those of the
        quotients."""
        norms = [float(np.linalg.norm(row)) or 1.0 for row in self.values]

        def over(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
            return tuple(row / norm for row, norm in zip(rows, norms, strict=True))

        return replace(
            self, method=f"{self.method}, by layer", unit="share of the layer's norm", values=over(self.values),
            errors=None if self.errors is None else over(self.errors), samples=None,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """For JSON: values and errors as lists of layers; NaN becomes None."""
        return {
            "method": self.method, "unit": self.unit, "loss": self.loss, "layers": list(self.names),
            "values": [plain(row) for row in self.values],
            "errors": None if self.errors is None else [plain(row) for row in self.errors],
        }  # fmt: skip

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and cells: a row a layer, a column a head; a layer with fewer heads has empty cells."""
        most = max(map(len, self.values))
        body = [
            [f"L{i} {name}".rstrip(), *(f"{x:.4g}" for x in row), *[""] * (most - len(row))]
            for i, (name, row) in enumerate(zip(self.names, self.values, strict=True))
        ]
        return ["layer", *(f"H{head}" for head in range(most))], body

    def caption(self) -> str:
        """What the table shows, and its largest values with their standard errors."""
        top = ", ".join(f"{head_name(*head)} {self._told(*head)}" for head in self.order()[: -_MOST - 1 : -1])
        loss = "" if np.isnan(self.loss) else f"; loss {self.loss:.4f}"
        return f"{self.method} ({self.unit}{loss}); most: {top}"

    def __str__(self) -> str:
        return f"{self.caption()}\n{as_text(*self.table())}"

    def _repr_html_(self) -> str:
        return as_html(*self.table(), self.caption())

    def _told(self, layer: int, head: int) -> str:
        value = f"{self.values[layer][head]:.4g}"
        error = np.nan if self.errors is None else self.errors[layer][head]
        return value if np.isnan(error) else f"{value} ± {error:.2g}"


def from_samples(
    method: str, unit: str, sites: Sequence[HeadSite], samples: np.ndarray, loss: float, *, absolute: bool = False
) -> HeadImportance:
    """Means of samples [count, heads of all layers] with their standard errors; with `absolute`, their absolute values
    (the error of a mean is that of its absolute value too, where the mean is not near 0)."""
    mean = samples.mean(0)
    values, errors = by_layer(np.abs(mean) if absolute else mean, sites), by_layer(standard_error(samples), sites)
    return HeadImportance(method, unit, tuple(site.name for site in sites), values, errors, samples, loss)


def by_layer(flat: np.ndarray, sites: Sequence[HeadSite]) -> tuple[np.ndarray, ...]:
    """Values of all heads, cut into layers."""
    ends = np.cumsum([site.num_heads for site in sites])[:-1]
    return tuple(np.split(np.asarray(flat, dtype=np.float64), ends))


def standard_error(samples: np.ndarray) -> np.ndarray:
    """Of the mean over the first axis; NaN for one sample, which tells nothing of it."""
    count = len(samples)
    return samples.std(0, ddof=1) / np.sqrt(count) if count > 1 else np.full(samples.shape[1:], np.nan)
