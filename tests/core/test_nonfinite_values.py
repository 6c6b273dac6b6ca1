"""NaN and infinity among values are counted for each KV head, whichever way a map came about."""

from typing import Any

import pytest
import torch
from design_samples import CASES, design, given, once
from torch import Tensor

import headwise as hw
from headwise.cache import ChosenCache
from headwise.interventions import Forbid, Replace, Scale, Uniform
from headwise.nn.base import AttentionLayer
from headwise.nn.mixture import SparseHeadMixture
from headwise.reports.text import owned

WITH_V_PROJ = [(name, options) for name, options in CASES if hasattr(design(name, options), "v_proj")]


def spoil(layer: AttentionLayer, head: int, rows: int = 2) -> None:
    """NaN and infinity in some rows of W_V of one KV head."""
    with torch.no_grad():
        weight = layer.v_proj.weight.unflatten(0, (layer.num_kv_heads, -1))[head]
        weight[:rows] = torch.tensor([torch.nan, torch.inf, 1.0])[:rows, None]


def values_of(layer: AttentionLayer, x: Tensor) -> Tensor:
    """All values that the layer has for x, [b, h_kv, n, d_v]."""
    return layer.v_proj(x).unflatten(-1, (layer.num_kv_heads, -1)).transpose(1, 2)


def counted(layer: AttentionLayer, x: Tensor) -> Tensor:
    """What is not finite among the values that the call needs, [b, h_kv]."""
    bad = ~torch.isfinite(values_of(layer, x))
    if isinstance(layer, SparseHeadMixture):
        chosen = layer.route(x).chosen.expand(-1, x.shape[1], -1)
        groups = chosen.unflatten(-1, (layer.num_kv_heads, -1)).any(-1)  # [b, n, h_kv]
        if layer.keys == "chosen":
            bad = bad & groups.mT[..., None]
        elif layer.per == "sequence":
            bad = bad & groups.any(1)[..., None, None]
        else:  # computed for the whole batch, or not at all
            bad = bad & groups.any((0, 1))[:, None, None]
    return bad.sum((-1, -2))


