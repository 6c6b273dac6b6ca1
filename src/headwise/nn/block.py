"""The Transformer block: attention and a feed-forward network, each with a residual connection and a norm."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from headwise.cache import Cache
from headwise.errors import DTypeError, ShapeError, check_choice
from headwise.masks import Mask
from headwise.nn.base import AttentionLayer
from headwise.nn.layout import check_share, flag, size
from headwise.scores import Score
from headwise.stats import Measure
from headwise.table.show import Shown

ORDERS = ("pre", "post")
NORMS: dict[str, type[nn.Module]] = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": nn.functional.gelu,
    "relu": nn.functional.relu,
    "silu": nn.functional.silu,
}


class TransformerBlock(Shown, nn.Module):
    """Pre-norm:  z = x + D(Attention(N_1(x))),  y = z + D(FF(N_2(z)));
    post-norm:  z = N_1(x + D(Attention(x))),  y = N_2(z + D(FF(z)));
    FF(z) = D'(f(z W_1 + b_1)) W_2 + b_2.

    D is dropout. Post-norm, the form of the original Transformer, normalizes the residual stream itself; pre-norm
    leaves the stream unnormalized, and deep stacks train without a warm-up.

    Args:
        attention: any head design whose output is as wide as its input, such as `MultiHeadAttention(512, 8)`.
        d_ff: width of the feed-forward network.
        order: "pre" or "post".
        norm: "rms" (Zhang & Sennrich 2019, 1910.07467) or "layer" (Ba et al. 2016, 1607.06450).
        activation: f, "gelu", "relu" or "silu".
        bias: b_1 and b_2.
        dropout: dropout probability of both branches (D); the design's own `dropout` applies to attention weights.
        inner_dropout: dropout probability inside the feed-forward network (D').

    Parameters: those of the design, 2·d_model·d_ff (+ d_ff + d_model with bias), and 2·d_model for the norms, twice as
        many with norm="layer".
    Cost: that of the design, and 4·d_model·d_ff operations per token.
    Source: Vaswani et al. 2017, 1706.03762, §3.1 and §3.3 (post-norm); Xiong et al. 2020, 2002.04745 (both).
    """

    def __init__(
        self,
        attention: AttentionLayer,
        d_ff: int,
        *,
        order: str = "pre",
        norm: str = "rms",
        activation: str = "gelu",
        bias: bool = False,
        dropout: float = 0.0,
        inner_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        d_ff = size("d_ff", d_ff)
        for name, value, known in (
            ("order", order, ORDERS),
            ("norm", norm, NORMS),
            ("activation", activation, ACTIVATIONS),
        ):
            check_choice(name, value, known)
        for name, share in (("dropout", dropout), ("inner_dropout", inner_dropout)):
            check_share(name, share)
        if not isinstance(attention, AttentionLayer):
            raise DTypeError(f"attention: expected a layer such as MultiHeadAttention(512, 8), got {attention!r}")
        width, bias = attention.d_model, flag("bias", bias)
        self.order, self.activation = order, activation
        self.attention_norm = NORMS[norm](width)
        self.attention = attention
        self.ff_norm = NORMS[norm](width)
        self.ff_in = nn.Linear(width, d_ff, bias=bias)
        self.ff_out = nn.Linear(d_ff, width, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.inner_dropout = nn.Dropout(inner_dropout)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        score: Score | Sequence[Score] = (),
        cache: Cache | None = None,
        return_map: bool = False,
        measures: Sequence[str | Measure] = (),
        differentiable: bool = False,
    ) -> Any:
        """y [b, n, d_model] of x [b, n, d_model]; with return_map (y, map). Arguments as in `AttentionLayer`."""
        before = self.order == "pre"
        found = self.attention(
            self.attention_norm(x) if before else x, context, mask=mask, score=score, cache=cache,
            return_map=return_map, measures=measures, differentiable=differentiable,
        )  # fmt: skip
        branch, amap = found if return_map else (found, None)
        if branch.shape != x.shape:
            raise ShapeError(
                f"attention: {type(self.attention).__name__} returns {tuple(branch.shape)} for x {tuple(x.shape)}; a "
                f"residual connection requires equal shapes"
            )
        x = x + self.dropout(branch)
        if before:
            x = x + self.dropout(self.feed_forward(self.ff_norm(x)))
        else:
            x = self.attention_norm(x)
            x = self.ff_norm(x + self.dropout(self.feed_forward(x)))
        return (x, amap) if return_map else x

    def feed_forward(self, z: Tensor) -> Tensor:
        """Return FF(z), applied to each token."""
        return self.ff_out(self.inner_dropout(ACTIVATIONS[self.activation](self.ff_in(z))))

    def extra_repr(self) -> str:
        """The options, for print(module)."""
        return f"order={self.order!r}, activation={self.activation!r}"
