"""Operations, counted on running layers and compared with the texts."""

import itertools
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from headwise.attention import attend
from headwise.costs import Work, attention_stages
from headwise.nn.registry import counts_of
from headwise.reports.curves import Curve
from headwise.textbook.claims.claim import claim
from headwise.textbook.claims.definitions import formula_of
from headwise.textbook.claims.evidence import Check, Verdict, at_least, equal
from headwise.textbook.claims.samples import counted, layer, normal, one_thread
from headwise.textbook.texts import place
from headwise.wording import Bilingual

N, D = 512, 256  # sizes at which time is measured
PYTORCH = Bilingual("PyTorch's attention", "PyTorch 的注意力")
HEADS, TOKENS, FLOPS = Bilingual("heads h", "头数 h"), Bilingual("tokens n", "词元数 n"), Bilingual("FLOPs", "FLOP 数")


@claim(
    "Splitting into h heads lowers the cost of attention from O(n²·d_model) to O(n²·d_k).",
    "拆成 h 个头，使注意力的计算量从 O(n²·d_model) 降到 O(n²·d_k)。",
    formula=("claimed: O(n²·d_k);  counted: h · 4·n²·d_k = 4·n²·d_model",
             "所述：O(n²·d_k)；计数：h · 4·n²·d_k = 4·n²·d_model"),
    at=[
        place("tutorial", "5",
              "Dividing num_hiddens into h parts of d_k lowers the complexity from O(n²·num_hiddens) to "
              "O(n²·d_k).", "把 num_hiddens 拆成 h 个 d_k，复杂度由 O(n²·num_hiddens) 降至 O(n²·d_k)。", item=2),
    ],
    control=("one head alone of the eight does take an eighth of the FLOPs",
             "八个头中单独一个头，确实只用八分之一的 FLOP"),
    note="那是一个头的计算量；h 个头合起来不变，softmax 的指数运算则是 h 倍。用时取决于机器，只画图、不判断；它也没有"
         "减少。"
    "其他两处文字说得相反（见 same-cost-for-any-h）。",
    expected=Verdict.FAILS,
)  # fmt: skip
def splitting_lowers_cost() -> list[Check | Curve]:
    """That is the cost of one head; all h heads together cost the same, and h times as much in the softmax. Time
    depends on the machine, so it is plotted but not judged; it does not decrease either. Two of the other texts state
    the opposite (same-cost-for-any-h).
    """
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


@claim(
    "The amount of computation does not depend on the number of heads.",
    "计算量与头数无关。",
    formula="h · 4·n²·d_k = 4·n²·d_model",
    at=[
        place("chapter", "11.9.1", "8 heads of 64 take 8 × O(seq²·64) = O(seq²·512), about the same as one of 512.",
              "8 个 64 维的头共 8 × O(seq²·64) = O(seq²·512)，与一个 512 维的头基本相同。", item=3),
        place("treatment", "5.3.11", "h·O(n²·d_k) = O(n²·d_model), as with a single head.",
              "h·O(n²·d_k) = O(n²·d_model)，与单头相同。", paragraph=3),
        place("treatment", "5.3.11", "Whatever the number of heads, the total computation stays the same.",
              "无论多少个头，总计算量不变。", paragraph=6),
        place("treatment", "5.3.19", "More heads at no additional cost.", "不增加计算成本。", paragraph=2),
    ],
    control=("with a fixed d_k, more heads do cost more", "固定 d_k 时，头越多计算量越大"),
    note="矩阵乘法的 FLOP 数如此。softmax 的指数运算与头数成正比，d_k 小时占到可观的时间。",
    expected=Verdict.CONDITIONS,
)  # fmt: skip
def same_cost_for_any_h() -> list[Check]:
    """True of the FLOPs of the matrix products. The exponentials of the softmax grow with the number of heads, and with
    a small d_k they take a considerable part of the time.
    """
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


