"""The similarity of heads: a head × head matrix that prints, groups and saves itself.

>>> import torch, headwise as hw
>>> one, two = torch.randn(2, 1, 3, 40, 8)                      # two layers of three heads
>>> two[:, 1] = one[:, 2]
>>> alike = hw.analysis.output_similarities([one, two], ["cka"])["cka"]
>>> alike.pairs(1)[0].names, round(alike["L0H2", "L1H1"], 3)
(('L0H2', 'L1H1'), 1.0)
"""

import json
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.errors import ConfigError, not_installed
from headwise.files import write_text
from headwise.table.show import Printed

MOST_GROUPS = 64  # tried by `groups()` without arguments


@dataclass(frozen=True)
class Pair:
    """Two heads and their similarity; `error` is a standard error, or None if the value is exact."""

    names: tuple[str, str]
    value: float
    error: float | None


@dataclass(frozen=True, repr=False)
class HeadSimilarity(Printed):
    """A number for each pair of heads, over all layers.

    Attributes:
        kind: what is compared, such as "CKA of outputs"; unit: of the numbers; note: remarks on how to read them.
        names: L0H0, L0H1, …, of rows and columns.
        matrix: [G, G] float64 on the CPU.
        distance: [G, G] ≥ 0, 0 on the diagonal, for grouping heads; None if the matrix is directed (row writes, column
            reads), so that heads cannot be grouped.
        chance: the average for unrelated heads, or None if it is 0 or unknown.
        error: [G, G] standard errors, or None if the numbers are exact.
        small_is_alike: whether small numbers mean similar heads, as for a divergence.
    """

    kind: str
    names: tuple[str, ...]
    matrix: Tensor
    distance: Tensor | None
    unit: str = ""
    chance: float | None = None
    error: Tensor | None = None
    note: str = ""
    small_is_alike: bool = False

    def __getitem__(self, pair: tuple[str, str]) -> float:
        """The number for two heads by name: `alike["L0H1", "L2H0"]`."""
        i, j = map(self._index, pair)
        return float(self.matrix[i, j])

    def pairs(self, count: int = 10) -> list[Pair]:
        """The most similar pairs of different heads; if directed, those with the largest numbers."""
        if count < 1:
            raise ConfigError(f"pairs(count={count}): expected at least 1")
        if self.distance is None:
            at = (~torch.eye(len(self.names), dtype=torch.bool)).nonzero()
            rank = -self.matrix[at[:, 0], at[:, 1]]
        else:
            at = torch.triu_indices(len(self.names), len(self.names), 1).T
            rank = self.distance[at[:, 0], at[:, 1]]
        best = at[torch.sort(rank, stable=True).indices[:count]].tolist()
        return [
            Pair(
                (self.names[i], self.names[j]),
                float(self.matrix[i, j]),
                None if self.error is None else float(self.error[i, j]),
            )
            for i, j in best
        ]

    @cached_property
    def order(self) -> list[int]:
        """All heads, with similar ones next to each other: the leaves of the average linkage tree. Requires SciPy."""
        if len(self.names) == 1:
            return [0]
        return _hierarchy().leaves_list(self.linkage).tolist()

    @cached_property
    def linkage(self) -> np.ndarray:
        """The tree in the format of `scipy.cluster.hierarchy`, [G − 1, 4]: average linkage with optimal leaf order."""
        if self.distance is None:
            raise ConfigError(f"{self.kind}: rows and columns mean different things, so heads cannot be grouped by it")
        if len(self.names) == 1:
            return np.zeros((0, 4))
        upper = self.distance[tuple(torch.triu_indices(len(self.names), len(self.names), 1))].numpy()
        return _hierarchy().linkage(upper, method="average", optimal_ordering=len(self.names) <= 512)

    def groups(self, count: int | None = None, *, within: float | None = None) -> list[list[str]]:
        """Groups of heads, the largest first. Requires SciPy.

        Without arguments, the number of groups, up to 64, has the highest mean silhouette (Rousseeuw 1987).

        Args:
            count: the number of groups (fewer if heads have the same distance).
            within: the largest average distance between parts of a group, instead of a number of groups.
        """
        size = len(self.names)
        if count is not None and (within is not None or not 1 <= count <= size):
            raise ConfigError(
                f"groups(count={count}, within={within}): expected 1 to {size} groups, or within, not both"
            )
        if within is not None and not within >= 0:
            raise ConfigError(f"groups(within={within}): expected a distance ≥ 0")
        tree = self.linkage
        if size == 1:
            return [list(self.names)]
        cut = _hierarchy().fcluster
        if within is not None:
            labels = cut(tree, within, "distance")
        elif count is not None:
            labels = cut(tree, count, "maxclust")
        else:
            assert self.distance is not None  # checked by linkage
            far = self.distance.numpy()
            tried = [cut(tree, k, "maxclust") for k in range(2, min(MOST_GROUPS, size - 1) + 1)]
            labels = max(tried, key=lambda found: _silhouette(far, found), default=np.ones(size, int))
        members: dict[int, list[str]] = {}
        for i in self.order:
            members.setdefault(int(labels[i]), []).append(self.names[i])
        return sorted(members.values(), key=len, reverse=True)

    def to_json(self, *, grouped: bool = False) -> str:
        """Everything as JSON; `grouped` adds order and groups, which require SciPy."""
        content: dict[str, Any] = {
            "kind": self.kind, "unit": self.unit, "note": self.note, "chance": self.chance, "names": self.names,
            "matrix": self.matrix.tolist(), "error": None if self.error is None else self.error.tolist(),
        }  # fmt: skip
        if grouped:
            content |= {"order": [self.names[i] for i in self.order], "groups": self.groups()}
        return json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str], *, grouped: bool = False) -> None:
        """Write `to_json` to a file, whole or not at all."""
        write_text(path, self.to_json(grouped=grouped))

    def rows(self, count: int = 10) -> tuple[list[str], list[list[str]]]:
        """Header and rows as text: the most similar pairs."""
        directed = self.distance is None
        head = ["writes" if directed else "head", "reads" if directed else "head", self.unit or "similarity"]
        body = [[*pair.names, f"{pair.value:.4g}"] for pair in self.pairs(count)]
        if self.error is not None:
            head.append("standard error")
            for line, pair in zip(body, self.pairs(count), strict=True):
                line.append(f"{pair.error:.2g}")
        return head, body

    @property
    def title(self) -> str:
        """One line: what is compared, and the value of unrelated heads."""
        chance = "" if self.chance is None else f"; by chance {self.chance:.3g}"
        return f"{self.kind}, {len(self.names)} heads{chance}"

    def _index(self, name: str) -> int:
        if name not in self.names:
            raise ConfigError(f"head {name!r}: expected a name from {self.names[0]} to {self.names[-1]}")
        return self.names.index(name)


