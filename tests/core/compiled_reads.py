"""What the compiled kernel reads of q, k, the log-sum-exp and a rule, in the fewest words."""

from typing import Any

from torch import Tensor

from headwise.kernels.cpu.kernel import CompiledReads
from headwise.kernels.reads import Matrix
from headwise.rule import Rule
from headwise.rule.pooling import Squares

READS = CompiledReads()


def weights(q: Tensor, k: Tensor, lse: Tensor, rule: Rule) -> Tensor:
    return READS.weights(Matrix(q, k, lse, rule), *map(range, (*q.shape[:3], k.shape[2])))


def squares(q: Tensor, k: Tensor, lse: Tensor, rule: Rule, cell: int, progress: Any = None) -> Squares:
    return READS.squares(Matrix(q, k, lse, rule), cell, progress)


def diagonals(q: Tensor, k: Tensor, lse: Tensor, rule: Rule) -> Tensor:
    return READS.diagonals(Matrix(q, k, lse, rule))
