import copy
import inspect
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from largest_tensor import Largest
from torch import Tensor, nn

import headwise as hw
from headwise.errors import ConfigError, DTypeError, HeadwiseError, ShapeError
from headwise.masks import Causal, Lengths
from headwise.models.adapters.torch import MultiheadAttention


def pair(*args, dtype=torch.float64, seed=0, **options) -> tuple[MultiheadAttention, nn.MultiheadAttention]:
    """Ours and PyTorch's with the same random parameters, biases too."""
    torch.manual_seed(seed)
    theirs = nn.MultiheadAttention(*args, **options).to(dtype)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.4)
    ours = MultiheadAttention(*args, **options).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def run(module, inputs, parameters=(), **options):
    """Output, weights, and gradients of inputs and parameters for a random direction of both results."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, weights = module(*leaves, **options)
    generator = torch.Generator().manual_seed(7)
    loss = (out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum()
    if weights is not None:
        loss = loss + (weights * torch.randn(weights.shape, generator=generator, dtype=weights.dtype)).sum()
    return out, weights, torch.autograd.grad(loss, [*leaves, *module.parameters()])


@st.composite
def cases(draw):
    """A module's options, and a call's."""
    h, d = draw(st.sampled_from([1, 2, 3, 5])), draw(st.sampled_from([1, 2, 7]))
    module = {
        "embed_dim": h * d, "num_heads": h, "bias": draw(st.booleans()), "add_bias_kv": draw(st.booleans()),
        "add_zero_attn": draw(st.booleans()), "batch_first": draw(st.booleans()),
        "kdim": draw(st.sampled_from([None, 11])), "vdim": draw(st.sampled_from([None, 13])),
    }  # fmt: skip
    n, m, b = draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.integers(1, 3))
    batched = draw(st.booleans())
    b = b if batched else 1
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    widths = h * d, module["kdim"] or h * d, module["vdim"] or h * d
    inputs = [random(b, length, width) for length, width in zip((n, m, m), widths, strict=True)]
    inputs = [x if batched else x[0] for x in inputs]
    if batched and not module["batch_first"]:
        inputs = [x.transpose(0, 1) for x in inputs]
    floating = draw(st.booleans())

    def mask(*shape):
        """Boolean or floating; the first key stays visible, for PyTorch gives NaN where nothing is."""
        hidden = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.4]))
        hidden[..., 0] = False
        return random(*shape).masked_fill(hidden, -torch.inf) if floating else hidden

    causal = torch.ones(n, m, dtype=torch.bool).triu(1)
    call = {"need_weights": draw(st.booleans()), "average_attn_weights": draw(st.booleans())}
    match draw(st.sampled_from(["none", "flat", "full", "causal"])):
        case "flat":
            call["attn_mask"] = mask(n, m)
        case "full":
            call["attn_mask"] = mask(b * h, n, m)
        case "causal":
            call["attn_mask"] = torch.zeros(n, m).double().masked_fill(causal, -torch.inf) if floating else causal
    if draw(st.booleans()):
        call["key_padding_mask"] = mask(b, m) if batched else mask(1, m)[0]
    return module, inputs, call


@pytest.mark.thorough
@settings(deadline=None, max_examples=120)
@given(cases())
def test_equals_pytorch_in_outputs_weights_and_gradients(case):
    module, inputs, call = case
    ours, theirs = pair(**module)
    for mine, their in zip(run(ours, inputs, **call), run(theirs, inputs, **call), strict=True):
        if their is None:
            assert mine is None
            continue
        for x, y in zip(mine if isinstance(mine, tuple) else [mine], their if isinstance(their, tuple) else [their],
                        strict=True):  # fmt: skip
            assert x.shape == y.shape
            assert x.dtype == y.dtype
            torch.testing.assert_close(x + 0, y, rtol=1e-9, atol=1e-9)


OPTIONS = [{}, {"bias": False}, {"add_bias_kv": True}, {"kdim": 5}, {"vdim": 7, "bias": False}, {"add_zero_attn": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_state_dict_is_pytorchs(options):
    ours, theirs = MultiheadAttention(12, 3, **options), nn.MultiheadAttention(12, 3, **options)
    shapes = {name: x.shape for name, x in theirs.state_dict().items()}
    assert {name: x.shape for name, x in ours.state_dict().items()} == shapes
    theirs.load_state_dict(ours.state_dict())
    torch.manual_seed(3)
    fresh = MultiheadAttention(12, 3, **options).state_dict()
    torch.manual_seed(3)
    for name, x in nn.MultiheadAttention(12, 3, **options).state_dict().items():
        assert torch.equal(fresh[name], x), f"{name} begins with other numbers"


def test_defaults_give_weights_averaged_over_heads():
    ours, theirs = pair(12, 3)
    x = torch.randn(7, 2, 12, dtype=torch.float64)
    torch.testing.assert_close(ours(x, x, x)[1] + 0, theirs(x, x, x)[1])


@pytest.mark.parametrize("need_weights", [True, False])
def test_query_that_may_see_nothing_gives_zeros_and_no_nan(need_weights):
    ours, theirs = pair(12, 3, batch_first=True)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [True] * 5])
    hidden = torch.zeros(5, 5, dtype=torch.bool)
    hidden[3] = True
    out, weights, gradients = run(
        ours, (x, x, x), key_padding_mask=padding, attn_mask=hidden, need_weights=need_weights
    )
    expected, *_ = theirs(x, x, x, key_padding_mask=padding, attn_mask=hidden, need_weights=need_weights)
    assert torch.isnan(expected[1]).all() == need_weights  # its two paths differ
    seeing = [0, 1, 2, 4]
    torch.testing.assert_close(out[0, seeing], expected[0, seeing])
    assert torch.equal(out[1], ours.out_proj.bias.expand(5, -1))
    assert torch.equal(out[0, 3], ours.out_proj.bias)
    assert all(torch.isfinite(x).all() for x in gradients)
    if weights is not None:
        assert not weights[1].any()


@pytest.mark.parametrize("big", [1e4, 1e30])
def test_large_logits(big):
    ours, _ = pair(12, 3, batch_first=True, dtype=torch.float32)
    x = torch.randn(2, 5, 12) * big**0.5
    out, weights = ours(x, x, x)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 5))


def root_mean_square(x: Tensor) -> float:
    return float(x.detach().double().square().mean().sqrt())


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_is_as_exact_as_pytorch(autocast):
    ours, theirs = pair(24, 3, batch_first=True, dtype=torch.float32)
    x = torch.randn(3, 17, 24)
    mask = torch.ones(17, 17, dtype=torch.bool).triu(1)
    if not autocast:
        ours, theirs, x = ours.bfloat16(), theirs.bfloat16(), x.bfloat16()
    exact = copy.deepcopy(theirs).double()(x.double(), x.double(), x.double(), attn_mask=mask)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        mine, their = ours(x, x, x, attn_mask=mask), theirs(x, x, x, attn_mask=mask)
    for one, other, truth in zip(mine, their, exact, strict=True):
        assert one.dtype == other.dtype == torch.bfloat16
        assert root_mean_square(one - truth) <= 2 * root_mean_square(other - truth) + 1e-3 * root_mean_square(truth)


@pytest.mark.thorough
def test_dropout_is_random_repeatable_unbiased_and_not_in_the_weights():
    ours, _ = pair(12, 3, batch_first=True, dropout=0.5, dtype=torch.float32)
    x = torch.randn(1, 7, 12).expand(4000, -1, -1)
    still, weights = ours.eval()(x, x, x)
    ours.train()
    torch.manual_seed(1)
    one, same_weights = ours(x, x, x)
    torch.manual_seed(1)
    assert torch.equal(ours(x, x, x)[0], one)
    assert not torch.allclose(one, still, atol=1e-2)
    torch.testing.assert_close(same_weights[:1], weights[:1])
    noise = (one - still).detach()
    assert float(noise.mean(0).abs().max()) < 6 * float(noise.std()) / math.sqrt(4000)


def test_causal_and_padding_masks_are_known_as_such():
    ours, _ = pair(12, 3, batch_first=True)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    right = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    masks = {
        "causal": ours(x, x, x, attn_mask=causal)[1].map.mask,
        "hint": ours(x, x, x, is_causal=True)[1].map.mask,
        "right": ours(x, x, x, key_padding_mask=right)[1].map.mask,
        "left": ours(x, x, x, key_padding_mask=right.flip(1))[1].map.mask,
    }
    assert masks["causal"] == masks["hint"] == Causal()
    assert isinstance(masks["right"], Lengths)
    assert isinstance(masks["left"], Lengths)


def test_padding_with_holes_takes_no_memory_for_its_rows():
    ours, theirs = pair(12, 3, batch_first=True)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    holes = torch.tensor([[False, True, False, True, False], [True, False, False, True, False]])
    out, weights = ours(x, x, x, key_padding_mask=holes)
    torch.testing.assert_close(out, theirs(x, x, x, key_padding_mask=holes)[0])
    assert weights.map.mask.mask.untyped_storage().nbytes() <= 2 * 5


def test_wrong_hint_does_no_harm():
    ours, theirs = pair(12, 3, batch_first=True)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    mask = torch.ones(5, 5, dtype=torch.bool).triu(2)
    out, _ = ours(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
    torch.testing.assert_close(out, theirs(x, x, x, attn_mask=mask, need_weights=False)[0])


def test_untouched_weights_never_exist():
    n = 1500
    ours, _ = pair(8, 2, batch_first=True, dtype=torch.float32)
    x = torch.randn(1, n, 8)
    with Largest() as largest:
        out, weights = ours(x, x, x, is_causal=True)
        out.sum().backward()
    assert weights.shape == (1, n, n)
    assert largest.numel < n * n / 4


# --- models


def transformer() -> nn.Transformer:
    torch.manual_seed(0)
    return nn.Transformer(16, 4, 2, 2, 32, dropout=0.0, batch_first=True)


def call(model: nn.Transformer) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    source, target = torch.randn(3, 9, 16, generator=generator), torch.randn(3, 7, 16, generator=generator)
    padding = torch.arange(9) >= torch.tensor([9, 6, 4])[:, None]
    causal = torch.ones(7, 7, dtype=torch.bool).triu(1)
    return model(source, target, tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_attached_transformer_computes_the_same_and_is_never_passed_by(training, grad):
    model = transformer().train(training)
    with torch.set_grad_enabled(grad):
        before = call(model)
        names = hw.attach(model).attached
        seen: list[hw.models.AttentionCall] = []
        with hw.models.observe(seen.append, model=model):
            after = call(model)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    assert len(names) == 6
    assert sorted(observation.name for observation in seen) == sorted(names)
    if grad:
        theirs = torch.autograd.grad(before.square().sum(), list(model.parameters()))
        ours = torch.autograd.grad(after.square().sum(), list(model.parameters()))
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_detach_leaves_no_trace_and_optimisers_go_on():
    model, untouched = transformer().train(), transformer().train()
    called = []
    model.encoder.layers[0].self_attn.register_forward_hook(lambda *_: called.append(1))
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    hooks = {name: len(module._forward_hooks) for name, module in modules.items()}
    optimisers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, untouched)]

    def step() -> None:
        for one, optimiser in zip((model, untouched), optimisers, strict=True):
            optimiser.zero_grad()
            call(one).square().mean().backward()
            optimiser.step()

    handle = hw.attach(model)
    step()
    handle.detach()
    step()
    assert called == [1, 1]
    for name, module in model.named_modules():
        assert module is modules[name]
        assert type(module) is type(untouched.get_submodule(name))
        assert vars(module).keys() == vars(untouched.get_submodule(name)).keys()
        assert len(module._forward_hooks) == hooks[name]
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        torch.testing.assert_close(parameter, untouched.get_parameter(name), rtol=1e-5, atol=1e-6)


def test_hooks_on_the_output_projection_are_called():
    """So heads can be scaled and recorded there, which PyTorch's own module passes by."""
    ours, theirs = pair(12, 3, batch_first=True)
    x, seen = torch.randn(2, 5, 12, dtype=torch.float64), []
    for module in (ours, theirs):
        module.out_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        module(x, x, x)
    assert [tuple(concat.shape) for concat in seen] == [(2, 5, 12)]


