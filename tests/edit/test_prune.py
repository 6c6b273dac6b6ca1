"""Pruned heads are gone, and what is left computes what masking them gave."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from design_samples import DEPENDENT, INDEPENDENT, ONCE, design, given
from hypothesis import given as drawn, settings, strategies as st
from torch import nn

import headwise as hw
from headwise.edit import Pruned, prune
from headwise.errors import ConfigError
from headwise.models import find_heads, scale_heads

every = pytest.mark.parametrize(("name", "options"), ONCE, ids=lambda value: str(value))


def masked(module: nn.Module, heads: dict[int, list[int]], *args: Any, **options: Any) -> Any:
    """What the module computes with these heads at 0."""
    sites = find_heads(module)
    gates = [torch.ones(site.num_heads, dtype=torch.float64) for site in sites]
    for i, removed in heads.items():
        gates[i][removed] = 0.0
    with scale_heads(sites, gates):
        return module(*args, **options)


def removable(module: hw.nn.AttentionLayer) -> list[int]:
    """Some heads that may go: one of each group, or whole groups where each has one."""
    group = module.num_heads // (module.num_kv_heads if module.takes_cache else 1)
    return [0, 4] if group == 1 else list(range(group - 1, module.num_heads, group))


@pytest.mark.thorough_beyond(6)
@every
def test_a_pruned_design_equals_the_masked_one(name: str, options: dict[str, Any]) -> None:
    module = design(name, options)
    if type(module) in DEPENDENT:
        with pytest.raises(ConfigError, match=f"{type(module).__name__} cannot lose a head: "):
            prune(module, [0])
        return
    assert type(module) in INDEPENDENT
    if name == "single_head":
        with pytest.raises(ConfigError, match="all 1 heads would be removed"):
            prune(module, [0])
        return
    heads, x = removable(module), given()
    before = deepcopy(module.state_dict())
    result = prune(module, heads, copy=True)
    assert result.model is not module
    assert all(torch.equal(module.state_dict()[key], value) for key, value in before.items())
    left = 6 - len(heads)
    (site,) = find_heads(result.model)
    assert site.num_heads == left
    torch.testing.assert_close(result.model(x), masked(module, {0: heads}, x))
    assert not torch.allclose(result.model(x), module(x), atol=1e-3)
    assert result.parameters_after == sum(p.numel() for p in result.model.parameters()) < result.parameters_before
    if module.takes_cache:
        cache = hw.KVCache()
        mask = hw.Causal()
        steps = [result.model(part, mask=mask, cache=cache) for part in x.split([7, 1, 5], 1)]
        torch.testing.assert_close(torch.cat(steps, 1), masked(module, {0: heads}, x, mask=mask))


@every
def test_it_is_the_module_that_the_constructor_makes(name: str, options: dict[str, Any]) -> None:
    """Same shapes as a fresh module of the smaller size, so that it can be saved and loaded."""
    module = design(name, options)
    if type(module) in DEPENDENT or name in ("single_head", "convolution"):
        return
    heads = removable(module)
    pruned = prune(module, heads, copy=True).model
    sizes = {"head_dim": module.head_dim, "value_dim": module.value_dim, "num_kv_heads": pruned.num_kv_heads}
    if name == "latent":
        sizes = {key: getattr(module, key) for key in ("head_dim", "value_dim", "latent_dim", "rope_dim")}
    fresh = type(module)(12, 6 - len(heads), **(options | sizes)).double()
    fresh.load_state_dict(pruned.state_dict())
    assert torch.equal(fresh(given()), pruned(given()))
    plain = {key: value for key, value in vars(fresh).items() if isinstance(value, int | float | str | None)}
    assert plain | {"training": False} == {key: vars(pruned)[key] for key in plain}
    assert str(fresh) == str(pruned)


def test_whole_groups_go_with_their_keys() -> None:
    module = design("multi_head", {"num_kv_heads": 3, "qk_norm": True, "bias": True})
    result = prune(module, {"": [2, 3]}, copy=True)
    assert (result.model.num_heads, result.model.num_kv_heads) == (4, 2)
    assert result.model.k_proj.weight.shape == (4, 12)
    assert result.cuts[""].kept == (0, 1, 4, 5)
    assert result.cuts[""].kept_kv == (0, 2)
    torch.testing.assert_close(result.model(given()), masked(module, {0: [2, 3]}, given()))
    both = prune(module, [0, 2, 3, 4], copy=True)
    assert (both.model.num_heads, both.model.num_kv_heads) == (2, 2)
    torch.testing.assert_close(both.model(given()), masked(module, {0: [0, 2, 3, 4]}, given()))


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@drawn(st.data())
def test_any_groups_and_any_heads(data: st.DataObject) -> None:
    h_kv, group = data.draw(st.sampled_from([(1, 5), (2, 3), (3, 2), (5, 1), (7, 1), (3, 3)]))
    h = h_kv * group
    options = {
        "head_dim": 2 * data.draw(st.integers(1, 3)), "value_dim": data.draw(st.integers(1, 5)),
        "rotary": data.draw(st.booleans()), "qk_norm": data.draw(st.booleans()), "bias": data.draw(st.booleans()),
    }  # fmt: skip
    torch.manual_seed(data.draw(st.integers(0, 99)))
    module = hw.MultiHeadAttention(11, h, num_kv_heads=h_kv, **options).double().eval()
    removed = sorted(data.draw(st.sets(st.integers(0, h - 1), max_size=h - 1)))
    left = [group - sum(head // group == j for head in removed) for j in range(h_kv)]
    if len({count for count in left if count}) > 1:
        with pytest.raises(ConfigError, match="the same number in every remaining group"):
            prune(module, removed)
        return
    x = given(n=data.draw(st.integers(1, 9)), d=11)
    result = prune(module, removed, copy=True)
    torch.testing.assert_close(result.model(x), masked(module, {0: removed}, x))
    assert result.model.num_kv_heads == sum(count > 0 for count in left)


def test_in_place_cuts_the_model_itself() -> None:
    block = hw.TransformerBlock(design("gated_output", {}), d_ff=9).double().eval()
    expected = masked(block, {0: [1, 5]}, given())
    block.get_parameter("attention.q_proj.weight").requires_grad_(False)
    result = prune(block, {"attention": [5, 1]})
    assert result.model is block
    torch.testing.assert_close(block(given()), expected)
    assert not block.get_parameter("attention.q_proj.weight").requires_grad
    block(given()).sum().backward()
    assert block.get_parameter("attention.o_proj.weight").grad.shape == (12, 8)


def test_bfloat16_stays_bfloat16() -> None:
    module = design("multi_head", {}, dtype=torch.bfloat16)
    result = prune(module, [0, 3], copy=True)
    assert {p.dtype for p in result.model.parameters()} == {torch.bfloat16}
    x = given(dtype=torch.bfloat16)
    torch.testing.assert_close(result.model(x), masked(module, {0: [0, 3]}, x), rtol=2e-2, atol=2e-2)


def test_a_model_is_cut_layer_by_layer_and_says_so() -> None:
    model = nn.Sequential(*(hw.MultiHeadAttention(12, 6) for _ in range(3))).double().eval()
    result = prune(model, {0: [1], "2": [0, 2, 3, 5]}, copy=True)
    assert [site.num_heads for site in find_heads(result.model)] == [5, 6, 2]
    torch.testing.assert_close(result.model(given()), masked(model, {0: [1], 2: [0, 2, 3, 5]}, given()))
    assert result.num_removed == 5
    lines = str(result).splitlines()
    assert lines[0] == "removed 5 of 12 heads; parameters 1,728 → 1,248 (−27.8 %)"
    assert lines[3].split() == ["2", "6", "→", "2", "6", "→", "2", "0", "2", "3", "5"]


def test_nothing_to_remove_changes_nothing() -> None:
    module = design("multi_head", {})
    result = prune(module, [], copy=True)
    assert isinstance(result, Pruned)
    assert result.parameters_after == result.parameters_before
    assert torch.equal(result.model(given()), module(given()))
    model = nn.Sequential(*(hw.MultiHeadAttention(12, 6) for _ in range(2)))
    for heads in ({0: []}, [], {}, np.empty((0, 2), dtype=int)):
        assert str(prune(model, heads, copy=True)) == "removed nothing"


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([0, 6], "has no head 6; expected 0 to 5"),
        ([-1], "has no head -1"),
        ([True], "has no head True"),
        ([1.0], r"has no head 1\.0"),
        ([2, 3, 2], "head 2 is given twice"),
        (list(range(6)), "all 6 heads would be removed"),
        ("02", "expected a list of head numbers|no head"),
        ({"q": [0]}, "no site 'q'"),
        ({1: [0]}, "no site 1; expected 0 to 0"),
        ({0: [0], "": [1]}, "given twice, by its name and by its number 0"),
        ({0: 3}, "expected a list of head numbers, got 3"),
    ],
)
def test_heads_that_are_not_there_are_named(heads: Any, message: str) -> None:
    module = design("multi_head", {})
    before = deepcopy(module.state_dict())
    with pytest.raises(ConfigError, match=message):
        prune(module, heads)
    assert all(torch.equal(module.state_dict()[key], value) for key, value in before.items())


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 1), (2, 5), (0, 3)], ((0, 3), (0, 1), (2, 5)), {(2, 5), (0, 1), (0, 3)},
        np.array([[0, 1], [0, 3], [2, 5]]), torch.tensor([[0, 1], [0, 3], [2, 5]]),
        [[0, 1], [np.int64(2), 5], (0, torch.tensor(3))],
    ],
    ids=lambda pairs: type(pairs).__name__,
)  # fmt: skip
def test_pairs_of_site_and_head_are_what_the_mapping_is(pairs: Any) -> None:
    model = nn.Sequential(*(hw.MultiHeadAttention(12, 6) for _ in range(3))).double().eval()
    by_pairs, by_mapping = prune(model, pairs, copy=True), prune(model, {0: [1, 3], 2: [5]}, copy=True)
    assert by_pairs.cuts == by_mapping.cuts
    assert torch.equal(by_pairs.model(given()), by_mapping.model(given()))
    one, other = prune(model, iter(pairs), copy=True), prune(model[:1], [(0, 2)], copy=True)
    assert one.cuts == by_mapping.cuts
    assert other.cuts["0"].removed == (2,)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([(0, 1), 2], r"heads: 2 with \(0, 1\); expected pairs"),
        ([(3, 0)], "no site 3; expected 0 to 2"),
        ([(0, 6)], "0 has no head 6"),
        ([(0, 1), (0, np.int64(1))], "head 1 is given twice"),
        ([(1, i) for i in range(6)], "1: all 6 heads would be removed"),
        ([(0, 1, 2)], "the model has 3 attention modules"),
        ([(0, 1.0)], r"0 has no head 1\.0"),
        (torch.tensor(1), r"expected a list of head numbers, got tensor\(1\)"),
    ],
)
def test_pairs_that_are_wrong_are_named(heads: Any, message: str) -> None:
    model = nn.Sequential(*(hw.MultiHeadAttention(12, 6) for _ in range(3)))
    with pytest.raises(ConfigError, match=message):
        prune(model, heads)


@pytest.mark.parametrize(
    "heads",
    [
        np.array([3, 1]), torch.tensor([1, 3]), {3, 1}, range(1, 4, 2), [np.int32(1), torch.tensor(3)],
        (i for i in (1, 3)), {np.int64(0): np.array([1, 3])}, {"": {1, 3}},
    ],
    ids=lambda heads: type(heads).__name__,
)  # fmt: skip
def test_any_iterable_of_whole_numbers_names_heads(heads: Any) -> None:
    cut = prune(design("multi_head", {}), heads).cuts[""]
    assert cut.removed == (1, 3)
    assert all(type(head) is int for head in cut.removed)


@pytest.mark.parametrize("heads", [np.array([True, False]), torch.tensor([True]), np.array([1.0]), torch.tensor([1.0])])
def test_arrays_of_other_things_are_refused(heads: Any) -> None:
    with pytest.raises(ConfigError, match="has no head"):
        prune(design("multi_head", {}), heads)


def test_a_list_for_many_modules_is_refused() -> None:
    model = nn.Sequential(design("multi_head", {}), design("multi_head", {}))
    with pytest.raises(ConfigError, match="the model has 2 attention modules"):
        prune(model, [0])
    with pytest.raises(ConfigError, match="all 6 heads"):
        prune(model, {0: [1], 1: list(range(6))})
    assert find_heads(model)[0].num_heads == 6  # the first was not cut before the second was refused


def test_torch_is_refused_and_both_ways_out_work() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 3, 17, batch_first=True).double().eval()
    with pytest.raises(ConfigError, match=r"self_attn: .* Mask them instead: headwise\.models\.scale_heads") as told:
        prune(layer, {"self_attn": [0]})
    assert "prune(headwise.MultiHeadAttention.from_torch(module), […])" in str(told.value)
    x, gates = given(), [torch.tensor([0.0, 1.0, 1.0])]
    with hw.models.scale_heads(hw.find_heads(layer), gates):
        alone, within = layer.self_attn(x, x, x)[0], layer(x)
    assert not torch.allclose(within, layer(x), atol=1e-3)
    cut = prune(hw.MultiHeadAttention.from_torch(layer.self_attn), [0]).model
    torch.testing.assert_close(cut(x), alone)


def test_its_docstring_names_no_design_which_say_themselves_what_can_be_pruned() -> None:
    assert prune.__doc__ is not None
    assert not [kind.__name__ for kind in (*INDEPENDENT, *DEPENDENT) if f"`{kind.__name__}`" in prune.__doc__]


def test_a_model_without_heads_is_told_what_is_known() -> None:
    with pytest.raises(ConfigError, match="Known without a batch: headwise"):
        prune(nn.Linear(3, 3), [0])


def test_weights_of_two_modules_are_refused_by_both_names() -> None:
    model = nn.Sequential(design("multi_head", {}), design("multi_head", {}))
    model[1].k_proj.weight = model[0].k_proj.weight
    with pytest.raises(ConfigError, match=r"'0\.k_proj\.weight' and '1\.k_proj\.weight' are one tensor"):
        prune(model, {1: [0]})
    whole = nn.Sequential(design("per_head", {}))
    whole.append(whole[0])
    with pytest.raises(ConfigError, match=r"'0\.w_q\.0' and '1\.w_q\.0' are one tensor"):
        prune(whole, [0])


def test_weights_side_by_side_in_one_storage_are_not_shared() -> None:
    module = design("multi_head", {})
    flat = torch.cat([p.detach().flatten() for p in module.parameters()])
    pieces = flat.split([p.numel() for p in module.parameters()])
    for parameter, piece in zip(module.parameters(), pieces, strict=True):
        parameter.data = piece.view(parameter.shape)
    torch.testing.assert_close(prune(module, [2], copy=True).model(given()), masked(module, {0: [2]}, given()))


def test_quantised_and_parametrised_weights_are_refused() -> None:
    module = design("multi_head", {})
    module.v_proj.weight = nn.Parameter(torch.ones(12, 12, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match="int8: quantized weights"):
        prune(module, [0])
    module = design("multi_head", {})
    nn.utils.parametrizations.weight_norm(module.q_proj)
    with pytest.raises(ConfigError, match="not a plain parameter"):
        prune(module, [0])


def test_an_own_subclass_is_not_taken_for_known() -> None:
    class Mine(hw.MultiHeadAttention):
        """Has who knows what."""

    with pytest.raises(ConfigError, match="Mine is not known to keep its heads apart; known: MultiHeadAttention"):
        prune(Mine(12, 6), [0])
