"""Operations, counted on running layers and compared with the texts."""

import itertools
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from headwise import attend
from headwise.costs import Work, attention_stages
from headwise.nn import counts_of
from headwise.wording import Bilingual
from headwise_textbook.claims.claim import claim
from headwise_textbook.claims.definitions import formula_of
from headwise_textbook.claims.evidence import Check, at_least, equal
from headwise_textbook.claims.samples import counted, layer, normal, one_thread
from headwise_textbook.curves import Curve

N, D = 512, 256  # sizes at which time is measured
PYTORCH = Bilingual("PyTorch's attention", "PyTorch 的注意力")
HEADS, TOKENS, FLOPS = Bilingual("heads h", "头数 h"), Bilingual("tokens n", "词元数 n"), Bilingual("FLOPs", "FLOP 数")


@claim
def splitting_lowers_cost() -> list[Check | Curve]:
    one = _attention_flops(64, 32, 1)
    ratios = {h: _attention_flops(64, 32, h) / one for h in (1, 2, 4, 8, 16, 32)}
    stages = {h: _stages(64, 32, h) for h in ratios}
    exponentials = {h: sum(stage.exponentials for stage in stages[h]) / 64**2 for h in stages}
    times = _times(N, D, (1, 2, 4, 8, 16, 32))
    claimed = {h: times[PYTORCH][1] / h for h in ratios}
    large = [_stages(4096, 1024, h) for h in (1, 16)]
    exps = [sum(stage.exponentials for stage in stages) for stages in large]
    alone = counted(lambda: attend(*(normal(1, 1, 64, 4, seed=s) for s in range(3)))) / one
    return [
        *(equal((f"FLOPs with {h} heads relative to one", f"{h} 个头的 FLOP 数与单头之比"), ratios[h], 1 / h, 0.01)
          for h in (2, 4, 8)),
        equal(("exponentials with 16 heads relative to one",
               "16 个头的指数运算与单头之比"), exps[1] / exps[0], 1 / 16, 0.01),
        equal(("FLOPs at n = 4096, d = 1024, h = 16, by formula", "n = 4096、d = 1024、h = 16 的 FLOP 数，按公式"),
              _pair_flops(large[1]), 6.87e10 / 16, 0.001),
        equal(("FLOPs of one of eight heads relative to a single one of full size",
               "八头之一与一个完整单头的 FLOP 数之比"),
              alone, 1 / 8, 0.01).control(ratios[8]),
        Curve.of(Bilingual("Work of attention, relative to one head", "注意力的计算量，与单头之比"), HEADS,
                 Bilingual("times that of one head", "单头的倍数"), {
            Bilingual("FLOPs, counted", "FLOP 数，计数"): ratios,
            Bilingual("exponentials of the softmax", "softmax 的指数运算"): exponentials,
        }, {Bilingual("FLOPs, as claimed", "FLOP 数，如所述"): {h: 1 / h for h in ratios}}, log="xy"),
        Curve.of(
            Bilingual(f"Time of attention, n = {N:,}, d_model = {D}, float32, one thread",
                      f"注意力用时，n = {N:,}，d_model = {D}，float32，单线程"), HEADS,
            Bilingual("ms, minimum of several runs", "毫秒，多次运行的最小值"), times,
            {Bilingual("as claimed, of PyTorch's", "如所述，以 PyTorch 为准"): claimed}, log="xy",
        ),
    ]  # fmt: skip


@claim
def same_cost_for_any_h() -> list[Check]:
    one = _layer_flops(32, 24, 1)
    ratios = {h: _layer_flops(32, 24, h) / one for h in (2, 6, 12)}
    exps = [sum(stage.exponentials for stage in _stages(64, 32, h)) for h in (1, 8)]
    fixed = [_attention_flops(32, 24 * h, h) for h in (1, 6)]
    return [
        *(equal((f"FLOPs of a layer of {h} heads relative to one", f"{h} 个头的一层与单头的 FLOP 数之比"), ratio, 1)
          for h, ratio in ratios.items()),
        equal(("exponentials with 8 heads relative to one",
               "8 个头的指数运算与单头之比"), exps[1] / exps[0], 1).beyond(),
        equal(("FLOPs of 6 heads relative to one, both with d_k = 24", "d_k 都是 24 时，6 个头与单头的 FLOP 数之比"),
              fixed[1] / fixed[0], 6).control(ratios[6]),
    ]  # fmt: skip


