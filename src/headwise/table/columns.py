"""One column of a table: a number for each head, with its unit, error and description."""

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from headwise.errors import ConfigError, ShapeError

STANDARD, INTERVAL = "standard error", "interval"


class HeadColumn(Sequence[Tensor]):
    """A number for each head: `column[3]` is the tensor of layer 3, [heads], and `column[3][5]` one number.

    Args:
        values: one sequence of numbers a layer, which may differ in length; or a tensor [layers, heads]. Numbers on the
            CPU become float64; tensors of another device stay there.
        unit: such as "nats". description: one sentence. range: the values that are possible, such as "0 to 1".
        error: the uncertainty of each value, layer by layer as `values`: the standard error [heads], or an interval
            [heads, 2] of low and high ends.
    Attributes:
        flat: the numbers of all heads, [rows], in the order of the table's rows.
        flat_error: the errors of all heads, [rows] or [rows, 2]; None if there are none.
    """

    def __init__(
        self, values: Any, *, unit: str = "", description: str = "", range: str = "", error: Any = None
    ) -> None:
        layers = [_numbers(layer) for layer in values]
        errors = None if error is None else [_numbers(layer) for layer in error]
        for i, layer in enumerate(layers):
            if layer.ndim != 1:
                raise ShapeError(f"values: layer {i} has shape {list(layer.shape)}, expected one number a head")
        if errors is not None and [len(x) for x in errors] != [len(x) for x in layers]:
            counts = [[len(x) for x in part] for part in (errors, layers)]
            raise ShapeError(f"error: {counts[0]} numbers in the layers, expected {counts[1]}, as there are values")
        self.unit, self.description, self.range = unit, description, range
        self.flat = torch.cat(layers) if layers else torch.empty(0, dtype=torch.float64)
        self.flat_error = None if errors is None else torch.cat(errors) if errors else self.flat[:0]
        if self.flat_error is not None and self.flat_error.shape[1:] not in ((), (2,)):
            raise ShapeError(
                f"error: shape {list(self.flat_error.shape[1:])} a head, expected a number, or low and high"
            )
        self._rows = tuple(torch.arange(len(self.flat)).split([len(x) for x in layers])) if layers else ()

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Tensor, ...]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self.flat[rows] for rows in self._rows[index])
        return self.flat[self._rows[index]]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def error(self) -> tuple[Tensor, ...] | None:
        """The errors of each layer's heads, [heads] or [heads, 2]; None if there are none."""
        return None if self.flat_error is None else tuple(self.flat_error[rows] for rows in self._rows)

    @property
    def error_kind(self) -> str | None:
        """ "standard error", "interval", or None."""
        return None if self.flat_error is None else STANDARD if self.flat_error.ndim == 1 else INTERVAL

    def taken(self, rows: Tensor, index: tuple[Tensor, ...]) -> "HeadColumn":
        """The given rows in that order. index: for each layer, the new rows of its heads in ascending order."""
        found = HeadColumn((), unit=self.unit, description=self.description, range=self.range)
        found.flat = self.flat[rows.to(self.flat.device)]
        found.flat_error = None if self.flat_error is None else self.flat_error[rows.to(self.flat.device)]
        found._rows = index
        return found

    @classmethod
    def joined(cls, columns: Sequence["HeadColumn"], name: str) -> "HeadColumn":
        """Columns one after another, with the description of the first. ConfigError, with the `name`, if only some of
        them have errors."""
        first = columns[0]
        if len({column.error_kind for column in columns}) > 1:
            raise ConfigError(f"stack: {name!r} has an error in some of the tables only")
        return cls(
            [column.flat for column in columns], unit=first.unit, description=first.description, range=first.range,
            error=None if first.flat_error is None else [column.flat_error for column in columns],
        )  # fmt: skip

    def __repr__(self) -> str:
        known = ", ".join(f"{name}={value!r}" for name, value in (
            ("unit", self.unit), ("range", self.range), ("error", self.error_kind),
        ) if value)  # fmt: skip
        return f"HeadColumn({len(self.flat)} heads in {len(self)} layers{', ' * bool(known)}{known})"


def _numbers(x: Any) -> Tensor:
    """As float64, or float32 on a device without float64; 0 for −0, which says nothing of a head."""
    if isinstance(x, Tensor):
        return x.detach().to(torch.float32 if x.device.type == "mps" else torch.float64) + 0.0
    return torch.from_numpy(np.array(x, dtype=np.float64)) + 0.0
