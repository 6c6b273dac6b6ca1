"""Weights are exact, and rows sum to 1, however large the logits are."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from large_logits import KINDS, made, off, vectors
from torch import Tensor

import headwise as hw
from headwise.kernels.reads import Matrix
from headwise.map import AttentionMap
from headwise.rule.tiles import Tile
from headwise.stats import RowMeasure

KERNELS = "cpu", "torch_blocks", "reference"
whole_rows = Matrix._whole_rows


@pytest.fixture(autouse=True)
def _remarks_are_expected() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* logits of about")
        yield


class Mass(RowMeasure):
    """Σ p, from tiles alone."""

    name, unit, range, source = "mass", "mass", "0 to 1", "here"

    def partial(self, tile: Tile) -> Tensor:
        assert tile.weights.dtype == tile.lse.dtype == torch.float32
        return tile.mass


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("d", [1, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "m"), [(2, 7), (53, 101)])
def test_rows_sum_to_one(n: int, m: int, kind: str, d: int, kernel: str) -> None:
    for size in (1.0, 8.0, 1e2, 7e3, 1e4, 7e7):
        q, k = vectors(kind, size, d, n, m)
        amap = made(q, k, kernel)
        mass, relative = off(amap[:], q, k)
        assert mass <= 2e-6
        assert relative <= 1 or size > 1e4
        assert abs(float(amap[0, 1, 1].double().sum()) - 1) <= 2e-6
        assert amap.lse.dtype == torch.float32


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("d", [1, 64, 128])
@pytest.mark.parametrize("size", [100.0, 1e4, 1e6])
def test_large_terms_that_cancel(size: float, d: int, kernel: str) -> None:
    q, k = vectors("random", 3.0, d, 11, 41)
    noise = torch.randn(1, 2, 11, 41, generator=torch.Generator().manual_seed(d))
    large, like_product = vectors("random", size, d, 11, 41)
    given = [
        (q, k, noise + size, torch.full((1, 1, 1, 41), -size)),
        (q, k, noise + size, 0.1 * noise, torch.full((1, 2, 11, 1), -size)),
        (q, k, 0.01 * noise - 8.0),
        (large, like_product, -(large.double() @ like_product.double().mT).float()),
    ]
    for q, k, *biases in given:
        amap = made(q, k, kernel, score=tuple(map(hw.Bias, biases)))
        for weights in (amap[:], torch.cat([amap[:, :, i : i + 1] for i in range(11)], 2), amap @ torch.eye(41)):
            mass, relative = off(weights, q, k, *biases)
            assert mass <= 2e-6
            assert relative <= 1


READS = {
    "row by row": lambda amap: torch.stack([amap.row(i) for i in range(amap.shape[2])], 2),
    "key by key": lambda amap: torch.cat([amap[..., j : j + 1] for j in range(amap.shape[3])], 3),
    "rows apart": lambda amap: torch.cat([amap[:, :, i::5, ::-1] for i in range(5)], 2),
    "head by head": lambda amap: torch.cat([amap.head(0, i).to_dense() for i in range(2)], 1),
    "squares of one": lambda amap: amap.pooled(slice(None), slice(None), 1).mean,
    "product": lambda amap: amap @ torch.eye(amap.shape[3]),
    "transposed product": lambda amap: (amap.T @ torch.eye(amap.shape[2])).mT,
    "all by weight": lambda amap: amap.topk(amap.shape[3])[0],
}  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("read", READS)
def test_every_read_is_of_the_same_weights(read: str, kernel: str) -> None:
    q, k = vectors("near ties", 7e3, 64, 30, 41)
    amap = made(q, k, kernel)
    weights = READS[read](amap).double()
    assert float((weights.sum(-1) - 1).abs().max()) <= 2e-6
    if read not in ("rows apart", "all by weight", "product"):  # in another order; by the scores of another pass
        torch.testing.assert_close(weights, amap[:].double(), rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("kernel", KERNELS)
def test_sums_over_parts_of_the_map(kernel: str) -> None:
    q, k = vectors("equal", 7e3, 64, 30, 41)
    amap = made(q, k, kernel)
    halves = [amap.pooled(slice(None), cols, 30) for cols in (slice(0, 30), slice(30, 41))]
    assert sum(float((x.mean * x.allowed).double().sum()) for x in halves) == pytest.approx(60, rel=1e-6)
    offsets, means = amap.diagonals()
    pairs = torch.ones(30, 41).flip(0).nonzero().sum(1).bincount(minlength=len(offsets))
    assert float((means.double() * pairs).sum()) == pytest.approx(60, rel=1e-6)
    assert float(amap.received().double().sum()) == pytest.approx(60, rel=1e-6)
    assert amap.using("torch_blocks").measure(Mass())["mass"].sub(1).abs().max() <= 1e-6


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_makes_logits_large_besides_queries_and_keys(kernel: str, tmp_path: Path) -> None:
    q, k = vectors("random", 3.0, 64, 30, 41)
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(1, 2, 30, 41, generator=generator) * 0.1 + 9e3
    sinks = torch.tensor([9e3, 8.999e3])
    mask = hw.Window(11, 0) & hw.masks.Dense(torch.rand(30, 41, generator=generator) < 0.7)
    given = {"mask": mask, "score": (hw.SoftCap(2.0), hw.Bias(bias), hw.SinkLogits(sinks))}
    amap = made(q, k, kernel, **given)
    scores = 2.0 * torch.tanh(q.double() @ k.double().mT / 2.0) + bias.double()
    allowed = mask.allowed(torch.arange(30), torch.arange(41), amap.rule.grid)
    scores = torch.cat(
        (scores.masked_fill(~allowed, -torch.inf), sinks.double()[:, None, None].expand(1, 2, 30, 1)), -1
    )
    exact = scores.softmax(-1).masked_fill(~allowed.any(-1)[..., None], 0.0)
    amap.save(tmp_path / "map.safetensors")
    for one in (amap, AttentionMap.load(tmp_path / "map.safetensors").using(kernel)):
        weights = one[:].double()
        assert (weights[~allowed.expand_as(weights)] == 0).all()
        assert float((weights - exact[..., :-1]).abs().max()) <= 16 * 2.0**-24 * 9e3
        # With the sink's weight, from the scores as float32 resolves them.
        assert float((weights.sum(-1) + exact[..., -1] - allowed.any(-1).double()).abs().max()) <= 4 * 2.0**-24 * 9e3


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision(dtype: torch.dtype, kernel: str) -> None:
    q, k = (x.to(dtype) for x in vectors("near ties", 7e3, 64, 30, 41))
    mass, relative = off(made(q, k, kernel)[:], q, k)
    assert mass <= 2e-6
    assert relative <= 1


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_row_is_summed_once(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[int] = []

    def counted(of: Matrix, compute: Callable[[Matrix], Tensor], rows: Any = whole_rows) -> Matrix:
        part = rows(of, compute)
        summed.append(part.lse.numel())
        return part

    monkeypatch.setattr(Matrix, "_whole_rows", counted)
    q, k = vectors("near ties", 7e3, 64, 30, 41)
    amap = made(q, k, kernel)
    one = amap.head(0, 1)
    for part in (amap[0, 1, 3:9, :5], one[0, 0, 3:9], amap.using(kernel)[0, 1, 5:8]):
        assert part.isfinite().all()
    assert sum(summed) == (6 if kernel != "reference" else 60)
    with torch.inference_mode():
        amap.pool(4)
    for _ in range(3):
        assert float((amap[:].double().sum(-1) - 1).abs().max()) <= 2e-6
        amap.T @ torch.ones(30, 1)
    assert sum(summed) <= 30 + 60
    k.mul_(2.0)
    with pytest.raises(hw.ConfigError, match="changed in place"):
        amap.to_dense()
    with pytest.raises(hw.ConfigError, match="changed in place"):
        one.to_dense()


def test_logits_that_float32_does_not_resolve_are_remarked_once() -> None:
    q, k = vectors("random", 7e7, 64, 5, 7)
    amap = made(q, k, "auto")
    with pytest.warns(UserWarning, match="logits of about 5e\\+07, which float32 resolves to 6"):
        amap.measure("entropy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amap.to_dense()
        made(*vectors("random", 9e3, 64, 5, 7), "auto").to_dense()
        made(q.double(), k.double(), "auto").to_dense()
