"""What multi-head attention takes: parameters, operations and memory."""

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from headwise import attend
from headwise.cache import KVCache
from headwise.costs import CONFIGS, Work, attention_stages
from headwise.masks import Causal
from headwise.nn import counts_of
from headwise.wording import Bilingual
from headwise_textbook.claims.claim import Check, at_least, at_most, claim, difference, differs, equal, same
from headwise_textbook.claims.formulas import formula_of
from headwise_textbook.claims.model import counted, layer, normal, one_thread, size_of, standard
from headwise_textbook.curves import Curve
from headwise_textbook.texts import read_toml

# Parameters and sizes of heads, counted on layers and read from publications.
HEADS, TOKENS, FLOPS = Bilingual("heads h", "头数 h"), Bilingual("tokens n", "词元数 n"), Bilingual("FLOPs", "FLOP 数")
COUNT, BYTES = Bilingual("parameters", "参数量"), Bilingual("bytes", "字节")

# d_model, heads and size of a head, by the name of the model.
PUBLISHED: dict[str, tuple[int, int, int]]
PUBLISHED, IN_THE_CHAPTER = read_toml("headwise_textbook", "sizes.toml").values()


@claim
def four_d_squared() -> list[Check | Curve]:
    d, target = 48, 4 * 48**2
    others: dict[tuple[str, str], dict[str, Any]] = {
        ("with bias", "有偏置"): {"bias": True},
        ("two KV heads for eight", "八个头共用两个键值头"): {"num_kv_heads": 2},
        ("head_dim 16 instead of 6", "head_dim 为 16 而非 6"): {"head_dim": 16},
    }
    heads = 1, 2, 4, 8, 16, 48
    sizes = {h: size_of(standard(d, h)) for h in heads}
    lines = {
        Bilingual("no bias", "无偏置"): sizes,
        Bilingual("with bias", "有偏置"): {h: size_of(standard(d, h, bias=True)) for h in heads},
        Bilingual("one KV head (MQA)", "一个键值头（MQA）"): {
            h: size_of(standard(d, h, num_kv_heads=1)) for h in heads
        },
    }
    title = Bilingual(f"Parameters of a layer, d_model = {d}", f"一层的参数量，d_model = {d}")
    return [
        *(equal(f"h = {h}", sizes[h], target) for h in (1, 2, 8, 48)),
        *(equal(what, size_of(standard(d, 8, **o)), target).beyond() for what, o in others.items()),
        equal(("eight heads of size 48", "八个 48 维的头"), size_of(standard(d, 8, head_dim=48)), 8 * target).control(
            sizes[8]
        ),
        Curve.of(title, HEADS, COUNT, lines, log="x"),
    ]


@claim
def multi_head_has_more() -> list[Check]:
    one, many = standard(48, 1), standard(48, 8)
    largest = [max(p.numel() for p in module.parameters()) for module in (one, many)]
    ratio = size_of(many) / size_of(one)
    return [
        at_least(("parameters of 8 heads relative to one", "8 个头与单头的参数量之比"), ratio, 1.01),
        at_least(("largest matrix of 8 heads relative to one",
                  "8 个头与单头的最大矩阵之比"), largest[1] / largest[0], 1.01),
        at_least(("relative to one head without W_O", "与没有 W_O 的单头之比"),
                 size_of(many) / (size_of(one) - one.o_proj.weight.numel()), 1.01).control(ratio),
    ]  # fmt: skip


@claim
def gpt_2_small_layer() -> list[Check]:
    with torch.device("meta"):
        plain, biased, medium = standard(768, 12), standard(768, 12, bias=True), standard(1024, 16)
    return [
        equal(("parameters", "参数量"), size_of(plain), 2.36e6, 0.002),
        equal(("with bias", "有偏置"), size_of(biased), 2.36e6, 0.002),
        equal(("parameters of GPT-2 medium's", "GPT-2 medium 的参数量"), size_of(medium), 4.19e6, 0.002).control(
            size_of(plain)
        ),
    ]


