"""The matrix that is never stored reads like the one that is."""

import copy
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from samples import MASKS, dense_truth, qkv
from torch import Tensor

from headwise.errors import CheckpointError, ConfigError, DTypeError, ShapeError
from headwise.map import AttentionMap
from headwise.map.attention import attend
from headwise.masks import Causal, Dense, Window
from headwise.scores import Bias


def made(name: str = "causal", n: int = 37, m: int = 53, **sizes: int) -> tuple[AttentionMap, torch.Tensor]:
    """A map and its dense weights in float64."""
    q, k, v = qkv(n=n, m=m, **sizes)
    mask = MASKS[name](2, n, m)
    _, amap = attend(q, k, v, mask=mask, return_map=True)
    return amap, dense_truth(q, k, mask)[0]


@pytest.mark.parametrize("name", MASKS)
def test_dense_equals_the_formula(name: str) -> None:
    amap, dense = made(name)
    assert amap.shape == (2, 6, 37, 53)
    torch.testing.assert_close(amap.to_dense().double(), dense, rtol=2e-5, atol=1e-7)
    sums = amap.to_dense().sum(-1)
    lit = dense.sum(-1) > 0
    torch.testing.assert_close(sums[lit], torch.ones_like(sums[lit]), rtol=0, atol=2e-6)
    assert (sums[~lit] == 0).all()


@pytest.mark.parametrize(
    "index",
    [
        (1, 4, slice(3, 9), slice(10, 40)),
        (0, slice(1, 6, 2), slice(None, None, 5), slice(-7, None)),
        (slice(None), -1, -2, slice(None)),
        (..., slice(2, 5)),
        (1, ..., 3),
        (1,),
        (0, 0, 0, 0),
        (slice(None), slice(None), slice(5, 5), slice(None)),
        (0, 5, slice(20, 3, -4), slice(50, 2, -7)),
    ],
)
def test_a_tile_equals_that_of_the_dense_matrix(index: tuple[object, ...]) -> None:
    amap, dense = made("window and sinks")
    expected = dense.numpy()[tuple(index)]
    got = amap[index]
    assert got.shape == expected.shape
    np.testing.assert_allclose(got.numpy(), expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    "index",
    [
        (0, [1, 2]), ([1, 0], slice(None), 3), (slice(None), [5, -6, 5], slice(2, 9), slice(None)), (0, []),
        ([1, 0, 1], [0, 2, 5]), (0, torch.tensor([4, 1]), -1), (1, np.array([3]), ..., slice(2, 7)),
        ([0], 2, slice(30, None, 3)),
    ],
)  # fmt: skip
def test_heads_and_batch_entries_are_chosen_by_lists(index: tuple[object, ...]) -> None:
    amap, dense = made("window and sinks")
    expected, got = dense[index], amap[index]
    assert got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected.double(), rtol=2e-5, atol=1e-7)


def test_bad_indices_are_named() -> None:
    amap, _ = made()
    with pytest.raises(IndexError, match="head 6 is out of range for 6"):
        amap[0, 6]
    with pytest.raises(ShapeError, match="at most four"):
        amap[0, 0, 0, 0, 0]
    with pytest.raises(ShapeError, match="key index"):
        amap[0, 0, 0, [1, 2]]
    for wrong in ([0, 6], [-7]):
        with pytest.raises(IndexError, match=r"head -?[67] is out of range for 6"):
            amap[0, wrong]
    for wrong in ([True, False], [0.5], "01", {1}, torch.tensor([[0, 1]]), torch.tensor([0.0]), None):
        with pytest.raises(ShapeError, match="as head ind"):
            amap[0, wrong]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("heads", [None, 1, 3, 6])
