"""A call as the kernels take it: tensors with strides, block sizes and plans, and what statistics ask for."""
# mypy: disable-error-code="import-not-found"

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from headwise.kernels.call import Call
from headwise.kernels.joint import RowGradients
from headwise.kernels.triton_gpu.plan import (
    Blocks,
    Plan,
    backward_blocks,
    key_blocks,
    key_range,
    padded,
    placed,
    query_blocks,
)
from headwise.kernels.triton_gpu.tile import COLUMNS, FORMULAS, KINDS, SHARES, product
from headwise.masks import Grid
from headwise.rule.lowering import Lowered
from headwise.stats import Statistic

LOG2E = math.log2(math.e)
LIMIT = torch.iinfo(torch.int32).max
FAR = 1 << 29  # beyond all keys; sums of a position and two of it are below the limit
INTERPRETED = not isinstance(product, triton.JITFunction)


@dataclass(frozen=True)
class Problem:
    """q [b, h, n, d], k [b, h_kv, m, d], v [b, h_kv, m, d_v], any strides, and the tensors of `Lowered`, on one device;
    only `spans` is on the CPU, where the plans are computed."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    spans: Tensor
    dense: Tensor | None = None
    soft_cap: float = 0.0
    relative: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    drop: float = 0.0
    seed: int = 0
    whole: bool = False  # every query attends to every key
    shift: int = 0  # position of query 0 on the key axis, from which distances are counted

    @classmethod
    def of(cls, call: Call) -> "Problem":
        """The tensors of a call that was not refused, detached."""
        lowered = call.lowered
        assert isinstance(lowered, Lowered)
        q, k, v = call.q.detach(), call.k.detach(), call.v.detach()
        relative, bias, sinks = (
            None if x is None else x.detach() for x in (lowered.relative, lowered.bias, lowered.sinks)
        )  # fmt: skip
        return cls(
            q, k, v, call.rule.scale, lowered.spans, lowered.dense, lowered.soft_cap, relative, bias, sinks,
            call.dropout_p, call.seed, lowered.dense is None and call.rule.is_full(), call.rule.grid.shift,
        )  # fmt: skip

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """b, h, h_kv, n, m"""
        b, h, n, _ = self.q.shape
        return b, h, self.k.shape[1], n, self.k.shape[2]

    @property
    def extras(self) -> bool:
        """Whether a score requires more than a product and a scale."""
        given = any(x is not None for x in (self.dense, self.relative, self.bias))
        return given or self.soft_cap > 0 or self.drop > 0

    def placed(self, *key: Any, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What is computed from the spans and the key, on the device."""
        return placed(self.spans, self.q.device, (self.sizes[4], self.dense is not None, *key), make)

    def keys_of(self, rows: int, cols: int) -> Plan:
        """The plan of the blocks of keys for blocks of `rows` queries."""
        return Plan(*self.placed("keys", rows, cols, make=lambda: self._keys_of(rows, cols)))

    def queries_of(self, rows: int, cols: int) -> Plan:
        """The plan of the blocks of queries for blocks of `cols` keys."""
        count = -(-self.sizes[4] // cols)
        return Plan(*self.placed("queries", rows, cols, make=lambda: query_blocks(self._keys_of(rows, cols), count)))

    def _keys_of(self, rows: int, cols: int) -> Plan:
        return key_blocks(self.spans, self.sizes[4], rows, cols, masked=self.dense is not None)

    def range_of(self, rows: int) -> Tensor:
        """First key and last key + 1 of each block of `rows` queries."""
        (found,) = self.placed("range", rows, make=lambda: (key_range(self.spans, self.sizes[4], rows),))
        return found

    def backward_size(self, *, joint: bool = False) -> Blocks:
        """Tiles of the backward passes and of the sweep over columns; joint: with gradients of statistics."""
        of, shared = (self.q.shape[-1], self.v.shape[-1], self.q.dtype), shared_memory(self.q.device)
        return backward_blocks(*of, extras=self.extras, shared=shared, joint=joint)

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Kernel arguments for q, k and v."""
        q, k, v = self.q, self.k, self.v
        return q, k, v, *q.stride(), *k.stride(), *v.stride(), *self.sizes[1:]

    def score_inputs(self, *, whole: bool = False) -> tuple[Any, ...]:
        """Kernel arguments for the rule; whole: without spans."""
        cap, dense, bias, relative = self.soft_cap, self.dense, self.bias, self.relative
        spans = None if whole else self.placed("spans", make=lambda: (self.spans,))[0]
        return (
            self.scale / cap if cap else self.scale * LOG2E, cap * LOG2E, relative, stride(relative, 0),
            bias, *(stride(bias, axis) for axis in range(4)),
            spans, stride(spans, 0), self.spans.shape[2], dense, *(stride(dense, axis) for axis in range(4)),
        )  # fmt: skip

    def constants(self, size: Blocks) -> dict[str, Any]:
        """Compile-time constants of the kernels."""
        d, d_v = self.q.shape[-1], self.v.shape[-1]
        return {
            "D": d,
            "DP": padded(d),
            "DV": d_v,
            "DVP": padded(d_v),
            "BM": size.rows,
            "BN": size.cols,
            "HAS_CAP": self.soft_cap > 0,
            "HAS_REL": self.relative is not None,
            "HAS_BIAS": self.bias is not None,
            "HAS_DENSE": self.dense is not None,
            "PRECISION": self.precision,
        }

    @property
    def precision(self) -> str:
        """The precision of `tile.product`."""
        if self.q.dtype == torch.float32:
            return "ieee"
        return "upcast" if self.q.dtype == torch.bfloat16 and INTERPRETED else "tf32"  # "tf32" only affects float32


def stride(x: Tensor | None, axis: int) -> int:
    """The stride along an axis; 0 if it is broadcast."""
    return 0 if x is None or x.shape[axis] == 1 else x.stride(axis)


def walk(plan: Plan | None) -> tuple[Any, ...]:
    """Kernel arguments for a plan; None: all keys."""
    parts = (None, None) if plan is None else plan
    return tuple(x for part in parts for x in (part, stride(part, 0), 1 if part is None else part.shape[2]))


@cache
def shared_memory(device: torch.device) -> int:
    """The most bytes of shared memory of a block; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@dataclass
class Wanted:
    """The statistics that the forward pass accumulates besides output, log-sum-exp and maximum.

    Attributes:
        flags: the flags of `attend_kernel` and `merge_kernel` that are set.
        table: rows of the table of `tile.block_masses`. weights: float32 [rows, m], weights of the keys.
        planes: the plane of `launch.forward` that holds each statistic. columns: those that `launch.columns` computes.
    """

    flags: set[str] = field(default_factory=set)
    table: list[tuple[int, int, int, int]] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    planes: dict[Statistic, int] = field(default_factory=dict)
    columns: list[Statistic] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """Whether the pass accumulates any statistic."""
        return bool(self.flags or self.table)

    @classmethod
    def of(cls, statistics: Iterable[Statistic], grid: Grid) -> "Wanted":
        """The statistics that the kernels support."""
        wanted, rows = cls(), 0
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


def of_rows(problem: Problem, more: RowGradients | None) -> tuple[Any, ...] | None:
    """What `tile.added_by_statistics` reads; None if only δ changes: the kernels are then those of the output alone."""
    if more is None or (more.logs is None and more.distance is None and not more.masses):
        return None
    b, m = problem.sizes[0], problem.sizes[4]
    by_key, by_range, ranges = [], [], []
    for factor, slope in more.masses:
        if slope.within is not None:
            by_range.append(factor.contiguous())
            start, stop = (max(-FAR, min(end, FAR)) for end in slope.within[:2])
            ranges.append((start, stop - start, int(slope.within[2]), 0))
        elif slope.keys is not None:
            keys = slope.keys.to(factor).expand(b if len(slope.keys) > 1 else 1, m).contiguous()
            by_key.append((factor.contiguous(), keys, stride(keys, 0)))
    table: Iterable[Tensor] = ()
    if ranges:
        (table,) = problem.placed(
            "ranges", *ranges, make=lambda: (torch.tensor(ranges, dtype=torch.int32, device="cpu"),)
        )
    logs, distance = (x if x is None else x.contiguous() for x in (more.logs, more.distance))
    return problem.shift, logs, distance, tuple(by_key), tuple(zip(by_range, table, strict=True))
