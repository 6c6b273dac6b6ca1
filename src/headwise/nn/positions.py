"""Rotary position embedding (RoPE)."""

import torch
from torch import Tensor, nn

from headwise.errors import ShapeError


class Rotary(nn.Module):
    """Rotary position embedding (Su et al. 2021, RoFormer, 2104.09864, eq. 15): q·k depends on i − j only.

    Pairs (x_t, x_{t + d/2}) are rotated by the angle position · base^(−2t/d), the half-split layout of Llama.

    Args:
        head_dim: even size d of the heads.
        base: 10,000 in the paper.
    """

    def __init__(self, head_dim: int, base: float = 10_000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ShapeError(
                f"Rotary(head_dim={head_dim}): rotary positions rotate pairs of channels; expected an even head_dim"
            )
        frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        self.register_buffer("frequency", frequency.float(), persistent=False)
        self.frequency: Tensor

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """Rotate x [b, h, n, d], whose first token has position `start`; shape and dtype are unchanged."""
        position = torch.arange(start, start + x.shape[-2], device=x.device, dtype=torch.float32)
        angle = (
            position[:, None] * self.frequency
        )  # [n, d/2], in float32, as half precision does not resolve large positions
        cos, sin = angle.cos(), angle.sin()
        one, two = x.float().chunk(2, -1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1).to(x.dtype)