def test_an_attached_model_can_be_copied():
    model = transformer().eval()
    hw.attach(model)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(call(twin), call(model))
    hw.attach(twin).detach()
    assert type(twin.encoder.layers[0].self_attn) is nn.MultiheadAttention
    assert type(model.encoder.layers[0].self_attn) is MultiheadAttention


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_inputs_are_sequences_without_padding():
    ours, theirs = pair(12, 2, batch_first=True, dtype=torch.float32)
    parts = [torch.randn(length, 12) for length in (5, 2, 7)]
    nested = torch.nested.nested_tensor(parts)
    ours.eval(), theirs.eval()
    with torch.no_grad():
        out, _ = ours(nested, nested, nested, need_weights=False)
        expected, _ = theirs(nested, nested, nested, need_weights=False)
    assert out.is_nested
    for mine, their in zip(out.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="nested"):
        ours(nested, nested, nested, attn_mask=torch.zeros(7, 7))
    with pytest.raises(ConfigError, match="is_causal"):
        ours(nested, nested, nested, is_causal=True)


# --- bad input

X = torch.randn(2, 5, 12)


@pytest.mark.parametrize(
    ("inputs", "options", "error", "words"),
    [
        ((X[..., :11], X, X), {}, ShapeError, "query"),
        ((X, X[0], X), {}, ShapeError, "key"),
        ((X, X, X[:, :4]), {}, ShapeError, "value"),
        ((X[:1], X, X), {}, ShapeError, "batch of 2"),
        ((X, X, X), {"attn_mask": torch.zeros(4, 5)}, ShapeError, r"attn_mask.*\(5, 5\).*\(4, 5\)"),
        ((X, X, X), {"attn_mask": torch.zeros(2, 5, 5)}, ShapeError, r"\(6, 5, 5\)"),
        ((X, X, X), {"attn_mask": torch.zeros(5, 5, dtype=torch.long)}, DTypeError, "attn_mask.*int64"),
        ((X, X, X), {"key_padding_mask": torch.zeros(5, 2, dtype=torch.bool)}, ShapeError, "key_padding_mask"),
        ((X, X[:, :4], X[:, :4]), {"is_causal": True}, ConfigError, "5 queries and 4 keys"),
    ],
)
def test_wrong_call_is_named(inputs, options, error, words):
    ours, _ = pair(12, 3, batch_first=True, dtype=torch.float32)
    with pytest.raises(error, match=words):
        ours(*inputs, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [((10, 3), "embed_dim=10.*num_heads=3"), ((0, 1), "embed_dim=0"), ((4, 2, 1.0), "dropout=1.0")],
)
def test_wrong_options_are_named(options, words):
    with pytest.raises(HeadwiseError, match=words):
        MultiheadAttention(*options)


