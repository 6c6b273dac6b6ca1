"""Comparing a map, and what is read from it, with the whole matrix."""

import re
from typing import Any

import torch
from torch import Tensor

from . import dense
from .bounds import Bounds
from .case import MEASURES, Case
from .compare import Mismatch, close, same
from .oracle import Truth


def of_map(case: Case, held: dict[str, Any], t: Truth, near: Bounds) -> None:
    """The log-sum-exp, what is counted, and the measures that came with the call."""
    amap = held["amap"]
    wide = torch.float64 if near.dtype == torch.float64 else torch.float32
    if amap.lse.dtype != wide or amap.shape != t.p.shape:
        raise Mismatch("map", f"{amap.lse.dtype} {amap.shape}, expected {wide} {tuple(t.p.shape)}")
    seen = ~(t.bad | t.dark | near.free)
    if bool((amap.lse[t.dark & ~near.free] != -torch.inf).any()):
        raise Mismatch("lse of fully masked queries", f"{amap.lse[t.dark & ~near.free][:4].tolist()}, expected -inf")
    close("lse", amap.lse, t.lse, near.lse, seen)
    hidden = amap.lse[t.bad & ~near.free] < torch.inf
    if bool(hidden.any()):
        raise Mismatch("lse hides what is not finite", f"{amap.lse[t.bad & ~near.free][hidden][:4].tolist()}")
    count = (~t.v.isfinite()).sum((-1, -2))
    told = amap.nonfinite_values
    if told is not None or bool(count.any()):
        if told is None:
            raise Mismatch("nonfinite_values", f"None, expected {count.tolist()}")
        same("nonfinite_values", told, count)
    if case.measures:
        measures(case, amap.measured, MEASURES, t, near)


def check(case: Case, i: int, expression: str, held: dict[str, Any], t: Truth, near: Bounds) -> None:
    """Read number i of a case; `expression` is its Python."""
    if not t.p.numel():  # of nothing only some things can be asked
        return
    if bool(near.free.any()):
        return
    from .check import saved

    kind = case.reads[i][0]
    steps: list[tuple[int, int]] = []
    with torch.no_grad():
        got = eval(expression, {**held, "steps": steps, "saved": saved})
    if case.progress and "progress" in expression:
        rows = len(range(*map(int, re.findall(r"\d+", expression)[:2]))) if kind == "pooled" else case.n
        if not steps or steps[-1] != (rows, rows):
            raise Mismatch(f"progress of {kind}", f"{steps[-3:]}, expected to end in {(rows, rows)}")
    fine = ~t.bad[..., None].expand(t.p.shape)
    heads = ~dense.unseen(t)
    match kind:
        case "tile" | "row" | "dense" | "head":
            parts = [x.numpy()[_index(kind, expression)].copy() for x in (*dense.weights(t, near), fine)]
            close(f"read {kind}", got, *map(torch.as_tensor, parts))
            if kind != "tile":
                mass, off, fine = (
                    x.numpy()[_index(kind, expression)] for x in (*dense.mass(t, near), ~t.bad[..., None])
                )
                close(
                    f"sums of read {kind}", got.double().sum(-1, keepdim=True), *map(torch.as_tensor, (mass, off, fine))
                )
        case "times" | "transposed":
            x = eval(expression.partition(" @ ")[2], held)
            read = dense.times if kind == "times" else dense.transposed
            right, limit = read(t, near, x)
            rows = ~t.bad[..., None] if kind == "times" else heads[..., None, None]
            close(f"read {kind}", got, right, limit, rows.expand(right.shape))
        case "pool" | "pooled":
            _squares(case, kind, expression, got, t, near, heads)
        case "topk":
            _top(got, t, near)
        case "received":
            close("read received", got, *dense.received(t, near), heads[..., None].expand(got.shape))
        case "diagonals":
            offsets, right = dense.diagonals(t, near)
            same("read diagonals", got[0], offsets)
            close("read diagonals", got[1], *right, heads[..., None].expand(got[1].shape))
        case "measure":
            named = re.findall(r"'(\w+)'", expression)
            measures(case, got, named, t, near, rows="rows=True" in expression)
        case "given":
            ids = torch.atleast_2d(eval(re.search(r"hw.stats.DuplicateMass\((.*?\)\))", expression)[1], held))  # type: ignore[index]
            found = {name: dense.of_tokens(t, near, name, ids) for name in got}
            measures(case, got, list(found), t, near, "rows=True" in expression, found)
        case "merge":
            named = re.findall(r"'(\w+)'", expression.partition(".merge")[0])
            for name in named:
                right, limit = dense.merged(t, near, name)
                wide = 1e-5 * right.abs() if near.dtype != torch.float64 else 2.4e-7 * right.abs()
                close(f"read merge, {name}", got[name], right, limit + wide, heads.all(0, keepdim=True))
        case "operator":
            b, h, side, given = re.match(r".*operator\((\d+), (\d+)\)\.(\w+)\((.*)\)$", expression).groups()  # type: ignore[union-attr]
            x = torch.as_tensor(eval(given, held))
            right, limit = (dense.times if side == "matmat" else dense.transposed)(t, near, x)
            if heads[int(b), int(h)]:
                close("read operator", torch.as_tensor(got), right[int(b), int(h)], limit[int(b), int(h)])
        case "save":
            amap = held["amap"]
            same("read save", got.lse, amap.lse)
            if case.kernel == "auto":  # one that was named reads the map until it is saved
                same("read save", got.to_dense(), amap.to_dense())
            close("read save", got.to_dense(), *dense.weights(t, near), fine)
            if _described(got) != _described(amap):
                raise Mismatch("read save", f"{got!r}, expected {amap!r}")


