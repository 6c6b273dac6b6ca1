"""The sizes of published models."""

from headwise.costs import CONFIGS
from headwise.wording import Bilingual
from headwise_textbook.curves import Curve
from headwise_textbook.guide.topic import Topic, exercise

GPT = ("gpt-2-small", "gpt-2-large", "gpt-3")


@exercise(
    "All numbers of heads by which a width `d_model` can be divided so that heads have at least `least` channels, in ascending order.",
    "列出（升序）能整除宽度 `d_model`、且每个头至少有 `least` 个通道的所有头数。",
    lambda draw: (draw.size(1, 96), draw.size(1, 8)),
)
def possible_heads(d_model: int, least: int) -> list[int]:
    """Our solution."""
    return [h for h in range(1, d_model + 1) if d_model % h == 0 and d_model // h >= least]


@exercise(
    "The width d_k of a head: `head_dim` where the model publishes it (not None), otherwise d_model / num_heads; and whether h·d_k = d_model.",
    "求头维度 d_k：模型公布了 `head_dim`（非 None）就用它，否则是 d_model / num_heads；并返回 h·d_k 是否等于 d_model。",
    lambda draw: (
        (h := draw.size(1, 8)) * (k := draw.size(1, 8)), h,
        None if draw.size(0, 1) else draw.size(max(1, k - 1), k + 1),
    ),
)  # fmt: skip
def head_size(d_model: int, num_heads: int, head_dim: int | None) -> tuple[int, bool]:
    """Our solution."""
    d_k = d_model // num_heads if head_dim is None else head_dim
    return d_k, num_heads * d_k == d_model


@exercise(
    "The parameters of W_Q, W_K, W_V and W_O of a whole model: `layers` layers of width `d_model` with `num_heads` query and `num_kv_heads` KV heads of size `head_dim`, without biases.",
    "整个模型中 W_Q、W_K、W_V、W_O 的参数量：`layers` 层，模型维度 `d_model`，每层 `num_heads` 个查询头、`num_kv_heads` 个键值头，头维度 `head_dim`，无偏置。",
    lambda draw: (draw.size(1, 48), draw.size(1, 512), draw.size(1, 64), draw.size(1, 8), draw.size(1, 128)),
)
def model_attention(layers: int, d_model: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Our solution."""
    return layers * 2 * d_model * head_dim * (num_heads + num_kv_heads)


def picture() -> Curve:
    """Heads and head size of the GPT models over their width."""
    configs = [CONFIGS[name] for name in GPT]
    heads = {c.d_model: c.size("num_heads") or 1 for c in configs}
    return Curve.of(
        Bilingual("GPT-2 and GPT-3: wider models have more heads", "GPT-2 与 GPT-3：模型越宽，头越多"),
        "d_model", Bilingual("number", "数目"),
        {Bilingual("heads h", "头数 h"): heads, Bilingual("head size d_k", "头维度 d_k"): {d: d // h for d, h in heads.items()}},
        log="xy",
    )  # fmt: skip


TOPIC = Topic(
    place=10,
    title=Bilingual("Configurations of published models", "已发布模型的配置"),
    formula=Bilingual(
        r"d_k = d_{\text{model}} / h \quad\text{(usual)}, \qquad h\, d_k \neq d_{\text{model}} \quad\text{(allowed)}",
        r"d_k = d_{\text{model}} / h \quad\text{（通常）}, \qquad h\, d_k \neq d_{\text{model}} \quad\text{（允许）}",
    ),
    plain=Bilingual(
        "usually d_k = d / h; required is only W_O: [h·d_v, d]", "通常 d_k = d / h；必须满足的只有 W_O: [h·d_v, d]"
    ),
    intro=Bilingual(
        """
        A model becomes wider by more heads, not by wider heads: d_k is 64 or 128 in most published models, and h grows with
        d_model. The table is from the papers and the published weights; `headwise plan list` has all models, and
        `headwise plan model NAME` their parameters, memory and work.
        """,
        """
        模型变宽，靠的是更多的头，而不是更大的头：大多数已发布模型的 d_k 是 64 或 128，h 随 d_model 增长。下表取自论文与公布的权重；
        `headwise plan list` 列出所有模型，`headwise plan model 名称` 计算其参数、内存与计算量。
        """,
    ),
    code="""
from headwise.costs import CONFIGS
print("model            d_model layers heads KV heads  d_k h·d_k/d_model")
for name in ("transformer-base", "bert-base", "gpt-2-small", "gpt-2-medium", "gpt-2-large", "gpt-3", "llama-7b",
             "llama-2-7b", "llama-2-70b", "qwen3-8b", "gemma-7b", "deepseek-v2"):
    c = CONFIGS[name]
    heads = c.size("num_heads")
    d_k = c.size("head_dim") or c.d_model // heads        # published, or by division
    print(f"{name:16} {c.d_model:7,} {c.layers:6} {heads:5} {c.size('num_kv_heads') or heads:8} {d_k:4} {heads * d_k / c.d_model:9.2f}")
""",
    reading=Bilingual(
        """
        h·d_k = d_model is a habit. Gemma 7B has heads of 256 channels, DeepSeek-V2 has 128 heads of 128 at a width of 5,120;
        both only need W_O to be [h·d_v, d_model]. And "LLaMA-2 uses GQA" is true of the 70B model; 7B and 13B have a
        KV head for each query head.
        """,
        """
        h·d_k = d_model 只是惯例。Gemma 7B 的头维度是 256，DeepSeek-V2 的 d_model 是 5,120，却有 128 个 128 维的头；必须满足的只有 W_O
        的形状是 [h·d_v, d_model]。另外，“LLaMA-2 采用 GQA”只对 70B 成立；7B 与 13B 每个查询头都有自己的键值头。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "From GPT-2 small to GPT-3 the width grows sixteenfold, the number of heads eightfold, the head size twofold.",
        "从 GPT-2 small 到 GPT-3，d_model 增至十六倍，头数增至八倍，头维度增至两倍。",
    ),
    claims=("head-size-table", "width-divides-by-heads"),
    exercises=(possible_heads, head_size, model_attention),
)
