"""Heads share keys and values: nothing is lost where there is nothing to lose, and what is lost is told."""

from pathlib import Path
from typing import Any

import pytest
import torch
from design_samples import design, given
from hypothesis import given as drawn, settings, strategies as st
from torch import Tensor, nn

import headwise as hw
from headwise.edit import group_heads, merge_kv
from headwise.edit.merging import METHODS, shared_keys, shared_rotary_keys, shared_values, similar_groups
from headwise.errors import ConfigError
from headwise.lm.checkpoint import MODEL_FILE, load_checkpoint, save_model
from headwise.lm.model import Decoder, DecoderConfig, write
from headwise.lm.texts import CharTokenizer
from headwise.models import find_heads, record_heads

every = pytest.mark.parametrize("method", METHODS)
PLAIN: list[dict[str, Any]] = [
    {}, {"bias": True}, {"rotary": True, "bias": True, "head_dim": 4}, {"qk_norm": True}, {"num_kv_heads": 3},
    {"value_dim": 5, "head_dim": 4, "context_dim": 7},
]  # fmt: skip
plain = pytest.mark.parametrize("options", PLAIN, ids=lambda value: str(value))


def module_of(options: dict[str, Any]) -> Any:
    return design("multi_head", options)


def call(module: Any) -> Tensor:
    other = module.context_dim != module.d_model
    y: Tensor = module(given(), given(9, module.context_dim, seed=8) if other else None)
    return y


def make_equal(module: Any, groups: list[list[int]]) -> None:
    """Keys and values of the heads of a group become those of its first."""
    with torch.no_grad():
        for linear in (module.k_proj, module.v_proj):
            for x in (linear.weight, linear.bias):
                if x is not None:
                    heads = x.view(module.num_kv_heads, -1, *x.shape[1:])
                    for group in groups:
                        heads[group] = heads[group[0]].clone()


@every
@plain
def test_heads_that_are_equal_lose_nothing(options: dict[str, Any], method: str) -> None:
    module = module_of(options)
    groups = [[0, 1, 2]] if module.num_kv_heads == 3 else [[0, 1, 2], [3, 4, 5]]
    scattered = [[0, 1, 2]] if module.num_kv_heads == 3 else [[0, 3, 5], [1, 2, 4]]
    groups = scattered if method in ("cluster", "svd") else groups
    make_equal(module, groups)
    result = merge_kv(module, len(groups), method, copy=True)
    merge = result.merges[""]
    assert [list(group) for group in merge.groups] == groups
    assert result.model.num_kv_heads == len(groups)
    assert module.num_kv_heads != len(groups)
    torch.testing.assert_close(call(result.model), call(module))
    assert merge.lost_scores == pytest.approx(0.0, abs=1e-6)
    assert merge.lost_values == pytest.approx(0.0, abs=1e-6)
    assert result.parameters_after == sum(p.numel() for p in result.model.parameters()) < result.parameters_before


@plain
def test_the_order_of_heads_changes_nothing(options: dict[str, Any]) -> None:
    module = module_of(options)
    count = module.num_kv_heads
    order = [[2], [0], [1]] if count == 3 else [[4], [2], [0], [5], [1], [3]]
    for method in ("mean", "first"):
        result = merge_kv(module, count, method, groups={0: order}, copy=True)
        torch.testing.assert_close(call(result.model), call(module))
        assert not torch.equal(result.model.k_proj.weight, module.k_proj.weight)
    queries = result.merges[""].queries
    assert queries == ((4, 5, 0, 1, 2, 3) if count == 3 else (4, 2, 0, 5, 1, 3))
    with record_heads(find_heads(module)) as before:
        call(module)
    with record_heads(find_heads(result.model)) as after:
        call(result.model)
    torch.testing.assert_close(after[0], before[0][:, list(queries)])


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"num_kv_heads": 3, "value_dim": 2}, {"context_dim": 7}])
def test_svd_loses_nothing_where_heads_are_equal_up_to_a_map(options: dict[str, Any]) -> None:
    module = module_of(options)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for linear in (module.k_proj, module.v_proj):
            d = linear.out_features // module.num_kv_heads
            for head in range(1, module.num_kv_heads):
                turn = torch.randn(d, d, generator=generator.manual_seed(head), dtype=torch.float64)
                for x in (linear.weight, linear.bias):
                    if x is not None:
                        x[head * d : (head + 1) * d] = turn @ x[:d]
    result = merge_kv(module, 1, "svd", copy=True)
    torch.testing.assert_close(call(result.model), call(module), rtol=1e-6, atol=1e-8)
    assert result.merges[""].lost_scores < 1e-6
    assert not torch.allclose(call(merge_kv(module, 1, "mean", copy=True).model), call(module), atol=1e-2)


