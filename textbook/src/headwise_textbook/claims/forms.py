"""Designs derived from multi-head attention: mixtures, groups, mixing of heads."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from headwise.nn import DESIGNS, AttentionLayer
from headwise_textbook.claims.claim import claim
from headwise_textbook.claims.definitions import formula_of
from headwise_textbook.claims.evidence import Check, at_least, at_most, difference, equal, same
from headwise_textbook.claims.samples import counted, layer, normal, standard


@claim
def sparse_heads() -> list[Check]:
    module, x = layer("sparse_mixture", 12, 6, top_k=2), normal(2, 7, 12, seed=5)
    heads = formula_of(*module.project(x, x))  # all six, [b, h, n, d_k]
    g = torch.softmax(module.gate(x), -1)  # [b, n, h]
    weighted = heads * (g * (g >= g.topk(2, -1).values[..., -1:])).transpose(1, 2)[..., None]
    y, gates = module(x, return_gates=True)
    once, every = (_share_of_flops(per, top_k) for per, top_k in (("sequence", 3), ("sequence", 12)))
    return [
        same(("error, written out over all heads",
              "误差，与对所有头写出的和相比"), y, module.o_proj(weighted.transpose(1, 2).flatten(2))),
        equal(("heads used per token", "每个词元所用的头数"), float(gates.chosen.sum(-1).double().mean()), 2),
        at_most(("FLOPs with 3 of 12 heads for the whole input, relative to all",
                 "整个输入共用 12 选 3 时，与全部头的 FLOP 数之比"),
                once, 0.26),
        at_most(("FLOPs that exact outputs require if each token selects 3 of 12",
                 "每个词元各自 12 选 3 时，精确输出所需的 FLOP 数之比"),
                _flops_required(), 0.26).beyond(),
        at_most(("share of heads whose keys some token requires",
                 "至少被一个词元用到其键的头的比例"), _heads_required(), 0.26).beyond(),
        at_least(("FLOPs with 12 of 12 heads", "12 选 12 时的 FLOP 数之比"), every, 1.0).control(once),
    ]  # fmt: skip


@claim
def heads_as_experts() -> list[Check]:
    module, x = layer("sparse_mixture", 12, 6, top_k=6), normal(2, 7, 12, seed=5)
    dense = standard(12, 6).double()
    dense.load_state_dict({name: w for name, w in module.state_dict().items() if not name.startswith("gate")})
    open_gate = 6 * module(x)
    nn.init.zeros_(module.gate.weight)
    mixture, y = 6 * module(x), dense(x)
    concat = dense(x, return_concat=True)[1].unflatten(-1, (6, 2))
    tilted = concat * torch.linspace(0.5, 1.5, 6, dtype=torch.float64)[:, None]
    return [
        same(("constant gate: error of h times the mixture", "恒定门控：h 倍混合的误差"), mixture, y),
        same(("a gate that reads tokens: the same error", "读取词元的门控：同样的误差"), open_gate, y).beyond(),
        at_least(("difference with weights from ½/h to 1½/h", "权重取 ½/h 到 1½/h 时的差异"),
                 difference(dense.o_proj(tilted.flatten(-2)), y), 0.01).control(difference(mixture, y)),
    ]  # fmt: skip


@claim
def grouped_heads() -> list[Check]:
    module, x = layer("grouped_mlp", 12, 6, num_groups=2), normal(2, 7, 12, seed=5)
    y, concat = module(x, return_concat=True)
    groups = torch.cat([concat[..., 6 * j : 6 * j + 6] @ module.w_groups[j] for j in range(2)], -1)
    reads = torch.autograd.functional.jacobian(lambda c: module.groups(c).flatten(-2)[0, 0], concat)[:, 0, 0] != 0
    within, between = reads[:6, :6], torch.cat((reads[:6, 6:], reads[6:, :6]))
    dense = layer("multi_head", 12, 6).o_proj.weight != 0
    crossing = int(dense[:6, 6:].sum() + dense[6:, :6].sum())
    return [
        same(("error", "误差"), y, _mlp(module, groups)),
        equal(("share of channels read within a group", "组内被读取的通道比例"), float(within.double().mean()), 1),
        equal(("channels read between groups before the MLP", "MLP 之前跨组读取的通道数"), int(between.sum()), 0),
        equal(("channels that a W_O reads between groups", "W_O 跨组读取的通道数"), crossing, 72).control(
            int(between.sum())
        ),
    ]


@claim
def group_maps_fold() -> list[Check]:
    module, x = layer("grouped_mlp", 12, 6, num_groups=2), normal(8, 7, 12, seed=5)
    y, concat = module(x, return_concat=True)
    with torch.no_grad():
        module.mlp_in.weight.copy_(module.mlp_in.weight @ torch.block_diag(*(w.mT for w in module.w_groups)))
        folded = difference(_mlp(module, concat), y)
        curved = _missed_by_output(concat, y)
        straight = _missed_by_output(concat, module.mlp_out(module.mlp_in(concat)))
    with torch.device("meta"):
        sizes = [_size(module) for module in (_of_gpt_2("grouped_mlp", num_groups=2), _of_gpt_2("multi_head"))]
    return [
        at_least(("difference of the best W_O instead of the MLP", "以最优的 W_O 代替 MLP 时的差异"), curved, 1e-6),
        at_least(("difference after folding the maps of the groups into the MLP",
                  "把组内矩阵并入 MLP 之后的差异"), folded, 1e-6).beyond(),
        at_most(("parameters relative to multi-head, d = 768, h = 12, g = 2",
                 "参数量与多头之比，d = 768、h = 12、g = 2"),
                sizes[0] / sizes[1], 1.0).beyond(),
        at_most(("difference of the best W_O instead of a linear MLP", "以最优的 W_O 代替线性的 MLP 时的差异"),
                straight, 1e-6).control(curved),
    ]  # fmt: skip


def _missed_by_output(concat: Tensor, y: Tensor) -> float:
    """How far the best output projection of the concatenated heads, with a bias, is from y."""
    flat, out = nn.functional.pad(concat.flatten(0, 1), (0, 1), value=1.0), y.flatten(0, 1)
    return difference(flat @ torch.linalg.lstsq(flat, out).solution, out)


@claim
def head_mixing() -> list[Check]:
    module, x = layer("head_mixing", 12, 3), normal(2, 7, 12, seed=5)
    with torch.no_grad():
        module.head_map.add_(0.3 * normal(3, 3, seed=6))
    first = formula_of(*module.project(x, x)).transpose(1, 2)  # [b, n, h, d_v]
    q, k, v = (module.head_map @ u(first) for u in (module.u_q, module.u_k, module.u_v))
    mixed, along = formula_of(q, k, v), formula_of(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    moved = module.mix(first.transpose(1, 2) + _bump(first).transpose(1, 2))[0].transpose(1, 2) - mixed
    others = float(torch.cat((moved[:, :3], moved[:, 4:]), 1).detach().abs().max())
    y, affected = module(x), int((moved[0, 3].abs().amax(-1) > 0).sum())
    apart = difference(module.o_proj(along.flatten(2)), y)
    return [
        same(("error", "误差"), y, module.o_proj(mixed.flatten(2))),
        equal(
            ("heads affected by head 1 of token 3", "词元 3 的头 1 所影响的头数"),
            int((moved[0, 3].abs().amax(-1) > 0).sum()),
            3,
        ),
        at_most(("its effect on other tokens", "它对其他词元的影响"), others, 1e-14),
        at_most(("difference of the reading along the tokens", "读作沿词元时的差异"), apart, 1e-12).beyond(),
        equal(
            ("heads affected before the second attention", "第二次注意力之前所影响的头数"),
            int((_bump(first)[0, 3].abs().amax(-1) > 0).sum()),
            1,
        ).control(affected),
    ]


def _of_gpt_2(design: str, **options: int) -> AttentionLayer:
    """A layer of a design at the sizes of GPT-2 small, as constructed."""
    return DESIGNS[design].build(768, 12, **options)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _mlp(module: Any, z: Tensor) -> Tensor:
    """The MLP of a grouped layer by the formula."""
    hidden = z @ module.mlp_in.weight.mT + module.mlp_in.bias
    gelu = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    return gelu @ module.mlp_out.weight.mT + module.mlp_out.bias


def _share_of_flops(per: str, top_k: int) -> float:
    """FLOPs of a sparse layer of 12 heads relative to a dense one, counted at run time."""
    x = normal(1, 64, 48, seed=5)
    return counted(lambda: layer("sparse_mixture", 48, 12, top_k=top_k, per=per)(x)) / counted(
        lambda: layer("multi_head", 48, 12)(x)
    )


def _heads_required() -> float:
    """The share of 12 heads that one of 64 tokens selects, each of them 3."""
    gates = layer("sparse_mixture", 48, 12, top_k=3)(normal(1, 64, 48, seed=5), return_gates=True)[1]
    return float(gates.chosen.any(1).double().mean())


def _flops_required() -> float:
    """FLOPs for exact outputs of 64 tokens if each selects 3 of 12 heads, d_model = 48, relative to all heads: queries,
    output and attention of the selected heads, keys and values of all heads that some token selects.
    """
    n, d = 64, 48
    projections, attention = 2 * 2 * n * d * d, 4 * n * n * d
    return (3 / 12 * (projections + attention) + _heads_required() * projections) / (2 * projections + attention)


def _bump(heads: Tensor) -> Tensor:
    """A perturbation of head 1 of token 3 only, [b, n, h, d_v]."""
    bump = torch.zeros_like(heads)
    bump[:, 3, 1] = 1.0
    return bump
