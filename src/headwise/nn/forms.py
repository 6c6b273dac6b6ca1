"""Other forms of multi-head attention, with conversion to and from `MultiHeadAttention`."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headwise.errors import ConfigError
from headwise.nn.base import AttentionLayer, copy_into
from headwise.nn.checks import flag
from headwise.nn.layout import Layout, Part
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.owned import check_copied

Form = TypeVar("Form", bound="MultiHeadForm")


class MultiHeadForm(AttentionLayer):
    """Stores the weights of `MultiHeadAttention` in another arrangement; outputs and gradients are the same.

    Args:
        bias: b_q [h, d_k], b_k [h_kv, d_k], b_v [h_kv, d_v] and b_o [d_model].
        options: sizes, dropout and rotary, as in `AttentionLayer`.
    """

    def __init__(self, d_model: int, num_heads: int, *, bias: bool = False, **options: Any) -> None:
        super().__init__(d_model, num_heads, **options)
        bias = flag("bias", bias)
        h, h_kv, d_k, d_v = self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim
        self.b_q, self.b_k, self.b_v, self.b_o = (
            nn.Parameter(torch.zeros(shape)) if bias else None
            for shape in ((h, d_k), (h_kv, d_k), (h_kv, d_v), (d_model,))
        )  # fmt: skip

    def matrices(self) -> dict[str, Sequence[Tensor]]:
        """Return W_i^Q [d_model, d_k], W_i^K [context_dim, d_k], W_i^V [context_dim, d_v] and W_i^O [d_v, d_model] of
        every head as "q", "k", "v" and "o", all views."""
        raise NotImplementedError

    def layout(self) -> Layout:
        """The head is the first index of every weight and bias."""
        heads = {"q": "query", "k": "key", "v": "key", "o": "query"}
        parts = [Part(letter, self, f"w_{letter}", 0, of, 1) for letter, of in heads.items()]
        if self.b_q is not None:
            parts += [Part(letter, self, f"b_{letter}", 0, heads[letter], 1) for letter in "qkv"]
        return Layout(tuple(parts), rotary=self.rotary is not None)

    def head_matrices(self) -> dict[str, Tensor]:
        """As in `AttentionLayer`: the matrices stacked."""
        return {name: torch.stack(list(each)).detach() for name, each in self.matrices().items()}

    @classmethod
    def from_multi_head(cls: type[Form], other: MultiHeadAttention) -> Form:
        """Return the same function in this form, with copied weights; ConfigError with QK-norm."""
        if other.q_norm is not None:
            raise ConfigError(f"{cls.__name__} does not support QK-norm, and this MultiHeadAttention has qk_norm=True")
        other.check_owned()
        module = cls(
            other.d_model, other.num_heads, num_kv_heads=other.num_kv_heads, head_dim=other.head_dim,
            value_dim=other.value_dim, context_dim=other.context_dim, bias=other.q_proj.bias is not None,
            dropout=other.dropout, rotary=other.rotary is not None,
        ).to(other.q_proj.weight)  # fmt: skip
        weights = other.per_head_weights()
        for name, matrices in module.matrices().items():
            copy_into(zip(matrices, weights[name], strict=True))
        copy_into(module._biases(other))
        return module.train(other.training)

    def to_multi_head(self) -> MultiHeadAttention:
        """Return the same function as a `MultiHeadAttention`, with copied weights."""
        check_copied(type(self).__name__, self, self.layout().parts)
        other = MultiHeadAttention.from_heads(
            **self.head_matrices(), bias=self.b_q is not None, dropout=self.dropout, rotary=self.rotary is not None
        )
        copy_into((theirs, ours) for ours, theirs in self._biases(other))
        return other.train(self.training)

    def _biases(self, other: MultiHeadAttention) -> list[tuple[Tensor, Tensor]]:
        """Pair each bias of this form with that of the multi-head module, in this form's shape."""
        ours = {"q": self.b_q, "k": self.b_k, "v": self.b_v, "o": self.b_o}
        linears = {"q": other.q_proj, "k": other.k_proj, "v": other.v_proj, "o": other.o_proj}
        return [(bias, linears[name].bias.view_as(bias)) for name, bias in ours.items() if bias is not None]


def drawn(*shape: int, inputs: int) -> nn.Parameter:
    """Return a parameter initialized as the weight of an nn.Linear with `inputs` input features."""
    bound = inputs**-0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


def shifted(heads: Tensor, bias: Tensor | None) -> Tensor:
    """Return heads [b, h, n, d] plus bias [h, d], or unchanged without a bias."""
    return heads if bias is None else heads + bias[:, None].to(heads.dtype)
