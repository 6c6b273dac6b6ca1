"""Designs whose heads are mixed: head-mixing attention, and talking heads."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from headwise.cache import BudgetCache, Cache
from headwise.costs.work import Counts
from headwise.errors import ConfigError, ShapeError
from headwise.kernels.graph import has_derivatives, has_no_numbers, is_batched
from headwise.map import AttentionMap
from headwise.map.attention import attend_to, nonfinite_values
from headwise.masks import Everything, Grid, Mask, Span
from headwise.masks.grid import NO_GAP
from headwise.nn.base import ProjectedLayer
from headwise.nn.layout import Coupling, Layout, Part, Resizing
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.steps import Notes, Steps
from headwise.rule import TILE_ELEMENTS, Rule, compute, grouped, own_dtypes, raw_scores, seen_nonfinite
from headwise.scores import Score
from headwise.wording import tr


class HeadMixingAttention(ProjectedLayer):
    """H' = Attention(M·Q, M·K, M·V) along the head axis, y = Concat(H'_1 … H'_h) W_O.

    H [h, d_v] are a token's heads after the usual attention along the sequence; Q = H U^Q, K = H U^K, V = H U^V are
    their projections, the same for every head; M [h, h] is a learned map over heads, the identity at the start; and
    Attention is softmax(· / √d_v) with h queries and h keys. No token is mixed with another in this second step, so
    masks apply as usual.

    Args:
        d_model, num_heads, options: sizes, bias (of the projections and W_O), dropout, rotary and qk_norm, as in
            `MultiHeadAttention`.

    Parameters: those of `MultiHeadAttention`, 3·d_v² and h².
    Cost: that of `MultiHeadAttention` and, for each token, 6·h·d_v² + 6·h²·d_v + 4·h²·d_v operations.
    Source: learned maps over heads as in Shazeer et al. 2020, 2003.02436, put before an attention (1706.03762, eq. 1)
        whose sequence is the list of heads.
    """

    coupling = Coupling(
        "heads", "each of its heads is a query, a key and a value in a second attention, over the heads"
    )
    resizing = Resizing()
    outside_attend = ""
    notes = Notes(
        summary=tr("the heads of a token attend to one another"),
        use=tr("the heads of a token should attend to one another"),
        source="an attention along the head axis, after 2003.02436",
        parameters="MHA's + 3·d_v² + h²",
        work="a token: 3·h·d_v² + 5·h²·d_v more",
        cache="MHA's",
        limits={},
        map=tr("Weights are those over the text; afterwards the heads of each token attend to one another."),
        compared=None,
        form_of=None,
    )

    def __init__(self, d_model: int, num_heads: int, *, bias: bool = False, **options: Any) -> None:
        super().__init__(d_model, num_heads, bias=bias, **options)
        self.o_proj = nn.Linear(num_heads * self.value_dim, d_model, bias=bias)
        self.u_q, self.u_k, self.u_v = (nn.Linear(self.value_dim, self.value_dim, bias=False) for _ in range(3))
        self.head_map = nn.Parameter(torch.eye(num_heads))

    def mix(self, heads: Tensor, *, return_map: bool = False) -> tuple[Tensor, AttentionMap | None]:
        """Return the heads [b, h, n, d_v] after the attention over heads, and its map [b·n, 1, h, h] or None."""
        b, h, n, d = heads.shape
        of_token = heads.transpose(1, 2).reshape(b * n, h, d)
        q, k, v = (
            torch.einsum("gh,thd->tgd", self.head_map, u(of_token))[:, None] for u in (self.u_q, self.u_k, self.u_v)
        )
        mixed, amap = attend_to(q, k, v, return_map=return_map)
        return mixed.view(b, n, h, d).transpose(1, 2), amap

    def merge(self, heads: Tensor, x: Tensor) -> Tensor:
        """The mixed heads side by side, [b, n, h·d_v]."""
        return super().merge(self.mix(heads)[0], x)

    def layout(self) -> Layout:
        """As in `ProjectedLayer`, rows and columns of M, and columns of W_O."""
        mixes = [Part("mix", self, "head_map", axis, "query", 1) for axis in (0, 1)]
        return super().layout().into(self.o_proj, self.value_dim).more(mixes)

    @staticmethod
    def costs(d_model: int, num_heads: int, **options: Any) -> Counts:
        """`multi_head`, and then each token's heads attend to one another: 3d_v² + h² weights, and for each token
        3h·d_v² + 5h²·d_v multiply-adds before W_O."""
        full, h = MultiHeadAttention.costs(d_model, num_heads, **options), num_heads
        d_v = full.concat // h
        weights = 3 * d_v * d_v + h * h
        return replace(
            full, parameters=full.parameters + weights, output=full.output + 3 * h * d_v * d_v + 5 * h * h * d_v,
            output_weights=full.output + weights,
        )  # fmt: skip

    def steps(self, x: Tensor, note: Steps) -> None:
        heads = note.back(note.attended(*note.projected(self, x)))
        q, k, v = (self.head_map @ u(heads) for u in (self.u_q, self.u_k, self.u_v))
        note(
            "q_over_heads", q, "b n h d_v", "Q' = M H U^Q", tr("queries over the heads of a token"))  # fmt: skip
        note("k_over_heads", k, "b n h d_v", "K' = M H U^K", tr("keys over the heads"))
        note("v_over_heads", v, "b n h d_v", "V' = M H U^V", tr("values over the heads"))
        scores = q @ k.mT / self.value_dim**0.5
        note("scores_over_heads", scores, "b n h h", "S' = Q' K'ᵀ / √d_v",
             tr("how well the heads of a token match"))  # fmt: skip
        weights = scores.softmax(-1)
        note("weights_over_heads", weights, "b n h h", "P' = softmax(S')", tr("weights over the heads"))
        mixed = weights @ v
        note("mixed", mixed, "b n h d_v", "H ← P' V'",
             tr("each head: the weighted sum of the heads it attends to"))  # fmt: skip
        note.projected_out(self, note.side_by_side(mixed))

    @torch.no_grad()
    def map_of_heads(self, x: Tensor, context: Tensor | None = None, *, mask: Mask | None = None) -> AttentionMap:
        """Return the map of the attention over heads, [b·n, 1, h, h], one entry per token."""
        self.check(x, context, None, mask)
        q, k, v = self.project(x, x if context is None else context)
        q, k = self.apply_rope(q, k, 0)
        amap = self.mix(self.attention(q.to(v.dtype), k.to(v.dtype), v, mask=mask)[0], return_map=True)[1]
        assert amap is not None
        return amap


class TalkingHeadsAttention(ProjectedLayer):
    """J_l = Q_l K_lᵀ / √d_k,  L_j = Σ_l J_l P_lj,  W_j = softmax(L_j),  U_i = Σ_j W_j R_ji,  head_i = U_i V_i.

    P ("logits_mix") and R ("weights_mix") are [h, h], the identity at the start, which is multi-head attention.
    Masks apply after the first mix. Scores are not supported, as a bias differs in meaning before and after the mix.
    Query rows are computed block by block and recomputed in the backward pass, so memory is O(rows · m · h) for any n;
    the result is exact. Within torch.func they are kept for the backward pass: O(n · m · h).

    The map (`return_map`) holds the softmax weights W_j. An `AttentionMap` stores a weight as exp(q·k − lse), and W_j
    has that form: L_j is the product of the queries Σ_l P_lj Q_l, concatenated over the KV heads, with the concatenated
    keys, which takes h_kv·d_k numbers per query and head. The weights applied to the values, U_i, do not have that
    form: a sum of exponentials is not an exponential of a sum, and no single log-sum-exp normalizes it. `mixed(tile)`
    computes U from any tile of W. As each query of the map is a mix of those of all heads, NaN in the queries or keys
    of one head is counted in all of them; NaN in values is counted in its own KV head.

    Args:
        d_model, num_heads, options: sizes, bias, dropout (of U), rotary and qk_norm, as in `MultiHeadAttention`.

    Parameters: those of `MultiHeadAttention` and 2·h².
    Cost: that of `MultiHeadAttention` and 4·n·m·h² for the two mixes.
    Source: Shazeer et al. 2020, 2003.02436, with h_k = h = h_v.
    """

    takes_score = False
    takes_none_as: ClassVar[Mapping[str, str]] = {
        "score": "a bias differs in meaning before and after the heads are mixed"
    }
    notes = Notes(
        summary=tr("learned maps over heads before and after the softmax"),
        use=tr("heads should share scores and weights; for short texts, as no fused kernel supports it"),
        source="Shazeer et al. 2020, 2003.02436",
        parameters="MHA's + 2·h²",
        work="a pair: 2·h² more",
        cache="MHA's",
        limits={},
        map=tr("Weights are those of the softmax; the heads are mixed once more before they reach the values."),
        compared=None,
        form_of=None,
    )

    coupling = Coupling(
        "scores",
        "its heads mix their weights, before the softmax and after it, and no head has scores or an output of its own",
    )
    resizing = Resizing()
    outside_attend = "its weights are computed by the layer itself, which mixes them over heads"

    def __init__(self, d_model: int, num_heads: int, *, bias: bool = False, **options: Any) -> None:
        super().__init__(d_model, num_heads, bias=bias, **options)
        self.o_proj = nn.Linear(num_heads * self.value_dim, d_model, bias=bias)
        self.logits_mix = nn.Parameter(torch.eye(num_heads))
        self.weights_mix = nn.Parameter(torch.eye(num_heads))

    def layout(self) -> Layout:
        """As in `ProjectedLayer`, rows and columns of both mixes, and columns of W_O."""
        mixes = [Part("mix", self, f"{x}_mix", axis, "query", 1) for x in ("logits", "weights") for axis in (0, 1)]
        return super().layout().into(self.o_proj, self.value_dim).more(mixes)

    @staticmethod
    def costs(d_model: int, num_heads: int, **options: Any) -> Counts:
        """`multi_head` and two h×h maps between the heads' scores and weights: 2h² more weights, 4n²h² more FLOPs
        (Shazeer et al. 2020, 2003.02436)."""
        plain, maps = MultiHeadAttention.costs(d_model, num_heads, **options), 2 * num_heads * num_heads
        return replace(plain, parameters=plain.parameters + maps, mixing=maps)

    def steps(self, x: Tensor, note: Steps) -> None:
        q, k, v = note.projected(self, x)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        logits = torch.einsum("bhnm,hj->bjnm", note.scores(q, k), self.logits_mix)
        note("talk_logits", logits, "b h n m", "L_j = Σ_l S_l P_lj", tr("the heads' scores are mixed"))
        softmax = note.weights(logits, scores_as="L", weights_as="W")
        mixed = torch.einsum("bhnm,hj->bjnm", softmax, self.weights_mix)
        note("talk_weights", mixed, "b h n m", "U_i = Σ_j W_j R_ji", tr("the heads' weights are mixed"))
        heads = mixed @ v
        note("heads", heads, "b h n d_v", "H = U V",
             tr("each head: the sum of the values, weighted by the mix"))  # fmt: skip
        note.output(self, heads)

    def check(
        self, x: Tensor, context: Tensor | None, cache: Cache | None, mask: Mask | None, scores: tuple[Score, ...] = ()
    ) -> None:
        """As in `AttentionLayer`; a cache must keep the same tokens for all heads, since the logits of each head depend
        on the scores of all."""
        super().check(x, context, cache, mask, scores)
        if isinstance(cache, BudgetCache) and len(set(cache.windows)) > 1:
            raise ConfigError(
                f"cache: TalkingHeadsAttention mixes the scores of all heads, which requires equal windows, got "
                f"{list(cache.windows)}; use SlidingCache"
            )

    def mixed(self, tile: Tensor) -> Tensor:
        """Return U [b, h, r, c], the weights applied to the values, for a tile of W [b, h, r, c], such as
        `amap[:, :, :8]`."""
        if tile.ndim != 4 or tile.shape[1] != self.num_heads:
            raise ShapeError(f"tile: expected [b, h={self.num_heads}, rows, cols], got shape {tuple(tile.shape)}")
        return _over_heads(tile, self.weights_mix.detach())

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Any]:
        """As in `AttentionLayer`, one block of rows at a time."""
        mask, dropout_p = options["mask"] or Everything(), options["dropout_p"]
        b, h, n, d = q.shape
        rule = Rule(mask, d**-0.5, Grid(b, h, n, k.shape[2], gap=options.get("gap", NO_GAP)))
        rule.mask.check(rule.grid)
        if torch.compiler.is_exporting():  # blocks would fix the sizes
            mixes, whole = (self.logits_mix, self.weights_mix), (Span(0, n), Span(0, k.shape[2]))
            blocks = [_attend_block(q, k, v, *mixes, rule, *whole, dropout_p)]
        else:
            height = max(16, TILE_ELEMENTS // max(1, b * h * k.shape[2]))
            blocks = [self._block(q, k, v, rule, Span(i, min(i + height, n)), dropout_p) for i in range(0, n, height)]
        heads = torch.cat([out for out, _ in blocks], 2) if blocks else q.new_zeros(b, h, n, v.shape[-1])
        if not options["return_map"]:
            return heads, None
        lse = torch.cat([part for _, part in blocks], 2) if blocks else q.new_zeros(b, h, n)
        h_kv = k.shape[1]
        # In the dtype of the logits: rounded products of queries and mix would be those of other logits.
        exact, mix = compute(q.detach()), compute(self.logits_mix.detach()).view(h_kv, h // h_kv, h)
        talking = torch.einsum("bgrnd,grj->bjngd", exact.reshape(b, h_kv, h // h_kv, n, d), mix)
        keys = compute(k.detach()).transpose(1, 2).flatten(2)[:, None]  # [b, 1, m, h_kv·d]
        amap = AttentionMap(
            talking.flatten(3), keys, lse, rule, kernel="talking_heads", nonfinite_values=nonfinite_values(v)
        )
        if options["measures"]:
            amap.measured = amap.measure(*options["measures"])
        return heads, amap

    def _block(
        self, q: Tensor, k: Tensor, v: Tensor, rule: Rule, rows: Span, dropout_p: float
    ) -> tuple[Tensor, Tensor]:
        """Return the output [b, h, r, d_v] and log-sum-exp [b, h, r] of some rows, from the keys visible to them."""
        visible = [cols for cols, _ in rule.tiles(rows)]
        cols = Span(visible[0].start, visible[-1].stop) if visible else Span(0, 0)
        r, c = slice(rows.start, rows.stop), slice(cols.start, cols.stop)
        mixes = self.logits_mix, self.weights_mix
        given = q[:, :, r], k[:, :, c], v[:, :, c], *mixes, rule, rows, cols, dropout_p
        if not torch.is_grad_enabled() or has_derivatives():  # torch.func does not support checkpoint
            return _attend_block(*given)
        return checkpoint(_attend_block, *given, use_reentrant=False, preserve_rng_state=dropout_p > 0)


def _attend_block(
    q: Tensor, k: Tensor, v: Tensor, logits_mix: Tensor, weights_mix: Tensor, rule: Rule, rows: Span, cols: Span,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    allowed = rule.allowed(rows, cols, q.device)
    fully_masked = ~allowed.any(-1, keepdim=True)
    scores = _over_heads(raw_scores(q, k, rule.scale), logits_mix)
    scores = scores.masked_fill(~allowed, -torch.inf).masked_fill(fully_masked, 0.0)
    weights = scores.softmax(-1).masked_fill(~allowed, 0.0)
    applied = F.dropout(_over_heads(weights, weights_mix), dropout_p)
    lse = scores.detach().logsumexp(-1).masked_fill(fully_masked[..., 0], -torch.inf)
    if torch.compiler.is_compiling() or has_no_numbers(v) or (not is_batched(v) and bool(torch.isfinite(v).all())):
        return grouped(applied, v).to(q.dtype), lse
    lost = seen_nonfinite(allowed, v, scores)  # and not by masked weights, which are 0
    return grouped(applied, v.nan_to_num(0.0, 0.0, 0.0)).masked_fill(lost, torch.nan).to(q.dtype), lse


def _over_heads(tile: Tensor, mix: Tensor) -> Tensor:
    """Σ_l tile_l mix_lj: [b, h, r, c]. Computed in the tile's own precision, also under autocast."""
    with own_dtypes(tile):
        if torch.compiler.is_exporting():  # other systems do not know the power of a length, r·c of a whole matrix
            return torch.matmul(mix.to(tile.dtype).mT[None, None], tile.transpose(1, 2)).transpose(1, 2)
        return torch.einsum("blrc,lj->bjrc", tile, mix.to(tile.dtype))
