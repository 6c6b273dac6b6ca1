"""Parameters and sizes of heads, counted on layers and read from publications."""

from typing import Any

import torch
from torch import nn

from headwise.costs import CONFIGS
from headwise.wording import Bilingual
from headwise_textbook.claims.claim import claim
from headwise_textbook.claims.evidence import Check, at_least, equal
from headwise_textbook.claims.samples import standard
from headwise_textbook.curves import Curve

HEADS = 1, 2, 3, 6, 12, 24, 48, 96
AXIS, COUNT = Bilingual("heads h", "头数 h"), Bilingual("parameters", "参数量")

# d_model, heads and size of a head where the publication or the released configuration states all three.
PUBLISHED = {
    "Transformer base (1706.03762, table 3)": (512, 8, 64),
    "Transformer big (1706.03762, table 3)": (1024, 16, 64),
    "GPT-3 125M (2005.14165, table 2.1)": (768, 12, 64),
    "GPT-3 350M (2005.14165, table 2.1)": (1024, 16, 64),
    "GPT-3 760M (2005.14165, table 2.1)": (1536, 16, 96),
    "GPT-3 1.3B (2005.14165, table 2.1)": (2048, 24, 128),
    "GPT-3 2.7B (2005.14165, table 2.1)": (2560, 32, 80),
    "GPT-3 6.7B (2005.14165, table 2.1)": (4096, 32, 128),
    "GPT-3 13B (2005.14165, table 2.1)": (5140, 40, 128),
    "GPT-3 175B (2005.14165, table 2.1)": (12288, 96, 128),
    "T5-base (1910.10683, §3.1.1)": (768, 12, 64),
    "T5-3B (1910.10683, §3.7)": (1024, 32, 128),
    "T5-11B (1910.10683, §3.7)": (1024, 128, 128),
    "Mistral 7B (2310.06825, table 1)": (4096, 32, 128),
    "Gemma 2B (2403.08295, table 1)": (2048, 8, 256),
    "Gemma 7B (2403.08295, table 1)": (3072, 16, 256),
    "DeepSeek-V2 (2405.04434, §3.1.2)": (5120, 128, 128),
}
# The table of the chapter: d_model, heads, size of a head.
IN_THE_CHAPTER = {
    "GPT-2 Small": (768, 12, 64), "GPT-2 Medium": (1024, 16, 64), "GPT-2 Large": (1280, 20, 64),
    "GPT-3": (12288, 96, 128), "LLaMA-7B": (4096, 32, 128),
}  # fmt: skip


@claim
def four_d_squared() -> list[Check | Curve]:
    d, target = 48, 4 * 48**2
    others: dict[tuple[str, str], dict[str, Any]] = {
        ("with bias", "有偏置"): {"bias": True},
        ("two KV heads for eight", "八个头共用两个键值头"): {"num_kv_heads": 2},
        ("head_dim 16 instead of 6", "head_dim 为 16 而非 6"): {"head_dim": 16},
    }
    heads = 1, 2, 4, 8, 16, 48
    sizes = {h: _size(standard(d, h)) for h in heads}
    lines = {
        Bilingual("no bias", "无偏置"): sizes,
        Bilingual("with bias", "有偏置"): {h: _size(standard(d, h, bias=True)) for h in heads},
        Bilingual("one KV head (MQA)", "一个键值头（MQA）"): {h: _size(standard(d, h, num_kv_heads=1)) for h in heads},
    }
    title = Bilingual(f"Parameters of a layer, d_model = {d}", f"一层的参数量，d_model = {d}")
    return [
        *(equal(f"h = {h}", sizes[h], target) for h in (1, 2, 8, 48)),
        *(equal(what, _size(standard(d, 8, **o)), target).beyond() for what, o in others.items()),
        equal(("eight heads of size 48", "八个 48 维的头"), _size(standard(d, 8, head_dim=48)), 8 * target).control(
            sizes[8]
        ),
        Curve.of(title, AXIS, COUNT, lines, log="x"),
    ]


@claim
def multi_head_has_more() -> list[Check]:
    one, many = standard(48, 1), standard(48, 8)
    largest = [max(p.numel() for p in module.parameters()) for module in (one, many)]
    ratio = _size(many) / _size(one)
    return [
        at_least(("parameters of 8 heads relative to one", "8 个头与单头的参数量之比"), ratio, 1.01),
        at_least(("largest matrix of 8 heads relative to one",
                  "8 个头与单头的最大矩阵之比"), largest[1] / largest[0], 1.01),
        at_least(("relative to one head without W_O", "与没有 W_O 的单头之比"),
                 _size(many) / (_size(one) - one.o_proj.weight.numel()), 1.01).control(ratio),
    ]  # fmt: skip


@claim
def gpt_2_small_layer() -> list[Check]:
    with torch.device("meta"):
        plain, biased, medium = standard(768, 12), standard(768, 12, bias=True), standard(1024, 16)
    return [
        equal(("parameters", "参数量"), _size(plain), 2.36e6, 0.002),
        equal(("with bias", "有偏置"), _size(biased), 2.36e6, 0.002),
        equal(("parameters of GPT-2 medium's", "GPT-2 medium 的参数量"), _size(medium), 4.19e6, 0.002).control(
            _size(plain)
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
    counted = {
        name: {h: _without_output(96, h, num_kv_heads=heads) for h in HEADS}
        for name, heads in (("MHA", None), ("MQA", 1))
    }
    formula = {"d² + 2·d·d_k": {h: 96**2 + 2 * 96 * 96 // h for h in HEADS}}
    title = Bilingual("Parameters of Q, K and V, d_model = 96", "Q、K、V 的参数量，d_model = 96")
    return [*found, Curve.of(title, AXIS, COUNT, counted, formula, log="x")]


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


def _size(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _without_output(d: int, h: int, **options: Any) -> int:
    """Parameters of Q, K and V."""
    return _size(standard(d, h, **options)) - d * d


def _sharing(name: str) -> float:
    """Query heads for each KV head of a published model."""
    heads = CONFIGS[name].size("num_heads") or 1
    return heads / (CONFIGS[name].size("num_kv_heads") or heads)
