"""The statistics of a call that the forward pass accumulates."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.kernels.triton_gpu.sums import COLUMNS, FORMULAS, KINDS, SHARES
from headwise.masks import Grid
from headwise.stats import Statistic

LIMIT = torch.iinfo(torch.int32).max


@dataclass
class Wanted:
    """The statistics that the forward pass accumulates besides output, log-sum-exp and maximum.

    Attributes:
        flags: the flags of `attend_kernel` and `merge_kernel` that are set.
        table: rows of the table of `sums.block_masses`. weights: float32 [rows, m], weights of the keys.
        planes: the plane of `launch.forward` that holds each statistic. columns: those that `launch.columns` computes.
        shift: position of query 0 on the key axis, from which distances are counted.
    """

    flags: set[str] = field(default_factory=set)
    table: list[tuple[int, int, int, int]] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    planes: dict[Statistic, int] = field(default_factory=dict)
    columns: list[Statistic] = field(default_factory=list)
    shift: int = 0

    @property
    def busy(self) -> bool:
        """Whether the pass accumulates any statistic."""
        return bool(self.flags or self.table)

    @classmethod
    def of(cls, statistics: Iterable[Statistic], grid: Grid) -> "Wanted":
        """The statistics that the kernels support."""
        wanted, rows = cls(shift=grid.shift), 0
        for statistic in statistics:
            if (compiled := statistic.compiled) is None:
                continue
            signature = compiled.signature
            if signature in FORMULAS:
                wanted.planes[statistic], flag = FORMULAS[signature]
                wanted.flags |= set() if flag is None else {flag}
            elif signature in KINDS:
                arguments = [max(-LIMIT, min(number, LIMIT)) for number in compiled.numbers]
                if compiled.keys is not None:
                    weights = compiled.keys.expand(grid.b if len(compiled.keys) > 1 else 1, grid.m)
                    arguments += [rows, int(len(weights) > 1)]
                    wanted.weights.append(weights)
                    rows += len(weights)
                wanted.planes[statistic] = SHARES + len(wanted.table)
                wanted.table.append((KINDS[signature], *arguments, *[0] * (3 - len(arguments))))
            elif signature == COLUMNS:
                wanted.columns.append(statistic)
        return wanted