@claim
def head_size_table() -> list[Check]:
    usual = [size in (64, 128) for _, _, size in PUBLISHED.values()]
    unequal = sum(h * size != d for d, h, size in PUBLISHED.values())
    otherwise = sum(d // h != size for d, h, size in PUBLISHED.values())
    wrong = sum(h * size != d for d, h, size in IN_THE_CHAPTER.values())
    return [
        equal(("rows of the chapter's table with h·d_k ≠ d_model", "书中表格里 h·d_k ≠ d_model 的行数"), wrong, 0),
        at_least((f"share of {len(usual)} published head sizes that are 64 or 128",
                  f"{len(usual)} 个公布的头维度中 64 或 128 的比例"),
                 sum(usual) / len(usual), 0.5),
        equal(("published models with h·d_k ≠ d_model", "公布的模型中 h·d_k ≠ d_model 的个数"), unequal, 0).beyond(),
        at_least(("models whose published size is not ⌊d_model / h⌋",
                  "公布的头维度不等于 ⌊d_model / h⌋ 的模型数"), otherwise, 1)
        .control(wrong),
    ]  # fmt: skip


@claim
def width_divides_by_heads() -> list[Check]:
    width, heads = 12, range(1, 13)
    accepted = [h for h in heads if _accepts(width, h)]
    divisors = [h for h in heads if width % h == 0]
    free = [h for h in heads if tuple(standard(width, h, head_dim=4)(torch.zeros(1, 2, width)).shape) == (1, 2, width)]
    return [
        equal(("numbers of heads that nn.MultiheadAttention accepts at a width of 12, and do not divide it",
               "宽度为 12 时，nn.MultiheadAttention 接受、却不能整除它的头数个数"), len({*accepted} - {*divisors}), 0),
        equal(("the same of layers with heads of size 4", "头维度为 4 的层，同上"), len({*free} - {*divisors}), 0)
        .beyond(),
        equal(("published models whose d_model is no multiple of h", "公布的模型中 d_model 不是 h 的倍数的个数"),
              sum(d % h != 0 for d, h, _ in PUBLISHED.values()), 0).beyond(),
        equal(("numbers of heads that are accepted and divide it", "被接受且能整除的头数个数"),
              len({*accepted} & {*divisors}), len(divisors)).control(len({*accepted} - {*divisors})),
    ]  # fmt: skip


def _accepts(width: int, heads: int) -> bool:
    try:
        nn.MultiheadAttention(width, heads)
    except AssertionError:
        return False
    return True


@claim
def mqa_parameters() -> list[Check | Curve]:
    found: list[Check | Curve] = []
    for d, h in (48, 8), (96, 4), (60, 12):
        shared, full = (_without_output(d, h, num_kv_heads=heads) for heads in (1, None))
        found += [equal(f"MQA, d = {d}, h = {h}", shared, d * d + 2 * d * (d // h)), equal("MHA", full, 3 * d * d)]
    two, one = (_without_output(48, 8, num_kv_heads=heads) for heads in (2, 1))
    found.append(
        equal(("two KV heads, d = 48, h = 8", "两个键值头，d = 48，h = 8"), two, 48**2 + 4 * 48 * 6).control(one)
    )
    sizes = 1, 2, 3, 6, 12, 24, 48, 96
    counted = {
        name: {h: _without_output(96, h, num_kv_heads=heads) for h in sizes}
        for name, heads in (("MHA", None), ("MQA", 1))
    }
    formula = {"d² + 2·d·d_k": {h: 96**2 + 2 * 96 * 96 // h for h in sizes}}
    title = Bilingual("Parameters of Q, K and V, d_model = 96", "Q、K、V 的参数量，d_model = 96")
    return [*found, Curve.of(title, HEADS, COUNT, counted, formula, log="x")]


@claim
def llama_2_uses_gqa() -> list[Check]:
    shared = {name: _sharing(name) for name in ("llama-2-70b", "llama-2-13b", "llama-2-7b", "llama-65b")}
    what = {size: (f"query heads for each KV head, {size}", f"每个键值头对应的查询头数，{size}") for size in shared}
    return [
        at_least(what["llama-2-70b"], shared["llama-2-70b"], 2),
        at_least(what["llama-2-13b"], shared["llama-2-13b"], 2).beyond(),
        at_least(what["llama-2-7b"], shared["llama-2-7b"], 2).beyond(),
        equal(what["llama-65b"], shared["llama-65b"], 1).control(shared["llama-2-70b"]),
    ]


def _without_output(d: int, h: int, **options: Any) -> int:
    """Parameters of Q, K and V."""
    return size_of(standard(d, h, **options)) - d * d


def _sharing(name: str) -> float:
    """Query heads for each KV head of a published model."""
    heads = CONFIGS[name].size("num_heads") or 1
    return heads / (CONFIGS[name].size("num_kv_heads") or heads)


# Operations, counted on running layers.
N, D = 512, 256  # sizes at which time is measured
PYTORCH = Bilingual("PyTorch's attention", "PyTorch 的注意力")


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
              sum(stage.flops for stage in large[1] if stage.name in ("scores", "weighted sum")), 6.87e10 / 16, 0.001),
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
    lengths = 4, 8, 16, 32, 64, 128, 256
    grown = {Bilingual("counted, h = 6", "计数，h = 6"): {n: _layer_flops(n, 24, 6) for n in lengths}}
    terms = {"8·n·d²": {n: 8 * n * 24 * 24 for n in lengths}, "4·n²·d": {n: 4 * n * n * 24 for n in lengths}}
    return [
        *(equal((f"FLOPs at n = {n}, d = {d}, h = {h}", f"n = {n}、d = {d}、h = {h} 时的 FLOP 数"), found,
                4 * n * n * d + 8 * n * d * d) for (n, d, h), found in zip(sizes, counted, strict=True)),
        equal(("FLOPs without projections, n = 16, d = 24", "没有投影时的 FLOP 数，n = 16、d = 24"),
              _attention_flops(16, 24, 6), 4 * 16 * 16 * 24).control(counted[1]),
        Curve.of(Bilingual("FLOPs of a layer, d_model = 24", "一层的 FLOP 数，d_model = 24"),
                 TOKENS, FLOPS, grown, terms, log="xy"),
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


def _layer_flops(n: int, d: int, h: int) -> int:
    module, x = layer("multi_head", d, h), normal(1, n, d)
    return counted(lambda: module(x))


def _stages(n: int, d: int, h: int) -> list:
    return attention_stages(counts_of("multi_head", {"d_model": d, "num_heads": h}), Work(1, n, n, causal=False))


# Memory, precision and caches: what attention stores, and the error of storing less.


@claim
def score_memory() -> list[Check | Curve]:

    def weights(maps: int, h: int) -> int:
        """Bytes of the softmax that the formula keeps for its gradient, which does not depend on the values."""
        q, k = _leaf(1, maps, 128, 32 // h), _leaf(1, maps, 128, 32 // h)
        return _kept(lambda: torch.softmax(q @ k.mT, -1)) - 8 * 2 * 128 * 32 * maps // h

    def blockwise(h: int) -> int:
        """Bytes that blockwise attention keeps besides q, k, v and the output."""
        q, k, v = (_leaf(1, h, 128, 32 // h) for _ in range(3))
        return _kept(lambda: attend(q, k, v, kernel="torch_blocks")) - 8 * 4 * 128 * 32

    stored = {h: weights(h, h) for h in (1, 2, 4, 8, 16, 32)}
    lines = {
        Bilingual("weights, stored", "存储权重"): stored,
        Bilingual("blockwise: log-sum-exps", "分块：只存 log-sum-exp"): {h: blockwise(h) for h in stored},
    }
    title = Bilingual("Memory beside q, k, v and the output, n = 128, d_model = 32, float64",
                      "q、k、v 与输出之外的内存，n = 128，d_model = 32，float64")  # fmt: skip
    return [
        *(equal((f"h = {h}: memory of the weights relative to one head", f"h = {h}：权重的内存与单头之比"),
                stored[h] / stored[1], 1) for h in (2, 8, 32)),
        equal(("eight heads with one common map, relative to one head", "八个头共用一张图，与单头之比"),
              weights(1, 8) / stored[1], 1).control(stored[8] / stored[1]),
        Curve.of(title, HEADS, BYTES, lines, {
            Bilingual("as claimed", "如所述"): dict.fromkeys(stored, stored[1])}, log="xy"),
    ]  # fmt: skip


@claim
def memory_n_squared() -> list[Check | Curve]:

    def kept(n: int, fused: bool) -> float:
        q, k, v = (_leaf(1, 4, n, 8) for _ in range(3))
        return _kept(lambda: attend(q, k, v, kernel="torch_blocks") if fused else formula_of(q, k, v))

    def product(n: int) -> float:
        q, k = _leaf(1, 4, n, 8), _leaf(1, 4, n, 8)
        return _kept(lambda: q * k)

    lengths = 64, 128, 256, 512, 1024
    bytes_of = {fused: {n: kept(n, fused) for n in lengths} for fused in (False, True)}
    growth = {fused: bytes_of[fused][1024] / bytes_of[fused][512] for fused in (False, True)}
    linear = [product(n) for n in (512, 1024)]
    lines = {
        Bilingual("weights stored", "存储权重"): bytes_of[False],
        Bilingual("blockwise", "分块"): bytes_of[True],
    }
    return [
        at_least(("memory at twice n, weights stored", "n 加倍时的内存之比，存储权重"), growth[False], 3.5),
        at_least(("blockwise", "分块"), growth[True], 3.5).beyond(),
        equal(("at twice n, product entry by entry",
               "n 加倍时，逐元素相乘"), linear[1] / linear[0], 2).control(growth[False]),
        Curve.of(Bilingual("What is kept for the gradient, 4 heads of 8, float64",
                           "为求梯度保留的内存，4 个 8 维的头，float64"),
                 TOKENS, BYTES, lines, log="xy"),
    ]  # fmt: skip


@claim
def blockwise_is_exact() -> list[Check]:
    q, k, v = (normal(1, 2, 701, 16, seed=s) for s in range(3))
    truth = attend(q, k, v, mask=Causal(), kernel="reference")
    single = [attend(*(x.float() for x in (q, k, v)), mask=Causal(), kernel=name) for name in ("torch_blocks", "auto")]
    exact = attend(q, k, v, mask=Causal(), kernel="torch_blocks")
    blocks = [attend(q, k[:, :, part], v[:, :, part]) for part in (slice(None, 100), slice(100, None))]
    mean = difference((blocks[0] + blocks[1]) / 2, attend(q, k, v))
    return [
        same(("error in float64", "误差，float64"), exact, truth, 1e-12),
        same(("in float32", "float32"), single[0], truth, 2e-6),
        same(("in float32, fastest kernel", "float32，最快的内核"), single[1], truth, 2e-6),
        at_least(("error of the mean of two blocks", "两块取平均的误差"), mean, 0.01).control(difference(exact, truth)),
    ]


@claim
def mixed_precision() -> list[Check]:
    q, k, v = (normal(1, 2, 307, 32, seed=s).bfloat16() for s in range(3))
    truth = attend(*(x.double() for x in (q, k, v)), kernel="reference")
    error = (attend(q, k, v).double() - truth).norm() / truth.norm()
    summed = torch.softmax((q @ k.mT * 32**-0.5), -1, dtype=torch.bfloat16) @ v  # the statistics in bfloat16 too
    worse = (summed.double() - truth).norm() / truth.norm()
    return [
        at_most(("error in bfloat16", "bfloat16 的误差"), float(error), 6e-3),
        at_least(("error with the softmax in bfloat16, relative to it", "softmax 用 bfloat16 时的误差，与之相比"),
                 float(worse / error), 1.2).control(1.0),
    ]  # fmt: skip


@claim
def kv_cache() -> list[Check]:
    module, x, cache = layer("multi_head", 24, 4), normal(2, 11, 24, seed=5), KVCache()
    with torch.no_grad():
        tokens = [x[:, t : t + 1] for t in range(11)]
        steps = torch.cat([module(token, mask=Causal(), cache=cache) for token in tokens], 1)
        alone = torch.cat([module(token, mask=Causal()) for token in tokens], 1)
        whole = module(x, mask=Causal())
    return [
        same(("error of a token at a time", "逐词元解码的误差"), steps, whole),
        equal(("numbers cached per token", "每个词元缓存的数"), cache.nbytes / 8 / 2 / 11, 2 * 24),
        differs(("error without a cache", "没有缓存时的误差"), alone, whole, difference(steps, whole)),
    ]  # fmt: skip


@claim
def shared_keys_cache() -> list[Check | Curve]:
    x = normal(1, 7, 48, seed=5)
    sizes = {}
    for groups in (1, 2, 4, 8):
        cache = KVCache()
        layer("multi_head", 48, 8, num_kv_heads=groups)(x, cache=cache)
        sizes[groups] = cache.nbytes
    few, full = layer("multi_head", 48, 8, num_kv_heads=2), layer("multi_head", 48, 8)
    copied = type(few).from_heads(**_shared(few.per_head_weights(), lambda w: w))(x)
    own = full.per_head_weights()
    averaged = type(few).from_heads(**_shared(own, lambda w: w.unflatten(0, (2, 4)).mean(1)))(x)
    axis, unit = Bilingual("KV heads g", "键值头数 g"), Bilingual("bytes per token", "每个词元的字节数")
    tokens = {Bilingual("cached, h = 8", "缓存，h = 8"): {groups: size / 7 for groups, size in sizes.items()}}
    return [
        equal(("cache with 8 KV heads relative to 2", "8 个键值头与 2 个的缓存之比"), sizes[8] / sizes[2], 4),
        equal(("relative to 1", "与 1 个之比"), sizes[8] / sizes[1], 8),
        same(("difference between GQA and MHA with repeated KV heads", "GQA 与重复键值头的 MHA 之差"), few(x), copied),
        differs(("difference with keys and values averaged in each group", "各组键值取平均时的差异"),
                averaged, full(x), difference(few(x), copied)),
        Curve.of(Bilingual("Cache of a layer, d_model = 48, float64",
                           "一层的缓存，d_model = 48，float64"), axis, unit, tokens,
                 log="x"),
    ]  # fmt: skip


def _shared(weights: dict[str, Tensor], of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The weights of eight heads whose keys and values are `of` the given ones, each for the four heads of a group."""
    return {**weights, **{name: of(weights[name]).repeat_interleave(4, 0) for name in ("k", "v")}}


def _leaf(*shape: int) -> Tensor:
    return normal(*shape).requires_grad_()


def _kept(run: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass; each storage counts once."""
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        out = run()  # kept alive until counted; otherwise its storage could be reused
    return sum(kept.values()) if out is not None else 0
