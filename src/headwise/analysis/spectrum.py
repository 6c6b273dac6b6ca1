"""How many independent patterns an attention map holds: its leading singular values and effective rank, found with
products of the map and thin matrices, never with the map itself."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.analysis.given import checked_maps
from headwise.errors import ConfigError
from headwise.map import AttentionMap
from headwise.table.show import as_html, as_text

SPARE = 8  # columns beyond those wanted, which make the wanted ones good
SETTLED = 2e-3  # of σ₁, from one pass to the next
MOST_PASSES = 16
ROUNDING = 1e-6  # of ‖P‖²_F and of what was found of it, in float32


@dataclass(frozen=True)
class MapSpectrum:
    """Singular values of each head's map, and ranks made of them. Prints itself as a table.

    The rest of the spectrum, beyond the k values found, is not known one by one, but the sum of its squares is, from
    ‖P‖²_F. That leaves the effective rank between two bounds: all of the rest in as few values as there can be, each
    as large as σ_k, or spread evenly.

    Attributes:
        singular: [b, h, k] float64, descending. The last ones may be somewhat too small, never too large.
        energy: [b, h], ‖P‖²_F, the sum of all squared singular values.
        captured: [b, h], share of it that the k values have; 1: nothing is left.
        low, high: [b, h], bounds of the effective rank exp H(σ / Σσ) of Roy & Vetterli (EUSIPCO 2007), which counts
            the singular values of the whole map. They are as good as the k values are.
        effective_rank: [b, h], √(low · high), an estimate. On maps of 500 tokens, trained and random, 32 values and
            three passes put it between 0.8 and 1.25 of the true one; where `low` and `high` meet, it is exact.
        stable_rank: [b, h], ‖P‖²_F / σ₁², too large by as much as σ₁² is too small.
    """

    singular: Tensor
    energy: Tensor
    captured: Tensor
    effective_rank: Tensor
    low: Tensor
    high: Tensor
    stable_rank: Tensor

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows as text, one row a batch entry and head."""
        head = ["batch", "head", "σ₁", "effective rank", "at least", "at most", "stable rank", "captured"]
        columns = self.singular[..., 0], self.effective_rank, self.low, self.high, self.stable_rank, self.captured
        b, h = self.energy.shape
        body = [[str(i), str(j), *(f"{x[i, j].item():.4g}" for x in columns)] for i in range(b) for j in range(h)]
        return head, body

    def __repr__(self) -> str:
        return as_text(*self.table())

    def _repr_html_(self) -> str:
        return as_html(*self.table())


@torch.no_grad()
def map_spectrum(amap: AttentionMap, components: int = 32, *, passes: int | None = None, seed: int = 0) -> MapSpectrum:
    """Leading singular values and effective ranks of all heads of a map, by randomised SVD (Halko, Martinsson & Tropp
    2011, §4.5): `amap @ x` and `amap.T @ x` in turn, x having components + 8 columns.

    Args:
        components: k, singular values to find. From min(n, m) on the result is exact, to rounding.
        passes: products, at least 2. None: until σ₁ of every head grows by no more than 0.2 % from one to the next,
            three at least and 16 at most; more where values fall slowly and all must be accurate.
        seed: of the random start.
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
        # The first pass sees the random start's own size.
        if passes is None and k > 1 and bool((found[..., 0] <= (1 + SETTLED) * before[..., 0]).all()):
            break
    singular = found[..., : min(components, most)]
    energy = squared_weights(amap)
    rest = (energy - singular.square().sum(-1)).clamp_min(0.0)
    left = most - singular.shape[-1]
    doubt = energy * ROUNDING  # small as it is, spread over many values it would count
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
    """exp H(σ / Σσ) of singular values [..., k], all there are (Roy & Vetterli 2007); 0 if all are 0."""
    return _effective(singular.double(), _nothing(singular.double()))


# A rest of the spectrum as its sum Σσ and its Σσ ln σ, which is all that the effective rank needs.
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
    """All `left` values alike."""
    each = (rest / max(left, 1)).sqrt()
    return left * each, left * torch.xlogy(each, each)


def _fewest(edge: Tensor, rest: Tensor, left: int) -> Rest:
    """As many at σ_k as there can be, and one of what is then left over.

    Both ends follow from Schur's theorem: of all spectra with this sum of squares and these bounds, the flat one is
    majorised by, and the steep one majorises, all others, when scaled to sum 1.
    """
    square = edge.square()
    many = torch.where(square > 0, (rest / square.clamp_min(1e-300)).floor(), 0.0).clamp_max(left)
    last = (rest - many * square).clamp_min(0.0).sqrt()
    return many * edge + last, many * torch.xlogy(edge, edge) + torch.xlogy(last, last)
