"""Blocks, precision and caches: how attention is computed on machines."""

import torch
from torch import Tensor

from headwise.wording import Bilingual
from headwise_textbook.curves import Curve
from headwise_textbook.guide.topic import Topic, exercise


@exercise(
    "Merge two halves of the keys: outputs `a`, `b` `[n, d]` over each half with their log-sum-exps `la`, `lb` `[n]`. Return the output over all keys.",
    "合并两半键的结果：`a`、`b` `[n, d]` 是各半键上的输出，`la`、`lb` `[n]` 是各自的 log-sum-exp。返回全部键上的输出。",
    lambda draw: (
        draw.normal(n := draw.size(), d := draw.size()),
        draw.normal(n, d),
        5 * draw.normal(n),
        5 * draw.normal(n),
    ),
    tolerance=1e-3,
)
def merge_halves(a: Tensor, b: Tensor, la: Tensor, lb: Tensor) -> Tensor:
    """Our solution."""
    share = (la - torch.logaddexp(la, lb)).exp()[:, None]
    return share * a + (1 - share) * b


@exercise(
    "Attention in blocks: softmax(q kᵀ) v for `q` `[n, d]`, `k` `[m, d]`, `v` `[m, e]` without ever making a matrix wider than `size` keys. (Only the result is checked.)",
    "分块注意力：对 `q` `[n, d]`、`k` `[m, d]`、`v` `[m, e]` 计算 softmax(q kᵀ) v，任何时候都不产生宽于 `size` 个键的矩阵。（只检查结果。）",
    lambda draw: (
        draw.normal(draw.size(), d := draw.size(1, 4)),
        draw.normal(m := draw.size(1, 9), d),
        draw.normal(m, draw.size(1, 4)),
        draw.size(1, 4),
    ),
    tolerance=1e-3,
)
def in_blocks(q: Tensor, k: Tensor, v: Tensor, size: int) -> Tensor:
    """Our solution."""
    total, most = torch.zeros(len(q), v.shape[1]), torch.full((len(q), 1), -torch.inf)
    sums = torch.zeros(len(q), 1)
    for start in range(0, len(k), size):
        scores = q @ k[start : start + size].T
        new = torch.maximum(most, scores.amax(1, keepdim=True))
        p, scale = (scores - new).exp(), (most - new).exp()
        total, sums, most = total * scale + p @ v[start : start + size], sums * scale + p.sum(1, keepdim=True), new
    return total / sums


