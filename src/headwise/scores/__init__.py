"""What changes a score between q·k and the softmax: soft caps, biases by distance, biases of your own, learned sinks.

    >>> import torch, headwise as hw
    >>> q, k, v = torch.randn(3, 1, 8, 100, 16)
    >>> out = hw.attend(q, k, v, mask=hw.Causal(), score=(hw.SoftCap(30.0), hw.ALiBi.standard(8)))

They are objects in a tuple. Whatever its order, S_ij = cap(scale · q_i·k_j) + all biases, then the mask; a learned
sink only enters the denominator. Their tensors may require gradients. What depends on the distance alone is kept as
one number a distance, so only a `Bias` takes n×m memory: the caller's own.

A score of your own is a class below `Score` in a file of its own, which says by `terms` what it is to kernels, and
`register(Mine)`, which lets files have it.
"""

from headwise.fields import register as register
from headwise.scores.base import Score as Score, check_scores as check_scores
from headwise.scores.bias import Bias as Bias
from headwise.scores.distance import (
    ALiBi as ALiBi,
    Relative as Relative,
    RelativeBias as RelativeBias,
    t5_bias as t5_bias,
)
from headwise.scores.sinks import SinkLogits as SinkLogits
from headwise.scores.soft_cap import SoftCap as SoftCap
from headwise.scores.terms import Terms as Terms, cell as cell

for _kind in (SoftCap, ALiBi, RelativeBias, Bias, SinkLogits):
    register(_kind)
SCORES = Score.known  # by name: what files may hold
