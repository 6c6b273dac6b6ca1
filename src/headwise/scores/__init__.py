"""Score modifications before the softmax: soft caps, relative position biases, arbitrary biases, learned sinks.

    >>> import torch, headwise as hw
    >>> q, k, v = torch.randn(3, 1, 8, 100, 16)
    >>> out = hw.attend(q, k, v, mask=hw.Causal(), score=(hw.SoftCap(30.0), hw.ALiBi.standard(8)))

They are given as a tuple in any order: S_ij = cap(scale · q_i·k_j) + all biases, then the mask; learned sinks enter
the denominator only. Their tensors may require gradients. Relative position biases hold one number per distance; only
a `Bias` takes up to n×m memory, that of the caller's tensor.

As masks, scores are over all tokens: where a cache has dropped some, `with_gap` is the score of the others.

To define your own score, subclass `Score` with its `terms`, and call `register(Mine)`, which lets files contain it.
"""

from headwise.fields import register
from headwise.scores.base import Score, Terms, WithGap, cell, check_scores
from headwise.scores.kinds import ALiBi, Bias, Relative, RelativeBias, SinkLogits, SoftCap, t5_bias

__all__ = [
    "SCORES",
    "ALiBi",
    "Bias",
    "Relative",
    "RelativeBias",
    "Score",
    "SinkLogits",
    "SoftCap",
    "Terms",
    "WithGap",
    "cell",
    "check_scores",
    "register",
    "t5_bias",
]

for _kind in (SoftCap, ALiBi, RelativeBias, Bias, SinkLogits, WithGap):
    register(_kind)
SCORES = Score.known  # by name, for files
