"""Layers and models whose heads are spread over 2 and 4 processes against the same in one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_parallel_cases import CASES, SPREADABLE, mha
from spawned import once

import headwise as hw
from forked import run_together

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
EXACT = 1e-13


def of_job(name: str) -> Callable[[Any], Any]:
    """Marks a test of what that function of head_parallel_jobs.py finds: a job runs those that are asked for."""

    def marked(test: Any) -> Any:
        test.job = name
        return test

    return marked


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.thorough)])
def answers(request: pytest.FixtureRequest, shared: Path) -> list[dict[str, Any]]:
    """What every rank of one job says of the cases that tests ask for."""
    ranks: int = request.param
    tests = [item for item in request.session.items if hasattr(item, "callspec")]
    tests = [item for item in tests if item.callspec.params.get("answers") == ranks]
    names = sorted({item.callspec.params["name"] for item in tests if "name" in item.callspec.params})
    jobs = ",".join(sorted({item.function.job for item in tests}))

    def run(folder: Path) -> Any:
        programs = [(HERE / "head_parallel_jobs.py", rank, ranks, folder, jobs, *names) for rank in range(ranks)]
        wrong = run_together(programs, folder, seconds=600)
        return wrong or [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]

    found = once(shared / f"heads-{ranks}", run)
    assert isinstance(found, list), found
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("name", [case.name for case in CASES])
@of_job("cases")
def test_outputs_and_gradients_are_those_of_one_process(answers, name):
    for answer in answers:
        found = answer["cases"][name]
        assert found.pop("y") < EXACT
        assert len(found) > 4
        assert max(found.values()) < EXACT, found


@of_job("waiting")
def test_queries_keys_values_and_outputs_are_plain_tensors(answers):
    for answer in answers:
        assert answer["waiting"] == {"1": ["Tensor"] * 4, "3": ["Tensor"] * 4}


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["bfloat16", "autocast"])
@of_job("half")
def test_half_precision_is_as_exact_as_in_one_process(answers, mode):
    for answer in answers:
        one, many, dtype = answer["half"][mode]
        assert dtype == "torch.bfloat16"
        assert 1e-4 < many < 1.5 * one + 1e-3  # ranks round the parts of a sum that one process rounds once


@pytest.mark.thorough
@pytest.mark.parametrize("name", [case.name for case in CASES if not case.wraps])
@of_job("statistics")
def test_gathered_maps_and_statistics_are_those_of_all_heads(answers, name):
    for answer in answers:
        found = answer["statistics"][name]
        assert found.pop("shape") == found.pop("wanted")
        assert max(found.values()) < 1e-6, found


@pytest.mark.thorough
@of_job("decoding")
def test_decoding_with_a_cache_is_that_of_one_process_and_holds_the_ranks_heads_alone(answers):
    held: dict[str, float] = {}
    for answer in answers:
        for name, found in answer["decoding"].items():
            assert found["y"] < 1e-6
            assert found["seen"] == 11
            held[name] = held.get(name, 0.0) + found["bytes"]
            if not name.startswith("BudgetCache"):
                assert found["bytes"] == found["share"] * found["whole"]
    for name, found in answers[0]["decoding"].items():
        sharing = max(1.0, found["share"] * len(answers))
        if sharing == 1.0:
            assert held[name] == found["whole"]  # windows differ between heads, and each is held once


@pytest.mark.thorough
@of_job("writing")
def test_a_spread_decoder_writes_the_same_text(answers):
    for answer in answers:
        for one, many in answer["writing"].values():
            assert one == many != ""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("uneven", "ConfigError: 1: MultiHeadAttention: num_heads=3 cannot be spread evenly over RANKS ranks"),
        ("uneven keys", "and RANKS ranks: one has to divide the other"),
        ("uneven channels", "RANKS ranks share each of the 1 key heads, and head_dim=5 is not divisible"),
        ("uneven feed-forward", "ShapeError: 1: d_ff=31 cannot be spread evenly over RANKS ranks; give feed_forward="),
        ("none", "Linear has no attention layer of headwise"),
        ("twice", "its heads are spread already: HeldHeads(head"),
    ],
)
@of_job("refusals")
def test_what_cannot_be_dealt_out_is_told_with_its_numbers(answers, name, said):
    for answer in answers:
        assert said.replace("RANKS", str(len(answers))) in answer["refusals"][name]
        assert "BUT CHANGED" not in answer["refusals"][name]


def test_layers_of_every_design_that_can_be_spread_are_compared():
    compared = {type(case.make()) for case in CASES} | {hw.nn.SingleHeadAttention}  # one head is on one rank
    assert {hw.nn.DESIGNS[name] for name in SPREADABLE} <= compared


@pytest.mark.parametrize("design", [name for name in hw.nn.DESIGNS if name not in SPREADABLE])
@of_job("refusals")
def test_designs_that_couple_their_heads_are_refused_by_name(answers, design):
    for answer in answers:
        said = answer["refusals"][design]
        assert said.startswith(
            f"ConfigError: 1: {hw.nn.DESIGNS[design].__name__} cannot be spread over ranks by its heads: "
        )
        assert "CHANGED" not in said


@of_job("checkpoints")
def test_checkpoints_hold_the_whole_and_load_into_it(answers):
    ranks = len(answers)
    for answer in answers:
        found = answer["checkpoints"]
        assert found["same"]
        assert found["differ"]
        assert found["first"] == answers[0]["checkpoints"]["first"]
        assert found["loaded"] < 1e-6
        assert found["plan"] < 1e-6
        rows = 32 // ranks
        assert found["own"]["q_proj.weight"] == [rows, 24]
        assert found["own"]["k_proj.weight"] == [8 // ranks, 24]
        assert found["own"]["o_proj.weight"] == [24, rows]
    assert len({answer["checkpoints"]["config"] for answer in answers}) == ranks


@pytest.mark.thorough
@pytest.mark.parametrize("kv", ["4", "1"])
@of_job("training")
def test_training_with_clipped_gradients_is_that_of_one_process(answers, kv):
    for answer in answers:
        found = answer["training"][kv]
        one, many = found["losses"][:3], found["losses"][3:]
        assert one[2] < one[0]
        assert many == pytest.approx(one, rel=1e-6)
        assert found["norms"][3:] == pytest.approx(found["norms"][:3], rel=1e-6)
        assert found["clipped"] == pytest.approx(0.1, rel=1e-4)
        assert found["weights"] < 1e-6


@of_job("dropout")
def test_each_rank_drops_weights_of_its_own_and_generators_stay_together(answers):
    ranks = len(answers)
    found = [answer["dropout"] for answer in answers]
    assert [one["differ"] for one in found] == [ranks] * ranks
    assert max(one["alike"] for one in found) < 1e-6
    assert len({one["after"] for one in found}) == 1
    assert len({one["y"] for one in found}) == 1


@of_job("meshes")
def test_one_dimension_of_a_larger_mesh(answers):
    if len(answers) != 4:
        pytest.skip("two dimensions of two ranks take four")
    for answer in answers:
        found = answer["meshes"]
        assert max(found["2"], found["1"]) < EXACT
        assert "has 2 dimensions, ('data', 'heads')" in found["error"]


@pytest.mark.parametrize("way", ["ring 2", "ulysses 1", "ring 4"])
@of_job("meshes")
def test_heads_and_sequence_each_over_a_dimension_of_a_mesh(answers, way):
    if len(answers) != 4:
        pytest.skip("two dimensions of two ranks take four")
    for answer in answers:
        assert answer["meshes"][way] < EXACT


@pytest.mark.thorough
@of_job("watching")
def test_a_record_numbers_heads_as_the_whole_layer_does(answers):
    held = 8 // len(answers)
    for rank, answer in enumerate(answers):
        found = answer["watching"]
        assert found["places"] == found["wanted"]
        assert found["layers"] == list(range(rank * held, (rank + 1) * held))
        assert found["own"] < 1e-6
    places = [tuple(place) for answer in answers for place in answer["watching"]["places"]]
    assert len(set(places)) == len(places) == 6


@pytest.mark.thorough
@of_job("watching")
def test_the_records_of_all_ranks_are_that_of_one_process_and_clip_alike(answers):
    for answer in answers:
        found = answer["watching"]
        assert found["all"]
        assert max(found["latest"], found["totals"]) < 1e-6
        assert (
            "its heads are spread over ranks, so all ranks have to clip alike: give record.reduce()" in found["alone"]
        )
        assert found["clipped"][0] == found["clipped"][1] > 0
        assert found["weights"] < 1e-6


@pytest.mark.thorough
@pytest.mark.parametrize("heads", ["8/4", "4/1", "8/8"])
@pytest.mark.parametrize("way", ["head-parallel", "Ulysses", "ring", "ring, contiguous", "heads by ring"])
@of_job("traffic")
def test_bytes_sent_are_those_of_the_formulas(answers, way, heads):
    if way == "heads by ring" and (len(answers) != 4 or heads == "4/1"):
        pytest.skip("two dimensions of two ranks take four, and two key heads")
    found = [answer["traffic"][f"{way} {heads}"] for answer in answers]
    sent = [one["sent"] for one in found]
    assert min(map(sum, sent)) > 0
    if "ring" not in way:  # where ranks differ, the formulas give the mean
        assert sent == [one["formula"] for one in found]
    for i in (0, 1):
        assert sum(one[i] for one in sent) == len(answers) * found[0]["formula"][i]


def test_a_layer_that_is_not_spread_holds_all_heads():
    layer = mha(4, 2)
    assert hw.parallel.held_heads(layer) is None
    with pytest.raises(hw.ConfigError, match="heads of this MultiHeadAttention are not spread"):
        hw.parallel.gather_map(layer(torch.randn(1, 3, 21), return_map=True)[1], layer)


def test_a_plan_names_every_part():
    plan = hw.parallel.head_parallel_plan(hw.TransformerBlock(mha(4, 2, qk_norm=True), d_ff=8, inner_dropout=0.1))
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    assert set(plan) == {"attention", "ff_in", "ff_out", "inner_dropout", *(f"attention.{part}" for part in parts)}
