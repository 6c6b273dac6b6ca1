"""Sparse mixtures of heads: the formula from all heads, computed from the chosen ones only."""

from typing import Any

import pytest
import torch
from design_samples import design, given
from samples import MASKS
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headwise.cache import KVCache
from headwise.errors import ConfigError
from headwise.masks import Causal, Dense, Grid, Lengths, Mask, Span, State, Window
from headwise.nn.gated_output import Gates
from headwise.nn.mixture import MixtureOfHeads, SparseHeadMixture
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.sparse_attention import Picked

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("sparse_mixture", {"top_k": 2}),
    ("sparse_mixture", {"top_k": 1, "shared_heads": 3, "bias": True}),
    ("sparse_mixture", {"top_k": 2, "num_kv_heads": 2, "value_dim": 5, "renormalise": True}),
    ("sparse_mixture", {"top_k": 6}),
    ("sparse_mixture", {"top_k": 2, "shared_heads": 1, "per": "sequence", "bias": True}),
    ("mixture_of_heads", {"top_k": 2, "shared_heads": 2}),
    ("mixture_of_heads", {"top_k": 1, "shared_heads": 1, "scaled": True, "num_kv_heads": 1}),
]


def all_heads(module: SparseHeadMixture, x: Tensor, mask: Mask | None) -> Tensor:
    """Every head computed by the dense module with the same weights: head_i W_i^O, [b, h, n, d_model]."""
    dense = MultiHeadAttention(
        12, 6, num_kv_heads=module.num_kv_heads, value_dim=module.value_dim, bias=module.q_proj.bias is not None
    ).double()  # fmt: skip
    dense.load_state_dict({k: v for k, v in module.state_dict().items() if k in dense.state_dict()})
    _, concat = dense(x, mask=mask, return_concat=True)
    heads = concat.unflatten(-1, (6, -1))
    return torch.einsum("bnhv,hvd->bhnd", heads, dense.per_head_weights()["o"])


@pytest.mark.parametrize(("name", "options"), KINDS)
@pytest.mark.parametrize(
    "mask",
    [
        None,
        Causal(),
        Causal() & Window(5),
        Lengths([19, 7]),
        Dense(torch.rand(2, 6, 19, 19, generator=torch.Generator().manual_seed(2)) > 0.5),  # other for each head
    ],
    ids=repr,
)
def test_the_sum_is_over_the_weighted_heads(name: str, options: dict[str, Any], mask: Mask | None) -> None:
    module, x = design(name, options), given(19)
    y, gates = module(x, mask=mask, return_gates=True)
    expected = (all_heads(module, x, mask) * gates.weights.expand(2, 19, 6).transpose(1, 2)[..., None]).sum(1)
    if module.o_proj.bias is not None:
        expected = expected + module.o_proj.bias
    torch.testing.assert_close(y, expected)


def test_gates_are_the_formula() -> None:
    module, x = design("sparse_mixture", {"top_k": 2, "shared_heads": 1}), given()
    with torch.no_grad():
        gates, p = module.route(x), (x @ module.gate.weight.T).softmax(-1)
    for t in range(13):
        order = sorted(range(5), key=lambda i: -float(p[0, t, i]))
        for i in range(5):
            expected = p[0, t, i] if i in order[:2] else 0.0
            assert float(gates.weights[0, t, 1 + i]) == pytest.approx(float(expected))
            assert bool(gates.chosen[0, t, 1 + i]) == (i in order[:2])
    assert (gates.weights[..., 0] == 1).all()
    again = SparseHeadMixture(12, 6, top_k=2, renormalise=True).double().route(x)
    torch.testing.assert_close(again.weights.sum(-1), torch.ones(2, 13, dtype=torch.float64))


@pytest.mark.parametrize("scaled", [False, True])
def test_mixture_of_heads_has_two_softmaxes_and_a_balance(scaled: bool) -> None:
    module, x = design("mixture_of_heads", {"top_k": 3, "shared_heads": 2, "scaled": scaled}), given()
    gates = module.route(x)
    alpha = (x @ module.balance.weight.T).softmax(-1)
    shared = (x @ module.shared_gate.weight.T).softmax(-1)
    routed = (x @ module.gate.weight.T).softmax(-1)
    kept = routed * gates.chosen[..., 2:]
    assert (gates.chosen.sum(-1) == 5).all()
    expected = torch.cat((alpha[..., :1] * shared, alpha[..., 1:] * kept), -1)
    if scaled:
        expected = 2 * torch.cat(
            (2 * alpha[..., :1] * shared, 3 * alpha[..., 1:] * kept / kept.sum(-1, keepdim=True)), -1
        )
        torch.testing.assert_close((gates.weights.sum(-1) / 2 - 2 * alpha[..., 0] - 3 * alpha[..., 1]).abs().max(),
                                   torch.zeros((), dtype=torch.float64))  # fmt: skip
    torch.testing.assert_close(gates.weights, expected)


