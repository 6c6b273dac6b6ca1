"""The compiled kernel where numbers are very large, very small, or very many."""

import math

import pytest
import torch
from kernel_formula import run, truth
from samples import qkv

from headwise.kernels import KERNELS
from headwise.kernels.call import Call
from headwise.masks import Everything, Grid
from headwise.rule import Rule
from headwise.stats import COLUMN_MASS, CONCENTRATION, ENTROPY, KeyWeights, RangeMass, TopKeys, TopWeights

pytestmark = pytest.mark.usefixtures("target")
SMALLEST = 2.0**-126  # of the normal numbers in float32 and bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [3, 37])
@pytest.mark.parametrize("scale", [1e6, 3e9, -3e9, 1e20, 1e36])
def test_logits_of_any_size_leave_the_largest_key(scale: float, n: int, dtype: torch.dtype) -> None:
    """Their float32 is coarse, by hundreds at 5e9: a top that is rounded otherwise than its logit would overflow."""
    q, k, v = qkv(1, 2, 1, n, 700, 1, 5, dtype=dtype)
    q = q.sign() * (q.abs() + 0.5)
    k = (torch.randperm(700, generator=torch.Generator().manual_seed(1)).view(1, 1, 700, 1) / 128 - 2.7).to(dtype)
    k[0, 0, ::2] = 0.0  # rounded alike they would be equal
    k[0, 0, [13, 601], 0] = torch.tensor([-5.5, 5.5], dtype=dtype)
    best = torch.where(q * scale > 0, 601, 13)[..., 0]
    keys = KeyWeights(torch.arange(700.0)[None])
    wanted = (ENTROPY, CONCENTRATION, RangeMass(0, 300, relative=False), keys)
    found = run(q, k, v, scale=scale, statistics=wanted)
    torch.testing.assert_close(found.out, v[0, 0, best], rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=0.0)
    ours = found.statistics
    assert (ours[ENTROPY] <= 1e-5).all()
    for statistic, expected in ((wanted[1], best > 0), (wanted[2], best < 300), (keys, best)):
        torch.testing.assert_close(ours[statistic], expected.float(), rtol=1e-5, atol=0.0)
    top = run(q, k, v, scale=scale, statistics=(TopWeights(3), TopKeys(3), COLUMN_MASS)).statistics
    ones = torch.tensor([1.0, 0.0, 0.0]).expand(1, 2, n, 3)
    # Logits of some 10⁷ are rounded to whole numbers, each time they are computed: their weights are known to a factor.
    torch.testing.assert_close(top[TopWeights(3)], ones, rtol=1e-5 if scale != 1e6 else 1 - math.exp(-2), atol=0.0)
    assert torch.equal(top[TopKeys(3)][..., 0], best)
    counts = torch.nn.functional.one_hot(best, 700).sum(-2).float()
    torch.testing.assert_close(top[COLUMN_MASS], counts, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("n", [3, 37])
@pytest.mark.parametrize("size", [1e-39, 3e-38, 1e-36, 1e-30])
def test_what_very_small_values_lose(size: float, n: int) -> None:
    """The bound of docs/precision.md: a CPU's own product of bfloat16 takes what is below 2⁻¹²⁶ for 0."""
    q, k, v = qkv(n=n, dtype=torch.bfloat16)
    v = (v.double() * size).bfloat16()
    expected = truth(q, k).out(v)
    bound = 54 * SMALLEST + 6e-3 * expected.abs().amax()
    assert (run(q, k, v).out.double() - expected).abs().amax() <= bound


@pytest.mark.thorough
@pytest.mark.parametrize("n", [1, 5])
def test_a_million_keys(n: int) -> None:
    m = 1_000_000
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, size, 8, generator=generator) for size in (n, m, m))
    result = KERNELS["cpu"].run(Call(q, k, v, Rule(Everything(), 8**-0.5, Grid(1, 1, n, m))))
    expected = (q.double() @ k.double().mT * 8**-0.5).softmax(-1) @ v.double()
    assert (result.out.double() - expected).norm() <= 1e-6 * expected.norm()
