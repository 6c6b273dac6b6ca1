"""Attention recognised while any PyTorch model runs, by what it computes.

    >>> import torch, headwise as hw
    >>> class Attention(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.qkv, self.out = torch.nn.Linear(12, 36), torch.nn.Linear(12, 12)
    ...     def forward(self, x):
    ...         q, k, v = (y.view(*y.shape[:2], 3, 4).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
    ...         weights = (q @ k.mT / 2).softmax(-1)
    ...         return self.out((weights @ v).transpose(1, 2).flatten(2))
    >>> found = hw.models.recognise(Attention(), torch.randn(2, 5, 12))
    >>> found[0].num_heads, found[0].scale, found[0].map.shape
    (3, 0.5, (2, 3, 5, 5))

A `TorchFunctionMode` follows tensors from a product of queries and keys through scaling, soft caps, biases, masks,
softmax, dropout and views to a product with values. What was done becomes q, k, v, a scale, a mask and scores, which
`attend` computes; the call counts only if its weights are those that the code computed. Everything else is reported
with its reason.

publisher   the function, its result; for subscribers     following   the mode, its threads
tracked     tensors that are followed                     chains      views, masks, softmax
multiplied  products                                      products    as letters; views
axes        batch, heads, queries                         scores      scale, biases, masks
attention   the call, and its comparison                  frames      modules, lines of code
libraries   functions of packages                         functions   those that are known
"""

from headwise.models.recognise.publisher import NotFollowed, Recognised, Recognition, recognise

__all__ = ["NotFollowed", "Recognised", "Recognition", "recognise"]
