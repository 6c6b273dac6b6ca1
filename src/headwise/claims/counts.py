"""Parameters, operations, memory and caches: counted on layers that run, and compared with what the texts say."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from headwise.attention import attend
from headwise.cache import KVCache
from headwise.claims.claim import claim
from headwise.claims.definitions import formula_of
from headwise.claims.evidence import Check, Verdict, at_least, at_most, equal, same
from headwise.claims.samples import layer, normal
from headwise.configs import CONFIGS, ModelConfig
from headwise.costs import Work, attention_stages, counts_of
from headwise.heads.multi_head import MultiHeadAttention
from headwise.kernels import use_kernel
from headwise.masks import Causal


@claim(
    "four-d-squared",
    "A multi-head layer has 4·d_model² parameters, however many heads it has.",
    source="ch. 11; §5.3",
    expected=Verdict.CONDITIONS,
)
def four_d_squared() -> list[Check]:
    """Only with h·d_k = h·d_v = d_model, no bias (+ 4·d_model) and no shared keys and values."""
    d, target = 48, 4 * 48**2
    others: dict[str, dict[str, object]] = {
        "with bias": {"bias": True}, "two key heads for eight": {"num_kv_heads": 2}, "head_dim 16 instead of 6": {
            "head_dim": 16},
    }  # fmt: skip
    return [
        *(equal(f"h = {h}", _size(MultiHeadAttention(d, h)), target) for h in (1, 2, 8, 48)),
        *(equal(f"{what}", _size(MultiHeadAttention(d, 8, **o)), target).beyond() for what, o in others.items()),  # type: ignore[arg-type]
    ]


@claim(
    "gpt-2-small-layer",
    "An attention layer of GPT-2 small has some 2.36 million parameters.",
    source="ch. 11; Radford et al. 2019",
    expected=Verdict.HOLDS,
)
def gpt_2_small_layer() -> list[Check]:
    """4·768², and 3,072 more with the biases that GPT-2 has."""
    with torch.device("meta"):
        plain, biased = MultiHeadAttention(768, 12), MultiHeadAttention(768, 12, bias=True)
    return [
        equal("parameters", _size(plain), 2.36e6, 0.002),
        equal("with bias", _size(biased), 2.36e6, 0.002),
    ]


@claim(
    "head-size-table",
    "Models choose d_k = d_model / h; the table of configurations.",
    source="ch. 11, table",
    expected=Verdict.CONDITIONS,
)
def head_size_table() -> list[Check]:
    """True of the models in the texts; a choice and no law: others set d_k apart from h."""
    known = [
        "transformer-base", "transformer-big", "bert-base", "bert-large", "gpt-2-small", "gpt-2-medium", "gpt-2-large",
        "gpt-2-xl", "gpt-3", "llama-7b", "llama-2-70b", "llama-3-8b", "mistral-7b",
    ]  # fmt: skip
    return [
        equal("models of the texts with h·d_k ≠ d_model", sum(_width(CONFIGS[m]) != 1 for m in known), 0),
        equal("h·d_k / d_model of gemma-7b", _width(CONFIGS["gemma-7b"]), 1).beyond(),
        equal("of deepseek-v2", _width(CONFIGS["deepseek-v2"]), 1).beyond(),
    ]


@claim(
    "splitting-lowers-cost",
    "Splitting into h heads lowers the cost of attention from O(n²·d_model) to O(n²·d_k).",
    source="ch. 11; §5.3",
    expected=Verdict.FAILS,
)
def splitting_lowers_cost() -> list[Check]:
    """That is one head; h of them add up to the same, and the softmax has h times more to do."""
    one = _attention_flops(64, 32, 1)
    ratios = {h: _attention_flops(64, 32, h) / one for h in (2, 4, 8)}
    large = [_stages(4096, 1024, h) for h in (1, 16)]
    exps = [sum(stage.exponentials for stage in stages) for stages in large]
    return [
        *(equal(f"FLOPs with {h} heads over those with one", ratio, 1 / h, 0.01) for h, ratio in ratios.items()),
        equal("exponentials with 16 over 1", exps[1] / exps[0], 1 / 16, 0.01),
        equal("FLOPs at n = 4096, d = 1024, h = 16, by formula", _pair_flops(large[1]), 6.87e10 / 16, 0.001),
        equal("FLOPs at n = 4096, d = 1024, h = 1", _pair_flops(large[0]), 6.87e10, 0.001).control(),
    ]


@claim(
    "complexity",
    "A layer takes O(n²·d + n·d²) operations: twice the length is four times the scores, twice the projections.",
    source="§5.3; ch. 11",
    expected=Verdict.HOLDS,
)
def complexity() -> list[Check]:
    """4·n²·d for scores and weighted sum and 8·n·d² for the projections, counted while a layer runs."""
    sizes = (16, 24, 1), (16, 24, 6), (32, 24, 6), (64, 24, 2), (64, 48, 2)
    return [
        equal(f"FLOPs at n = {n}, d = {d}, h = {h}", _layer_flops(n, d, h), 4 * n * n * d + 8 * n * d * d)
        for n, d, h in sizes
    ]


@claim(
    "score-memory",
    "With h = d_model / d_k heads the scores take the memory that a single head's take.",
    source="ch. 11, table of costs",
    expected=Verdict.FAILS,
)
def score_memory() -> list[Check]:
    """Each head has its own n×n matrix: h times as much. A fused kernel stores none of them."""

    def weights(h: int) -> int:
        """Bytes of the softmax that the formula keeps for its gradient: the values take no part in it."""
        q, k = _leaf(1, h, 128, 32 // h), _leaf(1, h, 128, 32 // h)
        return _kept(lambda: torch.softmax(q @ k.mT, -1)) - 8 * 2 * 128 * 32

    one = weights(1)
    return [
        *(equal(f"h = {h}: memory of the weights over one head's", weights(h) / one, 1) for h in (2, 8, 32)),
        equal("bytes of one head's", one, 8 * 128 * 128).control(),
    ]


@claim(
    "memory-n-squared",
    "Attention keeps O(n²·h + n·d) numbers for training.",
    source="§5.3; ch. 11",
    expected=Verdict.CONDITIONS,
)
def memory_n_squared() -> list[Check]:
    """Where the weights are stored. Blockwise, the log-sum-exp of each row is enough: O(n·(h + d)) (Dao et al. 2022,
    2205.14135).
    """

    def kept(n: int, fused: bool) -> float:
        q, k, v = (_leaf(1, 4, n, 8) for _ in range(3))
        return _kept(lambda: attend(q, k, v, kernel="torch_blocks") if fused else formula_of(q, k, v))

    growth = {fused: kept(1024, fused) / kept(512, fused) for fused in (False, True)}
    return [
        at_least("memory at twice n, weights stored", growth[False], 3.5),
        at_least("blockwise", growth[True], 3.5).beyond(),
    ]


@claim(
    "blockwise-is-exact",
    "Attention can be computed block by block, without the n×n matrix, and is the same (FlashAttention).",
    source="ch. 11; Milakov & Gimelshein 2018, 1805.02867; Dao et al. 2022, 2205.14135",
    expected=Verdict.HOLDS,
)
def blockwise_is_exact() -> list[Check]:
    """To rounding; the difference is that of adding in another order."""
    q, k, v = (normal(1, 2, 701, 16, seed=s) for s in range(3))
    truth = attend(q, k, v, mask=Causal(), kernel="reference")
    single = [attend(*(x.float() for x in (q, k, v)), mask=Causal(), kernel=name) for name in ("torch_blocks", "auto")]
    return [
        same("error in float64", attend(q, k, v, mask=Causal(), kernel="torch_blocks"), truth, 1e-12),
        same("in float32", single[0], truth, 2e-6),
        same("in float32, fastest kernel", single[1], truth, 2e-6),
    ]


@claim(
    "mixed-precision",
    "Half the bits for inputs and products are enough if the softmax is summed in float32.",
    source="ch. 11, mixed precision",
    expected=Verdict.HOLDS,
)
def mixed_precision() -> list[Check]:
    """What is lost is the rounding of inputs and output, 8 bits of mantissa in bfloat16."""
    q, k, v = (normal(1, 2, 307, 32, seed=s).bfloat16() for s in range(3))
    truth = attend(*(x.double() for x in (q, k, v)), kernel="reference")
    error = (attend(q, k, v).double() - truth).norm() / truth.norm()
    summed = torch.softmax((q @ k.mT * 32**-0.5), -1, dtype=torch.bfloat16) @ v  # the statistics in bfloat16 too
    worse = (summed.double() - truth).norm() / truth.norm()
    return [
        at_most("error in bfloat16", float(error), 6e-3),
        at_least("error with the softmax in bfloat16, over it", float(worse / error), 1.2).control(),
    ]


@claim(
    "kv-cache",
    "Decoding needs the keys and values of earlier tokens only: a cache of O(n·d), and the outputs are the same.",
    source="§5.3; ch. 11",
    expected=Verdict.HOLDS,
)
def kv_cache() -> list[Check]:
    """2·n·d_model numbers a layer; a token at a time gives what one pass gives."""
    module, x, cache = layer("multi_head", 24, 4), normal(2, 11, 24, seed=5), KVCache()
    with torch.no_grad():
        steps = [module(x[:, t : t + 1], mask=Causal(), cache=cache) for t in range(11)]
        whole = module(x, mask=Causal())
    return [
        same("error of a token at a time", torch.cat(steps, 1), whole),
        equal("numbers kept for a token", cache.nbytes / 8 / 2 / 11, 2 * 24),
    ]


@claim(
    "mqa-parameters",
    "With one key and value head for all, Q, K and V take d² + 2·d·d_k parameters instead of 3·d² (if h·d_k = d).",
    source="5.3.15; Shazeer 2019, 1911.02150",
    expected=Verdict.HOLDS,
)
def mqa_parameters() -> list[Check]:
    """Counted on modules of three sizes, W_O left out."""
    found = []
    for d, h in (48, 8), (96, 4), (60, 12):
        shared, full = MultiHeadAttention(d, h, num_kv_heads=1), MultiHeadAttention(d, h)
        found += [
            equal(f"MQA, d = {d}, h = {h}", _size(shared) - d * d, d * d + 2 * d * (d // h)),
            equal("MHA", _size(full) - d * d, 3 * d * d),
        ]
    return found


@claim(
    "shared-keys-cache",
    "Sharing keys and values among the h / g heads of a group makes the cache h / g times smaller; MQA (g = 1) and "
    "MHA (g = h) are the ends.",
    source="5.3.15; Ainslie et al. 2023, 2305.13245",
    expected=Verdict.HOLDS,
)
def shared_keys_cache() -> list[Check]:
    """Measured on caches in use; heads that already share their keys and values lose nothing by it."""
    x = normal(1, 7, 48, seed=5)
    sizes = {}
    for groups in (1, 2, 8):
        cache = KVCache()
        layer("multi_head", 48, 8, num_kv_heads=groups)(x, cache=cache)
        sizes[groups] = cache.nbytes
    few = layer("multi_head", 48, 8, num_kv_heads=2)
    assert isinstance(few, MultiHeadAttention)
    w = few.per_head_weights()
    copied = {**w, "k": w["k"].repeat_interleave(4, 0), "v": w["v"].repeat_interleave(4, 0)}
    return [
        equal("cache with 8 key heads over 2", sizes[8] / sizes[2], 4),
        equal("over 1", sizes[8] / sizes[1], 8),
        same("GQA and MHA with its key heads repeated differ by", few(x), MultiHeadAttention.from_heads(**copied)(x)),
    ]


def _size(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _width(config: ModelConfig) -> float:
    """h·d_k / d_model."""
    heads = config.size("num_heads") or 1
    return heads * (config.size("head_dim") or config.d_model // heads) / config.d_model


def _attention_flops(n: int, d: int, h: int) -> int:
    """FLOPs of scores and weighted sum, counted while they run."""
    q, k, v = (normal(1, h, n, d // h, seed=s) for s in range(3))
    return _counted(lambda: attend(q, k, v, kernel="torch_blocks"))


def _layer_flops(n: int, d: int, h: int) -> int:
    module, x = layer("multi_head", d, h), normal(1, n, d)
    with use_kernel("torch_blocks"):
        return _counted(lambda: module(x))


def _counted(run: Callable[[], Tensor]) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def _stages(n: int, d: int, h: int) -> list:
    return attention_stages(counts_of("multi_head", {"d_model": d, "num_heads": h}), Work(1, n, n, causal=False))


def _pair_flops(stages: list) -> int:
    return sum(stage.flops for stage in stages if stage.name in ("scores", "weighted sum"))


def _leaf(*shape: int) -> Tensor:
    return normal(*shape).requires_grad_()


def _kept(run: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass, each storage once."""
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        out = run()  # alive until counted, or its storage might be given to another tensor
    return sum(kept.values()) if out is not None else 0
