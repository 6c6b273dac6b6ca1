"""What multi-head attention is: the formula, the heads, and equivalent forms."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headwise import attend
from headwise.masks import Causal
from headwise.nn import DESIGNS
from headwise_textbook.claims.claim import claim
from headwise_textbook.claims.evidence import Check, at_least, difference, equal, same
from headwise_textbook.claims.samples import multi_head, normal
from headwise_textbook.seeds import seeded

Layer = TypeVar("Layer", bound=nn.Module)


@claim
def attention_formula() -> list[Check]:
    q, k, v = normal(2, 3, 11, 5, seed=1), normal(2, 3, 13, 5, seed=2), normal(2, 3, 13, 7, seed=3)
    formula = formula_of(q, k, v)
    outputs = {name: attend(q, k, v, kernel=name) for name in ("auto", "torch_blocks", "reference")}
    plain = difference(torch.softmax(q @ k.mT, -1) @ v, outputs["auto"])
    return [
        *(same((f"error, kernel {name}", f"误差，内核 {name}"), out, formula) for name, out in outputs.items()),
        at_least(("difference without the factor", "不缩放时的差异"), plain, 0.01).control(
            difference(outputs["auto"], formula)),
    ]  # fmt: skip


@claim
def multi_head_formula() -> list[Check]:
    module, x = multi_head(), normal(2, 7, 12, seed=5)
    w, y = module.per_head_weights(), module(x)
    heads = [formula_of(x @ w["q"][i], x @ w["k"][i], x @ w["v"][i]) for i in range(3)]
    formula, reversed_ = (torch.cat(order, -1) @ module.o_proj.weight.mT for order in (heads, heads[::-1]))
    return [
        same(("error of the layer", "本层的误差"), y, formula),
        at_least(("difference with the heads in reverse order", "各头倒序拼接时的差异"), difference(reversed_, y), 0.01)
        .control(difference(y, formula)),
    ]  # fmt: skip


@claim
def splitting() -> list[Check]:
    x = normal(2, 7, 12)
    split = x.view(2, 7, 3, 4).transpose(1, 2)
    columns = torch.stack([x[..., 4 * i : 4 * i + 4] for i in range(3)], 1)
    others = int((split != columns).sum())
    merged = int((split.transpose(1, 2).flatten(2) != x).sum())
    return [
        equal(("entries changed by splitting and merging", "切分再合并后改变的元素"), merged, 0),
        equal(("entries of head i that are not its columns", "第 i 个头中不属于其列的元素"), others, 0),
        equal(("copies made by the split", "切分产生的复制"), int(split.data_ptr() != x.data_ptr()), 0),
        at_least(
            ("entries of head i that are not its columns, without the transpose",
             "不转置时，第 i 个头中不属于其列的元素"),
            int((x.view(2, 3, 7, 4) != columns).sum()), 1,
        ).control(others),
    ]  # fmt: skip


@claim
def per_head_projection() -> list[Check]:
    return _equals_multi_head("per_head")


@claim
def tensor_contraction() -> list[Check]:
    return _equals_multi_head("contraction")


@claim
def output_sums_heads() -> list[Check]:
    module, x = multi_head(), normal(2, 7, 12, seed=5)
    y, concat = module(x, return_concat=True)
    heads, w = concat.split(4, -1), module.per_head_weights()["o"]
    total = sum((head @ one for head, one in zip(heads, w, strict=True)), torch.zeros(()))
    mean = torch.stack(heads).mean(0) @ w.sum(0)
    return [
        same(("error of the sum", "求和的误差"), total, y),
        at_least(("difference of the averaged heads", "对各头取平均时的差异"), difference(mean, y), 0.01).control(
            difference(total, y)),
    ]  # fmt: skip


@claim
def output_mixes_heads() -> list[Check]:
    before, after = _heads_in_channels(multi_head)
    apart = _heads_in_channels(_blocks_in_output)[1]
    return [
        equal(("heads in a channel of A, at most", "A 的一个通道中的头数，最多"), before, 1),
        equal(("heads in a channel of A W_O", "A W_O 的一个通道中的头数"), after, 3),
        equal(("heads in a channel after a block-diagonal W_O",
               "W_O 分块对角时，一个通道中的头数"), apart, 1).control(after),
    ]  # fmt: skip


@claim
def heads_have_no_order() -> list[Check]:
    module, x, order = multi_head(), normal(2, 7, 12, seed=5), [2, 0, 1]
    weights = {name: w.detach() for name, w in module.per_head_weights().items()}
    moved = {name: w[order] for name, w in weights.items()}
    y, kept = type(module).from_heads(**moved)(x), type(module).from_heads(**{**moved, "o": weights["o"]})(x)
    return [
        same(("error", "误差"), y, module(x)),
        at_least(("difference if W_O stays", "W_O 不动时的差异"), difference(kept, module(x)), 0.01).control(
            difference(y, module(x))),
    ]  # fmt: skip


@claim
def one_step_path() -> list[Check]:
    module, x = multi_head(), normal(1, 7, 12, seed=5)
    with seeded(0):
        narrow = nn.Conv1d(12, 12, 3, padding=1).double()
    reach = [_reached(partial(module, mask=mask), x) for mask in (None, Causal())]
    local = _reached(lambda t: narrow(t.mT).mT, x)
    return [
        equal(("pairs (i, j) with ∂y_i/∂x_j ≠ 0", "∂y_i/∂x_j ≠ 0 的 (i, j) 对数"), int(reach[0].sum()), 49),
        equal(("pairs under a causal mask",
               "因果掩码下的对数"), int((reach[1] & torch.ones(7, 7).tril().bool()).sum()), 28),
        equal(("pairs beyond the causal mask", "因果掩码之外的对数"), int(reach[1].triu(1).sum()), 0),
        equal(("pairs that a convolution of width 3 reaches",
               "宽度为 3 的卷积到达的对数"), int(local.sum()), 19).control(
            int(reach[0].sum())),
    ]  # fmt: skip


def formula_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √d_k) v by the definition."""
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def _equals_multi_head(form: str) -> list[Check]:
    module, x = multi_head(), normal(2, 7, 12, seed=5)
    kind: Any = DESIGNS[form]
    other, exchanged = kind.from_multi_head(module), multi_head()
    with torch.no_grad():
        exchanged.q_proj.weight.copy_(module.q_proj.weight.roll(4, 0))  # the queries of head i are those of head i − 1
    outputs = []
    for one in (module, other):
        outputs.append(one(x))
        outputs[-1].square().sum().backward()
    # The gradients have the shapes of the form's parameters, so they are converted as weights are.
    gradients = dict(_of_gradients(other).to_multi_head().named_parameters())
    of_module = dict(_of_gradients(module).named_parameters())
    letters = {name: name[0].upper() for name in of_module}
    return [
        same(("error of outputs", "输出的误差"), outputs[1], outputs[0]),
        *(
            same((f"of gradients of {letters[name]}", f"{letters[name]} 的梯度的误差"), gradients[name], parameter)
            for name, parameter in of_module.items()
        ),
        at_least(
            ("difference with queries exchanged", "交换查询投影后的差异"),
            difference(kind.from_multi_head(exchanged)(x), outputs[0]), 0.01,
        ).control(difference(outputs[1], outputs[0])),
    ]  # fmt: skip


