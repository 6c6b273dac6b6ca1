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
from headwise_textbook.claims.evidence import Check, at_least, at_most, difference, equal, same
from headwise_textbook.claims.samples import layer, normal
from headwise_textbook.curves import Curve

BYTES = Bilingual("bytes", "字节")


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
        Curve.of(title, Bilingual("heads h", "头数 h"), BYTES, lines, {
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
                 Bilingual("tokens n", "词元数 n"), BYTES, lines, log="xy"),
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
        at_least(("error without a cache", "没有缓存时的误差"), difference(alone, whole), 0.01).control(
            difference(steps, whole)),
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
