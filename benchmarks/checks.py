"""Checks that all contestants compute the same results, before and after timing.

Small cases are compared with the formulas in float64. Large ones, whose matrix would be too large for that, are
compared with one another.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks import formulas
from benchmarks.cases import Case
from benchmarks.inputs import Inputs, allowed

TRUTH_PAIRS = 1 << 24  # the truth takes a handful of float64 matrices of so many entries
# Loose enough for every peer, tight enough for a wrong mask, scale or row: this is no test of accuracy.
RELATIVE = {"float32": 2e-5, "bfloat16": 3e-2}  # of the norm, for tensors
STATISTIC = {"float32": (1e-3, 1e-5), "bfloat16": (5e-2, 2e-2)}  # relative and absolute, for each number
TENSORS = ("out", "dq", "dk", "dv", "pooled")


class Disagreement(Exception):
    """A contestant computed a different result."""


@dataclass
class Referee:
    """Compares results by name with the float64 reference, or with the first contestant that returned that name."""

    case: Case
    known: dict[str, tuple[str, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case, inputs: Inputs) -> "Referee":
        """Computes the float64 reference if it is small enough."""
        b, h, n, _ = case.size
        if b * h * n * case.kv_size[2] > TRUTH_PAIRS:
            return cls(case)
        return cls(case, {name: ("float64", value) for name, value in truth(case, inputs).items()})

    def check(self, who: str, named: dict[str, Tensor]) -> float | None:
        """The relative error of `out`, None if it is the first; raises Disagreement."""
        error = None
        for name, value in named.items():
            if not bool(torch.isfinite(value).all()):
                raise Disagreement(f"{self.case.name}: {name} of {who} is not finite")
            if name not in self.known:
                self.known[name] = who, value.detach().clone()
                continue
            source, expected = self.known[name]
            if value.shape != expected.shape:
                raise Disagreement(
                    f"{self.case.name}: {name} of {who} has shape {tuple(value.shape)}, {source} has "
                    f"{tuple(expected.shape)}"
                )
            distance = _distance(value, expected)
            if name == "out":
                error = distance
            if not self._agrees(name, value, expected, distance):
                raise Disagreement(
                    f"{self.case.name}: {name} of {who} differs from {source} by {distance:.2e} (relative norm)"
                )
        return error

    def _agrees(self, name: str, value: Tensor, expected: Tensor, distance: float) -> bool:
        dtype = self.case.dtype
        if name in TENSORS:
            return distance <= RELATIVE[dtype]
        relative, absolute = STATISTIC[dtype]
        return torch.allclose(value.double(), expected.double(), rtol=relative, atol=absolute)


def truth(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """All results of the case from the stored matrix in float64."""
    q, k, v = (x.detach().double().requires_grad_(case.backward) for x in inputs.leaves)
    may = allowed(case)
    with torch.set_grad_enabled(case.backward):
        s = formulas.scores(q, k, may)
        p = s.softmax(-1)
        out = formulas.mixed(p, v)
        found = {"out": out, **formulas.statistics(s, p, may, case.statistics)}
    if case.pooled:
        found["pooled"] = formulas.pooled(p.detach(), may, case.pooled)
    if inputs.d_out is not None:
        of_loss = (found[name] for name in ("out", *case.statistics))
        gradients = torch.autograd.grad(tuple(of_loss), (q, k, v), [x.double() for x in inputs.d_loss(case)])
        found |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    return {name: x.detach() for name, x in found.items()}


def fingerprint(named: dict[str, Tensor]) -> float:
    """A checksum of the output: the projection of its direction on a fixed wave, between −1 and 1."""
    out = named["out"].detach().double().flatten()
    wave = torch.sin(torch.arange(out.numel(), dtype=torch.float64))
    return float(out @ wave / (out.norm() * wave.norm()).clamp_min(1e-30))


def _distance(value: Tensor, expected: Tensor) -> float:
    """‖value − expected‖ / ‖expected‖, Frobenius."""
    expected = expected.double()
    return float((value.detach().double() - expected).norm() / expected.norm().clamp_min(1e-30))
