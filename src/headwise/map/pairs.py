"""Two maps of the same queries and keys, row by row: KL and Jensen–Shannon divergence, and cross-entropy with targets.

Both are read tile by tile, so that neither matrix is stored, and both may have gradients (`headwise.map.gradients`).
Where only one has them and both have the same mask, kernels compute products with them instead.
Each row is a distribution over the keys: what a learned sink takes of it is divided out.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor

from headwise.errors import ConfigError, DTypeError, ShapeError
from headwise.kernels import KERNELS, candidates, read
from headwise.kernels.graph import in_graph
from headwise.kernels.reads import Matrix, Reads
from headwise.map.gradients import Leaf, Learned, Shares, Side, attached, row_values
from headwise.map.index import Method, reading
from headwise.map.shares import RowFunctions, resolved
from headwise.rule import without_masked_queries
from headwise.rule.tiles import log_sums

Heads = Sequence[int | Sequence[int]] | None  # for each head of a map, that of another, or those whose mean it is
Sparse = tuple[Tensor, Tensor]  # the keys [b or 1, h or 1, n, count], −1 for none, and their weights
TOLERANCE = 1e-6  # of the sum of a row of targets


class Divergence:
    """A number per row of a student's tiles and those of a target, summed over the keys.

    kind: "kl", Σ t ln(t / s); "js", half of that of each from their mean; "cross_entropy", −Σ t ln s. shares [h, h_t]:
    the part of each of the target's heads in that of a head here; None if they are the same heads. renormalized:
    targets are divided by their sums over the keys that the student may attend to. empty: whether these may be 0.
    """

    def __init__(
        self, kind: str, shares: Tensor | None, targets: "Targets | None" = None, *, renormalized: bool = False,
        empty: bool = False,
    ) -> None:  # fmt: skip
        self.kind, self.shares, self.targets, self.renormalized, self.empty = kind, shares, targets, renormalized, empty
        self.name = kind

    def partial(self, student: Leaf, *teacher: Leaf) -> Tensor:
        """The sum over a tile's keys, the target's weight on keys that the student may attend to, and on others: [b, h,
        r, 3]."""
        hidden = student.log_weights == -torch.inf
        log_s = student.log_weights.masked_fill(hidden, 0.0)
        if self.targets is not None:
            t = self.targets.of(student)
            log_t = t.masked_fill(t == 0, 1.0).log()
        elif self.shares is None:
            t, log_t = teacher[0].weights, teacher[0].log_weights
            log_t = log_t.masked_fill(log_t == -torch.inf, 0.0)
        else:
            t = torch.einsum("st,btrc->bsrc", self.shares.to(teacher[0].lse), teacher[0].weights)
            log_t = t.masked_fill(t == 0, 1.0).log()
        seen = t.masked_fill(hidden, 0.0)
        if self.kind == "cross_entropy":
            x = -seen * log_s
        elif self.kind == "kl":
            x = seen * (log_t - log_s)
        else:
            s = student.weights
            mean = (s + t) / 2
            log_m = mean.masked_fill(mean == 0, 1.0).log()
            x = (t * (log_t - log_m) + s * (log_s - log_m)) / 2
        return torch.stack((x.sum(-1), seen.sum(-1), (t - seen).sum(-1)), -1)

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        return one + other

    def value(self, total: Tensor, lse: Tensor) -> Tensor:
        x, mass, _ = total.unbind(-1)
        if not self.renormalized:
            return x
        mass = mass.masked_fill(mass == 0, 1.0)
        return x / mass - mass.log()

    def counted(self, total: Tensor, lse: Tensor) -> Tensor:
        return lse != -torch.inf

    def check(self, total: Tensor, lse: Tensor) -> None:
        """Raise ConfigError naming the first query whose target is no distribution over the student's keys."""
        mass, beside = total[..., 1], total[..., 2]
        if self.targets is not None:
            beside = torch.maximum(beside, 1.0 - mass - TOLERANCE) * (self.targets.sums > 0)
        if not (self.kind == "js" or self.renormalized) and (found := _first(beside > 0)) is not None:
            raise ConfigError(
                "{read}: the target of query {row} (batch entry {batch}, head {head}) has weight on keys that are "
                "masked in this map; mask them in the target too",
                read=self.kind, batch=found[0], head=found[1], row=found[2],
            )  # fmt: skip
        if not (self.kind == "js" or self.empty) and (found := _first((mass == 0) & (lse != -torch.inf))) is not None:
            raise ConfigError(
                "{read}: the target of query {row} (batch entry {batch}, head {head}) sums to 0; expected weights of "
                "the keys that it may attend to",
                read=self.kind, batch=found[0], head=found[1], row=found[2],
            )  # fmt: skip


def _first(bad: Tensor) -> list[int] | None:
    """Batch entry, head and query of the first True of a boolean [b, h, n]."""
    places: list[list[int]] = bad.nonzero()[:1].tolist()
    return places[0] if places else None


