"""What is read from a map, in float64 from all of its weights: each with how far off it may be."""

import torch
from torch import Tensor

from .bounds import Bounds
from .oracle import Truth

Found = tuple[Tensor, Tensor]  # what is expected, and how far off it may be


def mass(t: Truth, near: Bounds) -> tuple[Tensor, Tensor]:
    """The sum of each row, [b, h, n, 1]: 1, or what a learned sink leaves. However large the logits are, the weights of
    a map sum to 1 in float32, up to exponentials of half precision in the log-sum-exp."""
    mass = t.p.sum(-1, keepdim=True)
    lse = t.lse.masked_fill(t.dark | t.bad, 0.0)[..., None]
    sink = (mass * (1 - mass)).clamp_min(0.0) * torch.expm1((2 * near.near.amax(-1, keepdim=True)).clamp_max(1.0))
    if near.dtype == torch.float64:
        return mass, sink + 4 * near.near.amax(-1, keepdim=True) + 1e-13
    return mass, sink + 2e-6 + near.rough + 2.0**-44 * lse.abs() * (lse.abs() > 1e4)


def weights(t: Truth, near: Bounds) -> Found:
    """[b, h, n, m]"""
    return t.p, near.p


def times(t: Truth, near: Bounds, x: Tensor) -> Found:
    """Weights @ x."""
    x = _wide(t, x)
    count = x.shape[2]
    # In the map's own dtype, or in that of q where x has it: then weights may be rounded to that.
    return t.p @ x, near.product(t.p, near.p, x, count) + near.rounded(t.p @ x)


def transposed(t: Truth, near: Bounds, y: Tensor) -> Found:
    """Weightsᵀ @ y."""
    y = _wide(t, y)
    return t.p.mT @ y, near.product(t.p.mT, near.p.mT, y, y.shape[2]) + near.rounded(t.p.mT @ y)


def _wide(t: Truth, x: Tensor) -> Tensor:
    x = x.double()
    x = x[None, None] if x.ndim == 2 else x
    x = t.spread(x) if x.shape[1] == t.k.shape[1] else x
    return x.expand(t.p.shape[0], t.p.shape[1], -1, -1)


def squares(t: Truth, near: Bounds, rows: range, cols: range, cell: int) -> tuple[Found, Found, Tensor]:
    """Mean and largest weight, and allowed cells, of a rectangle in squares."""
    here = (..., slice(rows.start, rows.stop), slice(cols.start, cols.stop))
    p, off, open_ = (_cells(x[here].double(), cell) for x in (t.p, near.p, t.allowed))
    count = open_.sum(-1)
    total = p.sum(-1)
    change = near.sum_off(total, off.sum(-1), cell * cell)
    largest = p.amax(-1)
    return (total / count.clamp_min(1), change / count.clamp_min(1)), (largest, _of_largest(p, off)), count.long()


def _of_largest(x: Tensor, off: Tensor) -> Tensor:
    largest = x.amax(-1)
    return torch.maximum((x + off).amax(-1) - largest, largest - (x - off).amax(-1))


