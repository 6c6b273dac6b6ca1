"""What a record remarks on the calls of a module: what its rows in the table are of, and what is not known."""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import nn

from headwise.models.adapters.places import computed
from headwise.publishing import AttentionCall


@dataclass
class _Blocks:
    """The blocks of queries of one module, each query being taken to be at the last key that it may attend to.

    Blocks of causal attention then follow one another. Those of attention with a window on both sides do too, until
    the end of the keys cuts the window off: there, a block begins before the one before it has ended.

    Attributes:
        start, stop: positions of the last block. advanced: whether a block has begun after another. overlap: whether
            one has begun too early for causal attention.
    """

    start: int = 0
    stop: int = 0
    advanced: bool = False
    overlap: bool = False

    def add(self, start: int, n: int) -> None:
        """Include the next one, of n queries."""
        again = start == self.start and self.advanced
        self.overlap |= self.start < start < self.stop or (again and self.start > 0)
        self.advanced |= start >= self.stop > 0
        self.start, self.stop = start, start + n


@dataclass
class _Calls:
    """The calls of one module in a forward pass.

    Attributes:
        count: of all. single: of those with one head. blocks: of those with several queries, but fewer than keys, at
            known positions. sizes: queries and keys of the first call of unknown positions; None if there is none.
        of: the blocks of the module and of each of its replicas.
    """

    count: int = 0
    single: int = 0
    blocks: int = 0
    sizes: tuple[int, int] | None = None
    of: "WeakKeyDictionary[nn.Module, _Blocks]" = field(default_factory=WeakKeyDictionary)

    @property
    def overlap(self) -> bool:
        """Whether the positions of its blocks contradict one another."""
        return any(one.overlap for one in self.of.values())

    def remark(self) -> str:
        """What there is to say of them, as sentences without a full stop at the end; "" if there is nothing."""
        found = []
        if self.sizes is not None:
            n, m = self.sizes
            found.append(
                f"where its {n} queries are among its {m} keys is not known, as no mask determines it: statistics of "
                f"positions are NaN, and its maps align the queries to the last keys"
            )
        if self.overlap:
            found.append(
                f"it made {self.count} calls in one forward pass, whose blocks of queries would overlap if each query "
                f"were at the last key that it may attend to: it has a window to later keys, say, so that where the "
                f"queries are is not known: statistics of positions are NaN, and its maps align the queries to the "
                f"last keys"
            )
        elif self.blocks and self.count > 1:
            found.append(
                f"it made {self.count} calls in one forward pass, some with fewer queries than keys, each query at the "
                f"last key that it may attend to, as in blocks of causal attention: statistics of rows are over all of "
                f"them; those of keys are of each, and the largest counts"
            )
        elif self.single == self.count > 1:
            found.append(
                f"it made {self.count} calls of one head each in one forward pass, which are one row of the table: "
                f"means over all of them, and the largest maximum. If they are its heads, record.maps has them apart "
                f"(watch(maps='lazy')), one map for each call"
            )
        return "; ".join(found)


@dataclass
class Remarks:
    """Gathers what there is to say of the calls of a forward pass."""

    failed: dict[str, str] = field(default_factory=dict)  # name → why calls of a module could not be measured
    _of: dict[str, _Calls] = field(default_factory=dict)

    def add(self, call: AttentionCall) -> None:
        """Include a call. Of modules that headwise computes, heads are known, and most positions."""
        if call.unstarted:
            self.failed[call.name] = (
                f"which tokens its {call.map.shape[3]} keys are is not known, as its cache drops tokens and no mask "
                f"shows which: statistics of the first tokens and of given tokens are NaN; give the model a 2-D "
                f"attention_mask"
            )
        if computed(call.module) and not call.unplaced:
            return
        _, h, n, m = call.map.shape
        calls = self._of.setdefault(call.name, _Calls())
        calls.count += 1
        calls.single += h == 1
        if call.unplaced:
            calls.sizes = calls.sizes or (n, m)
        elif 1 < n <= m:
            calls.blocks += n < m and call.map.rule.mask.placed
            calls.of.setdefault(call.module, _Blocks()).add(m - n, n)

    def unplaced(self) -> list[str]:
        """The modules whose calls contradict one another in where their queries are."""
        return [name for name, calls in self._of.items() if calls.overlap]

    def found(self) -> dict[str, str]:
        """name → remark, of the modules of which there is one."""
        return self.failed | {name: remark for name, calls in self._of.items() if (remark := calls.remark())}