def symmetric(matrix: Tensor) -> Tensor:
    """The mean of a matrix and its transpose, float64 on the CPU, as rounding differs between (i, j) and (j, i)."""
    matrix = matrix.double().cpu()
    return (matrix + matrix.T) / 2


def mirrored(upper: Tensor) -> Tensor:
    """The upper triangle, mirrored below the diagonal."""
    upper = upper.triu()
    return upper + upper.triu(1).T


def apart(distance: Tensor) -> Tensor:
    """Distances clamped to at least 0, with 0 on the diagonal."""
    return distance.clamp_min(0.0).fill_diagonal_(0.0)


def _silhouette(far: np.ndarray, labels: np.ndarray) -> float:
    """Mean over all heads of (b − a) / max(a, b), with the mean distance a to its own group and b to the nearest
    other group; 0 for a head alone in its group."""
    names = np.unique(labels)
    if len(names) < 2:
        return -1.0
    member = labels[:, None] == names  # [G, groups]
    sizes = member.sum(0)
    sums = far @ member
    own = (sums * member).sum(1) / np.maximum(sizes[member.argmax(1)] - 1, 1)
    others = np.where(member, np.inf, sums / sizes).min(1)
    most = np.maximum(own, others)
    score = np.divide(others - own, most, out=np.zeros_like(most), where=most > 0)
    return float(np.where(sizes[member.argmax(1)] == 1, 0.0, score).mean())


def _hierarchy() -> Any:
    try:
        from scipy.cluster import hierarchy
    except ImportError:
        raise not_installed("groups()", "scipy") from None
    return hierarchy
