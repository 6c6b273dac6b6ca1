"""What surrounds and replaces multi-head attention: the block, derived designs, convolution, and what is misprinted."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from headwise import attend
from headwise.masks import Causal
from headwise.nn import DESIGNS, AttentionLayer, from_conv1d, from_conv2d
from headwise.wording import tr
from headwise_textbook.claims.claim import Check, Plot, at_least, at_most, claim, difference, differs, equal, same
from headwise_textbook.claims.formulas import formula_of
from headwise_textbook.claims.model import counted, layer, multi_head, normal, size_of, standard, trained
from headwise_textbook.trace import seeded


# The block around the heads: residual connection, norm, and the projections in front.
@claim
def residual_norm() -> list[Check | Plot]:
    depths = 1, 3, 6, 12, 24
    cases = {
        tr("residual and LayerNorm"): (True, True),
        tr("residual only"): (True, False),
        tr("LayerNorm only"): (False, True),
        tr("neither"): (False, False),
    }
    left = {what: {depth: _gradient_left(depth, *case) for depth in depths} for what, case in cases.items()}
    both, residual, norm, neither = (line[24] for line in left.values())
    return [
        at_least(tr("gradient after 24 layers with both"), both, 0.1),
        at_least(tr("with the residual connection only"), residual, 0.1),
        at_least(tr("with LayerNorm only"), norm, 0.1),
        at_most(tr("with neither"), neither, 1e-6).control(),
        Plot(left),
    ]  # fmt: skip


@claim
def normalised_tokens() -> list[Check]:
    module, x, norm = multi_head(), 50.0 * normal(2, 7, 12, seed=5), nn.LayerNorm(12, eps=0.0).double()
    y, before = norm(x + module(x)).detach(), (x + module(norm(x))).detach()
    deviation = float((y.var(-1, unbiased=False) - 1).abs().max())
    return [
        at_most(tr("largest |mean| of a token"), float(y.mean(-1).abs().max()), 1e-12),
        at_most(tr("largest |variance − 1|"), deviation, 1e-12),
        at_least(tr("pre-norm: largest |variance − 1|"),
                 float((before.var(-1) - 1).abs().max()), 10.0).control(deviation),
    ]  # fmt: skip


@claim
def block_diagonal() -> list[Check]:
    d, h = 12, 3
    standard, sliced = layer("multi_head", d, h), layer("block_diagonal", d, h)
    x, fed, weights = normal(2, 7, d, seed=5), _heads_fed(standard), standard.q_proj.weight.numel()
    return [
        equal(tr("heads that an input dimension feeds"), fed, 1),
        equal(tr("weights of Q"), weights, d * d // h),
        equal(tr("heads fed in the block-diagonal layer"), _heads_fed(sliced), 1).control(),
        equal(tr("weights of its Q"), sliced.w_q.numel(), d * d // h).control(weights),
        same(tr("its own error as a multi-head layer with zeros"), sliced.to_multi_head()(x), sliced(x))
        .control(difference(standard(x), sliced(x))),
    ]  # fmt: skip


@claim
def correlated_inputs_couple() -> list[Check]:
    module, x = layer("block_diagonal", 12, 3), normal(5000, 1, 12, seed=5)
    correlated = x + 2.0 * normal(5000, 1, 1, seed=6)  # the same number in all channels of a token
    coupled, apart = (_correlation_of_heads(module, one) for one in (correlated, x))
    moved = correlated.clone()
    moved[..., :4] += 1.0  # the channels of head 1
    change = (module.project(moved, moved)[0] != module.project(correlated, correlated)[0]).flatten(2).any(-1)
    return [
        at_least(tr("correlation of two heads' queries, correlated channels"), coupled, 0.5),
        at_least(tr("other heads whose queries change with the channels of head 1"), int(change[:, 1:].sum()), 1)
        .beyond(),
        at_most(tr("correlation of two heads' queries, independent channels"), apart, 0.1).control(),
    ]  # fmt: skip


def _correlation_of_heads(module: Any, x: Tensor) -> float:
    """The largest canonical correlation between the queries of the first two heads of single tokens [b, 1, d]."""
    q = module.project(x, x)[0][:, :, 0].detach()  # [b, h, d_k]
    one, other = (torch.linalg.qr(q[:, i] - q[:, i].mean(0))[0] for i in (0, 1))
    return float(torch.linalg.svdvals(one.mT @ other)[0])


@claim
def output_replaces() -> list[Check]:
    model, module, x = trained(), multi_head(), normal(2, 7, 12, seed=5)
    block: Any = model.decoder.blocks[0]
    with torch.no_grad():
        embedded = model.decoder.embedding(model.ids)
        added = block.attention(block.attention_norm(embedded), mask=Causal())
        after = embedded + added
    alike = float(nn.functional.cosine_similarity(after, embedded, dim=-1).mean())
    remaining = difference(after, added)
    return [
        at_most(tr("difference between the tokens after attention and its output"), remaining, 1e-6),
        at_most(tr("their mean cosine with the embeddings"), alike, 0.1),
        at_most(tr("the same difference without a residual connection"),
                difference(module(x), module.output(module.merge(module.attention(*module.project(x, x))[0], x))), 1e-6)
        .control(),
    ]  # fmt: skip


def _gradient_left(depth: int, residual: bool, norm: bool) -> float:
    """Norm of the gradient at the input of a stack of layers relative to that at its output."""
    x = normal(4, 16, 32, seed=5).requires_grad_()
    with seeded(0):
        layers = [standard(32, 4).double() for _ in range(depth)]
    z: Tensor = x
    for one in layers:
        z = z + one(z) if residual else one(z)
        z = nn.functional.layer_norm(z, (32,)) if norm else z
    towards = normal(4, 16, 32, seed=6)
    (gradient,) = torch.autograd.grad((z * towards).sum(), [x])
    return float(gradient.norm() / towards.norm())


def _heads_fed(module: AttentionLayer) -> int:
    """The largest number of heads whose queries depend on one input dimension."""
    x = normal(1, 1, 12, seed=5)

    def queries(t: Tensor) -> Tensor:
        return module.project(t, t)[0][0, :, 0]  # [h, d_k]

    slopes = torch.autograd.functional.jacobian(queries, x)[:, :, 0, 0]  # [h, d_k, d]
    return int((slopes != 0).any(1).sum(0).max())


# Designs derived from multi-head attention: mixtures, groups, mixing of heads.
@claim
def sparse_heads() -> list[Check]:
    module, x = layer("sparse_mixture", 12, 6, top_k=2), normal(2, 7, 12, seed=5)
    heads = formula_of(*module.project(x, x))  # all six, [b, h, n, d_k]
    g = torch.softmax(module.gate(x), -1)  # [b, n, h]
    weighted = heads * (g * (g >= g.topk(2, -1).values[..., -1:])).transpose(1, 2)[..., None]
    y, gates = module(x, return_gates=True)
    # Exact outputs of 64 tokens that each select 3 of 12 heads need queries, output and attention of these heads only,
    # but keys and values of all heads that some token selects.
    projections, attention = 2 * 2 * 64 * 48 * 48, 4 * 64 * 64 * 48
    required = 3 / 12 * (projections + attention) + _heads_required() * projections
    once, every = (_share_of_flops(per, top_k) for per, top_k in (("sequence", 3), ("sequence", 12)))
    return [
        same(tr("error, written out over all heads"), y, module.o_proj(weighted.transpose(1, 2).flatten(2))),
        equal(tr("heads used per token"), float(gates.chosen.sum(-1).double().mean()), 2),
        at_most(tr("FLOPs with 3 of 12 heads for the whole input, relative to all"),
                once, 0.26),
        at_most(tr("FLOPs that exact outputs require if each token selects 3 of 12"),
                required / (2 * projections + attention), 0.26).beyond(),
        at_most(tr("share of heads whose keys some token requires"), _heads_required(), 0.26).beyond(),
        at_least(tr("FLOPs with 12 of 12 heads"), every, 1.0).control(once),
    ]  # fmt: skip


@claim
def simple_uses_fewer_heads() -> list[Check]:
    module, draws = layer("sparse_mixture", 12, 6, top_k=3), normal(2, 50, 12, seed=5)
    used = [module(x, return_gates=True)[1].chosen.sum(-1).double() for x in (torch.zeros_like(draws), draws)]
    most = torch.softmax(module.gate(3.0 * draws), -1).sort(-1, descending=True).values.cumsum(-1)
    needed = (most < 0.6).sum(-1).double() + 1  # heads until their gates sum to 0.6
    return [
        at_least(tr("heads of random tokens minus those of constant ones, top 3"),
                 float(used[1].mean() - used[0].mean()), 0.5),
        at_least(tr("largest difference between two tokens, top 3"), float(used[1].max() - used[1].min()), 1),
        at_least(tr("largest difference between two tokens, gates up to a sum of 0.6"),
                 float(needed.max() - needed.min()), 1).control(),
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
        same(tr("constant gate: error of h times the mixture"), mixture, y),
        at_least(tr("difference to a mixture whose gate reads the token"), difference(open_gate, y), 0.01),
        differs(tr("difference with weights from ½/h to 1½/h"), dense.o_proj(tilted.flatten(-2)), y),
    ]  # fmt: skip


@claim
def grouped_heads() -> list[Check]:
    module, x = layer("grouped_mlp", 12, 6, num_groups=2), normal(2, 7, 12, seed=5)
    y, concat = module(x, return_concat=True)
    groups = torch.cat([concat[..., 6 * j : 6 * j + 6] @ module.w_groups[j] for j in range(2)], -1)
    reads = torch.autograd.functional.jacobian(lambda c: module.groups(c).flatten(-2)[0, 0], concat)[:, 0, 0] != 0
    within, between = reads[:6, :6], torch.cat((reads[:6, 6:], reads[6:, :6]))
    concatenated = torch.autograd.functional.jacobian(lambda c: (1.0 * c)[0, 0], concat)[:, 0, 0] != 0
    dense = layer("multi_head", 12, 6).o_proj.weight != 0
    crossing = int(dense[:6, 6:].sum() + dense[6:, :6].sum())
    return [
        same(tr("error"), y, _mlp(module, groups)),
        equal(tr("share of channels read within a group"), float(within.double().mean()), 1),
        equal(tr("the same with the concatenation alone"), float(concatenated[:6, :6].double().mean()), 1).beyond(),
        equal(tr("channels read between groups before the MLP"), int(between.sum()), 0),
        equal(tr("channels that a W_O reads between groups"), crossing, 72).control(int(between.sum())),
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
        sizes = [size_of(module) for module in (_of_gpt_2("grouped_mlp", num_groups=2), _of_gpt_2("multi_head"))]
    return [
        at_least(tr("difference of the best W_O instead of the MLP"), curved, 1e-6),
        at_least(tr("difference after folding the maps of the groups into the MLP"), folded, 1e-6).beyond(),
        at_most(tr("parameters relative to multi-head, d = 768, h = 12, g = 2"),
                sizes[0] / sizes[1], 1.0).beyond(),
        at_most(tr("difference of the best W_O instead of a linear MLP"), straight, 1e-6).control(),
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
        same(tr("error"), y, module.o_proj(mixed.flatten(2))),
        equal(tr("heads affected by head 1 of token 3"), affected, 3),
        at_most(tr("its effect on other tokens"), others, 1e-14),
        at_most(tr("difference of the reading along the tokens"), apart, 1e-12).beyond(),
        equal(tr("heads affected before the second attention"), int(_bump(first)[0, 3].any(-1).sum()), 1).control(
            affected
        ),
    ]


def _of_gpt_2(design: str, **options: int) -> AttentionLayer:
    """A layer of a design at the sizes of GPT-2 small, as constructed."""
    return DESIGNS[design].build(768, 12, **options)


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


def _bump(heads: Tensor) -> Tensor:
    """A perturbation of head 1 of token 3 only, [b, n, h, d_v]."""
    bump = torch.zeros_like(heads)
    bump[:, 3, 1] = 1.0
    return bump


# Attention and convolution: heads that attend to fixed offsets.
@claim
def attention_is_convolution() -> list[Check]:
    with seeded(0):
        one = nn.Conv1d(4, 6, 3, padding=2, dilation=2, groups=2).double()
        two = nn.Conv2d(3, 5, (3, 5), padding=(1, 2)).double()
    x, image = normal(2, 4, 13), normal(2, 3, 7, 11)
    sharp, blunt = (module(x.mT).mT for module in (from_conv1d(one), from_conv1d(one, sharpness=0.5)))
    plane = from_conv2d(two)(image.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return [
        same(tr("error, 1-d, dilation 2"), sharp, one(x), 1e-10),
        same(tr("error, 2-d, 3×5"), plane, two(image), 1e-10),
        at_least(tr("error with blunt heads"), difference(blunt, one(x)), 0.1).control(),
    ]  # fmt: skip


@claim
def convolution_is_a_limit() -> list[Check | Plot]:
    with seeded(0):
        conv = nn.Conv2d(3, 2, 3, padding=1, bias=False).double()
    image = normal(1, 3, 9, 9)
    truth = conv(image)[..., 1:-1, 1:-1]
    errors = {
        alpha: difference(_quadratic(conv, image, alpha)[..., 1:-1, 1:-1], truth)
        for alpha in (0.5, 1, 2, 5, 10, 15, 20, 25, 30, 40)
    }
    found = []
    for alpha in (5, 10, 20):
        error = errors[alpha]
        what = tr("error · e^α at α = {alpha}", alpha=alpha)
        found.append(at_most(what, error * math.exp(alpha), 10))
        found.append(at_least(what, error * math.exp(alpha), 0.5).control(errors[40] * math.exp(alpha)))
    return [
        *found,
        at_most(tr("error at α = 40"), errors[40], 1e-12),
        Plot({tr("nine heads"): errors}, {"4·e^{−α}": {alpha: 4 * math.exp(-alpha) for alpha in errors}}),
    ]  # fmt: skip


def _quadratic(conv: nn.Conv2d, image: Tensor, alpha: float) -> Tensor:
    """A 3×3 convolution [1, c, n, n] as nine heads with scores −α‖p_k − p_q − Δ‖² of the positions p."""
    side = image.shape[-1]
    axis = torch.arange(side, dtype=torch.float64)
    p = torch.cartesian_prod(axis, axis)  # [n², 2]
    shifts = torch.cartesian_prod(axis[:3], axis[:3]) - 1  # [9, 2]
    # −α(‖p_k‖² − 2 p_k·(p_q + Δ)) is the score up to a constant per row.
    k = torch.cat((p.square().sum(-1, keepdim=True), p), -1)
    aims = p + shifts[:, None]  # [9, n², 2]
    q = -alpha * torch.cat((torch.ones_like(aims[..., :1]), -2.0 * aims), -1)
    v = image.flatten(2).mT[:, None]  # [1, 1, n², c]
    heads = attend(q[None], k[None, None], v, scale=1.0)  # [1, 9, n², c]
    out = torch.einsum("bhnc,och->bon", heads, conv.weight.detach().flatten(2))
    return out.unflatten(-1, (side, side))


# Formulas and listings taken as they are printed: shapes that do not fit, and results that differ from the meant ones.
@claim
def row_stacking() -> list[Check]:
    module, x = multi_head(), normal(2, 7, 12, seed=5)
    w = module.per_head_weights()["q"].detach()  # [h, d_model, d_k]
    queries = torch.cat([x @ one for one in w], -1)
    rows, transposed, columns = torch.cat(list(w), 0), torch.cat([one.mT for one in w], 0), torch.cat(list(w), 1)
    error = difference(x @ transposed, queries)
    return [
        equal(tr("rows of the stack, printed as h·d_k"), len(rows), 3 * 4),
        equal(tr("columns of the stack, printed as d_model"), rows.shape[1], 12),
        at_most(tr("error of X W_all with the blocks transposed"), error, 1e-12),
        same(tr("error with the blocks side by side"), x @ columns, queries).control(error),
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
        at_most(tr("error of the formula taken literally"), error, 1e-12),
        same(tr("error with splitting and attention only"), torch.cat(split, -1) @ w_o, module(x)).control(),
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
        equal(tr("channels of the sum, of d_model = 12"), printed.shape[-1], 12),
        at_least(tr("directions in the sum, of d_model = 12"), rank, 12),
        equal(tr("channels with W_i^O"), mapped.shape[-1], 12).control(),
    ]  # fmt: skip


@claim
def listing_transposes() -> list[Check]:
    x = normal(2, 10, 512, seed=5)
    w = [normal(512, 512, seed=seed) / 512**0.5 for seed in range(3)]
    q, k = (t.reshape(2, 10, 8, 64) for t in (x @ one for one in w[:2]))
    scores = q @ k.transpose(-2, -1)
    printed, meant = (_tokens_read(x, w, transposed) for transposed in (False, True))
    return [
        equal(tr("second axis of the scores, claimed to be the heads"), scores.shape[1], 8),
        equal(tr("rows of the scores, claimed to be the tokens"), scores.shape[2], 10),
        equal(tr("pairs of tokens that read one another"), printed, 100),
        equal(tr("with the transposes"), meant, 100).control(),
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