@pytest.mark.parametrize("sizes", [{}, {"num_kv_heads": 2, "qk_norm": True, "rotary": True, "bias": True}])
def test_a_trained_module_becomes_a_mixture(sizes: dict[str, Any]) -> None:
    whole, x = design("multi_head", sizes), given()
    mixture = MixtureOfHeads.from_multi_head(whole, shared_heads=2, top_k=4, router_std=0.0)
    torch.testing.assert_close(mixture(x, mask=Causal()), whole(x, mask=Causal()), rtol=1e-5, atol=1e-6)
    fewer, gates = MixtureOfHeads.from_multi_head(whole, shared_heads=2, top_k=2)(x, return_gates=True)
    assert (gates.chosen.sum(-1) == 4).all()
    assert gates.load()[2:].min() > 0  # tokens choose differently from the start
    assert 0 < (fewer - whole(x)).norm() / whole(x).norm() < 1


def test_the_loss_is_one_at_balance_and_grows_without() -> None:
    even = torch.full((2, 6, 4), 0.25)
    chosen = torch.zeros(2, 6, 4, dtype=torch.bool)
    for t in range(6):
        chosen[:, t, [t % 4, (t + 2) % 4]] = True
    chosen[:, 4:] = chosen[:, [0, 1]]
    balanced = Gates(even * chosen, chosen, even)
    assert float(Gates(even * chosen, chosen, even).balance_loss()) == pytest.approx(1.0)
    assert float(balanced.entropy()) == pytest.approx(float(torch.tensor(4.0).log()))
    one = torch.zeros(2, 6, 4)
    one[..., 1] = 1.0
    assert float(Gates(one, one.bool(), one).balance_loss()) == pytest.approx(4.0)
    assert Gates(one, one.bool(), one).load().tolist() == [0, 1, 0, 0]
    assert Gates(one * 0.5, one.bool(), one).importance().tolist() == [0, 0.5, 0, 0]


@pytest.mark.thorough
def test_training_on_the_loss_evens_the_load() -> None:
    torch.manual_seed(0)
    module, x = SparseHeadMixture(12, 6, top_k=1), given(64, dtype=torch.float32) + 1.0
    optimiser = torch.optim.Adam(module.parameters(), 0.01)
    first = float(module.route(x).balance_loss().detach())
    for _ in range(60):
        optimiser.zero_grad()
        module(x, return_gates=True)[1].balance_loss().backward()
        optimiser.step()
    assert float(module.route(x).balance_loss().detach()) < 1.1 < first


@pytest.mark.parametrize(("name", "options"), KINDS[:3] + KINDS[5:])
def test_the_map_shows_chosen_pairs_only(name: str, options: dict[str, Any]) -> None:
    module, x = design(name, options), given(19)
    _, amap, gates = module(x, mask=Causal(), return_map=True, measures=("entropy",), return_gates=True)
    chosen = gates.chosen.transpose(1, 2)
    weights = amap.to_dense()
    torch.testing.assert_close(weights.sum(-1), chosen.double())
    dense = MultiHeadAttention(12, 6, num_kv_heads=module.num_kv_heads, value_dim=module.value_dim,
                               bias=module.q_proj.bias is not None).double()  # fmt: skip
    dense.load_state_dict({k: v for k, v in module.state_dict().items() if k in dense.state_dict()})
    _, full = dense(x, mask=Causal(), return_map=True)
    torch.testing.assert_close(weights, full.to_dense() * chosen[..., None])
    rows = amap.measure("entropy", rows=True).rows["entropy"]
    assert (rows[~chosen] == 0).all()
    one = amap.head(1, 4)
    torch.testing.assert_close(one.to_dense()[0, 0], weights[1, 4])


