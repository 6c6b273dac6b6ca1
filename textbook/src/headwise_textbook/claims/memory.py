"""Memory, precision and caches: what attention stores, and the error of storing less."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from headwise import attend
from headwise.cache import KVCache
from headwise.masks import Causal
from headwise.wording import Bilingual
from headwise_textbook.claims.claim import claim
from headwise_textbook.claims.definitions import formula_of
from headwise_textbook.claims.evidence import Check, Verdict, at_least, at_most, difference, equal, same
from headwise_textbook.claims.samples import layer, normal
from headwise_textbook.curves import Curve
from headwise_textbook.texts import place

BYTES = Bilingual("bytes", "字节")


@claim(
    "With h = d_model / d_k heads the scores take the memory that a single head's take.",
    "h = d_model / d_k 时，分数所占的内存与单头相当。",
    formula=("claimed: n²;  stored: h·n²", "所述：n²；存储：h·n²"),
    at=[
        place("treatment", "5.3.11",
              "In the standard configuration the space complexity is comparable with a single head's.",
              "标准配置下，空间复杂度与单头注意力相当。", paragraph=10),
        place("treatment", "5.3.11", "One paragraph before: h matrices of n × n take O(h·n²), in proportion to h.",
              "前一段却说：h 个 n × n 矩阵占 O(h·n²)，与头数成正比。", paragraph=9),
    ],
    control=("eight heads that share one map take what a single head's takes",
             "八个头共用一张注意力图时，内存与单头相同"),
    note="每个头都有自己的 n×n 矩阵，因此是 h 倍。融合内核则一个也不存。两段互相矛盾；这里判断的是结论。",
    expected=Verdict.FAILS,
)  # fmt: skip
def score_memory() -> list[Check | Curve]:
    """Each head has its own n×n matrix: h times as much. A fused kernel stores none of them. Two paragraphs contradict
    one another; the conclusion is what is judged here.
    """

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
        Curve.of(title, Bilingual("heads h", "头数 h"), BYTES, lines, {
            Bilingual("as claimed", "如所述"): dict.fromkeys(stored, stored[1])}, log="xy"),
    ]  # fmt: skip


@claim(
    "Attention keeps O(n²·h + n·d) numbers for training.",
    "训练时，注意力需保留 O(n²·h + n·d) 个数。",
    formula=("n²·h + n·d;  blockwise n·(h + d)", "n²·h + n·d；分块时 n·(h + d)"),
    at=[
        place("treatment", "5.3.11", "Q, K and V take O(n·d_model), …", "Q、K、V 占 O(n·d_model)，……", paragraph=8),
        place("treatment", "5.3.11", "… the score matrices O(h·n²), the projected output O(n·d_model), …",
              "……分数矩阵占 O(h·n²)，输出投影的结果占 O(n·d_model)，……", paragraph=9),
        place("treatment", "5.3.11", "… together O(n²·h + n·d_model).", "……合计 O(n²·h + n·d_model)。", paragraph=10),
    ],
    control=("what a product of Q and K entry by entry keeps only doubles with n",
             "Q 与 K 逐元素相乘所保留的内存只随 n 翻倍"),
    note="前提是存储权重矩阵。分块计算只需每行的 log-sum-exp：O(n·(h + d))（Dao et al. 2022, 2205.14135），即 §5.3.12 "
         "所说的算法。",
    expected=Verdict.CONDITIONS,
)  # fmt: skip
def memory_n_squared() -> list[Check | Curve]:
    """If the weights are stored. Blockwise, the log-sum-exp of each row is sufficient: O(n·(h + d)) (Dao et al. 2022,
    2205.14135), the algorithm that §5.3.12 names.
    """

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
                 Bilingual("tokens n", "词元数 n"), BYTES, lines, log="xy"),
    ]  # fmt: skip


@claim(
    "Attention can be computed block by block, without the n×n matrix, and is the same (FlashAttention).",
    "注意力可以分块计算，不需要 n×n 矩阵，结果相同（FlashAttention）。",
    formula="out = Σ_blocks e^{LSE_block − LSE} out_block",
    at=[
        place("treatment", "5.3.12",
              "Flash Attention computes in blocks, each over a part of the sequence, with few memory "
              "accesses.", "Flash Attention 分块计算、减少访存，每块处理序列的一部分。", paragraph=3),
    ],
    also="Milakov & Gimelshein 2018, 1805.02867; Dao et al. 2022, 2205.14135",
    control=("the mean of the blocks' outputs, without their log-sum-exps, is not the same",
             "不用 log-sum-exp、直接对各块输出取平均，结果不同"),
    note="只差舍入，因为求和次序不同。",
)  # fmt: skip
def blockwise_is_exact() -> list[Check]:
    """Up to rounding, because sums are computed in another order."""
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


@claim(
    "Half the bits for inputs and products are enough if the softmax is summed in float32.",
    "只要 softmax 用 float32 求和，输入与乘积用一半的位数就够了。",
    formula="‖out_bf16 − out_f64‖ / ‖out_f64‖",
    at=[
        place("treatment", "5.3.12",
              "Products of Q, K and V may be in half precision; the softmax and the output projection "
              "usually are in full precision, for stability.",
              "Q、K、V 的乘法可用半精度，softmax 与输出投影通常用全精度以保持数值稳定。", paragraph=4),
    ],
    control=("with the softmax in bfloat16 too, the error is larger", "softmax 也用 bfloat16 时误差更大"),
    note="误差只是把输入与输出舍入到 bfloat16 的 8 位有效数字。这里只判断注意力本身，不含输出投影。",
)  # fmt: skip
def mixed_precision() -> list[Check]:
    """The error is that of rounding inputs and output to the 8 bits of mantissa of bfloat16. Attention alone is judged
    here, without the output projection.
    """
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


@claim(
    "Decoding needs the keys and values of earlier tokens only: a cache of O(n·d), and the outputs are the same.",
    "逐词元解码只需先前词元的键与值：缓存 O(n·d)，输出不变。",
    formula=("y_t = A(q_t, K_≤t, V_≤t);  2·n·d_model numbers a layer",
             "y_t = A(q_t, K_≤t, V_≤t)；每层 2·n·d_model 个数"),
    at=[
        place("treatment", "5.3.11",
              "Keys and values of earlier positions can be cached, O(h·n·d_k) = O(n·d_model), so that "
              "nothing is computed twice.",
              "可缓存历史位置的键与值，占 O(h·n·d_k) = O(n·d_model)，避免重复计算。", paragraph=10),
    ],
    control=("decoding without a cache gives other outputs", "不用缓存逐个解码，输出不同"),
    note="每层 2·n·d_model 个数；逐词元解码与一次算完的输出相同。文中称缓存“减少空间需求”：它减少的是计算，占用的空间"
         "反而增加。",
)  # fmt: skip
def kv_cache() -> list[Check]:
    """2·n·d_model numbers per layer; decoding token by token gives the outputs of one pass. The text says that caching
    reduces the space needed. A step then has one row of scores instead of a matrix, but the cache itself takes space in
    every layer; what it saves is computation, above all.
    """
    module, x, cache = layer("multi_head", 24, 4), normal(2, 11, 24, seed=5), KVCache()
    with torch.no_grad():
        tokens = [x[:, t : t + 1] for t in range(11)]
        steps = torch.cat([module(token, mask=Causal(), cache=cache) for token in tokens], 1)
        alone = torch.cat([module(token, mask=Causal()) for token in tokens], 1)
        whole = module(x, mask=Causal())
    return [
        same(("error of a token at a time", "逐词元解码的误差"), steps, whole),
        equal(("numbers cached per token", "每个词元缓存的数"), cache.nbytes / 8 / 2 / 11, 2 * 24),
        at_least(("error without a cache", "没有缓存时的误差"), difference(alone, whole), 0.01).control(
            difference(steps, whole)),
    ]  # fmt: skip


@claim(
    "Sharing keys and values among the heads of a group makes the cache smaller in proportion; MQA (one group) and MHA "
    "(a group for each head) are the ends.",
    "组内各头共享键值，缓存按比例缩小；MQA（一组）与 MHA（每头一组）是两个极端。",
    formula=("2·n·g·d_k numbers a layer for g groups;  MHA / GQA = h / g",
             "g 组时每层 2·n·g·d_k 个数；MHA / GQA = h / g"),
    at=[
        place("treatment", "5.3.15", "With one shared key and value the cache of inference shrinks considerably.",
              "共享一组键值后，推理时的缓存大幅减小。", paragraph=2),
        place("treatment", "5.3.15", "Grouped-query attention, in which g query heads share a key and a value, is the "
              "compromise.", "分组查询注意力是折中：g 个查询头共享一组键值。", paragraph=3),
    ],
    also="Ainslie et al. 2023, 2305.13245",
    control=("heads with keys of their own are not reproduced by the mean keys of their group",
             "键值各不相同的头，不能用组内平均的键值代替"),
    note="在缓存上实测；键值相同的头共享不会有任何损失。文中此处的 g 是一组的头数，§5.3.14 中的 g 则是组数；公式用组"
         "数。",
)  # fmt: skip
def shared_keys_cache() -> list[Check | Curve]:
    """Measured on caches; heads with equal keys and values lose nothing by sharing them. Here the text's g is the
    number of heads in a group, in §5.3.14 it is the number of groups; the formula has the number of groups.
    """
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
        at_least(("difference with keys and values averaged in each group", "各组键值取平均时的差异"),
                 difference(averaged, full(x)), 0.01).control(difference(few(x), copied)),
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