def test_constructor_and_call_are_pytorchs():
    for name in ("__init__", "forward"):
        ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (MultiheadAttention, nn.MultiheadAttention))
        assert list(ours.parameters) == list(theirs.parameters)
        assert [p.default for p in ours.parameters.values()] == [p.default for p in theirs.parameters.values()]


def test_what_cannot_be_attached_is_named():
    class Own(nn.MultiheadAttention):
        pass

    linear = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"no attention in Sequential; looked for .*nn\.MultiheadAttention"):
        hw.attach(linear, batch=torch.ones(1, 2))
    model = nn.ModuleDict({"plain": nn.MultiheadAttention(4, 2), "own": Own(4, 2)})
    with pytest.warns(UserWarning, match="own: Own does more than"):
        handle = hw.attach(model)
    assert (handle.attached, list(handle.skipped)) == (("plain",), ["own"])


def test_nan_in_a_parameter_is_told():
    ours, _ = pair(12, 3, batch_first=True, dtype=torch.float32)
    with torch.no_grad():
        ours.in_proj_weight[24 + 5] = torch.nan  # a value of head 1
    seen: list[hw.models.AttentionCall] = []
    with hw.models.observe(seen.append, measures=["entropy"]):
        out, _ = ours(X, X, X)
    assert out.isnan().any()
    assert seen[0].map.nonfinite_values.tolist() == [[0, 5, 0], [0, 5, 0]]
