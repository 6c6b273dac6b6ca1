"""Products of two tensors, however they are written: one letter for each dimension, as in einsum."""

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import Any

from torch import Tensor

NAMES = frozenset({"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "mm", "addmm", "mv", "einsum", "dot"})


@dataclass(frozen=True)
class Contraction:
    """alpha · Σ left · right + beta · added.

    Attributes:
        a, b, out: the letter of each dimension of left, right and the result; "1" where an operand is broadcast.
        added: a tensor that broadcasts to the result, or None.
    """

    left: Tensor
    right: Tensor
    a: str
    b: str
    out: str
    alpha: float = 1.0
    added: Tensor | None = None
    beta: float = 1.0

    @property
    def summed(self) -> str:
        """The letters that the result does not have."""
        return "".join(letter for letter in self.a if letter not in self.out and letter != "1")


def contraction(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Contraction | None:
    """The product that a call computes; None if it is none of two tensors."""
    if name == "einsum":
        return _einsum(args)
    args = [*args, *(kwargs[key] for key in ("input", "other", "mat2", "batch1", "batch2", "vec") if key in kwargs)]
    if name in ("baddbmm", "addmm"):
        if len(args) != 3:
            return None
        added, left, right = args
        alpha, beta = float(kwargs.get("alpha", 1.0)), float(kwargs.get("beta", 1.0))
        found = _matmul(left, right)
        if found is None:
            return None
        return Contraction(left, right, found.a, found.b, found.out, alpha, added if beta else None, beta)
    if len(args) != 2 or not all(isinstance(x, Tensor) for x in args):
        return None
    return _matmul(*(reversed(args) if name == "__rmatmul__" else args))


def _matmul(left: Tensor, right: Tensor) -> Contraction | None:
    if left.ndim == 0 or right.ndim == 0:
        return None
    rows, cols = ("N" if left.ndim > 1 else ""), ("M" if right.ndim > 1 else "")
    one, two = left.shape[:-2] if rows else (), right.shape[:-2] if cols else ()
    count = max(len(one), len(two))
    letters = ascii_letters[:count]
    sizes = [(1,) * (count - len(x)) + tuple(x) for x in (one, two)]
    a = "".join("1" if x == 1 < y else letter for letter, x, y in zip(letters, *sizes, strict=True))
    b = "".join("1" if y == 1 < x else letter for letter, x, y in zip(letters, *sizes, strict=True))
    a, b = a[count - len(one) :], b[count - len(two) :]
    return Contraction(left, right, a + rows + "D", b + ("D" + cols if cols else "D"), letters + rows + cols)


def _einsum(args: Sequence[Any]) -> Contraction | None:
    if not args or not isinstance(args[0], str):
        return None
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    if len(operands) != 2 or args[0].count(",") != 1:
        return None
    inputs, arrow, out = args[0].replace(" ", "").partition("->")
    a, b = inputs.split(",")
    if "..." in inputs:
        free = [letter for letter in ascii_letters if letter not in args[0]]
        counts = [x.ndim - len(term) + 3 if "..." in term else 0 for x, term in zip(operands, (a, b), strict=True)]
        dots = "".join(free[: max(counts)])
        a, b = (t.replace("...", dots[len(dots) - c :]) for t, c in zip((a, b), counts, strict=True))
        out = out.replace("...", dots)
    if not arrow:
        out = "".join(sorted(letter for letter in a + b if (a + b).count(letter) == 1))
    left, right = operands
    if len(set(a)) < len(a) or len(set(b)) < len(b) or len(a) != left.ndim or len(b) != right.ndim:
        return None
    alone = (set(a) ^ set(b)) - set(out)
    sizes: dict[str, set[int]] = {}
    for letter, size in [*zip(a, left.shape, strict=True), *zip(b, right.shape, strict=True)]:
        sizes.setdefault(letter, set()).add(size)
    if alone or any(len(found) > 1 for found in sizes.values()):
        return None  # a sum over one operand, or broadcasting within one letter
    return Contraction(left, right, a, b, out)
