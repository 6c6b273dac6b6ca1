"""What attention costs: operations, and memory."""

from headwise.costs import Work, attention_stages
from headwise.nn.registry import STANDARD, counts_of
from headwise.reports.curves import Curve
from headwise.textbook.guide.topic import Topic, exercise
from headwise.wording import Bilingual


@exercise(
    "The FLOPs of a layer of width `d` on `n` tokens without a mask: 2 per multiply-add of Q, K, V, the scores, the weighted sum and W_O.",
    "d_model 为 `d` 的一层在 `n` 个词元上（无掩码）的浮点运算量：Q、K、V、分数、加权求和与 W_O，每次乘加计 2。",
    lambda draw: (draw.size(1, 4096), draw.size(1, 1024)),
)
def layer_flops(n: int, d: int) -> int:
    """Our solution."""
    return 8 * n * d * d + 4 * n * n * d


@exercise(
    "The number of tokens from which on scores and weighted sum (4·n²·d) take at least as many FLOPs as the four projections (8·n·d²).",
    "从多少个词元开始，分数与加权求和（4·n²·d）的运算量不少于四个投影（8·n·d²）？",
    lambda draw: (draw.size(1, 4096),),
)
def crossover(d: int) -> int:
    """Our solution."""
    return 2 * d


@exercise(
    "The bytes of the stored scores of `h` heads on `b` sequences of `n` tokens with `size` bytes a number, and of the log-sum-exps that a blockwise kernel stores instead, one float32 for each query and head. Return both.",
    "`b` 个长 `n` 的序列、`h` 个头，存储分数需要的字节数（每个数 `size` 字节），以及分块内核改存 log-sum-exp（每个头的每个查询一个 float32）所需的字节数。返回这两个数。",
    lambda draw: (draw.size(1, 8), draw.size(1, 32), draw.size(1, 8192), draw.size(1, 4)),
)
def score_memory(b: int, h: int, n: int, size: int) -> tuple[int, int]:
    """Our solution."""
    return b * h * n * n * size, b * h * n * 4


def picture() -> Curve:
    """FLOPs of the parts of a layer over the number of tokens."""
    counts = counts_of(STANDARD, {"d_model": 512, "num_heads": 8})
    lengths = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    linear, square = {}, {}
    for n in lengths:
        flops = {s.name: s.flops for s in attention_stages(counts, Work(batch=1, queries=n, keys=n, causal=False))}
        linear[n] = (flops["projections"] + flops["output"]) / 1e9
        square[n] = (flops["scores"] + flops["weighted sum"]) / 1e9
    return Curve.of(
        Bilingual("Work of one layer, d_model = 512", "一层的计算量，d_model = 512"),
        Bilingual("tokens n", "词元数 n"), "GFLOP",
        {
            Bilingual("projections, 8·n·d²", "投影，8·n·d²"): linear,
            Bilingual("scores and weighted sum, 4·n²·d", "分数与加权求和，4·n²·d"): square,
        },
        log="xy",
    )  # fmt: skip


TOPIC = Topic(
    place=14,
    title=Bilingual("Computational cost", "计算量"),
    formula=r"h \cdot 4 n^2 d_k + 8 n\, d_{\text{model}}^2 = 4 n^2 d_{\text{model}} + 8 n\, d_{\text{model}}^2 = O(n^2 d + n d^2)",
    plain="h · 4·n²·d_k + 8·n·d² = 4·n²·d + 8·n·d²",
    intro=Bilingual(
        """
        The scores of one head cost 2·n²·d_k operations, and the weighted sum as many. With h heads of size d / h this is
        4·n²·d, the same as for one head of size d. "Splitting lowers the cost to O(n²·d_k)" counts one of the heads. What
        does grow with h are the exponentials of the softmax and the n × n scores, if they are stored.
        """,
        """
        一个头的分数要 2·n²·d_k 次运算，加权求和同样多。h 个 d / h 维的头合起来是 4·n²·d，与一个 d 维的头相同。
        “拆分使复杂度降到 O(n²·d_k)”只数了其中一个头。真正随 h 增长的是 softmax 的指数运算次数，以及（如果存储的话）n × n 的分数。
        """,
    ),
    code="""
from headwise.costs import Work, attention_stages
from headwise.nn.registry import counts_of
work = Work(batch=1, queries=1024, keys=1024, causal=False)
print("heads    QKV  scores  sum  W_O  total, MFLOP   exponentials")
for heads in (1, 8, 64):
    counts = counts_of("multi_head", {"d_model": 512, "num_heads": heads})
    stages = {stage.name: stage for stage in attention_stages(counts, work)}
    parts = [stages[name].flops / 1e6 for name in ("projections", "scores", "weighted sum", "output")]
    print(f"{heads:5}", *(f"{x:6.0f}" for x in parts), f"{sum(parts):8.0f} {stages['softmax'].exponentials:18,}")
""",
    reading=Bilingual(
        """
        Tests compare these formulas with PyTorch's FLOP counter on running modules. At n = 1,024 and d = 512 both kinds of
        work are equal: the crossover is at n = 2·d, not at n = d. For short texts the projections dominate, O(n·d²); for
        long ones the scores, O(n²·d).
        """,
        """
        测试会把这些公式与 PyTorch 在实际模块上的运算计数核对。n = 1,024、d = 512 时两类计算量恰好相等：分界点在 n = 2·d，而不是
        n = d。短文本由投影主导，O(n·d²)；长文本由分数主导，O(n²·d)。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "Work of the projections and of the scores: they cross at n = 2·d_model = 1,024 tokens.",
        "投影与分数的计算量：在 n = 2·d_model = 1,024 个词元处相交。",
    ),
    claims=(
        "complexity",
        "splitting-lowers-cost",
        "score-memory",
        "memory-n-squared",
        "same-cost-for-any-h",
        "cost-grows-with-heads",
        "n-squared-at-n-near-d",
    ),
    exercises=(layer_flops, crossover, score_memory),
)
