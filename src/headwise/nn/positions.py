"""Rotary positions: queries and keys turned by an angle that grows with their place."""

import torch
from torch import Tensor, nn

from headwise.errors import ShapeError


class Rotary(nn.Module):
    """Rotary position embedding (Su et al. 2021, RoFormer, 2104.09864, eq. 15): q·k depends on i − j only.

    Pairs (x_t, x_{t + d/2}) are turned by position · base^(−2t/d), the half-split layout of Llama.

    Args:
        head_dim: even size d of the heads.
        base: 10,000 in the paper.
    """

    def __init__(self, head_dim: int, base: float = 10_000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ShapeError(f"Rotary(head_dim={head_dim}): rotary positions turn pairs, so head_dim must be even")
        frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        self.register_buffer("frequency", frequency.float(), persistent=False)
        self.frequency: Tensor

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """x [b, h, n, d] whose first entry stands at position `start`; the same shape and dtype."""
        position = torch.arange(start, start + x.shape[-2], device=x.device, dtype=torch.float32)
        angle = position[:, None] * self.frequency  # [n, d/2], in float32: half precision loses far positions
        cos, sin = angle.cos(), angle.sin()
        one, two = x.float().chunk(2, -1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1).to(x.dtype)