@exercise(
    "One decoding step, softmax(q kᵀ / √d) v over all earlier tokens and the new one: `q` `[h, d]` of the new token, the cache `k`, `v` `[h, n, d]` and the new token's key and value `new_k`, `new_v` `[h, d]`. Return the output `[h, d]` and the longer cache `[h, n + 1, d]` of both.",
    "一步解码，对所有旧词元与新词元计算 softmax(q kᵀ / √d) v：新词元的 `q` `[h, d]`，缓存 `k`、`v` `[h, n, d]`，新词元的键和值 `new_k`、`new_v` `[h, d]`。返回输出 `[h, d]` 与两个变长的缓存 `[h, n + 1, d]`。",
    lambda draw: (
        draw.normal(h := draw.size(1, 3), d := draw.size(1, 4)), draw.normal(h, n := draw.size(), d), draw.normal(h, n, d),
        draw.normal(h, d), draw.normal(h, d),
    ),
    tolerance=1e-3,
)  # fmt: skip
def decode_step(q: Tensor, k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Our solution."""
    k, v = torch.cat((k, new_k[:, None]), 1), torch.cat((v, new_v[:, None]), 1)
    p = (k @ q[..., None] / q.shape[-1] ** 0.5).softmax(1)
    return (p * v).sum(1), k, v


def picture() -> Curve:
    """Memory of stored scores and of a log-sum-exp per row."""
    lengths = (256, 1024, 4096, 16384, 65536)
    stored = {n: 8 * n * n * 4 / 2**20 for n in lengths}
    blocks = {n: 8 * n * 4 / 2**20 for n in lengths}
    inputs = {n: 4 * 8 * n * 64 * 4 / 2**20 for n in lengths}
    return Curve.of(
        Bilingual("Memory of attention, 8 heads of size 64, float32", "注意力的内存，8 个 64 维的头，float32"),
        Bilingual("tokens n", "词元数 n"), "MiB",
        {
            Bilingual("scores, n² per head", "分数，每头 n²"): stored, Bilingual("q, k, v and output", "q、k、v 与输出"): inputs,
            Bilingual("log-sum-exp, n per head", "log-sum-exp，每头 n"): blocks,
        },
        log="xy",
    )  # fmt: skip


TOPIC = Topic(
    place=24,
    title=Bilingual("Blocks, precision and caches", "并行、分块与精度"),
    formula=r"O = \frac{e^{\ell_1} O_1 + e^{\ell_2} O_2}{e^{\ell_1} + e^{\ell_2}}, \qquad \ell = \log \sum_j e^{S_{ij}}",
    plain="O = (e^l1 O1 + e^l2 O2) / (e^l1 + e^l2),  l = log Σ_j exp(S_ij)",
    intro=Bilingual(
        """
        Batch and heads are independent, so they are what is spread over cores and multiprocessors; whether h divides the
        number of multiprocessors matters little, because batch and blocks of queries are parallel too. Within a head, the keys can
        be processed in blocks: the results of two sets of keys merge exactly, given the log-sum-exp of each. So the
        n × n scores never have to exist, which is the idea of FlashAttention. headwise stores the log-sum-exp and
        recomputes any weight from it.
        """,
        """
        批次与头相互独立，因此被分配到各个核心或流式多处理器上；h 是否整除处理器个数并不重要，因为批次与查询块也可以并行。
        在一个头之内，键可以分块处理：只要知道每块的 log-sum-exp，两组键的结果就能精确合并，n × n 的分数从不需要存在，
        这就是 FlashAttention 的思想。headwise 保存 log-sum-exp，需要时由它重新算出任何一个权重。
        """,
    ),
    code="""
import torch, headwise as hw
q, k, v = torch.randn(3, 1, 8, 1024, 64)
exact = hw.attend(q, k, v, mask=hw.Causal(), kernel="reference")           # the stored matrix, in float64
def error(out): return ((out.double() - exact.double()).norm() / exact.norm()).item()
blocks = hw.attend(q, k, v, mask=hw.Causal(), kernel="torch_blocks")
print(f"in blocks, float32: below 1e-6: {error(blocks) < 1e-6}")
half = hw.attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask=hw.Causal())
print(f"inputs in bfloat16: below 6e-3: {error(half) < 6e-3}, output {half.dtype}")
print(f"scores of 8 heads: {8 * 1024**2 * 4:,} bytes; log-sum-exps: {8 * 1024 * 4:,} bytes")
mha, cache, x = hw.MultiHeadAttention(512, 8).eval(), hw.KVCache(), torch.randn(1, 6, 512)
steps = torch.cat([mha(x[:, i:i+1], mask=hw.Causal(), cache=cache) for i in range(6)], 1)
print("six steps with a cache = one pass:", torch.allclose(steps, mha(x, mask=hw.Causal()), atol=1e-6))
""",
    reading=Bilingual(
        """
        Blockwise attention is exact, not an approximation; bfloat16 has rounding errors of its inputs, while scores and softmax are
        computed in float32. "The space is that of a single head" does not hold for stored scores, which are h times as many.
        `headwise doctor` reports which kernel runs on your machine, `make bench` how fast.
        """,
        """
        分块注意力是精确的，不是近似；bfloat16 的误差来自输入的舍入，分数与 softmax 仍以 float32 计算。“空间复杂度与单头相当”
        对存储分数的实现不成立：分数是单头的 h 倍。`headwise doctor` 报告你的机器使用哪个内核，`make bench` 测量速度。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "Memory of stored scores, of inputs and outputs, and of what a blockwise kernel keeps instead of the scores.",
        "存储分数、输入输出，以及分块内核代替分数所保存的内容各需多少内存。",
    ),
    claims=(
        "blockwise-is-exact",
        "key-blocks-merge-exactly",
        "mixed-precision",
        "kv-cache",
        "score-memory",
        "torch-tells-lse",
    ),
    exercises=(merge_halves, in_blocks, decode_step),
)
