"""What was done to scores before the softmax: scale, soft cap, biases, and the shortest mask that allows the same."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.map.arguments import of_boolean, of_padding
from headwise.masks import Causal, Documents, Grid, Mask, Span, Window
from headwise.masks.given import both
from headwise.models.recognise.axes import Axes
from headwise.models.recognise.tracked import Lost, Step
from headwise.scores import Bias, RelativeBias, Score

CELLS = 1 << 21  # compared at once

Rows = Callable[[Span], Tensor]  # which keys some queries may attend to, boolean [b or 1, h or 1, r, m]
Sizes = tuple[int, int, int, int]


def mask_of_rows(rows: Rows, sizes: Sizes, whole: Callable[[], Tensor] | None = None) -> Mask | None:
    """`Causal`, `Window`, `Lengths`, `Documents` or a combination if it allows exactly the same as these rows (`whole`:
    all of them), else `Dense`, which alone takes n·m numbers; None if all is allowed. sizes: b, h, n, m."""
    b, _, n, m = sizes
    if 1 < n <= m and allows(Causal(), rows, sizes):  # the most frequent one: a pass that ends at the first difference
        return Causal()
    found = _Found(rows, sizes)
    if found.everything:
        return None
    for mask in found.candidates():
        if mask is not None and allows(mask, lambda span: rows(span)[:, :1], (b, 1, n, m)):
            return mask
    allowed = whole() if whole is not None else torch.cat([rows(span) for span in blocks(sizes)], 2)
    allowed = allowed[: 1 if found.same_batch else None, : 1 if found.same_heads else None]
    return of_boolean(allowed)


class Placed(NamedTuple):
    """A mask of the first `keys` keys, None for all, and whether it places the queries on the key axis. Later keys are
    hidden from every query, which is aligned to the end of those that are left."""

    mask: Mask | None
    keys: int
    known: bool

    def hides_alike(self, rows: Rows, sizes: Sizes) -> bool:
        """Whether rows allow exactly the same; False for no mask."""
        if self.mask is None:
            return False
        b, h, n, m = sizes
        if self.keys < m and any(bool(rows(span)[..., self.keys :].any()) for span in blocks(sizes)):
            return False
        return allows(self.mask, _first_keys(rows, self.keys), (b, h, n, self.keys))


def placed_mask(rows: Rows, sizes: Sizes, whole: Callable[[], Tensor], *, cut: bool = True) -> Placed:
    """As `mask_of_rows`, for queries of which each may see one key more than the one before, with the last one's at its
    last key, such as a step with a cache of fixed length; then keys may be left out (`cut`)."""
    b, h, n, m = sizes
    if n >= m:
        return Placed(mask_of_rows(rows, sizes, whole), m, n == m)
    if n > 1 and allows(Causal(), rows, sizes):
        return Placed(Causal(), m, True)
    seen = torch.cat([rows(span).flatten(0, 1).any(0) for span in blocks(sizes)])
    last = (seen * torch.arange(1, m + 1, device=seen.device)).amax(-1) - 1  # of each query; −1 if there is none
    first = last - torch.arange(n, device=last.device)  # where the first query is, if this one is at its last key
    start = int(first[last >= 0].max()) if bool((last >= 0).any()) else m
    each = bool((first == start).all())
    keys = start + n
    if cut and n <= keys < m:
        mask = mask_of_rows(_first_keys(rows, keys), (b, h, n, keys), lambda: whole()[..., :keys])
        if each or (mask is not None and mask.placed):
            return Placed(mask, keys, True)
    mask = mask_of_rows(rows, sizes, whole)
    return Placed(mask, m, (each and keys == m) or (mask is not None and mask.placed))


def _first_keys(rows: Rows, keys: int) -> Rows:
    return lambda span: rows(span)[..., :keys]


class _Found:
    """What one pass over the rows shows."""

    def __init__(self, rows: Rows, sizes: Sizes) -> None:
        _, _, n, m = sizes
        self.sizes, self.everything, self.same_batch, self.same_heads = sizes, True, True, True
        first, last, none, joined, seen = [], [], [], [], None
        for span in blocks(sizes):
            allowed = rows(span)
            anywhere = allowed.any(2).any(1)
            seen = anywhere if seen is None else seen | anywhere
            self.everything &= bool(allowed.all())
            self.same_batch &= len(allowed) == 1 or bool((allowed == allowed[:1]).all())
            self.same_heads &= allowed.shape[1] == 1 or bool((allowed == allowed[:, :1]).all())
            if not self.same_heads:
                continue  # no mask but `Dense` is likely
            here = allowed[:, 0]
            bits = here.to(torch.uint8)
            first.append(bits.argmax(-1))
            last.append(m - 1 - bits.flip(-1).argmax(-1))
            none.append(~here.any(-1))
            before = (torch.arange(*span, device=here.device) + m - n - 1).clamp(0, m - 1)
            joined.append(here.gather(-1, before[None, :, None].expand(len(here), -1, 1))[..., 0])
        if self.same_heads and seen is not None:
            self.first, self.last, self.none, self.joined = (torch.cat(x, 1) for x in (first, last, none, joined))
            self.keys = seen  # those that any query may attend to, [b or 1, m]

    def candidates(self) -> Iterator[Mask | None]:
        """Masks to compare, the simplest first: of positions and documents, and of padding."""
        b, _, n, m = self.sizes
        if not self.same_heads:
            return
        band = self._band() if n <= m else None
        padding = of_padding(self.keys.expand(b, -1), n)
        yield padding
        if band is not None:
            yield band
            yield both(band, padding)
        if n == m:
            # Documents that begin where a query may not attend to the key before its own; −1 for fully masked queries.
            ids = (~self.joined).cumsum(-1)
            documents = Documents((ids - ids[:, :1]).masked_fill(self.none, -1))
            yield documents
            yield documents & Causal()
            if band is not None:
                yield documents & band

    def _band(self) -> Mask | None:
        """The mask of keys no farther before and after their query than any that is allowed; None if that is all."""
        n, m = self.sizes[2:]
        position = torch.arange(n, device=self.none.device) + m - n
        seen = ~self.none
        if not bool(seen.any()):
            return None
        left = int((position - self.first)[seen].max())
        right = int((self.last - position)[seen].max())
        if left < 0 or right < 0:
            return None
        if left < m - 1:
            return Window(left + 1, right) if right else Causal() & Window(left + 1)
        return Window(m, right) if 0 < right < n - 1 else None if right else Causal()


def blocks(sizes: Sizes) -> Iterator[Span]:
    """The queries, some at a time."""
    b, _, n, m = sizes
    step = max(1, CELLS // max(1, b * m))
    for start in range(0, n, step):
        yield Span(start, min(start + step, n))


def allows(mask: Mask, rows: Rows, sizes: Sizes) -> bool:
    """Whether rows allow exactly what the mask allows."""
    for span in blocks(sizes):
        allowed = rows(span)
        i, j = (torch.arange(*one, device=allowed.device) for one in (span, (0, sizes[3])))
        expected = mask.allowed(i, j, Grid(*sizes))
        shape = torch.broadcast_shapes(expected.shape, allowed.shape)
        if not same(expected.expand(shape), allowed.expand(shape)):
            return False
    return True


def of_distance(rows: Callable[[Span], tuple[Tensor, Tensor | None]], sizes: Sizes) -> RelativeBias | None:
    """Numbers of pairs of queries and keys as numbers of their distances, if those of all pairs that are not hidden are
    the same bits; else None. rows: returns the numbers of some queries [b or 1, h or 1, r, m], 0 where they are hidden,
    and which are."""
    n, m = sizes[2:]

    def constant(span: Span) -> bool:
        values, _ = rows(Span(max(0, span.start - 1), span.stop))
        same_batch = len(values) == 1 or bool((values == values[:1]).all())
        return same_batch and torch.equal(values[:, :, 1:, 1:], values[:, :, :-1, :-1])

    if n <= m and all(
        map(constant, blocks(sizes))
    ):  # hidden ones too, as after each query: one comparison of each pair
        last, first = (rows(span)[0][0, :, 0] for span in (Span(n - 1, n), Span(0, 1)))
        return _relative(torch.cat((last[:, : n - 1], first), -1), m)
    table = known = None
    for span in blocks(sizes):
        values, hidden = rows(span)
        if table is None or known is None:
            table = values.new_zeros(values.shape[1], n + m - 1)
            known = torch.zeros_like(table, dtype=torch.bool)
        seen = torch.ones_like(values, dtype=torch.bool) if hidden is None else ~hidden.expand_as(values)
        for i in range(span.size):
            here = slice(n - 1 - span.start - i, n - 1 - span.start - i + m)
            for x, new in zip(values[:, :, i], seen[:, :, i], strict=True):
                if bool(((x != table[:, here]) & new & known[:, here]).any()):
                    return None
                table[:, here] = torch.where(new, x, table[:, here])
                known[:, here] |= new
    return None if table is None else _relative(table, m)


def _relative(table: Tensor, m: int) -> RelativeBias:
    return RelativeBias(table[:1] if bool((table == table[:1]).all()) else table, 1 - m)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two boolean tensors have the same shape and values; eight values at a time where memory allows."""
    if one.shape != other.shape:
        return False
    if one.numel() % 8 == 0 and all(x.is_contiguous() and x.storage_offset() % 8 == 0 for x in (one, other)):
        one, other = (x.view(-1).view(torch.int64) for x in (one, other))
    return torch.equal(one, other)


