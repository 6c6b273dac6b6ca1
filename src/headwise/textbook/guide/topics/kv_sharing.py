"""Shared keys and values: MQA, GQA and MLA."""

from torch import Tensor

from headwise.nn.registry import STANDARD, counts_of
from headwise.reports.curves import Curve
from headwise.textbook.guide.topic import Topic, exercise
from headwise.wording import Bilingual


@exercise(
    "Grouped-query attention: `q` `[h, n, d]`, `k`, `v` `[g, n, d]` with g dividing h; query head i uses KV head i // (h / g). Return softmax(q kᵀ / √d) v `[h, n, d]`.",
    "分组查询注意力：`q` `[h, n, d]`，`k`、`v` `[g, n, d]`，g 整除 h；查询头 i 使用键值头 i // (h / g)。返回 softmax(q kᵀ / √d) v `[h, n, d]`。",
    lambda draw: (
        draw.normal((g := draw.size(1, 3)) * draw.size(1, 3), n := draw.size(), d := draw.size(1, 5)), draw.normal(g, n, d), draw.normal(g, n, d),
    ),
    tolerance=1e-3,
)  # fmt: skip
def grouped_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Our solution."""
    repeat = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


@exercise(
    "The bytes of the KV cache of a whole model: `layers` layers, `kv_heads` KV heads of size `head_dim`, `tokens` tokens, `size` bytes a number.",
    "整个模型的键值缓存字节数：`layers` 层，`kv_heads` 个 `head_dim` 维的键值头，`tokens` 个词元，每个数 `size` 字节。",
    lambda draw: (draw.size(1, 80), draw.size(1, 64), draw.size(1, 256), draw.size(1, 8192), draw.size(1, 4)),
)
def cache_size(layers: int, kv_heads: int, head_dim: int, tokens: int, size: int) -> int:
    """Our solution."""
    return layers * 2 * kv_heads * head_dim * tokens * size


@exercise(
    "Convert MHA to GQA by the mean: the key matrices `wk` `[h, d, d_k]` of neighbouring heads are averaged in `g` groups (g divides h). Return `[g, d, d_k]`.",
    "用平均法把 MHA 转成 GQA：把相邻头的键矩阵 `wk` `[h, d, d_k]` 分成 `g` 组（g 整除 h）各取平均。返回 `[g, d, d_k]`。",
    lambda draw: (draw.normal((g := draw.size(1, 3)) * draw.size(1, 3), draw.size(1, 5), draw.size(1, 3)), g),
)
def mean_groups(wk: Tensor, g: int) -> Tensor:
    """Our solution."""
    return wk.unflatten(0, (g, -1)).mean(1)


def picture() -> Curve:
    """Numbers in the cache for each token, over the number of KV heads."""
    groups = (1, 2, 4, 8, 16, 32)
    cache = {g: counts_of(STANDARD, {"d_model": 4096, "num_heads": 32, "num_kv_heads": g}).keys * 2 for g in groups}
    return Curve.of(
        Bilingual("Cache of a layer of width 4096 with 32 heads", "d_model = 4096、32 个头的一层的缓存"),
        Bilingual("KV heads", "键值头数"), Bilingual("numbers per token", "每词元的数"),
        {Bilingual("GQA (1 is MQA, 32 is MHA)", "GQA（1 为 MQA，32 为 MHA）"): cache},
        {Bilingual("MLA, latent 512 + rotary 64", "MLA，潜向量 512 + 旋转 64"): dict.fromkeys(groups, 576)},
        log="xy",
    )  # fmt: skip


TOPIC = Topic(
    place=20,
    title=Bilingual("MQA, GQA and MLA", "共享键值：MQA、GQA 与 MLA"),
    formula=r"\text{head}_i = \text{Attention}\!\left(Q_i,\; K_{\lfloor i g / h \rfloor},\; V_{\lfloor i g / h \rfloor}\right), \qquad g = 1: \text{MQA}, \quad g = h: \text{MHA}",
    plain=Bilingual(
        "head_i = Attention(Q_i, K_{⌊i·g/h⌋}, V_{⌊i·g/h⌋});  g = 1 is MQA, g = h is MHA",
        "head_i = Attention(Q_i, K_{⌊i·g/h⌋}, V_{⌊i·g/h⌋})；g = 1 为 MQA，g = h 为 MHA",
    ),
    intro=Bilingual(
        """
        While a model writes, keys and values of all earlier tokens are kept, and each new token reads them all. Sharing them
        between heads makes this cache smaller. MQA has one KV head for all query heads, GQA one for each group. Here g is
        the number of KV heads; some texts write g for the number of query heads in a group. MLA stores one small latent
        vector for each token, from which the keys and values of all heads are computed.
        """,
        """
        模型生成文字时，要保存之前所有词元的键与值，每个新词元都要读取全部。在头之间共享键值可以缩小缓存。MQA 让所有查询头共用一个
        键值头，GQA 每组共用一个。这里 g 表示键值头的个数；有的书用 g 表示一组中查询头的个数。MLA 为每个词元存一个小的潜向量，
        由它算出所有头的键和值。
        """,
    ),
    code="""
from headwise.nn.registry import counts_of
variants = {
    "MHA": ("multi_head", {}),
    "GQA, 8 KV heads": ("multi_head", {"num_kv_heads": 8}),
    "MQA": ("multi_head", {"num_kv_heads": 1}),
    "MLA": ("latent", {"latent_dim": 512, "rope_dim": 64}),
}
print("32 heads, d_model 4096  QKV parameters  numbers cached  tokens in 1 GiB")
for name, (design, options) in variants.items():
    c = counts_of(design, {"d_model": 4096, "num_heads": 32, **options})
    cached = c.decoding.keys if design == "latent" else c.keys + c.values
    tokens = 2**30 // (2 * 32 * cached)       # in bfloat16, 32 layers
    print(f"{name:22} {c.parameters - c.output:15,} {cached:15,} {tokens:16,}")
""",
    reading=Bilingual(
        """
        MQA takes d² + 2·d·d_k parameters for Q, K and V, as in (5.3.15); with 32 heads the cache is 32 times smaller. MLA
        needs hardly more than GQA with two KV heads, and every head still has keys of its own. In the LLaMA-2 family only
        the 70B model uses GQA. `headwise convert --num-kv-heads 2 --method svd --heal 200` converts a trained model.
        """,
        """
        MQA 的 Q、K、V 参数是 d² + 2·d·d_k，与 (5.3.15) 一致；32 个头时缓存缩小到 1/32。MLA 的缓存只比两个键值头的 GQA 略大，
        而每个头仍有自己的键。LLaMA-2 系列中只有 70B 使用 GQA。`headwise convert --num-kv-heads 2 --method svd --heal 200`
        可以转换一个训练好的模型。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "The cache shrinks with the number of KV heads; the dashed line is MLA.",
        "缓存随键值头数减少而缩小；虚线是 MLA。",
    ),
    claims=("mqa-parameters", "shared-keys-cache", "kv-cache", "llama-2-uses-gqa"),
    exercises=(grouped_query, cache_size, mean_groups),
)
