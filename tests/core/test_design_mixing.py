"""Designs in which heads meet: groups with an MLP, attention over heads, talking heads, gates."""

from typing import Any

import pytest
import torch
from design_samples import design, given
from samples import MASKS
from torch import Tensor

from headwise.errors import ConfigError, ShapeError
from headwise.masks import Causal, Mask
from headwise.nn import head_mixing
from headwise.nn.base import ProjectedLayer
from headwise.nn.block_diagonal import GroupedMLPAttention
from headwise.nn.gated_output import GatedAttention
from headwise.nn.head_mixing import TalkingHeadsAttention


def scores(module: ProjectedLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """q·k / √d_k [b, h, n, n] and values [b, h, n, d_v], key heads repeated, without positions."""
    group = module.num_heads // module.num_kv_heads
    q, k, v = module.project(x, x)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return q @ k.mT / module.head_dim**0.5, v


def softmax(logits: Tensor, mask: Mask) -> Tensor:
    b, h, n, m = logits.shape
    allowed = mask.to_dense(n, m, batch=b, heads=h).expand(b, h, n, m)
    return logits.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)


def talk(module: TalkingHeadsAttention, x: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    """The formula: W, U and y, with the whole matrix."""
    j, v = scores(module, x)
    w = softmax(torch.einsum("blnm,lj->bjnm", j, module.logits_mix), mask)
    u = torch.einsum("bjnm,ji->binm", w, module.weights_mix)
    return w, u, module.o_proj((u @ v).transpose(1, 2).flatten(2))


TALKING: list[dict[str, Any]] = [{}, {"num_kv_heads": 2, "value_dim": 5}, {"num_kv_heads": 1, "head_dim": 3}]


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("options", TALKING)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("tile", [1, 1 << 20])  # blocks of 16 rows, or one block
def test_talking_heads_are_the_formula(
    options: dict[str, Any], kind: str, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_mixing, "TILE_ELEMENTS", tile)
    module, mask = design("talking_heads", options), MASKS[kind](2, 37, 37)
    x, again = given(37).requires_grad_(), given(37).requires_grad_()
    y, (_, _, expected) = module(x, mask=mask), talk(module, again, mask)
    torch.testing.assert_close(y, expected)
    weight = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(5))
    ours = torch.autograd.grad((y * weight).sum(), [x, *module.parameters()])
    theirs = torch.autograd.grad((expected * weight).sum(), [again, *module.parameters()])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other.nan_to_num(0.0) if kind == "nothing for some" else other)


@pytest.mark.parametrize("options", TALKING)
def test_the_map_holds_the_softmax_and_mixes_to_what_values_see(options: dict[str, Any]) -> None:
    module, x = design("talking_heads", options), given(19)
    _, amap = module(x, mask=Causal(), return_map=True, measures=("entropy",))
    w, u, _ = talk(module, x, Causal())
    torch.testing.assert_close(amap.to_dense(), w.detach())
    torch.testing.assert_close(module.mixed(amap[:, :, 3:9, 2:7]), u[:, :, 3:9, 2:7].detach())
    torch.testing.assert_close(amap.measured["entropy"], torch.special.entr(w.detach()).sum(-1).mean(-1).float())
    with pytest.raises(ShapeError, match="tile: "):
        module.mixed(amap[:, 0])


def test_talking_heads_keep_no_matrix_for_the_backward_pass() -> None:
    module, x = design("talking_heads", {}, dtype=torch.float32), given(700, dtype=torch.float32, b=1)
    largest = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x, mask=Causal())
    assert 0 < largest <= 700 * 12  # a row of weights for each head would be 187 · 700 · 6


