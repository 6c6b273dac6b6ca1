"""The formulas against real modules, torch's own FLOP counter, what autograd keeps, real caches, and papers."""

from typing import Any

import pytest
import torch
from design_samples import CASES, ONCE, design, once
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from headwise.cache import KVCache, SlidingCache
from headwise.costs import (
    Counts,
    Machine,
    Stage,
    Work,
    allowed_pairs,
    attention_stages,
    backward_flops,
    cache_bytes,
    kept_bytes,
    score_bytes,
)  # fmt: skip
from headwise.costs.configs import CONFIGS, find
from headwise.errors import ConfigError, HeadwiseError, ShapeError
from headwise.masks import Causal, Documents, Sinks, Window
from headwise.nn import registry
from headwise.nn.registry import counts_of, sizes_of

NO_WEIGHTS = {"rotary", "dropout", "renormalise", "scaled", "form", "sharpness"}  # options that learn nothing
SIZES = {"d_model": 30, "num_heads": 6, "head_dim": 7, "value_dim": 5}  # not d_model / num_heads, and d_k ≠ d_v


def flops(stages: list[Stage], *names: str) -> int:
    return sum(stage.flops for stage in stages if not names or stage.name in names)


def counts_for(name: str, options: dict[str, Any]) -> Counts:
    """The counts of a module of the tests: d_model 12, 6 heads."""
    sizes = {"d_model": 12, "num_heads": 6, **{k: v for k, v in options.items() if k not in NO_WEIGHTS}}
    return counts_of(name, {k: v for k, v in sizes.items() if k in sizes_of(name) or k in options})


@pytest.mark.parametrize(("name", "options"), ONCE, ids=str)
def test_parameters_are_those_of_the_module(name: str, options: dict[str, Any]) -> None:
    module = registry.DESIGNS[name].build(12, 6, **options)
    counts = counts_for(name, options)
    assert counts.parameters == sum(parameter.numel() for parameter in module.parameters())
    assert counts.masked == module.takes_mask
    assert counts.cached == (module.takes_cache and options.get("per") != "sequence")


