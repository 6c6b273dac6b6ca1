"""Heads of attention that is written by hand, found while it runs.

`find_heads(model, batch)` runs the model once. Which numbers of which layer belong to head i follows from derivatives:
queries, keys and values of head i depend on these outputs of a linear map and on no others, and the numbers that the
output projection receives are exactly those of the heads, in their order. Which attributes hold the number of heads
is found by removing a head and comparing the module with the one in which that head is masked.

kind     the kind: what is known of a module, its slices of parameters, and maps that repeat KV heads
tracing  the forward pass in which it is found, and the projection that receives the heads
sizes    attributes that hold numbers of heads
"""

from headwise.models.traced.kind import Traced, TracedKind

__all__ = ["Traced", "TracedKind"]
