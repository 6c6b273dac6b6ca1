"""Other forms of multi-head attention, with conversion to and from `MultiHeadAttention`."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headwise.costs.work import Counts
from headwise.errors import ConfigError
from headwise.nn.base import AttentionLayer, copy_into
from headwise.nn.layout import INDEPENDENT, Layout, Part, Resizing, flag, size
from headwise.nn.multi_head import MultiHeadAttention, copied_as
from headwise.nn.owned import check_copied
from headwise.nn.steps import Notes, Steps
from headwise.wording import tr

Form = TypeVar("Form", bound="MultiHeadForm")


class MultiHeadForm(AttentionLayer):
    """Stores the weights of `MultiHeadAttention` in another arrangement; outputs and gradients are the same. bias: b_q
    [h, d_k], b_k [h_kv, d_k], b_v [h_kv, d_v] and b_o [d_model]."""

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
        module = copied_as(cls, other)
        weights = other.per_head_weights()
        for name, matrices in module.matrices().items():
            copy_into(zip(matrices, weights[name], strict=True))
        copy_into(module._biases(other))
        return module

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


class PerHeadAttention(MultiHeadForm):
    """y = Σ_i head_i W_i^O,  head_i = softmax(X W_i^Q (C W_i^K)ᵀ / √d_k) C W_i^V.

    The same function and gradients as `MultiHeadAttention`, in the form of the paper: lists of matrices
    W_i^Q [d_model, d_k], W_i^K [context_dim, d_k], W_i^V [context_dim, d_v] and W_i^O [d_v, d_model]. For reading,
    teaching and comparison; `MultiHeadAttention` is faster, as its products are larger.

    Args:
        options: sizes, bias, dropout and rotary, as in `MultiHeadAttention`.

    Parameters: as many as `MultiHeadAttention`. Cost: the same floating-point operations, in h times the calls.
    Source: Vaswani et al. 2017, 1706.03762, §3.2.2.
    """

    coupling = INDEPENDENT
    resizing = Resizing()
    outside_attend = ""
    layout = MultiHeadForm.layout
    notes = Notes(
        summary=tr("multi-head attention with one matrix per head"),
        use=tr("you want to read or change the matrix of one head; slower, as it computes h small products"),
        source="Vaswani et al. 2017, 1706.03762, §3.2.2",
        parameters="MHA's",
        work="the same",
        cache="MHA's",
        limits={},
        map=None,
        compared=None,
        form_of="multi_head",
    )

    def __init__(self, d_model: int, num_heads: int, **options: Any) -> None:
        super().__init__(d_model, num_heads, **options)
        h, h_kv, d_k, d_v = self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim
        self.w_q = nn.ParameterList(drawn(d_model, d_k, inputs=d_model) for _ in range(h))
        self.w_k = nn.ParameterList(drawn(self.context_dim, d_k, inputs=self.context_dim) for _ in range(h_kv))
        self.w_v = nn.ParameterList(drawn(self.context_dim, d_v, inputs=self.context_dim) for _ in range(h_kv))
        self.w_o = nn.ParameterList(drawn(d_v, d_model, inputs=h * d_v) for _ in range(h))

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As in `AttentionLayer`, one head at a time."""
        q = torch.stack([x @ w for w in self.w_q], 1)  # h times [b, n, d_k] -> [b, h, n, d_k]
        k = torch.stack([source @ w for w in self.w_k], 1)
        v = torch.stack([source @ w for w in self.w_v], 1)
        return shifted(q, self.b_q), shifted(k, self.b_k), shifted(v, self.b_v)

    def output(self, concat: Tensor) -> Tensor:
        """Σ_i head_i W_i^O."""
        heads = concat.split(self.value_dim, -1)
        y = torch.stack([head @ w for head, w in zip(heads, self.w_o, strict=True)]).sum(0)
        return y if self.b_o is None else y + self.b_o.to(y.dtype)

    @staticmethod
    def costs(d_model: int, num_heads: int, **options: Any) -> Counts:
        """One matrix per head instead of one for all: the same function and counts as `multi_head`."""
        return MultiHeadAttention.costs(d_model, num_heads, **options)

    def steps(self, x: Tensor, note: Steps) -> None:
        q = shifted(torch.stack([x @ w for w in self.w_q], 1), self.b_q)
        k = shifted(torch.stack([x @ w for w in self.w_k], 1), self.b_k)
        v = shifted(torch.stack([x @ w for w in self.w_v], 1), self.b_v)
        note("q_each", q, "b h n d_k", "Q_i = X W_i^Q",
             tr("each head's queries, with a matrix of its own"))  # fmt: skip
        note("k_each", k, "b h_kv n d_k", "K_i = X W_i^K", tr("each head's keys"))
        note("v_each", v, "b h_kv n d_v", "V_i = X W_i^V", tr("each head's values"))
        heads = note.attended(*note.apply_rope(self, q, k), v)
        terms = torch.stack([heads[:, i] @ w for i, w in enumerate(self.w_o)], 1)
        note("terms", terms, "b h n d_model", "head_i W_i^O", tr("what each head contributes to y"))
        y = terms.sum(1) + (0 if self.b_o is None else self.b_o)
        note("output_sum", y, "b n d_model", "Y = Σ_i head_i W_i^O", tr("the heads are added up"))

    def matrices(self) -> dict[str, Sequence[Tensor]]:
        """As in `MultiHeadForm`: the lists themselves."""
        return {"q": list(self.w_q), "k": list(self.w_k), "v": list(self.w_v), "o": list(self.w_o)}


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
        summary=tr("one head as wide as the model"),
        use=tr("you want a baseline with one head"),
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


