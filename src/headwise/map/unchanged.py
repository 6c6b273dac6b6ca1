"""Notices that tensors which a map refers to without a copy were changed in place.

PyTorch counts the in-place changes of a tensor's memory, by which autograd checks the tensors that it has saved. Noting
a count costs nothing. But all tensors that share the memory share it, so a static KV cache that is written on raises it
although the keys of the map are the same. Keys that had been written to before are therefore looked at where their
count has changed: some are kept, and must have the same bits; and the weights of a query, which follow from all of its
keys and the log-sum-exp that the map stores, must still add up to one.

PyTorch counts no changes of tensors of `torch.inference_mode`, nor those made through `.data`, NumPy, CUDA graphs or
other libraries' kernels. So the weights of the last queries are added up before the first read of every map; changes
that they do not show go unnoticed. What a compiled function returns is noted when it is first read.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.errors import ConfigError, warn
from headwise.kernels.graph import has_no_numbers, in_graph
from headwise.kernels.quantized import Vectors
from headwise.masks import Span, State
from headwise.masks.given import take_tensors
from headwise.rule import Rule
from headwise.rule.tiles import stream
from headwise.wording import tr

PROBES = 64  # keys of each head that are kept, evenly spaced
PAIRS = 1 << 18  # weights of each head, at most, that are added up: those of the last queries if there are more
FIRST_PAIRS = 1 << 13  # the same before the first read, if no change is known
LARGE = 1e4  # logits of float32 above this are reported
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CALLED = {
    "q": "q", "k": "k", "mask": tr("a tensor of its mask"), "score": tr("a tensor of its scores"),
    "any": tr("one of its inputs"),
}  # fmt: skip


class Original(NamedTuple):
    """A tensor as it was. name: what it is, a key of CALLED. version: PyTorch's count of the changes of its memory.
    probes: some of its rows, if it may be read after its count has changed; else None."""

    name: str
    tensor: Tensor
    version: int
    probes: Tensor | None = None


class Unchanged:
    """The inputs of a map as they were when it was made; of k only keys that a query may attend to matter. whole: these
    are all keys of the rule; else every change that PyTorch counts is one. keep: what to keep of a map, in errors."""

    def __init__(self, q: Tensor, k: Vectors, rule: Rule, *, whole: bool = True, keep: str = "map.clone()") -> None:
        self._originals: list[Original] = []
        self._rule, self._whole, self._keep = rule, whole, keep
        self._add("q", [q])
        if not rule.mask.value:
            self._add("mask", take_tensors(rule.mask)[1])
        for score in rule.scores:
            held: list[Tensor] = []
            score.mapped(lambda x, held=held: held.append(x) or x)  # type: ignore[misc]
            self._add("score", held)
        # The last, since the others must be the same where its weights are added up.
        self._add("k", [k] if isinstance(k, Tensor) else [k.steps, k.scales])

    def _add(self, name: str, tensors: Iterable[Tensor]) -> None:
        for x in tensors:
            if x.is_inference() or has_no_numbers(x):
                continue
            written = self._whole and name == "k" and x._version > 0 and type(x) is Tensor
            self._originals.append(Original(name, x, x._version, _probes(x) if written else None))

    def check(self, still: Callable[[], bool]) -> None:
        """Raise ConfigError naming the tensor that has been changed. still: whether the keys still fit the log-sum-exp,
        `add_up`; called only if their count has changed."""
        for at, (name, x, version, probes) in enumerate(self._originals):
            if x._version == version:
                continue
            now = x._version
            if probes is None or self._moved(x, probes) or not still():
                raise _changed(name, self._keep)
            self._originals[at] = Original(name, x, now, probes)

    def _moved(self, x: Tensor, probes: Tensor) -> bool:
        """Whether one of the kept keys is another one now, and a query of its batch entry may attend to it."""
        different = (_probes(x) != probes).any(-1).any(1)  # [b, probes]
        moved = different.any(0)
        for key, where in zip(_places(x.shape[2], x.device)[moved].tolist(), different.T[moved], strict=True):
            rows, cols = Span(0, self._rule.grid.n), Span(key, key + 1)
            state = self._rule.mask.state(rows, cols, self._rule.grid)
            if state is State.MIXED:
                where = where & self._rule.allowed(rows, cols, x.device).flatten(1).any(1)
            if state is not State.EMPTY and bool(where.any()):
                return True
        return False


def noted(q: Tensor, k: Vectors, rule: Rule, *, whole: bool = True, keep: str = "map.clone()") -> Unchanged | None:
    """The inputs of a map as they are now, by the arguments of `Unchanged`; None while PyTorch records operations or
    wraps tensors."""
    return None if in_graph() else Unchanged(q, k, rule, whole=whole, keep=keep)


def check_sums(q: Tensor, k: Tensor, lse: Tensor, rule: Rule, rounding: float) -> None:
    """Check a map before its first read. Raises ConfigError if its weights do not add up, by the arguments of `add_up`;
    warns if logits are so large that float32 no longer shows differences between them."""
    if not add_up(q, k, lse, rule, FIRST_PAIRS, rounding):
        raise _changed("any", "map.clone()")
    remark_large(
        lse,
        "its rows sum to 1, but keys whose logits differ by less cannot be told apart; for exact weights pass q, k and "
        "v in float64",
    )


def remark_large(lse: Tensor, so: str) -> None:
    """Warn if logits are so large that float32 no longer shows differences between them; `so`: what follows."""
    if lse.dtype == torch.float64:
        return
    largest = float(torch.where(lse.isfinite(), lse.abs(), 0.0).max()) if lse.numel() else 0.0
    if largest > LARGE:
        steps = largest * 2.0**-23
        warn(f"this attention map has logits of about {largest:.1g}, which float32 resolves to {steps:.1g}: {so}")


@torch.no_grad()
def add_up(q: Tensor, k: Tensor, lse: Tensor, rule: Rule, pairs: int = PAIRS, rounding: float = 0.0) -> bool:
    """Whether the weights of the last queries [b, h, n, d] over all keys, with that of a sink, add up to one, or to
    zero if fully masked; NaN does not count. pairs: the most weights of a head; rounding: relative error of the
    keys."""
    n, m = rule.grid.n, rule.grid.m
    rows = Span(max(0, n - max(1, pairs // max(1, m))), n)
    lse = lse[:, :, slice(*rows)]
    q, k = (x.to(lse.dtype) for x in (q[:, :, slice(*rows)], k))
    total = torch.zeros_like(lse)
    for tile in stream(q, k, lse, rule.rows(rows)):
        total[:, :, slice(*tile.rows)] += tile.mass + tile.sink_weight * tile.first
    expected = (lse > -torch.inf).to(lse)
    eps = torch.finfo(lse.dtype).eps
    off = (total - expected).abs() - 1e-3 - 16 * eps * lse.abs().nan_to_num(posinf=0.0, neginf=0.0)
    off = off.masked_fill(~(lse < torch.inf), 0.0)
    if not bool((off > 0).any()):
        return True
    # Scores may be sums of large terms that cancel.
    sizes = torch.linalg.vector_norm(k, dim=-1).amax(-1).repeat_interleave(q.shape[1] // k.shape[1], 1)
    sizes = torch.linalg.vector_norm(q, dim=-1) * sizes[..., None] * abs(rule.scale)
    terms, largest = rule.rows(rows).terms(lse), torch.zeros_like(lse)
    for tile in stream(q, k, lse, rule.rows(rows)) if terms.relative is not None or terms.biases else ():
        added = sum(x.abs() for x in terms.added(tile.rows, tile.cols)) * (tile.weights > 0)
        here = slice(*tile.rows)
        largest[:, :, here] = torch.maximum(largest[:, :, here], added.amax(-1))
    sizes += largest
    return not bool((off > (16 * eps + rounding) * sizes).any())


def _places(count: int, device: torch.device) -> Tensor:
    """Which of `count` rows are kept: evenly spaced, the last among them."""
    return torch.arange(count - 1, -1, -max(1, count // PROBES), device=device)


def _probes(x: Tensor) -> Tensor:
    """Some rows of x [b, h, m, d], copied, as bits; rows of one number each if they are scales."""
    rows = x.detach().index_select(2, _places(x.shape[2], x.device))
    return rows.view(BITS[x.element_size()])


def _changed(name: str, keep: str) -> ConfigError:
    return ConfigError(
        "this attention map cannot be read any more: {what}, or a tensor that shares its memory, was changed in place "
        "since. A map refers to its inputs without a copy: read it before, or keep {keep}",
        what=CALLED[name],
        keep=keep,
    )
