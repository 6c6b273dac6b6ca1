"""Statistics requested in a call have their gradients in the backward pass of its output, without one of their own."""

import pytest
import torch
from samples import MASKS, SCORES, qkv
from test_map_gradients import BOUNDS, B, H, M, N, assert_alike, gradients, leaves, stored, weights_for
from torch import Tensor

from headwise.kernels import KERNELS as KERNELS_BY_NAME
from headwise.kernels.call import Call
from headwise.kernels.gradients import run_kernel
from headwise.map import gradients as of_tiles
from headwise.map.attention import attend
from headwise.masks import Causal, Dense, Grid, Mask
from headwise.rule import Rule
from headwise.scores import Score
from headwise.stats import ClassMass, LocalMass, Measure
from headwise.stats.statistic import OfWeights, Slope


def members(m: int) -> Tensor:
    """A class of keys."""
    return torch.arange(m) % 3 == 1


def measures_of(m: int) -> list[str | Measure]:
    """Measures whose gradients all ride along."""
    return [
        "entropy", "max_logit", "mean_distance", "logsumexp", "previous_mass", ClassMass(members(m)), LocalMass(4),
    ]  # fmt: skip


def of_rows(t: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values of rows of these measures, by their formulas."""
    p, n, m = t["p"], *t["p"].shape[2:]
    away = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
    hidden = torch.where(t["allowed"], t["s"], -torch.inf)
    return {
        "entropy": -(p * t["log"]).sum(-1),
        "max_logit": torch.where(t["lit"][..., None], hidden, 0.0).amax(-1),
        "mean_distance": (p * away.abs()).sum(-1),
        "logsumexp": torch.where(t["lit"], t["lse"], 0.0),
        "previous_mass": (p * (away == -1)).sum(-1),
        "class_mass": p[..., members(m)].sum(-1),
        "local_mass": (p * (away.abs() <= 4)).sum(-1),
    }


@pytest.fixture
def no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass of their own is an error."""

    def refuse(*_: object) -> None:
        raise AssertionError("a measure has a backward pass of its own")

    monkeypatch.setattr(of_tiles.Shares, "pull_back", refuse)


def check(
    kernel: str, mask: Mask, score: str = "", dtype: torch.dtype = torch.float32, *, bound: float | None = None,
    device: str = "cpu", **sizes: int,
) -> None:  # fmt: skip
    by_tiles = {"previous_mass"} if isinstance(mask, Dense) or score == "two biases" else set()  # as it needs spans
    q, k, v = qkv(dtype=dtype, **sizes)
    (b, h, n, _), (h_kv, m) = q.shape, k.shape[1:3]
    measures = [one for one in measures_of(m) if one not in by_tiles]
    mine, theirs = leaves(*(x.to(device) for x in (q, k, v))), leaves(q.double(), k.double(), v.double())
    scores: list[tuple[Score, ...]] = [SCORES[score](b, h, n, m) if score else () for _ in range(2)]
    scores[0] = tuple(part.mapped(lambda t: t.detach().to(device).requires_grad_()) for part in scores[0])
    for held, given in zip((mine, theirs), scores, strict=True):
        for part in given:
            part.mapped(lambda t, held=held: held.append(t) or t)  # type: ignore[misc]
    options = {"return_map": True, "measures": measures, "differentiable": True, "kernel": kernel}
    out, amap = attend(*mine[:3], mask=mask, score=scores[0], **options)  # type: ignore[call-overload]
    assert amap.kernel == kernel
    t = stored(theirs[0], theirs[1], mask, scores[1])
    dense = t["p"] @ theirs[2].repeat_interleave(h // h_kv, 1)
    rows = of_rows(t)
    assert amap.measured.rows.keys() >= {"entropy", "max_logit", "class_mass"}
    loss, due = (out * weights_for(out).to(out)).sum(), (dense * weights_for(dense)).sum()
    for i, (name, got) in enumerate(amap.measured.rows.items()):
        expected = rows[name]
        torch.testing.assert_close(got.cpu().double(), expected, rtol=2e-5, atol=2e-5)
        if name == "max_logit":
            peak = torch.where(t["allowed"], t["s"], -torch.inf).flatten(2).amax(-1)
            lit = t["lit"].any(-1)
            loss = loss + (amap.measured[name] * (weights_for(lit.double()) * lit).to(got)).sum()
            due = due + (torch.where(lit, peak, 0.0) * weights_for(lit.double())).sum()
            continue
        w = weights_for(expected.roll(i, 2))
        loss, due = loss + (got * w.to(got)).sum(), due + (expected * w).sum()
    found = [x.cpu() for x in gradients(loss, mine)]
    if bound is None:  # in the gradient of a bias with one number per row, the terms of a row cancel but for rounding
        bound = 2 * BOUNDS[dtype] if score == "two biases" else BOUNDS[dtype]
    assert_alike(found, gradients(due, theirs), bound, f"{kernel}, {score}, {mask}")


SLOPES = {
    "logs and distance": Slope(logs=0.5, distance=2.0),
    "keys and a range": Slope(keys=torch.linspace(-1, 1, M)[None], within=(-3, 0, True)),
    "all": Slope(-1.0, -0.25, torch.linspace(0, 2, M)[None], (1, 4, False)),
}


@pytest.mark.parametrize("name", SLOPES)
def test_a_slope_is_the_sum_of_its_parts(name: str) -> None:
    slope, found = SLOPES[name], {}
    q, k, v = leaves(*(x.double() for x in qkv()))
    t = stored(q, k, Causal(), ())
    away = torch.arange(M) - (torch.arange(N)[:, None] + M - N)
    part = torch.zeros(1) if slope.keys is None else slope.keys
    if slope.within is not None:
        start, stop, relative = slope.within
        place = away if relative else torch.arange(M).expand_as(away)
        part = part + ((place >= start) & (place < stop)).double()
    value = (t["p"] * (slope.logs * t["log"] + slope.distance * away.abs() + part)).sum(-1)
    statistic = OfWeights("mine", slope=slope)
    rule = Rule(Causal(), q.shape[-1] ** -0.5, Grid(B, H, N, M))
    result = run_kernel(
        KERNELS_BY_NAME["torch_blocks"], Call(q, k, v, rule, statistics=(statistic,), differentiable=True)
    )
    got = result.statistics[statistic]
    torch.testing.assert_close(got, value, rtol=1e-9, atol=1e-9)
    w = weights_for(value)
    for way, x in (("found", got), ("expected", value)):
        found[way] = gradients((x * w).sum(), [q, k])
    assert_alike(found["found"], found["expected"], 1e-10, name)


KERNELS = [("torch_blocks", torch.float64), ("torch_blocks", torch.float32), ("cpu", torch.float32)]


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
@pytest.mark.parametrize("mask", ["everything", "causal", "nothing for some", "dense", "documents"])
def test_masks(kernel: str, dtype: torch.dtype, mask: str) -> None:
    check(kernel, MASKS[mask](B, N, M), "", dtype)


@pytest.mark.thorough_beyond(6)
@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
@pytest.mark.parametrize("score", SCORES)
def test_scores(kernel: str, dtype: torch.dtype, score: str) -> None:
    if (kernel, score) == ("cpu", "two biases"):
        pytest.skip("the kernel refuses their sum")
    check(kernel, MASKS["nothing for some"](B, N, M), score, dtype)


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize("kernel", ["torch_blocks", "cpu"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_half_precision(kernel: str, dtype: torch.dtype, bound: float) -> None:
    check(kernel, MASKS["documents"](B, N, M), "", dtype, bound=bound)


def outputs(kernel: str, given: list[Tensor], **options: object) -> list[Tensor]:
    """The output and the values of `measures_of` of each head, with the same dropout each time."""
    torch.manual_seed(0)
    options |= {"return_map": True, "measures": measures_of(M), "differentiable": True, "kernel": kernel}
    out, amap = attend(*given, mask=Causal(), **options)  # type: ignore[call-overload]
    return [out, *(amap.measured[name] for name in amap.measured)]


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize("kernel", ["torch_blocks", "cpu"])
def test_statistics_are_of_the_weights_before_dropout(kernel: str) -> None:
    """So the gradient is that of the output with dropout, and that of statistics without it."""
    given = leaves(*qkv())
    out, *found = outputs(kernel, given, dropout_p=0.4)
    _, *whole = outputs(kernel, given)
    torch.manual_seed(0)
    alone = attend(*given, mask=Causal(), dropout_p=0.4, kernel=kernel)
    assert float((alone == out).float().mean()) == 1.0
    expected = (alone * weights_for(out)).sum() + sum((x * weights_for(x)).sum() for x in whole)
    loss = (out * weights_for(out)).sum() + sum((x * weights_for(x)).sum() for x in found)
    assert_alike(gradients(loss, given), gradients(expected, given), 2e-6)


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize("kernel", ["torch_blocks", "cpu"])
def test_a_batch_of_gradients(kernel: str) -> None:
    given = leaves(*qkv())
    found = outputs(kernel, given)
    grads = [torch.stack([weights_for(x), weights_for(x).roll(1, 1), torch.zeros_like(x)]) for x in found]
    batched = torch.autograd.grad(found, given, grads, retain_graph=True, is_grads_batched=True)
    for at in range(3):
        alone = torch.autograd.grad(found, given, [g[at] for g in grads], retain_graph=True)
        for x, expected in zip(batched, alone, strict=True):
            torch.testing.assert_close(x[at], expected, rtol=0, atol=0)
