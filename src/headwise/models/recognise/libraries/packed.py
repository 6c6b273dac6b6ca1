"""Sequences one after the other, [tokens, …], with the places where they begin and end."""

from collections.abc import Callable

import torch
from torch import Tensor

from headwise.masks import Causal, Documents, Lengths, Mask, Window

# q, k, v and out as a batch; the mask; and what packs an output again.
Packed = tuple[tuple[Tensor, Tensor, Tensor, Tensor], Mask, Callable[[Tensor], Tensor]]


def packed(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, starts_q: Tensor, starts_k: Tensor, used: Tensor | None = None
) -> Packed:
    """Tensors [b, tokens, …], the mask, and a function that packs an output again. Starts are [sequences + 1], `used`
    keys [sequences]. Queries and keys packed differently become a batch with padding before them."""
    starts_q, starts_k = starts_q.long(), starts_k.long()
    if used is None and torch.equal(starts_q, starts_k) and int(starts_q[0]) == 0 and int(starts_q[-1]) == len(q):
        ids = torch.repeat_interleave(torch.arange(len(starts_q) - 1, device=q.device), starts_q.diff())
        return (q[None], k[None], v[None], out[None]), Documents(ids), lambda made: made[0]
    lengths_q = starts_q.diff()
    lengths_k = starts_k.diff() if used is None else used.long()
    (mine, real), (theirs, _) = _places(starts_q, lengths_q), _places(starts_k, lengths_k)

    def again(made: Tensor) -> Tensor:
        return made.new_zeros(len(q), *made.shape[2:]).index_put((mine[real],), made[real])

    mask = Lengths(lengths_k.cpu(), lengths_q.cpu(), side="right")
    return (q[mine], k[theirs], v[theirs], out[mine.to(out.device)]), mask, again


def _places(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """[sequences, longest], where each token lies, and whether it is one; 0 for padding, which comes first."""
    longest = int(lengths.max())
    back = torch.arange(longest, 0, -1, device=starts.device)
    real = back <= lengths[:, None]
    return torch.where(real, starts[: len(lengths), None] + lengths[:, None] - back, 0), real


def windowed(left: int, right: int) -> Mask | None:
    """The mask of queries that may attend to `left` keys before them and `right` after them; a negative number is no
    limit."""
    if left < 0:
        return Causal() if right == 0 else None if right < 0 else Window(_FAR, right)
    return Causal() & Window(left + 1) if right == 0 else Window(left + 1, right if right > 0 else _FAR)


_FAR = 1 << 30