def fused_flops(q: Any, k: Any, v: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    """FLOPs of the fused operator, which torch's counter does not know on CPUs."""
    b, h, n, d = q.shape
    return 2 * b * h * n * k.shape[2] * (d + v.shape[3])


fused_flops._get_raw = True  # type: ignore[attr-defined]  # tensors, not shapes


# How many heads' worth a mixture computes depends on what its tokens choose.
@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize(("name", "options"), once([case for case in CASES if "mixture" not in case[0]]), ids=str)
def test_flops_are_those_of_the_module(name: str, options: dict[str, Any]) -> None:
    b, n, torn = 2, 61, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counts, m = counts_for(name, options), n
    if name == "convolution":
        counts, m = counts_of(name, {"d_model": 12, "num_heads": 6, "places": n + 5, "bias": "bias" in options}), n + 5
    if options.get("form") == "absorbed":
        counts = counts.at_decoding
    work = Work(b, n, m, causal=False, projected=n)
    with FlopCounterMode(display=False, custom_mapping={torn: fused_flops}) as counter, torch.no_grad():
        design(name, options)(torch.randn(b, n, 12, dtype=torch.float64))
    assert flops(attention_stages(counts, work)) == counter.get_total_flops()


@pytest.mark.thorough
@given(st.data(), st.integers(1, 23), st.integers(0, 19))
def test_pairs_are_those_that_the_mask_allows(data: st.DataObject, n: int, more: int) -> None:
    m = n + more
    assert allowed_pairs(n, m) == int(Causal().to_dense(n, m).sum())
    window, sinks = data.draw(st.integers(1, m + 3)), data.draw(st.integers(0, m + 3))
    mask = Causal() & (Window(window) | Sinks(sinks))
    assert allowed_pairs(n, m, window, sinks) == int(mask.to_dense(n, m).sum())
    seen = mask.to_dense(n, m).reshape(-1, n, m).any(1).sum()
    assert Work(1, n, m, window=window, sinks=sinks).seen_keys == min(int(seen), m)


@pytest.mark.thorough
@given(st.data(), st.integers(1, 23), st.integers(0, 19))
def test_pairs_in_chunks_are_those_that_the_mask_allows(data: st.DataObject, n: int, more: int) -> None:
    m = n + more
    chunk = data.draw(st.integers(1, m + 3))
    mask = (Causal() & Documents(torch.arange(m) // chunk)).to_dense(n, m).reshape(n, m)
    work = Work(1, n, m, window=chunk, chunked=True)
    assert (work.pairs, work.seen_keys) == (int(mask.sum()), int(mask.any(0).sum()))


@pytest.mark.thorough
@given(st.integers(1, 23), st.integers(1, 30))
def test_pairs_near_one_another_are_those_that_the_mask_allows(n: int, window: int) -> None:
    mask = Window(window, window - 1).to_dense(n, n)
    work = Work(1, n, n, causal=False, window=window)
    assert (work.pairs, work.seen_keys) == (int(mask.sum()), n)


class Plain(nn.Module):
    """Multi-head attention in plain torch, scores and all."""

    def __init__(self, d: int, h: int, kv: int, d_k: int, d_v: int) -> None:
        super().__init__()
        self.h, self.kv = h, kv
        self.q, self.k = nn.Linear(d, h * d_k, bias=False), nn.Linear(d, kv * d_k, bias=False)
        self.v, self.o = nn.Linear(d, kv * d_v, bias=False), nn.Linear(h * d_v, d, bias=False)

    def forward(self, x: Tensor, fused: bool = False) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (heads, -1)).transpose(1, 2)
            for y, heads in ((self.q(x), self.h), (self.k(x), self.kv), (self.v(x), self.kv))
        )
        if fused:
            return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        k, v = (y.repeat_interleave(self.h // self.kv, 1) for y in (k, v))
        weights = (q @ k.mT * 0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kv", [6, 3, 1])
@pytest.mark.parametrize(("b", "n"), [(1, 1), (2, 13), (3, 64)])
def test_flops_are_those_that_torch_counts(kv: int, b: int, n: int) -> None:
    counts = counts_of("multi_head", {**SIZES, "num_kv_heads": kv})
    stages = attention_stages(counts, Work(b, n, n, causal=False, materialised=True))
    with torch.device("meta"):
        module, x = Plain(30, 6, kv, 7, 5), torch.empty(b, n, 30, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = module(x)
    ops = {str(op): count for op, count in forward.get_flop_counts()["Global"].items()}
    assert flops(stages, "projections", "output") == ops["aten.mm"]
    assert flops(stages, "scores", "weighted sum") == ops["aten.bmm"]
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert backward_flops(stages, materialised=True) == backward.get_total_flops()


def test_blockwise_backward_repeats_the_scores_as_torch_counts_it() -> None:
    b, h, n, d = 2, 6, 13, 5
    counts = counts_of("multi_head", {"d_model": 30, "num_heads": h})
    stages = [s for s in attention_stages(counts, Work(b, n, n, causal=False)) if s.name in ("scores", "weighted sum")]
    shape = (b, h, n, d)
    assert flops(stages) == sdpa_flop_count(shape, shape, shape)
    assert backward_flops(stages, materialised=False) == sdpa_backward_flop_count(shape, shape, shape, shape)
    assert 2 * backward_flops(stages, materialised=False) == 5 * flops(stages)


def kept(call: Any, module: Plain, x: Tensor, fused: bool) -> int:
    """Bytes that autograd keeps beside the weights; what shares its storage is there once."""
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    found: dict[int, Tensor] = {}

    def pack(y: Tensor) -> Tensor:
        found[y.untyped_storage().data_ptr()] = y
        return y

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        out = call(x, fused=fused)
    assert out.requires_grad
    return sum(
        y.untyped_storage().nbytes() for at, y in found.items() if at not in weights and y.is_floating_point()
    )  # fmt: skip


@pytest.mark.parametrize("fused", [False, True])
def test_kept_bytes_are_those_that_autograd_keeps(fused: bool) -> None:
    b, n, d_k = 2, 33, 8
    module = Plain(40, 5, 5, d_k, d_k)
    counts = counts_of("multi_head", {"d_model": 40, "num_heads": 5, "head_dim": d_k})
    work = Work(b, n, n, materialised=not fused, dtype="float32")
    assert kept(module, module, torch.randn(b, n, 40), fused) == kept_bytes(counts, work)


class Cross(Plain):
    """The same, with keys and values of another sequence."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (
            y.unflatten(-1, (heads, -1)).transpose(1, 2)
            for y, heads in ((self.q(x), self.h), (self.k(context), self.kv), (self.v(context), self.kv))
        )
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_kept_bytes_of_cross_attention_are_those_that_autograd_keeps() -> None:
    b, n, m, d_k = 2, 33, 19, 8
    module, context = Cross(40, 5, 5, d_k, d_k), torch.randn(b, m, 40)
    counts = counts_of("multi_head", {"d_model": 40, "num_heads": 5, "head_dim": d_k})
    work = Work(b, n, m, causal=False, projected=m, cross=True, dtype="float32")
    found = kept(lambda x, fused: module(x, context), module, torch.randn(b, n, 40), fused=True)
    assert found == kept_bytes(counts, work) + 4 * context.numel()


def test_cache_bytes_are_those_of_the_caches() -> None:
    b, kv, d_k, d_v = 2, 3, 7, 5
    counts = counts_of("multi_head", {**SIZES, "num_kv_heads": kv})
    for window, sinks in ((None, 0), (4, 0), (4, 3), (1, 1)):
        cache: Any = KVCache() if window is None else SlidingCache(window, sinks)
        for tokens in range(1, 14):
            cache.append(torch.zeros(b, kv, 1, d_k).bfloat16(), torch.zeros(b, kv, 1, d_v).bfloat16())
            assert cache.nbytes == cache_bytes(counts, tokens, batch=b, window=window, sinks=sinks), (window, tokens)
    # int8: a byte a number, and a float32 scale for each of the 2·h_kv vectors of a token
    assert cache_bytes(counts, 11, batch=b, dtype="int8") == b * 11 * (kv * (d_k + d_v) + 2 * kv * 4)


def test_bytes_of_a_pass_and_of_a_step_by_hand() -> None:
    counts = counts_of("multi_head", {"d_model": 12, "num_heads": 6, "num_kv_heads": 2, "head_dim": 3})
    b, n = 5, 7
    stages = {s.name: s for s in attention_stages(counts, Work(b, n, n, materialised=True, dtype="float32"))}
    matrix = b * 6 * n * n
    assert stages["projections"].bytes == 4 * (12 * (18 + 6 + 6) + b * n * (12 + 18 + 12))
    assert stages["scores"].bytes == 4 * (b * n * (18 + 6) + matrix)
    assert stages["softmax"].bytes == 4 * 2 * matrix
    assert stages["weighted sum"].bytes == 4 * (matrix + b * n * (6 + 18))
    assert stages["output"].bytes == 4 * (18 * 12 + b * n * (18 + 12))
    step = {s.name: s for s in attention_stages(counts, Work(b, 1, n, dtype="float32", cache="int8"))}
    assert step["softmax"].bytes == 0
    # six old keys as int8 with a scale for each of two vectors, the new one as it was computed
    assert step["scores"].bytes == b * (4 * 18 + 6 * (6 + 2 * 4) + 4 * 6)
    window = {s.name: s for s in attention_stages(counts, Work(b, 1, n, window=3, sinks=1, dtype="float32"))}
    assert window["scores"].bytes == 4 * b * (18 + 4 * 6)
    assert window["scores"].flops == 2 * b * 18 * 4


def test_scores_take_n_squared_h_or_n_h() -> None:
    counts = counts_of("multi_head", {"d_model": 30, "num_heads": 6})
    assert score_bytes(counts, Work(2, 13, 17, causal=False, materialised=True)) == 2 * 6 * 13 * 17 * 2
    assert score_bytes(counts, Work(2, 13, 17, causal=False)) == 2 * 6 * 13 * 4


@pytest.mark.parametrize("heads", [1, 16])
def test_splitting_into_heads_saves_no_product_and_multiplies_the_softmax(heads: int) -> None:
    stages = attention_stages(
        counts_of("multi_head", {"d_model": 1024, "num_heads": heads}), Work(1, 4096, 4096, False)
    )
    assert flops(stages, "scores", "weighted sum") == 4 * 4096**2 * 1024
    assert sum(s.exponentials for s in stages) == heads * 4096**2


@pytest.mark.parametrize(("kv", "ratio"), [(32, 1), (8, 4), (1, 32)])
def test_decoding_does_as_many_flops_a_byte_as_heads_share_a_key(kv: int, ratio: int) -> None:
    counts = counts_of("multi_head", {"d_model": 4096, "num_heads": 32, "num_kv_heads": kv})
    step = {s.name: s for s in attention_stages(counts, Work(1, 1, 100_000, dtype="bfloat16"))}
    assert step["scores"].intensity == pytest.approx(ratio, rel=1e-3)


def test_a_mixture_computes_the_chosen_heads_only() -> None:
    full = counts_of("multi_head", {"d_model": 24, "num_heads": 8})
    mixture = counts_of("sparse_mixture", {"d_model": 24, "num_heads": 8, "top_k": 2, "shared_heads": 1})
    work = Work(1, 11, 11)
    stages, whole = attention_stages(mixture, work), attention_stages(full, work)
    assert 8 * flops(stages, "scores") == 3 * flops(whole, "scores")
    assert 8 * flops(stages, "output") == 3 * flops(whole, "output")
    assert flops(stages, "projections") == 2 * 11 * (24 * 9 + 24 * 7 + 2 * 24 * 24)
    assert mixture.cache == full.cache
    one = attention_stages(mixture, Work(1, 1, 1))
    assert one[-1].bytes < attention_stages(full, Work(1, 1, 1))[-1].bytes  # a token reads its heads' matrices only


LATENT = {
    "d_model": 20, "num_heads": 3, "latent_dim": 11, "rope_dim": 4, "head_dim": 7, "value_dim": 5,
    "query_latent_dim": 13,
}  # fmt: skip


@pytest.mark.parametrize("folded", [False, True])
def test_latent_flops_are_those_that_torch_counts(folded: bool) -> None:
    """Unfolded over n tokens, and folded for one query against m cached latents (DeepSeek-V2, 2405.04434, §2.1)."""
    d, h, c, r, d_h, d_v, c_q, b = 20, 3, 11, 4, 7, 5, 13, 2
    n, m = (1, 17) if folded else (17, 17)
    counts = counts_of("latent", LATENT)
    with torch.device("meta"):
        x, latent = torch.empty(b, n, d), torch.empty(b, m - n, c + r)
        down_q, up_q, down = torch.empty(d, c_q), torch.empty(c_q, h * (d_h + r)), torch.empty(d, c + r)
        up_k, up_v, out = torch.empty(c, h * d_h), torch.empty(c, h * d_v), torch.empty(h * d_v, d)
    with FlopCounterMode(display=False) as counter:
        q = (x @ down_q @ up_q).unflatten(-1, (h, d_h + r)).transpose(1, 2)
        kept_now = torch.cat((latent, x @ down), 1)
        if folded:
            q_c = torch.einsum("bhnd,chd->bhnc", q[..., :d_h], up_k.unflatten(-1, (h, d_h)))
            weights = torch.cat((q_c, q[..., d_h:]), -1) @ kept_now[:, None].expand(b, h, m, c + r).mT
            heads = weights @ kept_now[:, None, :, :c].expand(b, h, m, c)
            heads = torch.einsum("bhnc,chv->bhnv", heads, up_v.unflatten(-1, (h, d_v)))
        else:
            k = (kept_now[..., :c] @ up_k).unflatten(-1, (h, d_h)).transpose(1, 2)
            v = (kept_now[..., :c] @ up_v).unflatten(-1, (h, d_v)).transpose(1, 2)
            k = torch.cat((k, kept_now[:, None, :, c:].expand(b, h, m, r)), -1)
            heads = q @ k.mT @ v
        heads.transpose(1, 2).flatten(2) @ out
    stages = attention_stages(counts.at_decoding if folded else counts, Work(b, n, m, causal=folded))
    assert flops(stages) == counter.get_total_flops()
    matrices = (down_q, up_q, down, up_k, up_v, out)
    assert counts.parameters == sum(w.numel() for w in matrices)
    assert counts_of("latent", {**LATENT, "latent_norm": True}).parameters == counts.parameters + c + c_q


def test_latent_cache_is_the_latent_and_one_rotary_key() -> None:
    counts = counts_of("latent", LATENT)
    assert counts.cache == 11 + 4
    assert cache_bytes(counts, 9, batch=2, dtype="int8") == 2 * 9 * (15 + 2 * 4)


def test_talking_heads_adds_two_maps_between_heads() -> None:
    plain, talking = (counts_of(name, {"d_model": 30, "num_heads": 6}) for name in ("multi_head", "talking_heads"))
    assert talking.parameters - plain.parameters == 2 * 36
    work = Work(1, 13, 13, causal=False)
    assert flops(attention_stages(talking, work)) - flops(attention_stages(plain, work)) == 4 * 13**2 * 36


@pytest.mark.parametrize(
    ("d_ff", "layers", "attentions", "kv", "heads", "matched"),
    [
        (4096, 12, 18, 1, 8, 5440), (4096, 12, 18, None, 1, 6784), (8192, 6, 6, 1, 8, 9088),
        (8192, 6, 6, None, 1, 9984),
    ],
)  # fmt: skip
def test_shazeers_wider_feed_forward_pays_exactly_for_what_sharing_saves(
    d_ff: int, layers: int, attentions: int, kv: int | None, heads: int, matched: int
) -> None:
    """Shazeer 2019, 1911.02150, §4.1: multi-query, and a single head of 128, with as many parameters as 8 heads."""
    full = counts_of("multi_head", {"d_model": 1024, "num_heads": 8, "head_dim": 128}).parameters
    sizes = {"d_model": 1024, "num_heads": heads, "head_dim": 128, "num_kv_heads": kv}
    saved = attentions * (full - counts_of("multi_head", sizes).parameters)
    assert saved == layers * 2 * 1024 * (matched - d_ff)


@pytest.mark.parametrize(
    ("changed", "millions"),
    [
        ({"layers": 2}, 36), ({"layers": 4}, 50), ({"layers": 8}, 80), ({"head_dim": 16}, 58), ({"head_dim": 32}, 60),
        ({"d_ff": 1024}, 53), ({"d_ff": 4096}, 90),
    ],
)  # fmt: skip
def test_vaswani_table_3_differs_from_the_base_model_as_computed(changed: dict[str, int], millions: int) -> None:
    """Rows B and C with the base's d_model: the vocabulary, which the paper only gives roughly, is the same in both."""

    def computed(layers: int = 6, d_ff: int = 2048, head_dim: int = 64) -> int:
        attention = counts_of("multi_head", {"d_model": 512, "num_heads": 8, "head_dim": head_dim, "value_dim": 64})
        return layers * (3 * attention.parameters + 2 * (2 * 512 * d_ff + d_ff + 512) + 5 * 2 * 512)

    assert abs((computed(**changed) - computed()) / 1e6 - (millions - 65)) <= 1.0  # both ends are rounded


@pytest.mark.parametrize(
    ("heads", "head_dim", "millions"),
    [(8, 128, 168), (12, 128, 193), (16, 128, 218), (32, 128, 319), (8, 32, 130), (8, 64, 142), (8, 256, 218)],
)
def test_bhojanapalli_table_2(heads: int, head_dim: int, millions: int) -> None:
    """BERT of 24 layers and width 512 with heads of any size (2002.07028), and all that its pre-training needs."""
    d, d_ff, vocab = 512, 4096, 30_522
    attention = counts_of("multi_head", {"d_model": d, "num_heads": heads, "head_dim": head_dim, "bias": True})
    block = attention.parameters + 2 * d * d_ff + d_ff + d + 2 * 2 * d
    embedding = (vocab + 512 + 2) * d + 2 * d
    pooler, next_sentence, masked_words = d * d + d, 2 * d + 2, d * d + d + 2 * d + vocab
    assert round((24 * block + embedding + pooler + next_sentence + masked_words) / 1e6) == millions


@pytest.mark.thorough
@given(st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 10**9)), min_size=1), st.floats(1e9, 1e15))
@settings(max_examples=50)
def test_roofline_is_below_neither_of_its_lines(sizes: list[tuple[int, int]], peak: float) -> None:
    stages, machine = [Stage("s", f, b) for f, b in sizes], Machine(peak, 1e10)
    seconds = machine.seconds(stages)
    assert seconds >= flops(stages) / peak * (1 - 1e-12)
    assert seconds >= sum(s.bytes for s in stages) / 1e10 * (1 - 1e-12)
    assert seconds <= flops(stages) / peak + sum(s.bytes for s in stages) / 1e10 + 1e-12


def test_roofline_changes_sides_at_the_ridge() -> None:
    machine = Machine(peak=1e12, bandwidth=5e10)
    assert machine.ridge == 20
    assert (machine.limit(Stage("s", 19, 1)), machine.limit(Stage("s", 21, 1))) == ("memory", "arithmetic")
    assert machine.seconds([Stage("s", 2 * 10**12, 1), Stage("s", 1, 10**11)]) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: counts_of("gqq", {}), ConfigError, ["design='gqq'", "gqa"]),
        (lambda: counts_of("zzzz", {}), ConfigError, ["design='zzzz'", "multi_head", "latent"]),
        (lambda: counts_of("gqa", {"d_model": 8, "num_heads": 2}), ConfigError, ["gqa requires num_kv_heads"]),
        (lambda: counts_of("mqa", {"d_model": 8, "latent_dim": 2}), ConfigError, ["latent_dim=2", "head_dim"]),
        (lambda: counts_of("multi_head", {"d_model": 8, "num_heads": 3}), ShapeError, ["d_model=8", "num_heads=3"]),
        (lambda: counts_of("multi_head", {"d_model": 8, "num_heads": 0}), ConfigError, ["num_heads=0"]),
        (
            lambda: counts_of("multi_head", {"d_model": 8, "num_heads": 4, "num_kv_heads": 3}),
            ShapeError,
            ["num_heads=4", "num_kv_heads=3"],
        ),
        (lambda: counts_of("multi_head", {"d_model": 8, "num_heads": 4, "bias": "qx"}), ConfigError, ["'qx'", "qkvo"]),
        (lambda: counts_of("sparse_mixture", {"d_model": 8, "num_heads": 4, "top_k": 5}), ConfigError, ["top_k=5"]),
        (lambda: counts_of("sparse_mixture", {"d_model": 8, "num_heads": 4, "per": "x"}), ConfigError, ["per='x'"]),
        (
            lambda: counts_of("grouped_mlp", {"d_model": 8, "num_heads": 4, "num_groups": 3}),
            ShapeError,
            ["num_groups=3"],
        ),
        (lambda: counts_of("latent", {"d_model": 8, "num_heads": 4, "rope_dim": -2}), ConfigError, ["rope_dim=-2"]),
        (
            lambda: attention_stages(counts_of("convolution", {"d_model": 8, "num_heads": 3}), Work(1, 5, 5)),
            ConfigError,
            ["causal=True", "does not support masks"],
        ),
        (lambda: Work(0, 1, 1), ConfigError, ["batch=0"]),
        (lambda: Work(1, 3, 2), ConfigError, ["queries=3", "keys=2"]),
        (lambda: Work(1, 3, 4, causal=False, window=2), ConfigError, ["window=2", "queries=3", "keys=4", "causal"]),
        (lambda: Work(1, 3, 3, causal=False, window=2, sinks=1), ConfigError, ["sinks=1", "causal"]),
        (lambda: Work(1, 3, 3, window=2, sinks=1, chunked=True), ConfigError, ["chunked=True", "no sinks"]),
        (lambda: Work(1, 3, 3, chunked=True), ConfigError, ["chunked=True", "window"]),
        (lambda: Work(1, 3, 3, sinks=2), ConfigError, ["sinks=2", "window"]),
        (lambda: Work(1, 3, 3, dtype="int8"), ConfigError, ["dtype='int8'", "bfloat16"]),
        (lambda: Work(1, 3, 3, cache="int4"), ConfigError, ["cache='int4'", "int8"]),
        (lambda: Machine(0.0, 1.0), ConfigError, ["peak=0.0"]),
        (lambda: Machine(1.0, float("inf")), ConfigError, ["bandwidth=inf"]),
    ],
)
def test_what_cannot_be_is_named(make: Any, error: type[HeadwiseError], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


def test_head_sizes_are_the_published_ones() -> None:
    assert {name: find(name).head_dim for name in ("gpt-3", "llama-2-70b", "gemma-7b", "qwen3-8b", "deepseek-v2")} == {
        "gpt-3": 128, "llama-2-70b": 128, "gemma-7b": 256, "qwen3-8b": 128, "deepseek-v2": 128
    }  # fmt: skip
    unequal = [c.name for c in CONFIGS.values() if c.head_dim * (c.size("num_heads") or 0) != c.d_model]
    assert unequal == [
        "qwen3-30b-a3b", "gemma-7b", "gemma-2-9b", "gemma-3-4b", "gpt-oss-20b", "deepseek-v2", "deepseek-v3"
    ]  # fmt: skip
