"""Attention of any model, computed by `attend` where it is certain that it is the same function.

In its first forward pass a model computes everything itself, and each attention that is recognised is compared with
`attend` (verdicts by module, line and form of the computation). From the next pass on, products of queries and keys at
certified places are `Deferred`: tensors that are written down and not computed. What is done to them is written down
too, until they are multiplied by values; then `attend` computes the result. Whatever else reads a deferred tensor gets
exactly the numbers that the code would have computed, and the call is computed by its own code.

deferred     tensors that are not computed, and the mode that defers
certifying   a pass in which everything is compared, what it returns, and remarks
replacement  the passes of a model
"""

from headwise.models.replace.certifying import Certificate, Verdict, certify
from headwise.models.replace.replacement import Replacement

__all__ = ["Certificate", "Replacement", "Verdict", "certify"]
