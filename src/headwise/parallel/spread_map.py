"""The common part of the maps of one rank."""

from copy import copy
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from headwise.attention import nonfinite
from headwise.kernels import check_name
from headwise.map.unchanged import noted
from headwise.parallel.layout import Members
from headwise.rule import Rule
from headwise.stats import Measurements

Own = TypeVar("Own", bound="SpreadMap")


class SpreadMap:
    """The base of `RingMap` and `UlyssesMap`, from this rank's part of the sequence and the rule of the whole.

    It refers to q, k, and the tensors of the rule without a copy. Reading it after one of them was changed in place
    raises, as for an `AttentionMap`: what all ranks must call raises on all of them.
    """

    keep = "map.gather()"  # in the error

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, rule: Rule, who: Members, named: str
    ) -> None:  # fmt: skip
        self._q, self._k, self.lse, self.rule = q.detach(), k.detach(), lse.detach(), rule.kept()
        self._inputs = noted(self._q, self._k, self.rule, whole=False, keep=self.keep)
        self.measured: Measurements | None = None
        self.named = named  # as of an `AttentionMap`
        self._who = who
        self._bad_values = nonfinite(v)

    @property
    def q(self) -> Tensor:
        """This rank's queries, as passed in."""
        self._check()
        return self._q

    @property
    def k(self) -> Tensor:
        """This rank's keys, as passed in."""
        self._check()
        return self._k

    def _check(self) -> None:
        """Raise ConfigError if an input of this rank has changed."""
        if self._inputs is not None:
            self._inputs.check(lambda: False)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(b, h, n, m) of the whole matrix, all heads."""
        b, h, n, m = self.rule.grid
        return b, h, n, m

    def using(self: Own, kernel: str) -> Own:
        """Return the same map, read by this kernel, as `AttentionMap.using`."""
        check_name(kernel)
        same = copy(self)
        same.named = kernel
        return same

    @property
    def nonfinite_values(self) -> Tensor | None:
        """NaN and infinite entries of v on all ranks, [b, h_kv]; None if there are none. None too if nothing was
        measured, as a single rank has only its own part."""
        return None if self.measured is None else self.measured.nonfinite_values

    def _bad_of_all(self) -> Tensor | None:
        """The same, counted anew. All ranks must call it."""
        found = self._bad_values.clone()
        dist.all_reduce(found, group=self._who.group)
        return found if bool(found.any()) else None
