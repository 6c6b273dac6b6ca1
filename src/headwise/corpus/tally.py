"""The sums of a sweep: the moments of every measure of every head, and what was NaN or infinite."""

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.corpus.moments import FIELDS, OfRows, OfWindows, empty, joined
from headwise.corpus.selection import Head
from headwise.map import AttentionMap

MOST_TROUBLES = 8  # that are kept


@dataclass(frozen=True)
class Trouble:
    """A place of NaN or infinity: the first layer of a window with such numbers.

    Attributes:
        path, where: the file, and the window in it. layer: its number. heads: of it. what: "scores" or "values".
    """

    path: str
    where: str
    layer: int
    heads: tuple[int, ...]
    what: str

    def __str__(self) -> str:
        heads = ", ".join(map(str, self.heads))
        return (
            f"layer {self.layer}, head{'s' * (len(self.heads) > 1)} {heads}: {self.what} in {self.path}, {self.where}"
        )


@dataclass
class Tally:
    """The sums over some windows; the size does not depend on their number.

    Attributes:
        numbers: [measures, 5, heads] float64, moments as in `moments.FIELDS`; the selected heads of all layers.
        lost: [2, heads] float64: queries with NaN or infinite scores, and windows that were left out for them.
        windows, tokens: counts; a token in several windows counts once.
        troubles: the first few windows with NaN or infinity. kernels: that computed the attention.
    """

    numbers: Tensor
    lost: Tensor
    windows: int = 0
    tokens: int = 0
    troubles: list[Trouble] = field(default_factory=list)
    kernels: frozenset[str] = frozenset()

    @classmethod
    def of_nothing(cls, measures: int, heads: int) -> "Tally":
        """The sums over no windows."""
        return cls(empty(measures, heads), torch.zeros(2, heads, dtype=torch.float64))

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with all bits: the arrays are base64 of little-endian float64."""
        arrays = {name: getattr(self, name).numpy().astype("<f8") for name in ("numbers", "lost")}
        return {
            **{name: b64encode(x.tobytes()).decode() for name, x in arrays.items()}, "windows": self.windows,
            "tokens": self.tokens, "troubles": [asdict(trouble) for trouble in self.troubles],
            "kernels": sorted(self.kernels),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], measures: int, heads: int) -> "Tally":
        """Read a result of `to_dict` for this number of measures and heads. KeyError, TypeError or ValueError if it is
        not one."""
        numbers, lost = (
            torch.from_numpy(np.frombuffer(b64decode(content[name], validate=True), "<f8").astype(np.float64))
            for name in ("numbers", "lost")
        )
        troubles = [Trouble(**{**one, "heads": tuple(one["heads"])}) for one in content["troubles"]]
        return cls(
            numbers.reshape(measures, len(FIELDS), heads), lost.reshape(2, heads), int(content["windows"]),
            int(content["tokens"]), troubles, frozenset(content["kernels"]),
        )  # fmt: skip

    def add(self, other: "Tally") -> None:
        """Add another tally."""
        self.numbers = joined(self.numbers, other.numbers)
        self.lost = self.lost + other.lost
        self.windows += other.windows
        self.tokens += other.tokens
        self.troubles = [*self.troubles, *other.troubles][:MOST_TROUBLES]
        self.kernels |= other.kernels


Bad = tuple[int, tuple[int, ...], str]  # the number of a layer, heads of it, and which numbers are not finite


@dataclass(frozen=True)
class WindowSums:
    """The numbers of one window.

    Attributes:
        numbers: [measures, 5, heads] float64, moments of the selected heads. rows: [heads] float64, their queries with
            NaN or infinite scores.
        bad: the first layer with NaN or infinity, its heads with them, and which numbers; None if all are finite. It
            covers all layers and heads, selected or not.
    """

    numbers: Tensor
    rows: Tensor
    bad: Bad | None


class Batch:
    """The numbers of a batch, added layer by layer as the model computes them, and moved to the CPU at the end.

    Args:
        layers: all names, in order. heads: the selected ones.

    Attributes:
        kernels: that computed the attention.
    """

    def __init__(self, layers: Sequence[str], heads: Sequence[Head], measures: Sequence[OfRows | OfWindows]) -> None:
        self._layers, self._heads, self._measures = layers, heads, measures
        self.kernels: set[str] = set()
        self._found: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, name: str, amap: AttentionMap) -> None:
        """Add the measures of a layer."""
        measured = amap.measured
        assert measured is not None  # they were requested
        numbers = torch.stack([measured.states[measure.name].numbers for measure in self._measures], 1)
        scores, values = measured.nonfinite, amap.nonfinite_values
        if values is None:
            values = torch.zeros_like(scores)
        else:
            values = values.repeat_interleave(amap.shape[1] // values.shape[1], dim=1)
        self.kernels.add(amap.kernel)
        self._found[name] = numbers, torch.stack((scores, values), 1)

    def windows(self) -> list[WindowSums]:
        """The numbers of each window. The only synchronisation with the device."""
        found = [self._found[name] for name in self._layers]
        every = torch.cat([torch.cat((numbers.flatten(1, 2), bad.double()), 1) for numbers, bad in found], -1).cpu()
        numbers, bad = every[:, :-2].unflatten(1, (len(self._measures), -1)), every[:, -2:]
        widths = [part.shape[-1] for _, part in found]
        kept = torch.tensor([sum(widths[: head.layer]) + head.head for head in self._heads])
        return [
            WindowSums(numbers[i][..., kept], bad[i, 0, kept], _first_bad(bad[i].split(widths, -1)))
            for i in range(len(every))
        ]


def _first_bad(layers: Sequence[Tensor]) -> Bad | None:
    """layers: for each, the numbers of queries with non-finite scores and of non-finite values, [2, heads]."""
    for layer, counts in enumerate(layers):
        for what, count in zip(("scores", "values"), counts, strict=True):
            heads = tuple(count.nonzero().flatten().tolist())
            if heads:
                return layer, heads, what
    return None


def counted(numbers: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The moments of a window [measures, 5, heads] without heads with non-finite scores, and what was lost [2, heads].
    rows: [heads], queries with non-finite scores."""
    bad = rows > 0
    if bool(bad.any()):
        numbers = torch.where(bad, empty(*numbers.shape[:1], numbers.shape[-1]), numbers)
    return numbers, torch.stack((rows, bad.double()))
