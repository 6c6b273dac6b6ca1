"""Sparse mixtures whose heads see only the tokens that selected them, and gates with a varying number of heads."""

import copy
from typing import Any

import pytest
import torch
from design_samples import design, given
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headwise.cache import ChosenCache, KVCache
from headwise.costs import Work, attention_stages
from headwise.costs.work import Counts
from headwise.errors import ConfigError
from headwise.kernels import use_kernel
from headwise.lm.model import Decoder, DecoderConfig
from headwise.masks import Causal, Dense, Lengths, Mask, Window
from headwise.nn.gated_output import choose_heads
from headwise.nn.mixture import MixtureOfHeads, SparseHeadMixture
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.registry import counts_of

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("sparse_mixture", {"top_k": 2}),
    ("sparse_mixture", {"top_k": 1, "shared_heads": 2, "bias": True, "value_dim": 5, "renormalise": True}),
    ("sparse_mixture", {"top_p": 0.5, "qk_norm": True}),
    ("sparse_mixture", {"threshold": 0.2, "top_k": 3}),
    ("mixture_of_heads", {"top_k": 2, "shared_heads": 1}),
]
kinds = pytest.mark.parametrize(("name", "options"), KINDS, ids=str)


def reference(module: SparseHeadMixture, x: Tensor, mask: Mask | None) -> tuple[Tensor, Tensor]:
    """Output and weights of the dense module in which, in each head, only tokens that selected it see each other."""
    dense = MultiHeadAttention(
        12, 6, value_dim=module.value_dim, bias=module.q_proj.bias is not None, qk_norm=module.q_norm is not None
    ).double()  # fmt: skip
    ours = dict(module.named_parameters())
    parameters = {name: ours[name] for name, _ in dense.named_parameters()}
    gates = module.route(x)
    chosen = gates.chosen.transpose(1, 2)
    among = Dense(chosen[..., None] & chosen[:, :, None])
    call = {"mask": among if mask is None else mask & among, "return_map": True, "return_concat": True}
    _, amap, concat = torch.func.functional_call(dense, parameters, (x,), call)
    heads = concat.unflatten(-1, (6, -1)) * gates.weights[..., None]
    return module.o_proj(heads.flatten(2)), amap.to_dense()


@kinds
@pytest.mark.parametrize("mask", [None, Causal(), Causal() & Window(5), Lengths([19, 7]),
    Dense(torch.rand(2, 6, 19, 19, generator=torch.Generator().manual_seed(2)) > 0.5)], ids=repr)  # fmt: skip
def test_output_and_map_are_those_of_the_masked_dense_module(
    name: str, options: dict[str, Any], mask: Mask | None
) -> None:
    module, x = design(name, {**options, "keys": "chosen"}), given(19)
    y, amap, gates = module(x, mask=mask, return_map=True, measures=("entropy",), return_gates=True)
    expected, weights = reference(module, x, mask)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(amap.to_dense(), weights)
    rows = amap.measure("entropy", rows=True).rows["entropy"]
    torch.testing.assert_close(rows.double(), torch.special.entr(weights).sum(-1), atol=1e-6, rtol=1e-5)
    assert (rows[~gates.chosen.transpose(1, 2)] == 0).all()


@kinds
def test_gradients_are_those_of_the_masked_dense_module(name: str, options: dict[str, Any]) -> None:
    module, x = design(name, {**options, "keys": "chosen"}), given(11).requires_grad_()
    parameters = [x, *module.parameters()]
    target = given(11, seed=8)
    ours = torch.autograd.grad((module(x, mask=Causal()) * target).sum(), parameters)
    theirs = torch.autograd.grad((reference(module, x, Causal())[0] * target).sum(), parameters)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_rotary_positions_are_those_of_the_text() -> None:
    module, x = design("sparse_mixture", {"top_k": 2, "keys": "chosen", "rotary": True}), given(17)
    dense = design("sparse_mixture", {"top_k": 2, "rotary": True})
    dense.load_state_dict(module.state_dict())
    among = (chosen := module.route(x).chosen.transpose(1, 2))[..., None] & chosen[:, :, None]
    expected = dense(x, mask=Causal() & Dense(among))
    torch.testing.assert_close(module(x, mask=Causal()), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough_except("steps1", "steps2")
@pytest.mark.parametrize("steps", [(1,) * 13, (5, 1, 7), (13,)])
def test_a_cache_with_holes(steps: tuple[int, ...]) -> None:
    module, x = design("sparse_mixture", {"top_k": 2, "keys": "chosen", "rotary": True}), given()
    cache = module.new_cache()
    parts = [module(part, mask=Causal(), cache=cache) for part in x.split(steps, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), module(x, mask=Causal()))
    assert cache.nbytes == 2 * 13 * 2 * (2 + 2) * 8  # two of six heads at every token
    assert cache.nbytes == counts_of("sparse_mixture", SIZES | {"num_heads": 6}).cache * 2 * 13 * 8
    assert (cache.seen, repr(cache)) == (13, "ChosenCache(): 13 tokens seen, 1,664 bytes held")


SIZES = {"d_model": 12, "num_heads": 4, "top_k": 2, "keys": "chosen"}


def test_a_window_hides_no_new_token() -> None:
    module: Any = design("sparse_mixture", {"keys": "chosen", "top_k": 3})
    x, cache = given(11), module.new_cache(3)
    for start, stop in ((0, 5), (5, 6), (6, 11)):
        expected = module(x[:, :stop], mask=Window(3, 11))[:, start:]
        torch.testing.assert_close(module(x[:, start:stop], cache=cache), expected)


def test_a_step_shows_the_map_of_all_tokens_before() -> None:
    module, x = design("sparse_mixture", {"top_k": 2, "keys": "chosen"}), given()
    cache = module.new_cache()
    module(x[:, :12], mask=Causal(), cache=cache)
    _, amap = module(x[:, 12:], mask=Causal(), cache=cache, return_map=True)
    torch.testing.assert_close(amap.to_dense(), reference(module, x, Causal())[1][:, :, 12:])


def test_caches_that_do_not_fit_are_refused() -> None:
    module, x = design("sparse_mixture", {"top_k": 2, "keys": "chosen"}), given()
    with pytest.raises(ConfigError, match=r"cache: keys='chosen' requires a ChosenCache\(\), got KVCache"):
        module(x, cache=KVCache())
    with pytest.raises(ConfigError, match=r"ChosenCache\(\): keeps the heads that tokens selected"):
        MultiHeadAttention(12, 6).double()(x, cache=ChosenCache())
    with pytest.raises(ConfigError, match="keys='chosen' supports self attention only"):
        module(x, given(5))


def test_flops_and_parameters_are_those_of_the_costs() -> None:
    b, n = 2, 8
    module = SparseHeadMixture(12, 4, top_k=2, keys="chosen").double()
    x = given(n)
    with torch.no_grad():
        module.gate.weight.copy_(torch.eye(4, 12))
    x[..., :4] = 0
    for t in range(n):
        x[:, t, t % 4], x[:, t, (t + 1) % 4] = 5.0, 4.0  # every head is selected by half of the tokens
    counts = counts_of("sparse_mixture", SIZES)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), use_kernel("torch_blocks"):
        module(x)

    def flops(of: Counts) -> int:
        return sum(stage.flops for stage in attention_stages(of, Work(b, n, n, causal=False)))

    assert flops(counts) == counter.get_total_flops()
    assert counts.parameters == sum(p.numel() for p in module.parameters())
    assert flops(counts) < 0.55 * flops(counts_of("multi_head", {"d_model": 12, "num_heads": 4}))  # half of the heads


