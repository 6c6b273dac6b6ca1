"""A map of the GPU kernel: its forward pass computes what it can of the reads, and PyTorch the others."""

import pytest
import torch
from samples import qkv
from triton_here import DEVICE

import headwise as hw
from headwise.map import AttentionMap


@pytest.fixture(scope="module")
def amap() -> AttentionMap:
    q, k, v = (x.to(DEVICE) for x in qkv(1, 4, 2, 37, 53, 8, 5))
    _, found = hw.attend(q, k, v, mask=hw.Causal(), kernel="triton_gpu", return_map=True)
    return found


def test_statistics_products_and_columns(amap: AttentionMap) -> None:
    exact = amap.using("reference")
    x = torch.randn(1, 4, 53, 7, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    near = {"rtol": 1e-4, "atol": 1e-5}
    names = ("entropy", "max_logit", "sink_mass")
    for name, found in amap.measure(*names).items():
        torch.testing.assert_close(found, exact.measure(*names)[name], **near)
    torch.testing.assert_close(amap @ x, exact @ x, **near)
    torch.testing.assert_close(amap.received(), exact.received(), **near)
    assert amap.read_by == {"statistics": "triton_gpu", "times": "triton_gpu", "received": "triton_gpu"}


def test_other_reads_are_computed_by_pytorch(amap: AttentionMap) -> None:
    even = hw.stats.row_measure("even", lambda tile: tile.weights[..., tile.keys % 2 == 0].sum(-1))
    exact, y = amap.using("reference"), amap.q[..., :3]
    reads = (
        lambda x: x[0, 2, 30:], lambda x: x.row(-1), lambda x: x.T @ y, lambda x: x.pool(8), lambda x: x.topk(2)[0],
        lambda x: x.diagonals()[0], lambda x: x.measure(even)["even"],
    )  # fmt: skip
    for read in reads:
        for given in (amap, amap.using("auto")):
            torch.testing.assert_close(read(given), read(exact), rtol=1e-4, atol=1e-5)


def test_a_map_on_another_device_is_not_read_with_it(monkeypatch: pytest.MonkeyPatch, amap: AttentionMap) -> None:
    monkeypatch.setattr("headwise.kernels.triton_gpu._absent", lambda q: "it requires another device")
    with pytest.raises(hw.KernelError, match="kernel='triton_gpu' cannot read this map: it requires another device"):
        amap[0]
    free = amap.using("auto")
    assert torch.isfinite(free[0]).all()
    assert free.read_by["weights"] != "triton_gpu"
