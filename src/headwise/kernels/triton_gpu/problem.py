"""The tensors of one attention call, and the arguments that every kernel launch takes from them."""
# mypy: disable-error-code="import-not-found"

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from headwise.kernels.triton_gpu.blocks import Blocks, backward_blocks, padded
from headwise.kernels.triton_gpu.forward import attend_kernel
from headwise.kernels.triton_gpu.plan import Plan, key_blocks

LOG2E = math.log2(math.e)
INTERPRETED = not isinstance(attend_kernel, triton.JITFunction)


@dataclass(frozen=True)
class Problem:
    """The tensors of one attention call.

    q [b, h, n, d], k [b, h_kv, m, d], v [b, h_kv, m, d_v], any strides, on one device, as are `dense`, `relative`,
    `bias` and `sinks` (shapes as in `Lowered`). `spans` is on the CPU, where the plans are computed.
    """

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

    def keys_of(self, rows: int, cols: int) -> Plan:
        """The plan of the blocks of keys for blocks of `rows` queries."""
        return key_blocks(self.spans, self.sizes[4], rows, cols, masked=self.dense is not None)

    @property
    def backward_size(self) -> Blocks:
        """Tiles of the backward passes and of the sweep over columns."""
        return backward_blocks(self.q.shape[-1], self.v.shape[-1], self.q.dtype, extras=self.extras)

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Kernel arguments for q, k and v."""
        q, k, v = self.q, self.k, self.v
        return q, k, v, *q.stride(), *k.stride(), *v.stride(), *self.sizes[1:]

    @property
    def score_inputs(self) -> tuple[Any, ...]:
        """Kernel arguments for the rule."""
        cap, dense, bias, relative = self.soft_cap, self.dense, self.bias, self.relative
        spans = self.spans.to(self.q.device)
        return (
            self.scale / cap if cap else self.scale * LOG2E, cap * LOG2E, relative, stride(relative, 0),
            bias, *(stride(bias, axis) for axis in range(4)),
            spans, stride(spans, 0), spans.shape[2], dense, *(stride(dense, axis) for axis in range(4)),
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


def walk(plan: Plan) -> tuple[Any, ...]:
    """Kernel arguments for a plan."""
    return tuple(x for part in plan for x in (part, stride(part, 0), part.shape[2]))


def options(size: Blocks, *, busy: bool = False) -> dict[str, Any]:
    """Compile options; a kernel that accumulates statistics needs more registers, so it gets more warps."""
    # Contraction to fused multiply-adds is requested explicitly: Triton's default is about to change.
    warps = max(size.warps, 8) if busy else size.warps
    return {"num_warps": warps, "num_stages": size.stages, "enable_fp_fusion": True}


def on(x: Tensor) -> AbstractContextManager[object]:
    """Context manager that launches kernels on the device of x."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