def test_a_varying_number_of_heads() -> None:
    p = torch.tensor([[[0.6, 0.3, 0.07, 0.03], [0.26, 0.25, 0.25, 0.24], [0.02, 0.9, 0.05, 0.03]]])

    def heads(**rule: Any) -> list[list[int]]:
        return [row.nonzero()[:, 0].tolist() for row in choose_heads(p, rule.pop("top_k", 4), 1, **rule)[0]]

    assert heads(top_p=0.8) == [[0, 1, 2], [0, 1, 2, 3, 4], [0, 2]]  # head 0 is shared
    assert heads(top_p=0.6) == [[0, 1], [0, 1, 2, 3], [0, 2]]
    assert heads(threshold=0.25) == [[0, 1, 2], [0, 1, 2, 3], [0, 2]]
    assert heads(threshold=0.95) == [[0, 1], [0, 1], [0, 2]]
    assert heads(top_p=0.8, top_k=2) == [[0, 1, 2], [0, 1, 2], [0, 2]]
    module = SparseHeadMixture(12, 6, top_p=0.5)
    counts = module.route(given(dtype=torch.float32)).chosen.sum(-1)
    assert module.top_k == 6
    assert counts.min() >= 1
    assert counts.unique().numel() > 1


def test_saved_copied_and_converted() -> None:
    module, x = design("sparse_mixture", {"top_k": 2, "keys": "chosen"}), given()
    y = module(x)
    again = SparseHeadMixture(12, 6, top_k=2, keys="chosen").double()
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(x), y)
    assert torch.equal(copy.deepcopy(module)(x), y)
    assert "keys='chosen'" in repr(module)
    assert module(x[:, :0]).shape == (2, 0, 12)
    everyone = MixtureOfHeads(12, 6, shared_heads=2, top_k=4, keys="chosen").double()
    dense = MixtureOfHeads(12, 6, shared_heads=2, top_k=4).double()
    dense.load_state_dict(everyone.state_dict())
    torch.testing.assert_close(everyone(x, mask=Causal()), dense(x, mask=Causal()))


@pytest.mark.thorough
def test_a_decoder_writes_with_its_own_caches() -> None:
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=11, d_model=12, num_layers=2, num_heads=6, d_ff=16, context=9, design="sparse_mixture",
        options={"keys": "chosen", "top_k": 2},
    )  # fmt: skip
    decoder = Decoder(config).eval()
    caches = [block.attention.new_cache(9) for block in decoder.blocks]
    ids = torch.randint(11, (1, 9))
    with torch.no_grad():
        steps = torch.cat([decoder.hidden(one, caches=caches)[0] for one in ids.split(2, 1)], 1)
        torch.testing.assert_close(steps, decoder.hidden(ids)[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keys": "some"}, "keys='some': expected 'all' or 'chosen'"),
        ({"keys": "chosen", "num_kv_heads": 2}, "keys='chosen': requires per='token', num_kv_heads=6"),
        ({"keys": "chosen", "per": "sequence"}, "got 'sequence', 6 and 12"),
        ({"keys": "chosen", "context_dim": 7}, "got 'token', 6 and 7"),
        ({"top_p": 0.0}, r"top_p=0.0: expected a number with 0 < top_p <= 1"),
        ({"threshold": "half"}, "threshold='half'"),
        ({"top_p": 0.5, "per": "sequence"}, "top_p=0.5: requires per='token'"),
    ],
)
def test_options_that_do_not_fit_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SparseHeadMixture(12, 6, **options)