@pytest.mark.parametrize(("name", "options"), once([*WITH_V_PROJ, ("sparse_mixture", {"top_k": 2, "keys": "chosen"})]))
def test_every_design_counts_them_by_kv_head(name: str, options: dict[str, Any]) -> None:
    layer, x = design(name, options), given()
    _, before = layer(x, return_map=True)
    assert before.nonfinite_values is None
    at = layer.num_kv_heads - 1
    if isinstance(layer, SparseHeadMixture):  # a head that some token selected
        at = int(layer.route(x).chosen.sum((0, 1)).argmax()) * layer.num_kv_heads // layer.num_heads
    spoil(layer, at)
    _, amap = layer(x, return_map=True, measures=["entropy"])
    expected = counted(layer, x)
    assert expected[:, at].any()
    assert torch.equal(amap.nonfinite_values, expected)
    assert torch.equal(amap.measured.nonfinite_values, expected)
    of_query_heads = expected.sum(0).repeat_interleave(amap.shape[1] // expected.shape[1])
    assert torch.equal(amap.measured.table()["nonfinite_values"][0].long(), of_query_heads)
    assert not amap.measured.nonfinite.any()  # the scores are finite
    for head in range(amap.shape[1]):
        one = amap.head(1, head).nonfinite_values
        assert int(one) == expected[1, head * expected.shape[1] // amap.shape[1]]


@pytest.mark.parametrize("name", ["talking_heads", "sparse_mixture", "mixture_of_heads"])
def test_an_alarm_and_the_table_of_a_record_name_layer_and_head(name: str) -> None:
    model = torch.nn.Sequential(design("multi_head", {}), design(name, {}))
    at, x = 2, given()
    if name != "talking_heads":
        at = int(model[1].route(model[0](x)).chosen.sum((0, 1)).argmax())
    spoil(model[1], at)
    found: list[Any] = []
    alarm = hw.telemetry.NonFiniteAlarm(then=found.append)
    with hw.watch(model, measures=["entropy"], alarms=[alarm]) as record:
        model(x)
    assert [one.heads for one in found] == [(("1", at),)]
    assert f"1 head {at}: NaN or infinity in values ({2 * 2 * 13})" in found[0].message
    table = record.table()
    assert [place for place, count in zip(table.places, table.column("nonfinite_values"), strict=True) if count] == [
        (1, at)
    ]


def test_the_values_of_a_chosen_cache_are_counted_with_those_of_earlier_tokens() -> None:
    layer, x = design("sparse_mixture", {"top_k": 2, "shared_heads": 1, "keys": "chosen"}), given()
    spoil(layer, 0)  # which all tokens share
    cache = ChosenCache()
    layer(x[:, :11], mask=hw.Causal(), cache=cache)
    _, amap = layer(x[:, 11:], mask=hw.Causal(), cache=cache, return_map=True)
    assert amap.nonfinite_values.tolist() == [[2 * 13, 0, 0, 0, 0, 0]] * 2


def test_a_head_with_bad_values_leaves_the_tokens_that_did_not_select_it_as_they_were() -> None:
    layer, x = design("sparse_mixture", {"top_k": 1}), given()
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.weight[0, 0] = 1e3
        x[0, :, 0], x[1, :, 0] = 1.0, -1.0  # head 0 in one entry only, and never in the other
    chosen = layer.route(x).chosen
    assert chosen[0, :, 0].all()
    assert not chosen[1, :, 0].any()
    before = layer(x)
    spoil(layer, 0)
    after = layer(x)
    assert after[0].isnan().all()
    torch.testing.assert_close(after[1], before[1])


@pytest.mark.parametrize(
    "edits", [[Scale(0.5, heads=[1])], [Forbid(4, 2, heads=[5])], [Uniform()], [Scale(0.0, queries=3), Forbid(4, 0)]]
)
def test_maps_of_edited_attention_have_them(edits: list[Any]) -> None:
    layer, x = design("multi_head", {"num_kv_heads": 3}), given()
    spoil(layer, 1)
    with hw.intervene(layer, *edits):
        _, amap = layer(x, return_map=True, measures=["entropy"])
    assert amap.nonfinite_values.tolist() == amap.measured.nonfinite_values.tolist() == [[0, 26, 0]] * 2


def test_they_are_saved_where_the_keys_of_a_map_have_other_heads(tmp_path: Any) -> None:
    x = given()
    mixed, plain = design("talking_heads", {"num_kv_heads": 2}), design("multi_head", {"num_kv_heads": 2})
    _, other = plain(x, return_map=True)
    for layer in (mixed, plain):
        spoil(layer, 1)
    _, one = mixed(x, return_map=True)
    with hw.intervene(plain, Replace(other, heads=[1])):
        _, two = plain(x, return_map=True)
    assert (one.k.shape[1], two.k.shape[1]) == (1, 6)
    for amap in (one, two):
        amap.save(tmp_path / "map")
        assert hw.AttentionMap.load(tmp_path / "map").nonfinite_values.tolist() == [[0, 26]] * 2


def test_the_rows_of_a_window_have_those_of_its_keys() -> None:
    layer, x = design("multi_head", {}), given()
    spoil(layer, 4)
    _, amap = layer(x, mask=hw.Causal(), return_map=True)
    part = owned(amap, range(5, 13))
    assert part.shape == (2, 6, 8, 13)
    assert (
        part.measure("entropy").nonfinite_values.tolist() == amap.nonfinite_values.tolist() == [[0] * 4 + [26, 0]] * 2
    )


def test_merged_measurements_add_them_up() -> None:
    layer, x = design("multi_head", {"num_kv_heads": 3}), given()
    clean = layer(x, return_map=True, measures=["entropy"])[1].measured
    spoil(layer, 2)
    bad = layer(x, return_map=True, measures=["entropy"])[1].measured
    assert clean.merge(clean).nonfinite_values is None
    assert clean.merge(bad).nonfinite_values.tolist() == [[0, 0, 52]]
    assert bad.merge(bad).table()["nonfinite_values"][0].tolist() == [0, 0, 0, 0, 104, 104]


def test_none_among_the_values_is_none_where_keys_are_not_finite() -> None:
    q, k, v = torch.randn(3, 2, 3, 7, 5)
    k[1, 2, 3, 0] = torch.nan
    _, amap = hw.attend(q, k, v, return_map=True, measures=["entropy"])
    assert amap.nonfinite_values is None
    assert "nonfinite_values" not in amap.measured.table()
