"""Who reads a map: the kernel that was named for its call, or an error; only "auto" chooses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import MASKS, SCORES, dense_truth, kernels_here, qkv

from headwise.errors import ConfigError, KernelError
from headwise.kernels import KERNELS, use_kernel
from headwise.map import AttentionMap
from headwise.map.attention import attend
from headwise.masks import Causal, Dense, Mask, Window
from headwise.stats import MEASURES, row_measure

MASK = Causal() & Window(9)
X, Y = torch.randn(2, 6, 53, 3), torch.randn(2, 6, 37, 7)

EVEN = row_measure("even", lambda tile: tile.weights[..., tile.keys % 2 == 0].sum(-1))

READS: dict[str, Callable[[AttentionMap], Any]] = {
    "weights": lambda amap: amap[:],
    "a tile": lambda amap: amap[1, 2:5, 30:36, 40:],
    "rows apart, columns back": lambda amap: amap[:, ::5, ::7, ::-1],
    "nothing": lambda amap: amap[:, :, 3:3],
    "a row": lambda amap: amap.row(-1),
    "a head": lambda amap: amap.head(1, 4)[:],
    "product": lambda amap: amap @ X,
    "product for key heads": lambda amap: amap @ X[:, :3],
    "transposed product": lambda amap: amap.T @ Y,
    "picture": lambda amap: amap.pool(8),
    "peaks": lambda amap: amap.pool(8, "max"),
    "part of a picture": lambda amap: amap.pooled(slice(3, 31), range(20, 50), 4).mean,
    "picture with progress": lambda amap: amap.pool(11, progress=lambda what, done, of: None),
    "top": lambda amap: amap.topk(4)[0],
    "received": lambda amap: amap.received(),
    "diagonals": lambda amap: amap.diagonals()[1],
    "measures": lambda amap: torch.stack(list(amap.measure(*MEASURES).values())),
    "rows of measures": lambda amap: amap.measure("entropy", rows=True).rows["entropy"],
    "measure of one's own": lambda amap: amap.measure(EVEN)["even"],
}
ABLE = [name for name in kernels_here() if name != "torch_fused"]
UNABLE = {"cpu": {"measure of one's own"}}


def made(kernel: str, dtype: torch.dtype = torch.float32, **options: Any) -> AttentionMap:
    q, k, v = qkv(dtype=dtype)
    return attend(q, k, v, kernel=kernel, return_map=True, **{"mask": MASK, **options})[1]  # type: ignore[no-any-return]


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(name: str, *_: Any) -> int:
        raise AssertionError(f"{name} of the compiled library ran")

    monkeypatch.setattr("headwise.kernels.cpu.passes.send", send)


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("kernel", ABLE)
@pytest.mark.parametrize("read", READS)
def test_the_kernel_that_is_named_reads_or_raises(kernel: str, read: str) -> None:
    amap, exact = made(kernel), made("reference", torch.float64)
    if read in UNABLE.get(kernel, ()):
        with pytest.raises(KernelError, match=rf"kernel='{kernel}' cannot read this map: .*using\('auto'\)"):
            READS[read](amap)
        return
    found = READS[read](amap)
    assert set(amap.read_by.values()) <= {kernel}
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), READS[read](exact).double(), rtol=1e-4, atol=1e-5)


def test_what_selects_a_kernel_that_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    amap = made("auto")
    with use_kernel("torch_fused"), pytest.raises(KernelError, match=r"use_kernel\('torch_fused'\) is active"):
        amap.using("auto").measure("entropy")
    monkeypatch.setenv("HEADWISE_KERNEL", "torch_fused")
    with pytest.raises(KernelError, match="by the environment variable HEADWISE_KERNEL: unset it") as told:
        amap.using("auto").measure("entropy")
    assert "请取消该变量" in told.value.zh
    with use_kernel("torch_fused"), pytest.raises(KernelError, match=r"; map\.using\('auto'\) returns the same map"):
        amap.using("torch_fused").measure("entropy")  # named by the map itself
    with pytest.raises(KernelError, match="by the environment variable HEADWISE_KERNEL: unset it"):
        made("auto", torch.float32)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("kernel", ["reference", "torch_blocks"])
@pytest.mark.parametrize("read", READS)
def test_nothing_compiled_runs_where_another_kernel_is_named(kernel: str, read: str) -> None:
    READS[read](made(kernel))


@pytest.mark.parametrize("read", READS)
def test_pytorchs_operator_reads_products_alone(read: str) -> None:
    q, k, v = qkv(e=8)
    out, amap = attend(q, k, v, kernel="torch_fused", return_map=True)
    torch.testing.assert_close(amap @ v, out, rtol=1e-5, atol=1e-5)
    assert amap.read_by == {"times": "torch_fused"}
    with pytest.raises(KernelError, match="kernel='torch_fused' cannot read this map"):
        READS[read](amap)
    assert READS[read](amap.using("auto")) is not None


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("kernel", ABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", MASKS)
def test_reads_follow_the_formula_under_every_mask(kernel: str, dtype: torch.dtype, name: str) -> None:
    if kernel == "cpu" and dtype == torch.float64:
        pytest.skip("it computes in float32")
    mask = MASKS[name](2, 37, 53)
    amap = made(kernel, dtype, mask=mask)
    q, k, _ = qkv(dtype=dtype)
    weights, allowed, _ = dense_truth(q, k, mask)
    near = {"rtol": 1e-4, "atol": 2e-5}
    torch.testing.assert_close(amap[:].double(), weights, **near)
    torch.testing.assert_close((amap @ X).double(), weights @ X.double(), **near)
    torch.testing.assert_close((amap.T @ Y).double(), weights.mT @ Y.double(), **near)
    # The compiled kernel adds up columns of weights in the dtype of q.
    narrow = {"rtol": 1e-2, "atol": 2e-5} if (kernel, dtype) == ("cpu", torch.bfloat16) else near
    torch.testing.assert_close(amap.received().double(), weights.sum(-2), **narrow)
    torch.testing.assert_close(amap.topk(3)[0].double(), weights.topk(3).values, **near)
    squares = amap.pooled(slice(0, 36), slice(0, 52), 4)
    assert torch.equal(squares.allowed, allowed[:, :, :36, :52].unflatten(3, (13, 4)).unflatten(2, (9, 4)).sum((3, 5)))
    assert set(amap.read_by.values()) == {kernel}


@pytest.mark.parametrize("name", SCORES)
def test_the_reference_reads_maps_with_scores_in_float64(name: str) -> None:
    q, k, v = qkv()
    given = {"mask": Causal(), "score": SCORES[name](2, 6, 37, 53), "return_map": True}
    _, amap = attend(q, k, v, kernel="reference", **given)
    _, exact = attend(q.double(), k.double(), v.double(), kernel="torch_blocks", **given)
    torch.testing.assert_close(amap[:].double(), exact[:], rtol=2**-23, atol=1e-30)
    torch.testing.assert_close(amap.topk(5)[1], exact.topk(5)[1])
    torch.testing.assert_close(amap @ v, (exact @ v.double()).float(), rtol=1e-6, atol=1e-7)


def test_measures_asked_for_with_the_call_are_made_by_its_kernel() -> None:
    q, k, v = qkv()
    for kernel in ("reference", "torch_blocks"):
        _, amap = attend(q, k, v, mask=MASK, kernel=kernel, return_map=True, measures=["entropy"])
        assert amap.read_by["tiles"] == kernel
    with pytest.raises(KernelError, match="kernel='torch_fused' cannot read this map: it does not compute statistics"):
        attend(q, k, q[:, :3, :1].expand(-1, -1, 53, -1), kernel="torch_fused", return_map=True, measures=["entropy"])


@pytest.mark.skipif("cpu" not in ABLE, reason="the compiled kernel is not here")
def test_what_the_compiled_kernel_does_not_give_with_dropout_it_gives_when_it_reads() -> None:
    q, k, v = qkv()
    options: dict[str, Any] = {"mask": MASK, "return_map": True, "measures": ["received_mass", "entropy"]}
    _, amap = attend(q, k, v, kernel="cpu", dropout_p=0.5, **options)
    assert amap.read_by == {"statistics": "cpu"}
    _, plain = attend(q, k, v, kernel="cpu", **options)
    assert plain.read_by == {}
    torch.testing.assert_close(amap.measured["received_mass"], plain.measured["received_mass"])


def test_a_kernel_in_force_at_the_read_applies_to_maps_of_calls_that_named_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    amap = made("auto")
    assert amap.named == "auto"
    with use_kernel("reference"):
        amap.row(3)
        assert amap.read_by == {"weights": "reference"}
        with use_kernel("torch_fused"), pytest.raises(KernelError, match="torch_fused"):
            amap.row(3)
        with use_kernel("auto"):
            amap.row(3)
        assert amap.read_by != {"weights": "reference"}
    monkeypatch.setenv("HEADWISE_KERNEL", "torch_blocks")
    amap.row(3)
    assert amap.read_by == {"weights": "torch_blocks"}
    named = made("reference")
    named.row(3)
    assert named.read_by == {"weights": "reference"}
    monkeypatch.setenv("HEADWISE_KERNEL", "fastest")
    with pytest.raises(ConfigError, match="HEADWISE_KERNEL='fastest'"):
        amap.row(3)


def test_a_kernel_in_force_at_the_call_is_that_of_its_map() -> None:
    with use_kernel("reference"):
        amap = made("auto")
    amap.measure("entropy")
    assert amap.named == "reference"
    assert set(amap.read_by.values()) == {"reference"}


def test_heads_keep_the_kernel_and_files_do_not(tmp_path: Path) -> None:
    amap = made("torch_blocks")
    assert amap.head(1, 2).named == "torch_blocks"
    assert amap.using("auto").head(1, 2).named == "auto"
    amap.save(tmp_path / "map.safetensors")
    loaded = AttentionMap.load(tmp_path / "map.safetensors")
    assert (loaded.kernel, loaded.named) == ("torch_blocks", "auto")
    torch.testing.assert_close(loaded.using("reference")[:], amap[:])


def test_a_map_for_another_kernel_is_the_same_map() -> None:
    amap = made("reference", measures=["entropy"])
    other = amap.using("torch_blocks")
    assert other.q is amap.q
    assert other.measured is amap.measured
    assert (amap.named, other.named) == ("reference", "torch_blocks")
    with pytest.raises(ConfigError, match=r"'fastest'.*'reference'"):
        amap.using("fastest")


def test_every_kernel_reads_something() -> None:
    for kernel in KERNELS.values():
        own = {name for name in dir(kernel.reads) if name in vars(type(kernel.reads))}
        assert "times" in own, kernel.name


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kernel", ABLE)
def test_a_query_that_is_not_finite_leaves_masked_keys_alone(kernel: str, bad: float) -> None:
    """The weights of its keys are NaN, and those of the keys that it may not attend to stay 0, in every read."""
    q, k, v = qkv(1, 2, 1, 130, 130)
    whole = attend(q, k, v, mask=Causal(), kernel=kernel, return_map=True)[1]
    q = q.clone()
    q[0, 1, 111, 0] = bad
    amap = attend(q, k, v, mask=Causal(), kernel=kernel, return_map=True)[1]
    assert not amap[0, 1, 111, :112].isfinite().all()
    assert (amap[0, 1, 111, 112:] == 0).all()
    ones, later = torch.ones(130, 1), slice(112, None)
    reads: tuple[Callable[[AttentionMap], torch.Tensor], ...] = (
        lambda of: of.received()[0, 1, later],
        lambda of: (of.T @ ones)[0, 1, later],
        lambda of: of.pooled(range(130), range(112, 130), 9).mean,
        lambda of: of.pooled(range(130), range(112, 130), 9).largest,
        lambda of: of.diagonals()[1][0, 1, -129:],
        lambda of: (of @ ones)[0, 1, 112:],
    )
    for number, read in enumerate(reads):
        torch.testing.assert_close(read(amap), read(whole), rtol=1e-5, atol=1e-6, msg=lambda m, i=number: f"{i}: {m}")


@pytest.mark.parametrize("mask", [None, Dense(torch.ones(1, 1, 0, 0, dtype=torch.bool))])
@pytest.mark.parametrize("kernel", ["auto", *(name for name in ABLE if name != "cpu")])  # which refuses it
def test_a_batch_of_nothing_reads_as_nothing(kernel: str, mask: Mask | None) -> None:
    """No batch entry, query or key: empty results, and a table of zeros."""
    q, k, v = torch.randn(0, 4, 0, 3), torch.randn(0, 2, 0, 3), torch.randn(0, 2, 0, 5)
    amap = attend(q, k, v, mask=mask, kernel=kernel, return_map=True)[1]
    assert [x.shape for x in amap.diagonals()] == [(0,), (0, 4, 0)]
    assert amap.received().shape == (0, 4, 0)
    found = amap.measure(*MEASURES)
    table = found.merge(found).table()
    assert list(table) == list(MEASURES)
    assert all((table.column(name) == 0).all() and len(table.column(name)) == 4 for name in table)
    assert list(found.table()) == list(MEASURES)
