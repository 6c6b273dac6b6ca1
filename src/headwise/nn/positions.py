"""Rotary position embedding (RoPE)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import ConfigError, ShapeError


class Rotary(nn.Module):
    """Rotary position embedding (Su et al. 2021, RoFormer, 2104.09864, eq. 15): q·k depends on i − j only.

    Pairs (x_t, x_{t + d/2}) are rotated by the angle position · base^(−2t/d), the half-split layout of Llama. Angles
    are float32, and float64 for float64 inputs, whatever the dtype of the module, as half precision does not resolve
    large positions.

    Args:
        head_dim: even size d of the heads.
        base: 10,000 in the paper.
    Attributes:
        frequency: float32 [d/2], base^(−2t/d). Not in the state dict: it follows from the arguments, so it is computed
            again where a change of the module would round it (`half`) or leave it without its numbers (`to_empty`).
    """

    def __init__(self, head_dim: int, base: float = 10_000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ShapeError(
                f"Rotary(head_dim={head_dim}): rotary positions rotate pairs of channels; expected an even head_dim"
            )
        if not isinstance(base, (int, float)) or not 0.0 < base < math.inf:
            raise ConfigError(f"Rotary(base={base!r}): expected a finite number above 0")
        self.head_dim, self.base = head_dim, float(base)
        self.register_buffer("frequency", torch.empty(0), persistent=False)  # on the default device
        self.frequency: Tensor
        self.reset_parameters()

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """Rotate x [b, h, n, d], whose first token has position `start`; shape and dtype are unchanged."""
        return rotated(x, *self.table(x, x.shape[-2], start))

    def table(self, x: Tensor, n: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [n, d/2] of the angles at n positions from `start` on, for `rotated(x, …)`: on the
        device of x, and float32 or wider."""
        wide = torch.promote_types(x.dtype, torch.float32)
        position = torch.arange(start, start + n, device=x.device, dtype=wide)
        frequency = self.frequency
        # Not the buffer for float64 inputs, nor where it was left on another device or cast other than by `_apply`.
        if frequency.dtype != wide or frequency.device != x.device:
            frequency = self._computed(x.device, wide)
        angle = position[:, None] * frequency
        return angle.cos(), angle.sin()

    def reset_parameters(self) -> None:
        """Compute `frequency` again on its device, as modules do after `to_empty`."""
        # On the CPU, so that the numbers are the same bits on every device, and for devices without float64.
        self.frequency = self._computed(torch.device("cpu"), torch.float32).to(self.frequency.device)

    def _computed(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device)
        return (self.base ** (-pairs / self.head_dim)).to(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        """What `to`, `half`, `to_empty` and the like call. A buffer that they return unchanged stays the same tensor,
        which a CUDA graph may read."""
        before = self.frequency
        super()._apply(fn, recurse)
        if self.frequency is not before:
            self.reset_parameters()
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any) -> None:
        """`load_state_dict(assign=True)` gives data to a module on the meta device without `_apply`."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        if self.frequency.is_meta and local_metadata.get("assign_to_params_buffers"):
            self.frequency = self._computed(torch.device("cpu"), torch.float32)

    def extra_repr(self) -> str:
        """The sizes, for print(module)."""
        return f"head_dim={self.head_dim}, base={self.base:g}"


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_t, x_{t + d/2}) of x […, d] by angles […, d/2] given by cosine and sine, as `Rotary.table`
    returns them; shape and dtype are unchanged."""
    one, two = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1).to(x.dtype)
