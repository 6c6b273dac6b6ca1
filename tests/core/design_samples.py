"""What the tests of the designs share: small modules of each design, and inputs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.nn.base import AttentionLayer
from headwise.nn.registry import DESIGNS

# Options besides the defaults that a design is tested with; every design of the registry is tested without any.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("multi_head", {"num_kv_heads": 2, "qk_norm": True, "rotary": True}),
    ("per_head", {"num_kv_heads": 2, "head_dim": 4, "value_dim": 5, "bias": True, "rotary": True}),
    ("contraction", {"num_kv_heads": 2, "head_dim": 4, "value_dim": 5, "bias": True, "rotary": True}),
    ("block_diagonal", {"head_dim": 4, "value_dim": 5, "rotary": True}),
    ("single_head", {"head_dim": 4, "value_dim": 5, "bias": True, "rotary": True}),
    ("sparse_mixture", {"top_k": 2, "shared_heads": 1, "num_kv_heads": 3, "rotary": True, "bias": True}),
    ("sparse_mixture", {"top_p": 0.6, "shared_heads": 1, "bias": True}),
    ("sparse_mixture", {"top_k": 3, "renormalise": True, "qk_norm": True, "value_dim": 5}),
    ("sparse_mixture", {"top_k": 2, "shared_heads": 1, "per": "sequence", "rotary": True, "bias": True}),
    ("mixture_of_heads", {"top_k": 2, "shared_heads": 2, "scaled": True, "num_kv_heads": 2, "rotary": True}),
    ("grouped_mlp", {"num_groups": 3, "hidden": 7, "num_kv_heads": 2, "value_dim": 5, "bias": True, "rotary": True}),
    ("head_mixing", {"num_kv_heads": 2, "value_dim": 5, "bias": True, "rotary": True}),
    ("talking_heads", {"num_kv_heads": 2, "head_dim": 4, "value_dim": 5, "bias": True, "rotary": True}),
    ("latent", {"rope_dim": 0, "latent_norm": True, "value_dim": 5}),
    ("latent", {"latent_dim": 7, "rope_dim": 4, "head_dim": 5, "query_latent_dim": 8, "form": "absorbed"}),
    ("latent", {"latent_dim": 7, "query_latent_dim": 8, "latent_norm": True, "form": "plain"}),
    ("gated_output", {"gate": "channel", "num_kv_heads": 2, "value_dim": 5, "bias": True, "rotary": True}),
    ("convolution", {"bias": True, "sharpness": 2.0}),
]
# Designs whose heads can be taken out, and the others.
INDEPENDENT = [design for design in DESIGNS.values() if not design.coupling.at and not design.resizing.fixed]
DEPENDENT = [design for design in DESIGNS.values() if design not in INDEPENDENT]
CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in DESIGNS] + VARIANTS


def once(cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """The same for tests of what all designs have in common: in `make test` each design once, with its last options."""
    return [
        (name, options) if options is dict(cases)[name] else pytest.param(name, options, marks=pytest.mark.thorough)
        for name, options in cases
    ]


ONCE = once(CASES)


def design(name: str, options: dict[str, Any], *, dtype: torch.dtype = torch.float64) -> AttentionLayer:
    """A design with d_model 12 and 6 heads, every parameter drawn, so that none is at a zero or a one."""
    torch.manual_seed(1)
    module = DESIGNS[name].build(12, 6, **options).to(dtype).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return module


def given(n: int = 13, d: int = 12, b: int = 2, seed: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random input [b, n, d]."""
    return torch.randn(b, n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
