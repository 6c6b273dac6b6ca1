"""The module is the textbook's multi-head attention, whichever way it is split, cached or loaded."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.cache import KVCache, SlidingCache
from headwise.errors import ConfigError, ShapeError
from headwise.masks import Causal, Dense, Lengths, Sinks, Window
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.steps import Rotary


def made(*args: Any, **options: Any) -> MultiHeadAttention:
    torch.manual_seed(1)
    return MultiHeadAttention(*args, **options).double().eval()


def given(n: int = 13, d: int = 12, b: int = 2, seed: int = 3) -> Tensor:
    return torch.randn(b, n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def textbook(module: MultiHeadAttention, x: Tensor, context: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Σ_i softmax(x W_i^Q (c W_i^K)ᵀ / √d_k) c W_i^V W_i^O, a head at a time, from one matrix a head."""
    w = module.per_head_weights()
    group = module.num_heads // module.num_kv_heads
    y = torch.zeros(*x.shape[:2], module.d_model, dtype=x.dtype)
    for i in range(module.num_heads):
        scores = (x @ w["q"][i]) @ (context @ w["k"][i // group]).mT / module.head_dim**0.5
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        y = y + scores.softmax(-1) @ (context @ w["v"][i // group]) @ w["o"][i]
    return y


@pytest.mark.parametrize("num_kv_heads", [6, 3, 2, 1])
@pytest.mark.parametrize("sizes", [{}, {"head_dim": 5}, {"value_dim": 7}, {"head_dim": 3, "value_dim": 4}])
def test_self_attention_is_the_textbooks(num_kv_heads: int, sizes: dict[str, int]) -> None:
    module, x = made(12, 6, num_kv_heads=num_kv_heads, **sizes), given()
    torch.testing.assert_close(module(x), textbook(module, x, x))
    torch.testing.assert_close(module(x, mask=Causal()), textbook(module, x, x, torch.ones(13, 13).tril().bool()))


@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_cross_attention_is_the_textbooks(num_kv_heads: int) -> None:
    module, x, context = made(12, 4, num_kv_heads=num_kv_heads, context_dim=10), given(), given(7, 10)
    torch.testing.assert_close(module(x, context), textbook(module, x, context))
    allowed = torch.rand(13, 7, generator=torch.Generator().manual_seed(0)) > 0.4
    allowed[:, 0] = True
    torch.testing.assert_close(module(x, context, mask=Dense(allowed)), textbook(module, x, context, allowed))


def test_one_matrix_a_head_is_the_same_function_with_the_same_gradients() -> None:
    module, x = made(12, 6, num_kv_heads=2, head_dim=5, value_dim=3), given()
    heads = {name: w.detach().clone().requires_grad_() for name, w in module.per_head_weights().items()}
    again = MultiHeadAttention.from_heads(**heads)
    torch.testing.assert_close(again(x), module(x))
    (module(x) * torch.arange(12)).sum().backward()
    split = {
        "q": module.q_proj.weight.grad.view(6, 5, 12).mT, "k": module.k_proj.weight.grad.view(2, 5, 12).mT,
        "v": module.v_proj.weight.grad.view(2, 3, 12).mT, "o": module.o_proj.weight.grad.mT.view(6, 3, 12),
    }  # fmt: skip
    y = torch.zeros(2, 13, 12, dtype=torch.float64)
    for i in range(6):
        j = i // 3
        weights = ((x @ heads["q"][i]) @ (x @ heads["k"][j]).mT / 5**0.5).softmax(-1)
        y = y + weights @ (x @ heads["v"][j]) @ heads["o"][i]
    (y * torch.arange(12)).sum().backward()
    for name, w in heads.items():
        torch.testing.assert_close(split[name], w.grad)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kdim", [None, 10])
@pytest.mark.parametrize("batch_first", [True, False])
def test_weights_of_pytorchs_module_give_its_outputs(bias: bool, kdim: int | None, batch_first: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(12, 3, bias=bias, kdim=kdim, vdim=kdim, batch_first=batch_first).double().eval()
    if bias:
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
    ours = MultiHeadAttention.from_torch(theirs)
    x, context = given(), given(7, kdim or 12)
    lengths = torch.tensor([7, 4])
    padding = torch.arange(7) >= lengths[:, None]  # theirs: True = ignore
    turn = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
    expected = turn(theirs(turn(x), turn(context), turn(context), key_padding_mask=padding)[0])
    torch.testing.assert_close(ours(x, context, mask=Lengths(lengths)), expected)
    back = ours.to_torch()
    torch.testing.assert_close(back(x, context, context, key_padding_mask=padding)[0], expected)
    assert {k: v.shape for k, v in back.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    assert all(torch.equal(back.state_dict()[k], v) for k, v in theirs.state_dict().items())


@pytest.mark.parametrize("kdim", [None, 5])
def test_what_is_frozen_stays_frozen_in_both_directions(kdim: int | None) -> None:
    theirs = nn.MultiheadAttention(12, 3, kdim=kdim, vdim=kdim, batch_first=True)
    theirs.out_proj.requires_grad_(False)
    ours = MultiHeadAttention.from_torch(theirs)
    frozen = {name for name, parameter in ours.named_parameters() if not parameter.requires_grad}
    assert frozen == {"o_proj.weight", "o_proj.bias"}
    back = ours.to_torch()
    frozen = {name for name, parameter in back.named_parameters() if not parameter.requires_grad}
    assert frozen == {"out_proj.weight", "out_proj.bias"}


def test_causal_equals_pytorchs_module() -> None:
    theirs = nn.MultiheadAttention(12, 4, batch_first=True).double().eval()
    x = given()
    later = torch.ones(13, 13).triu(1).bool()
    expected = theirs(x, x, x, attn_mask=later)[0]
    torch.testing.assert_close(MultiHeadAttention.from_torch(theirs)(x, mask=Causal()), expected)


def test_what_pytorchs_module_cannot_say_is_refused() -> None:
    for module in (
        made(12, 4, num_kv_heads=2),
        made(12, 4, head_dim=5),
        made(12, 2, rotary=True),
        made(12, 4, qk_norm=True),
    ):
        with pytest.raises(ConfigError, match=r"nn\.MultiheadAttention"):
            module.to_torch()
    with pytest.raises(ConfigError, match="add_zero_attn"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(12, 4, add_zero_attn=True))
    with pytest.raises(ConfigError, match="add_bias_kv"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(12, 4, add_bias_kv=True))


def test_rotary_is_a_complex_turn_and_knows_distance_only() -> None:
    rotary = Rotary(6).double()
    x = given(9, 6)[:, None]
    pairs = torch.complex(x[..., :3], x[..., 3:])
    angle = torch.arange(4, 13)[:, None] * 10_000.0 ** (-torch.arange(3, dtype=torch.float64) / 3)
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(rotary(x, start=4), expected, rtol=0, atol=1e-14)
    q, k = given(1, 6)[:, None], given(1, 6, seed=8)[:, None]
    products = [(rotary(q, s) * rotary(k, s - 5)).sum() for s in (5, 90, 700)]
    torch.testing.assert_close(torch.stack(products), products[0].expand(3), rtol=0, atol=1e-12)


def test_qk_norm_bounds_the_logits() -> None:
    module, x = made(12, 3, qk_norm=True), given() * 1000
    _, amap = module(x, return_map=True, measures=("max_logit",))
    assert amap.measured["max_logit"].max() <= 4**0.5 + 1e-5  # |q||k|/√d = d/√d
    _, loose = made(12, 3)(x, return_map=True, measures=("max_logit",))
    assert loose.measured["max_logit"].max() > 100


CACHED = [{}, {"num_kv_heads": 2}, {"num_kv_heads": 1, "rotary": True}, {"rotary": True, "qk_norm": True}]


@pytest.mark.parametrize("options", CACHED)
@pytest.mark.parametrize("chunks", [[13], [1] * 13, [5, 1, 1, 6], [1, 12]])
def test_a_cache_gives_what_one_pass_gives(options: dict[str, Any], chunks: list[int]) -> None:
    module, x = made(16, 4, **options), given(d=16)
    cache = KVCache()
    parts = [module(part, mask=Causal(), cache=cache) for part in x.split(chunks, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), module(x, mask=Causal()), rtol=1e-5, atol=1e-6)
    assert cache.seen == 13
    kv = options.get("num_kv_heads", 4)
    assert cache.nbytes == 2 * 2 * kv * 13 * 4 * 8


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (4, 0), (4, 2), (3, 5), (20, 1)])
@pytest.mark.parametrize("chunks", [[13], [1] * 13, [5, 1, 1, 6], [2, 11]])
def test_a_sliding_cache_gives_what_a_window_gives(window: int, sinks: int, chunks: list[int]) -> None:
    module, x = made(16, 4, num_kv_heads=2, rotary=True), given(d=16)
    mask = Causal() & (Window(window) | Sinks(sinks))
    cache = SlidingCache(window, sinks)
    parts = [module(part, mask=mask, cache=cache) for part in x.split(chunks, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), module(x, mask=mask), rtol=1e-5, atol=1e-6)
    assert cache.nbytes == 2 * 2 * 2 * min(13, window - 1 + sinks) * 4 * 8


def test_caches_refuse_what_does_not_fit() -> None:
    cache = KVCache()
    made(16, 4)(given(d=16), mask=Causal(), cache=cache)
    with pytest.raises(ShapeError, match="do not match"):
        made(16, 2)(given(d=16), mask=Causal(), cache=cache)
    with pytest.raises(ConfigError, match="window=0"):
        SlidingCache(0)


def test_extras_come_in_order_and_concat_times_wo_is_the_output() -> None:
    module, x = made(12, 3, value_dim=5, bias=True), given()
    y = module(x, mask=Causal())
    y1, amap = module(x, mask=Causal(), return_map=True, measures=("entropy",))
    y2, concat = module(x, mask=Causal(), return_concat=True)
    y3, again, concat3 = module(x, mask=Causal(), return_map=True, return_concat=True)
    assert torch.equal(y, y1)
    assert torch.equal(y, y2)
    assert torch.equal(y, y3)
    assert amap.shape == again.shape == (2, 3, 13, 13)
    assert set(amap.measured) == {"entropy"}
    assert torch.equal(concat, concat3)
    assert concat.shape == (2, 13, 15)
    torch.testing.assert_close(module.o_proj(concat), y)


def test_dropout_is_for_training_only() -> None:
    module, x = made(12, 3, dropout=0.5), given()
    assert torch.equal(module(x), module(x))
    module.train()
    assert not torch.equal(module(x), module(x))


def test_copies_and_state_dicts_are_the_same_function() -> None:
    module, x = made(12, 6, num_kv_heads=3, rotary=False, qk_norm=True, bias=True), given()
    other = MultiHeadAttention(12, 6, num_kv_heads=3, qk_norm=True, bias=True).double().eval()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), module(x))
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    from safetensors.torch import load, save

    other.load_state_dict(load(save(module.state_dict())))
    assert torch.equal(other(x), module(x))


def test_autocast_stays_close() -> None:
    module, x = made(16, 4, rotary=True, qk_norm=True).float(), given(d=16).float()
    expected = module(x, mask=Causal())
    with torch.autocast("cpu", torch.bfloat16):
        half = module(x, mask=Causal())
    assert half.dtype == torch.bfloat16
    assert (half - expected).norm() / expected.norm() < 0.03


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the compiler's own looking around
def test_it_compiles() -> None:
    module, x = made(16, 4, num_kv_heads=2, rotary=True).float(), given(d=16).float()
    compiled = torch.compile(module, backend="eager")
    torch.testing.assert_close(compiled(x, mask=Causal()), module(x, mask=Causal()))


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: MultiHeadAttention(510, 8), ShapeError, "d_model=510 is not divisible by num_heads=8"),
        (
            lambda: MultiHeadAttention(16, 8, num_kv_heads=3),
            ShapeError,
            "num_heads=8 is not divisible by num_kv_heads=3",
        ),
        (lambda: MultiHeadAttention(16, 0), ConfigError, "num_heads=0"),
        (lambda: MultiHeadAttention(16, 4, dropout=1.5), ConfigError, "dropout=1.5"),
        (lambda: MultiHeadAttention(15, 5, rotary=True), ShapeError, "head_dim=3.*even"),
        (lambda: made(12, 3)(given(d=10)), ShapeError, r"x: .*d_model=12.*\(2, 13, 10\)"),
        (lambda: made(12, 3)(given(), given(7, 10)), ShapeError, r"context: .*\(2, 7, 10\)"),
        (lambda: made(12, 3, context_dim=10)(given()), ShapeError, "context: required"),
        (lambda: made(12, 3)(given(), given(), cache=KVCache()), ConfigError, "cache"),
        (lambda: MultiHeadAttention.from_heads(*torch.zeros(4, 2, 3, 4)), ShapeError, "expected"),
    ],
)
def test_bad_sizes_are_named(call: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()
