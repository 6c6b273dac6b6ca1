"""Single-head attention: one head as wide as the model, as a baseline."""

from typing import Any

from torch import Tensor

from headwise.costs.counts import Counts
from headwise.errors import ConfigError
from headwise.nn.checks import size
from headwise.nn.layout import INDEPENDENT, Resizing
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.notes import Notes, Words
from headwise.nn.steps import Steps


class SingleHeadAttention(MultiHeadAttention):
    """y = softmax(X W^Q (C W^K)ᵀ / √d_model) C W^V W^O: `MultiHeadAttention` with h = 1 and d_k = d_model.

    The baseline for comparisons with several heads.

    Args:
        d_model: width of x, and size of the head.
        options: head_dim, value_dim, context_dim, bias, dropout, rotary, qk_norm, as in `MultiHeadAttention`.

    Parameters: 4·d_model² (+ 4·d_model with bias), as many as h heads of size d_model / h.
    Cost: the same products as with h heads; one softmax a query instead of h.
    Source: Vaswani et al. 2017, 1706.03762, table 3 (A), h = 1.
    """

    coupling = INDEPENDENT
    resizing = Resizing()
    outside_attend = ""
    layout = MultiHeadAttention.layout
    notes = Notes(
        summary=Words("one head as wide as the model", "一个与模型同宽的头"),
        use=Words("you want a baseline with one head", "需要单头基线时用"),
        source="Vaswani et al. 2017, 1706.03762, table 3 (A)",
        parameters="4·d²",
        work="the same; one softmax a pair instead of h",
        cache="2·d",
        limits={},
        map=None,
        compared=None,
        form_of=None,
    )

    def __init__(self, d_model: int, num_heads: int = 1, **options: Any) -> None:
        if num_heads != 1:
            raise ConfigError(
                f"num_heads={num_heads}: SingleHeadAttention has one head; see MultiHeadAttention for more"
            )
        super().__init__(d_model, 1, **options)

    @staticmethod
    def costs(d_model: int, **options: Any) -> Counts:  # type: ignore[override]  # num_heads is no choice here
        """`multi_head` with one head as wide as the model: as many weights and FLOPs, one softmax instead of h."""
        return MultiHeadAttention.costs(d_model, 1, **options)

    def steps(self, x: Tensor, note: Steps) -> None:
        super().steps(x, note)

    @classmethod
    def build(cls, d_model: int, num_heads: int = 1, **options: Any) -> "SingleHeadAttention":
        """Return a single-head layer of width d_model; `num_heads` may be any whole number from 1.

        The same sizes thus build every design, in a loop over `DESIGNS`, a `DecoderConfig` or a trace. The constructor
        itself accepts only num_heads=1.
        """
        size("num_heads", num_heads)
        return super().build(d_model, 1, **options)
