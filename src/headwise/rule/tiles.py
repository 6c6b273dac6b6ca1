"""Tiles of an attention matrix, recomputed one after another from q, k and the log-sum-exp.

`stream` yields the tiles that are not empty, row block by row block. A tile computes its properties on demand and
caches them, so that many measures share one product q·kᵀ and one exp().
"""

import math
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from headwise.base.run import Progress
from headwise.masks import Span, State
from headwise.rule import Rule, Terms, compute, score_tile, sink_weight

COMPUTING = "computing rows"  # the stage reported to `progress=`


class Scratch:
    """Buffers that the tiles of a stream reuse: allocating memory for each tile takes longer than computing it."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return contiguous, uninitialized memory of that shape, in the dtype and on the device of `like`."""
        size = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.numel() < size:
            held = self._held[name] = like.new_empty(size)
        return held[:size].view(shape)


class Tile:
    """Rows × columns of the attention matrix, for all batch entries and heads.

    The tensors of a tile are valid until the stream yields the next tile; clone those to keep.

    Attributes:
        rows, cols: query and key ranges.
        state: MIXED or FULL.
        lse: [b, h, r] log-sum-exp of the rows.
        first, last: whether this is the first or the last tile of its row block.
    """

    def __init__(
        self, q: Tensor, k: Tensor, lse: Tensor, rule: Rule, terms: Terms, rows: Span, cols: Span, state: State,
        scratch: Scratch,
    ) -> None:  # fmt: skip
        self._q, self._k, self.lse, self.rule, self._terms, self._scratch = q, k, lse, rule, terms, scratch
        self.rows, self.cols, self.state = rows, cols, state
        self.first = self.last = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[b, h, r, c]"""
        b, h, r = self.lse.shape
        return b, h, r, self.cols.size

    @cached_property
    def allowed(self) -> Tensor | None:
        """Boolean mask [b or 1, h or 1, r, c], or None if every pair is allowed."""
        return None if self.state is State.FULL else self.rule.allowed(self.rows, self.cols, self._q.device)

    @cached_property
    def log_weights(self) -> Tensor:
        """ln of the weights, [b, h, r, c]; −∞ where masked."""
        # A fully masked query has lse = -inf; +inf instead makes all its weights 0.
        return self._scores("log_weights", self.lse.masked_fill(self.lse == -torch.inf, torch.inf))

    @property
    def scores(self) -> Tensor:
        """The scores, [b, h, r, c], as `logits` but not computed from the log-weights."""
        return self._scores("scores", None)

    def _scores(self, name: str, minus: Tensor | None) -> Tensor:
        room = self._scratch.take(name, self.shape, self.lse)
        added = self._terms.added(self.rows, self.cols)
        logs = score_tile(self._q, self._k, self.rule.scale, self._terms.soft_cap, added, minus=minus, out=room)
        return logs if self.allowed is None else logs.masked_fill_(~self.allowed, -torch.inf)

    @cached_property
    def weights(self) -> Tensor:
        """The weights, [b, h, r, c]; exactly 0 where masked. Rows sum to 1, or to less with a learned sink."""
        return torch.exp(self.log_weights, out=self._scratch.take("weights", self.shape, self.lse))

    @property
    def logits(self) -> Tensor:
        """The scores before the softmax, [b, h, r, c]; −∞ where masked."""
        return self.log_weights + self.lse[..., None]

    @cached_property
    def among_keys(self) -> tuple[Tensor, Tensor]:
        """top [b, h, r] and e [b, h, r, c]: exp(top) · e are the weights up to a factor of the row. They are 0 and the
        weights; or with a learned sink, where weights may underflow, the largest score and exp(S − top)."""
        if self._terms.sinks is None:
            return torch.zeros_like(self.lse), self.weights
        scores = self.scores
        top = scores.amax(-1)
        scores -= top.masked_fill(top == -torch.inf, 0.0)[..., None]
        return top, scores.exp_()

    @cached_property
    def mass(self) -> Tensor:
        """Sum of the weights over the tile's keys, [b, h, r]."""
        return self.weights.sum(-1)

    @cached_property
    def largest_log_weight(self) -> Tensor:
        """[b, h, r]"""
        return self.log_weights.amax(-1)

    @cached_property
    def entropy(self) -> Tensor:
        """The tile's share of each row's entropy, −Σ p ln p over the keys, [b, h, r] in nats."""
        # −∞ from a mask, a bias or a non-finite key is clamped: 0 · −∞ would be NaN.
        logs = self.log_weights.clamp_min(torch.finfo(self.lse.dtype).min)
        return -torch.mul(self.weights, logs, out=self._scratch.take("product", self.shape, self.lse)).sum(-1)

    @cached_property
    def sink_weight(self) -> Tensor:
        """The weight of the learned sink in each row, [b, h, r]; 0 without one."""
        if self._terms.sinks is None:
            return torch.zeros_like(self.lse)
        return sink_weight(self._terms.sinks, self.lse)

    @cached_property
    def allowed_keys(self) -> Tensor:
        """The number of keys of the tile that each query may attend to, [b, h, r]."""
        if self.allowed is None:
            return torch.full_like(self.lse, self.shape[-1])
        return self.allowed.sum(-1).to(self.lse).expand(self.lse.shape)

    def rounded(self, lse: Tensor, scratch: Scratch) -> "Tile":
        """The same tile in the dtype of lse [b, h, r]; its log-weights are rounded to it, not computed in it."""
        q, k, terms = self._q.to(lse.dtype), self._k.to(lse.dtype), self.rule.terms(lse)
        same = Tile(q, k, lse, self.rule, terms, self.rows, self.cols, self.state, scratch)
        same.first, same.last, same.log_weights = self.first, self.last, self.log_weights.to(lse.dtype)
        return same

    @property
    def positions(self) -> Tensor:
        """Positions of the queries, [r], counted as `keys` are."""
        first = self.rule.grid.first_token
        return torch.arange(self.rows.start + first, self.rows.stop + first, device=self.lse.device)

    @property
    def tokens(self) -> Span:
        """The tokens that its keys are: `cols`, but of all tokens if a cache has dropped some. No tile has keys on both
        sides of such a gap, or both tokens and the negative numbers of keys that are none (`Grid.extra`)."""
        first = self.rule.grid.token(self.cols.start)
        return Span(first, first + self.cols.size)

    @property
    def extra(self) -> bool:
        """Whether its keys are no tokens, and so have no distance."""
        return self.tokens.start < 0

    @property
    def keys(self) -> Tensor:
        """Positions of the keys, [c], the first token having 0: `tokens` as a tensor."""
        return torch.arange(*self.tokens, device=self.lse.device)

    @cached_property
    def mean_distance(self) -> Tensor:
        """Σ p·d over the tile with d = |position − key|, [b, h, r] in float64. With all keys on one side of all rows it
        is a thin matrix product; its origin, the tile's near edge, keeps float32 accurate at any distance."""
        if self.extra:
            return torch.zeros_like(self.lse, dtype=torch.float64)
        position, key, tokens = self.positions, self.keys, self.tokens
        before, after = tokens.stop - 1 <= int(position[0]), tokens.start >= int(position[-1])
        if not (before or after):
            distance = (position[:, None] - key).abs().to(self.weights.dtype)
            return (self.weights * distance).sum(-1).double()
        edge = tokens.stop - 1 if before else tokens.start
        near, step = (edge - position).abs().double(), (key - edge).abs().to(self.weights.dtype)
        # `linear`, because a product with a tall matrix of two columns would be many times slower.
        powers = torch.stack((torch.ones_like(step), step))
        mass, first = torch.nn.functional.linear(self.weights, powers).double().unbind(-1)
        return near * mass + first

    @cached_property
    def distance_spread(self) -> Tensor:
        """For d = |position − key| over the tile, with top and e of `among_keys`: top, Σ e, the mean of d and
        Σ e·(d − mean)², [b, h, r, 4] in float64. Moments about 0 would cancel for a few similar, large distances."""
        top, e = self.among_keys
        if self.extra:
            zero = torch.zeros_like(top, dtype=torch.float64)
            return torch.stack((top.double(), zero, zero, zero), -1)
        position, key = self.positions, self.keys
        middle = (position - sum(self.tokens) // 2).abs()
        offset = ((position[:, None] - key).abs() - middle[:, None]).to(e.dtype)  # [r, c], small integers
        room = self._scratch.take("product", self.shape, self.lse)
        mass = e.sum(-1)
        safe = mass.masked_fill(mass == 0, 1.0)
        mean = torch.mul(e, offset, out=room).sum(-1) / safe
        rest = torch.sub(offset, mean[..., None], out=self._scratch.take("rest", self.shape, self.lse))
        part = torch.mul(e, rest, out=room)
        first = part.sum(-1)  # the rounding error of the mean
        second = part.mul_(rest).sum(-1)
        mean = middle.double() + mean.double() + first.double() / safe.double()
        return torch.stack((top.double(), mass.double(), mean, second.double()), -1)

    def diagonal(self, offset: int) -> tuple[Tensor, Tensor]:
        """The weight of the key at position + offset, and whether it is in this tile and unmasked: both [b, h, r]."""
        target = self.positions + offset - self.tokens.start
        inside = (target >= 0) & (target < self.shape[-1])
        if self.extra or not bool(inside.any()):
            nothing = torch.zeros_like(self.lse)
            return nothing, nothing.bool()
        index = target.clamp(0, self.shape[-1] - 1)[:, None]
        weight = self.weights.gather(-1, index.expand(*self.lse.shape, 1)).squeeze(-1)
        open_ = inside.expand(self.lse.shape)
        if self.allowed is not None:
            cells = self.allowed.expand(*self.allowed.shape[:2], *self.shape[2:])
            open_ = open_ & cells.gather(-1, index.expand(*cells.shape[:3], 1)).squeeze(-1)
        return torch.where(inside, weight, 0.0), open_


def log_sums(q: Tensor, k: Tensor, lse: Tensor, rule: Rule) -> Tensor:
    """The log-sum-exp of whole rows by their scores, with a sink: [b, h, n]; that of lse where it is not finite."""
    found = torch.full_like(lse, -torch.inf)
    for tile in stream(q, k, lse, rule):
        rows = slice(*tile.rows)
        found[:, :, rows] = torch.logaddexp(found[:, :, rows], tile.scores.logsumexp(-1))
    sinks = rule.terms(lse).sinks
    found = found if sinks is None else torch.logaddexp(found, sinks.detach()[:, None])
    return torch.where(lse.isfinite(), found, lse)


def tops(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The larger of two tiles' tops (`Tile.among_keys`), and the factors that rescale the e of each to it."""
    top = torch.maximum(one, other)
    base = top.masked_fill(top == -torch.inf, 0.0)
    return top, (one - base).exp(), (other - base).exp()


def scores_at(
    q: Tensor, k: Tensor, lse: Tensor, rule: Rule, batch: range, heads: range, rows: range, cols: range, *,
    less_lse: bool = False,
) -> Tensor:  # fmt: skip
    """The scores at these indices, −∞ where masked; or ln of the weights, which are the scores less the log-sum-exp."""
    i, j = (torch.tensor(list(x), dtype=torch.long, device=q.device) for x in (rows, cols))
    b_at, h_at = (torch.tensor(list(x), dtype=torch.long, device=q.device) for x in (batch, heads))
    h_kv = h_at // (q.shape[1] // k.shape[1])

    def pick(x: Tensor) -> Tensor:
        return x.expand(*q.shape[:2], *x.shape[2:])[b_at][:, h_at]

    lse = lse[b_at][:, h_at][:, :, i]
    terms = rule.terms(lse)
    minus = lse.masked_fill(lse == -torch.inf, torch.inf) if less_lse else None
    added = map(pick, terms.added_at(i, j))
    logs = score_tile(
        q[b_at][:, h_at][:, :, i], k[b_at][:, h_kv][:, :, j], rule.scale, terms.soft_cap, added, minus=minus
    )
    return logs.masked_fill_(~pick(rule.mask.allowed(i, j, rule.grid)), -torch.inf)


def rows_at(q: Tensor, k: Tensor, rule: Rule, query: Tensor) -> Tensor:
    """The weights of one query of each head, whose numbers are in `query` [b, h]: [b, h, m] in float64, exact up to the
    rounding of the scores, so that they sum to 1."""
    b, h, _, m = rule.grid
    some, place = query.unique(return_inverse=True)
    keys = torch.arange(m, device=q.device)

    def pick(x: Tensor) -> Tensor:
        x = x.expand(b, h, x.shape[2], m)
        return x if x.shape[2] == 1 else x.gather(2, place[..., None, None].expand(b, h, 1, m))

    terms = rule.terms(compute(q[..., :0]))
    own = q.gather(2, query[..., None, None].expand(b, h, 1, q.shape[3]))
    added = map(pick, terms.added_at(some, keys))
    scores = score_tile(own, k, rule.scale, terms.soft_cap, added).double()
    scores.masked_fill_(~pick(rule.mask.allowed(some, keys, rule.grid)), -torch.inf)
    total = scores.logsumexp(-1)
    if terms.sinks is not None:
        total = torch.logaddexp(total, terms.sinks[:, None])
    return (scores - total.masked_fill(total == -torch.inf, torch.inf)[..., None]).exp_()[:, :, 0]


def stream(
    q: Tensor, k: Tensor, lse: Tensor, rule: Rule, *, width: int | None = None, multiple: int = 1,
    progress: Progress | None = None,
) -> Iterator[Tile]:  # fmt: skip
    """Yield the non-empty tiles by row blocks, in each from the first key on. width: keys per tile, which may lie on
    both sides of a gap; the rows of a block are a multiple of `multiple`; progress: called after each row block."""
    scratch, terms, sides = Scratch(), rule.terms(lse), rule.grid.sides()
    for rows in rule.row_blocks(multiple):
        block_q, block_lse = q[:, :, rows.start : rows.stop], lse[:, :, rows.start : rows.stop]
        previous: Tile | None = None
        apart = (tile for side in sides for tile in rule.tiles(rows, within=side))
        for cols, state in apart if width is None else rule.tiles(rows, width):
            tile = Tile(block_q, k[:, :, cols.start : cols.stop], block_lse, rule, terms, rows, cols, state, scratch)
            # Tiles are yielded one step late, so that `last` of a row block is known.
            if previous is None:
                tile.first = True
            else:
                yield previous
            previous = tile
        if previous is not None:
            previous.last = True
            yield previous
        if progress is not None:
            progress(COMPUTING, rows.stop, rule.grid.n)