def test_talking_heads_start_as_multi_head_attention() -> None:
    from headwise.nn.multi_head import MultiHeadAttention

    module, whole = TalkingHeadsAttention(12, 6).double(), MultiHeadAttention(12, 6).double()
    whole.load_state_dict({k: v for k, v in module.state_dict().items() if k in whole.state_dict()})
    torch.testing.assert_close(module(given(), mask=Causal()), whole(given(), mask=Causal()))


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "value_dim": 5, "bias": True}])
def test_head_mixing_is_an_attention_over_heads(options: dict[str, Any]) -> None:
    module, x = design("head_mixing", options), given()
    logits, v = scores(module, x)
    heads = (softmax(logits, Causal()) @ v).transpose(1, 2)  # [b, n, h, d_v]
    m, size = module.head_map, module.value_dim
    q, k, values = (m @ (heads @ u.weight.T) for u in (module.u_q, module.u_k, module.u_v))
    weights = (q @ k.mT / size**0.5).softmax(-1)
    expected = module.o_proj((weights @ values).flatten(2))
    torch.testing.assert_close(module(x, mask=Causal()), expected)
    amap = module.map_of_heads(x, mask=Causal())
    torch.testing.assert_close(amap.to_dense()[:, 0], weights.detach().flatten(0, 1))


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_groups_meet_in_the_mlp_only(groups: int) -> None:
    module, x = design("grouped_mlp", {"num_groups": groups, "hidden": 7}), given()
    logits, v = scores(module, x)
    heads = (softmax(logits, Causal()) @ v).transpose(1, 2).flatten(2)
    size = 12 // groups
    parts = [heads[..., i * size : (i + 1) * size] @ module.w_groups[i] for i in range(groups)]
    hidden = torch.nn.functional.gelu(module.mlp_in(torch.cat(parts, -1)))
    torch.testing.assert_close(module(x, mask=Causal()), module.mlp_out(hidden))
    count = 3 * 12 * 12 + groups * size**2 + (12 + 1) * 7 + (7 + 1) * 12
    assert sum(p.numel() for p in module.parameters()) == count


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_gates_are_a_sigmoid_of_the_token(gate: str) -> None:
    module, x = design("gated_output", {"gate": gate, "value_dim": 5}), given()
    logits, v = scores(module, x)
    heads = (softmax(logits, Causal()) @ v).transpose(1, 2)
    g = torch.sigmoid(x @ module.gate_proj.weight.T + module.gate_proj.bias)
    g = g[..., None] if gate == "head" else g.view(2, 13, 6, 5)
    torch.testing.assert_close(module(x, mask=Causal()), module.o_proj((heads * g).flatten(2)))
    with torch.no_grad():
        module.gate_proj.bias.fill_(-1e4)
    assert (module(x, mask=Causal()) == 0).all()  # a head may be silent


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_a_trained_module_gets_gates_and_stays_the_same(gate: str) -> None:
    whole, x = design("multi_head", {"num_kv_heads": 2, "bias": True, "rotary": True, "qk_norm": True}), given()
    gated = GatedAttention.from_multi_head(whole, gate=gate)
    torch.testing.assert_close(gated(x, mask=Causal()), whole(x, mask=Causal()), rtol=1e-6, atol=1e-6)


def test_bad_options_are_named() -> None:
    with pytest.raises(ConfigError, match="num_groups=4: expected a divisor of num_heads=6"):
        GroupedMLPAttention(12, 6, num_groups=4)
    with pytest.raises(ConfigError, match="hidden=0"):
        GroupedMLPAttention(12, 6, hidden=0)
    with pytest.raises(ConfigError, match="gate='token'"):
        GatedAttention(12, 6, gate="token")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_map_in_half_precision_has_rows_that_add_up_to_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = TalkingHeadsAttention(64, 4)
    torch.nn.init.normal_(layer.logits_mix)
    _, amap = layer.to(dtype)((torch.randn(1, 64, 64) * 3).to(dtype), return_map=True)
    torch.testing.assert_close(amap[:].sum(-1), torch.ones(1, 4, 64), rtol=0, atol=3e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_masked_values_that_are_not_finite_have_no_effect(bad: float) -> None:
    torch.manual_seed(0)
    layer, x = TalkingHeadsAttention(16, 4), torch.randn(2, 9, 16)
    expected = layer(x, mask=Causal())
    x[0, 6, 3] = bad
    found = layer(x, mask=Causal())
    assert torch.equal(found[:, :6], expected[:, :6])
    assert torch.equal(found[1], expected[1])
    assert found[0, 6:].isnan().all()


def test_measures_without_a_map_are_refused() -> None:
    with pytest.raises(ConfigError, match="requires return_map=True"):
        TalkingHeadsAttention(16, 4)(torch.randn(1, 3, 16), measures=["entropy"])
