"""What multi-head attention is: the formula, the heads, and equivalent forms."""

import copy
import math
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headwise.attention import attend
from headwise.masks import Causal
from headwise.nn.base import copy_into
from headwise.nn.registry import DESIGNS
from headwise.textbook.claims.claim import claim
from headwise.textbook.claims.evidence import Check, at_least, difference, equal, same
from headwise.textbook.claims.samples import multi_head, normal

Layer = TypeVar("Layer", bound=nn.Module)


@claim(
    "Attention is softmax(Q Kᵀ / √d_k) V.",
    formula="A = softmax(Q Kᵀ / √d_k) V",
    source="ch. 11, 11.3.1 and part 3 summary; first tutorial, step 2; second tutorial; Vaswani et al. 2017, eq. 1",
)
def attention_formula() -> list[Check]:
    """All kernels follow the formula; here in float64."""
    q, k, v = normal(2, 3, 11, 5, seed=1), normal(2, 3, 13, 5, seed=2), normal(2, 3, 13, 7, seed=3)
    formula = formula_of(q, k, v)
    kernels = ("auto", "torch_blocks", "reference")
    return [same(f"error, kernel {name}", attend(q, k, v, kernel=name), formula) for name in kernels]


@claim(
    "MultiHead(X) = Concat(head_1 … head_h) W_O with head_i = Attention(X W_i^Q, X W_i^K, X W_i^V).",
    formula="Concat(head_1 … head_h) W_O, head_i = A(X W_i^Q, X W_i^K, X W_i^V)",
    source="§5.3.2, eqs. 5.3.1–5.3.2; ch. 11, part 3 summary; second tutorial; Vaswani et al. 2017, §3.2.2",
)
def multi_head_formula() -> list[Check]:
    """The layer compared with the formula, one head at a time."""
    module, x = multi_head(), normal(2, 7, 12, seed=5)
    w = module.per_head_weights()
    heads = [formula_of(x @ w["q"][i], x @ w["k"][i], x @ w["v"][i]) for i in range(3)]
    return [same("error of the layer", module(x), torch.cat(heads, -1) @ module.o_proj.weight.mT)]


@claim(
    "Splitting [b, n, d] → [b, n, h, d_k] → [b, h, n, d_k] and merging back lose nothing and copy nothing.",
    formula="split(X)[b, i, n, c] = X[b, n, i·d_k + c];  merge(split(X)) = X",
    source="ch. 11, 11.2.1–11.2.3 and 11.6.2; §5.3.4, last paragraph",
)
def splitting() -> list[Check]:
    """Head i is columns i·d_k … (i+1)·d_k; the split is a view, and only merging after the transpose copies."""
    x = normal(2, 7, 12)
    split = x.view(2, 7, 3, 4).transpose(1, 2)
    columns = torch.stack([x[..., 4 * i : 4 * i + 4] for i in range(3)], 1)
    return [
        equal("entries changed by splitting and merging", int((split.transpose(1, 2).flatten(2) != x).sum()), 0),
        equal("entries of head i that are not its columns", int((split != columns).sum()), 0),
        equal("copies made by the split", int(split.data_ptr() != x.data_ptr()), 0),
    ]


@claim(
    "One matrix for each head, and one large matrix that is split afterwards, are the same layer.",
    formula="X [W_1 | … | W_h] = [X W_1 | … | X W_h]",
    source="ch. 11, 11.2.4; §5.3.4, eqs. 5.3.3–5.3.4; second tutorial, division into heads",
)
def per_head_projection() -> list[Check]:
    """W^Q = [W_1^Q | … | W_h^Q]: outputs and gradients agree, matrix by matrix."""
    return _equals_multi_head("per_head")


@claim(
    "All heads at once are contractions with tensors of rank three, one index being the head.",
    formula="Q_bhnk = Σ_d X_bnd W_hdk;  Y_bne = Σ_hk A_bhnk W_hke",
    source="§5.3.5, eqs. 5.3.5–5.3.8",
)
def tensor_contraction() -> list[Check]:
    """The same sums in another order; outputs and gradients agree."""
    return _equals_multi_head("contraction")


@claim(
    "Concat(head_1 … head_h) W_O = Σ_i head_i W_i^O: the output adds up what the heads say.",
    formula="Concat(head_1 … head_h) W_O = Σ_i head_i W_i^O",
    source="ch. 11; §5.3",
)
def output_sums_heads() -> list[Check]:
    """Both sides of a layer with three heads."""
    module, x = multi_head(), normal(2, 7, 12, seed=5)
    y, concat = module(x, return_concat=True)
    parts = zip(concat.split(4, -1), module.per_head_weights()["o"], strict=True)
    return [same("error of the sum", sum((head @ w for head, w in parts), torch.zeros(())), y)]