def flops(module: SparseHeadMixture | MultiHeadAttention, x: Tensor, **options: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        module(x, mask=Causal() & Window(200), **options)
    return counter.get_total_flops()


@pytest.mark.thorough_except("sequence")
@pytest.mark.parametrize("per", ["token", "sequence"])
def test_work_falls_with_the_heads_that_are_not_chosen(per: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 512, 64)
    whole = flops(MultiHeadAttention(64, 16), x)
    few = flops(SparseHeadMixture(64, 16, top_k=2, per=per), x)
    if per == "sequence":
        assert few < whole * 0.2  # every product is an eighth, but for the edges of tiles
    else:
        assert few < whole * 0.7  # keys and values are those of all heads, the rest is an eighth


def test_one_head_chosen_by_all_computes_no_other() -> None:
    module = design("sparse_mixture", {"top_k": 1})
    with torch.no_grad():
        module.gate.weight.copy_(torch.zeros(6, 12))
        module.gate.weight[4, 0] = 50.0
        for linear in (module.q_proj, module.k_proj, module.v_proj):
            linear.weight.view(6, 2, 12)[[0, 1, 2, 3, 5]] = torch.nan  # would be seen if it were read
    x = given()
    x[..., 0] = x[..., 0].abs() + 0.1
    y, gates = module(x, mask=Causal(), return_gates=True)
    assert gates.load().tolist() == [0, 0, 0, 0, 1, 0]
    assert y.isfinite().all()


def test_a_cache_has_no_holes() -> None:
    module, x, cache = design("sparse_mixture", {"top_k": 1, "num_kv_heads": 3}), given(), KVCache()
    for part in x.split(1, 1):
        module(part, mask=Causal(), cache=cache)
    assert cache.nbytes == 2 * 2 * 3 * 13 * 2 * 8  # keys and values of every head at every token
    with pytest.raises(ConfigError, match="whole sequence"):
        design("sparse_mixture", {"per": "sequence"})(x, cache=KVCache())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 7}, "top_k=7: expected 1 <= top_k <= 6"),
        ({"top_k": 4, "shared_heads": 3}, "top_k=4: expected 1 <= top_k <= 3"),
        ({"top_k": 0}, "top_k=0"),
        ({"shared_heads": 6}, "shared_heads=6"),
        ({"per": "layer"}, "per='layer'"),
        ({"per": "sequence", "num_kv_heads": 2}, "num_kv_heads=2"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SparseHeadMixture(12, 6, **options)
    with pytest.raises(ConfigError, match="SparseHeadMixture"):
        MixtureOfHeads(12, 6, per="sequence")
    with pytest.raises(ConfigError, match="shared_heads=0"):
        MixtureOfHeads(12, 6, shared_heads=0)


@pytest.mark.parametrize("kind", MASKS)
def test_picked_rows_are_those_of_the_mask(kind: str) -> None:
    grid = Grid(2, 3, 29, 31)
    mask, heads = MASKS[kind](2, 29, 31), torch.tensor([[0, 2], [1, 2]])
    positions = torch.rand(2, 2, 29, generator=torch.Generator().manual_seed(1)).argsort(-1)[..., :11].sort(-1).values
    picked, cells = Picked(mask, grid, heads, positions), Grid(4, 1, 11, 31)
    dense = mask.to_dense(29, 31, batch=2, heads=3).expand(2, 3, 29, 31)
    expected = torch.stack([dense[e // 2, heads[e // 2, e % 2]][positions[e // 2, e % 2]] for e in range(4)])
    got = picked.to_dense(11, 31, batch=4, heads=1)
    assert torch.equal(got[:, 0], expected)
    assert torch.equal(picked.only(3, 0, cells).to_dense(11, 31)[0, 0], expected[3])
    for rows in (Span(0, 11), Span(2, 5), Span(10, 11)):
        for cols in (Span(0, 31), Span(0, 4), Span(25, 31)):
            part = expected[:, rows.start : rows.stop, cols.start : cols.stop]
            state = picked.state(rows, cols, cells)
            assert state is State.MIXED or bool(part.all() if state is State.FULL else not part.any())
    spans = picked.spans(cells)
    if spans is not None:
        keys = torch.arange(31)
        inside = (keys >= spans[..., :1]) & (keys < spans[..., 1:])
        assert torch.equal(inside.any(-2), expected)


@pytest.mark.thorough
def test_long_causal_texts_are_masked_in_blocks() -> None:
    torch.manual_seed(0)
    module, x = SparseHeadMixture(8, 4, top_k=1).double(), torch.randn(2, 1300, 8, dtype=torch.float64)
    y, amap = module(x, mask=Causal(), return_map=True)
    x[:, 700:] = 0.0
    torch.testing.assert_close(module(x, mask=Causal())[:, :700], y[:, :700])
    seen = amap[:, :, ::13].sum(-1)
    torch.testing.assert_close(seen.sum(1), torch.ones(2, 100, dtype=torch.float64))
