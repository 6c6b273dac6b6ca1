"""Memory, precision and caches: what attention stores, and the error of storing less."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from headwise.attention import attend
from headwise.cache import KVCache
from headwise.masks import Causal
from headwise.reports.curves import Curve
from headwise.textbook.claims.claim import claim
from headwise.textbook.claims.definitions import formula_of
from headwise.textbook.claims.evidence import Check, Verdict, at_least, at_most, equal, same
from headwise.textbook.claims.samples import layer, normal


@claim(
    "With h = d_model / d_k heads the scores take the memory that a single head's take.",
    formula="claimed: n²;  stored: h·n²",
    source="§5.3.11, space complexity",
    expected=Verdict.FAILS,
)
def score_memory() -> list[Check | Curve]:
    """Each head has its own n×n matrix: h times as much. A fused kernel stores none of them."""

    def weights(h: int) -> int:
        """Bytes of the softmax that the formula keeps for its gradient, which does not depend on the values."""
        q, k = _leaf(1, h, 128, 32 // h), _leaf(1, h, 128, 32 // h)
        return _kept(lambda: torch.softmax(q @ k.mT, -1)) - 8 * 2 * 128 * 32

    def blockwise(h: int) -> int:
        """Bytes that blockwise attention keeps besides q, k, v and the output."""
        q, k, v = (_leaf(1, h, 128, 32 // h) for _ in range(3))
        return _kept(lambda: attend(q, k, v, kernel="torch_blocks")) - 8 * 4 * 128 * 32

    stored = {h: weights(h) for h in (1, 2, 4, 8, 16, 32)}
    lines = {"weights, stored": stored, "blockwise: log-sum-exps": {h: blockwise(h) for h in stored}}
    return [
        *(equal(f"h = {h}: memory of the weights relative to one head", stored[h] / stored[1], 1) for h in (2, 8, 32)),
        equal("bytes of one head's", stored[1], 8 * 128 * 128).control(),
        Curve.of("Memory beside q, k, v and the output, n = 128, d_model = 32, float64", "heads h", "bytes", lines, {
            "as claimed": dict.fromkeys(stored, stored[1])}, log="xy"),
    ]  # fmt: skip


@claim(
    "Attention keeps O(n²·h + n·d) numbers for training.",
    formula="n²·h + n·d;  blockwise n·(h + d)",
    source="§5.3.11, space complexity",
    expected=Verdict.CONDITIONS,
)
def memory_n_squared() -> list[Check | Curve]:
    """If the weights are stored. Blockwise, the log-sum-exp of each row is sufficient: O(n·(h + d)) (Dao et al. 2022,
    2205.14135).
    """

    def kept(n: int, fused: bool) -> float:
        q, k, v = (_leaf(1, 4, n, 8) for _ in range(3))
        return _kept(lambda: attend(q, k, v, kernel="torch_blocks") if fused else formula_of(q, k, v))

    lengths = 64, 128, 256, 512, 1024
    bytes_of = {fused: {n: kept(n, fused) for n in lengths} for fused in (False, True)}
    growth = {fused: bytes_of[fused][1024] / bytes_of[fused][512] for fused in (False, True)}
    lines = {"weights stored": bytes_of[False], "blockwise": bytes_of[True]}
    return [
        at_least("memory at twice n, weights stored", growth[False], 3.5),
        at_least("blockwise", growth[True], 3.5).beyond(),
        Curve.of("What is kept for the gradient, 4 heads of 8, float64", "tokens n", "bytes", lines, log="xy"),
    ]


@claim(
    "Attention can be computed block by block, without the n×n matrix, and is the same (FlashAttention).",
    formula="out = Σ_blocks e^{LSE_block − LSE} out_block",
    source="§5.3.12; Milakov & Gimelshein 2018, 1805.02867; Dao et al. 2022, 2205.14135",
)
def blockwise_is_exact() -> list[Check]:
    """Up to rounding, because sums are computed in another order."""
    q, k, v = (normal(1, 2, 701, 16, seed=s) for s in range(3))
    truth = attend(q, k, v, mask=Causal(), kernel="reference")
    single = [attend(*(x.float() for x in (q, k, v)), mask=Causal(), kernel=name) for name in ("torch_blocks", "auto")]
    return [
        same("error in float64", attend(q, k, v, mask=Causal(), kernel="torch_blocks"), truth, 1e-12),
        same("in float32", single[0], truth, 2e-6),
        same("in float32, fastest kernel", single[1], truth, 2e-6),
    ]


@claim(
    "Half the bits for inputs and products are enough if the softmax is summed in float32.",
    formula="‖out_bf16 − out_f64‖ / ‖out_f64‖",
    source="§5.3.12, last paragraph",
)
def mixed_precision() -> list[Check]:
    """The error is that of rounding inputs and output to the 8 bits of mantissa of bfloat16."""
    q, k, v = (normal(1, 2, 307, 32, seed=s).bfloat16() for s in range(3))
    truth = attend(*(x.double() for x in (q, k, v)), kernel="reference")
    error = (attend(q, k, v).double() - truth).norm() / truth.norm()
    summed = torch.softmax((q @ k.mT * 32**-0.5), -1, dtype=torch.bfloat16) @ v  # the statistics in bfloat16 too
    worse = (summed.double() - truth).norm() / truth.norm()
    return [
        at_most("error in bfloat16", float(error), 6e-3),
        at_least("error with the softmax in bfloat16, relative to it", float(worse / error), 1.2).control(),
    ]


@claim(
    "Decoding needs the keys and values of earlier tokens only: a cache of O(n·d), and the outputs are the same.",
    formula="y_t = A(q_t, K_≤t, V_≤t);  2·n·d_model numbers a layer",
    source="§5.3.11, last paragraph",
)
def kv_cache() -> list[Check]:
    """2·n·d_model numbers per layer; decoding token by token gives the outputs of one pass."""
    module, x, cache = layer("multi_head", 24, 4), normal(2, 11, 24, seed=5), KVCache()
    with torch.no_grad():
        steps = [module(x[:, t : t + 1], mask=Causal(), cache=cache) for t in range(11)]
        whole = module(x, mask=Causal())
    return [
        same("error of a token at a time", torch.cat(steps, 1), whole),
        equal("numbers cached per token", cache.nbytes / 8 / 2 / 11, 2 * 24),
    ]


@claim(
    "Sharing keys and values among the h / g heads of a group makes the cache h / g times smaller; MQA (g = 1) and "
    "MHA (g = h) are the ends.",
    formula="2·n·g·d_k numbers a layer for g groups;  MHA / GQA = h / g",
    source="5.3.15; Ainslie et al. 2023, 2305.13245",
)
def shared_keys_cache() -> list[Check | Curve]:
    """Measured on caches; heads with equal keys and values lose nothing by sharing them."""
    x = normal(1, 7, 48, seed=5)
    sizes = {}
    for groups in (1, 2, 4, 8):
        cache = KVCache()
        layer("multi_head", 48, 8, num_kv_heads=groups)(x, cache=cache)
        sizes[groups] = cache.nbytes
    few = layer("multi_head", 48, 8, num_kv_heads=2)
    w = few.per_head_weights()
    copied = {**w, "k": w["k"].repeat_interleave(4, 0), "v": w["v"].repeat_interleave(4, 0)}
    tokens = {"cached, h = 8": {groups: size / 7 for groups, size in sizes.items()}}
    return [
        equal("cache with 8 KV heads relative to 2", sizes[8] / sizes[2], 4),
        equal("relative to 1", sizes[8] / sizes[1], 8),
        same("difference between GQA and MHA with repeated KV heads", few(x), type(few).from_heads(**copied)(x)),
        Curve.of("Cache of a layer, d_model = 48, float64", "KV heads g", "bytes per token", tokens, log="x"),
    ]


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