@claim(
    "Without W_O each channel of A comes from one head; after A W_O each channel hears all heads.",
    formula="∂A_c / ∂head_i ≠ 0 for one i;  ∂(A W_O)_c / ∂head_i ≠ 0 for all i",
    source="ch. 11, 11.4.3 and 11.5",
)
def output_mixes_heads() -> list[Check]:
    """The values of each head are doubled in turn, and the channels that change are counted."""
    module, x = multi_head(), normal(1, 7, 12, seed=5)
    y, concat = module(x, return_concat=True)
    before, after = [], []
    for i in range(3):
        other = multi_head()
        with torch.no_grad():
            other.v_proj.weight[4 * i : 4 * i + 4] *= 2.0  # changes head i only
        y_other, concat_other = other(x, return_concat=True)
        before.append(_touched(concat, concat_other))
        after.append(_touched(y, y_other))
    heads_before, heads_after = torch.stack(before).sum(0), torch.stack(after).sum(0)
    return [
        equal("heads in a channel of A, at most", int(heads_before.max()), 1),
        equal("heads in a channel of A W_O, at least", int(heads_after.min()), 3),
    ]


@claim(
    "Heads are interchangeable: numbering them otherwise, with their rows of W_O, gives the same layer.",
    formula="Σ_i head_π(i) W_π(i)^O = Σ_i head_i W_i^O",
    source="§5.3, symmetry of heads",
)
def heads_have_no_order() -> list[Check]:
    """Three heads in another order; control: without moving the rows of W_O, the layer differs."""
    module, x, order = multi_head(), normal(2, 7, 12, seed=5), [2, 0, 1]
    weights = {name: w.detach() for name, w in module.per_head_weights().items()}
    moved = {name: w[order] for name, w in weights.items()}
    return [
        same("error", type(module).from_heads(**moved)(x), module(x)),
        at_least(
            "error if W_O stays",
            difference(type(module).from_heads(**{**moved, "o": weights["o"]})(x), module(x)),
            0.01,
        ).control(),
    ]


@claim(
    "Every token reaches every other one within a layer: the path between two tokens is one step long.",
    formula="∂y_i / ∂x_j ≠ 0 for all i, j (causal: all j ≤ i)",
    source="§5.3, information flow; Vaswani et al. 2017, table 1",
)
def one_step_path() -> list[Check]:
    """∂y_i/∂x_j vanishes for no pair; a causal mask excludes j > i, as it should."""
    module, x = multi_head(), normal(1, 7, 12, seed=5)
    reach = [
        torch.autograd.functional.jacobian(lambda t, m=mask: module(t, mask=m)[0].sum(-1), x)[:, 0].abs().sum(-1) > 0
        for mask in (None, Causal())
    ]
    return [
        equal("pairs (i, j) with ∂y_i/∂x_j ≠ 0", int(reach[0].sum()), 49),
        equal("pairs under a causal mask", int((reach[1] & torch.ones(7, 7).tril().bool()).sum()), 28),
        equal("pairs beyond the causal mask", int(reach[1].triu(1).sum()), 0),
    ]


def formula_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √d_k) v by the definition."""
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def _equals_multi_head(form: str) -> list[Check]:
    module, x = multi_head(), normal(2, 7, 12, seed=5)
    kind: Any = DESIGNS[form]
    other = kind.from_multi_head(module)
    outputs = []
    for one in (module, other):
        outputs.append(one(x))
        outputs[-1].square().sum().backward()
    # The gradients have the shapes of the form's parameters, so they are converted as weights are.
    gradients = dict(_of_gradients(other).to_multi_head().named_parameters())
    of_module = dict(_of_gradients(module).named_parameters())
    return [
        same("error of outputs", outputs[1], outputs[0]),
        *(
            same(f"of gradients of {name[0].upper()}", gradients[name], parameter)
            for name, parameter in of_module.items()
        ),
    ]


def _of_gradients(module: Layer) -> Layer:
    """A copy of the module whose weights are its gradients."""
    other = copy.deepcopy(module)
    for into, parameter in zip(other.parameters(), module.parameters(), strict=True):
        assert parameter.grad is not None
        copy_into([(into, parameter.grad)])
    return other


def _touched(one: Tensor, other: Tensor) -> Tensor:
    """Which channels differ, [channels]."""
    return (one != other).flatten(0, -2).any(0)
