"""What multi-head attention is: the formula, the heads, and equivalent forms."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headwise.attention import attend
from headwise.base.run import seeded
from headwise.masks import Causal
from headwise.nn.base import copy_into
from headwise.nn.registry import DESIGNS
from headwise.textbook.claims.claim import claim
from headwise.textbook.claims.evidence import Check, at_least, difference, equal, same
from headwise.textbook.claims.samples import multi_head, normal
from headwise.textbook.texts import place

Layer = TypeVar("Layer", bound=nn.Module)


@claim(
    "Attention is softmax(Q Kᵀ / √d_k) V.",
    "注意力就是 softmax(Q Kᵀ / √d_k) V。",
    formula="A = softmax(Q Kᵀ / √d_k) V",
    at=[
        place("chapter", "11.3.1",
              "Each head multiplies Q by Kᵀ, divides by √d_key, applies softmax and multiplies by V.",
              "每个头先算 Q Kᵀ，除以 √d_key，经 softmax 后再乘 V。", equations="1 2 3"),
        place("chapter", "11.3.2",
              "Shapes: [4, 4, 16, 128] times [4, 4, 128, 16] is [4, 4, 16, 16], times V [4, 4, 16, 128].",
              "形状：[4, 4, 16, 128] 乘 [4, 4, 128, 16] 得 [4, 4, 16, 16]，再乘 V 得 [4, 4, 16, 128]。"),
        place("chapter", "Part 3", "The formula of attention, with √d_k.", "带 √d_k 的注意力公式。", equations="3"),
        place("tutorial", "2", "Scores from Q and K, scaling, softmax, weighted sum of V, in four lines of code.",
              "四行代码：由 Q、K 得分数、缩放、softmax、对 V 加权求和。", listing=2),
        place("notes", "3", "The weights A_i of a head are the softmax of Q_i K_iᵀ / √d_k.",
              "一个头的权重 A_i 是 Q_i K_iᵀ / √d_k 的 softmax。", equations="1"),
        place("notes", "4", "A head is its weights times its values.", "一个头等于权重乘以值。", equations="1"),
        place("treatment", "5.3.17", "The weights are Softmax(Q_i K_iᵀ / √d_k), and head_i is these times V_i.",
              "权重矩阵为 Softmax(Q_i K_iᵀ / √d_k)，head_i 为它乘 V_i。", paragraph=2),
        place("demonstration", "03", "Scores, scaling, softmax, dropout on the weights, weighted sum.",
              "分数、缩放、softmax、对权重做 dropout、加权求和。", listing=1),
    ],
    also="Vaswani et al. 2017, eq. 1",
    control=("the same formula without 1/√d_k is another function", "不除以 √d_k 的同一公式是另一个函数"),
    note="各内核都按此公式计算；这里用 float64。",
)  # fmt: skip
def attention_formula() -> list[Check]:
    """All kernels follow the formula; here in float64."""
    q, k, v = normal(2, 3, 11, 5, seed=1), normal(2, 3, 13, 5, seed=2), normal(2, 3, 13, 7, seed=3)
    formula = formula_of(q, k, v)
    outputs = {name: attend(q, k, v, kernel=name) for name in ("auto", "torch_blocks", "reference")}
    plain = difference(torch.softmax(q @ k.mT, -1) @ v, outputs["auto"])
    return [
        *(same((f"error, kernel {name}", f"误差，内核 {name}"), out, formula) for name, out in outputs.items()),
        at_least(("difference without the factor", "不缩放时的差异"), plain, 0.01).control(
            difference(outputs["auto"], formula)),
    ]  # fmt: skip


@claim(
    "MultiHead(X) = Concat(head_1 … head_h) W_O with head_i = Attention(X W_i^Q, X W_i^K, X W_i^V).",
    "MultiHead(X) = Concat(head_1 … head_h) W_O，其中 head_i = Attention(X W_i^Q, X W_i^K, X W_i^V)。",
    formula="Concat(head_1 … head_h) W_O, head_i = A(X W_i^Q, X W_i^K, X W_i^V)",
    at=[
        place("treatment", "5.3.2",
              "The heads, each with projections of its own, are concatenated and multiplied by W_O.",
              "每个头有自己的投影，拼接后乘 W_O。", equations="5.3.1 5.3.2"),
        place("chapter", "Part 3",
              "MultiHead is Concat(head_1, …, head_h) W^O, with head_i = Attention(Q W_i^Q, K W_i^K, "
              "V W_i^V).",
              "MultiHead 为 Concat(head_1, …, head_h) W^O，其中 head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)。",
              equations="1 2"),
        place("notes", "5", "Here “Multi Head” is the concatenation alone …", "这里把拼接本身记作 Multi Head……",
              equations="1"),
        place("notes", "6", "… and the output Y is it times W_O.", "……输出 Y 再由它乘 W_O 得到。", equations="1"),
    ],
    also="Vaswani et al. 2017, §3.2.2",
    control=("heads concatenated in another order meet other rows of W_O",
             "换一个次序拼接，各头就对上了 W_O 的另一些行"),
    note="逐个头按公式计算，与本层的输出比较。",
)  # fmt: skip
def multi_head_formula() -> list[Check]:
    """The layer compared with the formula, one head at a time."""
    module, x = multi_head(), normal(2, 7, 12, seed=5)
    w, y = module.per_head_weights(), module(x)
    heads = [formula_of(x @ w["q"][i], x @ w["k"][i], x @ w["v"][i]) for i in range(3)]
    formula, reversed_ = (torch.cat(order, -1) @ module.o_proj.weight.mT for order in (heads, heads[::-1]))
    return [
        same(("error of the layer", "本层的误差"), y, formula),
        at_least(("difference with the heads in reverse order", "各头倒序拼接时的差异"), difference(reversed_, y), 0.01)
        .control(difference(y, formula)),
    ]  # fmt: skip


@claim(
    "Splitting [b, n, d] → [b, n, h, d_k] → [b, h, n, d_k] loses nothing and copies nothing, and merging reverses it.",
    "切分 [b, n, d] → [b, n, h, d_k] → [b, h, n, d_k] 不丢失、也不复制任何数据，合并是它的逆操作。",
    formula="split(X)[b, i, n, c] = X[b, n, i·d_k + c];  merge(split(X)) = X",
    at=[
        place("chapter", "11.2.1", "K of [4, 16, 512] is viewed as [4, 16, 4, 128] and transposed to [4, 4, 16, 128].",
              "K 由 [4, 16, 512] 变为 [4, 16, 4, 128]，再转置成 [4, 4, 16, 128]。"),
        place("chapter", "11.2.2", "After the transpose every head computes its attention by itself.",
              "转置后每个头可以独立计算注意力，互不干扰。"),
        place("chapter", "11.2.3", "Q and V are split as K is.", "Q、V 的切分与 K 相同。"),
        place("chapter", "11.4.1", "Afterwards transposing and merging give [4, 16, 512] again.",
              "之后转置、合并，回到 [4, 16, 512]。"),
        place("chapter", "11.6.2", "view and transpose(1, 2) before, transpose, contiguous and view after.",
              "之前 view、transpose(1, 2)，之后 transpose、contiguous、view。", listing=1),
        place("chapter", "11.6.1", "Split, attend in each head, merge, W_O: [batch, seq, d_model] in the end.",
              "切分、各头做注意力、合并、乘 W_O，最后仍是 [batch, seq, d_model]。", figure=1),
        place("chapter", "11.10.2", "The shapes of these steps, in a list.", "以上各步的形状一览。"),
        place("treatment", "5.3.4", "n × (h·d_k) is reshaped to n × h × d_k and transposed to h × n × d_k.",
              "n × (h·d_k) 重塑为 n × h × d_k，再转置为 h × n × d_k。", paragraph=5),
        place("tutorial", "4", "view, then transpose(1, 2).", "先 view，再 transpose(1, 2)。", listing=1),
        place("demonstration", "03", "view, then transpose(1, 2).", "先 view，再 transpose(1, 2)。", listing=1),
    ],
    control=("a view as [b, h, n, d_k] without the transpose mixes tokens and heads",
             "不转置、直接视作 [b, h, n, d_k]，会把词元与头混在一起"),
    note="第 i 个头就是第 i·d_k … (i+1)·d_k 列；切分只是视图，转置之后的合并才复制数据。",
)  # fmt: skip
def splitting() -> list[Check]:
    """Head i is columns i·d_k … (i+1)·d_k; the split is a view, and only merging after the transpose copies."""
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


@claim(
    "One matrix for each head, and one large matrix that is split afterwards, are the same layer.",
    "每个头一个矩阵，与先用一个大矩阵再切分，是同一个层。",
    formula="X [W_1 | … | W_h] = [X W_1 | … | X W_h]",
    at=[
        place("chapter", "11.2.4",
              "A matrix for each head, and one matrix whose result is cut into num_heads parts, are "
              "mathematically equivalent; the second is faster.",
              "每头一个矩阵，与一个大矩阵的结果切成 num_heads 份，数学上等价；后者更快。"),
        place("notes", "2", "Heads have matrices of their own, and there is no “one matrix” for all.",
              "各头的矩阵互不共享，不存在“统一的权重矩阵”。", item=2),
        place("treatment", "5.3.4", "Projections of all heads are stacked into one, and X is multiplied once.",
              "把各头的投影堆叠成一个大矩阵，与 X 只乘一次。", equations="5.3.3 5.3.4"),
    ],
    control=("with the queries of two heads exchanged the layer differs", "交换两个头的查询投影后，层就不同了"),
    note="W^Q = [W_1^Q | … | W_h^Q]：输出与各矩阵的梯度都一致。所谓“统一的矩阵”不过是把各头的矩阵并排放置。",
)  # fmt: skip
def per_head_projection() -> list[Check]:
    """W^Q = [W_1^Q | … | W_h^Q]: outputs and gradients agree, matrix by matrix. The “one matrix” is the heads' own ones
    side by side.
    """
    return _equals_multi_head("per_head")


@claim(
    "All heads at once are contractions with tensors of rank three, one index being the head.",
    "所有头可以一次写成与三阶张量的收缩，其中一个下标就是头。",
    formula="Q_bhnk = Σ_d X_bnd W_hdk;  Y_bne = Σ_hk A_bhnk W_hke",
    at=[
        place("treatment", "5.3.5",
              "The queries are a sum over d of X_nd W_ikd, the heads attend each by itself, and are "
              "concatenated and multiplied by W_O.",
              "查询是 X_nd W_ikd 对 d 求和，各头独立做注意力，再拼接、乘 W_O。", equations="5.3.5 5.3.6 5.3.7 5.3.8"),
    ],
    control=("with the queries of two heads exchanged the layer differs", "交换两个头的查询投影后，层就不同了"),
    note="只是求和次序不同；输出与梯度一致。式 (5.3.5) 左边的下标 k 写成了冒号，且 n 既作位置又作长度；我们读作 "
         "Q_ink = Σ_d "
         "X_nd W_ikd。",
)  # fmt: skip
def tensor_contraction() -> list[Check]:
    """The same sums in another order; outputs and gradients agree. Eq. 5.3.5 has a colon on its left in
    place of the index k, and uses n for both a position and the length; we read Q_ink = Σ_d X_nd W_ikd.
    """
    return _equals_multi_head("contraction")


@claim(
    "Concat(head_1 … head_h) W_O = Σ_i head_i W_i^O: the output adds up the contributions of the heads.",
    "Concat(head_1 … head_h) W_O = Σ_i head_i W_i^O：输出是各头贡献之和。",
    formula="Concat(head_1 … head_h) W_O = Σ_i head_i W_i^O",
    at=[
        place("chapter", "11.4.2", "W_O is learnable; it fuses the heads' information, and the model learns to combine "
              "their outputs.", "W_O 可学习：融合各头信息，并学会如何组合各头的输出。"),
        place("treatment", "5.3.8",
              "Heads are concatenated without explicit weights; W_O holds a weighting implicitly, "
              "learnt in training.", "各头只是拼接，没有显式加权；W_O 隐含一种在训练中学到的加权。", paragraph=2),
        place("demonstration", "02", "The assistants' reports are put together, or simply averaged.",
              "把几份报告拼在一起，或简单平均一下。", paragraph=9),
    ],
    control=("the mean of the heads times one map of its own size is another function, so “simply averaged” is not "
             "the same",
             "先对各头取平均再乘一个映射，是另一个函数，可见“简单平均”并不等同"),
    note="在三个头的一层上比较两边。",
)  # fmt: skip
def output_sums_heads() -> list[Check]:
    """Both sides of a layer with three heads."""
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


@claim(
    "Without W_O each channel of A comes from one head; after A W_O each channel depends on all heads.",
    "没有 W_O 时，A 的每个通道只来自一个头；乘 W_O 之后，每个通道都依赖所有头。",
    formula=("∂A_c / ∂head_i ≠ 0 for one i;  ∂(A W_O)_c / ∂head_i ≠ 0 for all i",
             "只对一个 i 有 ∂A_c / ∂head_i ≠ 0；对所有 i 有 ∂(A W_O)_c / ∂head_i ≠ 0"),
    at=[
        place("chapter", "11.4.3", "The concatenation puts the heads next to one another without any interaction.",
              "拼接只是把各头“机械地”放在一起，没有交互。"),
        place("chapter", "11.5.1", "A is the concatenation; A W_O is mixed and projected.",
              "A 是拼接的结果；A W_O 是混合、投影之后的结果。"),
        place("chapter", "11.5.2", "Numbers of A come from single heads, those of A W_O from all of them.",
              "A 的数值来自各头独立的计算，A W_O 的数值融合了所有头。"),
        place("treatment", "5.3.6", "W_O mixes the information of all heads.", "W_O 会把所有头的信息混合起来。",
              paragraph=5),
    ],
    control=("a block-diagonal W_O keeps the heads apart", "分块对角的 W_O 不会混合各头"),
    note="依次把每个头的值加倍，数一数哪些通道改变。",
)  # fmt: skip
def output_mixes_heads() -> list[Check]:
    """The values of each head are doubled in turn, and the channels that change are counted."""
    before, after = _heads_in_channels(multi_head)
    apart = _heads_in_channels(_blocks_in_output)[1]
    return [
        equal(("heads in a channel of A, at most", "A 的一个通道中的头数，最多"), before, 1),
        equal(("heads in a channel of A W_O", "A W_O 的一个通道中的头数"), after, 3),
        equal(("heads in a channel after a block-diagonal W_O",
               "W_O 分块对角时，一个通道中的头数"), apart, 1).control(after),
    ]  # fmt: skip


@claim(
    "Heads are interchangeable: numbering them otherwise, with their rows of W_O, gives the same layer.",
    "各头可以互换：连同 W_O 中对应的行重新编号，得到的是同一个层。",
    formula="Σ_i head_π(i) W_π(i)^O = Σ_i head_i W_i^O",
    at=[
        place("treatment", "5.3.9",
              "One architecture, symmetric at first, arrives at solutions that are not symmetric.",
              "相同的架构从对称的初始状态出发，最终学到不对称的解。", paragraph=4),
    ],
    control=("without moving the rows of W_O the layer differs", "不同时移动 W_O 的行，层就不同"),
    note="把三个头换一个次序。书中以这一对称性为前提，并未写出公式。",
)  # fmt: skip
def heads_have_no_order() -> list[Check]:
    """Three heads in another order. The text presupposes this symmetry and does not write it down."""
    module, x, order = multi_head(), normal(2, 7, 12, seed=5), [2, 0, 1]
    weights = {name: w.detach() for name, w in module.per_head_weights().items()}
    moved = {name: w[order] for name, w in weights.items()}
    y, kept = type(module).from_heads(**moved)(x), type(module).from_heads(**{**moved, "o": weights["o"]})(x)
    return [
        same(("error", "误差"), y, module(x)),
        at_least(("difference if W_O stays", "W_O 不动时的差异"), difference(kept, module(x)), 0.01).control(
            difference(y, module(x))),
    ]  # fmt: skip


@claim(
    "Every token reaches every other one within a layer: the path between two tokens is one step long.",
    "一层之内，每个词元都能直接到达其他任一词元：两个词元之间只有一步。",
    formula=("∂y_i / ∂x_j ≠ 0 for all i, j (causal: all j ≤ i)",
             "对所有 i、j 有 ∂y_i / ∂x_j ≠ 0（因果：所有 j ≤ i）"),
    at=[
        place("treatment", "5.3.18",
              "A convolution sees a fixed neighbourhood; in attention each position interacts with all "
              "others directly.", "卷积的感受野固定而局部；注意力中每个位置都能与所有其他位置直接交互。", paragraph=3),
    ],
    also="Vaswani et al. 2017, table 1",
    control=("a convolution of width 3 reaches neighbours only", "宽度为 3 的卷积只能到达相邻位置"),
    note="∂y_i/∂x_j 对任何一对都不为零；因果掩码理应排除 j > i。",
)  # fmt: skip
def one_step_path() -> list[Check]:
    """∂y_i/∂x_j vanishes for no pair; a causal mask excludes j > i, as it should."""
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
    for into, parameter in zip(other.parameters(), module.parameters(), strict=True):
        assert parameter.grad is not None
        copy_into([(into, parameter.grad)])
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