@claim(
    "The amount of computation is proportional to the number of heads.",
    "计算量与头数成正比。",
    formula="h · 4·n²·d_k",
    at=[
        place("treatment", "5.3.8",
              "Standard multi-head attention computes all heads in full, with work in proportion to their number.",
              "标准的多头注意力完整计算所有头，计算量与头数成正比。", paragraph=3),
        place("treatment", "5.3.13", "With many heads, such as the 96 of GPT-3, this may be the bottleneck.",
              "头数较多时（如 GPT-3 的 96 个头），这可能成为瓶颈。", paragraph=1),
    ],
    control=("with h·d_k = d_model, six heads take what one takes", "h·d_k = d_model 时，六个头与单头相同"),
    note="d_k 固定时成立；softmax 的指数运算则总是如此。但这些文字取 d_k = d_model / h，矩阵乘法的 FLOP 数便与头数"
         "无关，同一节的 5.3.11 也这样写（见 same-cost-for-any-h）。",
    expected=Verdict.CONDITIONS,
)  # fmt: skip
def cost_grows_with_heads() -> list[Check]:
    """True with a fixed d_k, and always of the exponentials of the softmax. But with d_k = d_model / h, as in these
    texts, the FLOPs of the matrix products do not depend on h, as §5.3.11 of the same section says
    (same-cost-for-any-h).
    """
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


@claim(
    "A layer takes O(n²·d + n·d²) operations: twice the length is four times the scores, twice the projections.",
    "一层需 O(n²·d + n·d²) 次运算：长度加倍，分数部分变为四倍，投影部分变为两倍。",
    formula="4·n²·d + 8·n·d²",
    at=[
        place("treatment", "5.3.11", "Projections of Q, K and V take O(n·d_model²).", "Q、K、V 投影为 O(n·d_model²)。",
              paragraph=2),
        place("treatment", "5.3.11", "The output projection takes O(n·d_model²) too.",
              "输出投影同样为 O(n·d_model²)。", paragraph=4),
        place("treatment", "5.3.11", "In total O(n²·d_model + n·d_model²).",
              "总计 O(n²·d_model + n·d_model²)。", paragraph=5),
        place("treatment", "5.3.19", "The summary: O(n²·d_model + n·d_model²), whatever the number of heads.",
              "小结：O(n²·d_model + n·d_model²)，与头数无关。", paragraph=4),
    ],
    control=("attention without projections takes 4·n²·d only", "没有投影的注意力只需 4·n²·d"),
    note="分数与加权求和 4·n²·d，投影 8·n·d²，在运行的层上计数。",
)  # fmt: skip
def complexity() -> list[Check | Curve]:
    """4·n²·d for scores and weighted sum, and 8·n·d² for the projections, counted on a running layer."""
    sizes = (16, 24, 1), (16, 24, 6), (32, 24, 6), (64, 24, 2), (64, 48, 2)
    counted = [_layer_flops(*size) for size in sizes]
    return [
        *(equal((f"FLOPs at n = {n}, d = {d}, h = {h}", f"n = {n}、d = {d}、h = {h} 时的 FLOP 数"), found,
                4 * n * n * d + 8 * n * d * d) for (n, d, h), found in zip(sizes, counted, strict=True)),
        equal(("FLOPs without projections, n = 16, d = 24", "没有投影时的 FLOP 数，n = 16、d = 24"),
              _attention_flops(16, 24, 6), 4 * 16 * 16 * 24).control(counted[1]),
        _growth(),
    ]  # fmt: skip


@claim(
    "When n is comparable with d_model, the term O(n²·d_model) dominates.",
    "当 n 与 d_model 可比时，主导项是 O(n²·d_model)。",
    formula="4·n²·d ≥ 8·n·d² ⟺ n ≥ 2·d",
    at=[
        place("treatment", "5.3.11",
              "For n ≪ d_model O(n·d_model²) dominates; for long sequences, such as n comparable with "
              "d_model, O(n²·d_model) does.",
              "n ≪ d_model 时主导项为 O(n·d_model²)；长序列（如 n 与 d_model 可比）时为 O(n²·d_model)。", paragraph=5),
    ],
    control=("for n = 8·d_model the term does dominate", "n = 8·d_model 时，这一项确实占主导"),
    note="n = d 时这一项只占三分之一；到 n = 2·d 两项才相等。若不计常数，n ≈ d 时两项同阶，谁也不占主导。前半句（n ≪ "
         "d）成立。",
    expected=Verdict.FAILS,
)  # fmt: skip
def n_squared_at_n_near_d() -> list[Check | Curve]:
    """At n = d the term is a third of the FLOPs, and at n = 2·d both are equal. Without constants both are of one order
    for n ≈ d, and neither dominates. The first half of the sentence, n ≪ d, holds.
    """
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
