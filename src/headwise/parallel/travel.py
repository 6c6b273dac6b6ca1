"""The keys and values of a ring: how far each piece is passed, while ranks compute with what they have.

The plan of a ring: keys and values are passed from each rank to the next, each piece only as far as it is needed. With
hops(p) for the number of hops of a piece p, one call sends, in bytes over all ranks,

    forward:   Σ_p hops(p) · b · h_kv · |p| · (d + d_v) · e
    backward:  Σ_p hops(p) · b · h_kv · |p| · (d + d_v) · (e + 4)

with e bytes per element: in the backward pass keys and values again, and their gradients in float32 (e + 8 in float64),
which the last rank that adds to them returns to the owner. Without a mask hops(p) = R − 1: a rank sends
(R − 1) · b · h_kv · n/R · (d + d_v) · e forward. With a causal mask in the zigzag layout, all but the last chunk make
R − 1 hops; in the contiguous layout, the keys of rank s are needed only by later ranks, R − 1 − s hops, half of the
total. With a window shorter than a rank's part, it is one hop in the contiguous layout for any R. (In the zigzag layout
a window saves little: neighbours in the sequence may be R − 1 hops apart.)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headwise.masks import Span
from headwise.parallel.layout import Layout, Members, Way


@dataclass(frozen=True)
class Plan:
    """Which rank holds which piece of these layouts of queries and keys, and how far each is sent."""

    queries: Layout
    keys: Layout
    hops: tuple[tuple[int, ...], ...]  # for each rank, the number of hops of each of its pieces of keys

    def rows(self, rank: int) -> tuple[Span, ...]:
        """The runs of queries that a rank holds."""
        return _spans(self.queries, rank)

    def cols(self, rank: int) -> tuple[Span, ...]:
        """The pieces of keys that a rank holds at first."""
        return _spans(self.keys, rank)

    def arriving(self, rank: int, hop: int) -> tuple[Span, ...]:
        """The pieces on a rank after a number of hops; they belong to rank − hop."""
        source = (rank - hop) % self.keys.ranks
        return tuple(cols for cols, far in zip(self.cols(source), self.hops[source], strict=True) if far >= hop)

    def ending(self, rank: int, hop: int) -> tuple[Span, ...]:
        """Those of `arriving` that are not passed on."""
        source = (rank - hop) % self.keys.ranks
        return tuple(cols for cols, far in zip(self.cols(source), self.hops[source], strict=True) if far == hop)


def plan(queries: Layout, keys: Layout, way: Way) -> Plan:
    """Make the plan from the mask alone, equal on every rank; nothing is sent."""
    ranks = keys.ranks
    rows = [_spans(queries, rank) for rank in range(ranks)]

    def far(source: int, cols: Span) -> int:
        """The number of hops to the last rank that needs the piece."""
        for hop in range(ranks - 1, 0, -1):
            if any(way.allows(here, cols) for here in rows[(source + hop) % ranks]):
                return hop
        return 0

    hops = tuple(tuple(far(source, cols) for cols in _spans(keys, source)) for source in range(ranks))
    return Plan(queries, keys, hops)


def _spans(layout: Layout, rank: int) -> tuple[Span, ...]:
    """The pieces of a rank."""
    return tuple(Span(piece.start, piece.stop) for piece in layout.pieces(rank))


Held = Mapping[Span, tuple[Tensor, ...]]  # the tensors of each piece of keys, each [b, h_kv, c, …]


def split(x: Tensor, spans: Sequence[Span]) -> list[Tensor]:
    """Split a rank's tensor, [b, h, n_r, …] or [b, h, n_r], into its pieces."""
    return list(x.split([span.size for span in spans], 2))


def travel(own: Held, plan: Plan, who: Members) -> Iterator[tuple[int, Held]]:
    """Yield (hops, pieces on this rank) for 0, 1 … R − 1 hops; the next pieces are sent while the caller uses these."""
    held: Held = own
    for hop in range(who.ranks):
        here = plan.arriving(who.rank, hop)
        held = {cols: held[cols] for cols in here}
        flight = _send_on(own, held, plan, who, hop + 1) if hop + 1 < who.ranks else None
        yield hop, held
        if flight is not None:
            held = flight.land()