class Targets:
    """Targets given as tensors: dense, [n, m] or broadcasting to [b, h, n, m], or `Sparse`. Rows are divided by their
    sums."""

    def __init__(self, given: Tensor | Sparse, shape: tuple[int, int, int, int], device: torch.device) -> None:
        self.keys: Tensor | None = None
        if isinstance(given, Tensor):
            self.weights = _spread("targets", given, shape, shape[3])
        else:
            try:
                keys, weights = given
                size = keys.shape[-1]
            except (TypeError, ValueError, AttributeError, IndexError):
                raise DTypeError(
                    f"cross_entropy(targets): expected a map, a tensor, or (keys, weights), got {type(given).__name__}"
                ) from None
            self.weights = _spread("weights", weights, shape, size)
            if keys.is_floating_point():
                raise DTypeError(f"cross_entropy: expected whole numbers as keys, got {keys.dtype}")
            self.keys = _spread("keys", keys, shape, size).long().to(device)
            if bool(((self.keys < -1) | (self.keys >= shape[3])).any()):
                raise ShapeError(f"cross_entropy: expected keys from 0 to {shape[3] - 1}, or −1 for none")
            self.weights = self.weights.to(device).masked_fill(self.keys < 0, 0.0)
        self.weights = self.weights.detach().to(device)
        if not self.weights.is_floating_point() or not bool((self.weights >= 0).all()):
            raise DTypeError("cross_entropy: expected weights of targets that are floating point numbers, at least 0")
        self.sums = self.weights.sum(-1, dtype=torch.float64)  # [b, h, n]

    def of(self, tile: Leaf) -> Tensor:
        """The targets of a tile, [b, h, r, c]."""
        rows, (first, stop) = slice(*tile.rows), tile.cols
        sums = self.sums[:, :, rows, None].to(tile.lse.dtype)
        weights = self.weights[:, :, rows] if self.keys is not None else self.weights[:, :, rows, first:stop]
        weights = weights.to(tile.lse.dtype) / sums.masked_fill(sums == 0, 1.0)
        if self.keys is None:
            return weights
        keys = self.keys[:, :, rows] - first
        inside = (keys >= 0) & (keys < stop - first)
        room = torch.zeros(tile.shape, dtype=weights.dtype, device=weights.device)
        return room.scatter_add_(-1, keys.clamp(0, stop - first - 1), weights * inside)


def _spread(name: str, given: Any, shape: tuple[int, int, int, int], last: int) -> Tensor:
    """A tensor as [b, h, n, last], without a copy."""
    full = (*shape[:3], last)
    if not isinstance(given, Tensor):
        raise DTypeError(f"cross_entropy: expected a tensor as {name}, got {type(given).__name__}")
    try:
        return given.expand(full)
    except RuntimeError:
        raise ShapeError(
            f"cross_entropy: {name} of shape {tuple(given.shape)} do not broadcast to {list(full)}"
        ) from None


def among_keys(one: Learned) -> Learned:
    """The map without learned sinks: rows that sum to 1 over the keys."""
    scores = tuple(s for s in one.rule.scores if s.terms(one.rule.grid, one.lse[..., :0]).sinks is None)
    if len(scores) == len(one.rule.scores):
        return one
    rule = replace(one.rule, scores=scores)
    with torch.no_grad():
        lse = log_sums(one.q.detach().to(one.lse.dtype), one.k.detach().to(one.lse.dtype), one.lse, rule)
    return replace(one, rule=rule, lse=lse)


def shares_of(heads: Heads, h: int, of: int, device: torch.device) -> Tensor | None:
    """The grouping of heads as shares [h, of]; ConfigError if it is none."""
    if heads is None:
        if h != of:
            raise ConfigError(
                "the maps have {h} and {of} heads; give heads=, for each head of this map the one of the other that it "
                "is compared with, or a list of those whose mean weights it is",
                h=h, of=of,
            )  # fmt: skip
        return None
    given = heads.tolist() if hasattr(heads, "tolist") else heads
    groups = [list(one) if isinstance(one, Sequence) else [int(one)] for one in given]
    if len(groups) != h or any(not group or not all(0 <= i < of for i in group) for group in groups):
        raise ConfigError(f"heads={heads!r}: expected {h} heads of the other map, from 0 to {of - 1}, or lists of them")
    found = torch.zeros(h, of, dtype=torch.float64)
    for row, group in zip(found, groups, strict=True):
        for i in group:
            row[i] += 1 / len(group)
    return found.to(device)


