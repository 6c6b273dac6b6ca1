"""Statistics requested in a differentiable call have their gradients in the backward kernels of its output."""

import pytest
import torch
from formula import rule
from samples import MASKS, SCORES, qkv
from test_joint_gradients import check, no_tiles  # noqa: F401
from test_map_gradients import assert_alike, gradients, leaves, stored, weights_for
from torch import Tensor
from triton_here import DEVICE, mostly_slow, slow

from headwise.kernels import KERNELS
from headwise.kernels.call import Call
from headwise.kernels.gradients import run_kernel
from headwise.map.attention import attend
from headwise.masks import Causal, Everything, Mask, Window
from headwise.stats import DISTANCE, ENTROPY, KeyWeights, RangeMass, Statistic

WHERE = {"h": 3, "h_kv": 1, "device": DEVICE}


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize(
    "name", mostly_slow(MASKS, "everything", "causal", "window and sinks", "documents", "nothing for some", "dense")
)
def test_masks(name: str) -> None:
    check("triton_gpu", MASKS[name](2, 37, 53), **WHERE)


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize("score", mostly_slow(SCORES, "soft cap", "relative", "bias of keys", "sinks", "all"))
def test_scores(score: str) -> None:
    # Gradients of a table and a bias are sums of thousands of numbers that nearly cancel.
    check("triton_gpu", MASKS["nothing for some"](2, 37, 53), score, bound=2e-5, **WHERE)


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize(
    ("n", "m", "d", "e"), [(45, 61, 64, 64), (33, 70, 96, 80), slow(1, 37, 8, 5), slow(70, 131, 3, 2)]
)
@pytest.mark.parametrize("mask", [Everything(), Causal(), Causal() & Window(20)], ids=["full", "causal", "window"])
def test_sizes(mask: Mask, n: int, m: int, d: int, e: int) -> None:
    check("triton_gpu", mask, b=1, h=2, h_kv=1, n=n, m=m, d=d, e=e, device=DEVICE)


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_half_precision(dtype: torch.dtype, bound: float) -> None:
    check("triton_gpu", Causal(), "", dtype, bound=bound, b=1, h=2, h_kv=1, n=67, m=75, d=16, e=16, device=DEVICE)


def test_numbers_of_the_keys_of_each_entry_and_ranges_of_keys() -> None:
    weights = torch.linspace(-1, 1, 106).view(2, 53)
    statistics = (
        KeyWeights(weights),
        KeyWeights(weights[:1]),
        RangeMass(1, 40, relative=False),
        RangeMass(-3, 1, relative=True),
    )
    found = [joint(name, dtype, statistics) for name, dtype in RUNS]
    assert_alike(*found, 5e-6)


RUNS = ("triton_gpu", torch.float32), ("torch_blocks", torch.float64)


def joint(
    kernel: str, dtype: torch.dtype, statistics: tuple[Statistic, ...], *, output: bool = True, drop: float = 0.0
) -> list[Tensor]:
    """Gradients of q, k and v, of a loss of these statistics and of the output."""
    q, k, v = leaves(*(x.to(DEVICE, dtype) for x in qkv(h=3, h_kv=1)))
    call = Call(q, k, v, rule(q, k, Causal()), drop, 7, statistics, differentiable=True)
    result = run_kernel(KERNELS[kernel], call)
    parts = [result.statistics[one] for one in statistics] + ([result.out] if output else [])
    loss = torch.stack([(x * weights_for(x.cpu()).to(x)).sum() * (at + 1) for at, x in enumerate(parts)]).sum()
    return [x.cpu() for x in gradients(loss, [q, k, v])]


def test_dropout_leaves_the_gradients_of_statistics() -> None:
    """They are those of the weights before it."""
    statistics = ENTROPY, DISTANCE
    both = joint("triton_gpu", torch.float32, statistics, drop=0.3)
    of_statistics = joint("triton_gpu", torch.float32, statistics, output=False)
    of_output = joint("triton_gpu", torch.float32, (), drop=0.3)
    weight = len(statistics) + 1  # of the output in the loss of both
    sums = [x.double() * weight + y.double() for x, y in zip(of_output, of_statistics, strict=True)]
    assert_alike(both, sums, 5e-6)


def test_other_measures_of_such_a_call_have_a_pass_of_their_own() -> None:
    inputs = qkv(b=1, h=2, h_kv=1)
    mine, theirs = leaves(*(x.to(DEVICE) for x in inputs)), leaves(*(x.double() for x in inputs))
    _, amap = attend(
        *mine, mask=Causal(), kernel="triton_gpu", return_map=True, measures=["entropy", "squared_weights"],
        differentiable=True,
    )  # fmt: skip
    t = stored(theirs[0], theirs[1], Causal())
    dense = {"entropy": -(t["p"] * t["log"]).sum(-1), "squared_weights": t["p"].square().sum(-1)}
    got, due = (
        torch.stack([(rows[name] * weights_for(rows[name].cpu()).to(rows[name])).sum() for name in dense]).sum()
        for rows in (amap.measured.rows, dense)
    )
    assert_alike([x.cpu() for x in gradients(got, mine[:2])], gradients(due, theirs[:2]), 5e-6)
