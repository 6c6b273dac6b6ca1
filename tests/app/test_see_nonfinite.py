"""Reports say which heads have NaN or infinity in their scores or values."""

import copy

import pytest
import torch

import headwise as hw
from headwise.lm.loading import LoadedModel, load_model
from headwise.reports.numbers import SCORES, SHOWN, VALUES, nonfinite_notes
from headwise.wording import in_language

TEXT = "武松又来打虎，再来？话说。"


@pytest.fixture
def damaged(model_folder) -> LoadedModel:
    """Two layers of five heads; read with 24 tokens at a time."""
    subject = copy.deepcopy(load_model(model_folder))
    first, second = (block.attention for block in subject.model.blocks)
    width = first.q_proj.weight.shape[0] // 5
    with torch.no_grad():
        second.q_proj.weight[width * 2] = torch.nan  # of its third head
        first.v_proj.weight[width * 4] = torch.inf  # of the last head
        first.o_proj.weight.zero_()  # its infinity goes no further
        first.o_proj.weight[:, width * 4 :] = 0
    return subject


def strange(report: hw.reports.Report) -> list[str]:
    return [note for note in report.notes if "NaN" in note]


@pytest.mark.thorough
def test_a_text_without_any_has_no_note(model_folder) -> None:
    assert strange(hw.see(TEXT, load_model(model_folder))) == []


@pytest.mark.thorough_except("None")
@pytest.mark.parametrize("window", [0, None])
def test_heads_of_a_text(damaged: LoadedModel, window: int | None) -> None:
    text = TEXT * (1 if window == 0 else 4)
    n = len(damaged.read(text))
    found = strange(hw.see(text, damaged, window=window))
    values = [note for note in found if "among its values" in note]
    assert [note.partition(":")[0] for note in values] == ["Layer 0, head 4"]
    if window == 0:
        assert values == [f"Layer 0, head 4: {n} numbers among its values are NaN or infinite; its weights are not "
                          "affected."]  # fmt: skip
    assert f"Layer 1, head 2: the scores of {n} queries are NaN or infinite and are not shown." in found
    assert all(in_language(note, "zh") != note for note in found)


@pytest.mark.parametrize("maps", ["lazy", "pooled"])
def test_heads_of_a_record(maps: str) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(hw.MultiHeadAttention(12, 3), hw.MultiHeadAttention(12, 3))
    with torch.no_grad():
        model[1].k_proj.weight[5] = torch.nan  # of its second head
        model[0].v_proj.weight[3] = torch.inf
        model[0].o_proj.weight.zero_()
    first = model[0].forward
    model[0].forward = lambda x: torch.nan_to_num(first(x))
    with hw.watch(model, maps=maps) as record:
        model(torch.randn(2, 5, 12))
    assert strange(hw.report(record, lang="en")) == [
        "Layer 0, head 0: 10 numbers among its values are NaN or infinite; its weights are not affected.",
        "Layer 1, head 1: the scores of 10 queries are NaN or infinite and are not shown.",
    ]


def test_many_heads_are_counted() -> None:
    every = [{SCORES: torch.ones(4, dtype=torch.long), VALUES: torch.ones(4, dtype=torch.long)}, {}]
    found = nonfinite_notes([*every, {SCORES: torch.tensor([0, 3, 0])}])
    assert len(found) == SHOWN + 1
    assert found[-1] == "NaN or infinity in the scores or values of 5 heads in total."
    assert nonfinite_notes([{SCORES: torch.zeros(4, dtype=torch.long)}]) == []