def comparing(method: Method) -> Method:
    """`reading`, which refuses a map whose q or k has gradients that it has not: as a loss it would train nothing."""
    read = reading(method)

    @wraps(method)
    def wrapped(self: Any, *args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled() and self._cut:
            raise ConfigError(
                "{read}: this map has no gradients, and q or k has; return it by attend(…, return_map=True, "
                "differentiable=True), or take map.detach() for the number alone",
                read=method.__name__,
            )
        return read(self, *args, **options)

    return cast(Method, wrapped)


class Mixed(Shares):
    """Of Σ_j t_ij ln p_ij, up to its sign and what is constant, for constant t: the derivative by the scores is p − t,
    so the gradients are products with both maps, if the scores of p are products of q and k alone.

    mixed: t @ k, [b, h, n, d]; kernels: those named in the calls of both maps.
    """

    def __init__(self, mixed: Tensor, kernels: Sequence[str]) -> None:
        self.mixed, self.kernels = mixed, kernels

    def pull_back(self, sides: Sequence[Side], grad: Tensor, operand: Tensor | None) -> None:
        side = sides[0]
        p, t = (Matrix.of_all_keys(one.q, one.k, one.lse, one.rule) for one in sides)
        grad = (side.rule.scale * grad).masked_fill(side.lse == -torch.inf, 0.0)[..., None]
        side.dq += grad * (read("times", p, side.k, kernel=self.kernels[0])[0] - self.mixed)
        y = grad * without_masked_queries(side.q, side.lse)
        dk, less = (read("transposed_times", x, y, kernel=of)[0] for x, of in zip((p, t), self.kernels, strict=True))
        side.dk += (dk - less).unflatten(1, (side.k.shape[1], -1)).sum(2)


def _by_products(kind: str, one: Any, teacher: Any) -> Tensor | None:
    """`beside` for a constant teacher with the same keys in all rows: of its terms, only Σ_j t_ij S_ij depends on both
    maps, and that is scale · q_i · (t @ k)_i. None where it is not, or float32 might not resolve the scores; and for
    rows without a target, which `Divergence.check` names."""
    graph, rule, other = torch.is_grad_enabled(), one.rule, teacher.rule
    masks = rule.mask is other.mask or (rule.mask.value and rule.mask == other.mask)
    if kind == "js" or in_graph() or rule.scores or rule.grid != other.grid or not masks:
        return None
    if (graph and teacher.differentiable) or other.terms(teacher.tensors().lse[..., :0]).sinks is not None:
        return None
    given, t = one.tensors(), teacher.detach()
    if given.lse.dtype != t.lse.dtype or not all(resolved(x._matrix) and _has_products(x.named) for x in (one, t)):
        return None
    if bool(((t.lse == -torch.inf) & (given.lse != -torch.inf)).any()):
        return None
    one._look()
    with torch.no_grad():
        k = one.k if one.k.shape[1] == t.k.shape[1] else one.k.repeat_interleave(one.shape[1] // one.k.shape[1], 1)
        mixed = t @ k
        value = given.lse - rule.scale * (one.q.double() * mixed).sum(-1)
        if kind == "kl":
            value -= t.measure("entropy", rows=True).rows["entropy"]
        value = value.masked_fill_(given.lse == -torch.inf, 0.0).to(given.lse.dtype)
    if not (graph and one.differentiable):
        return value
    return attached(value, Mixed(mixed, (one.named, t.named)), given, t.tensors())


def _has_products(kernel: str) -> bool:
    """Whether maps of calls with this kernel multiply from both sides."""
    return any(type(KERNELS[name].reads).transposed_times is not Reads.transposed_times for name in candidates(kernel))


def beside(one: Any, other: Any, kind: str, heads: Heads, renormalized: bool = False, empty: bool = False) -> Tensor:
    """The number of each row of a map and another map, or targets, [b, h, n]; with a graph if one has it."""
    if hasattr(other, "with_exact"):
        (b, h, n, m), theirs = one.shape, other.shape
        if (theirs[0], *theirs[2:]) != (b, n, m):
            raise ShapeError(
                f"{kind}: the other map has shape {theirs}; expected batch, queries and keys as of {one.shape}"
            )
        grouped = shares_of(heads, h, theirs[1], one.q.device)
        if grouped is None and not renormalized and (found := _by_products(kind, one, other)) is not None:
            return found
        of = Divergence(kind, grouped, renormalized=renormalized, empty=empty)
        maps = [among_keys(one.with_exact()), among_keys(other.with_exact())]
        if maps[0].lse.dtype != maps[1].lse.dtype:
            maps = [replace(each, lse=each.lse.double()) for each in maps]
    elif kind != "cross_entropy":
        raise DTypeError(f"{kind}: expected another attention map, got {type(other).__name__}")
    else:
        of, maps = (
            Divergence(kind, None, Targets(other, one.shape, one.q.device), empty=empty),
            [among_keys(one.with_exact())],
        )
    dtype = torch.promote_types(one.q.dtype, torch.float32)
    with torch.no_grad():
        values = row_values(of, maps).to(dtype)
    if not torch.is_grad_enabled() or not (one.differentiable or getattr(other, "differentiable", False)):
        return values
    return attached(values[None], RowFunctions([of]), *maps)[0]
