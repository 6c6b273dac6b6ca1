"""Parameters and operations, counted on running layers and compared with the texts."""

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from headwise.attention import attend
from headwise.costs import Work, attention_stages
from headwise.costs.configs import CONFIGS, ModelConfig
from headwise.kernels import use_kernel
from headwise.nn.counts import counts_of
from headwise.reports.curves import Curve
from headwise.textbook.claims.claim import claim
from headwise.textbook.claims.definitions import formula_of
from headwise.textbook.claims.evidence import Check, Verdict, equal
from headwise.textbook.claims.samples import layer, normal, one_thread, standard

N, D = 512, 256  # sizes at which time is measured
HEADS = 1, 2, 3, 6, 12, 24, 48, 96


@claim(
    "A multi-head layer has 4·d_model² parameters, however many heads it has.",
    formula="|W_Q| + |W_K| + |W_V| + |W_O| = 4·d_model²",
    source="ch. 11, 11.7.1; §5.3.3",
    expected=Verdict.CONDITIONS,
)
def four_d_squared() -> list[Check | Curve]:
    """Only with h·d_k = h·d_v = d_model, without bias (+ 4·d_model) and without shared keys and values."""
    d, target = 48, 4 * 48**2
    others: dict[str, dict[str, Any]] = {
        "with bias": {"bias": True}, "two KV heads for eight": {"num_kv_heads": 2}, "head_dim 16 instead of 6": {
            "head_dim": 16},
    }  # fmt: skip
    heads = 1, 2, 4, 8, 16, 48
    sizes = {h: _size(standard(d, h)) for h in heads}
    lines = {
        "no bias": sizes,
        "with bias": {h: _size(standard(d, h, bias=True)) for h in heads},
        "one KV head (MQA)": {h: _size(standard(d, h, num_kv_heads=1)) for h in heads},
    }
    return [
        *(equal(f"h = {h}", sizes[h], target) for h in (1, 2, 8, 48)),
        *(equal(f"{what}", _size(standard(d, 8, **o)), target).beyond() for what, o in others.items()),
        Curve.of(f"Parameters of a layer, d_model = {d}", "heads h", "parameters", lines, log="x"),
    ]


@claim(
    "An attention layer of GPT-2 small has some 2.36 million parameters.",
    formula="4·768² = 2,359,296",
    source="ch. 11, 11.7.1; Radford et al. 2019",
)
def gpt_2_small_layer() -> list[Check]:
    """4·768², and 3,072 more with the biases of GPT-2."""
    with torch.device("meta"):
        plain, biased = standard(768, 12), standard(768, 12, bias=True)
    return [
        equal("parameters", _size(plain), 2.36e6, 0.002),
        equal("with bias", _size(biased), 2.36e6, 0.002),
    ]


@claim(
    "Models choose d_k = d_model / h; the table of configurations.",
    formula="h·d_k = d_model",
    source="ch. 11, 11.7.2; §5.3.10; second tutorial, division into heads",
    expected=Verdict.CONDITIONS,
)
def head_size_table() -> list[Check]:
    """True for the models in the texts, but not required: other models choose d_k independently of h."""
    known = [
        "transformer-base", "transformer-big", "bert-base", "bert-large", "gpt-2-small", "gpt-2-medium", "gpt-2-large",
        "gpt-2-xl", "gpt-3", "llama-7b", "llama-2-70b", "llama-3-8b", "mistral-7b",
    ]  # fmt: skip
    return [
        equal("models of the texts with h·d_k ≠ d_model", sum(_width(CONFIGS[m]) != 1 for m in known), 0),
        equal("h·d_k / d_model of gemma-7b", _width(CONFIGS["gemma-7b"]), 1).beyond(),
        equal("of deepseek-v2", _width(CONFIGS["deepseek-v2"]), 1).beyond(),
    ]