KEPT = 1 << 20  # numbers of a mask that are kept to be compared
HIDES = -9000.0  # exp of this is 0 in every dtype: an addition of so little is a mask
FILLS = -1000.0  # so is this, if all scores of hidden keys are set to it, or it alone is added to any
BIASES = -1000.0  # biases beside a mask are not less


@dataclass
class Changes:
    """What was done to the scores of one call."""

    scale: float = 1.0  # number on q·k
    cap: float | None = None  # of a tanh soft cap, or None
    q_factor: Tensor | None = None  # q_factor, k_factor: [b or 1, h or 1, n or m, 1], or None
    k_factor: Tensor | None = None
    biases: list[Tensor] = field(default_factory=list)  # what is added, each [b or 1, h or 1, n or 1, m or 1]
    hidden: list[Tensor] = field(default_factory=list)  # what is masked, likewise boolean
    masks: list[Mask] = field(default_factory=list)  # masks, scores: those of a function that defines them
    zeroed: list[Tensor] = field(default_factory=list)  # where scores were multiplied by 0, boolean
    scores: list[Score] = field(default_factory=list)
    # Of other layers: sizes, device and whether keys may be cut; what is hidden, if that is small; and its mask
    named: list[tuple[tuple[Sizes, torch.device, bool], Tensor | None, Placed]] = field(default_factory=list)

    def mask(self, axes: Axes, *, cut: bool) -> Placed:
        """All that is masked, as the shortest mask. cut: whether keys hidden from all queries may be left out."""
        n, m = axes.sizes[2:]
        given = any(one.placed for one in self.scores)  # such as ALiBi
        known = n == m or given or any(one.placed for one in self.masks)
        if not self.hidden:
            return Placed(both(*self.masks), m, known)
        hidden = reduce(torch.logical_or, self.hidden)
        whole = hidden.expand(-1, -1, n, m)
        form = axes.sizes, hidden.device, cut and not (self.masks or given)

        def rows(span: Span) -> Tensor:
            return ~whole[:, :, span.start : span.stop]

        for same_form, kept, found in self.named:
            if same_form == form and (same(kept, hidden) if kept is not None else found.hides_alike(rows, axes.sizes)):
                break
        else:
            found = placed_mask(rows, axes.sizes, lambda: ~whole, cut=form[2])
            copy = hidden.clone() if hidden.numel() <= KEPT else None  # the code may change its own
            self.named.append((form, copy, found))
        return Placed(both(*self.masks, found.mask), found.keys, known or found.known)

    def added(self, n: int, keys: int) -> Iterator[Score]:
        """The biases of the first keys: numbers of distances where they are such, else of pairs. Those that need
        gradients are not read as distances: they may be equal now, and differ after a step."""
        hidden = reduce(torch.logical_or, self.hidden) if self.hidden else None
        for bias in (one[..., :keys] for one in self.biases):

            def rows(span: Span, bias: Tensor = bias) -> tuple[Tensor, Tensor | None]:
                values = bias[:, :, span.start : span.stop]
                if hidden is None:
                    return values, None
                of_rows = hidden[..., :keys].expand(-1, -1, n, -1)[:, :, span.start : span.stop]
                shape = torch.broadcast_shapes(values.shape, of_rows.shape)
                return values.expand(shape), of_rows.expand(shape)

            whole = bias.shape[2:] == (n, keys) and not bias.requires_grad and n > 1
            yield (of_distance(rows, (*bias.shape[:2], n, keys)) if whole else None) or Bias(bias)

    def take(self, step: Step, axes: Axes) -> None:
        """Include the next step."""
        kind, value = step.kind, step.value
        if isinstance(value, Tensor) and value.numel() == 1 and kind in ("times", "add") and not value.requires_grad:
            kind, value = {"times": ("mul", float(value)), "add": ("shift", 0.0)}[kind]
        if kind == "mul":
            self._multiply(float(value))
        elif kind == "mask":
            self.masks.append(value)
        elif kind == "score":
            self.scores.append(value)
        elif kind == "tanh":
            before = (
                "biased" if self.biases else "masked" if self.hidden or self.zeroed else "capped" if self.cap else ""
            )
            if before:
                raise Lost(f"scores are {before} before a soft cap; headwise adds biases after it, then masks")
            self.cap = 1.0
        elif kind == "fill":
            if not step.coef <= FILLS:
                raise Lost(f"masked scores are set to {step.coef:g}, which does not mask them")
            self.hidden.append(axes.matrix(value, step.layout).bool())
        elif kind == "add":
            self._add(axes.matrix(value, step.layout), step.coef)
        elif kind == "times":
            self._times(axes.matrix(value, step.layout))

    def _multiply(self, number: float) -> None:
        if not number > 0:
            raise Lost(f"scores are multiplied by {number:g}")
        if self.cap is None:
            self.scale *= number
        else:
            self.cap *= number
        self.biases = [bias * number for bias in self.biases]

    def _add(self, values: Tensor, coef: float) -> None:
        values = values if coef == 1 else values * coef
        if not values.is_floating_point():
            values = values.float()
        hidden = values <= HIDES
        if not bool(hidden.any()):
            hidden = _of_one_number(values)
        if bool(hidden.any()):
            least, most = values[hidden].aminmax()
            floor = torch.finfo(values.dtype).min / 4
            # Different numbers are biases that reach so low, unless nothing is left of scores beside them in float32,
            # or nothing is near them: masks of −1e9 or −1e4 that were added to each other, or to a bias, are a mask.
            rest = values[~hidden]
            apart = bool(rest.numel() and rest.min() > BIASES)
            if least != most and most > max(floor, -1e8) and not apart:
                hidden = torch.zeros_like(hidden)
        if bool(hidden.any()):
            self.hidden.append(hidden)
            values = values.masked_fill(hidden, 0.0)
        # A number for each query changes no weight.
        if values.shape[3] > 1 and (values.requires_grad or bool((values != 0).any())):
            self.biases.append(values)

    def _times(self, values: Tensor) -> None:
        if not values.requires_grad and bool(((values == 0) | (values == 1)).all()):
            self.zeroed.append(values == 0)
        elif self.biases or self.cap is not None or (values.shape[2] > 1 and values.shape[3] > 1):
            raise Lost("scores are multiplied by a tensor")
        elif values.shape[3] == 1:
            self.q_factor = values if self.q_factor is None else self.q_factor * values
        else:
            values = values.mT
            self.k_factor = values if self.k_factor is None else self.k_factor * values

    def check(self) -> None:
        """Raise if scores were multiplied by 0 and not masked afterwards."""
        for zeroed in self.zeroed:
            left = zeroed
            for hidden in self.hidden:
                left = left & ~hidden
            if bool(left.any()):
                raise Lost("scores are multiplied by 0 and not masked")


def _of_one_number(values: Tensor) -> Tensor:
    """What hides keys in a mask of two numbers that are far apart, such as 0 and −1000; nothing in others."""
    hidden = values <= FILLS
    if bool(hidden.any()):
        least, most = values[hidden].aminmax()
        rest = values[~hidden]
        if least != most or not rest.numel() or rest.min() < FILLS / 10:
            hidden = torch.zeros_like(hidden)
    return hidden
