"""Attention knockout: on a model whose flow of information is known by construction."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from by_hand import ByHand
from headwise.analysis import attention_knockout
from headwise.interventions import Forbid


class Copier(nn.Module):
    """Layer 1 copies token 2 to token 4 with head 1, and layer 3 copies token 4 to token 6 with head 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([hw.MultiHeadAttention(8, 2, rotary=False) for _ in range(4)])
        for i, layer in enumerate(self.layers):
            for p in layer.parameters():
                nn.init.zeros_(p)
            if i in (1, 3):  # values and output of one head: the identity of features 0–3
                nn.init.eye_(layer.v_proj.weight[4 * (i == 1) : 4 * (i == 1) + 4, :4])
                nn.init.eye_(layer.o_proj.weight[:4, 4 * (i == 1) : 4 * (i == 1) + 4])

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            sees = torch.eye(7, dtype=torch.bool)
            source, target = (2, 4) if i == 1 else (4, 6)
            sees[target] = False
            sees[target, [source, 0]] = True
            x = x + layer(x, mask=hw.Dense(sees))
        return x


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return -model(x)[:, 6].sum()


def batches() -> list[Tensor]:
    torch.manual_seed(0)
    found = [torch.randn(2, 7, 8) for _ in range(3)]
    for x in found:
        x[:, 0] = 0.0  # the other token that 4 and 6 may attend to carries nothing
    return found


def model() -> Any:
    with torch.no_grad():
        return Copier()


@pytest.mark.thorough
def test_only_the_head_that_copies_matters():
    found = attention_knockout(model(), batches(), loss_fn, queries=6, keys=4)
    rows = found.column
    assert found.samples is not None
    assert found.samples.shape == (3, 8)
    assert [tuple((row != 0).tolist()) for row in rows] == [(False, False)] * 3 + [(True, False)]
    expected = [float(loss_fn_without(x) - loss_fn(model(), x).detach()) for x in batches()]
    torch.testing.assert_close(torch.from_numpy(found.samples[:, 6]), torch.tensor(expected, dtype=torch.float64))


def loss_fn_without(x: Tensor) -> Tensor:
    made = model()
    with hw.intervene(made, Forbid(6, 4, heads=[0]), layers=["layers.3"]):
        return loss_fn(made, x).detach()


@pytest.mark.thorough
def test_windows_of_layers():
    found = attention_knockout(model(), batches(), loss_fn, queries=6, keys=4, by="layer", window=3)
    assert found.table.layers == ("layers.0", "layers.1", "layers.2", "layers.3")
    assert [bool(row.abs().item() > 0) for row in found.column] == [False, False, True, True]


@pytest.mark.thorough
def test_tokens_may_depend_on_the_batch():
    together = attention_knockout(model(), batches(), loss_fn, lambda x: x.shape[1] - 1, lambda _: [4])
    torch.testing.assert_close(together.flat, attention_knockout(model(), batches(), loss_fn, -1, 4).flat)


@pytest.mark.parametrize(("options", "message"), [
    ({"by": "heads"}, "by='heads': did you mean 'head'"), ({"window": 2, "by": "layer"}, "window=2: expected an odd"),
    ({"window": 3}, "with by='layer'"), ({"queries": 7}, "none of the 1 calls had a token of each set"),
])  # fmt: skip
def test_bad_input(options: dict[str, Any], message: str):
    with pytest.raises(hw.ConfigError, match=message):
        attention_knockout(model(), batches(), loss_fn, **{"queries": 6, "keys": 4, **options})


def without(layer: ByHand, x: Tensor, head: int) -> Tensor:
    """The output of attention without the weight of token 2 on token 0 in a head, by definition."""
    q, k, v = layer.split(x)
    scores = q @ k.mT * 3**-0.5
    scores[:, head, 2, 0] = -torch.inf
    return layer.joined(scores.softmax(-1) @ v)


def test_attention_written_by_hand_is_knocked_out_by_its_handle():
    torch.manual_seed(0)
    layer, x = ByHand(), torch.randn(2, 5, 6)
    made = nn.Sequential(layer).eval()
    hw.find_heads(made, x)
    with pytest.raises(hw.ConfigError, match=r"hw\.attach\(model, batch"):
        attention_knockout(made, [x], lambda m, x: m(x).sum(), queries=2, keys=0)
    with hw.attach(made, batch=x) as handle:
        found = attention_knockout(handle, [x], lambda m, x: m(x).square().sum(), queries=2, keys=0)
        norms = hw.analysis.value_norms(handle, lambda: made(x))
    with torch.no_grad():
        expected = [float(without(layer, x, i).square().sum() - made(x).square().sum()) for i in range(2)]
        wide = torch.einsum("bhnd,ehd->bhne", layer.split(x)[2], layer.out.weight.view(6, 2, 3))
    torch.testing.assert_close(torch.from_numpy(found.flat).float(), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norms["0"].float(), wide.norm(dim=-1), rtol=1e-5, atol=1e-6)