@claim(
    "Splitting into h heads lowers the cost of attention from O(n²·d_model) to O(n²·d_k).",
    formula="claimed: O(n²·d_k);  counted: h · 4·n²·d_k = 4·n²·d_model",
    source="first tutorial, part 5, item 2; the opposite in §5.3.11 and in ch. 11, 11.9.1",
    expected=Verdict.FAILS,
)
def splitting_lowers_cost() -> list[Check | Curve]:
    """That is the cost of one head; all h heads together cost the same, and h times as much in the softmax. Time
    depends on the machine, so it is plotted but not judged; it does not decrease either.
    """
    one = _attention_flops(64, 32, 1)
    ratios = {h: _attention_flops(64, 32, h) / one for h in (1, 2, 4, 8, 16, 32)}
    stages = {h: _stages(64, 32, h) for h in ratios}
    exponentials = {h: sum(stage.exponentials for stage in stages[h]) / 64**2 for h in stages}
    times = _times(N, D, (1, 2, 4, 8, 16, 32))
    claimed = {h: times["PyTorch's attention"][1] / h for h in ratios}
    large = [_stages(4096, 1024, h) for h in (1, 16)]
    exps = [sum(stage.exponentials for stage in stages) for stages in large]
    return [
        *(equal(f"FLOPs with {h} heads relative to one", ratios[h], 1 / h, 0.01) for h in (2, 4, 8)),
        equal("exponentials with 16 heads relative to one", exps[1] / exps[0], 1 / 16, 0.01),
        equal("FLOPs at n = 4096, d = 1024, h = 16, by formula", _pair_flops(large[1]), 6.87e10 / 16, 0.001),
        equal("FLOPs at n = 4096, d = 1024, h = 1", _pair_flops(large[0]), 6.87e10, 0.001).control(),
        Curve.of("Work of attention, relative to one head", "heads h", "times that of one head", {
            "FLOPs, counted": ratios, "exponentials of the softmax": exponentials,
        }, {"FLOPs, as claimed": {h: 1 / h for h in ratios}}, log="xy"),
        Curve.of(
            f"Time of attention, n = {N:,}, d_model = {D}, float32, one thread", "heads h",
            "ms, minimum of several runs", times, {"as claimed, of PyTorch's": claimed}, log="xy",
        ),
    ]  # fmt: skip


@claim(
    "A layer takes O(n²·d + n·d²) operations: twice the length is four times the scores, twice the projections.",
    formula="4·n²·d + 8·n·d²",
    source="§5.3.11, time complexity",
)
def complexity() -> list[Check | Curve]:
    """4·n²·d for scores and weighted sum, and 8·n·d² for the projections, counted on a running layer."""
    sizes = (16, 24, 1), (16, 24, 6), (32, 24, 6), (64, 24, 2), (64, 48, 2)
    return [
        equal(f"FLOPs at n = {n}, d = {d}, h = {h}", _layer_flops(n, d, h), 4 * n * n * d + 8 * n * d * d)
        for n, d, h in sizes
    ] + [_growth()]


@claim(
    "With one key and value head for all, Q, K and V take d² + 2·d·d_k parameters instead of 3·d² (if h·d_k = d).",
    formula="d² + 2·d·d_k instead of 3·d²",
    source="5.3.15; Shazeer 2019, 1911.02150",
)
def mqa_parameters() -> list[Check | Curve]:
    """Counted on modules of three sizes, without W_O."""
    found: list[Check | Curve] = []
    for d, h in (48, 8), (96, 4), (60, 12):
        shared, full = standard(d, h, num_kv_heads=1), standard(d, h)
        found += [
            equal(f"MQA, d = {d}, h = {h}", _size(shared) - d * d, d * d + 2 * d * (d // h)),
            equal("MHA", _size(full) - d * d, 3 * d * d),
        ]
    counted = {
        name: {h: _size(standard(96, h, num_kv_heads=1 if name == "MQA" else None)) - 96**2 for h in HEADS}
        for name in ("MHA", "MQA")
    }
    formula = {"d² + 2·d·d_k": {h: 96**2 + 2 * 96 * 96 // h for h in HEADS}}
    title = "Parameters of Q, K and V, d_model = 96"
    return [*found, Curve.of(title, "heads h", "parameters", counted, formula, log="x")]


def _size(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _width(config: ModelConfig) -> float:
    """h·d_k / d_model."""
    heads = config.size("num_heads") or 1
    return heads * (config.size("head_dim") or config.d_model // heads) / config.d_model


def _attention_flops(n: int, d: int, h: int) -> int:
    """FLOPs of scores and weighted sum, counted at run time."""
    q, k, v = (normal(1, h, n, d // h, seed=s) for s in range(3))
    return _counted(lambda: attend(q, k, v, kernel="torch_blocks"))


def _times(n: int, d: int, heads: tuple[int, ...]) -> dict[str, dict[int, float]]:
    """Milliseconds of attention over [n, d] split into h heads: the minimum of several interleaved runs."""
    ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "headwise": attend,
        "PyTorch's attention": nn.functional.scaled_dot_product_attention,
        "stored weights": formula_of,
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
    counted = {"counted, h = 6": {n: _layer_flops(n, d, 6) for n in lengths}}
    terms = {"8·n·d²": {n: 8 * n * d * d for n in lengths}, "4·n²·d": {n: 4 * n * n * d for n in lengths}}
    return Curve.of(f"FLOPs of a layer, d_model = {d}", "tokens n", "FLOPs", counted, terms, log="xy")


def _layer_flops(n: int, d: int, h: int) -> int:
    module, x = layer("multi_head", d, h), normal(1, n, d)
    with use_kernel("torch_blocks"):
        return _counted(lambda: module(x))


def _counted(run: Callable[[], Tensor]) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def _stages(n: int, d: int, h: int) -> list:
    return attention_stages(counts_of("multi_head", {"d_model": d, "num_heads": h}), Work(1, n, n, causal=False))


def _pair_flops(stages: list) -> int:
    return sum(stage.flops for stage in stages if stage.name in ("scores", "weighted sum"))
