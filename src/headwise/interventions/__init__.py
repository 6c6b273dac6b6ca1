"""Edits of attention while a model runs: exact, in O(n) memory, with gradients.

    >>> import torch, headwise as hw
    >>> layer = hw.MultiHeadAttention(16, 4)
    >>> x = torch.randn(1, 7, 16)
    >>> y = layer(x)
    >>> with hw.intervene(layer, hw.interventions.Forbid(queries=-1, keys=[2, 3], heads=[1])):
    ...     changed = layer(x)
    >>> (changed - y).abs().amax(-1)[0] > 1e-6          # only the last token has lost something
    tensor([False, False, False, False, False, False,  True])

`Forbid` removes keys before the softmax, `Scale` multiplies weights after it, `Uniform` and `Replace` put equal weights
or those of another run in their place. An edit of your own is a subclass of `Edit`.

Sets of tokens (`queries`, `keys`) are positions, a slice, a boolean tensor [tokens], or None for all. Positions count
the tokens of each sequence of a batch from its first one, or from its last one if negative: padding, as far as the mask
shows it, has no position, on whichever side it is. Packed documents are one sequence. With a KV cache, positions count
from the first token, whatever it has dropped, so that an edit of a prompt also holds while text is generated. In cross
attention, queries are counted in each call. A boolean tensor [b, columns] is of the columns of the batch instead,
padding included, as `ids == separator` is.
"""

from headwise.interventions.edits import Arguments, Edit, Forbid, Replace, Scale, Tokens, Uniform

__all__ = ["Arguments", "Edit", "Forbid", "Replace", "Scale", "Tokens", "Uniform"]
