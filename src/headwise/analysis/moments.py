"""Covariances of head outputs: within a head, within a layer, and between all heads of all layers.

Each head is first scaled to mean variance 1. The results do not depend on the scale of a head, and sums of squares then
neither overflow nor underflow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.analysis.inner import crossed
from headwise.errors import ConfigError


@dataclass(frozen=True)
class Centred:
    """Outputs of a layer, each feature with mean 0 and each head with mean variance 1 (a constant head: all 0)."""

    values: Tensor  # [h, tokens, d]
    lit: Tensor  # [h], False for a constant head


def centred(outputs: Tensor) -> Centred:
    """A layer's outputs [h, tokens, d], centred and scaled."""
    # Divided by the largest entry first, so that no square overflows.
    most = outputs.abs().amax((1, 2), keepdim=True)
    x = outputs / torch.where(most > 0, most, 1.0)
    x = x - x.mean(1, keepdim=True, dtype=torch.float64).to(x.dtype)
    spread = x.square().mean((1, 2), keepdim=True, dtype=torch.float64).sqrt().to(x.dtype)
    # The rest of a constant after centring is rounding.
    lit = spread > 8 * torch.finfo(x.dtype).eps
    return Centred(torch.where(lit, x / torch.where(lit, spread, 1.0), 0.0), lit.flatten())


def cross_moments(layers: Sequence[Centred]) -> Iterator[tuple[int, int, Tensor]]:
    """For each pair of layers a ≤ c: a, c and xᵀy / tokens of all their heads, [h_a, d, h_c, d]."""
    for a, one in enumerate(layers):
        for c in range(a, len(layers)):
            yield a, c, crossed(one.values, layers[c].values) / one.values.shape[1]


@dataclass(frozen=True)
class Whitening:
    """A head's shrunk covariance Σ̂ = (1 − γ)Σ + γ·I, Σ being scaled to mean variance 1.

    Attributes:
        root: L⁻¹ of Σ̂ = L Lᵀ, [h, d, d] float64.
        signal: Σ_i (1 − γ)λ_i / ((1 − γ)λ_i + γ), [h]: the effective number of dimensions above the noise.
        values: λ, the eigenvalues of Σ, [h, d] float64.
    """

    root: Tensor
    signal: Tensor
    values: Tensor


def whitening(layer: Centred, shrinkage: float) -> Whitening:
    """The whitening of each head. ConfigError if a covariance is singular without shrinkage."""
    x = layer.values
    tokens, d = x.shape[1:]
    sigma = (x.mT @ x).double() / tokens
    values = torch.linalg.eigvalsh(sigma).clamp_min(0.0)
    shrunk = (1 - shrinkage) * sigma + shrinkage * torch.eye(d, dtype=sigma.dtype, device=sigma.device)
    # Constant heads get the identity.
    shrunk[~layer.lit] = torch.eye(d, dtype=sigma.dtype, device=sigma.device)
    lower, info = torch.linalg.cholesky_ex(shrunk)
    small = values[:, 0] <= 1e-6 * values[:, -1]
    if bool((info > 0).any()) or (shrinkage == 0 and bool((small & layer.lit).any())):
        raise ConfigError(
            f"shrinkage={shrinkage:g}: the covariance of a head's {d} output dimensions is singular over {tokens} "
            f"tokens; give more shrinkage, such as 1e-3"
        )
    root = torch.linalg.solve_triangular(lower, torch.eye(d, dtype=sigma.dtype, device=sigma.device), upper=False)
    signal = ((1 - shrinkage) * values / ((1 - shrinkage) * values + shrinkage).clamp_min(1e-300)).sum(-1)
    return Whitening(root, signal.masked_fill(~layer.lit, 0.0), values)


def check_shrinkage(shrinkage: float, least: float = 0.0) -> None:
    """Raise ConfigError unless least ≤ shrinkage < 1."""
    if not least <= shrinkage < 1.0:
        raise ConfigError(f"shrinkage={shrinkage}: expected {least:g} <= shrinkage < 1")


def surplus(tokens: int, one: int, two: int) -> float:
    """The bias in nats of the mutual information of two Gaussians with `one` and `two` dimensions, when covariances and
    means are estimated from this number of independent tokens.

    Exact: E ln|S| = ln|Σ| + Σ_{i<p} ψ((N − i)/2) + p ln(2/N) for the covariance S of N + 1 samples in p dimensions
    (Goodman 1963; Misra, Singh & Demchuk 2005).
    """
    freedom = tokens - 1

    def excess(size: int) -> float:
        at = (freedom - torch.arange(size, dtype=torch.float64)) / 2
        return float((torch.digamma(at) - torch.tensor(freedom / 2, dtype=torch.float64).log()).sum())

    return (excess(one) + excess(two) - excess(one + two)) / 2


def check_tokens(tokens: int, needed: int, what: str) -> None:
    """Raise ConfigError if there are too few tokens to take out the surplus."""
    if tokens <= needed:
        raise ConfigError(
            f"outputs: {tokens} tokens, expected more than {needed} ({what}) to take out what few samples add; give "
            f"more tokens or corrected=False"
        )
