"""Heads are found in models of many makes, and their matrices, scales and records are those of the heads."""

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from design_samples import ONCE, design, given
from torch import Tensor, nn

import headwise as hw
from headwise.errors import ConfigError, DTypeError, ShapeError
from headwise.lm.model import Decoder, DecoderConfig
from headwise.models import KINDS, HeadSite, find_heads, record_heads, scale_heads

every_design = pytest.mark.parametrize(("name", "options"), ONCE, ids=lambda value: str(value))


def torch_attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(2)
    module = nn.MultiheadAttention(12, 3, **({"batch_first": True} | options)).double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return module


def gates_of(sites: list[HeadSite], *, grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [
        torch.randn(site.num_heads, generator=generator, dtype=torch.float64).requires_grad_(grad) for site in sites
    ]


def state(model: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(parameter)) for name, parameter in model.named_parameters()]


@every_design
def test_a_design_is_found_and_its_matrices_are_those_of_its_heads(name: str, options: dict[str, Any]) -> None:
    module = design(name, options)
    (site,) = find_heads(module)
    assert (site.name, site.kind, site.module) == ("", "headwise", module)
    assert (site.num_heads, site.num_kv_heads) == (module.num_heads, module.num_kv_heads)
    if missing := module.layout().missing:
        with pytest.raises(ConfigError, match=f"no matrices of their own: {re.escape(missing)}"):
            site.weights()
        return
    weights = site.weights()
    x, h = given(), site.num_heads
    q, k, v = module.project(x, x)
    assert weights["q"].shape == (h, 12, site.head_dim)
    assert weights["o"].shape == (h, site.value_dim, 12)
    twice = module.project(2 * x, 2 * x)
    if all(torch.allclose(two, 2 * one) for two, one in zip(twice, (q, k, v), strict=True)):
        torch.testing.assert_close(torch.einsum("bne,hed->bhnd", x, weights["q"]), q)
        if name == "latent":
            c, k_r = k.split((module.latent_dim, module.rope_dim), -1)
            k = torch.cat((torch.einsum("bmc,hdc->bhmd", c[:, 0], module.k_up), k_r.expand(-1, h, -1, -1)), -1)
            v = torch.einsum("bmc,hdc->bhmd", c[:, 0], module.v_up)
        torch.testing.assert_close(torch.einsum("bne,hed->bhnd", x, weights["k"]), k)
        torch.testing.assert_close(torch.einsum("bne,hed->bhnd", x, weights["v"]), v)
    else:  # biases and norms; a package's own design may make something else of W_i^Q x
        assert options.keys() & {"bias", "qk_norm"} or not type(module).__module__.startswith("headwise.")
    y, concat = module(x, return_concat=True)
    heads = concat.unflatten(-1, (h, -1))
    bias = getattr(module, "b_o", None) if hasattr(module, "b_o") else module.o_proj.bias
    joined = torch.einsum("bnhd,hde->bne", heads, weights["o"]) + (0 if bias is None else bias)
    torch.testing.assert_close(joined, y)


@pytest.mark.thorough_beyond(4)
@every_design
def test_heads_of_a_design_are_recorded_and_scaled(name: str, options: dict[str, Any]) -> None:
    module = design(name, options)
    sites, x = find_heads(module), given()
    before, plain = state(module), module(x)
    _, concat = module(x, return_concat=True)
    with record_heads(sites) as heads:
        assert heads[0].shape == (0, sites[0].num_heads, 0, sites[0].value_dim)
        torch.testing.assert_close(module(x), plain)
    b, n = concat.shape[:2]
    torch.testing.assert_close(heads[0], concat.view(b, n, sites[0].num_heads, -1).transpose(1, 2))

    (gate,) = gates = gates_of(sites)
    with scale_heads(sites, gates):
        scaled = module(x)
        _, seen = module(x, return_concat=True)
    expected = module.output(concat * gate.repeat_interleave(sites[0].value_dim))
    torch.testing.assert_close(scaled, expected)
    assert not torch.allclose(scaled, plain, atol=1e-3)
    if sites[0].output is None:
        torch.testing.assert_close(seen, concat * gate.repeat_interleave(sites[0].value_dim))
    assert torch.equal(module(x), plain)
    assert state(module) == before
    assert "compute" not in vars(module)


@pytest.mark.thorough_beyond(6)
@every_design
def test_gates_have_gradients(name: str, options: dict[str, Any]) -> None:
    module = design(name, options)
    sites, x = find_heads(module), given()
    gates = gates_of(sites, grad=True)
    with scale_heads(sites, gates):
        (gradient,) = torch.autograd.grad(module(x).square().sum(), gates)
        assert gradient.shape == (6 if name != "single_head" else 1,)
    step = 1e-6
    losses = []
    for sign in (1, -1):
        moved = gates[0].detach().clone()
        moved[0] += sign * step
        with scale_heads(sites, [moved]):
            losses.append(module(x).square().sum().item())
    assert gradient[0].item() == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-4, abs=1e-6)


