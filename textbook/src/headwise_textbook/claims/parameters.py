"""Parameters and sizes of heads, counted on layers and read from publications."""

from typing import Any

import torch
from torch import nn

from headwise.costs import CONFIGS
from headwise.wording import Bilingual
from headwise_textbook.claims.claim import claim
from headwise_textbook.claims.evidence import Check, Verdict, at_least, equal
from headwise_textbook.claims.samples import standard
from headwise_textbook.curves import Curve
from headwise_textbook.texts import place

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


@claim(
    "A multi-head layer has 4·d_model² parameters, however many heads it has.",
    "多头注意力层有 4·d_model² 个参数，与头数无关。",
    formula="|W_Q| + |W_K| + |W_V| + |W_O| = 4·d_model²",
    at=[
        place("chapter", "11.7.1", "Four matrices of d_model × d_model, 4·d_model² in total.",
              "四个 d_model × d_model 矩阵，共 4·d_model²。", equations="1", table=1),
        place("treatment", "5.3.3", "Q, K and V of h heads have d_model² each.",
              "h 个头的 Q、K、V 各 d_model²。", paragraph=2),
        place("treatment", "5.3.3", "In total 4·d_model², exactly as a single head.",
              "总计 4·d_model²，与单头完全相同。",
              paragraph=4),
        place("treatment", "5.3.19", "The summary: with h heads still 4·d_model², as with a single one.",
              "小结：有 h 个头，参数仍是 4·d_model²，与单头相同。", paragraph=2),
    ],
    control=("eight heads of full size have eight times as many", "八个全尺寸的头有八倍的参数"),
    note="只在 h·d_k = h·d_v = d_model、没有偏置（另加 4·d_model）、不共享键值时成立。章内代码用 nn.Linear 的默认偏"
         "置，已多出 4·d_model。",
    expected=Verdict.CONDITIONS,
)  # fmt: skip
def four_d_squared() -> list[Check | Curve]:
    """Only with h·d_k = h·d_v = d_model, without bias (+ 4·d_model) and without shared keys and values. The code of the
    chapter has the default biases of nn.Linear, 4·d_model more.
    """
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


@claim(
    "Multi-head attention has more parameters than single-head attention, because its linear maps are larger.",
    "多头注意力的参数比单头多，因为线性变换矩阵更大。",
    formula=("claimed: |multi-head| > |single head|;  counted: 4·d² each", "所述：多头 > 单头；计数：都是 4·d²"),
    at=[
        place("tutorial", "6", "Row “parameters”: fewer for a single head, more for several, whose maps are larger.",
              "“参数量”一行：单头较少，多头较多（线性变换矩阵更大）。", table=1),
    ],
    control=("a single head without W_O, 3·d², does have fewer", "没有 W_O 的单头只有 3·d²，确实较少"),
    note="单头读作同一个层、h = 1、d_k = d_model：两者都是 4·d²，矩阵一样大，与教程自己的代码一致。若单头没有 W_O，则"
         "多头是它的 4/3 倍，"
    "但 Q、K、V 的矩阵并不更大。",
    expected=Verdict.FAILS,
)  # fmt: skip
def multi_head_has_more() -> list[Check]:
    """A single head is read as the same layer with h = 1 and d_k = d_model: 4·d² in both, with matrices of one size, as
    in the tutorial's own code. Without W_O a single head has 3·d², and several have 4/3 of that; but their maps for Q,
    K and V are no larger.
    """
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


@claim(
    "An attention layer of GPT-2 small has some 2.36 million parameters.",
    "GPT-2 small 的一层注意力约有 236 万个参数。",
    formula="4·768² = 2,359,296",
    at=[place("chapter", "11.7.1", "With d_model = 768 a layer has 4 × 768², about 2.36 million.",
              "d_model = 768 时每层 4 × 768²，约 236 万。", item=1)],
    also="Radford et al. 2019",
    control=("GPT-2 medium, with d_model = 1024, has 4.19 million", "d_model = 1024 的 GPT-2 medium 有 419 万"),
    note="4·768²；加上 GPT-2 的偏置再多 3,072。",
)  # fmt: skip
def gpt_2_small_layer() -> list[Check]:
    """4·768², and 3,072 more with the biases of GPT-2."""
    with torch.device("meta"):
        plain, biased, medium = standard(768, 12), standard(768, 12, bias=True), standard(1024, 16)
    return [
        equal(("parameters", "参数量"), _size(plain), 2.36e6, 0.002),
        equal(("with bias", "有偏置"), _size(biased), 2.36e6, 0.002),
        equal(("parameters of GPT-2 medium's", "GPT-2 medium 的参数量"), _size(medium), 4.19e6, 0.002).control(
            _size(plain)
        ),
    ]


