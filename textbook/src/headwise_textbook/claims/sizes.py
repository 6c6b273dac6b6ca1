"""What multi-head attention takes: parameters and operations."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from headwise import attend
from headwise.costs import Work, attention_stages
from headwise.nn import counts_of
from headwise.wording import tr
from headwise_textbook.claims.claim import Check, Plot, at_least, at_most, claim, equal
from headwise_textbook.claims.formulas import formula_of
from headwise_textbook.claims.model import counted, layer, normal, size_of, standard
from headwise_textbook.claims.published import PUBLISHED

# Parameters, counted on layers.


@claim
def four_d_squared() -> list[Check | Plot]:
    d, target = 48, 4 * 48**2
    others: dict[str, dict[str, Any]] = {
        tr("with bias"): {"bias": True},
        tr("two KV heads for eight"): {"num_kv_heads": 2},
        tr("head_dim 16 instead of 6"): {"head_dim": 16},
    }
    heads = 1, 2, 4, 8, 16, 48
    sizes = {h: size_of(standard(d, h)) for h in heads}
    return [
        *(equal(f"h = {h}", sizes[h], target) for h in (1, 2, 8, 48)),
        *(equal(what, size_of(standard(d, 8, **o)), target).beyond() for what, o in others.items()),
        equal(tr("eight heads of size 48"), size_of(standard(d, 8, head_dim=48)), 8 * target).control(),
        Plot({
            tr("no bias"): sizes,
            tr("with bias"): {h: size_of(standard(d, h, bias=True)) for h in heads},
            tr("one KV head (MQA)"): {h: size_of(standard(d, h, num_kv_heads=1)) for h in heads},
        }),
    ]  # fmt: skip


@claim
def multi_head_has_more() -> list[Check]:
    one, many = standard(48, 1), standard(48, 8)
    largest = [max(p.numel() for p in module.parameters()) for module in (one, many)]
    ratio = size_of(many) / size_of(one)
    return [
        at_least(tr("parameters of 8 heads relative to one"), ratio, 1.01),
        at_least(tr("largest matrix of 8 heads relative to one"), largest[1] / largest[0], 1.01),
        at_least(tr("relative to one head without W_O"),
                 size_of(many) / (size_of(one) - one.o_proj.weight.numel()), 1.01).control(),
    ]  # fmt: skip


@claim
def gpt_2_small_layer() -> list[Check]:
    with torch.device("meta"):
        plain, biased, medium = standard(768, 12), standard(768, 12, bias=True), standard(1024, 16)
    return [
        equal(tr("parameters"), size_of(plain), 2.36e6, 0.002),
        equal(tr("with bias"), size_of(biased), 2.36e6, 0.002),
        equal(tr("parameters of GPT-2 medium's"), size_of(medium), 4.19e6, 0.002).control(),
    ]


@claim
def width_divides_by_heads() -> list[Check]:
    width, heads = 12, range(1, 13)
    accepted = [h for h in heads if _accepts(width, h)]
    divisors = [h for h in heads if width % h == 0]
    free = [h for h in heads if tuple(standard(width, h, head_dim=4)(torch.zeros(1, 2, width)).shape) == (1, 2, width)]
    return [
        equal(
            tr("numbers of heads that nn.MultiheadAttention accepts at a width of 12, and do not divide it"),
            len({*accepted} - {*divisors}),
            0,
        ),
        equal(tr("the same of layers with heads of size 4"), len({*free} - {*divisors}), 0).beyond(),
        equal(
            tr("published models whose d_model is no multiple of h"),
            sum(d % h != 0 for d, h, _ in PUBLISHED.values()),
            0,
        ).beyond(),
        equal(
            tr("numbers of heads that are accepted and divide it"), len({*accepted} & {*divisors}), len(divisors)
        ).control(),
    ]


def _accepts(width: int, heads: int) -> bool:
    try:
        nn.MultiheadAttention(width, heads)
    except AssertionError:
        return False
    return True


@claim
def mqa_parameters() -> list[Check | Plot]:
    found: list[Check | Plot] = []
    for d, h in (48, 8), (96, 4), (60, 12):
        shared, full = (_without_output(d, h, num_kv_heads=heads) for heads in (1, None))
        found += [equal(f"MQA, d = {d}, h = {h}", shared, d * d + 2 * d * (d // h)), equal("MHA", full, 3 * d * d)]
    two = _without_output(48, 8, num_kv_heads=2)
    found.append(equal(tr("two KV heads, d = 48, h = 8"), two, 48**2 + 4 * 48 * 6).control())
    sizes = 1, 2, 3, 6, 12, 24, 48, 96
    counted = {
        name: {h: _without_output(96, h, num_kv_heads=heads) for h in sizes}
        for name, heads in (("MHA", None), ("MQA", 1))
    }
    formula = {"d² + 2·d·d_k": {h: 96**2 + 2 * 96 * 96 // h for h in sizes}}
    return [*found, Plot(counted, formula)]


def _without_output(d: int, h: int, **options: Any) -> int:
    """Parameters of Q, K and V."""
    return size_of(standard(d, h, **options)) - d * d


# Operations, counted on running layers.
N, D = 512, 256  # sizes at which time is measured
PYTORCH = tr("PyTorch's attention")


@claim
def one_product_is_faster() -> list[Check | Plot]:
    x, w = normal(64, 512).float(), normal(512, 512, seed=1).float()
    parts = {h: [part.contiguous() for part in w.split(512 // h, 1)] for h in (1, 4, 16, 64)}
    ways = {h: partial(lambda some: [x @ part for part in some][-1], some) for h, some in parts.items()}
    took = _alternately({0: ways[1], **ways}, 60)  # 0: the large product again
    ratios = {h: median(a / b for a, b in zip(took[h], took[1], strict=True)) for h in took}
    what = {h: tr("time of {h} products relative to one large product, median of 60", h=h) for h in took}
    return [
        equal(tr("FLOPs of 64 products relative to one large product"), counted(ways[64]) / counted(ways[1]), 1),
        at_least(what[64], ratios[64], 1.5),
        at_least(what[4], ratios[4], 1.5).of_machine(),
        at_most(tr("time of the large product, measured again"), ratios.pop(0), 1.5).control(ratios[64]),
        Plot({tr("h products instead of one"): ratios}),
    ]  # fmt: skip


@claim
def splitting_lowers_cost() -> list[Check | Plot]:
    one = _attention_flops(64, 32, 1)
    ratios = {h: _attention_flops(64, 32, h) / one for h in (1, 2, 4, 8, 16, 32)}
    stages = {h: _stages(64, 32, h) for h in ratios}
    exponentials = {h: sum(stage.exponentials for stage in stages[h]) / 64**2 for h in stages}
    times = _times(N, D, (1, 2, 4, 8, 16, 32))
    large = [_stages(4096, 1024, h) for h in (1, 16)]
    exps = [sum(stage.exponentials for stage in stages) for stages in large]
    alone = counted(lambda: attend(*(normal(1, 1, 64, 4, seed=s) for s in range(3)))) / one
    return [
        *(equal(tr("FLOPs with {h} heads relative to one", h=h), ratios[h], 1 / h, 0.01)
          for h in (2, 4, 8)),
        equal(tr("exponentials with 16 heads relative to one"), exps[1] / exps[0], 1 / 16, 0.01),
        equal(tr("FLOPs at n = 4096, d = 1024, h = 16, by formula"),
              sum(stage.flops for stage in large[1] if stage.name in ("scores", "weighted sum")), 6.87e10 / 16, 0.001),
        equal(tr("FLOPs of one of eight heads relative to a single one of full size"), alone, 1 / 8, 0.01).control(),
        Plot({
            tr("FLOPs, counted"): ratios,
            tr("exponentials of the softmax"): exponentials,
        }, {tr("FLOPs, as claimed"): {h: 1 / h for h in ratios}}),
        Plot(times, {tr("as claimed, of PyTorch's"): {h: times[PYTORCH][1] / h for h in ratios}}),
    ]  # fmt: skip


@claim
def same_cost_for_any_h() -> list[Check]:
    one = _layer_flops(32, 24, 1)
    ratios = {h: _layer_flops(32, 24, h) / one for h in (2, 6, 12)}
    exps = [sum(stage.exponentials for stage in _stages(64, 32, h)) for h in (1, 8)]
    fixed = [_attention_flops(32, 24 * h, h) for h in (1, 6)]
    return [
        *(equal(tr("FLOPs of a layer of {h} heads relative to one", h=h), ratio, 1)
          for h, ratio in ratios.items()),
        equal(tr("exponentials with 8 heads relative to one"), exps[1] / exps[0], 1).beyond(),
        equal(tr("FLOPs of 6 heads relative to one, both with d_k = 24"), fixed[1] / fixed[0], 6).control(),
    ]  # fmt: skip


@claim
def cost_grows_with_heads() -> list[Check]:
    fixed = [_attention_flops(32, 24 * h, h) for h in (1, 6)]
    split = [_attention_flops(32, 24, h) for h in (1, 6)]
    exps = [sum(stage.exponentials for stage in _stages(64, 32, h)) for h in (1, 8)]
    ratio = split[1] / split[0]
    return [
        equal(tr("FLOPs of 6 heads relative to one, both with d_k = 24"),
              fixed[1] / fixed[0], 6),
        equal(tr("exponentials with 8 heads relative to one"), exps[1] / exps[0], 8),
        equal(tr("FLOPs of 6 heads relative to one, both with h·d_k = 24"), ratio, 6).beyond(),
        equal(tr("and that, expected to be 1"), ratio, 1).control(),
    ]  # fmt: skip


@claim
def complexity() -> list[Check | Plot]:
    sizes = (16, 24, 1), (16, 24, 6), (32, 24, 6), (64, 24, 2), (64, 48, 2)
    counted = [_layer_flops(*size) for size in sizes]
    lengths = 4, 8, 16, 32, 64, 128, 256
    terms = {"8·n·d²": {n: 8 * n * 24 * 24 for n in lengths}, "4·n²·d": {n: 4 * n * n * 24 for n in lengths}}
    return [
        *(equal(tr("FLOPs at n = {n}, d = {d}, h = {h}", n=n, d=d, h=h), found,
                4 * n * n * d + 8 * n * d * d) for (n, d, h), found in zip(sizes, counted, strict=True)),
        equal(tr("FLOPs without projections, n = 16, d = 24"), _attention_flops(16, 24, 6), 4 * 16 * 16 * 24).control(),
        Plot({tr("counted, h = 6"): {n: _layer_flops(n, 24, 6) for n in lengths}}, terms),
    ]  # fmt: skip


@claim
def n_squared_at_n_near_d() -> list[Check | Plot]:
    d = 24
    shares = {n: _attention_flops(n, d, 2) / _layer_flops(n, d, 2) for n in (3, 6, 12, 24, 36, 48, 96, 192)}
    return [
        at_least(tr("share of n²·d at n = d"), shares[24], 0.5),
        at_least(tr("at n = 1.5·d"), shares[36], 0.5),
        at_least(tr("at n = 8·d"), shares[192], 0.5).control(),
        Plot({tr("counted"): shares}, {tr("half"): dict.fromkeys(shares, 0.5)}),
    ]  # fmt: skip


def _attention_flops(n: int, d: int, h: int) -> int:
    """FLOPs of scores and weighted sum, counted at run time."""
    q, k, v = (normal(1, h, n, d // h, seed=s) for s in range(3))
    return counted(lambda: attend(q, k, v))


def _times(n: int, d: int, heads: tuple[int, ...]) -> dict[str, dict[int, float]]:
    """Milliseconds of attention over [n, d] split into h heads: the minimum of several alternating runs."""
    ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "headwise": attend,
        PYTORCH: nn.functional.scaled_dot_product_attention,
        tr("stored weights"): formula_of,
    }
    inputs = {h: [normal(1, h, n, d // h, seed=s).float() for s in range(3)] for h in heads}
    took = _alternately({(name, h): partial(way, *inputs[h]) for name, way in ways.items() for h in heads}, 4)
    return {name: {h: 1e3 * min(took[name, h]) for h in heads} for name in ways}


@torch.no_grad()
def _alternately(ways: Mapping[Any, Callable[[], Tensor]], rounds: int) -> dict[Any, list[float]]:
    """Seconds of each way in each round, on one thread; every other round runs the ways in reverse."""
    took: dict[Any, list[float]] = {name: [] for name in ways}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for at in range(rounds):
            for name, way in list(ways.items())[:: -1 if at % 2 else 1]:
                start = time.perf_counter()
                way()
                took[name].append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return took


def _layer_flops(n: int, d: int, h: int) -> int:
    module, x = layer("multi_head", d, h), normal(1, n, d)
    return counted(lambda: module(x))


def _stages(n: int, d: int, h: int) -> list:
    return attention_stages(counts_of("multi_head", {"d_model": d, "num_heads": h}), Work(1, n, n, causal=False))
