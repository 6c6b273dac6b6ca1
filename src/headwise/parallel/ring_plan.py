"""The plan of a ring: keys and values are passed from each rank to the next, each piece only as far as it is needed.

With hops(p) for the number of hops of a piece p, one call sends, in bytes over all ranks,

    forward:   Σ_p hops(p) · b · h_kv · |p| · (d + d_v) · e
    backward:  Σ_p hops(p) · b · h_kv · |p| · (d + d_v) · (e + 4)

with e bytes per element: in the backward pass keys and values again, and their gradients in float32 (e + 8 in float64),
which the last rank that adds to them returns to the owner. Without a mask hops(p) = R − 1: a rank sends
(R − 1) · b · h_kv · n/R · (d + d_v) · e forward. With a causal mask in the zigzag layout, all but the last chunk make
R − 1 hops; in the contiguous layout, the keys of rank s are needed only by later ranks, R − 1 − s hops, half of the
total. With a window shorter than a rank's part, it is one hop in the contiguous layout for any R. (In the zigzag layout
a window saves little: neighbours in the sequence may be R − 1 hops apart.)
"""

from dataclasses import dataclass

from headwise.masks import Span
from headwise.parallel.blocks import Way
from headwise.parallel.layout import Layout


@dataclass(frozen=True)
class Plan:
    """Which rank holds which piece, and how far it is sent.

    Attributes:
        queries, keys: their layouts.
        hops: for each rank, the number of hops of each of its pieces of keys.
    """

    queries: Layout
    keys: Layout
    hops: tuple[tuple[int, ...], ...]

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
