"""Random sequences of what is done to caches: calls of a layer, crops, selections, copies, and calls that fail. Each
output and each map is compared with float64 over all tokens so far, of which the query may see what the cache keeps."""

import copy
import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise.cache import BudgetCache, KVCache, RaggedCache, SlidingCache
from headwise.errors import ConfigError, ShapeError
from headwise.kernels.quantized import QuantizedKV

from .compare import Mismatch

LIMITS = {torch.float64: 1e-10, torch.float32: 5e-6, torch.bfloat16: 1.5e-2}  # relative, of an output
KINDS = ("full", "sliding", "budgets", "ragged")
DONE = ("call",) * 7 + ("crop", "select", "copy", "fail")


@dataclass
class Line:
    """A cache, the keys and values of all its tokens [b, h_kv, t, d], and the first token of each sequence."""

    cache: Any
    keys: Tensor
    values: Tensor
    starts: list[int]


class Sequence:
    """One sequence, drawn from (seed, number) alone. `told` says what it has done."""

    def __init__(self, seed: int, number: int) -> None:
        draw = self.draw = random.Random(f"{seed} {number}")
        self.random = torch.Generator().manual_seed(draw.getrandbits(40))
        self.kind, self.stored = draw.choice(KINDS), draw.choice((None, None, "int8", "float32"))
        self.dtype = draw.choice(tuple(LIMITS))
        self.kv, group, b = draw.choice((1, 2, 3)), draw.choice((1, 2)), draw.choice((1, 2, 3))
        self.window, self.sinks = draw.choice((1, 2, 5, 30)), draw.choice((0, 0, 1, 3))
        self.windows = [draw.choice((None, self.window, self.window + 2)) for _ in range(self.kv)]
        self.layer = hw.MultiHeadAttention(
            12, self.kv * group, num_kv_heads=self.kv, head_dim=draw.choice((2, 6, 16)), value_dim=draw.choice((1, 8)),
            rotary=draw.random() < 0.5,
        ).to(self.dtype)  # fmt: skip
        with torch.no_grad():
            for weight in self.layer.parameters():
                weight.copy_(torch.randn(weight.shape, generator=self.random) * 0.4)
        self.prompts = [draw.randrange(1, 8) for _ in range(b)]
        sizes = self.layer.head_dim, self.layer.value_dim
        k, v = (torch.empty(b, self.kv, 0, size, dtype=self.dtype) for size in sizes)
        self.lines = [Line(self._cache(), k, v, [0] * b)]
        self.told = [f"{self.lines[0].cache!r}, stored={self.stored}, {self.dtype}, {self.layer!r}"]
        self.held: list[tuple[Tensor, Tensor]] = []

    def run(self, steps: int = 24) -> None:
        """Do so many things; Mismatch if one is wrong."""
        for _ in range(steps):
            line, what = self.draw.choice(self.lines), self.draw.choice(DONE)
            getattr(self, f"_{what}")(line)
            if line.cache.seen != line.keys.shape[2]:
                raise Mismatch("seen", f"{line.cache.seen}, expected {line.keys.shape[2]}")
            if not all(torch.equal(x, before) for x, before in self.held):
                raise Mismatch("an earlier output or map", "has changed")

    def _cache(self) -> Any:
        match self.kind:
            case "full":
                return KVCache(stored=self.stored)
            case "sliding":
                return SlidingCache(self.window, self.sinks, stored=self.stored)
            case "budgets":
                return BudgetCache(self.windows, self.sinks, stored=self.stored)
            case _:
                return RaggedCache(self.prompts, stored=self.stored)

    def _call(self, line: Line) -> None:
        b, start = len(line.keys), line.keys.shape[2]
        n = self.draw.choice((1, 1, 1, 2, 5, 9, 70))
        if self.kind == "ragged" and not start:
            n = max(self.prompts) + self.draw.choice((0, 2))
            line.starts = [n - length for length in self.prompts]
        x = self._tokens(b, n)
        with torch.no_grad() if self.draw.random() < 0.5 else torch.inference_mode():
            wanted = self.draw.random() < 0.3
            self.told.append(f"call of {n} tokens at {start}, map: {wanted}")
            found = self.layer(x, mask=hw.Causal(), cache=line.cache, return_map=wanted, return_concat=True)
        with torch.no_grad():
            self._append(line, x)
            weights = self._weights(line, self.layer.apply_rope(*self.layer.project(x, x)[:2], start)[0])
            heads = weights @ self._repeated(line.values)
        expected = heads.transpose(1, 2).flatten(2)
        self._compare("output", found[-1], expected)
        self.held = [*self.held[-3:], (found[-1], found[-1].clone())]
        if wanted:
            dense = found[1].to_dense()
            tokens = torch.zeros_like(weights)
            tokens[..., found[1].rule.grid.key_tokens()] = dense.double()
            self._compare("weights", tokens, weights)

    def _append(self, line: Line, x: Tensor) -> None:
        start = line.keys.shape[2]
        _, k, v = self.layer.project(x, x)
        k = self.layer.apply_rope(k, k, start)[1]
        if self.stored == "int8":
            k, v = (QuantizedKV.of(part).decoded() for part in (k, v))
        elif self.stored is not None:
            k, v = (part.float().to(self.dtype) for part in (k, v))
        line.keys, line.values = torch.cat((line.keys, k), 2), torch.cat((line.values, v), 2)

    def _weights(self, line: Line, q: Tensor) -> Tensor:
        """[b, h, n, t] in float64."""
        t, n = line.keys.shape[2], q.shape[2]
        scores = q.double() @ self._repeated(line.keys).mT / math.sqrt(q.shape[3])
        i, j = torch.arange(t - n, t)[:, None], torch.arange(t)
        allowed = (j <= i).expand(scores.shape).clone()
        windows = {"sliding": [self.window] * self.kv, "budgets": self.windows}.get(self.kind, [None] * self.kv)
        group = self.layer.num_heads // self.kv
        for head, window in enumerate(windows):
            if window is not None:
                allowed[:, head * group : (head + 1) * group] &= (j > i - window) | (j < self.sinks)
        for entry, first in enumerate(line.starts):
            allowed[entry] &= (j >= first) & (i >= first)
        return scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num()  # fully masked queries have zeros

    def _repeated(self, x: Tensor) -> Tensor:
        return x.double().repeat_interleave(self.layer.num_heads // self.kv, 1)

    def _compare(self, name: str, got: Tensor, expected: Tensor) -> None:
        limit = LIMITS[self.dtype] * (2 if self.stored == "int8" else 1)
        error = float((got.double() - expected).norm() / expected.norm().clamp_min(1e-3))
        if got.shape != expected.shape or not error <= limit:
            raise Mismatch(name, f"relative error {error:.1e}, expected at most {limit:.1e}")

    def _crop(self, line: Line) -> None:
        seen = line.keys.shape[2]
        length = max(0, seen - self.draw.choice((0, 1, 3, 99)))
        self.told.append(f"crop of {seen} tokens to {length}")
        try:
            line.cache.crop(length)
        except ConfigError:  # it has dropped tokens that would be seen again
            if self.kind in ("full", "ragged"):
                raise
            return
        line.keys, line.values = line.keys[:, :, :length], line.values[:, :, :length]
        line.starts = [min(first, length) for first in line.starts]

    def _select(self, line: Line) -> None:
        if self.kind == "ragged" or not line.keys.shape[2]:  # the prompts are those of the first entries
            return
        entries = [self.draw.randrange(len(line.keys)) for _ in range(self.draw.choice((1, 2, 3)))]
        self.told.append(f"selection of {entries}")
        line.cache.select(entries)
        line.keys, line.values = line.keys[entries], line.values[entries]
        line.starts = [line.starts[i] for i in entries]

    def _copy(self, line: Line) -> None:
        made = self.draw.choice((copy.copy, copy.copy, copy.deepcopy))
        self.told.append(made.__name__)
        self.lines = [*self.lines[-2:], Line(made(line.cache), line.keys, line.values, line.starts)]

    def _fail(self, line: Line) -> None:
        """A call whose mask does not fit, or whose last step raises."""
        n, late = self.draw.choice((1, 4, 70)), self.draw.random() < 0.5
        if self.kind == "ragged" and not line.keys.shape[2]:
            return
        self.told.append(f"call of {n} tokens that fails {'late' if late else 'early'}")
        before = line.cache.nbytes
        hook = self.layer.o_proj.register_forward_pre_hook(_fails) if late else None
        mask = hw.Causal() if late else torch.ones(n, line.keys.shape[2] + n + 1, dtype=torch.bool)
        try:
            with torch.no_grad():
                self.layer(self._tokens(len(line.keys), n), mask=mask, cache=line.cache)
        except (ShapeError, _Failed):
            pass
        else:
            raise Mismatch("a call that fails", "has not failed")
        finally:
            if hook is not None:
                hook.remove()
        if line.cache.nbytes != before:
            raise Mismatch("bytes after a call that failed", f"{line.cache.nbytes}, expected {before}")

    def _tokens(self, b: int, n: int) -> Tensor:
        return torch.randn(b, n, 12, generator=self.random).to(self.dtype)


class _Failed(Exception):
    """Raised in the last step of a call."""


def _fails(*_: Any) -> None:
    raise _Failed
