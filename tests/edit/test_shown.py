"""Results show themselves in one line or a table, also in an interactive session; a model is never printed whole."""

import pytest
import torch
from torch import nn

import headwise as hw


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(hw.MultiHeadAttention(12, 6), hw.MultiHeadAttention(12, 6, num_kv_heads=2)).eval()


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def test_a_site_is_one_line(model: nn.Module) -> None:
    first, second = hw.find_heads(model)
    assert repr(first) == "HeadSite('0': MultiHeadAttention, kind headwise, 6 heads, head_dim 2)"
    assert repr(second) == "HeadSite('1': MultiHeadAttention, kind headwise, 6 heads, 2 KV heads, head_dim 2)"


def test_results_of_edits_are_tables(model: nn.Module) -> None:
    x = torch.randn(2, 7, 12)
    with hw.watch(model[0], maps="lazy") as record:
        model[0](x, mask=hw.Causal())
    pruned = hw.edit.prune(model, {"0": [1, 4]}, copy=True)
    merged = hw.edit.merge_kv(model[0], 2, copy=True)
    healed = hw.edit.heal(merged.model, [x], loss, steps=2)
    budget = hw.edit.budget([*record.maps.values()], window=2, sinks=1)
    importance = hw.analysis.gradient_importance(model, [x, x + 1], loss)
    for result, first in (
        (pruned, "removed 2 of 6 heads; parameters "), (merged, "method mean; parameters "), (healed, "2 steps on "),
        (budget, str(budget).splitlines()[0]), (importance, f"{importance.title}\n"),
    ):  # fmt: skip
        assert repr(result) == str(result)
        assert repr(result).startswith(first)
        assert "Linear(" not in repr(result)
        assert "tensor(" not in repr(result)
        assert "array(" not in repr(result)


def test_the_table_of_a_pruning_is_in_the_order_of_the_model(model: nn.Module) -> None:
    pruned = hw.edit.prune(model, [(1, 4), (0, 5), (1, 0), (0, 2)], copy=True)
    assert [(name, cut.removed) for name, cut in pruned.cuts.items()] == [("0", (2, 5)), ("1", (0, 4))]