@claim(
    "Heads are usually of size 64 or 128, and h·d_k = d_model.",
    "头维度通常是 64 或 128，且 h·d_k = d_model。",
    formula="d_k ∈ {64, 128},  h·d_k = d_model",
    at=[
        place("chapter", "11.7.2",
              "GPT-2 small, medium, large: 12, 16, 20 heads of 64; GPT-3 and LLaMA-7B: 96 and 32 of 128.",
              "GPT-2 三种规模：12、16、20 个 64 维的头；GPT-3 与 LLaMA-7B：96、32 个 128 维的头。", table=1),
        place("chapter", "11.7.2", "d_key is usually 64 or 128.", "d_key 通常是 64 或 128。", item=1),
        place("chapter", "11.9.3", "64 or 128 is a balance found by experience.", "64 或 128 是经验性的平衡点。"),
        place("treatment", "5.3.10", "8 heads of 64 in the first Transformer, 96 of 128 in GPT-3.",
              "最初的 Transformer 用 8 个 64 维的头，GPT-3 用 96 个 128 维的头。", paragraph=3),
        place("notes", "2", "Features are divided equally: d_k = d_v = d_model / h.",
              "特征均分：d_k = d_v = d_model / h。",
              item=1),
    ],
    control=("the sizes are read, not computed: d_model / h gives another size for several models",
             "头维度取自公布值，而非由 d_model / h 算出：对若干模型两者不同"),
    note="在公布了头维度的模型中，多数是 64 或 128。但 h·d_k = d_model 并非必须：T5-11B、Gemma 7B、DeepSeek-V2 等都不"
         "满足；"
    "GPT-3 论文中 13B 一行的 5140 不是 40·128 = 5120。",
    expected=Verdict.CONDITIONS,
)  # fmt: skip
def head_size_table() -> list[Check]:
    """Most models whose head size is published have 64 or 128. But h·d_k = d_model is not required: T5-11B, Gemma 7B
    and DeepSeek-V2 have other sizes, and the 5140 of GPT-3 13B is not 40·128 = 5120.
    """
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


@claim(
    "The width d_model must be divisible by the number of heads.",
    "d_model 必须能被头数 h 整除。",
    formula="h | d_model",
    at=[place("tutorial", "7", "num_hiddens must be divisible by h, so that d_k is an integer.",
              "num_hiddens 必须能被 h 整除，以保证 d_k 是整数。", item=2)],
    also="Brown et al. 2020, table 2.1",
    control=("the numbers of heads that divide 12 are accepted", "能整除 12 的头数都被接受"),
    note="只有 d_k 由 d_model / h 算出时才如此，nn.MultiheadAttention 就是这样。若头维度另行给定，W_O 会把 h·d_v 维"
         "映回 d_model，任何头数都可以；GPT-3 论文的 1.3B 与 13B 两行便不整除。",
    expected=Verdict.CONDITIONS,
)  # fmt: skip
def width_divides_by_heads() -> list[Check]:
    """Only where d_k is computed as d_model / h, as in nn.MultiheadAttention. With a given size of heads W_O maps
    h·d_v numbers to d_model, for any number of heads; in the rows 1.3B and 13B of GPT-3's table h does not divide.
    """
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


@claim(
    "With one key and value head for all, Q, K and V take d² + 2·d·d_k parameters instead of 3·d² (if h·d_k = d).",
    "所有头共用一组键值时，Q、K、V 的参数由 3·d² 减为 d² + 2·d·d_k（h·d_k = d 时）。",
    formula=("d² + 2·d·d_k instead of 3·d²", "d² + 2·d·d_k，而非 3·d²"),
    at=[
        place("treatment", "5.3.15", "All heads share one key and one value.", "所有头共享同一组键和值。", equations=
              "5.3.15"),
        place("treatment", "5.3.15", "Parameters fall from 3·d_model² to d_model² + 2·d_model·d_k.",
              "参数由 3·d_model² 减到 d_model² + 2·d_model·d_k。", paragraph=2),
    ],
    also="Shazeer 2019, 1911.02150",
    control=("two shared heads take d² + 4·d·d_k", "共用两组键值时为 d² + 4·d·d_k"),
    note="在三种大小的模块上计数，不含 W_O。式 (5.3.15) 漏写了拼接与 W_O。",
)  # fmt: skip
def mqa_parameters() -> list[Check | Curve]:
    """Counted on modules of three sizes, without W_O. Eq. 5.3.15 omits the concatenation and W_O."""
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


@claim(
    "LLaMA-2 uses grouped-query attention.",
    "LLaMA-2 采用了分组查询注意力。",
    formula="h / h_kv > 1",
    at=[place("treatment", "5.3.15", "Modern models such as LLaMA-2 use grouped-query attention.",
              "LLaMA-2 等现代大模型采用分组查询注意力。", paragraph=3)],
    also="Touvron et al. 2023, 2307.09288, table 1",
    control=("LLaMA-65B of the first generation shares no keys", "第一代的 LLaMA-65B 不共享键值"),
    note="只有 70B（及未发布的 34B）如此；7B 与 13B 是普通的多头注意力。",
    expected=Verdict.CONDITIONS,
)  # fmt: skip
def llama_2_uses_gqa() -> list[Check]:
    """Only the 70B model (and the unreleased 34B) does; 7B and 13B have ordinary multi-head attention."""
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