def _index(kind: str, expression: str) -> Any:
    """The part of the whole matrix that was read."""
    if kind == "dense":
        return ...
    numbers = re.findall(r"-?\d+", expression)
    if kind == "row":
        return slice(None), slice(None), int(numbers[0])
    if kind == "head":
        b, h = map(int, numbers)
        return slice(b, b + 1), slice(h, h + 1)

    def part(text: str) -> Any:
        ends = [int(x) if x else None for x in text.split(":")]
        return slice(*ends) if len(ends) > 1 else ends[0]

    return tuple(map(part, expression[5:-1].split(", ")))


def _squares(case: Case, kind: str, expression: str, got: Any, t: Truth, near: Bounds, heads: Tensor) -> None:
    n, m = case.n, case.m
    numbers = list(map(int, re.findall(r"\d+", expression)))
    where = heads[..., None, None]
    if kind == "pool":
        cell = max(1, -(-max(n, m) // numbers[0]))
        mean, largest, _ = dense.squares(t, near, range(n), range(m), cell)
        right, limit = mean if "'mean'" in expression else largest
        close("read pool", got, right, limit, where.expand(right.shape))
        return
    a, b, c, d, cell = numbers[:5]
    mean, largest, count = dense.squares(t, near, range(a, b), range(c, d), cell)
    same("read pooled, allowed", got.allowed, count)
    for name, right in (("mean", mean), ("largest", largest)):
        close(f"read pooled, {name}", getattr(got, name), *right, where.expand(right[0].shape))


def _top(got: tuple[Tensor, Tensor], t: Truth, near: Bounds) -> None:
    weights, keys = got
    count = weights.shape[-1]
    right = t.p.topk(count).values
    high, low = (x.topk(count).values for x in (t.p + near.p, t.p - near.p))
    fine = ~t.bad[..., None].expand(weights.shape)
    close("read topk", weights, right, torch.maximum(high - right, right - low), fine)
    if bool((weights.diff(dim=-1) > 0)[fine[..., 1:]].any()):
        raise Mismatch("read topk, order", "weights that grow")
    named = (keys >= 0).sum(-1)
    least, most = (x.sum(-1).clamp_max(count) for x in (t.s > -torch.inf, t.allowed))
    wrong = ((named < least) | (named > most)) & ~t.bad
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        raise Mismatch("read topk, keys", f"{keys[at].tolist()} at {list(at)}, but it sees {int(least[at])} keys")
    at_keys = t.p.gather(-1, keys.clamp_min(0)).masked_fill(keys < 0, 0.0)
    off = near.p.gather(-1, keys.clamp_min(0)).masked_fill(keys < 0, 0.0)
    close("read topk, keys", weights, at_keys, off, fine)
    ordered = keys.masked_fill(keys < 0, t.p.shape[-1]).sort(-1).values
    twice = (ordered.diff(dim=-1) == 0) & (ordered[..., 1:] < t.p.shape[-1]) & fine[..., 1:]
    if bool(twice.any()):
        raise Mismatch("read topk, keys", "a key twice")
    if not bool(t.q.any()) and t.added.abs().max() == 0:  # every score is 0: the lower key first
        last = t.p.shape[-1]
        lowest = torch.where(t.s > -torch.inf, torch.arange(last), last).sort(-1).values[..., :count]
        same("read topk, ties", keys[fine], lowest.masked_fill(lowest == last, -1)[fine])


def measures(
    case: Case, got: Any, named: Any, t: Truth, near: Bounds, rows: bool = False, found: Any = None
) -> None:  # fmt: skip
    """Each measure of each head, and of each row; `found`: what is expected, if not of measures known by name."""
    if bool(near.free.any()):
        return
    if list(got) != list(named):
        raise Mismatch("measures", f"{list(got)}, expected {list(named)}")
    fine = ~dense.unseen(t)
    if not t.p.numel():
        return
    same("nonfinite", got.nonfinite, t.bad.sum(-1))
    for name in named:
        if name == "received_mass":
            right, limit = dense.received_mass(t, near)
            close("measure received_mass", got[name], right, limit + 1.2e-7 * right, fine)  # float32 always
            continue
        (row, row_limit), (right, limit) = found[name] if found else dense.measured(t, near, name)
        wide = 1e-5 * right.abs() if near.dtype != torch.float64 else 0.0
        close(f"measure {name}", got[name], right, limit + wide + 1.2e-7 * right.abs(), fine)
        if rows:
            where = fine[..., None].expand(row.shape)
            close(f"rows of {name}", got.rows[name], row, row_limit * 1.01 + 2e-6 * row.abs() * (
                near.dtype != torch.float64) + 1e-15, where)  # fmt: skip


def _described(amap: Any) -> str:
    """What a map says of itself, but for its bytes: one that was loaded keeps no storage of others."""
    return re.sub(r"[^ ]+ [kMG]?B stored", "stored", repr(amap))
