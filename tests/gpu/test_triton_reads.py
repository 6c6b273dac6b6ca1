"""The GPU kernel reads of a map what its forward pass gives, and nothing else reads a map for which it was named."""

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


def test_auto_reads_with_it_first_and_what_it_lacks_with_others(amap: AttentionMap) -> None:
    free = amap.using("auto")
    free.measure("entropy")
    assert free.read_by == {"statistics": "triton_gpu"}
    torch.testing.assert_close(free[0, 2, 30:], amap.using("reference")[0, 2, 30:], rtol=1e-4, atol=1e-6)
    assert free.read_by["weights"] != "triton_gpu"


def test_what_it_lacks_is_an_error_where_it_is_named(amap: AttentionMap) -> None:
    even = hw.stats.row_measure("even", lambda tile: tile.weights[..., tile.keys % 2 == 0].sum(-1))
    reads = (
        lambda: amap[0], lambda: amap.T @ amap.q, lambda: amap.pool(8), lambda: amap.topk(2), lambda: amap.diagonals(),
        lambda: amap.measure(even),
    )  # fmt: skip
    for read in reads:
        with pytest.raises(hw.KernelError, match="kernel='triton_gpu' cannot read this map"):
            read()
