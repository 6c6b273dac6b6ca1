"""One attention that is written by hand, for what needs it in several folders; tests/models has all ways."""

from torch import Tensor, nn


class ByHand(nn.Module):
    """2 heads of 3 channels, whose queries, keys and values are one map."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [b, h, n, d] of x [b, n, 6]."""
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 3).permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.joined((q @ k.mT * 3**-0.5).softmax(-1) @ v)

    def joined(self, heads: Tensor) -> Tensor:
        """The output [b, n, 6] of heads [b, h, n, d]."""
        return self.out(heads.transpose(1, 2).flatten(2))
