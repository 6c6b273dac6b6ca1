"""Random edits of padded batches: the outputs of a layer's heads, against float64 of each sequence without padding,
whose edits are placed by its tokens."""

import math
import random
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise.interventions import Edit, Forbid, Scale, Uniform

from .compare import Mismatch


class Padded:
    """One batch and its edits, drawn from (seed, number) alone. `told` says what they are."""

    def __init__(self, seed: int, number: int) -> None:
        draw = self.draw = random.Random(f"padded {seed} {number}")
        generator = torch.Generator().manual_seed(draw.getrandbits(40))
        kv, group = draw.choice((1, 2, 3)), draw.choice((1, 2))
        self.layer = hw.MultiHeadAttention(
            10, kv * group, num_kv_heads=kv, head_dim=draw.choice((2, 6)), rotary=draw.random() < 0.5
        ).double()
        with torch.no_grad():
            for weight in self.layer.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.5)
        self.lengths = [draw.randint(1, 9) for _ in range(draw.choice((1, 2, 3)))]
        self.size = max(self.lengths) + draw.choice((0, 1, 4))
        self.side, self.causal = draw.choice(("left", "right")), draw.random() < 0.6
        self.x = torch.randn(len(self.lengths), self.size, 10, generator=generator, dtype=torch.float64)
        self.edits: list[Edit] = [self._edit() for _ in range(draw.choice((1, 1, 2)))]
        self.mask: Any = hw.Lengths(self.lengths, self.lengths if draw.random() < 0.5 else None, side=self.side)
        if self.causal:
            self.mask = self.mask & hw.Causal()
        self.told = [repr(self.layer), f"{self.size} columns", repr(self.mask), *map(repr, self.edits)]

    def run(self) -> None:
        """Mismatch if the output of a token's query differs."""
        with torch.no_grad(), hw.intervene(self.layer, *self.edits, unused="ignore"):
            found = self.layer(self.x, mask=self.mask, return_concat=True)[-1]
        for entry, length in enumerate(self.lengths):
            first = 0 if self.side == "left" else self.size - length
            here = slice(first, first + length)
            with torch.no_grad():
                expected = self._alone(self.x[entry : entry + 1, here])
            error = float((found[entry, here] - expected).abs().max())
            if not error <= 1e-10 * (1 + float(expected.abs().max())):
                raise Mismatch("edits of a padded batch", f"entry {entry} is off by {error:.2g}")

    def _edit(self) -> Edit:
        heads = self.draw.sample(range(self.layer.num_heads), self.draw.randint(1, self.layer.num_heads))
        options: dict[str, Any] = {"heads": heads if self.draw.random() < 0.6 else None}
        kind = self.draw.choice(("scale", "scale", "forbid", "forbid", "uniform"))
        if kind == "uniform":
            return Uniform(queries=self._tokens(), **options)
        queries, keys = self._tokens(), self._tokens()
        factor = self.draw.choice((0.0, 0.5, -2.0))
        return Forbid(queries, keys, **options) if kind == "forbid" else Scale(factor, queries, keys, **options)

    def _tokens(self) -> Any:
        """A set of tokens, which some sequences may lack."""
        places = [self.draw.randint(-9, 8) for _ in range(self.draw.randint(1, 3))]
        return self.draw.choice(
            (None, places[0], places, slice(places[0], None), slice(None, places[-1]), slice(0, 9, 2))
        )

    def _alone(self, x: Tensor) -> Tensor:
        """The outputs of a sequence's heads, [length, h · d]."""
        h, length = self.layer.num_heads, x.shape[1]
        q, k, v = self.layer.project(x, x)
        if self.layer.rotary:
            q, k = self.layer.apply_rope(q, k, 0)
        k, v = (part.repeat_interleave(h // part.shape[1], 1) for part in (k, v))
        scores = q @ k.mT / math.sqrt(q.shape[3])
        allowed = torch.ones(h, length, length, dtype=torch.bool)
        allowed = allowed.tril() if self.causal else allowed
        factors = torch.ones(h, length, length, dtype=torch.float64)
        for edit in self.edits:
            heads = list(range(h)) if edit.heads is None else list(edit.heads)
            rows, cols = (_among(edit.tokens.get(name), length) for name in ("queries", "keys"))
            here = torch.zeros_like(allowed)
            here[heads] = rows[:, None] & cols
            if isinstance(edit, Forbid):
                allowed = allowed & ~here
            elif isinstance(edit, Scale):
                factors = torch.where(here, factors * edit.factor, factors)
            else:
                scores = scores.masked_fill(here, 0.0)
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num() * factors
        return (weights @ v)[0].transpose(0, 1).flatten(1)


def _among(tokens: Any, length: int) -> Tensor:
    """Which tokens of a sequence are in a set, boolean [length]."""
    found = torch.zeros(length, dtype=torch.bool)
    if tokens is None:
        return ~found
    places = range(length)[tokens] if isinstance(tokens, slice) else [at for at in tokens if -length <= at < length]
    found[list(places)] = True
    return found
