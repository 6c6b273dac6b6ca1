"""Heads of models of transformers: found by structure, read, scaled and recorded."""

import pytest
import torch
from hf_models import CAUSAL, ENCODERS, hf_model, hidden, ids
from torch import Tensor

from headwise.models import HeadSite, find_heads, record_heads, scale_heads

KINDS = {"gpt2": "gpt2", "opt": "bart", "distilbert": "distilbert"}
VALUES = {"gpt2": "c_attn", "distilbert": "v_lin"}

every_hf = pytest.mark.parametrize("name", [*ENCODERS, *CAUSAL])


def gates_of(sites: list[HeadSite]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(site.num_heads, generator=generator, dtype=torch.float64) for site in sites]


@pytest.mark.thorough_beyond(4)
@every_hf
def test_heads_of_transformers_are_found_recorded_and_scaled(name: str) -> None:
    model, tokens = hf_model(name), ids()
    sites = find_heads(model)
    assert len(sites) == 3
    kind = KINDS.get(name, "bert" if name in ENCODERS else "llama")
    grouped = kind == "llama"
    assert {(s.kind, s.num_heads, s.num_kv_heads, s.head_dim) for s in sites} == {(kind, 4, 2 if grouped else 4, 6)}
    assert all(model.get_submodule(site.name) is site.module for site in sites)
    plain = hidden(model, tokens)
    gates = gates_of(sites)
    with record_heads(sites) as heads:
        torch.testing.assert_close(hidden(model, tokens), plain)
    assert [tuple(x.shape) for x in heads] == [(2, 4, 11, 6)] * 3
    with scale_heads(sites, gates):
        scaled = hidden(model, tokens)
    assert torch.equal(hidden(model, tokens), plain)
    for site, gate in zip(sites, gates, strict=True):
        weights = site.weights()
        assert weights["q"].shape == (4, 24, 6)
        assert weights["k"].shape == weights["v"].shape == (2 if grouped else 4, 24, 6)
        with torch.no_grad():
            weights["o"].mul_(gate[:, None, None])  # a view of the model's own
    torch.testing.assert_close(hidden(model, tokens), scaled)
    assert not torch.allclose(scaled, plain, atol=1e-3)


@pytest.mark.thorough_beyond(6)
@every_hf
def test_matrices_of_transformers_give_the_heads(name: str) -> None:
    """Values do not depend on positions: a head's output for the first token of a causal model is its own value."""
    model, tokens = hf_model(name), ids(1)
    site = find_heads(model)[0]
    given_x: list[Tensor] = []
    owner = site.module.get_submodule(VALUES.get(name, "value" if name in ENCODERS else "v_proj"))
    with owner.register_forward_pre_hook(lambda _, args: given_x.append(args[0])), record_heads([site]) as heads:
        hidden(model, tokens)
    v = torch.einsum("bne,hed->bhnd", given_x[0], site.weights()["v"])
    bias = getattr(owner, "bias", None)
    if bias is not None:
        v = v + bias.view(-1, v.shape[1], 6)[-1][:, None]  # the last third of GPT-2's
    torch.testing.assert_close(heads[0], v.repeat_interleave(4 // v.shape[1], 1))
