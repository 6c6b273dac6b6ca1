"""Which heads are alike, by their outputs and by their weights: against dense formulas in float64."""

import itertools
import json
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from headwise.analysis.flow import circuit_similarity, composition, principal_angles, subspace_overlap
from headwise.analysis.information import output_similarities
from headwise.analysis.linear import _by_pairs, _by_rows, inner_products
from headwise.analysis.similarity import HeadSimilarity
from headwise.errors import ConfigError, DTypeError, ShapeError


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def outputs_of(b: int = 2, heads: tuple[int, ...] = (3, 5), n: int = 29, d: int = 7, **more: object) -> list[Tensor]:
    return [normal(b, h, n, d, seed=k, **more) for k, h in enumerate(heads)]  # type: ignore[arg-type]


def weights_of(layers: int = 2, h: int = 6, h_kv: int = 3, width: int = 31, d: int = 5) -> list[dict[str, Tensor]]:
    shapes = {"q": (h, width, d), "k": (h_kv, width, d), "v": (h_kv, width, d), "o": (h, d, width)}
    return [{s: normal(*shape, seed=9 * k + i) for i, (s, shape) in enumerate(shapes.items())} for k in range(layers)]


def flat(outputs: list[Tensor]) -> list[Tensor]:
    """Each head's [b·n, d] in float64."""
    return [x[:, h].reshape(-1, x.shape[-1]).double() for x in outputs for h in range(x.shape[1])]


def rotation(d: int, seed: int = 5) -> Tensor:
    return torch.linalg.qr(normal(d, d, seed=seed, dtype=torch.float64)).Q


def table(heads: list[Tensor], formula) -> Tensor:
    return torch.tensor([[float(formula(x, y)) for y in heads] for x in heads], dtype=torch.float64)


def cosine(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum() / (x.norm() * y.norm())


def cka(x: Tensor, y: Tensor) -> Tensor:
    x, y = x - x.mean(0), y - y.mean(0)
    return (y.T @ x).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm())


@pytest.mark.thorough
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(2, 40), st.integers(1, 9))
def test_cosine_and_cka_equal_the_dense_formulas(b: int, heads: list[int], n: int, d: int) -> None:
    outputs = outputs_of(b, tuple(heads), n, d)
    found = output_similarities(outputs, ["cosine", "cka"])
    for kind, formula in (("cosine", cosine), ("cka", cka)):
        torch.testing.assert_close(found[kind].matrix, table(flat(outputs), formula), rtol=0, atol=3e-6)
        assert found[kind].names == tuple(f"L{k}H{h}" for k, count in enumerate(heads) for h in range(count))


def test_what_is_written_is_compared_in_one_basis() -> None:
    outputs, weights = outputs_of(heads=(6, 6), d=5), weights_of()
    written = [x @ w for x, w in zip(flat(outputs), torch.cat([w["o"] for w in weights]).double(), strict=True)]
    found = output_similarities(outputs, ["written"], weights=weights)["written"]
    torch.testing.assert_close(found.matrix, table(written, cosine), rtol=0, atol=3e-6)


@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e18])
def test_equal_opposite_turned_and_orthogonal_heads(scale: float) -> None:
    x = normal(1, 1, 50, 8)
    y = torch.zeros_like(x)
    x[..., 4:], y[..., 4:] = 0, normal(1, 1, 50, 4, seed=3)
    turned = (x.double() @ rotation(8)).float() * 7 + 3
    one = torch.cat((x, -2 * x, y, turned), 1) * scale
    found = output_similarities([one, one[:, :1]], ["cosine", "cka"])
    assert found["cosine"]["L0H0", "L1H0"] == pytest.approx(1, abs=1e-6)
    assert found["cosine"]["L0H0", "L0H1"] == pytest.approx(-1, abs=1e-6)
    assert found["cosine"]["L0H0", "L0H2"] == 0
    for name in ("L1H0", "L0H1", "L0H3"):
        assert found["cka"]["L0H0", name] == pytest.approx(1, abs=1e-5)
    assert found["cka"]["L0H0", "L0H2"] < 0.3