def _of_gradients(module: Layer) -> Layer:
    """A copy of the module whose weights are its gradients."""
    other = copy.deepcopy(module)
    with torch.no_grad():
        for into, parameter in zip(other.parameters(), module.parameters(), strict=True):
            assert parameter.grad is not None
            into.copy_(parameter.grad)
    return other


def _blocks_in_output() -> Any:
    """The layer of three heads whose W_O has zeros outside of three blocks."""
    module = multi_head()
    with torch.no_grad():
        module.o_proj.weight.mul_(torch.block_diag(*[torch.ones(4, 4)] * 3))
    return module


def _heads_in_channels(build: Callable[[], Any]) -> tuple[int, int]:
    """The number of heads that a channel depends on: the largest for A, the smallest for A W_O."""
    x = normal(1, 7, 12, seed=5)
    y, concat = build()(x, return_concat=True)
    before, after = [], []
    for i in range(3):
        other = build()
        with torch.no_grad():
            other.v_proj.weight[4 * i : 4 * i + 4] *= 2.0  # changes head i only
        y_other, concat_other = other(x, return_concat=True)
        before.append(_touched(concat, concat_other))
        after.append(_touched(y, y_other))
    return int(torch.stack(before).sum(0).max()), int(torch.stack(after).sum(0).min())


def _touched(one: Tensor, other: Tensor) -> Tensor:
    """Which channels differ, [channels]."""
    return (one != other).flatten(0, -2).any(0)


def _reached(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """For which pairs of tokens (i, j) ∂y_i/∂x_j does not vanish, [n, n]."""
    jacobian: Any = torch.autograd.functional.jacobian(lambda t: layer(t)[0].sum(-1), x)
    return jacobian[:, 0].abs().sum(-1) > 0
