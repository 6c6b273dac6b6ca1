"""Projections within a hand-written adapter: computed and watched, but neither read nor cut."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from design_samples import design, given
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import headwise as hw
from headwise.nn import GatedAttention, MixtureOfHeads, PerHeadAttention


class Wrapped(nn.Module):
    """A linear map plus one of rank 2, whose weight nothing holds."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.in_features, self.out_features = base, base.in_features, base.out_features
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Passing(Wrapped):
    """As `Wrapped`, with the attributes of the linear map, which are not all of what it computes."""

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias


READS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "prune": lambda model, layer: hw.edit.prune(model, {"inner": [1]}),
    "merge_kv": lambda model, layer: hw.edit.merge_kv(model, 3),
    "weights": lambda model, layer: hw.find_heads(model)[0].weights(),
    "per_head_weights": lambda model, layer: layer.per_head_weights(),
    "to_torch": lambda model, layer: layer.to_torch(),
    "per_head": lambda model, layer: PerHeadAttention.from_multi_head(layer),
    "gated": lambda model, layer: GatedAttention.from_multi_head(layer),
    "mixture": lambda model, layer: MixtureOfHeads.from_multi_head(layer),
}


@pytest.mark.parametrize("wrapper", [Wrapped, Passing])
@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj", "o_proj"])
@pytest.mark.parametrize("read", READS)
def test_an_adapter_is_named(read: str, projection: str, wrapper: type[Wrapped]) -> None:
    layer = design("multi_head", {"bias": True})
    setattr(layer, projection, wrapper(getattr(layer, projection)))
    model, x = nn.ModuleDict({"inner": layer}), given()
    before = layer(x)
    of = "inner: " if read in ("prune", "merge_kv", "weights") else "MultiHeadAttention: "
    with pytest.raises(hw.ConfigError, match=rf"{of}{projection} is \S+\.{wrapper.__name__}, which has no weight"):
        READS[read](model, layer)
    assert torch.equal(layer(x), before)
    with hw.watch(model):
        layer(x)


class Doubled(nn.Module):
    """A map within a module that knows nothing of it, twice."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.base(x)


@pytest.mark.parametrize("name", ["c_attn", "c_proj"])
def test_heads_of_gpt2_within_an_adapter_are_found(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (the hf extra)")
    config = transformers.GPT2Config(vocab_size=7, n_positions=5, n_embd=12, n_layer=1, n_head=3)
    model = transformers.GPT2Model(config).eval()
    attention = model.h[0].attn
    setattr(attention, name, Doubled(getattr(attention, name)))
    (site,) = hw.find_heads(model)
    assert (site.kind, site.num_heads, site.head_dim) == ("gpt2", 3, 4)
    ids = torch.arange(5)[None]
    with hw.watch(model, maps="lazy", values=True) as record, hw.models.record_heads([site]) as heads:
        model(ids)
    torch.testing.assert_close(heads[0], record.maps["blocks.0.attn.hook_z"].transpose(1, 2))
    with pytest.raises(hw.ConfigError, match=rf"h\.0\.attn: {name} is \S+\.Doubled, which has no weight"):
        hw.telemetry.qk_clip(model, record, tau=1e-3)


def test_a_parametrization_is_read_as_it_computes() -> None:
    layer = design("multi_head", {})
    parametrizations.orthogonal(layer.q_proj)
    q = layer.per_head_weights()["q"]
    torch.testing.assert_close(q.mT.flatten(0, 1), layer.q_proj.weight)
    torch.testing.assert_close(hw.find_heads(layer)[0].weights()["q"], q)
    with pytest.raises(hw.ConfigError, match="not a plain parameter but a parametrization"):
        hw.edit.prune(layer, {0: [1]})
