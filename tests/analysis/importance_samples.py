"""Models and losses for the tests of importance."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.lm.model import Decoder, DecoderConfig
from headwise.masks import Causal
from headwise.nn.multi_head import MultiHeadAttention

Edit = Callable[[int, Tensor], Tensor]  # of layer and Concat(head_1 … head_h) [b, n, h·d_v]


class Stack(nn.Module):
    """Residual attention layers that differ in heads and head sizes, without anything between them."""

    def __init__(self, width: int = 14, heads: Sequence[int] = (3, 5), **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            MultiHeadAttention(width, h, head_dim=4, value_dim=7 - h, **options) for h in heads
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, mask=Causal())
        return x

    def by_hand(self, x: Tensor, edit: Edit) -> Tensor:
        """The same, with the heads' outputs edited between attention and output projection."""
        for i, layer in enumerate(self.layers):
            _, concat = layer(x, mask=Causal(), return_concat=True)
            x = x + layer.o_proj(edit(i, concat))
        return x


def stack(seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> Stack:
    torch.manual_seed(seed)
    return Stack(**options).to(dtype)


def planted(needed: Sequence[tuple[int, int]], quiet: float = 1e-3) -> Stack:
    """A stack of which only these heads say anything worth hearing: the others' output matrices are next to nothing."""
    model = stack(3, torch.float32)
    with torch.no_grad():
        for i, layer in enumerate(model.layers):
            for head, w in enumerate(layer.per_head_weights()["o"]):
                w.mul_(3.0 if (i, head) in needed else quiet)
    return model


def vectors(batches: int = 3, rows: int = 4, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    """Inputs [rows, 11, 14] with targets that no model gives."""
    generator = torch.Generator().manual_seed(7)
    return [tuple(torch.randn(2, rows, 11, 14, generator=generator, dtype=dtype)) for _ in range(batches)]  # type: ignore[misc]


def wanted_of(model: Stack, batches: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The same inputs; targets of which the model's heads do half the work, so that gradients do not vanish."""
    with torch.no_grad():
        return [(x, x + 2.0 * (model(x) - x)) for x, _ in batches]


def square_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def decoder(**sizes: Any) -> Decoder:
    torch.manual_seed(1)
    options: dict[str, Any] = {"d_model": 24, "num_layers": 2, "num_heads": 3, "d_ff": 20, "context": 13}
    return Decoder(DecoderConfig(37, **(options | sizes))).eval()


def texts(batches: int = 3, rows: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(37, (rows, 14), generator=generator) for _ in range(batches)]


def token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    found = model(ids[:, :-1])
    return F.cross_entropy(getattr(found, "logits", found).mT, ids[:, 1:])
