"""What a record remarks on the calls of a module: what its rows in the table are of, and what is not known."""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from headwise.kernels import events
from headwise.kernels.graph import plain
from headwise.masks import sequences
from headwise.models.adapters.places import computed
from headwise.publishing import AttentionCall
from headwise.text import joined, tr


@dataclass
class _Blocks:
    """A module's blocks of queries, each query taken to be at its last key: causal blocks follow one another; those of
    a window on both sides too, until the end of the keys cuts it off, where one begins before the last has ended."""

    start: int = 0  # positions of the last block
    stop: int = 0
    advanced: bool = False  # whether a block has begun after another
    overlap: bool = False  # whether one has begun too early for causal attention

    def add(self, start: int, n: int) -> None:
        """Include the next one, of n queries."""
        again = start == self.start and self.advanced
        self.overlap |= self.start < start < self.stop or (again and self.start > 0)
        self.advanced |= start >= self.stop > 0
        self.start, self.stop = start, start + n


@dataclass(frozen=True)
class _Keys:
    """The keys of a call, which those of the next one show to be in the order of their tokens, or not."""

    columns: Tensor  # some numbers of each key, [m, …]
    ring: bool = False  # whether a new key has replaced one before others in place

    @classmethod
    def of(cls, call: AttentionCall) -> "_Keys":
        """Those of a call."""
        return cls(plain(call.map.k)[:1, :1, :, :4].sum((0, 1)).nan_to_num())

    def then(self, later: "_Keys") -> tuple["_Keys", bool]:
        """The next call's keys, and whether they are in order: these but the first few, if any, and new ones behind
        them."""
        old, new = self.columns, later.columns
        if old.device != new.device or old.dtype != new.dtype or old.shape[1:] != new.shape[1:] or len(new) < 2:
            return later, False
        dropped = (old == new[0]).all(-1).nonzero().flatten().tolist()
        kept = [len(old) - at for at in dropped]
        if any(size < len(new) and torch.equal(old[-size:], new[:size]) for size in kept):
            return _Keys(new, self.ring), not self.ring
        same = (old == new).all(-1) if len(old) == len(new) else old.new_zeros(1).bool()
        ring = bool(same[1:].any()) and not bool(same[:-1].all())
        return _Keys(new, ring or (self.ring and len(old) == len(new))), False


@dataclass
class _Calls:
    """The calls of one module in a forward pass, and the blocks `of` it and of each of its replicas."""

    count: int = 0  # of all
    single: int = 0  # of those with one head
    blocks: int = 0  # of those with several queries, but fewer than keys, at known positions
    sizes: tuple[int, int] | None = None  # queries and keys of the first call of unknown positions
    of: "WeakKeyDictionary[nn.Module, _Blocks]" = field(default_factory=WeakKeyDictionary)
    steps: tuple[int, int] | None = None  # queries and keys of the first step with a cache of unknown order
    ring: bool = False  # whether that order is known not to be that of the tokens
    apart: str = ""  # what there is to say of sequences that the mask keeps apart

    @property
    def overlap(self) -> bool:
        """Whether the positions of its blocks contradict one another."""
        return any(one.overlap for one in self.of.values())

    def remark(self) -> str:
        """What there is to say of them, as sentences without a full stop at the end; "" if there is nothing."""
        found = [self.apart] if self.apart else []
        if self.sizes is not None:
            n, m = self.sizes
            found.append(
                f"where its {n} queries are among its {m} keys is not known, as no mask determines it: statistics of "
                f"positions are NaN, and its maps align the queries to the last keys"
            )
        if self.ring:
            found.append(
                "a new key replaces an old one in place, as in a rolling buffer, so that its keys are not in the order "
                "of their tokens: statistics of positions are NaN, and sink_mass is of the first key in the buffer"
            )
        elif self.steps is not None:
            n, m = self.steps
            found.append(
                f"its {n} queries are taken to be the last of its {m} keys, and these to be in the order of their "
                f"tokens, as no mask shows another; in a buffer that is written in place, such as a rolling one, they "
                f"may not be, and statistics of positions mean nothing then"
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

    _said: dict[str, dict[str, None]] = field(default_factory=dict)  # name → what is said of a module beside its calls
    _of: dict[str, _Calls] = field(default_factory=dict)
    _keys: dict[str, _Keys] = field(default_factory=dict)  # of the last call of each module

    def next(self) -> "Remarks":
        """Return those of the next forward pass."""
        return Remarks(_keys=self._keys)

    def say(self, name: str, remark: str) -> None:
        """Add a remark on a module."""
        self._said.setdefault(name, {})[remark] = None

    def add(self, call: AttentionCall) -> None:
        """Include a call. Of modules that headwise computes, heads are known, and most positions."""
        if call.unstarted:
            self.say(
                call.name,
                f"which tokens its {call.map.shape[3]} keys are is not known, as its cache drops tokens and no mask "
                f"shows which: statistics of the first tokens and of given tokens are NaN; give the model a 2-D "
                f"attention_mask",
            )
        known = computed(call.module)
        if apart := _apart(call, known):
            self._of.setdefault(call.name, _Calls()).apart = apart
        if known and not call.unplaced:
            return
        _, h, n, m = call.map.shape
        calls = self._of.setdefault(call.name, _Calls())
        calls.count += 1
        calls.single += h == 1
        keys, ordered, k = _Keys.of(call), False, call.map.k
        if (last := self._keys.get(call.name)) is not None and n < m:
            keys, ordered = last.then(keys)
        self._keys[call.name] = keys
        if n < m and not call.unplaced and not call.map.rule.mask.placed:
            calls.ring |= keys.ring
            # Keys that code has joined anew are in order; what was written to, or repeated for groups, may not be.
            if not ordered and (k.shape[1] < h or k.is_inference() or k._version > 0):
                calls.steps = calls.steps or (n, m)
        if call.unplaced:
            calls.sizes = calls.sizes or (n, m)
        elif 1 < n <= m:
            calls.blocks += n < m and call.map.rule.mask.placed
            calls.of.setdefault(call.module, _Blocks()).add(m - n, n)

    def unplaced(self) -> list[str]:
        """The modules of which it is known that their queries or keys are elsewhere than taken to be."""
        return [name for name, calls in self._of.items() if calls.overlap or calls.ring]

    def found(self) -> dict[str, str]:
        """name → remark, of the modules of which there is one."""
        found: dict[str, str] = {name: joined(remarks, tr("; ")) for name, remarks in self._said.items()}
        for name, calls in self._of.items():
            if remark := calls.remark():
                found[name] = joined([found[name], remark], tr("; ")) if name in found else remark
        return found


def _apart(call: AttentionCall, known: bool) -> str:
    """What to say of sequences in a row that the mask keeps apart, one of which may be padding; "" if given as such."""
    rule = call.map.rule
    if rule.grid.n != rule.grid.m or events.crosses(call.name):
        return ""
    count, alone, given = sequences(rule.mask, rule.grid)
    if alone > 1:
        return (
            f"{alone} tokens at one end of a row of the batch attend to themselves alone, as padding does under a mask "
            f"with the diagonal: if they are padding, statistics include it; hide it from all queries, itself too"
        )
    if count > 1 and not (known and given):
        return (
            f"its mask keeps {count} sequences of a row of the batch apart: if one is padding that attends to itself, "
            f"statistics include it; hide it from all queries, itself too"
        )
    return ""