def test_products_equal_those_of_the_dense_matrix(name: str, heads: int | None) -> None:
    amap, dense = made(name)
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(*(() if heads is None else (2, heads)), 53, 4, generator=generator)
    wide = x if heads is None else x.repeat_interleave(6 // heads, 1)
    torch.testing.assert_close((amap @ x).double(), dense @ wide.double(), rtol=1e-5, atol=1e-6)
    y = torch.randn(2, 6, 37, 3, generator=generator)
    torch.testing.assert_close((amap.T @ y).double(), dense.mT @ y.double(), rtol=1e-5, atol=1e-6)
    assert amap.T.shape == (2, 6, 53, 37)
    assert amap.T.T is amap


def test_a_product_of_the_wrong_size_is_named() -> None:
    amap, _ = made()
    with pytest.raises(ShapeError, match=r"\(37, 2\).*53 keys"):
        amap @ torch.zeros(37, 2)
    with pytest.raises(ShapeError, match=r"37 queries"):
        amap.T @ torch.zeros(53, 2)


def of_cells(x: Tensor, rows: list[slice], cols: list[slice], reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """What a function makes of each cell's numbers, [2, 6, cells, cells]."""
    return torch.stack([torch.stack([reduce(x[..., i, j]) for j in cols], -1) for i in rows], -2)


@pytest.mark.thorough_except("1-lengths", "7-padded left", "12-everything")
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("size", [1, 7, 12, 53, 500])
def test_pooling_is_over_allowed_cells(name: str, size: int) -> None:
    amap, dense = made(name)
    cell = -(-53 // size)
    allowed = amap.mask.to_dense(37, 53, batch=2, heads=6).expand(2, 6, 37, 53).double()
    means, tops = amap.pool(size), amap.pool(size, "max")
    assert means.shape == (2, 6, -(-37 // cell), -(-53 // cell))
    rows, cols = ([slice(i, i + cell) for i in range(0, length, cell)] for length in (37, 53))
    total, count = (of_cells(x, rows, cols, lambda here: here.sum((-2, -1))) for x in (dense, allowed))
    torch.testing.assert_close(means.double(), total / count.clamp_min(1), rtol=1e-4, atol=1e-7)
    largest = of_cells(dense, rows, cols, lambda here: here.amax((-2, -1)))
    torch.testing.assert_close(tops.double(), largest, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", MASKS)
def test_a_rectangle_is_pooled_from_its_first_cell(name: str) -> None:
    amap, dense = made(name)
    allowed = amap.mask.to_dense(37, 53, batch=2, heads=6).expand(2, 6, 37, 53)
    found, one = amap.pooled(range(5, 30), slice(-40, None), 4), amap.head(1, 3).pooled(slice(5, 30), range(13, 53), 4)
    assert found.mean.shape == found.largest.shape == found.allowed.shape == (2, 6, 7, 10)
    for name_, part in one._asdict().items():
        assert torch.equal(part[0, 0], getattr(found, name_)[1, 3])
    rows = [slice(i, min(30, i + 4)) for i in range(5, 30, 4)]
    cols = [slice(j, j + 4) for j in range(13, 53, 4)]
    total, count = (of_cells(x, rows, cols, lambda here: here.sum((-2, -1))) for x in (dense, allowed))
    assert torch.equal(found.allowed, count)
    torch.testing.assert_close(found.mean.double(), total / count.clamp_min(1), rtol=1e-4, atol=1e-7)
    largest = of_cells(dense, rows, cols, lambda here: here.amax((-2, -1)))
    torch.testing.assert_close(found.largest.double(), largest, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("cell", [30, 2**31, 2**63 - 1])
def test_a_cell_that_is_larger_than_the_rectangle_is_one_square(cell: int) -> None:
    amap, _ = made()
    for part, whole in zip(amap.pooled(range(7), range(30), cell), amap.pooled(range(7), range(30), 30), strict=True):
        assert torch.equal(part, whole)


@pytest.mark.parametrize("rows", [range(3, 3), range(0, 38), slice(0, 9, 2), range(-2, 5), 7])
def test_a_rectangle_that_is_none_is_named(rows: object) -> None:
    amap, _ = made()
    with pytest.raises(ShapeError, match=r"pooled\(rows="):
        amap.pooled(rows, range(5), 2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cell=0"):
        amap.pooled(range(4), range(5), 0)


@pytest.mark.thorough
def test_pooling_over_many_tiles() -> None:
    amap, dense = made("causal", n=1100, m=1300, h=2, h_kv=1, d=4, e=2, b=2)
    cell = 13
    padded = torch.nn.functional.pad(dense, (0, 0, 0, -1100 % cell))
    tops = padded.view(2, 2, -1, cell, 100, cell).amax((3, 5))
    torch.testing.assert_close(amap.pool(100, "max").double(), tops, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", MASKS)
def test_topk_finds_the_largest(name: str) -> None:
    amap, dense = made(name)
    weights, keys = amap.topk(5)
    expected = dense.topk(5).values
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)
    assert ((keys >= 0) == (weights > 0)).all()
    found = dense.gather(-1, keys.clamp_min(0))
    torch.testing.assert_close(torch.where(keys >= 0, found, 0.0), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("name", MASKS)
def test_rows_columns_and_diagonals(name: str) -> None:
    amap, dense = made(name)
    torch.testing.assert_close(amap.row(-2).double(), dense[:, :, -2], rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(amap.received().double(), dense.sum(2), rtol=1e-5, atol=1e-6)
    offsets, means = amap.diagonals()
    assert offsets.tolist() == list(range(-52, 37))
    allowed = amap.mask.to_dense(37, 53, batch=2, heads=6).expand(2, 6, 37, 53).double()
    distance = torch.arange(53) - (torch.arange(37)[:, None] + 16)
    for offset, mean in zip(offsets.tolist(), means.unbind(-1), strict=True):
        on = distance == offset
        expected = dense[..., on].sum(-1) / allowed[..., on].sum(-1).clamp_min(1)
        torch.testing.assert_close(mean.double(), expected, rtol=1e-5, atol=1e-7)


def test_bad_options_are_named() -> None:
    amap, _ = made()
    for call, words in (
        (lambda: amap.pool(0), "size=0"),
        (lambda: amap.pool(5, "median"), "'median'"),
        (lambda: amap.topk(54), "k=54"),
        (lambda: amap.topk(0), "k=0"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()


def test_to_dense_refuses_what_would_not_fit() -> None:
    q = torch.zeros(1, 1, 9000, 2)
    _, amap = attend(q, q, q, mask=Causal() & Window(3), return_map=True)
    with pytest.raises(ConfigError, match=r"0\.3 GB.*force=True"):
        amap.to_dense()
    assert "B stored" in repr(amap)


def test_all_memory_that_a_map_holds_is_counted_once() -> None:
    q, k, v = qkv(1, 2, 2, 64, 64, 4, 4)
    mask, bias = Dense(torch.rand(64, 64) > 0.5), torch.randn(1, 2, 64, 64)
    _, amap = attend(q, k, v, mask=mask, score=(Bias(bias), Bias(bias)), return_map=True)
    assert amap.nbytes == q.nbytes + k.nbytes + amap.lse.nbytes + mask.mask.nbytes + bias.nbytes
    assert amap.head(0, 1).nbytes == amap.nbytes  # views keep the whole
    assert f"{amap.nbytes / 1000:.1f} kB stored" in repr(amap)
    packed = torch.randn(3, 1, 2, 64, 4)
    _, amap = attend(*packed, return_map=True)
    assert amap.nbytes == packed.nbytes + amap.lse.nbytes


@pytest.mark.parametrize("name", MASKS)
def test_saved_and_loaded_it_is_the_same(name: str, tmp_path: Path) -> None:
    amap, _ = made(name)
    amap.save(tmp_path / "map.safetensors")
    again = AttentionMap.load(tmp_path / "map.safetensors")
    assert torch.equal(again.to_dense(), amap.to_dense())
    assert (again.kernel, again.shape, again.rule.scale) == (amap.kernel, amap.shape, amap.rule.scale)
    assert os.listdir(tmp_path) == ["map.safetensors"]


def test_a_file_that_is_no_map_is_refused(tmp_path: Path) -> None:
    amap, _ = made()
    path = tmp_path / "map.safetensors"
    with pytest.raises(CheckpointError, match="does not exist"):
        AttentionMap.load(path)
    amap.save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        AttentionMap.load(path)
    from safetensors.torch import save_file

    save_file({"q": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="not of the format headwise-map-5"):
        AttentionMap.load(path)


def test_scipy_works_on_it_without_the_matrix() -> None:
    linalg = pytest.importorskip("scipy.sparse.linalg")
    amap, dense = made("causal window")
    operator = amap.as_linear_operator(1, 4)
    matrix = dense[1, 4].numpy()
    x = np.random.default_rng(0).standard_normal((53, 3)).astype(np.float32)
    np.testing.assert_allclose(operator @ x, matrix @ x, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(operator.matvec(x[:, 0]), matrix @ x[:, 0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(operator.T @ x[:37], matrix.T @ x[:37], rtol=1e-4, atol=1e-5)
    z = x + 1j * x[:, ::-1]
    np.testing.assert_allclose(operator @ z, matrix @ z, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(operator.H @ z[:37], matrix.T @ z[:37], rtol=1e-4, atol=1e-5)
    top = linalg.svds(operator, k=2, return_singular_vectors=False, random_state=0)
    np.testing.assert_allclose(np.sort(top), np.sort(np.linalg.svd(matrix, compute_uv=False)[:2]), rtol=1e-4)


def test_numpy_takes_it_as_an_array_of_its_weights() -> None:
    amap, dense = made("causal window")
    np.testing.assert_allclose(np.asarray(amap), dense.numpy(), rtol=2e-5, atol=1e-7)
    assert np.asarray(amap, dtype=np.float64).dtype == np.float64
    assert np.mean(amap).item() == pytest.approx(float(dense.mean()))
    assert len(amap) == 2
    empty = torch.zeros(0, 1, 2, 3)
    assert attend(empty, empty, empty, return_map=True)[1]
    assert [one.shape for one in amap] == [dense.shape[1:]] * 2
    with pytest.raises(ValueError, match="stores no weights"):
        np.array(amap, copy=False)


def test_one_head_is_a_map_of_its_own() -> None:
    amap, dense = made("nothing for some")
    one = amap.head(1, 3)
    torch.testing.assert_close(one.to_dense()[0, 0].double(), dense[1, 3], rtol=2e-5, atol=1e-7)
    with pytest.raises(ShapeError, match="head=6"):
        amap.head(0, 6)


def test_reading_leaves_no_graph() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    _, amap = attend(q, k, v, return_map=True)
    for read in (amap[0, 0], amap @ torch.ones(53, 1), amap.measure("entropy")["entropy"], amap.pool(4)):
        assert not read.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["torch_blocks", "reference", "auto"])
def test_autocast_narrows_neither_attention_nor_its_map(kernel, dtype):
    q, k, v = torch.randn(3, 2, 3, 19, 8) * 5

    def everything():
        out, amap = attend(q, k, v, mask=Causal(), kernel=kernel, return_map=True, measures=["entropy"])
        return [
            out, amap.lse, amap[:], amap.row(-1), amap @ v, amap.T @ v, amap.pool(5), amap.topk(3)[0], amap.received(),
            amap.diagonals()[1], amap.measured["entropy"], amap.measure("received_mass")["received_mass"],
        ]  # fmt: skip

    plain = everything()
    with torch.autocast("cpu", dtype):
        for one, other in zip(plain, everything(), strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "index", [(slice(0, 0),), (slice(None), slice(0, 0)), (0, 1, slice(2, 2)), (0, 1, slice(None), slice(3, 3))]
)
def test_a_tile_may_be_empty(index):
    q, k, v = torch.randn(3, 2, 3, 5, 4)
    amap = attend(q, k, v, return_map=True)[1]
    assert amap[index].shape == torch.empty(2, 3, 5, 5)[index].shape


def test_a_map_of_a_graph_holds_none_of_it() -> None:
    q, k, v = qkv(n=5, m=7)
    weight = torch.ones(k.shape[-1], requires_grad=True)
    _, amap = attend(q * weight, k * weight, v, return_map=True)
    assert not any(isinstance(x, torch.Tensor) and x.requires_grad for x in vars(amap).values())
    assert torch.equal(copy.deepcopy(amap)[:], amap[:])


def test_integers_of_numpy_and_of_torch_are_indices() -> None:
    amap, _ = made()
    for one in (np.int64(1), torch.tensor(1)):
        assert torch.equal(amap[one, ..., one], amap[1, ..., 1])
    for wrong in (np.arange(3), torch.arange(3), torch.tensor(1.5), 1.5, True, None):
        with pytest.raises(ShapeError, match="expected an integer or a slice as query index"):
            amap[0, 0, wrong]


def test_integers_of_numpy_and_of_torch_are_numbers() -> None:
    amap, _ = made()
    for one in (np.int64(1), torch.tensor(1)):
        assert torch.equal(amap.head(one, one)[:], amap.head(1, 1)[:])
        assert torch.equal(amap.topk(one)[1], amap.topk(1)[1])
        assert amap.pooled(slice(None), slice(None), one).mean.shape == amap.shape
        assert torch.equal(amap.pool(one), amap.pool(1))
        assert repr(Window(one)) == "Window(left=1, right=0)"
    with pytest.raises(ConfigError, match=r"k=True.*expected a whole number"):
        amap.topk(True)


def test_a_head_has_its_own_count_of_values_that_are_not_finite() -> None:
    q, k, v = qkv(n=5, m=7)
    v[1, 2, 3, :2] = torch.nan
    _, amap = attend(q, k, v, return_map=True)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            assert amap.head(b, h).nonfinite_values.tolist() == [[2 if (b, h // group) == (1, 2) else 0]]


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda amap: amap.topk(1.5), r"topk\(k=1.5\)"),
        (lambda amap: amap.pool(None), r"pool\(size=None\)"),
        (lambda amap: amap.head("a", 0), r"head\(batch='a'\)"),
        (lambda amap: amap.pooled(slice(0, 3), slice(0, 3), 0.5), r"pooled\(cell=0.5\)"),
        (lambda amap: amap @ amap, "expected a tensor of real numbers, got AttentionMap"),
        (lambda amap: amap @ np.zeros((53, 2)), "expected a tensor of real numbers, got ndarray"),
        (lambda amap: amap.T @ torch.zeros(37, 2, dtype=torch.complex64), "got torch.complex64"),
    ],
)
def test_wrong_arguments_are_named(read: Callable[[AttentionMap], object], message: str) -> None:
    with pytest.raises((ConfigError, DTypeError), match=message):
        read(made()[0])


def test_a_map_without_queries_has_no_diagonals() -> None:
    q, k, v = qkv(n=0, m=1)
    offsets, means = attend(q, k, v, return_map=True)[1].diagonals()
    assert (offsets.numel(), means.shape[-1]) == (0, 0)
