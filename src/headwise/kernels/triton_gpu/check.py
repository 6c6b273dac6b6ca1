"""Whether the kernels compute on a device what they should: a small call is compared with `torch_blocks` in float64.

Triton, the driver and the GPU have a part in every result, so that what holds on one device may not on another. The
first call of each kind on a device, `Kind`, checks it, which takes milliseconds beside compiling the kernels. If a
result differs, or the kernels do not compile, the kernel refuses calls of that kind. HEADWISE_GPU_CHECK=0 omits this.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from threading import RLock, Thread
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.errors import ConfigError, warn
from headwise.kernels.call import Call
from headwise.kernels.joint import RowGradients, joined
from headwise.kernels.reads import Matrix
from headwise.kernels.torch_blocks import TorchBlocks
from headwise.kernels.triton_gpu import plan
from headwise.masks import Causal, Dense, Everything, Grid, Lengths, Mask, Sinks, Window
from headwise.rule import Rule
from headwise.rule.lowering import Lowered
from headwise.scores import Terms
from headwise.stats import (
    COLUMN_MASS,
    CONCENTRATION,
    DISTANCE,
    DISTANCE_VARIANCE,
    ENTROPY,
    LARGEST,
    SQUARES,
    KeyWeights,
    LargestOther,
    RangeMass,
    Statistic,
)

SETTING = "HEADWISE_GPU_CHECK"
BATCH = 2
# The largest relative errors (Frobenius), of the output, of gradients, and of statistics.
OUTPUT = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}
GRADIENT = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
STATISTIC = 1e-5
DROPPED = 0.25  # of what holds for any pattern of dropped weights
PLAIN = {s.compiled.signature: s for s in (  # type: ignore[union-attr]
    LARGEST, ENTROPY, SQUARES, CONCENTRATION, DISTANCE, DISTANCE_VARIANCE, COLUMN_MASS
)}  # fmt: skip
RANGE, WEIGHTS = "range_mass(int, int, int): float32[b, h, n]", "key_weights(float32[m]): float32[b, h, n]"
OTHER = "largest_other(float32[m]): float32[b, h, n]"
_lock = RLock()


@dataclass(frozen=True)
class Check:
    """A check of the kernels on a device. milliseconds: with what had to be compiled. reason: why they are not used for
    this kind of calls; None if they are."""

    device: str
    kind: str
    milliseconds: float
    reason: str | None


CHECKS: dict["Kind", Check] = {}  # those of this process


class Kind(NamedTuple):
    """What kernels are compiled for, and the sizes of a small call for which the same are: its blocks of queries and
    keys are whole ones and parts, with and without mask.

    Attributes:
        mask: whether queries attend to all keys; to several ranges; to other ranges in each entry of the batch.
        dense, bias: which axes of these tensors are not broadcast; None without one. table: whether each head has one.
        statistics: their signatures. learned: whether relative, bias and sinks have gradients; None without gradients.
        joint: whether statistics have gradients too.
    """

    device: str
    dtype: torch.dtype
    heads: tuple[int, int]
    rows: int
    keys: int
    d: int
    d_v: int
    mask: tuple[bool, bool, bool]
    dense: tuple[bool, ...] | None
    capped: bool
    table: bool | None
    bias: tuple[bool, ...] | None
    sinks: bool
    dropout: bool
    statistics: tuple[str, ...]
    learned: tuple[bool, bool, bool] | None
    joint: bool

    @classmethod
    def of(cls, call: Call, learned: tuple[bool, bool, bool] | None) -> "Kind":
        """The kind of a call that the kernel supports."""
        lowered, (b, h, n, m), h_kv = call.lowered, call.rule.grid, call.keys.shape[1]
        assert isinstance(lowered, Lowered)
        d, d_v, dtype, rule = call.q.shape[-1], call.values.shape[-1], call.q.dtype, call.rule
        spans, dense, table, bias = lowered.spans, lowered.dense, lowered.relative, lowered.bias
        extras = not (dense is table is bias is None) or lowered.soft_cap > 0 or call.dropout_p > 0
        few = n <= plan.DECODE_QUERIES
        size = (plan.decode_blocks if few else plan.forward_blocks)(d, d_v, dtype, extras=extras)
        rows = (n if n in (1, plan.DECODE_QUERIES) else 5) if few else size.rows + 5
        keys = 2 * size.cols + (5 if few else rows + 6)
        if few and plan.splits(m, -(-(h // h_kv * n) // size.rows) * b * h_kv) > 1:
            keys = 2 * plan.SPLIT_KEYS + 7
        heads = 1 if h_kv == 1 else 2
        signatures = (s.compiled.signature for s in call.statistics if s.compiled is not None)
        return cls(
            str(call.q.device), dtype, (heads if h == h_kv else 3 * heads, heads), _like(rows, n), _like(keys, m),
            d, d_v, (rule.is_full(), spans.shape[2] > 1, len(spans) > 1), _axes(dense), lowered.soft_cap > 0,
            None if table is None else len(table) > 1, _axes(bias), lowered.sinks is not None, call.dropout_p > 0,
            tuple(sorted(s for s in signatures if s in {*PLAIN, RANGE, WEIGHTS, OTHER})), learned,
            learned is not None and call.differentiable and len(call.statistics) > 0,
        )  # fmt: skip

    def __str__(self) -> str:
        size = f"d={self.d}" if self.d == self.d_v else f"d={self.d}, d_v={self.d_v}"
        whole, several, each = self.mask
        parts = {
            "decoding": self.rows <= plan.DECODE_QUERIES, "shared KV heads": self.heads[0] != self.heads[1],
            "mask": not whole, "several ranges": several, "ranges of each entry": each,
            "boolean mask": self.dense is not None, "soft cap": self.capped, "distances": self.table is not None,
            "bias": self.bias is not None, "sinks": self.sinks, "dropout": self.dropout,
            "statistics": bool(self.statistics), "gradients": self.learned is not None,
            "gradients of statistics": self.joint,
        }  # fmt: skip
        named = [str(self.dtype).removeprefix("torch."), size, f"{self.rows} × {self.keys}"]
        return ", ".join(named + [name for name, present in parts.items() if present])


def refusal(call: Call, learned: tuple[bool, bool, bool] | None) -> str | None:
    """Why the kernel is not used for calls of this kind, from a check at the first of them; None if it is. learned:
    whether relative, bias and sinks require gradients; None without a backward pass."""
    setting = os.environ.get(SETTING, "1")
    if setting not in ("0", "1"):
        raise ConfigError(f"{SETTING}={setting!r}: expected 0 or 1")
    if setting == "0":
        return None
    kind = Kind.of(call, learned)
    if kind not in CHECKS:
        if call.q.is_cuda and torch.cuda.is_current_stream_capturing():
            return f"it has not been checked on {kind.device} for {kind}: make the call once before a graph is captured"
        with _lock:
            if kind not in CHECKS:
                _apart(kind)
                if (found := CHECKS.get(kind)) is not None and found.reason is not None:
                    warn(f"kernel 'triton_gpu' is not used for such calls: {found.reason}")
    return CHECKS[kind].reason if kind in CHECKS else f"there is no memory left on {kind.device} to check it"


def _apart(kind: Kind) -> None:
    """The check, in a thread of its own: modes, transforms and autocast of this thread do not apply to it."""
    began = perf_counter()
    thread = Thread(target=_check, args=(kind, began), daemon=True)
    thread.start()
    thread.join()


def _check(kind: Kind, began: float) -> None:
    reason: str | None = None
    try:
        device = torch.device(kind.device)
        with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            for what, error, limit in _errors(kind):
                if not error <= limit:  # or NaN
                    reason = (
                        f"differs from torch_blocks in {what} by {error:.2g}, at most {limit:.2g} is due to rounding"
                    )
                    break
    except torch.cuda.OutOfMemoryError:  # says nothing about the kernels: a later call checks them
        return
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        reason = f"its check on {kind.device} ({kind}) failed: {reason}; {SETTING}=0 omits the check"
    CHECKS[kind] = Check(kind.device, str(kind), 1e3 * (perf_counter() - began), reason)


def _errors(kind: Kind) -> Iterator[tuple[str, float, float]]:
    """What is compared, its error, and the largest one that rounding explains."""
    from headwise.kernels.triton_gpu import launch  # Triton is optional

    call = _small(kind)
    # No weight is dropped with a probability that is 0 in float32.
    exact = replace(call, q=call.q.double(), keys=call.k.double(), values=call.v.double(), statistics=(), dropout_p=0.0)
    found, true = launch.attend(call), TorchBlocks().run(exact)
    yield "the output", _error(found.out, true.out), OUTPUT[kind.dtype]
    yield "the log-sum-exp", _error(found.lse, true.lse), STATISTIC
    expected: dict[Statistic, Tensor] = {}
    if call.statistics:
        of = Matrix(exact.q, exact.k, true.lse, exact.rule)
        weights = TorchBlocks.reads.weights(of, *map(range, (*call.q.shape[:3], kind.keys)))
        for statistic in call.statistics:
            expected[statistic] = _expected(statistic, weights, true.lse)
            yield statistic.name, _error(found.statistics[statistic], expected[statistic]), STATISTIC
    terms = call.rule.terms(found.lse[..., :0])
    if kind.learned is not None:
        relative, bias, sinks = kind.learned
        wanted = [relative, sinks, *[bias] * len(terms.biases)]
        grad = _random(3, *found.out.shape, device=kind.device).to(kind.dtype)
        rows, exact_rows = (
            _of_rows(of_call, lse, {s: values[s] for s in call.statistics}) if kind.joint else None
            for of_call, lse, values in ((call, found.lse, found.statistics), (exact, true.lse, expected))
        )
        got = launch.gradients(call, found.out, found.lse, grad, wanted, rows)
        due = TorchBlocks().gradients(exact, true.out, true.lse, grad.double(), wanted, exact_rows)
        for what, x, y in zip(("q", "k", "v", "the table", "sinks", "the bias"), got, due, strict=False):
            if y is not None:
                # What a row shares has a gradient of 0, of which rounding is left.
                assert x is not None
                least = 0.1 * y.numel() ** 0.5
                yield f"the gradient of {what}", _error(x, y, least), GRADIENT[kind.dtype]
    if kind.dropout:
        yield from _errors_of_dropout(replace(call, dropout_p=0.5, statistics=()), kind)


def _of_rows(call: Call, lse: Tensor, values: Mapping[Statistic, Tensor]) -> RowGradients | None:
    """For random gradients of the log-sum-exp and of statistics with these values."""
    of_lse, *grads = (_random(20 + at, *lse.shape, device=str(lse.device)).to(lse) for at in range(len(values) + 1))
    return joined(call, lse, values, grads, of_lse)[0]


def _errors_of_dropout(call: Call, kind: Kind) -> Iterator[tuple[str, float, float]]:
    """That half of the weights are dropped, in every pass the same: ⟨dO, O⟩ = ⟨dV, V⟩ then, and ⟨dQ, Q⟩ = ⟨dK, K⟩."""
    from headwise.kernels.triton_gpu import launch

    ones = launch.attend(replace(call, values=torch.ones_like(call.v))).out.double()
    yield "the share of dropped weights", float((ones.mean() - 1.0).abs()) if bool(ones.std() > 0) else 1.0, DROPPED
    if kind.learned is None:
        return
    found, grad = launch.attend(call), _random(4, *call.q.shape[:3], kind.d_v, device=kind.device).to(kind.dtype)
    wanted = [False] * (2 + (kind.bias is not None))
    dq, dk, dv, *_ = launch.gradients(call, found.out, found.lse, grad, wanted)
    for pair, other in (((grad, found.out), (dv, call.v)), ((dq, call.q), (dk, call.k))):
        products = [
            (x.double() * y.double()).reshape(BATCH, kind.heads[1], -1) for x, y in (pair, other) if x is not None
        ]
        one, two = (x.sum(-1) for x in products)
        yield "gradients with dropout", float((one - two).norm() / products[0].norm()), DROPPED


def _small(kind: Kind) -> Call:
    """A small call of this kind."""
    (h, h_kv), n, m, device = kind.heads, kind.rows, kind.keys, kind.device
    q, k, v = (
        _random(seed, BATCH, heads, size, d, device=device).to(kind.dtype)
        for seed, (heads, size, d) in enumerate(((h, n, kind.d), (h_kv, m, kind.d), (h_kv, m, kind.d_v)))
    )
    whole, several, each = kind.mask
    mask: Mask = Everything() if whole else Causal()
    if several:
        mask &= Window(m // 3) | Sinks(2)
    if each:
        mask &= Lengths([m, m - 3])
    if kind.dense is not None:
        allowed = _random(5, *_shape(kind.dense, BATCH, h, n, m), device=device) > -1.0
        allowed[..., 0] = True
        mask &= Dense(allowed)
    table = None if kind.table is None else _random(6, h if kind.table else 1, n + m - 1, device=device).float()
    biases = () if kind.bias is None else (_random(7, *_shape(kind.bias, BATCH, h, n, m), device=device).float(),)
    sinks = _random(8, h, device=device).float() if kind.sinks else None
    terms = Terms(n, 3.0 if kind.capped else 0.0, table, biases, sinks)
    rule = Rule.of_terms(mask, kind.d**-0.5, Grid(BATCH, h, n, m), terms)
    wanted = tuple(_statistic(signature, at, m) for at, signature in enumerate(kind.statistics))
    return Call(q, k, v, rule, 1e-60 if kind.dropout else 0.0, 7, wanted)


def _statistic(signature: str, at: int, m: int) -> Statistic:
    if signature in PLAIN:
        return PLAIN[signature]
    if signature == RANGE:
        return RangeMass(at - 5, at + 9, relative=at % 2 == 0)
    of_keys = LargestOther if signature == OTHER else KeyWeights
    return of_keys(_random(9 + at, 1, m, device="cpu").float())


def _expected(statistic: Statistic, p: Tensor, lse: Tensor) -> Tensor:
    """The statistic of the weights p [b, h, n, m]."""
    n, m = p.shape[2:]
    keys = torch.arange(m, device=p.device)
    offset = keys - (torch.arange(n, device=p.device)[:, None] + m - n)
    if isinstance(statistic, RangeMass):
        at = offset if statistic.relative else keys.expand(n, m)
        return (p * ((at >= statistic.start) & (at < statistic.stop))).sum(-1)
    if isinstance(statistic, LargestOther):
        return p.masked_fill((statistic.weights.to(p)[:, None] <= 0) | (offset == 0), 0.0).amax(-1)
    if isinstance(statistic, KeyWeights):
        return (p * statistic.weights.to(p)[:, None, None]).sum(-1)
    mass, squares, far = p.sum(-1), p.square().sum(-1), offset.abs().double()
    mean = (p * far).sum(-1) / mass
    of: Mapping[Statistic, Tensor] = {
        LARGEST: (p.log() + lse[..., None]).amax(-1),
        ENTROPY: torch.special.entr(p).sum(-1),
        SQUARES: squares,
        CONCENTRATION: squares / mass.square(),
        DISTANCE: mean * mass,
        DISTANCE_VARIANCE: (p * (far - mean[..., None]).square()).sum(-1) / mass,
        COLUMN_MASS: p.sum(-2),
    }
    return of[statistic]


def _error(found: Tensor, expected: Tensor, least: float = 1e-30) -> float:
    """Relative, Frobenius."""
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(least))


def _random(seed: int, *shape: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(device)


def _like(size: int, real: int) -> int:
    """`size`, a multiple of 16 if the size of a call is: for such sizes Triton compiles other code."""
    return -(-size // 16) * 16 if real % 16 == 0 else size


def _axes(x: Tensor | None) -> tuple[bool, ...] | None:
    return None if x is None else tuple(size > 1 for size in x.shape)


def _shape(axes: tuple[bool, ...], *sizes: int) -> tuple[int, ...]:
    return tuple(size if own else 1 for own, size in zip(axes, sizes, strict=True))