def test_svd_passes_rotary_positions_by_complex_factors() -> None:
    module = module_of({"rotary": True, "head_dim": 6, "bias": True})
    generator = torch.Generator()
    with torch.no_grad():
        for x in (module.k_proj.weight, module.k_proj.bias):
            heads = x.view(6, 6, -1)
            for head in range(1, 6):
                a, b = torch.randn(2, 3, 1, generator=generator.manual_seed(head), dtype=torch.float64)
                re, im = heads[0, :3], heads[0, 3:]
                heads[head] = torch.cat((a * re - b * im, a * im + b * re))
        for x in (module.v_proj.weight, module.v_proj.bias):
            heads = x.view(6, 6, -1)
            heads[1:] = heads[0].clone()
    result = merge_kv(module, 2, "svd", copy=True)
    # In float64, but what is left out of an SVD is known to the root of its rounding.
    torch.testing.assert_close(call(result.model), call(module), rtol=1e-6, atol=1e-7)


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@drawn(st.data())
def test_svd_loses_least(data: st.DataObject) -> None:
    r, per, d, e = (data.draw(st.integers(1, n)) for n in (4, 3, 3, 9))
    torch.manual_seed(data.draw(st.integers(0, 999)))
    q, k = torch.randn(r * per, e, 2 * d).double(), torch.randn(r, e + 1, 2 * d).double()
    o = torch.randn(r * per, 2 * d, e).double()
    circuits = q @ k.repeat_interleave(per, 0).mT
    for shared in (shared_keys, shared_rotary_keys):
        new_q, new_k = shared(q, k)
        assert new_q.shape == q.shape
        assert new_k.shape == k[0].shape
        error = (circuits - new_q @ new_k.mT).norm()
        for other in (k.mean(0), k[0]):
            if shared is shared_keys:
                assert error <= (circuits - q @ other.mT).norm() * (1 + 1e-9) + 1e-9
    if shared is shared_rotary_keys and r == 1:
        assert error <= 1e-9 * circuits.norm() + 1e-12
    outputs = k.repeat_interleave(per, 0) @ o
    new_v, new_o = shared_values(k, o)
    error = (outputs - new_v @ new_o).norm()
    exact = torch.linalg.svdvals(torch.cat(list(outputs), -1))[2 * d :].norm()  # Eckart & Young 1936
    assert error.item() == pytest.approx(exact.item(), rel=1e-6, abs=1e-8)


def test_mean_and_first_are_those_of_the_paper() -> None:
    module = module_of({"num_kv_heads": 6})
    k = module.k_proj.weight.view(2, 3, 2, 12)
    assert torch.allclose(merge_kv(module, 2, copy=True).model.k_proj.weight.view(2, 2, 12), k.mean(1))
    assert torch.allclose(merge_kv(module, 2, "first", copy=True).model.k_proj.weight.view(2, 2, 12), k[:, 0])
    one = merge_kv(module, 1, copy=True).model
    assert torch.allclose(one.v_proj.weight, module.v_proj.weight.view(6, 2, 12).mean(0))
    assert torch.equal(one.q_proj.weight, module.q_proj.weight)


def test_what_is_lost_is_what_the_matrices_say() -> None:
    module = module_of({"num_kv_heads": 3})
    result = merge_kv(module, 1, "svd", copy=True)
    before, after = module.per_head_weights(), result.model.per_head_weights()
    order = list(result.merges[""].queries)
    scores = before["q"] @ before["k"].repeat_interleave(2, 0).mT
    error = (scores[order] - after["q"] @ after["k"].mT).norm() / scores.norm()
    assert result.merges[""].lost_scores == pytest.approx(error.item(), rel=1e-6)
    values = before["v"].repeat_interleave(2, 0) @ before["o"]
    error = (values[order] - after["v"] @ after["o"]).norm() / values.norm()
    assert result.merges[""].lost_values == pytest.approx(error.item(), rel=1e-6)
    lines = str(result).splitlines()
    assert lines[0].startswith("method svd; parameters 432 → 336 (−22.2 %)")
    assert lines[2].split()[:4] == ["MultiHeadAttention", "3", "→", "1"]
    assert lines[2].endswith("(0 1 2)")


def test_heads_with_like_outputs_are_a_group() -> None:
    module = module_of({"num_kv_heads": 6})
    make_equal(module, [[0, 4], [1, 3], [2, 5]])
    with torch.no_grad():
        q = module.q_proj.weight.view(6, 2, 12)
        for a, b in ((0, 4), (1, 3), (2, 5)):
            q[b] = q[a].clone()
    with record_heads(find_heads(module)) as heads:
        call(module)
    (site,) = find_heads(module)
    assert group_heads(site, 3, heads[0]) == [[0, 4], [1, 3], [2, 5]]
    result = merge_kv(module, 3, "mean", groups={"": group_heads(site, 3, heads[0])}, copy=True)
    torch.testing.assert_close(call(result.model), call(module))
    with pytest.raises(ConfigError, match=r"outputs: expected \[b, h=6, n, d_v\]"):
        group_heads(site, 3, heads[0][:, :5])
    with pytest.raises(ConfigError, match="method='mean'"):
        group_heads(site, 3, method="mean")