class Gradients:
    """Sums of all ranks' gradients of each piece, in the accumulating dtype; they follow the piece around the ring. A
    rank calls `add` once per hop, in the order of hops, and `home` at the end."""

    def __init__(self, own: Held, plan: Plan, who: Members) -> None:
        self.own = own  # sums of this rank's own pieces
        self._plan, self._who = plan, who
        self._like = next(iter(own.values()))
        self._coming: _Flight | None = None
        self._returning: list[_Flight] = []

    def add(self, hop: int, parts: Held) -> None:
        """Add this rank's gradients of the pieces of `hop` hops, and send the sums on."""
        if hop == 0:
            for cols, part in parts.items():
                _add(self.own[cols], part)
        else:
            if self._coming is not None:
                for cols, so_far in self._coming.land().items():
                    _add(parts[cols], so_far)
            self._send(hop, parts)

    def home(self) -> Held:
        """The final sums of this rank's own pieces."""
        for flight in self._returning:
            for cols, total in flight.land().items():
                _add(self.own[cols], total)
        return self.own

    def _send(self, hop: int, parts: Held) -> None:
        """Send the sums of pieces that are passed on to the next rank, then the others to their owner."""
        plan, who = self._plan, self._who
        ending = set(plan.ending(who.rank, hop))
        onward = {cols: part for cols, part in parts.items() if cols not in ending}
        expected = plan.arriving(who.rank, hop + 1) if hop + 1 < who.ranks else ()
        self._coming = _Flight(who, onward, who.rank + 1, expected, who.rank - 1, self._like)
        homeward = {cols: parts[cols] for cols in parts if cols in ending}
        back = plan.ending((who.rank + hop) % who.ranks, hop)
        self._returning.append(_Flight(who, homeward, who.rank - hop, back, who.rank + hop, self._like))


def _send_on(own: Held, held: Held, plan: Plan, who: Members, hop: int) -> "_Flight":
    going = plan.arriving((who.rank + 1) % who.ranks, hop)
    expected = plan.arriving(who.rank, hop)
    like = next(iter(own.values()))
    return _Flight(who, {cols: held[cols] for cols in going}, who.rank + 1, expected, who.rank - 1, like)


class _Flight:
    """One message to a rank and one from a rank; either may be empty."""

    def __init__(
        self, who: Members, sent: Held, to: int, expected: Sequence[Span], source: int, like: tuple[Tensor, ...]
    ) -> None:
        self._expected, self._like, self._who, self._source = expected, like, who, source % who.ranks
        self._out = torch.cat([x.reshape(-1) for parts in sent.values() for x in parts]) if sent else None
        count = sum(cols.size for cols in expected) * sum(map(_each, like))
        self._into = like[0].new_empty(count) if count else None
        operations = []
        if self._out is not None and self._out.numel():
            operations.append(dist.P2POp(dist.isend, self._out, who.peer(to), who.group))
        if self._into is not None:
            operations.append(dist.P2POp(dist.irecv, self._into, who.peer(source), who.group))
        self._works: list[Any] = dist.batch_isend_irecv(operations) if operations else []

    def land(self) -> Held:
        """Wait for both messages and return the received pieces."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self._who.rank} of {self._who.ranks} did not receive keys or gradients from rank "
                f"{self._source}; see the first error there: {error}"
            ) from error
        found: dict[Span, tuple[Tensor, ...]] = {}
        at = 0
        for cols in self._expected:
            parts = []
            for x in self._like:
                b, h = x.shape[:2]
                size = cols.size * _each(x)
                assert self._into is not None or size == 0
                piece = x.new_empty(0) if self._into is None else self._into[at : at + size]
                parts.append(piece.view(b, h, cols.size, *x.shape[3:]))
                at += size
            found[cols] = tuple(parts)
        return found


def _each(x: Tensor) -> int:
    """Number of elements per token in x [b, h_kv, c, …]."""
    return x[:, :, :1].numel() if x.shape[2] else x.shape[0] * x.shape[1] * x.shape[3:].numel()


def _add(total: tuple[Tensor, ...], part: tuple[Tensor, ...]) -> None:
    for into, x in zip(total, part, strict=True):
        into += x
