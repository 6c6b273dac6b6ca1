"""Formulas and listings taken as they are printed: shapes that do not fit, and results that differ from the meant "
"ones."""

import torch
from torch import Tensor

from headwise_textbook.claims.claim import claim
from headwise_textbook.claims.definitions import formula_of
from headwise_textbook.claims.evidence import Check, at_least, at_most, difference, equal, same
from headwise_textbook.claims.samples import layer, multi_head, normal


@claim
def row_stacking() -> list[Check]:
    module, x = multi_head(), normal(2, 7, 12, seed=5)
    w = module.per_head_weights()["q"].detach()  # [h, d_model, d_k]
    queries = torch.cat([x @ one for one in w], -1)
    rows, transposed, columns = torch.cat(list(w), 0), torch.cat([one.mT for one in w], 0), torch.cat(list(w), 1)
    error = difference(x @ transposed, queries)
    return [
        equal(("rows of the stack, printed as h·d_k", "堆叠后的行数，印作 h·d_k"), len(rows), 3 * 4),
        equal(("columns of the stack, printed as d_model", "堆叠后的列数，印作 d_model"), rows.shape[1], 12),
        at_most(("error of X W_all with the blocks transposed", "各块转置后 X W_all 的误差"), error, 1e-12),
        same(("error with the blocks side by side", "左右并排时的误差"), x @ columns, queries).control(error),
    ]  # fmt: skip


@claim
def projects_twice() -> list[Check]:
    module, x = multi_head(), normal(2, 7, 12, seed=5)
    w = {name: one.detach() for name, one in module.per_head_weights().items()}
    q, k, v = (torch.cat(list(x @ w[name][:, None]), -1) for name in "qkv")  # X times the stacked projections
    w_o = module.o_proj.weight.mT.detach()
    heads = [formula_of(q @ w["q"][i], k @ w["k"][i], v @ w["v"][i]) for i in range(3)]
    literal = torch.cat(heads, -1) @ w_o @ w_o
    split = [formula_of(*(t[..., 4 * i : 4 * i + 4] for t in (q, k, v))) for i in range(3)]
    error = difference(literal, module(x))
    return [
        at_most(("error of the formula taken literally", "照字面计算的误差"), error, 1e-12),
        same(("error with splitting and attention only",
              "只做切分与注意力时的误差"), torch.cat(split, -1) @ w_o, module(x))
        .control(error),
    ]  # fmt: skip


@claim
def sparse_sum_size() -> list[Check]:
    module, x = layer("sparse_mixture", 12, 6, top_k=2), normal(2, 7, 12, seed=5)
    heads = formula_of(*module.project(x, x))  # [b, h, n, d_k]
    g = torch.softmax(module.gate(x), -1)
    weighted = heads * (g * (g >= g.topk(2, -1).values[..., -1:])).transpose(1, 2)[..., None]
    printed, w = weighted.sum(1), module.o_proj.weight.mT.unflatten(0, (6, 2))  # [b, n, d_k]; [h, d_k, d_model]
    mapped: Tensor = (weighted @ w).sum(1)
    rank = int(torch.linalg.matrix_rank(printed.detach().flatten(0, 1)))
    return [
        equal(("channels of the sum, of d_model = 12", "和的通道数，d_model = 12"), printed.shape[-1], 12),
        at_least(("directions in the sum, of d_model = 12", "和中的方向数，d_model = 12"), rank, 12),
        equal(("channels with W_i^O", "有 W_i^O 时的通道数"), mapped.shape[-1], 12).control(printed.shape[-1]),
    ]  # fmt: skip


@claim
def listing_transposes() -> list[Check]:
    x = normal(2, 10, 512, seed=5)
    w = [normal(512, 512, seed=seed) / 512**0.5 for seed in range(3)]
    q, k = (t.reshape(2, 10, 8, 64) for t in (x @ one for one in w[:2]))
    scores = q @ k.transpose(-2, -1)
    printed, meant = (_tokens_read(x, w, transposed) for transposed in (False, True))
    return [
        equal(("second axis of the scores, claimed to be the heads", "分数的第二轴，据称是头"), scores.shape[1], 8),
        equal(("rows of the scores, claimed to be the tokens", "分数的行数，据称是词元"), scores.shape[2], 10),
        equal(("pairs of tokens that read one another", "相互读取的词元对数"), printed, 100),
        equal(("with the transposes", "加上转置"), meant, 100).control(printed),
    ]


def _tokens_read(x: Tensor, w: list[Tensor], transposed: bool) -> int:
    """Pairs of tokens (i, j) for which the output of the listing at i depends on the input at j."""

    def output(t: Tensor) -> Tensor:
        q, k, v = ((t @ one).reshape(1, 10, 8, 64) for one in w)
        if transposed:
            return formula_of(*(one.transpose(1, 2) for one in (q, k, v))).transpose(1, 2).reshape(1, 10, 512)
        return formula_of(q, k, v).reshape(1, 10, 512)

    before, read = output(x[:1]), 0
    for j in range(10):
        moved = x[:1].clone()
        moved[:, j] += 1.0
        read += int((output(moved) != before).any(-1).sum())
    return read
