"""What a sweep adds up: the moments of every measure of every head, and what was NaN or infinite."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.map import AttentionMap
from headwise.sweep.asked import Head
from headwise.sweep.moments import OfRows, OfWindows, empty, joined

TOLD = 8  # places of NaN and infinity that are kept by name


@dataclass(frozen=True)
class Trouble:
    """Where NaN or infinity was found: the first layer of a window that has them.

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
    """The sums over some windows. It is as large however many they are.

    Attributes:
        numbers: [measures, 5, heads] float64, moments as in `moments.FIELDS`; heads as they are kept, all layers.
        lost: [2, heads] float64: queries with NaN or infinite scores, and windows that were left out for them.
        windows, tokens: how many; a token that is in several windows counts once.
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
        """A fresh one."""
        return cls(empty(measures, heads), torch.zeros(2, heads, dtype=torch.float64))

    def add(self, other: "Tally") -> None:
        """Take in what another one added up."""
        self.numbers = joined(self.numbers, other.numbers)
        self.lost = self.lost + other.lost
        self.windows += other.windows
        self.tokens += other.tokens
        self.troubles = [*self.troubles, *other.troubles][:TOLD]
        self.kernels |= other.kernels


class Batch:
    """The numbers of a batch, layer by layer as the model computes them; on the CPU when all are there.

    Attributes:
        kept: of each layer, the numbers of the heads that are kept. kernels: that computed the attention.
    """

    def __init__(self, heads: Sequence[Head], measures: Sequence[OfRows | OfWindows]) -> None:
        self._measures = measures
        self.kernels: set[str] = set()
        self.kept: dict[str, list[int]] = {}
        for head in heads:
            self.kept.setdefault(head.name, []).append(head.head)
        self._found: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {}

    def see(self, name: str, amap: AttentionMap) -> None:
        """Take the measures of a layer."""
        measured = amap.measured
        assert measured is not None  # they were asked for
        numbers = torch.stack([measured.states[measure.name].numbers for measure in self._measures], 1)
        values = amap.nonfinite_values
        if values is not None:
            values = values.repeat_interleave(amap.shape[1] // values.shape[1], dim=1)
        self.kernels.add(amap.kernel)
        self._found[name] = (numbers, measured.nonfinite, values)

    def moments(self) -> tuple[Tensor, Tensor]:
        """[b, measures, 5, heads] and the rows with NaN or infinite scores [b, heads] of the heads that are kept."""
        parts = [(self._found[name], heads) for name, heads in self.kept.items()]
        numbers = torch.cat([found[0][..., heads].cpu() for found, heads in parts], -1)
        rows = torch.cat([found[1][:, heads].cpu() for found, heads in parts], -1).double()
        return numbers, rows

    def troubles(self, layers: Sequence[str]) -> list[tuple[int, tuple[int, ...], str] | None]:
        """Of each window, the first layer with NaN or infinity, the heads there, and what has them; None if all is
        well. All layers and heads are looked at, whichever are kept."""
        count = len(next(iter(self._found.values()))[0])
        first: list[tuple[int, tuple[int, ...], str] | None] = [None] * count
        for i, name in enumerate(layers):
            _, rows, values = self._found[name]
            for what, bad in (("scores", rows), ("values", values)):
                if bad is None or not bool(bad.any()):
                    continue
                for entry in bad.any(-1).nonzero().flatten().tolist():
                    if first[entry] is None:
                        first[entry] = (i, tuple(bad[entry].nonzero().flatten().tolist()), what)
        return first


def counted(numbers: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The moments of a window [measures, 5, heads] without the heads that have NaN or infinity in it, and what was
    lost, [2, heads]. rows: [heads], queries with NaN or infinite scores."""
    bad = rows > 0
    if bool(bad.any()):
        numbers = torch.where(bad, empty(*numbers.shape[:1], numbers.shape[-1]), numbers)
    return numbers, torch.stack((rows, bad.double()))
