"""What multi-head attention computes: its definition, the scale of its scores, and identities of its weights."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise import AttentionMap, attend
from headwise.masks import Causal
from headwise.nn import DESIGNS
from headwise.wording import joined, tr
from headwise_textbook.claims.claim import Check, Plot, at_least, at_most, claim, difference, differs, equal, same
from headwise_textbook.claims.model import layer, multi_head, normal, trained
from headwise_textbook.trace import seeded

# What multi-head attention is: the formula, the heads, and equivalent forms.


@claim
def attention_formula() -> list[Check]:
    q, k, v = normal(2, 3, 11, 5, seed=1), normal(2, 3, 13, 5, seed=2), normal(2, 3, 13, 7, seed=3)
    formula = formula_of(q, k, v)
    outputs = {name: attend(q, k, v, kernel=name) for name in ("auto", "torch_blocks", "reference")}
    plain = difference(torch.softmax(q @ k.mT, -1) @ v, outputs["auto"])
    return [
        *(same(tr("error, kernel {name}", name=name), out, formula) for name, out in outputs.items()),
        at_least(tr("difference without the factor"), plain, 0.01).control(),
    ]  # fmt: skip


@claim
def multi_head_formula() -> list[Check]:
    module, x = multi_head(), normal(2, 7, 12, seed=5)
    w, y = module.per_head_weights(), module(x)
    heads = [formula_of(x @ w["q"][i], x @ w["k"][i], x @ w["v"][i]) for i in range(3)]
    formula, reversed_ = (torch.cat(order, -1) @ module.o_proj.weight.mT for order in (heads, heads[::-1]))
    return [
        same(tr("error of the layer"), y, formula),
        differs(tr("difference with the heads in reverse order"), reversed_, y),
    ]  # fmt: skip


@claim
def splitting() -> list[Check]:
    x = normal(2, 7, 12)
    split = x.view(2, 7, 3, 4).transpose(1, 2)
    columns = torch.stack([x[..., 4 * i : 4 * i + 4] for i in range(3)], 1)
    others = int((split != columns).sum())
    merged = int((split.transpose(1, 2).flatten(2) != x).sum())
    return [
        equal(tr("entries changed by splitting and merging"), merged, 0),
        equal(tr("entries of head i that are not its columns"), others, 0),
        equal(tr("copies made by the split"), int(split.data_ptr() != x.data_ptr()), 0),
        at_least(
            tr("entries of head i that are not its columns, without the transpose"),
            int((x.view(2, 3, 7, 4) != columns).sum()), 1,
        ).control(),
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
        same(tr("error of the sum"), total, y),
        differs(tr("difference of the averaged heads"), mean, y),
    ]  # fmt: skip


@claim
def output_mixes_heads() -> list[Check]:
    def blocks_in_output() -> Any:
        module = multi_head()
        with torch.no_grad():
            module.o_proj.weight.mul_(torch.block_diag(*[torch.ones(4, 4)] * 3))
        return module

    before, after = _heads_in_channels(multi_head)
    apart = _heads_in_channels(blocks_in_output)[1]
    return [
        equal(tr("heads in a channel of A, at most"), before, 1),
        equal(tr("heads in a channel of A W_O"), after, 3),
        equal(tr("heads in a channel after a block-diagonal W_O"), apart, 1).control(after),
    ]  # fmt: skip


@claim
def heads_own_their_weights() -> list[Check]:
    module, x = multi_head(), normal(2, 7, 12, seed=5)
    apart = difference(x @ torch.cat(list(module.per_head_weights()["q"].detach()), 1), module.q_proj(x))
    return [
        equal(tr("heads whose queries change with W_1^Q"), _heads_changed(module, "q_proj"), 1),
        at_least(tr("difference between X times all W_i^Q side by side and their queries"), apart, 1e-6).beyond(),
        equal(tr("heads whose keys change with the shared W^K of MQA"),
              _heads_changed(layer("multi_head", 12, 3, num_kv_heads=1), "k_proj"), 3).control(),
    ]  # fmt: skip


@claim
def heads_share_parameters() -> list[Check]:
    module, x = multi_head(), normal(1, 7, 12, seed=5)
    before = module.q_proj(x)
    with torch.no_grad():
        module.q_proj.weight[0] *= 2.0
    moved = int((module.q_proj(x) != before).any(-1).sum())
    own = max(_heads_changed(multi_head(), name) for name in ("q_proj", "k_proj", "v_proj"))
    return [
        equal(tr("positions, of 7, that one row of W_Q serves"), moved, 7),
        at_least(tr("heads that one row of W_Q, W_K or W_V serves"), own, 2).beyond(),
        at_least(tr("heads that one row of the W_K of MQA serves"),
                 _heads_changed(layer("multi_head", 12, 3, num_kv_heads=1), "k_proj"), 2).control(own),
    ]  # fmt: skip


def _heads_changed(module: Any, name: str) -> int:
    """The number of heads whose scores or values change if the first rows of a projection do."""
    x = normal(1, 7, 12, seed=5)

    def of_heads() -> Tensor:
        q, k, v = module.project(x, x)
        return torch.cat((q @ k.mT, v.expand(-1, q.shape[1], -1, -1)), -1)  # [b, h, n, m + d_v]

    before = of_heads()
    with torch.no_grad():
        getattr(module, name).weight[:4] *= 2.0
    return int((of_heads() != before).flatten(2).any(-1).sum())


@claim
def heads_have_no_order() -> list[Check]:
    module, x, order = multi_head(), normal(2, 7, 12, seed=5), [2, 0, 1]
    weights = {name: w.detach() for name, w in module.per_head_weights().items()}
    moved = {name: w[order] for name, w in weights.items()}
    y, kept = type(module).from_heads(**moved)(x), type(module).from_heads(**{**moved, "o": weights["o"]})(x)
    return [
        same(tr("error"), y, module(x)),
        differs(tr("difference if W_O stays"), kept, module(x)),
    ]  # fmt: skip


@claim
def one_step_path() -> list[Check]:
    module, x = multi_head(), normal(1, 7, 12, seed=5)
    with seeded(0):
        narrow = nn.Conv1d(12, 12, 3, padding=1).double()
    reach = [_reached(partial(module, mask=mask), x) for mask in (None, Causal())]
    local = _reached(lambda t: narrow(t.mT).mT, x)
    return [
        equal(tr("pairs (i, j) with ∂y_i/∂x_j ≠ 0"), int(reach[0].sum()), 49),
        equal(tr("pairs under a causal mask"), int((reach[1] & torch.ones(7, 7).tril().bool()).sum()), 28),
        equal(tr("pairs beyond the causal mask"), int(reach[1].triu(1).sum()), 0),
        equal(tr("pairs that a convolution of width 3 reaches"), int(local.sum()), 19).control(),
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
        same(tr("error of outputs"), outputs[1], outputs[0]),
        *(
            same(tr("of gradients of {letters}", letters=letters[name]), gradients[name], parameter)
            for name, parameter in of_module.items()
        ),
        differs(tr("difference with queries exchanged"), kind.from_multi_head(exchanged)(x), outputs[0]),
    ]  # fmt: skip


def _of_gradients(module: Any) -> Any:
    """A copy of the module whose weights are its gradients."""
    other = copy.deepcopy(module)
    with torch.no_grad():
        for into, parameter in zip(other.parameters(), module.parameters(), strict=True):
            into.copy_(parameter.grad)
    return other


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
        before.append((concat != concat_other).flatten(0, -2).any(0))  # which channels differ
        after.append((y != y_other).flatten(0, -2).any(0))
    return int(torch.stack(before).sum(0).max()), int(torch.stack(after).sum(0).min())


def _reached(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """For which pairs of tokens (i, j) ∂y_i/∂x_j does not vanish, [n, n]."""
    jacobian: Any = torch.autograd.functional.jacobian(lambda t: layer(t)[0].sum(-1), x)
    return jacobian[:, 0].abs().sum(-1) > 0


# Why scores are divided by √d_k: measurements with and without the factor.
SIZES = 1, 4, 16, 64, 256, 1024
WITHOUT = tr("without the factor")


@claim
def scaling_keeps_variance() -> list[Check | Plot]:
    found, plain, scaled = [], {}, {}
    for d in SIZES:
        dots = (normal(20_000, d, seed=1) * normal(20_000, d, seed=2)).sum(-1)
        plain[d], scaled[d] = float(dots.var()), float((dots / math.sqrt(d)).var())
    for d in (16, 64, 1024):
        found += [
            equal(tr("variance of q·k at d_k = {d}", d=d), plain[d], d, 0.05),
            equal(tr("scaled"), scaled[d], 1, 0.05),
        ]
    variances = []
    for amap in trained().maps:
        scores = (amap.q.double() @ amap.k.double().mT)[0] / math.sqrt(amap.q.shape[-1])  # [h, n, n]
        variances.append(scores[:, torch.ones(scores.shape[1:]).tril().bool()].var(-1))  # over all causal pairs
    least, most = float(torch.cat(variances).min()), float(torch.cat(variances).max())
    return [
        *found,
        equal(tr("trained model, variance of scaled scores, smallest head"), least, 1, 0.05)
        .beyond(),
        equal(tr("largest head"), most, 1, 0.05).beyond(),
        equal(tr("divided by d_k = 64"), plain[64] / 64**2, 1 / 64, 0.05).control(scaled[64]),
        Plot({"q·k": plain, "q·k / √d_k": scaled}, {"d_k": {d: d for d in SIZES}}),
    ]  # fmt: skip


@claim
def scaling_keeps_gradients() -> list[Check | Plot]:
    plain, scaled, saturated = {}, {}, {}
    for d in SIZES:
        dots = normal(200, d, seed=1) @ normal(64, d, seed=2).mT  # [queries, keys]
        plain[d], scaled[d] = _slopes(dots), _slopes(dots / math.sqrt(d))
        saturated[d] = float((torch.softmax(dots, -1).amax(-1) > 0.99).double().mean())
    median, mean = ({d: {way: float(of(x)) for way, x in (("plain", plain[d]), ("scaled", scaled[d]))} for d in SIZES}
                    for of in (torch.median, torch.mean))  # fmt: skip
    return [
        at_most(tr("median gradient at d_k = 1024 relative to 16, without the factor"),
                median[1024]["plain"] / median[16]["plain"], 0.5),
        equal(tr("with it"), median[1024]["scaled"] / median[16]["scaled"], 1, 0.1),
        at_least(tr("share of rows with a weight above 0.99 at d_k = 1024, without the factor"), saturated[1024], 0.5),
        at_most(tr("mean gradient without the factor relative to that with it, d_k = 64"),
                mean[64]["plain"] / mean[64]["scaled"], 1.0).beyond(),
        at_least(tr("share of rows with a weight above 0.99 at d_k = 64, without the factor"), saturated[64], 0.5)
        .beyond(),
        equal(tr("median gradient without the factor relative to that with it, d_k = 1"),
              median[1]["plain"] / median[1]["scaled"], 1, 0.01)
        .control(median[1024]["plain"] / median[1024]["scaled"]),
        Plot({
            joined([of_rows, factor]): {d: x[way] for d, x in slopes.items()}
            for of_rows, slopes in ((tr("mean"), mean), (tr("median"), median))
            for factor, way in ((WITHOUT, "plain"), (tr("with 1/√d_k"), "scaled"))
        }),
    ]  # fmt: skip


def _slopes(scores: torch.Tensor) -> Tensor:
    """The Frobenius norm of ∂p/∂s of each row of the scores."""
    p = torch.softmax(scores, -1)
    jacobian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return jacobian.flatten(1).norm(dim=-1)


# Identities that the library is based on: statistics of the weights computed without them. All in float64.
ERROR = tr("error")


@claim
def entropy_without_weights() -> list[Check]:
    q, k, _ = _qkv()
    pk, amap = attend(q, k, k, return_map=True)
    entropy = amap.lse - amap.rule.scale * (q * pk).sum(-1)
    truth = torch.special.entr(_weights(q, k)).sum(-1)
    return [
        same(ERROR, entropy, truth),
        differs(tr("error of the log-sum-exp alone"), amap.lse, truth),
    ]  # fmt: skip


@claim
def effective_keys_from_lse() -> list[Check]:
    q, k, v = _qkv()
    scale = q.shape[-1] ** -0.5
    once, twice = (attend(q, k, v, scale=c * scale, return_map=True)[1].lse for c in (1, 2))
    found, truth = torch.exp(twice - 2 * once), _weights(q, k).square().sum(-1)
    return [
        same(ERROR, found, truth),
        differs(tr("error of exp(LSE(2s) − LSE(s))"), torch.exp(twice - once), truth),
    ]  # fmt: skip


@claim
def received_mass_gradient() -> list[Check]:
    q, k, v = _qkv()
    v.requires_grad_()
    out, amap = attend(q, k, v, return_map=True)
    out.sum().backward()
    assert v.grad is not None
    mass = _weights(q, k).sum(-2)
    return [
        same(tr("error of the gradient"), v.grad[..., 0], mass),
        same(tr("of the map's own sum"), amap.received(), mass),
        differs(tr("error of sums over rows"), torch.ones_like(mass), mass),
    ]  # fmt: skip


@claim
def lse_bounds_maximum() -> list[Check]:
    q, k, v = _qkv()
    lse = attend(q, k, v, return_map=True)[1].lse
    largest = (q @ k.mT * q.shape[-1] ** -0.5).amax(-1)
    m = k.shape[2]
    flat, peak = torch.zeros(m, dtype=torch.float64), torch.full((m,), -1e3, dtype=torch.float64)
    peak[0] = math.log(m)
    above = float((lse - math.log(m) - largest).max())
    return [
        at_least(tr("smallest LSE − max"), float((lse - largest).min()), 0.0),
        at_most(tr("largest LSE − ln m − max"), above, 0.0),
        equal(tr("two rows of LSE"), float(peak.logsumexp(0)), float(flat.logsumexp(0)), 1e-12),
        equal(tr("whose maxima differ by"), float(peak.max() - flat.max()), math.log(m), 1e-12),
        at_least(tr("LSE − ln(m/2) − max of equal scores"),
                 float(flat.logsumexp(0)) - math.log(m / 2) - float(flat.max()), 0.1).control(above),
    ]  # fmt: skip


@claim
def importance_from_gradient() -> list[Check]:
    module, x, target = multi_head(), normal(2, 7, 12, seed=5), normal(2, 7, 12, seed=6)
    gates = torch.ones(3, dtype=torch.float64, requires_grad=True)
    heads = module.attention(*module.project(x, x))[0]  # [b, h, n, d_v]
    out = heads.detach().requires_grad_()
    losses = [(module.output(module.merge(h, x)) - target).square().sum() for h in (heads * gates[:, None, None], out)]
    (by_gate,), (by_head,) = torch.autograd.grad(losses[0], [gates]), torch.autograd.grad(losses[1], [out])
    found, norms = (by_head * out).sum((0, 2, 3)).abs(), out.square().sum((0, 2, 3)).sqrt()
    scaled = norms * by_gate.abs().max() / norms.max()
    return [
        same(ERROR, found, by_gate.abs()),
        differs(tr("error of ‖O‖, scaled"), scaled, by_gate.abs()),
    ]  # fmt: skip


@claim
def key_blocks_merge_exactly() -> list[Check]:
    q, k, v = _qkv()
    parts = [attend(q, k[:, :, a:z], v[:, :, a:z], return_map=True) for a, z in ((0, 3), (3, 4), (4, 13))]
    lse = torch.stack([amap.lse for _, amap in parts]).logsumexp(0)
    merged = torch.stack([out * torch.exp(amap.lse - lse)[..., None] for out, amap in parts]).sum(0)
    whole, mean = attend(q, k, v), torch.stack([out for out, _ in parts]).mean(0)
    return [
        same(ERROR, merged, whole),
        differs(tr("error of the mean of the parts"), mean, whole),
    ]  # fmt: skip


@claim
def weights_are_an_operator() -> list[Check]:
    q, k = normal(1, 1, 13, 5, seed=1), normal(1, 1, 13, 5, seed=2)
    amap: AttentionMap = attend(q, k, k, return_map=True)[1]
    p, x = _weights(q, k)[0, 0], normal(13, 3, seed=4)
    rolled = x
    for _ in range(4):
        rolled = 0.5 * (amap @ rolled)[0, 0] + 0.5 * rolled
    mean = 0.5 * (p + torch.eye(13, dtype=torch.float64))
    block = normal(13, 13, seed=9)
    for _ in range(60):
        block = torch.linalg.qr(amap.T @ (amap @ block))[0][0, 0]  # subspace iteration
    singular = torch.linalg.svdvals((amap @ block)[0, 0])
    return [
        same(tr("error of P X"), (amap @ x)[0, 0], p @ x),
        same(tr("of Pᵀ X"), (amap.T @ x)[0, 0], p.mT @ x),
        same(tr("of four layers of rollout"), rolled, torch.linalg.matrix_power(mean, 4) @ x),
        same(tr("of singular values"), singular, torch.linalg.svdvals(p), 1e-9),
        differs(tr("difference between Pᵀ X and P X"), (amap.T @ x)[0, 0], p @ x),
    ]  # fmt: skip


@claim
def torch_tells_lse() -> list[Check]:
    q, k, _ = _qkv()
    v = normal(*k.shape, seed=8)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return [
        same(tr("error of LSE"), lse, scores.logsumexp(-1)),
        same(tr("of the output"), out, _weights(q, k) @ v),
        differs(tr("error of LSE without the factor"), lse, (q @ k.mT).logsumexp(-1)),
    ]  # fmt: skip


@claim
def key_bias_does_nothing() -> list[Check]:
    module, x = layer("multi_head", 12, 3, bias=True), normal(2, 7, 12, seed=5)
    before = module(x)
    moved = {}
    for name in ("k_proj", "q_proj"):
        with torch.no_grad():
            getattr(module, name).bias += 3.0 * normal(12, seed=6)
        moved[name] = difference(module(x), before)
    return [
        at_most(tr("change by a key bias"), moved["k_proj"], 1e-12),
        at_least(tr("by a query bias"), moved["q_proj"], 0.01).control(),
    ]


@claim
def entropy_has_a_floor() -> list[Check | Plot]:
    margins, reached = [], []
    for t, sigma in (5, 1.0), (64, 4.0), (64, 12.0):
        rows = normal(500, t, seed=t)
        rows = sigma * rows / rows.norm(dim=-1, keepdim=True)
        peak = torch.full((t,), -1.0, dtype=torch.float64)
        peak[0] = t - 1
        margins.append(float(_row_entropy(rows).min()) - _floor(t, sigma))
        extreme = float(_row_entropy(sigma * peak / peak.norm()))
        reached.append(abs(extreme - _floor(t, sigma)))
        below = extreme - _floor(t, sigma / 2)
    rows = normal(500, 64, seed=64)
    rows = rows / rows.norm(dim=-1, keepdim=True)
    entropies = {sigma: _row_entropy(sigma * rows) for sigma in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)}
    floor = {tr("the bound"): {sigma: _floor(64, sigma) for sigma in entropies}}
    return [
        at_least(tr("smallest entropy minus the bound, 1500 random rows"), min(margins), 0.0),
        at_most(tr("distance of the extreme row from it"), max(reached), 1e-12),
        at_most(tr("entropy of the extreme row minus the bound for σ/2"), below, -0.01).control(),
        Plot({
            tr("mean of 500 random rows"): {at: float(x.mean()) for at, x in entropies.items()},
            tr("least of them"): {at: float(x.min()) for at, x in entropies.items()},
        }, floor),
    ]  # fmt: skip


def _qkv() -> tuple[Tensor, Tensor, Tensor]:
    return 3.0 * normal(2, 3, 11, 5, seed=1), normal(2, 3, 13, 5, seed=2), normal(2, 3, 13, 7, seed=3)


def _weights(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)


def _row_entropy(scores: Tensor) -> Tensor:
    return torch.special.entr(torch.softmax(scores, -1)).sum(-1)


def _floor(t: int, sigma: float) -> float:
    beta = math.exp(-sigma * math.sqrt(t / (t - 1)))
    return math.log(1 + (t - 1) * beta) + sigma * math.sqrt(t * (t - 1)) * beta / (1 + (t - 1) * beta)
