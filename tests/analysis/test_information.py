"""What heads have to say: information against the formulas for Gaussians, spectra against exact decompositions."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from headwise.analysis.information import COLUMNS, head_information, output_similarities
from headwise.analysis.linear import effective_rank, map_spectrum, squared_weights, surplus
from headwise.errors import ConfigError, ShapeError
from headwise.map import AttentionMap
from headwise.map.attention import attend
from headwise.masks import Causal, Documents, Lengths, Mask, Window
from headwise.scores import SinkLogits
from headwise.table import HeadTable


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def as_outputs(samples: Tensor, heads: int) -> Tensor:
    """[n, h·d] → [1, h, n, d]"""
    return samples.unflatten(1, (heads, -1)).transpose(0, 1)[None]


def information(outputs: list[Tensor], **options: object) -> Tensor:
    return output_similarities(outputs, ["mutual_information"], **options)["mutual_information"].matrix  # type: ignore[arg-type]


def shrunk(samples: Tensor, d: int, gamma: float) -> Tensor:
    """(1 − γ)Σ + γ·mean variance·I, block by block, by its definition."""
    x = samples - samples.mean(0)
    sigma = x.T @ x / len(x)
    noise = torch.cat([sigma.diagonal()[i : i + d].mean().expand(d) for i in range(0, len(sigma), d)])
    return (1 - gamma) * sigma + gamma * torch.diag(noise)


def dense_information(samples: Tensor, d: int, gamma: float, i: int, j: int) -> float:
    sigma = shrunk(samples, d, gamma)
    both = [*range(i * d, i * d + d), *range(j * d, j * d + d)]
    parts = both[:d], both[d:], both
    one, two, joint = (torch.linalg.slogdet(sigma[part][:, part]).logabsdet for part in parts)
    return float(one + two - joint) / 2


@pytest.mark.thorough
@settings(max_examples=15, deadline=None)
@given(st.integers(2, 5), st.integers(1, 6), st.integers(20, 60), st.sampled_from([1e-3, 0.1, 0.7]), st.booleans())
def test_information_equals_the_log_determinants(h: int, d: int, n: int, gamma: float, single: bool) -> None:
    samples = normal(n, h * d) @ normal(h * d, h * d, seed=1)
    outputs = as_outputs(samples.float() if single else samples, h)
    found = information([outputs[:, :1], outputs[:, 1:]], shrinkage=gamma, corrected=False)
    for i in range(h):
        for j in range(h):
            if i != j:
                expected = dense_information(samples, d, gamma, i, j)
                assert float(found[i, j]) == pytest.approx(expected, rel=2e-3 if single else 1e-8, abs=1e-8)


@pytest.mark.thorough
def test_information_of_gaussians_is_not_biased() -> None:
    """The mean over many samples is that of the distribution: ½ ln(|Σ_x||Σ_y| / |Σ_xy|)."""
    d, n = 3, 17
    mix = normal(2 * d, 2 * d, seed=1)
    sigma = mix.T @ mix
    logs = [torch.linalg.slogdet(part).logabsdet for part in (sigma[:d, :d], sigma[d:, d:], sigma)]
    truth = float(logs[0] + logs[1] - logs[2]) / 2
    samples = normal(n, 500 * 2 * d, seed=2).unflatten(1, (500, 2 * d)) @ mix
    found = torch.stack([information([as_outputs(samples[:, k], 2)], shrinkage=0.0)[0, 1] for k in range(500)])
    error = float(found.std() / 500**0.5)
    assert abs(float(found.mean()) - truth) < 4 * error
    plain = information([as_outputs(samples[:, 0], 2)], shrinkage=0.0, corrected=False)
    assert float(plain[0, 1] - found[0]) == pytest.approx(surplus(n, d, d))
    assert surplus(n, d, d) > 8 * error  # or the test could not tell


def test_heads_that_share_nothing_have_none_on_average() -> None:
    """With shrinkage too, where heads differ much in how many dimensions stand out of the noise."""
    d, n, heads = 16, 200, 24
    scale = torch.logspace(0, -3, d, dtype=torch.float64)
    found = information([as_outputs((normal(n, heads * d).unflatten(1, (heads, d)) * scale).flatten(1), heads)])
    between = found[tuple(torch.triu_indices(heads, heads, 1))]
    raw = information(
        [as_outputs((normal(n, heads * d).unflatten(1, (heads, d)) * scale).flatten(1), heads)], corrected=False
    )[tuple(torch.triu_indices(heads, heads, 1))]
    assert float(raw.mean()) > 0.25
    assert abs(float(between.mean())) < 0.03


def test_information_does_not_depend_on_scale_shift_and_rotation() -> None:
    one = normal(1, 3, 80, 5)
    one[:, 2] = one[:, 0] * 0.4 + one[:, 2]
    turn = torch.linalg.qr(normal(5, 5, seed=4)).Q
    other = one.clone()
    other[:, 0] = other[:, 0] @ turn * 1e9 + 3e8
    torch.testing.assert_close(information([one]), information([other]), rtol=1e-6, atol=1e-9)


def test_equal_heads_share_what_the_noise_lets_through() -> None:
    one = normal(1, 1, 4000, 6)
    gamma = 1e-2
    found = information([torch.cat((one, one), 1)], shrinkage=gamma, corrected=False)
    bound = -6 / 2 * math.log(1 - (1 - gamma) ** 2)
    assert float(found[0, 1]) == pytest.approx(bound, rel=1e-2)
    assert float(found[0, 1]) <= bound
    assert float(found[0, 0]) == pytest.approx(float(found[0, 1]))


def test_too_few_tokens_and_singular_heads_are_told() -> None:
    few = [normal(1, 2, 12, 6)]
    with pytest.raises(ConfigError, match="12 tokens, expected more than 12"):
        information(few)
    information(few, corrected=False)
    same = torch.cat((normal(1, 1, 50, 3),) * 2, 1)
    with pytest.raises(ConfigError, match="shrinkage=0"):
        information([same], shrinkage=0.0)
    same[..., 2] = same[..., 1]
    with pytest.raises(ConfigError, match="singular over 50 tokens"):
        information([same], shrinkage=0.0)


def dense_rest(samples: Tensor, d: int, gamma: float, i: int) -> tuple[float, float, float]:
    """Share unexplained, information and degrees of freedom of the regression of head i on the others."""
    sigma = shrunk(samples, d, gamma)
    plain = shrunk(samples, d, 0.0)
    own = list(range(i * d, i * d + d))
    rest = [k for k in range(len(sigma)) if k not in own]
    cross = sigma[own][:, rest]
    inverse = torch.linalg.inv(sigma[rest][:, rest])
    left = sigma[own][:, own] - cross @ inverse @ cross.T
    shared = (torch.linalg.slogdet(sigma[own][:, own]).logabsdet - torch.linalg.slogdet(left).logabsdet) / 2
    freedom = torch.trace(inverse @ ((1 - gamma) * plain[rest][:, rest]))
    return float(left.trace() / sigma[own][:, own].trace()), float(shared), float(freedom)


@pytest.mark.parametrize("gamma", [1e-6, 1e-2, 0.5])
def test_redundancy_equals_the_regression(gamma: float) -> None:
    h, d, n = 4, 3, 53
    samples = normal(n, h * d) @ normal(h * d, h * d, seed=3)
    plain = head_information([as_outputs(samples, h)], shrinkage=gamma, corrected=False)
    mended = head_information([as_outputs(samples, h)], shrinkage=gamma)
    for i in range(h):
        left, shared, freedom = dense_rest(samples, d, gamma, i)
        assert float(plain.column("redundancy")[i]) == pytest.approx(1 - left, rel=1e-6)
        assert float(plain.column("shared")[i]) == pytest.approx(shared, rel=1e-6)
        adjusted = 1 - left * (n - 1) / (n - 1 - freedom)
        assert float(mended.column("redundancy")[i]) == pytest.approx(max(adjusted, 0.0), rel=1e-6, abs=1e-9)
    assert torch.equal(plain.column("complement"), 1 - plain.column("redundancy"))


def test_redundancy_of_known_heads() -> None:
    n, d = 4000, 4
    free = normal(1, 3, n, d)
    mixed = free[:, :1] @ normal(d, d, seed=8) + free[:, 1:2] @ normal(d, d, seed=9)
    half = (free[:, 2:] + normal(1, 1, n, d, seed=6)) / 2**0.5
    found = head_information(
        [torch.cat((free[:, :2], mixed), 1), torch.cat((free[:, 2:], half), 1), free], shrinkage=1e-4
    )
    redundancy = found.column("redundancy").tolist()
    assert redundancy[:3] == pytest.approx([1, 1, 1], abs=0.02)  # any two give the third
    assert redundancy[3:5] == pytest.approx([0.5, 0.5], abs=0.03)
    assert redundancy[5:] == pytest.approx([0, 0, 0], abs=0.01)
    assert found.column("shared").tolist()[3] == pytest.approx(d / 2 * math.log(2), abs=0.05)
    assert found.column("shared").tolist()[5:] == pytest.approx([0, 0, 0], abs=0.02)


def test_few_tokens_explain_nothing_by_chance() -> None:
    found = head_information([normal(1, 12, 200, 8)])
    raw = head_information([normal(1, 12, 200, 8)], corrected=False)
    assert float(raw.column("redundancy").mean()) > 0.35
    assert float(found.column("redundancy").mean()) < 0.05
    with pytest.raises(ConfigError, match=r"96 tokens, expected more than 96 \(12 heads"):
        head_information([normal(1, 12, 96, 8)])


def test_rank_and_capacity_and_their_bounds() -> None:
    n, d, gamma = 3000, 8, 1e-3
    white = torch.linalg.qr(normal(n, d) - normal(n, d).mean(0)).Q
    thin = white.clone()
    thin[:, 3:] = 0
    turned = thin @ torch.linalg.qr(normal(d, d, seed=2)).Q
    found = head_information([torch.stack((white, thin, turned))[None]], shrinkage=gamma, corrected=False)
    assert found.column("output_rank").tolist() == pytest.approx([8, 3, 3], rel=1e-6)
    assert found.column("stable_rank").tolist() == pytest.approx([8, 3, 3], rel=1e-6)
    assert found.about["capacity_bound"] == pytest.approx(4 * math.log(1000))
    narrow = 1.5 * math.log1p((1 - gamma) / gamma * 8 / 3)
    assert found.column("capacity").tolist() == pytest.approx([found.about["capacity_bound"], narrow, narrow], rel=1e-6)
    assert bool((found.column("shared") <= found.column("capacity") + 1e-9).all())


@pytest.mark.thorough
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 2), st.integers(1, 4), st.integers(2, 40), st.integers(1, 9))
def test_bounds_hold_for_any_output(b: int, h: int, n: int, d: int) -> None:
    found = head_information([(normal(b, h, n, d) @ normal(d, d, seed=1)).float()], corrected=False)
    assert bool((found.column("output_rank") <= min(d, b * n) + 1e-4).all())
    assert bool((found.column("stable_rank") <= found.column("output_rank") + 1e-4).all())
    assert bool((found.column("capacity") <= found.about["capacity_bound"] + 1e-4).all())
    assert bool((found.column("shared") <= found.column("capacity") + 1e-3).all())
    assert bool(((found.column("redundancy") >= 0) & (found.column("redundancy") <= 1)).all())


def test_heads_that_say_nothing_one_token_and_a_single_head() -> None:
    one = normal(1, 3, 50, 4)
    one[:, 1] = 7.0
    found = head_information([one])
    assert [float(found.column(name)[1]) for name in found] == [0.0] * 6
    two = head_information([one[:, ::2]])
    torch.testing.assert_close(found.column("redundancy")[::2], two.column("redundancy"), rtol=1e-6, atol=1e-6)
    alone = head_information([one[:, :1]])
    assert float(alone.column("redundancy")) == float(alone.column("shared")) == 0
    single = head_information([normal(1, 2, 1, 3)], corrected=False)
    assert not single.tensor().any()


def map_of(
    n: int, m: int, b: int = 1, h: int = 2, mask: Mask | None = None, seed: int = 0, **more: object
) -> AttentionMap:
    q, k = normal(b, h, n, 8, seed=seed) * 2, normal(b, 1, m, 8, seed=seed + 1)
    return attend(q.float(), k.float(), k.float(), mask=mask, return_map=True, **more)[1]  # type: ignore[call-overload, no-any-return]


MAPS: dict[str, dict[str, object]] = {
    "plain": {}, "causal": {"mask": Causal()}, "window": {"mask": Causal() & Window(4)},
    "padded": {"mask": Lengths([11, 17], [9, 13]), "b": 2}, "sink": {"score": SinkLogits(torch.tensor([0.5, 3.0]))},
}  # fmt: skip


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("size", [(13, 17), (1, 17), (1, 1)])
def test_small_maps_have_their_exact_spectrum(name: str, size: tuple[int, int]) -> None:
    if name == "padded" and size != (13, 17):
        pytest.skip("the lengths are those of 13 × 17")
    amap = map_of(*size, **MAPS[name])  # type: ignore[arg-type]
    exact = torch.linalg.svdvals(amap.to_dense().double())
    found = map_spectrum(amap)
    torch.testing.assert_close(found.singular, exact, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(found.energy, exact.square().sum(-1), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(squared_weights(amap), amap.to_dense().double().square().sum((2, 3)), rtol=1e-6, atol=0)
    for value in (found.effective_rank, found.low, found.high):
        torch.testing.assert_close(value, effective_rank(exact), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(found.stable_rank, exact.square().sum(-1) / exact[..., 0] ** 2, rtol=1e-5, atol=1e-6)
    assert bool((found.captured == 1).all())


@pytest.mark.parametrize("components", [1, 5, 20])
@pytest.mark.parametrize("mask", [None, Causal(), Causal() & Window(9)])
def test_leading_values_and_bounds_of_the_rank(components: int, mask: Mask | None) -> None:
    amap = map_of(151, 173, 2, 3, mask=mask)
    exact = torch.linalg.svdvals(amap.to_dense().double())
    found = map_spectrum(amap, components, passes=10)
    assert found.singular.shape == (2, 3, components)
    assert bool((found.singular <= exact[..., :components] * (1 + 1e-5)).all())
    torch.testing.assert_close(found.singular[..., 0], exact[..., 0], rtol=2e-2, atol=0)
    truth = effective_rank(exact)
    assert bool((found.low <= truth * 1.02).all())
    assert bool((truth <= found.high * 1.001).all())
    assert bool(((found.low <= found.effective_rank) & (found.effective_rank <= found.high)).all())
    captured = found.singular.square().sum(-1) / exact.square().sum(-1)
    torch.testing.assert_close(found.captured, captured, rtol=1e-5, atol=1e-5)
    assert "captured" in repr(found)


def test_the_map_that_copies_has_full_rank_and_the_even_map_rank_one() -> None:
    n = 61
    sharp = torch.eye(n)[None, None] * 200
    _, copies = attend(sharp, sharp, sharp, return_map=True)
    found = map_spectrum(copies, 8)
    for value in (found.low, found.effective_rank, found.high, found.stable_rank):
        assert float(value) == pytest.approx(n, rel=1e-3)
    _, even = attend(sharp * 0, sharp, sharp, return_map=True)
    found = map_spectrum(even, 8)
    assert float(found.low) == pytest.approx(1, abs=1e-3)
    assert float(found.high) == pytest.approx(1, abs=0.1)


def test_effective_rank_is_that_of_roy_and_vetterli() -> None:
    values = torch.tensor([[4.0, 4, 4, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [2, 1, 1, 0, 0]])
    half = 0.5 * math.log(2) + 0.5 * math.log(4)
    assert effective_rank(values).tolist() == pytest.approx([3, 1, 0, math.exp(half)])


def test_bad_options_are_named() -> None:
    good = map_of(5, 7)
    cases = [
        (lambda: map_spectrum(good, 0), ConfigError, "components=0"),
        (lambda: map_spectrum(good, passes=1), ConfigError, "passes=1"),
        (lambda: head_information([normal(1, 3, 9, 2)], [good]), ShapeError, r"heads \[2\].*\[3\]"),
        (lambda: head_information([normal(1, 3, 9, 2)], shrinkage=0.0), ConfigError, "shrinkage=0"),
        (lambda: head_information([normal(1, 3, 9, 2) * torch.nan]), ConfigError, "NaN"),
    ]
    for call, error, words in cases:
        with pytest.raises(error, match=words):
            call()


def test_the_table_has_a_line_a_head_and_saves_itself(tmp_path) -> None:
    maps = [map_of(40, 40, 2, seed=k, mask=Causal()) for k in range(2)]
    found = head_information([normal(2, 2, 40, 5, seed=k) for k in range(2)], maps)
    assert list(found) == list(COLUMNS)
    entropy = torch.cat([amap.measure("entropy")["entropy"].mean(0) for amap in maps])
    torch.testing.assert_close(found.column("entropy"), entropy.double())
    assert len(repr(found).splitlines()) == 6
    assert "rank ≤ 5" in found.title
    assert "80 tokens" in found.title
    assert found._repr_html_().count("<tr>") == 5
    found.save(tmp_path / "heads.json")
    read = HeadTable.load(tmp_path / "heads.json")
    assert read.column("map_rank").tolist() == found.column("map_rank").tolist()
    assert read.about == {"tokens": 80, "value_dim": 5, "shrinkage": 1e-3, "capacity_bound": 2.5 * math.log(1e3)}
    assert read["capacity"].unit == "nats a token"
    assert [p.name for p in tmp_path.iterdir()] == ["heads.json"]


@pytest.mark.thorough
def test_nothing_of_size_n_squared_is_made() -> None:
    """On 9,973 tokens one head's matrix would take 400 MB; the process may take 250 MB more than before."""
    code = (
        "import resource, sys, torch\n"
        "torch.set_num_threads(1)\n"
        "import headwise as hw\n"
        "q = torch.randn(1, 2, 9973, 8)\n"
        "out, amap = hw.attend(q, q, q, mask=hw.Causal() & hw.Window(200), return_map=True)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "hw.analysis.map_divergence([amap], rows=32)\n"
        "hw.analysis.output_similarities([out], ['cosine', 'cka', 'mutual_information'])\n"
        "hw.analysis.head_information([out], [amap], components=4)\n"
        "hw.analysis.rollout([amap]).row(-1)\n"
        "sys.stdout.write(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 250_000  # kB


@pytest.mark.parametrize(("b", "n"), [(1, 20), (2, 40), (1, 80)])
def test_maps_of_another_text_are_refused(b: int, n: int) -> None:
    """Also where the tokens are as many in all, in other rows."""
    q = normal(b, 2, n, 3)
    _, amap = attend(q, q, q, mask=Causal(), return_map=True)
    with pytest.raises(ShapeError, match=rf"maps: {b} × {n} queries, expected the 2 × 20 tokens of outputs"):
        head_information([normal(2, 2, 20, 3)], [amap], components=4)
    assert "map_rank" in head_information([normal(b, 2, n, 3)], [amap], components=4)


def test_padding_counts_neither_by_a_mask_nor_where_maps_hide_it() -> None:
    """Two sentences in one batch, one padded before and one behind, against both in a batch without padding."""
    generator = torch.Generator().manual_seed(8)
    q = torch.randn(2, 3, 40, 4, generator=generator)
    outputs = torch.randn(2, 3, 40, 4, generator=generator)
    outputs[:, 1] += outputs[:, 0]
    real = torch.ones(2, 40, dtype=torch.bool)
    real[0, :6], real[1, 34:] = False, False
    outputs[:, 2] += 3 * outputs[:, 0] * ~real[..., None]  # heads are alike in the padding alone
    mask = Causal() & Documents(real.long() - 1)
    _, amap = attend(q, q, q, mask=mask, return_map=True)
    alone = torch.stack((outputs[0, :, 6:], outputs[1, :, :34]))
    expected = head_information([alone])
    whole = head_information([outputs])
    for found in (head_information([outputs], [amap]), head_information([outputs], mask=real)):
        assert found.about["tokens"] == 68
        for name in ("output_rank", "stable_rank", "capacity", "shared", "redundancy", "complement"):
            torch.testing.assert_close(found[name][0], expected[name][0])
    assert whole.about["tokens"] == 80
    assert not torch.allclose(whole["redundancy"][0], expected["redundancy"][0])
    with pytest.raises(ShapeError, match="mask: shape"):
        head_information([outputs], mask=real[:1])