def test_cka_of_features_that_never_vary_together_is_zero() -> None:
    one = torch.zeros(1, 2, 8, 2)
    signs = torch.tensor([[1.0, 1, 1, 1, -1, -1, -1, -1], [1, -1, 1, -1, 1, -1, 1, -1]])
    one[0, 0, :, 0], one[0, 1, :, 1] = signs
    assert output_similarities([one], ["cka"])["cka"]["L0H0", "L0H1"] == pytest.approx(0, abs=1e-12)


def test_a_head_that_says_nothing_is_like_none() -> None:
    (one,) = outputs_of(heads=(3,))
    one[:, 1] = 0
    kinds = ["cosine", "cka", "mutual_information", "written"]
    weights = [{"o": normal(3, 7, 11)}]
    for found in output_similarities([one], kinds, weights=weights, corrected=False).values():
        assert not found.matrix[1].any()
        assert not found.matrix[:, 1].any()
        assert bool(found.matrix[0, 0] > 0)
    one[:, 1] = 5.3
    assert not output_similarities([one], ["cka"])["cka"].matrix[1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    outputs = outputs_of(dtype=dtype)
    found = output_similarities(outputs, ["cka"])["cka"]
    atol = 1e-12 if dtype == torch.float64 else 3e-6
    torch.testing.assert_close(found.matrix, table(flat(outputs), cka), rtol=0, atol=atol)


def padded(outputs: list[Tensor], before: int, after: int) -> tuple[list[Tensor], Tensor]:
    """The same tokens among padding whose outputs are large, NaN in one of them; and which tokens are real, [b, n]."""
    found = []
    for x in outputs:
        b, h, _, d = x.shape
        first, last = (100 * normal(b, h, count, d, seed=count, dtype=x.dtype) for count in (before, after))
        first[0, 0, 0] = torch.nan
        found.append(torch.cat((first, x, last), 2))
    b, _, n, _ = outputs[0].shape
    real = torch.arange(before + n + after)
    return found, ((real >= before) & (real < before + n)).expand(b, -1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
def test_padding_does_not_count(dtype: torch.dtype) -> None:
    kinds = ("cosine", "cka", "mutual_information")
    outputs = outputs_of()
    given_, mask = padded(outputs, 4, 3)
    alone, found = output_similarities(outputs, kinds), output_similarities(given_, kinds, mask=mask.to(dtype))
    for kind in kinds:
        torch.testing.assert_close(found[kind].matrix, alone[kind].matrix)


def test_bad_masks_are_named() -> None:
    outputs = outputs_of(b=2, n=29)
    for mask, error, text in (
        (torch.ones(2, 29), DTypeError, "mask: expected a boolean tensor"),
        (torch.ones(2, 28).bool(), ShapeError, r"mask: shape \(2, 28\), expected \[2, 29\]"),
        (torch.full((2, 29), -7), ConfigError, "mask: has the value -7"),
        (torch.zeros(2, 29).bool(), ConfigError, "mask: is False for all tokens"),
    ):
        with pytest.raises(error, match=text):
            output_similarities(outputs, mask=mask)


def test_one_token() -> None:
    found = output_similarities(outputs_of(1, (2,), 1, 3), ["cosine", "cka", "mutual_information"], corrected=False)
    assert found["cosine"]["L0H0", "L0H0"] == pytest.approx(1)
    assert not found["cka"].matrix.any()
    assert not found["mutual_information"].matrix.any()


def test_bad_outputs_are_named() -> None:
    good = outputs_of()
    bad = [good[0], good[1].clone()]
    bad[1][0, 2, 3, 4] = torch.nan
    bad[1][1, 4, 3, 4] = torch.inf
    cases = [
        (bad, {}, ConfigError, r"outputs\[1\]: 2 entries of head 2, 4"),
        ([], {}, ShapeError, "outputs: got none"),
        (good[0], {}, DTypeError, "one tensor"),
        ([good[0].long()], {}, DTypeError, r"outputs\[0\].*int64"),
        ([good[0][0]], {}, ShapeError, r"outputs\[0\]"),
        ([good[0], good[1][:, :, :28]], {}, ShapeError, r"outputs\[1\].*29"),
        (good, {"kinds": ["cosine", "shape"]}, ConfigError, "kinds='shape'"),
        (good, {"kinds": ["written"]}, ConfigError, "weights"),
        (good, {"kinds": ["written"], "weights": weights_of(d=7)}, ShapeError, r"weights\[0\]\['o'\].*\(3, 7\)"),
        (good, {"kinds": ["written"], "weights": [{"o": normal(3, 7, 4)}]}, ShapeError, "1 layers, expected the 2"),
        (good, {"kinds": ["mutual_information"], "shrinkage": 1.0}, ConfigError, "shrinkage=1.0"),
    ]
    for outputs, options, error, words in cases:
        with pytest.raises(error, match=words):
            output_similarities(outputs, **options)  # type: ignore[arg-type]


@pytest.mark.thorough
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6), st.integers(2, 23), st.integers(2, 19), st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_inner_products_by_pairs_and_by_rows(h: int, tall: int, side: int, d: int, e: int, alike: bool) -> None:
    def factors(rank: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
        left = [normal(h, tall, rank, seed=seed), normal(h + 1, tall, rank, seed=seed + 1)]
        return left, left if alike else [normal(len(x), side, rank, seed=seed + 7) for x in left]

    def whole(pair: tuple[list[Tensor], list[Tensor]]) -> Tensor:
        return torch.cat([x.double() @ y.double().mT for x, y in zip(*pair, strict=True)]).flatten(1)

    one, two = factors(d, 0), factors(e, 20)
    for other, same in ((two, False), (one, True)):
        expected = whole(one) @ whole(other).T
        for way in (_by_pairs, _by_rows):
            torch.testing.assert_close(way(one, other, same, alike), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(inner_products(one), whole(one) @ whole(one).T, rtol=1e-5, atol=1e-4)


def test_rows_of_products_come_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = [normal(3, 40, 4)], [normal(3, 30, 4, seed=1)]
    expected = _by_rows((left, right), (left, right), True, False), _by_rows((left, left), (left, left), True, True)
    monkeypatch.setattr("headwise.analysis.linear.ELEMENTS", 700)
    torch.testing.assert_close(_by_rows((left, right), (left, right), True, False), expected[0], rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(_by_rows((left, left), (left, left), True, True), expected[1], rtol=1e-6, atol=1e-4)


def full(weights: list[dict[str, Tensor]], one: str, two: str) -> list[Tensor]:
    """W_one W_twoᵀ (or W_V W_O) of each query head, [d_model, d_model]."""
    found = []
    for layer in weights:
        for i in range(layer["q"].shape[0]):
            x, y = (layer[s][i * layer[s].shape[0] // layer["q"].shape[0]].double() for s in (one, two))
            found.append(x @ (y if two == "o" else y.T))
    return found


def test_circuits_equal_the_dense_formula() -> None:
    weights = weights_of()
    for circuit, factors in (("qk", "qk"), ("ov", "vo")):
        found = circuit_similarity(weights, circuit)
        expected = table(full(weights, *factors), cosine)
        torch.testing.assert_close(found.matrix, expected, rtol=0, atol=3e-6)
    same = weights_of(1)
    turn = rotation(5).float()
    same[0]["q"][4], same[0]["k"] = same[0]["q"][5] @ turn, same[0]["k"]
    same[0]["k"] = same[0]["k"].repeat_interleave(2, 0)
    same[0]["k"][4] = same[0]["k"][5] @ turn
    assert circuit_similarity(same, "qk")["L0H4", "L0H5"] == pytest.approx(1, abs=1e-5)


@pytest.mark.thorough
def test_composition_equals_the_dense_formula() -> None:
    weights = weights_of(3)
    writes = full(weights, "v", "o")
    for kind, pair in (("q", "qk"), ("k", "kq"), ("v", "vo")):
        found = composition(weights, kind)
        reads = full(weights, *pair)
        for i, a in enumerate(writes):
            for j, b in enumerate(reads):
                expected = (a @ b).norm() / (a.norm() * b.norm()) if i // 6 < j // 6 else 0.0
                assert float(found.matrix[i, j]) == pytest.approx(float(expected), abs=1e-4)
        assert found.chance == pytest.approx(31**-0.5)
        with pytest.raises(ConfigError, match="cannot be grouped"):
            found.groups(2)
        assert found.pairs(1)[0].value == found.matrix.max()
        assert "writes" in repr(found)


def test_a_head_that_reads_nothing_of_what_is_written() -> None:
    weights = weights_of(2)
    for layer, half in zip(weights, (slice(0, 15), slice(15, 31)), strict=True):
        layer["o"][..., half] = 0
        for side in "qkv":
            keep = torch.zeros(31)
            keep[slice(0, 15)] = 1
            layer[side] *= keep[:, None]
    # Layer 0 writes to dimensions 15 … 30, layer 1 reads dimensions 0 … 14.
    for kind in "qkv":
        assert float(composition(weights, kind).matrix.max()) < 1e-3


def test_composition_by_chance_is_what_turned_heads_have() -> None:
    weights = weights_of(2, 12, 12, 47, 5)
    found = composition(weights, "v")
    between = found.matrix[:12, 12:].square().mean().sqrt()
    assert float(between) == pytest.approx(found.chance, rel=0.05)


@pytest.mark.thorough
def test_overlap_is_the_mean_squared_cosine_of_the_angles() -> None:
    weights = weights_of()
    for side, letter in (("q", "H"), ("o", "H"), ("k", "KV"), ("v", "KV")):
        found = subspace_overlap(weights, side)
        columns = torch.cat([w[side].mT if side == "o" else w[side] for w in weights]).double()
        expected = table(list(columns), lambda x, y: principal_angles(x, y).cos().square().mean())
        torch.testing.assert_close(found.matrix, expected, rtol=0, atol=3e-6)
        assert found.names[0] == f"L0{letter}0"
        assert found.chance == pytest.approx(5 / 31)


def test_subspaces_of_lower_rank_and_of_nothing() -> None:
    weights = [{"q": normal(4, 31, 5)}]
    weights[0]["q"][1] = weights[0]["q"][0] @ normal(5, 5, seed=8)  # the same subspace
    weights[0]["q"][2, :, 3:] = weights[0]["q"][2, :, :2] * 2  # three dimensions
    weights[0]["q"][3] = 0
    found = subspace_overlap(weights, "q")
    assert found["L0H0", "L0H1"] == pytest.approx(1, abs=1e-5)
    inside = principal_angles(weights[0]["q"][0], weights[0]["q"][2, :, :3]).cos().square().mean()
    assert found["L0H0", "L0H2"] == pytest.approx(float(inside), abs=1e-5)
    assert found.matrix[3].tolist() == [0, 0, 0, 0]


def test_principal_angles_are_those_of_scipy() -> None:
    linalg = pytest.importorskip("scipy.linalg")
    one, two = normal(3, 31, 5, dtype=torch.float64), normal(3, 31, 7, seed=1, dtype=torch.float64)
    two[1, :, :2] = one[1, :, 1:3] + 1e-3 * normal(31, 2, seed=4, dtype=torch.float64)
    found = principal_angles(one, two)
    assert found.shape == (3, 5)
    for k in range(3):
        np.testing.assert_allclose(found[k], np.sort(linalg.subspace_angles(one[k], two[k])), rtol=1e-6)
    same = principal_angles(one, one @ rotation(5))
    assert float(same.max()) < 1e-13
    eye = torch.eye(8, dtype=torch.float64)
    for angle in (1e-12, 1e-6, 0.7, 1.5):
        turned = torch.stack((np.cos(angle) * eye[0] + np.sin(angle) * eye[5], eye[1]), 1)
        assert principal_angles(eye[:, :2], turned).tolist() == pytest.approx([0, angle], rel=1e-9, abs=1e-20)
    assert principal_angles(eye[:, :3], eye[:, 3:]).tolist() == [np.pi / 2] * 3
    with pytest.raises(ConfigError, match="two: 2 columns span only 1"):
        principal_angles(eye[:, :3], torch.ones(8, 2))
    with pytest.raises(ShapeError, match="two: columns of 7"):
        principal_angles(eye[:, :3], eye[:7, :3])


def test_bad_weights_are_named() -> None:
    weights = weights_of()
    broken = [weights[0], {**weights[1], "q": weights[1]["q"] * torch.nan}]
    uneven = [{**weights[0], "k": normal(4, 31, 5)}]
    cases = [
        (lambda: circuit_similarity(broken, "qk"), ConfigError, r"weights\[1\]\['q'\]: 930"),
        (lambda: circuit_similarity(uneven, "qk"), ShapeError, r"weights\[0\]\['k'\]: 4 heads.*6"),
        (lambda: circuit_similarity([{"q": normal(2, 3, 4)}], "qk"), DTypeError, r"weights\[0\]\['k'\]"),
        (lambda: circuit_similarity(weights, "vo"), ConfigError, "circuit='vo'"),
        (lambda: composition(weights, "x"), ConfigError, "kind='x'"),
        (lambda: subspace_overlap([], "q"), ShapeError, "weights: got none"),
        (lambda: subspace_overlap([weights[0], weights_of(d=6)[0]], "q"), ShapeError, r"weights\[1\]\['q'\].*31, 5"),
    ]
    for call, error, words in cases:
        with pytest.raises(error, match=words):
            call()


def families() -> HeadSimilarity:
    """Three families of four, three and two heads, over two layers of five and four."""
    sources = [normal(2, 1, 60, 6, seed=k) for k in range(3)]
    member = [0, 1, 2, 0, 1, 0, 2, 1, 0]
    noise = normal(2, 9, 60, 6, seed=11) * 0.2
    heads = torch.cat([sources[k] for k in member], 1) + noise
    return output_similarities([heads[:, :5], heads[:, 5:]], ["cosine"])["cosine"]


@pytest.mark.parametrize("heads", [2, 3, 7])
def test_heads_stand_in_the_best_order_of_the_tree(heads: int) -> None:
    """Of all turns of the branches of SciPy's tree."""
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    for seed in range(5):
        far = torch.cdist(*[normal(heads, 3, seed=seed, dtype=torch.float64)] * 2)
        alike = HeadSimilarity("distance", tuple(f"L0H{head}" for head in range(heads)), far, far)
        tree = hierarchy.linkage(far[tuple(torch.triu_indices(heads, heads, 1))].numpy(), "average")
        ours = alike.linkage.copy()
        assert hierarchy.leaves_list(ours).tolist() == alike.order
        ours[:, :2].sort()
        np.testing.assert_allclose(ours, tree)
        lengths = []
        for turns in itertools.product((1, -1), repeat=heads - 1):
            turned = np.stack([[*row[:2][::turn], *row[2:]] for row, turn in zip(tree, turns, strict=True)])
            lengths.append(length(far, hierarchy.leaves_list(turned).tolist()))
        assert length(far, alike.order) == pytest.approx(min(lengths))


def length(far: Tensor, order: list[int]) -> float:
    """The sum of the distances between neighbours."""
    return float(far[order[:-1], order[1:]].sum())


def test_heads_are_grouped_by_likeness() -> None:
    pytest.importorskip("scipy")
    found = families()
    expected = [["L0H0", "L0H3", "L1H0", "L1H3"], ["L0H1", "L0H4", "L1H2"], ["L0H2", "L1H1"]]
    for groups in (found.groups(), found.groups(3), found.groups(within=0.5)):
        assert [sorted(group) for group in groups] == expected
    assert len(found.groups(within=0.0)) == 9
    assert len(found.groups(1)) == 1
    assert sorted(found.order) == list(range(9))
    ordered = [found.names[i] for i in found.order]
    for group in expected:
        places = [ordered.index(name) for name in group]
        assert max(places) - min(places) == len(group) - 1
    for options, words in (
        ({"count": 0}, "count=0"),
        ({"count": 2, "within": 1.0}, "within=1.0"),
        ({"within": -1.0}, "-1"),
    ):
        with pytest.raises(ConfigError, match=words):
            found.groups(**options)  # type: ignore[arg-type]


def test_silhouettes_choose_as_scikit_learn_would() -> None:
    """Mean silhouettes by their definition, a head at a time."""
    pytest.importorskip("scipy")
    from scipy.cluster.hierarchy import fcluster

    found = families()
    assert found.distance is not None
    far = found.distance.numpy()

    def mean(labels: np.ndarray) -> float:
        scores = []
        for i in range(len(labels)):
            own = [far[i, j] for j in range(len(labels)) if labels[j] == labels[i] and j != i]
            if not own:
                scores.append(0.0)
                continue
            a = np.mean(own)
            b = min(far[i, labels == k].mean() for k in set(labels.tolist()) - {labels[i]})
            scores.append((b - a) / max(a, b))
        return float(np.mean(scores))

    tried = {k: mean(fcluster(found.linkage, k, "maxclust")) for k in range(2, 9)}
    assert len(found.groups()) == max(tried, key=lambda k: tried[k])


def test_one_head_is_a_group_of_its_own() -> None:
    pytest.importorskip("scipy")
    one = output_similarities(outputs_of(heads=(1,)))["cosine"]
    assert (one.order, one.groups(), one.pairs()) == ([0], [["L0H0"]], [])
    assert "1 heads" in repr(one)
    two = output_similarities(outputs_of(heads=(2,)))["cosine"]
    assert len(two.groups()) == 1


def test_the_result_prints_and_saves_itself(tmp_path) -> None:
    pytest.importorskip("scipy")
    found = families()
    best = found.pairs(1)[0]
    off = found.matrix.clone().fill_diagonal_(-2)
    assert best.value == off.max() == found[best.names]
    assert repr(found).splitlines()[0] == "cosine of outputs, 9 heads"
    assert len(repr(found).splitlines()) == 12
    assert found._repr_html_().count("<tr>") == 11
    found.save(tmp_path / "alike.json", grouped=True)
    read = json.loads((tmp_path / "alike.json").read_text())
    assert read["matrix"] == found.matrix.tolist()
    assert read["groups"] == found.groups()
    assert [p.name for p in tmp_path.iterdir()] == ["alike.json"]
    with pytest.raises(ConfigError, match="'L7H0'"):
        found["L7H0", "L0H0"]
    with pytest.raises(ConfigError, match="count=0"):
        found.pairs(0)


def test_without_scipy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("scipy", "scipy.cluster", "scipy.cluster.hierarchy"):
        monkeypatch.setitem(sys.modules, name, None)
    found = output_similarities([torch.randn(1, 3, 9, 2)])["cka"]
    assert repr(found)
    assert found.to_json()
    assert sorted(found.order) == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"groups.*requires scipy: pip install scipy"):
        found.groups()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_distances_that_are_not_finite_have_no_tree(bad: float) -> None:
    far = torch.ones(4, 4, dtype=torch.float64)
    far[1, 2] = far[2, 1] = bad
    with pytest.raises(ConfigError, match="distance has entries that are NaN or infinite"):
        _ = HeadSimilarity("distance", ("L0H0", "L0H1", "L0H2", "L0H3"), far, far).order
