"""The parameters of a layer."""

from headwise.nn.registry import STANDARD, counts_of
from headwise.reports.curves import Curve
from headwise.textbook.guide.topic import Topic, exercise
from headwise.wording import Bilingual


@exercise(
    "The parameters of W_Q, W_K, W_V and W_O of a layer with width `d_model`, `num_heads` query heads, `num_kv_heads` KV heads and heads of size `head_dim`; with `bias`, each of the four has a bias vector as well.",
    "一层中 W_Q、W_K、W_V、W_O 的参数量：模型维度 `d_model`，`num_heads` 个查询头，`num_kv_heads` 个键值头，头维度 `head_dim`；`bias` 为真时，四者各有一个偏置向量。",
    lambda draw: (draw.size(1, 64), draw.size(1, 8), draw.size(1, 8), draw.size(1, 16), draw.size(0, 1) == 1),
)
def parameters(d_model: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool) -> int:
    """Our solution."""
    q, kv = num_heads * head_dim, num_kv_heads * head_dim
    return d_model * (2 * q + 2 * kv) + bias * (q + 2 * kv + d_model)


@exercise(
    "The share of a model's parameters that is attention: `layers` layers of width d with 4d² for attention and 2·d·d_ff for the feed-forward network, and an embedding of vocab × d.",
    "注意力占模型参数的比例：`layers` 层、宽度 d，每层注意力 4d²、前馈网络 2·d·d_ff，另有 vocab × d 的词嵌入。",
    lambda draw: (draw.size(1, 12), draw.size(1, 64), draw.size(1, 256), draw.size(0, 1000)),
)
def attention_share(layers: int, d: int, d_ff: int, vocab: int) -> float:
    """Our solution."""
    attention = layers * 4 * d * d
    return attention / (attention + layers * 2 * d * d_ff + vocab * d)


@exercise(
    "How many KV heads fit: the largest divisor g of `num_heads` for which W_Q, W_K, W_V and W_O with g KV heads (h·d_k = d) have at most `limit` parameters; 0 if none does.",
    "最多能有几个键值头：求 `num_heads` 的最大因数 g，使得有 g 个键值头时（h·d_k = d）W_Q、W_K、W_V、W_O 的参数不超过 `limit`；没有则返回 0。",
    lambda draw: ((h := draw.size(1, 12)) * (k := draw.size(1, 8)), h, draw.size(0, 4 * (h * k) ** 2)),
)
def most_kv_heads(d_model: int, num_heads: int, limit: int) -> int:
    """Our solution."""
    fits = [
        g for g in range(1, num_heads + 1)
        if num_heads % g == 0 and 2 * d_model**2 + 2 * d_model * g * (d_model // num_heads) <= limit
    ]  # fmt: skip
    return max(fits, default=0)


def picture() -> Curve:
    """Parameters over the number of heads, at a fixed width and at a fixed size of heads."""
    heads = (1, 2, 4, 8, 12, 16, 24)
    fixed = {h: counts_of(STANDARD, {"d_model": 768, "num_heads": h}).parameters / 1e6 for h in heads if 768 % h == 0}
    sized = {h: counts_of(STANDARD, {"d_model": 768, "num_heads": h, "head_dim": 64}).parameters / 1e6 for h in fixed}
    shared = {
        h: counts_of(STANDARD, {"d_model": 768, "num_heads": h, "num_kv_heads": 1}).parameters / 1e6 for h in fixed
    }
    return Curve.of(
        Bilingual("Parameters of a layer, d_model = 768", "一层的参数量，d_model = 768"),
        Bilingual("number of heads h", "头数 h"), Bilingual("millions", "百万"),
        {
            Bilingual("d_k = d_model / h", "d_k = d_model / h"): fixed,
            Bilingual("d_k = 64", "d_k = 64"): sized,
            Bilingual("d_k = d_model / h, one KV head", "d_k = d_model / h，一个键值头"): shared,
        },
    )  # fmt: skip


TOPIC = Topic(
    place=9,
    title=Bilingual("Parameters", "参数量"),
    formula=Bilingual(
        r"|W_Q| + |W_K| + |W_V| + |W_O| = 4\, d_{\text{model}}^2 \quad \text{if } h\, d_k = h\, d_v = d_{\text{model}}",
        r"|W_Q| + |W_K| + |W_V| + |W_O| = 4\, d_{\text{model}}^2, \quad \text{若 } h\, d_k = h\, d_v = d_{\text{model}}",
    ),
    plain=Bilingual(
        "|W_Q| + |W_K| + |W_V| + |W_O| = 4 d²  if h·d_k = h·d_v = d",
        "|W_Q| + |W_K| + |W_V| + |W_O| = 4 d²，若 h·d_k = h·d_v = d",
    ),
    intro=Bilingual(
        """
        A head of size d_k needs three matrices d_model × d_k and d_k rows of W_O. With h heads of size d_model / h the h
        cancels: 4·d_model² whatever the number of heads. This is a property of that choice of d_k, not of attention. With
        biases, shared keys and values, or heads of another size, the number differs.
        """,
        """
        维度为 d_k 的头需要三个 d_model × d_k 的矩阵，以及 W_O 的 d_k 行。h 个头、每个 d_model / h 维时，h 正好消去：
        不论多少个头，都是 4·d_model²。这是 d_k 取法的性质，不是注意力本身的性质；有偏置、共享键值或头维度另取时，数目就不同。
        """,
    ),
    code="""
import headwise as hw
def count(heads=12, **options):
    return sum(p.numel() for p in hw.MultiHeadAttention(768, heads, **options).parameters())
print("4 · 768²             ", f"{4 * 768**2:,}")
for heads in (1, 12, 48):
    print(f"{heads:2} heads             ", f"{count(heads):,}")
print("with biases          ", f"{count(bias=True):,}")
print("4 KV heads (GQA)     ", f"{count(num_kv_heads=4):,}")
print("1 KV head (MQA)      ", f"{count(num_kv_heads=1):,}")
print("heads of size 128    ", f"{count(head_dim=128):,}")
""",
    reading=Bilingual(
        """
        2,359,296 is the 2.36 million of a layer of GPT-2 small (2,362,368 with its biases). "Multi-head attention has more
        parameters than single-head attention", as a tutorial's table says, is not so at equal width. For whole models,
        `headwise plan --config gpt-2-small` counts everything, and its total equals the published one.
        """,
        """
        2,359,296 就是 GPT-2 small 一层的 236 万（加上偏置是 2,362,368）。教程表格中“多头的参数量较多”的说法，在 d_model 相同时并不成立。
        对整个模型，`headwise plan --config gpt-2-small` 会逐项计数，总数与公布的一致。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "The number of heads changes the parameters only if the size of a head does not shrink with it, or KV heads are shared.",
        "只有当头维度不随头数缩小，或者共享键值头时，头数才会影响参数量。",
    ),
    claims=("four-d-squared", "gpt-2-small-layer", "mqa-parameters", "multi-head-has-more"),
    exercises=(parameters, attention_share, most_kv_heads),
)
