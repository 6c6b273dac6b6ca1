"""What multi-head attention stores, in how many bits, and how its heads are spread over a machine."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headwise import attend
from headwise.cache import KVCache
from headwise.masks import Causal
from headwise.wording import tr
from headwise_textbook.claims.claim import Check, Plot, at_least, at_most, claim, difference, differs, equal, same
from headwise_textbook.claims.formulas import formula_of
from headwise_textbook.claims.model import layer, normal, standard


@claim
def score_memory() -> list[Check | Plot]:

    def weights(maps: int, h: int) -> int:
        """Bytes of the softmax that the formula keeps for its gradient, which does not depend on the values."""
        q, k = _leaf(1, maps, 128, 32 // h), _leaf(1, maps, 128, 32 // h)
        return _kept(lambda: torch.softmax(q @ k.mT, -1)) - 8 * 2 * 128 * 32 * maps // h

    def blockwise(h: int) -> int:
        """Bytes that blockwise attention keeps besides q, k, v and the output."""
        q, k, v = (_leaf(1, h, 128, 32 // h) for _ in range(3))
        return _kept(lambda: attend(q, k, v, kernel="torch_blocks")) - 8 * 4 * 128 * 32

    stored = {h: weights(h, h) for h in (1, 2, 4, 8, 16, 32)}
    return [
        *(equal(tr("h = {h}: memory of the weights relative to one head", h=h),
                stored[h] / stored[1], 1) for h in (2, 8, 32)),
        equal(tr("eight heads with one common map, relative to one head"),
              weights(1, 8) / stored[1], 1).control(stored[8] / stored[1]),
        Plot({
            tr("weights, stored"): stored,
            tr("blockwise: log-sum-exps"): {h: blockwise(h) for h in stored},
        }, {tr("as claimed"): dict.fromkeys(stored, stored[1])}),
    ]  # fmt: skip


@claim
def memory_n_squared() -> list[Check | Plot]:

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
    return [
        at_least(tr("memory at twice n, weights stored"), growth[False], 3.5),
        at_least(tr("blockwise"), growth[True], 3.5).beyond(),
        equal(tr("at twice n, product entry by entry"), linear[1] / linear[0], 2).control(),
        Plot({
            tr("weights stored"): bytes_of[False],
            tr("blockwise"): bytes_of[True],
        }),
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
        same(tr("error in float64"), exact, truth, 1e-12),
        same(tr("in float32"), single[0], truth, 2e-6),
        same(tr("in float32, fastest kernel"), single[1], truth, 2e-6),
        at_least(tr("error of the mean of two blocks"), mean, 0.01).control(),
    ]


@claim
def mixed_precision() -> list[Check]:
    q, k, v = (normal(1, 2, 307, 32, seed=s).bfloat16() for s in range(3))
    truth = attend(*(x.double() for x in (q, k, v)), kernel="reference")
    error = (attend(q, k, v).double() - truth).norm() / truth.norm()
    summed = torch.softmax((q @ k.mT * 32**-0.5), -1, dtype=torch.bfloat16) @ v  # the statistics in bfloat16 too
    worse = (summed.double() - truth).norm() / truth.norm()
    return [
        at_most(tr("error in bfloat16"), float(error), 6e-3),
        at_least(tr("error with the softmax in bfloat16, relative to it"),
                 float(worse / error), 1.2).control(1.0),
    ]  # fmt: skip


@claim
def output_in_full_precision() -> list[Check]:
    module, x = nn.MultiheadAttention(64, 4, batch_first=True), normal(2, 33, 64).float()
    bits = {}
    for half in (True, False):
        seen: list[Tensor] = []
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
            heads = nn.functional.linear(x, module.in_proj_weight).chunk(3, -1)
            seen = [*heads, module.out_proj(formula_of(*(t.unflatten(-1, (4, 16)).transpose(1, 2) for t in heads))
                                            .transpose(1, 2).flatten(2))]  # fmt: skip
        bits[half] = [8 * t.element_size() for t in seen]
    return [
        equal(tr("bits of the output projection in mixed precision"), bits[True][-1], 32),
        equal(tr("the same without mixed precision"), bits[False][-1], 32).control(),
    ]


@claim
def head_per_multiprocessor() -> list[Check]:
    usual, machines = (8, 12, 16, 32, 64, 96), {"A100": 108, "H100": 132}  # multiprocessors of a GPU
    dividing = [h for h in usual if all(count % h == 0 for count in machines.values())]
    busy = {name: _busy(12, count) for name, count in machines.items()}
    batch = max(_busy(64 * 12, count) / _busy(64 * 16, count) for count in machines.values())
    q, k, v = (normal(1, 12, 33, 8, seed=s) for s in range(3))
    alone = torch.cat([attend(*(part[:, i : i + 1] for part in (q, k, v))) for i in range(12)], 1)
    blocks = min(_busy(8 * 12 * math.ceil(2048 / 128), count) for count in machines.values())
    return [
        same(tr("error of 12 heads, each computed by itself"), alone, attend(q, k, v)),
        *(at_least(tr("share of the multiprocessors of an {name} that 12 heads occupy, one each", name=name),
                   share, 0.5).suggested()
          for name, share in busy.items()),
        at_least(tr("share of usual numbers of heads that divide 108 and 132"), len(dividing) / len(usual), 0.5)
        .suggested(),
        at_least(tr("busy with 64 texts and 12 heads relative to 16 heads, the larger of the two GPUs"),
                 batch, 1.1).suggested(),
        at_least(tr("occupied by blocks of 128 queries of 12 heads and 8 texts of 2,048 tokens"), blocks, 0.5)
        .control(max(busy.values())),
    ]  # fmt: skip


def _busy(tasks: int, multiprocessors: int) -> float:
    """The share of time for which multiprocessors work, if each takes one task after the other, all equally long."""
    return tasks / (math.ceil(tasks / multiprocessors) * multiprocessors)


@claim
def kv_cache() -> list[Check]:
    module, x, cache = layer("multi_head", 24, 4), normal(2, 11, 24, seed=5), KVCache()
    with torch.no_grad():
        tokens = [x[:, t : t + 1] for t in range(11)]
        steps = torch.cat([module(token, mask=Causal(), cache=cache) for token in tokens], 1)
        alone = torch.cat([module(token, mask=Causal()) for token in tokens], 1)
        whole = module(x, mask=Causal())
    return [
        same(tr("error of a token at a time"), steps, whole),
        equal(tr("numbers cached per token"), cache.nbytes / 8 / 2 / 11, 2 * 24),
        differs(tr("error without a cache"), alone, whole),
    ]  # fmt: skip


@claim
def cache_saves_space() -> list[Check | Plot]:
    lengths = 64, 128, 256, 512
    with_cache = {(n, layers): _held(n, layers, "cache") for n in lengths for layers in (1, 8)}
    stored = {n: _held(n, 8, "stored") for n in lengths}
    blockwise = {n: _held(n, 8, "blockwise") for n in lengths}
    saved = {n: with_cache[n, 8] / stored[n] for n in lengths}
    return [
        at_most(tr("memory of a step with a cache relative to all tokens again, weights stored"), saved[512], 0.5),
        at_most(tr("the same at n = 128 = 2·d_k·L"), saved[128], 1.0).beyond(),
        at_most(tr("relative to all tokens again, blockwise"), with_cache[512, 8] / blockwise[512], 0.5).beyond(),
        at_least(tr("a cache of eight layers relative to that of one"), with_cache[512, 8] / with_cache[512, 1], 4)
        .control(),
        Plot({
            tr("a step with a cache"): {n: with_cache[n, 8] for n in lengths},
            tr("all tokens again, weights stored"): stored,
            tr("all tokens again, blockwise"): blockwise,
        }),
    ]  # fmt: skip


@torch.no_grad()
def _held(n: int, layers: int, way: str) -> int:
    """The most bytes that decoding token n holds: caches, and what is allocated meanwhile; weights do not count."""
    modules, x = [standard(32, 4).eval() for _ in range(layers)], normal(1, n, 32).float()
    caches: list[Any] = [KVCache() for _ in modules] if way == "cache" else [None] * layers
    if way == "cache":
        for module, cache in zip(modules, caches, strict=True):
            module(x[:, :-1], mask=Causal(), cache=cache)
    before = sum(cache.nbytes for cache in caches if cache is not None)
    with _Allocated() as held:
        y = x[:, -1:] if way == "cache" else x
        for module, cache in zip(modules, caches, strict=True):
            if way == "stored":
                y = module.output(module.merge(formula_of(*module.project(y, y)), y))
            else:
                y = module(y, mask=Causal(), cache=cache)
    return before + held.most


class _Allocated(TorchDispatchMode):
    """The most bytes of storages that were made in the block and alive at one time."""

    def __enter__(self) -> Any:
        self.alive: dict[int, int] = {}
        self.most = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, given = func(*args, **(kwargs or {})), {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs))
                                                     if isinstance(t, Tensor)}  # fmt: skip
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and (key := t.untyped_storage()._cdata) not in given and key not in self.alive:
                self.alive[key] = t.untyped_storage().nbytes()
                weakref.finalize(t.untyped_storage(), self.alive.pop, key, None)
        self.most = max(self.most, sum(self.alive.values()))
        return out


@claim
def shared_keys_cache() -> list[Check | Plot]:
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
    return [
        equal(tr("cache with 8 KV heads relative to 2"), sizes[8] / sizes[2], 4),
        equal(tr("relative to 1"), sizes[8] / sizes[1], 8),
        same(tr("difference between GQA and MHA with repeated KV heads"), few(x), copied),
        differs(tr("difference with keys and values averaged in each group"),
                averaged, full(x), difference(few(x), copied)),
        Plot({tr("cached, h = 8"): {groups: size / 7 for groups, size in sizes.items()}}),
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
