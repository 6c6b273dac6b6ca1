"""One head as wide as the model: the baseline that several heads are compared with."""

from typing import Any

from headwise.errors import ConfigError
from headwise.nn.checks import size
from headwise.nn.layout import INDEPENDENT, Resizing
from headwise.nn.multi_head import MultiHeadAttention


class SingleHeadAttention(MultiHeadAttention):
    """y = softmax(X W^Q (C W^K)ᵀ / √d_model) C W^V W^O: `MultiHeadAttention` with h = 1 and d_k = d_model.

    The baseline that several heads are compared with.

    Args:
        d_model: width of x, and size of the head.
        options: head_dim, value_dim, context_dim, bias, dropout, rotary, qk_norm, as in `MultiHeadAttention`.

    Parameters: 4·d_model² (+ 4·d_model with bias), as many as h heads of size d_model / h.
    Cost: the same products as with h heads; one softmax a query instead of h.
    Source: Vaswani et al. 2017, 1706.03762, table 3 (A), h = 1.
    """

    coupling = INDEPENDENT
    resizing = Resizing()
    beyond_attend = ""

    def __init__(self, d_model: int, num_heads: int = 1, **options: Any) -> None:
        if num_heads != 1:
            raise ConfigError(f"num_heads={num_heads}: SingleHeadAttention has one; see MultiHeadAttention for more")
        super().__init__(d_model, 1, **options)

    @classmethod
    def build(cls, d_model: int, num_heads: int = 1, **options: Any) -> "SingleHeadAttention":
        """The single-head counterpart of a design with so many heads: the same width, one head.

        So one size builds every design, as in a loop over `DESIGNS`, a `DecoderConfig` or a trace. num_heads may be
        any whole number from 1; the constructor itself takes only 1.
        """
        size("num_heads", num_heads)
        return super().build(d_model, 1, **options)