def test_heads_of_a_decoder_are_found_in_order_and_scaled() -> None:
    torch.manual_seed(1)
    decoder = Decoder(DecoderConfig(31, d_model=24, num_layers=3, num_heads=6, num_kv_heads=2, d_ff=20)).double().eval()
    sites = find_heads(decoder)
    assert [site.name for site in sites] == [f"blocks.{i}.attention" for i in range(3)]
    tokens = torch.arange(14).view(2, 7)
    with scale_heads(sites, torch.ones(3, 6)):
        torch.testing.assert_close(decoder(tokens), decoder(tokens))
    with scale_heads(sites[1:2], [torch.zeros(6)]), record_heads(sites) as heads:
        silent = decoder(tokens)
    without = Decoder(decoder.config).double().eval()
    without.load_state_dict(decoder.state_dict())
    nn.init.zeros_(without.get_submodule("blocks.1.attention").get_parameter("o_proj.weight"))
    torch.testing.assert_close(silent, without(tokens))
    assert [tuple(x.shape) for x in heads] == [(2, 6, 7, 4)] * 3
    assert not heads[1].any()  # recorded after they were scaled, as that context was opened first


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 7, "vdim": 5}, {"batch_first": False}])
def test_heads_of_torch_equal_ours(options: dict[str, Any]) -> None:
    module = torch_attention(**options)
    (site,) = find_heads(module)
    assert (site.kind, site.num_heads, site.head_dim) == ("torch", 3, 4)
    first = options.get("batch_first", True)
    x, c, w = given(7), given(5, module.kdim, seed=5), given(5, module.vdim, seed=6)
    args = [y if first else y.transpose(0, 1) for y in (x, c, w)]
    plain, weights = module(*args)
    gate = torch.tensor([0.5, 0.0, -2.0], dtype=torch.float64)
    with record_heads([site]) as heads:
        again, same = module(*args)
    torch.testing.assert_close(again, plain)
    torch.testing.assert_close(same, weights)
    parts = site.weights()
    per_head = torch.softmax(torch.stack([
        (x @ parts["q"][i] + _bias(module, 0, i)) @ (c @ parts["k"][i] + _bias(module, 1, i)).mT / 2.0 for i in range(3)
    ], 1), -1) @ torch.stack([w @ parts["v"][i] + _bias(module, 2, i) for i in range(3)], 1)  # fmt: skip
    torch.testing.assert_close(heads[0], per_head)
    with scale_heads([site], [gate]):
        scaled = module(*args)[0]
    joined = torch.einsum("bhnd,hde,h->bne", per_head, parts["o"], gate)
    joined = joined if module.out_proj.bias is None else joined + module.out_proj.bias
    torch.testing.assert_close(scaled if first else scaled.transpose(0, 1), joined)
    assert "forward" not in vars(module)


def _bias(module: nn.MultiheadAttention, which: int, head: int) -> Tensor:
    if module.in_proj_bias is None:
        return torch.zeros(4).double()
    return module.in_proj_bias.view(3, 3, 4)[which, head]


def test_fused_layers_of_torch_are_scaled_and_recorded_too() -> None:
    torch.manual_seed(5)
    layer = nn.TransformerEncoderLayer(12, 4, 20, batch_first=True, norm_first=False)
    model = nn.TransformerEncoder(layer, 2).eval()
    sites = find_heads(model)
    assert [site.name for site in sites] == ["layers.0.self_attn", "layers.1.self_attn"]
    gates, x = [torch.tensor([1.0, 0.0, 0.5, 2.0]), torch.tensor([0.0, 2.0, 1.0, 1.0])], given(7, dtype=torch.float32)
    with torch.no_grad():
        fast = model(x)
        with scale_heads(sites, gates), record_heads(sites) as heads:
            scaled = model(x)
        assert torch.backends.mha.get_fastpath_enabled()
        torch.testing.assert_close(model(x), fast)
        for site, gate in zip(sites, gates, strict=True):
            weight = site.module.get_parameter("out_proj.weight")
            weight.mul_(gate.repeat_interleave(3))
        torch.testing.assert_close(scaled, model(x))
    assert [tuple(y.shape) for y in heads] == [(2, 4, 7, 3)] * 2
    assert not heads[0][:, 1].any()
    assert heads[0][:, 2].any()


def test_heads_of_torch_are_recorded_whoever_computes_them_since() -> None:
    module = torch_attention()
    sites, x = find_heads(module), given(7)
    expected = module(x, x, x)[0]
    with record_heads(sites) as heads, hw.watch(module, maps="lazy") as record:
        module(x, x, x)
    with record_heads(sites), hw.intervene(module, hw.interventions.Scale(0.0, heads=[1])):
        edited = module(x, x, x)[0]
    with scale_heads(sites, [torch.tensor([1.0, 0.0, 1.0])]):
        torch.testing.assert_close(edited, module(x, x, x)[0])
    (amap,) = record.maps.values()
    v = x @ sites[0].weights()["v"][0] + _bias(module, 2, 0)
    torch.testing.assert_close(amap.to_dense().double()[:, 0] @ v, heads[0][:, 0], rtol=1e-5, atol=1e-6)
    edit = hw.intervene(module, hw.interventions.Scale(1.0), unused="ignore")
    edit.__enter__()
    with record_heads(sites):
        edit.__exit__(None, None, None)
        torch.testing.assert_close(module(x, x, x)[0], expected)