@pytest.mark.thorough
@settings(max_examples=50, deadline=None)
@drawn(st.integers(1, 4), st.integers(1, 4), st.integers(0, 999))
def test_groups_are_a_partition_and_blocks_are_found(count: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    order = torch.randperm(count * size)
    similarity = torch.rand(count * size, count * size)
    of = torch.empty(count * size, dtype=torch.long)
    of[order] = torch.arange(count * size) // size
    similarity[of[:, None] == of] += 2.0
    found = similar_groups(similarity, count)
    assert found == sorted(sorted(torch.nonzero(of == g).flatten().tolist()) for g in range(count))


TOKENIZER = CharTokenizer("水浒武松打虎，林冲夜奔。")


@pytest.mark.thorough
@every
def test_a_merged_decoder_comes_back_and_writes(method: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = DecoderConfig(TOKENIZER.vocab_size, d_model=24, num_layers=2, num_heads=6, d_ff=22, context=13)
    decoder = Decoder(config).eval()
    result = merge_kv(decoder, {0: 2, 1: 3}, method, copy=True)
    assert [layer["num_kv_heads"] for layer in result.model.config.layers] == [2, 3]
    save_model(tmp_path / MODEL_FILE, result.model, TOKENIZER, {})
    again, _, _ = load_checkpoint(tmp_path)
    ids = torch.randint(TOKENIZER.vocab_size, (2, 23), generator=torch.Generator().manual_seed(5))
    assert torch.equal(again(ids), result.model(ids))
    caches = [hw.KVCache() for _ in range(2)]
    steps = [again(part, caches=caches) for part in ids.split([11, 1, 11], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), again(ids), rtol=1e-4, atol=1e-5)
    assert [cache.nbytes for cache in caches] == [2 * 2 * h * 23 * 4 * 4 for h in (2, 3)]
    assert len("".join(write(again, TOKENIZER, "武松", 20, seed=2))) == 20
    pruned = hw.edit.prune(again, {0: [0, 1, 2]}, copy=True).model
    assert pruned.config.layers[0] == {"num_heads": 3, "num_kv_heads": 1, "head_dim": 4, "value_dim": 4}


def test_in_place_changes_the_model_itself() -> None:
    module = module_of({})
    result = merge_kv(module, 3)
    assert result.model is module
    assert module.num_kv_heads == 3
    assert module.k_proj.out_features == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_kv_heads": 4}, "num_kv_heads=4: MultiHeadAttention has 6 KV heads; expected a divisor"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"num_kv_heads": 12}, "num_kv_heads=12"),
        ({"num_kv_heads": True}, "num_kv_heads=True"),
        ({"num_kv_heads": {1: 2}}, "num_kv_heads: no site 1"),
        ({"num_kv_heads": 2, "method": "median"}, "method='median': .*expected one of 'mean', 'first'"),
        ({"num_kv_heads": 2, "groups": {0: [[0, 1], [2, 3], [4, 5]]}}, "expected 2 groups of 3"),
        ({"num_kv_heads": 2, "groups": {0: [[0, 1, 2], [2, 3, 4]]}}, "expected 2 groups of 3"),
        ({"num_kv_heads": {}, "groups": {0: [[0, 1, 2], [3, 4, 5]]}}, "is not among the sites of num_kv_heads"),
    ],
)
def test_merges_that_cannot_be_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        merge_kv(module_of({}), **arguments)


@pytest.mark.parametrize("method", ["mean", "svd"])
def test_weights_without_values_and_not_finite_ones_are_refused_before_anything_changes(method: str) -> None:
    model = nn.Sequential(module_of({}), module_of({}))
    with torch.no_grad():
        model[1].v_proj.weight[2, 3] = torch.nan
    with pytest.raises(ConfigError, match=r"^1: Linear\.weight has numbers that are not finite"):
        merge_kv(model, 2, method)
    assert [layer.num_kv_heads for layer in model] == [6, 6]
    with pytest.raises(ConfigError, match="is on the meta device"):
        merge_kv(module_of({}).to("meta"), 2, method)


@pytest.mark.parametrize("name", ["per_head", "latent", "gated_output", "talking_heads", "sparse_mixture"])
def test_other_designs_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=r"supported: MultiHeadAttention.*Llama-like"):
        merge_kv(design(name, {}), 1)
    with pytest.raises(ConfigError, match="supported: MultiHeadAttention"):
        merge_kv(nn.MultiheadAttention(12, 3), 1)


def test_weights_of_two_modules_and_quantised_ones_are_refused() -> None:
    model = nn.Sequential(module_of({}), module_of({}))
    model[1].v_proj.weight = model[0].v_proj.weight
    with pytest.raises(ConfigError, match=r"'0\.v_proj\.weight' and '1\.v_proj\.weight' are one tensor"):
        merge_kv(model, 2)
    module = module_of({})
    module.k_proj.weight = nn.Parameter(torch.ones(12, 12, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match="quantized"):
        merge_kv(module, 2)
