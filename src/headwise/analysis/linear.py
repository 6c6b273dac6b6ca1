"""Linear algebra of many heads, nothing of size n×n or d_model × d_model stored: inner products of low-rank matrices
such as W_Q W_Kᵀ, covariances of head outputs (each head scaled to mean variance 1 first, so that sums of squares
neither overflow nor underflow), singular values and effective rank of attention maps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.analysis.checks import checked_maps
from headwise.errors import ConfigError
from headwise.map import AttentionMap
from headwise.table import HeadTable
from headwise.table.heads import Tabled

ELEMENTS = 1 << 23  # numbers at once, 32 MB in float32

Factors = tuple[Sequence[Tensor], Sequence[Tensor]]  # L and R: for each layer [h, D₁, d] and [h, D₂, d]


def inner_products(one: Factors, two: Factors | None = None) -> Tensor:
    """⟨L_i R_iᵀ, L'_j R'_jᵀ⟩ for all heads of all layers, [G, G'] float64: as ⟨L_iᵀL'_j, R_iᵀR'_j⟩, or by blocks of
    rows of each head's product, whichever has fewer operations."""
    other = one if two is None else two
    heads, wide = sum(map(len, one[0])), sum(map(len, other[0]))
    (tall, d), (side, e) = one[0][0].shape[1:], (one[1][0].shape[1], other[0][0].shape[2])
    alike = one[0] is one[1] and other[0] is other[1]  # L Lᵀ is symmetric: half of one product is enough
    pairs = heads * wide * d * e * (tall + (0 if alike else side)) / (2 if two is None else 1)
    rows = tall * side * (heads * wide + heads * d + (0 if two is None else wide * e)) / (2 if alike else 1)
    return _by_pairs(one, other, two is None, alike) if pairs < rows else _by_rows(one, other, two is None, alike)


def _by_pairs(one: Factors, two: Factors, same: bool, alike: bool) -> Tensor:
    lines: list[list[Tensor]] = []
    for a, (left, right) in enumerate(zip(*one, strict=True)):
        line = []
        for c, (left2, right2) in enumerate(zip(*two, strict=True)):
            if same and c < a:
                line.append(lines[c][a].T)
                continue
            first = crossed(left, left2)
            second = first if alike else crossed(right, right2)
            line.append((first * second).sum((1, 3), dtype=torch.float64))
        lines.append(line)
    return torch.cat([torch.cat(line, 1) for line in lines])


def _by_rows(one: Factors, two: Factors, same: bool, alike: bool) -> Tensor:
    (left, right), (left2, right2) = one, two
    heads, wide = sum(map(len, left)), sum(map(len, left2))
    tall, side = left[0].shape[1], right[0].shape[1]
    total = torch.zeros(heads, wide, dtype=torch.float64, device=left[0].device)
    height = max(1, ELEMENTS // (max(heads, wide) * side))
    for start in range(0, tall, height):
        rows = slice(start, min(start + height, tall))
        # In a symmetric matrix the part right of the block equals the part below it.
        for cols, times in ((rows, 1.0), (slice(rows.stop, side), 2.0)) if alike else ((slice(0, side), 1.0),):
            if cols.start >= side:
                continue
            mine = _block(left, right, rows, cols)
            theirs = mine if same else _block(left2, right2, rows, cols)
            total += (mine @ theirs.T).double() * times
    return total


def _block(left: Sequence[Tensor], right: Sequence[Tensor], rows: slice, cols: slice) -> Tensor:
    """Rows and columns of each head's L Rᵀ, [G, r·c]."""
    return torch.cat([(x[:, rows] @ y[:, cols].mT).flatten(1) for x, y in zip(left, right, strict=True)])


def crossed(one: Tensor, two: Tensor) -> Tensor:
    """x_iᵀ x_j of [h, D, d] and [h', D, e] as [h, d, h', e]: one product for all heads of two layers."""
    (h, tall, d), (w, _, e) = one.shape, two.shape
    flat, wide = one.transpose(0, 1).reshape(tall, h * d), two.transpose(0, 1).reshape(tall, w * e)
    return (flat.T @ wide).view(h, d, w, e)


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


@dataclass(frozen=True)
class Whitening:
    """A head's shrunk covariance Σ̂ = (1 − γ)Σ + γ·I, Σ being scaled to mean variance 1."""

    root: Tensor  # L⁻¹ of Σ̂ = L Lᵀ, [h, d, d] float64
    signal: Tensor  # Σ_i (1 − γ)λ_i / ((1 − γ)λ_i + γ), [h]: the effective number of dimensions above the noise
    values: Tensor  # λ, the eigenvalues of Σ, [h, d] float64


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
    """The bias in nats of two Gaussians' mutual information from `tokens` samples, exact: E ln|S| = ln|Σ| + Σ_{i<p}
    ψ((N − i)/2) + p ln(2/N) (Goodman 1963; Misra, Singh & Demchuk 2005)."""
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


SPARE = 8  # columns beyond the requested ones, for their accuracy
SETTLED = 2e-3  # of σ₁, from one pass to the next
MOST_PASSES = 16
ROUNDING = 1e-6  # of ‖P‖²_F and of the captured part, in float32


@dataclass(frozen=True, repr=False)
class MapSpectrum(Tabled):
    """Singular values of each head's map, and its ranks. Prints itself as a table.

    Of the singular values beyond the first k only the sum of squares is known, from ‖P‖²_F. It bounds the effective
    rank: the rest is either in as few values as possible, each as large as σ_k, or spread evenly.

    Attributes:
        singular: [b, h, k] float64, descending. The last ones can be slightly too small, never too large.
        energy: [b, h], ‖P‖²_F, the sum of all squared singular values.
        captured: [b, h], the share of the energy in the k values.
        low, high: [b, h], bounds of the effective rank exp H(σ / Σσ) of Roy & Vetterli (EUSIPCO 2007), of
            all singular values. They are as accurate as the k values.
        effective_rank: [b, h], √(low · high), an estimate. On maps of 500 tokens, trained and random, 32 values and
            three passes put it between 0.8 and 1.25 of the true one; where `low` and `high` meet, it is exact.
        stable_rank: [b, h], ‖P‖²_F / σ₁².
    """

    singular: Tensor
    energy: Tensor
    captured: Tensor
    effective_rank: Tensor
    low: Tensor
    high: Tensor
    stable_rank: Tensor

    @property
    def table(self) -> HeadTable:
        """The ranks of all heads; the layers of the table are the batch entries."""
        columns = {
            "singular_max": self.singular[..., 0], "effective_rank": self.effective_rank, "low": self.low,
            "high": self.high, "stable_rank": self.stable_rank, "captured": self.captured,
        }  # fmt: skip
        return HeadTable(columns, layers=[f"batch {i}" for i in range(len(self.energy))])


@torch.no_grad()
def map_spectrum(amap: AttentionMap, components: int = 32, *, passes: int | None = None, seed: int = 0) -> MapSpectrum:
    """Leading singular values and effective ranks of all heads of a map, by randomised SVD (Halko, Martinsson & Tropp
    2011, §4.5): alternating `amap @ x` and `amap.T @ x` with components + 8 columns.

    Args:
        components: k, the number of singular values. With min(n, m) or more the result is exact up to rounding.
        passes: the number of products, at least 2. None: from 3 to 16, until σ₁ of every head grows by at most 0.2 %
            from one to the next. Give more if the values fall slowly and all must be accurate.
        seed: of the random start.
    Returns:
        A `MapSpectrum` of every batch entry and head.
    Memory: O((n + m) · (k + 8)) for each head.
    Raises:
        ConfigError, ShapeError: naming the argument.
    """
    if components < 1 or (passes is not None and passes < 2):
        raise ConfigError(
            f"map_spectrum(components={components}, passes={passes}): expected components ≥ 1, passes ≥ 2"
        )
    (amap,) = checked_maps(amap)
    n, m = amap.shape[2:]
    most = min(n, m)
    width = min(components + SPARE, most)
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(m, width, generator=generator, dtype=torch.float64).to(amap.lse)
    found = basis.new_zeros(())
    for k in range(MOST_PASSES if passes is None else passes):
        basis, corner = torch.linalg.qr((amap.T if k % 2 else amap) @ basis)
        before, found = found, torch.linalg.svdvals(corner.double())
        # The first pass depends on the norm of the random start.
        if passes is None and k > 1 and bool((found[..., 0] <= (1 + SETTLED) * before[..., 0]).all()):
            break
    singular = found[..., : min(components, most)]
    energy = squared_weights(amap)
    rest = (energy - singular.square().sum(-1)).clamp_min(0.0)
    left = most - singular.shape[-1]
    doubt = energy * ROUNDING  # small, but significant when spread over many values
    if left == 0:
        rest, doubt = torch.zeros_like(rest), torch.zeros_like(doubt)
    edge = singular[..., -1]
    low = _effective(singular, _fewest(edge, (rest - doubt).clamp_min(0.0), left))
    high = _effective(singular, _most(rest + doubt, left))
    return MapSpectrum(
        singular,
        energy,
        torch.where(energy > 0, 1 - rest / energy.clamp_min(1e-300), 1.0),
        (low * high).sqrt(),
        low,
        high,
        torch.where(energy > 0, energy / singular[..., 0].square().clamp_min(1e-300), 0.0),
    )


def squared_weights(amap: AttentionMap) -> Tensor:
    """‖P‖²_F = Σ_ij p_ij² of each head, [b, h] float64, in one pass."""
    return amap.measure("squared_weights", rows=True).rows["squared_weights"].sum(-1, dtype=torch.float64)


def effective_rank(singular: Tensor) -> Tensor:
    """exp H(σ / Σσ) of all singular values [..., k] of a matrix (Roy & Vetterli 2007); 0 if all are 0."""
    return _effective(singular.double(), _nothing(singular.double()))


# The rest of a spectrum as Σσ and Σσ ln σ, which determine the effective rank.
Rest = tuple[Tensor, Tensor]


def _effective(singular: Tensor, rest: Rest) -> Tensor:
    total = singular.sum(-1) + rest[0]
    inner = torch.xlogy(singular, singular).sum(-1) + rest[1]
    safe = torch.where(total > 0, total, 1.0)
    return torch.where(total > 0, (safe.log() - inner / safe).exp(), 0.0)


def _nothing(singular: Tensor) -> Rest:
    zero = torch.zeros(singular.shape[:-1], dtype=torch.float64, device=singular.device)
    return zero, zero


def _most(rest: Tensor, left: int) -> Rest:
    """`left` equal values."""
    each = (rest / max(left, 1)).sqrt()
    return left * each, left * torch.xlogy(each, each)


def _fewest(edge: Tensor, rest: Tensor, left: int) -> Rest:
    """As many values at σ_k as possible, and one with the remainder: the flattest and the steepest spectrum bound all
    others with this sum of squares by Schur's theorem on majorisation."""
    square = edge.square()
    many = torch.where(square > 0, (rest / square.clamp_min(1e-300)).floor(), 0.0).clamp_max(left)
    last = (rest - many * square).clamp_min(0.0).sqrt()
    return many * edge + last, many * torch.xlogy(edge, edge) + torch.xlogy(last, last)
