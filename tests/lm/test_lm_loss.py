"""The blockwise loss is the plain one, gradients too."""

import pytest
import torch

from headwise.lm import model as module
from headwise.lm.model import next_token_loss


def given(tokens: int = 41) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 7, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(53, 7, generator=generator, dtype=torch.float64).requires_grad_()
    return hidden, weight, torch.randint(53, (tokens,), generator=generator)


@pytest.mark.parametrize("rows", [1, 13, 41, 1000])
def test_loss_and_gradients_equal_the_plain_ones_for_any_block(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", rows)
    hidden, weight, targets = given()
    plain = torch.nn.functional.cross_entropy(hidden @ weight.T, targets)
    expected = torch.autograd.grad(plain, (hidden, weight))
    ours = next_token_loss(hidden, weight, targets)
    assert ours.item() == pytest.approx(plain.item(), rel=1e-6)
    for got, want in zip(torch.autograd.grad(ours * 3, (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(got, want * 3, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        assert next_token_loss(hidden, weight, targets).item() == pytest.approx(plain.item(), rel=1e-6)


def test_bfloat16_products_stay_close() -> None:
    hidden, weight, targets = given()
    plain = torch.nn.functional.cross_entropy(hidden @ weight.T, targets)
    assert next_token_loss(hidden, weight, targets, dtype=torch.bfloat16).item() == pytest.approx(
        plain.item(), rel=2e-2
    )