@pytest.mark.parametrize("make", [torch_attention, lambda: design("per_head", {}), lambda: design("multi_head", {})])
def test_contexts_end_in_any_order(make: Any) -> None:
    module, x = make(), given(7)
    sites = find_heads(module)
    gate = torch.linspace(-2.0, 0.5, module.num_heads).double()

    def call() -> Tensor:
        found: Tensor = module(x, x, x)[0] if isinstance(module, nn.MultiheadAttention) else module(x)
        return found

    expected = call()
    scaling, recording = scale_heads(sites, [gate]), record_heads(sites)
    scaling.__enter__()
    heads = recording.__enter__()
    scaling.__exit__(None, None, None)
    torch.testing.assert_close(call(), expected)
    assert heads[0].any()
    recording.__exit__(None, None, None)
    torch.testing.assert_close(call(), expected, rtol=0, atol=0)
    assert not {"forward", "compute"} & vars(module).keys()
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("make", [torch_attention, lambda: design("per_head", {}), lambda: design("multi_head", {})])
def test_a_copy_made_meanwhile_is_neither_scaled_nor_recorded(make: Any, copied: Any) -> None:
    module, x = make(), given(7)
    sites = find_heads(module)

    def call(one: Any) -> Tensor:
        found: Tensor = one(x, x, x)[0] if isinstance(module, nn.MultiheadAttention) else one(x)
        return found

    plain = call(module)
    with scale_heads(sites, [torch.zeros(module.num_heads)]), record_heads(sites) as heads:
        twin = copied(module)
        torch.testing.assert_close(call(twin), plain)
        assert not heads[0].numel()
        scaled = call(module)
        again = find_heads(twin)
        with scale_heads(again, [torch.zeros(module.num_heads)]):
            torch.testing.assert_close(call(twin), scaled)
    assert not torch.allclose(scaled, plain)
    torch.testing.assert_close(call(twin), plain)


def test_nested_contexts_of_torch_agree_in_either_order() -> None:
    module = torch_attention()
    sites, x = find_heads(module), given(7)
    gate = torch.tensor([0.5, 0.0, -2.0]).double()
    with record_heads(sites) as plain, scale_heads(sites, [gate]):
        one = module(x, x, x)[0]
    with scale_heads(sites, [gate]), record_heads(sites) as scaled:
        other = module(x, x, x)[0]
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(plain[0] * gate[:, None, None], scaled[0])


def test_an_unbatched_call_of_torch_is_recorded() -> None:
    module = torch_attention(batch_first=False)
    x = given(7, b=1)[0]
    with record_heads(find_heads(module)) as heads:
        module(x, x, x)
    assert heads[0].shape == (1, 3, 7, 4)


def test_a_model_without_heads_is_told_what_is_known() -> None:
    with pytest.raises(ConfigError, match="model=Linear: no attention heads") as caught:
        find_heads(nn.Linear(3, 2))
    assert all(kind.name in str(caught.value) for kind in KINDS)
    with pytest.raises(ConfigError, match=r"expected an nn\.Module"):
        find_heads("bert")  # type: ignore[arg-type]


def test_other_things_than_sites_and_gates_are_named() -> None:
    layer = hw.MultiHeadAttention(6, 3)
    for gates, came in (({"": torch.ones(3)}, "dict"), ([[1.0] * 3], "list of list"), (0.5, "float")):
        wrong: Any = gates
        with pytest.raises(DTypeError, match=rf"gates: .* got {came}$"), scale_heads(find_heads(layer), wrong):
            pass
    model: Any = layer
    for tapped in (record_heads(model), scale_heads(model, torch.ones(1, 3))):
        with pytest.raises(DTypeError, match=r"sites: .* got MultiHeadAttention"), tapped:
            pass


def test_gates_that_do_not_fit_are_named() -> None:
    sites = find_heads(hw.MultiHeadAttention(12, 3))
    with pytest.raises(ShapeError, match="gates: 2 tensors for 1 sites"), scale_heads(sites, torch.ones(2, 3)):
        pass
    wrong = pytest.raises(ShapeError, match=r"gates: shape \(4,\) for ''; expected \[3\]")
    with wrong, scale_heads(sites, [torch.ones(4)]):
        pass


def test_an_error_inside_leaves_the_model_as_it_was() -> None:
    for module in (torch_attention(), design("per_head", {}), design("multi_head", {})):
        x = given()
        args = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x,)
        plain, sites = module(*args), find_heads(module)
        with pytest.raises(RuntimeError, match="stop"), scale_heads(sites, gates_of(sites)):
            raise RuntimeError("stop")
        assert torch.equal(module(*args)[0], plain[0])


def test_quantised_weights_are_not_taken_for_numbers() -> None:
    module = design("multi_head", {})
    module.q_proj.weight = nn.Parameter(torch.ones(12, 12, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match="quantised"):
        find_heads(module)[0].weights()
