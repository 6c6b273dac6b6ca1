"""Rollout and flow against products of dense matrices, and against maximum flow by linear programming."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from headwise.analysis import flow
from headwise.analysis.flow import attention_flow, rollout
from headwise.errors import ConfigError, ShapeError
from headwise.map import AttentionMap
from headwise.map.attention import attend
from headwise.masks import Causal, Lengths, Mask


def maps_of(layers: int, n: int, b: int = 1, heads: tuple[int, int] = (4, 2), mask: Mask | None = None,
            dtype: torch.dtype = torch.float32) -> list[AttentionMap]:  # fmt: skip
    found = []
    for k in range(layers):
        g = torch.Generator().manual_seed(k)
        q, key = (torch.randn(b, h, n, 6, generator=g).to(dtype) * 2 for h in heads)
        found.append(attend(q, key, key, mask=mask, return_map=True)[1])
    return found


def dense(maps: list[AttentionMap], residual: float = 0.5, head_weights: list[Tensor] | None = None) -> list[Tensor]:
    """Ã of each layer, [b, n, n] float64."""
    mixed = []
    for k, amap in enumerate(maps):
        h, n = amap.shape[1:3]
        share = torch.ones(h) if head_weights is None else head_weights[k]
        share = (share / share.sum()).double()
        weights = torch.einsum("h,bhij->bij", share, amap.to_dense().double())
        mixed.append((1 - residual) * weights + residual * torch.eye(n, dtype=torch.float64))
    return mixed


def product(mixed: list[Tensor]) -> Tensor:
    whole = mixed[0]
    for layer in mixed[1:]:
        whole = layer @ whole
    return whole


@pytest.mark.thorough
@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 19), st.integers(1, 3), st.sampled_from([(1, 1), (6, 2), (3, 3)]),
    st.sampled_from([None, Causal()]), st.sampled_from([0.0, 0.3, 0.5, 1.0]),
)  # fmt: skip
def test_rollout_equals_the_product_of_the_dense_maps(
    layers: int, n: int, b: int, heads: tuple[int, int], mask: Mask | None, residual: float
) -> None:
    maps = maps_of(layers, n, b, heads, mask)
    shares = [torch.arange(1.0, heads[0] + 1) for _ in maps]
    for options in ({}, {"head_weights": shares}):
        whole = product(dense(maps, residual, **options))  # type: ignore[arg-type]
        lazy = rollout(maps, residual=residual, **options)  # type: ignore[arg-type]
        assert lazy.shape == lazy.T.shape == (b, n, n)
        x = torch.randn(b, n, 3, generator=torch.Generator().manual_seed(9))
        close = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close((lazy @ x).double(), whole @ x.double(), **close)
        torch.testing.assert_close((lazy.T @ x).double(), whole.mT @ x.double(), **close)
        torch.testing.assert_close((lazy @ x[0]).double(), whole @ x[0].double(), **close)
        torch.testing.assert_close((lazy @ x[0, :, 0]).double(), whole @ x[0, :, 0].double(), **close)
        for i in (0, n - 1, -1):
            torch.testing.assert_close(lazy.row(i).double(), whole[:, i], **close)
        assert lazy.T.T is lazy


def test_rows_sum_to_one_and_nothing_comes_from_ahead() -> None:
    lazy = rollout(maps_of(3, 200, 2, mask=Causal()))
    torch.testing.assert_close(lazy @ torch.ones(200), torch.ones(2, 200), rtol=0, atol=1e-5)
    row = lazy.row(50)
    assert not row[:, 51:].any()
    assert bool((row[:, :51] > 0).all())
    assert repr(lazy) == "Rollout(3 layers, 2 × 200 × 200, residual 0.5; not stored)"


def test_only_the_residual_is_the_identity() -> None:
    x = torch.randn(31, 2)
    torch.testing.assert_close((rollout(maps_of(4, 31), residual=1.0) @ x)[0], x)


def test_queries_that_see_nothing_keep_their_residual() -> None:
    maps = maps_of(2, 11, 2, mask=Lengths([7, 11], [7, 11]))
    sums = rollout(maps) @ torch.ones(11)
    assert sums[0, 7:].tolist() == [0.25] * 4
    torch.testing.assert_close(sums[1], torch.ones(11))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    maps = maps_of(3, 23, 2, mask=Causal(), dtype=dtype)
    torch.testing.assert_close(rollout(maps).row(-1).double(), product(dense(maps))[:, -1], rtol=1e-5, atol=1e-5)


def test_layers_differ_in_dtype() -> None:
    kinds = torch.float32, torch.float64, torch.bfloat16
    maps = [maps_of(1, 7, dtype=dtype)[0] for dtype in kinds]
    x, whole = torch.randn(1, 7, 2), product(dense(maps))
    torch.testing.assert_close((rollout(maps) @ x).double(), whole @ x.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close((rollout(maps).T @ x).double(), whole.mT @ x.double(), rtol=1e-5, atol=1e-6)


def test_bad_arguments_are_named() -> None:
    maps = maps_of(2, 9)
    wide = attend(*(torch.randn(1, 2, n, 4) for n in (5, 9, 9)), return_map=True)[1]
    cases = [
        (lambda: rollout([]), ShapeError, "maps: got none"),
        (lambda: rollout([wide]), ShapeError, "5 queries × 9 keys"),
        (lambda: rollout(maps, residual=1.5), ConfigError, "residual=1.5"),
        (lambda: rollout(maps, head_weights=[torch.ones(4)]), ShapeError, "1 layers, expected the 2"),
        (lambda: rollout(maps, head_weights=[torch.ones(4), torch.ones(3)]), ShapeError, r"head_weights\[1\].*\(4,\)"),
        (lambda: rollout(maps, head_weights=[torch.ones(4), -torch.ones(4)]), ConfigError, r"head_weights\[1\]"),
        (lambda: rollout(maps, head_weights=[torch.zeros(4)] * 2), ConfigError, r"head_weights\[0\]"),
        (lambda: rollout(maps) @ torch.ones(8), ShapeError, r"\(8,\).*9"),
        (lambda: rollout(maps) @ torch.ones(2, 9, 1), ShapeError, r"\(2, 9, 1\)"),
        (lambda: rollout(maps).row(9), IndexError, "position 9"),
    ]
    for call, error, words in cases:
        with pytest.raises(error, match=words):
            call()


def flow_by_linear_program(mixed: list[np.ndarray], token: int, position: int) -> float:
    """Maximum flow: what enters a node leaves it, no edge carries more than its weight."""
    optimize = pytest.importorskip("scipy.optimize")
    n, layers = len(mixed[0]), len(mixed)
    edges = [(k, j, i) for k in range(layers) for i in range(n) for j in range(n)]
    balance = np.zeros(((layers - 1) * n, len(edges)))
    for e, (k, j, i) in enumerate(edges):
        if k + 1 < layers:
            balance[k * n + i, e] += 1
        if k > 0:
            balance[(k - 1) * n + j, e] -= 1
    bounds = [
        (0, 0 if (k == 0 and j != token) or (k == layers - 1 and i != position) else mixed[k][i, j])
        for k, j, i in edges
    ]
    gain = [-1.0 if k == 0 else 0.0 for k, _, _ in edges]
    equal = {"A_eq": balance, "b_eq": np.zeros(len(balance))} if layers > 1 else {}
    return -float(optimize.linprog(gain, bounds=bounds, **equal).fun)


@pytest.mark.thorough_except("None-1-5-0.5", "mask1-3-5-0.0")
@pytest.mark.parametrize(("layers", "n", "residual"), [(1, 5, 0.5), (2, 6, 0.5), (3, 5, 0.2), (3, 5, 0.0)])
@pytest.mark.parametrize("mask", [None, Causal()])
def test_flow_is_the_maximum_flow(layers: int, n: int, residual: float, mask: Mask | None) -> None:
    pytest.importorskip("scipy")
    maps = maps_of(layers, n, 2, mask=mask)
    mixed = [layer[1].numpy() for layer in dense(maps, residual)]
    for position in (n - 1, 2 - n):
        found = attention_flow(maps, position, batch=1, residual=residual)
        expected = [flow_by_linear_program(mixed, token, position % n) for token in range(n)]
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


def test_flow_through_one_layer_is_the_weight_and_is_never_below_rollout() -> None:
    pytest.importorskip("scipy")
    maps = maps_of(3, 17)
    torch.testing.assert_close(attention_flow(maps[:1], 3), dense(maps[:1])[0][0, 3], rtol=0, atol=1e-7)
    # What rollout adds up over paths is a flow that no pipe is too narrow for.
    assert bool((attention_flow(maps, -1) >= rollout(maps).row(-1)[0].double() - 1e-6).all())


def test_flow_refuses_what_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy")
    maps = maps_of(2, 13)
    monkeypatch.setattr(flow, "MOST_EDGES", 300)
    with pytest.raises(ConfigError, match=r"2 layers of 13 × 13.*rollout"):
        attention_flow(maps, 0)
    for options, words in (
        ({"position": 13}, "position=13: .* −13 to 12"),
        ({"position": 0, "batch": 1}, "batch=1: .* 0 to 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            attention_flow(maps, **options)
    with pytest.raises(ConfigError, match="residual=-1"):
        attention_flow(maps, 0, residual=-1)


def test_norms_of_values_weight_the_columns_and_rows_sum_to_one() -> None:
    maps = maps_of(3, 7, 2, (4, 2), Causal())
    g = torch.Generator().manual_seed(5)
    norms = [torch.rand(2, 4, 7, generator=g) for _ in maps]
    norms[1][0, :, 0] = 0.0  # the first query of layer 1 attends to nothing else
    mixed = []
    for amap, norm in zip(maps, norms, strict=True):
        weights = (amap.to_dense().double() * norm.double()[:, :, None]).sum(1)
        weights = (weights / weights.sum(-1, keepdim=True)).nan_to_num(0.0)
        mixed.append(0.5 * weights + 0.5 * torch.eye(7, dtype=torch.float64))
    whole, lazy = product(mixed), rollout(maps, value_norms=norms)
    eye = torch.eye(7)
    torch.testing.assert_close((lazy @ eye).double(), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close((lazy.T @ eye).double(), whole.mT, rtol=1e-5, atol=1e-6)
    one = attention_flow(maps[:1], 4, value_norms=norms[:1])
    torch.testing.assert_close(one, mixed[0][0, 4], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("norms", "error", "message"), [
    ([torch.ones(1, 4, 5)], ShapeError, "1 layers, expected the 2"),
    ([torch.ones(1, 4, 5), torch.ones(1, 2, 5)], ShapeError, r"value_norms\[1\]: shape \(1, 2, 5\)"),
    ([torch.ones(1, 4, 5), -torch.ones(1, 4, 5)], ConfigError, r"value_norms\[1\]: expected finite numbers ≥ 0"),
])  # fmt: skip
def test_bad_norms_of_values(norms: list[Tensor], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        rollout(maps_of(2, 5), value_norms=norms)