@claim
def cost_grows_with_heads() -> list[Check]:
    fixed = [_attention_flops(32, 24 * h, h) for h in (1, 6)]
    split = [_attention_flops(32, 24, h) for h in (1, 6)]
    exps = [sum(stage.exponentials for stage in _stages(64, 32, h)) for h in (1, 8)]
    ratio = split[1] / split[0]
    return [
        equal(("FLOPs of 6 heads relative to one, both with d_k = 24", "d_k 都是 24 时，6 个头与单头的 FLOP 数之比"),
              fixed[1] / fixed[0], 6),
        equal(("exponentials with 8 heads relative to one", "8 个头的指数运算与单头之比"), exps[1] / exps[0], 8),
        equal(("FLOPs of 6 heads relative to one, both with h·d_k = 24",
               "h·d_k 都是 24 时，6 个头与单头的 FLOP 数之比"), ratio, 6).beyond(),
        equal(("and that, expected to be 1", "同上，预期为 1"), ratio, 1).control(fixed[1] / fixed[0]),
    ]  # fmt: skip


@claim
def complexity() -> list[Check | Curve]:
    sizes = (16, 24, 1), (16, 24, 6), (32, 24, 6), (64, 24, 2), (64, 48, 2)
    counted = [_layer_flops(*size) for size in sizes]
    return [
        *(equal((f"FLOPs at n = {n}, d = {d}, h = {h}", f"n = {n}、d = {d}、h = {h} 时的 FLOP 数"), found,
                4 * n * n * d + 8 * n * d * d) for (n, d, h), found in zip(sizes, counted, strict=True)),
        equal(("FLOPs without projections, n = 16, d = 24", "没有投影时的 FLOP 数，n = 16、d = 24"),
              _attention_flops(16, 24, 6), 4 * 16 * 16 * 24).control(counted[1]),
        _growth(),
    ]  # fmt: skip


@claim
def n_squared_at_n_near_d() -> list[Check | Curve]:
    d = 24
    shares = {n: _attention_flops(n, d, 2) / _layer_flops(n, d, 2) for n in (3, 6, 12, 24, 36, 48, 96, 192)}
    half = {Bilingual("half", "一半"): dict.fromkeys(shares, 0.5)}
    return [
        at_least(("share of n²·d at n = d", "n = d 时 n²·d 一项所占的比例"), shares[24], 0.5),
        at_least(("at n = 1.5·d", "n = 1.5·d 时"), shares[36], 0.5),
        at_least(("at n = 8·d", "n = 8·d 时"), shares[192], 0.5).control(shares[24]),
        Curve.of(Bilingual("Share of attention in the FLOPs of a layer, d_model = 24",
                           "注意力在一层 FLOP 数中的比例，d_model = 24"),
                 TOKENS, Bilingual("share", "比例"), {Bilingual("counted", "计数"): shares}, half, log="x"),
    ]  # fmt: skip


def _attention_flops(n: int, d: int, h: int) -> int:
    """FLOPs of scores and weighted sum, counted at run time."""
    q, k, v = (normal(1, h, n, d // h, seed=s) for s in range(3))
    return counted(lambda: attend(q, k, v))


def _times(n: int, d: int, heads: tuple[int, ...]) -> dict[str, dict[int, float]]:
    """Milliseconds of attention over [n, d] split into h heads: the minimum of several interleaved runs."""
    ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "headwise": attend,
        PYTORCH: nn.functional.scaled_dot_product_attention,
        Bilingual("stored weights", "存储权重矩阵"): formula_of,
    }
    inputs = {h: [normal(1, h, n, d // h, seed=s).float() for s in range(3)] for h in heads}
    took: dict[str, dict[int, float]] = {name: dict.fromkeys(heads, math.inf) for name in ways}
    with torch.no_grad(), one_thread():
        for _ in range(4):
            for (name, way), h in itertools.product(ways.items(), heads):
                start = time.perf_counter()
                way(*inputs[h])
                took[name][h] = min(took[name][h], 1e3 * (time.perf_counter() - start))
    return took


def _growth() -> Curve:
    """FLOPs of a layer as a function of n, and the two terms of their sum."""
    d, lengths = 24, (4, 8, 16, 32, 64, 128, 256)
    counted = {Bilingual("counted, h = 6", "计数，h = 6"): {n: _layer_flops(n, d, 6) for n in lengths}}
    terms = {"8·n·d²": {n: 8 * n * d * d for n in lengths}, "4·n²·d": {n: 4 * n * n * d for n in lengths}}
    title = Bilingual(f"FLOPs of a layer, d_model = {d}", f"一层的 FLOP 数，d_model = {d}")
    return Curve.of(title, TOKENS, FLOPS, counted, terms, log="xy")


def _layer_flops(n: int, d: int, h: int) -> int:
    module, x = layer("multi_head", d, h), normal(1, n, d)
    return counted(lambda: module(x))


def _stages(n: int, d: int, h: int) -> list:
    return attention_stages(counts_of("multi_head", {"d_model": d, "num_heads": h}), Work(1, n, n, causal=False))


def _pair_flops(stages: list) -> int:
    return sum(stage.flops for stage in stages if stage.name in ("scores", "weighted sum"))