def _cells(x: Tensor, cell: int) -> Tensor:
    b, h, r, c = x.shape
    x = torch.nn.functional.pad(x, (0, -c % cell, 0, -r % cell))
    squares = x.reshape(b, h, x.shape[2] // cell, cell, x.shape[3] // cell, cell).transpose(3, 4)
    return squares.flatten(4)


def received(t: Truth, near: Bounds) -> Found:
    """[b, h, m]"""
    mass = t.p.sum(2)
    return mass, near.sum_off(mass, near.p.sum(2), t.p.shape[2])


def diagonals(t: Truth, near: Bounds) -> tuple[Tensor, Found]:
    """Offsets [n + m − 1], and the mean weight of each diagonal's allowed cells."""
    n, m = t.p.shape[2:]
    offsets = torch.arange(n + m - 1) - (m - 1)
    place = torch.arange(m) - (torch.arange(n)[:, None] + m - n) + m - 1

    def summed(x: Tensor) -> Tensor:
        flat = x.double().flatten(2)
        return flat.new_zeros(*flat.shape[:2], n + m - 1).index_add(2, place.flatten(), flat)

    count = summed(t.allowed).clamp_min(1)
    mass = summed(t.p) / count
    return offsets, (mass, near.sum_off(mass, summed(near.p) / count, n))


def measured(t: Truth, near: Bounds, name: str) -> tuple[Found, Found]:
    """A measure of each row [b, h, n], 0 where the row does not count, and of each head [b, h]."""
    value, off, counted = _rows(t, near, name)
    if name == "max_logit":
        high = _masked(near.s + near.near, counted)
        low = _masked(near.s - near.near, counted)
        slack = near.u * 2 * (value.abs() + near.t.lse.masked_fill(~counted, 0.0).abs())
        some = counted.any(-1)
        top = value.masked_fill(~counted, -torch.inf).amax(-1).masked_fill(~some, 0.0)
        rows = torch.maximum(high - value, value - low).masked_fill(~counted, 0.0) + slack
        over, under = (x.masked_fill(~counted, -torch.inf).amax(-1).masked_fill(~some, 0.0) for x in (high, low))
        return (value.masked_fill(~counted, 0.0), rows), (top, torch.maximum(over - top, top - under) + slack.amax(-1))
    return _mean(near, value, off, counted)


def of_tokens(t: Truth, near: Bounds, name: str, ids: Tensor) -> tuple[Found, Found]:
    """The same for the measures that are told of the keys' tokens, [1 or b, m]: the class is that of tokens above 1."""
    n, m = t.p.shape[2:]
    lit = ~(t.dark | t.bad)
    if name == "class_mass":
        chosen = (ids > 1)[:, None, None, :].double()
        value = (t.p * chosen).sum(-1)
        return _mean(near, value, near.sum_off(value, (near.p * chosen).sum(-1), m), lit)
    shift = {"duplicate_mass": 0, "induction_mass": 1}[name]
    before = torch.nn.functional.pad(ids, (shift, 0), value=-1)[:, :m]
    mine = ids[:, (torch.arange(n) + m - n).clamp_min(0)]
    earlier = torch.arange(m) - shift < torch.arange(n)[:, None] + m - n
    match = (mine[:, None, :, None] == before[:, None, None, :]) & earlier & t.allowed
    value = (t.p * match).sum(-1)
    return _mean(near, value, near.sum_off(value, (near.p * match).sum(-1), m), match.any(-1))


def merged(t: Truth, near: Bounds, name: str) -> Found:
    """A measure of an input merged with itself, [1, h]: the batch is one long input, or its largest entry counts."""
    if name in ("received_mass", "max_logit"):
        value, off = received_mass(t, near) if name == "received_mass" else measured(t, near, name)[1]
        if name == "max_logit":
            value = value.masked_fill((t.dark | t.bad).all(-1), -torch.inf)
            value = value.amax(0, keepdim=True)
            value = value.masked_fill(value == -torch.inf, 0.0)
        return value.amax(0, keepdim=True), off.amax(0, keepdim=True)
    value, off, counted = _rows(t, near, name)
    value, off, counted = (x.transpose(0, 1).flatten(1)[None] for x in (value, off, counted))
    return _mean(near, value, off, counted)[1]


def _mean(near: Bounds, value: Tensor, off: Tensor, counted: Tensor) -> tuple[Found, Found]:
    value, off = value.masked_fill(~counted, 0.0), off.masked_fill(~counted, 0.0)
    count = counted.sum(-1).clamp_min(1)
    head = value.sum(-1) / count
    change = near.sum_off(value.abs().sum(-1), off.sum(-1), value.shape[-1]) / count
    return (value, off), (head, change + 2 * near.u * head.abs())


def _masked(x: Tensor, counted: Tensor) -> Tensor:
    return x.amax(-1).masked_fill(~counted, 0.0)


def _rows(t: Truth, near: Bounds, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Value, how far off, and which rows count."""
    p, off = t.p, near.p
    n, m = p.shape[2:]
    lit = ~(t.dark | t.bad)
    far = t.distances()
    mass = p.sum(-1)
    mass_off = near.sum_off(mass, off.sum(-1), m)
    keys = t.allowed.sum(-1).double()
    signed = torch.arange(m) - (torch.arange(n)[:, None] + m - n)

    def linear(f: Tensor) -> tuple[Tensor, Tensor]:
        x = (p * f).sum(-1)
        return x, near.sum_off((p * f.abs()).sum(-1), (off * f.abs()).sum(-1), m)

    match name:
        case "max_logit":
            return near.s.amax(-1), torch.zeros_like(mass), lit
        case "logsumexp":
            return t.lse.masked_fill(~lit, 0.0), near.lse, lit
        case "entropy" | "normalized_entropy":
            value = -torch.special.xlogy(p, p).sum(-1)
            change = (off * (1 + torch.maximum(p, off).clamp_min(1e-300).log().abs())).sum(-1)
            change = change + near.summed(m) * (1 + value)
            if name == "entropy":
                return value, change, lit
            most = keys.clamp_min(2).log()
            return value / most, change / most, keys >= 2
        case "effective_keys":
            squares = p.square().sum(-1)
            known = (2 * p * off + off.square()).sum(-1) / squares.clamp_min(1e-300) + near.summed(m)
            lost = 2 * mass_off / mass.clamp_min(1e-300)
            value = mass.square() / squares.masked_fill(squares == 0, 1.0)
            change = value * ((known + lost) / (1 - known).clamp_min(1e-3))
            return value, change.masked_fill(mass < 1e-15, m), lit
        case "squared_weights":
            squares = p.square().sum(-1)
            return squares, near.sum_off(squares, (2 * p * off + off.square()).sum(-1), m), lit
        case "top1_mass":
            return p.amax(-1), _of_largest(p, off), lit
        case "topk_mass":
            top = p.topk(min(8, m)).values.sum(-1)
            change = (p + off).topk(min(8, m)).values.sum(-1) - top
            down = top - (p - off).topk(min(8, m)).values.sum(-1)
            return top, torch.maximum(change, down) + near.summed(8) * top, lit
        case "learned_sink_mass":
            return 1 - mass, mass_off + 4 * near.u, lit
        case "mean_distance":
            return *linear(far), lit
        case "distance_variance":
            whole = mass.clamp_min(1e-300)[..., None]
            mean = (p * far).sum(-1, keepdim=True) / whole
            apart = (far - mean).square()
            value = (p * apart).sum(-1) / whole[..., 0]
            change = (off * apart).sum(-1) / whole[..., 0] + value * mass_off / whole[..., 0]
            moved = ((off * (far - mean).abs()).sum(-1) / whole[..., 0]).square()
            change = change + moved + near.summed(m) * value + (4 * near.u * far.max()) ** 2
            return value, change.masked_fill(mass < 1e-15, float(m + n) ** 2), lit
        case "local_mass":
            return *linear((far <= 8).double()), lit
        case "sink_mass":
            starts = t.starts()
            firsts = torch.arange(m) == (0 if starts is None else starts[:, None, None])
            return *linear(firsts.double()), lit
        case "previous_mass" | "self_mass" | "next_mass":
            on = signed == {"previous_mass": -1, "self_mass": 0, "next_mass": 1}[name]
            return *linear(on.double()), (t.allowed & on).any(-1)
    raise AssertionError(name)


def received_mass(t: Truth, near: Bounds) -> Found:
    """max_j of what key j receives from each query that may see it, [b, h]."""
    if not t.p.shape[-1]:
        nothing = torch.zeros(t.p.shape[:2], dtype=torch.float64)
        return nothing, nothing
    mass, off = received(t, near)
    count = t.allowed.sum(2).clamp_min(1)
    share, change = mass / count, off / count
    return share.amax(-1), _of_largest(share, change) + 2 * near.u


def unseen(t: Truth) -> Tensor:
    """Heads of which nothing is compared: some query of theirs is not finite, [b, h]."""
    return t.bad.any(-1)