class ContractionAttention(MultiHeadForm):
    """Q_bhna = Σ_e X_bne W^Q_hae,  K_bhma = Σ_e C_bme W^K_hae,  V_bhmc = Σ_e C_bme W^V_hce,
    head = softmax(Σ_a Q_bhna K_bhma / √d_k) V,  y_bne = Σ_h Σ_c head_bhnc W^O_hec.

    The same function and gradients as `MultiHeadAttention`; the head is a tensor index instead of a range of
    columns: W^Q [h, d_k, d_model], W^K [h_kv, d_k, context_dim], W^V [h_kv, d_v, context_dim], W^O [h,
    d_model, d_v].

    Args:
        options: sizes, bias, dropout and rotary, as in `MultiHeadAttention`.

    Parameters: as many as `MultiHeadAttention`. Cost: the same.
    Source: Vaswani et al. 2017, 1706.03762, §3.2.2, in index notation.
    """

    coupling = INDEPENDENT
    resizing = Resizing()
    outside_attend = ""
    layout = MultiHeadForm.layout
    notes = Notes(
        summary=tr("multi-head attention with the head as an index of tensors"),
        use=tr("you prefer index notation: one rank-three tensor for all heads"),
        source="Vaswani et al. 2017, 1706.03762, §3.2.2, in index notation",
        parameters="MHA's",
        work="the same",
        cache="MHA's",
        limits={},
        map=None,
        compared=None,
        form_of="multi_head",
    )

    def __init__(self, d_model: int, num_heads: int, **options: Any) -> None:
        super().__init__(d_model, num_heads, **options)
        h, h_kv, d_k, d_v = self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim
        self.w_q = drawn(h, d_k, d_model, inputs=d_model)
        self.w_k = drawn(h_kv, d_k, self.context_dim, inputs=self.context_dim)
        self.w_v = drawn(h_kv, d_v, self.context_dim, inputs=self.context_dim)
        self.w_o = drawn(h, d_model, d_v, inputs=h * d_v)

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As in `AttentionLayer`: one contraction over e for each of Q, K and V."""
        q = torch.einsum("bne,hae->bhna", x, self.w_q)
        k = torch.einsum("bme,hae->bhma", source, self.w_k)
        v = torch.einsum("bme,hce->bhmc", source, self.w_v)
        return shifted(q, self.b_q), shifted(k, self.b_k), shifted(v, self.b_v)

    def output(self, concat: Tensor) -> Tensor:
        """Σ_h Σ_c head_bhnc W^O_hec, over heads and channels at once."""
        heads = concat.unflatten(-1, (self.num_heads, self.value_dim))
        y = torch.einsum("bnhc,hec->bne", heads, self.w_o)
        return y if self.b_o is None else y + self.b_o.to(y.dtype)

    @staticmethod
    def costs(d_model: int, num_heads: int, **options: Any) -> Counts:
        """One tensor for all heads: the same function and counts as `multi_head`."""
        return MultiHeadAttention.costs(d_model, num_heads, **options)

    def steps(self, x: Tensor, note: Steps) -> None:
        q = shifted(torch.einsum("bne,hae->bhna", x, self.w_q), self.b_q)
        k = shifted(torch.einsum("bme,hae->bhma", x, self.w_k), self.b_k)
        v = shifted(torch.einsum("bme,hce->bhmc", x, self.w_v), self.b_v)
        note(
            "q_contracted", q, "b h n a", "Q_bhna = Σ_e X_bne W^Q_hae",
            tr("one contraction for all heads: the head is an index of the weights"))  # fmt: skip
        note(
            "k_contracted",
            k,
            "b h_kv m a",
            "K_bhma = Σ_e X_bme W^K_hae",
            tr("the same for the keys", sense="contraction"),
        )
        note("v_contracted", v, "b h_kv m c", "V_bhmc = Σ_e X_bme W^V_hce",
             tr("the same for the values", sense="contraction"))  # fmt: skip
        heads = note.attended(*note.apply_rope(self, q, k), v)
        y = torch.einsum("bhnc,hec->bne", heads, self.w_o)
        note(
            "output_contracted", y + (0 if self.b_o is None else self.b_o), "b n e",
            "Y_bne = Σ_h Σ_c H_bhnc W^O_hec", tr("over heads and channels at once"))  # fmt: skip

    def matrices(self) -> dict[str, Sequence[Tensor]]:
        weights = {"q": self.w_q, "k": self.w_k, "v": self.w_v, "o": self.w_o}
        return {name: list(w.mT) for name, w in weights.items()}
