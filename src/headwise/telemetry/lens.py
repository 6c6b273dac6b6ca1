"""The maps of a record, and what it has of a layer by TransformerLens's names and in its layouts.

record.maps["blocks.3.attn.hook_pattern"]        # the AttentionMap of the fourth call, weights [b, h, n, m]
record.maps["blocks.3.attn.hook_attn_scores"]    # AttentionScores [b, h, n, m], computed where they are read
record.maps["blocks.3.attn.hook_rot_q"]          # queries as they are multiplied, [b, n, h, d]; hook_rot_k: keys
# with hw.watch(…, maps="lazy", values=True):
record.maps["blocks.3.attn.hook_q"]              # queries as they are projected, if they are not changed afterwards
record.maps["blocks.3.attn.hook_v"]              # values, [b, m, h_kv, d_v]
record.maps["blocks.3.attn.hook_z"]              # the output of each head, [b, n, h, d_v]
record.maps["blocks.3.attn.hook_result"]         # what each head adds, [b, n, h, d_model]: z W_O, without bias
"""

import re
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headwise.errors import ConfigError, closest
from headwise.fields import bits
from headwise.map import AttentionMap
from headwise.map.index import select
from headwise.masks import Span
from headwise.masks.grid import NO_GAP
from headwise.models import find_heads
from headwise.models.hooks import Hook
from headwise.publishing import AttentionCall
from headwise.rule.tiles import scores_at

_NAME = re.compile(r"blocks\.(\d+)\.attn\.(hook_\w+)")
OF_MAPS = "hook_pattern", "hook_attn_scores", "hook_rot_q", "hook_rot_k"
OF_VALUES = "hook_q", "hook_k", "hook_v", "hook_z", "hook_result"


@dataclass(frozen=True, eq=False)
class Kept:
    """What a record keeps of a call beside its map."""

    call: AttentionCall  # with values and outputs of heads
    projected: tuple[bool, bool]  # whether queries, and keys, are outputs of a linear map as they are

    def __getstate__(self) -> dict[str, Any]:
        """Without the graph that a differentiable record has, as its maps are copied."""
        heads = self.call.heads
        return {**vars(self), "call": replace(self.call, heads=None if heads is None else heads.detach())}


class AttentionScores:
    """The scores before the softmax: scaled, capped, biased, −∞ where masked; only tiles that are read are computed."""

    def __init__(self, amap: AttentionMap) -> None:
        self.map = amap

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(b, h, n, m)"""
        return self.map.shape

    def __getitem__(self, index: Any) -> Tensor:
        """The scores of a tile, as `AttentionMap` is indexed."""
        amap = self.map
        return select(index, amap.shape, lambda *spans: scores_at(amap.q, amap.k, amap.lse, amap.rule, *spans))

    def __repr__(self) -> str:
        return f"AttentionScores(of {self.map!r})"


def hook(name: str, of: Any, kept: Kept | None) -> Any:
    """What TransformerLens's hook of this name has, of a record's `AttentionMap` or `Picture`; KeyError with the
    reason."""
    if name == "hook_pattern":
        return of
    if name not in (*OF_MAPS, *OF_VALUES):
        raise KeyError(f"expected one of {', '.join((*OF_MAPS, *OF_VALUES))}")
    if not isinstance(of, AttentionMap):
        raise KeyError("the record has pictures only; give hw.watch(…, maps='lazy')")
    if name == "hook_attn_scores":
        return AttentionScores(of)
    letter = name[-1]
    if name in ("hook_rot_q", "hook_rot_k"):
        return (of.q if letter == "q" else of.k).transpose(1, 2)
    if kept is None:
        raise KeyError("the record keeps no values and outputs; give hw.watch(…, maps='lazy', values=True)")
    if name in ("hook_q", "hook_k"):
        if not kept.projected["qk".index(letter)]:
            what = {"q": "queries", "k": "keys"}[letter]
            raise KeyError(
                f"the {what} are changed after their projection, by rotary positions, a norm, a scale or a cache; "
                f"hook_rot_{letter} has them as they are multiplied"
            )
        return (of.q if letter == "q" else of.k).transpose(1, 2)
    call = kept.call
    if name == "hook_v":
        if call.values is None:
            raise KeyError(f"{type(call.module).__name__} does not publish its values")
        return call.values.transpose(1, 2)
    if call.heads is None:
        raise KeyError(f"{type(call.module).__name__} has no output of each head before its output projection")
    z = call.heads.transpose(1, 2)
    if name == "hook_z":
        return z
    try:
        w_o = next(site for site in find_heads(call.module) if site.module is call.module).weights()["o"]
    except ConfigError as error:
        raise KeyError(f"its output projection is not known: {error}") from None
    return torch.einsum("bnhd,hde->bnhe", z, w_o.to(z.dtype))


class Projections:
    """Outputs of a model's linear maps since its last attention call, and whether queries and keys are among them."""

    def __init__(self) -> None:
        self._outputs: list[Tensor] | None = None  # outside of measured forwards

    def follow(self, model: nn.Module) -> list[RemovableHandle]:
        """Keep the outputs of its linear maps between `open` and `close`, until the hooks are removed."""
        maps = WeakSet(
            module for module in model.modules()
            if getattr(getattr(module, "weight", None), "ndim", 0) == 2 and not isinstance(module, nn.Embedding)
        )  # fmt: skip

        def made(module: nn.Module, args: Any, out: Any) -> None:
            if self._outputs is None or module not in maps:  # a replica of the model has the hooks too
                return
            if isinstance(out, Tensor) and out.ndim == 3:
                self._outputs.append(out.detach())

        hook = Hook(made)
        return [module.register_forward_hook(hook) for module in maps]

    def open(self) -> None:
        """Keep the outputs of this forward."""
        self._outputs = []

    def close(self) -> None:
        """Forget them, and keep none until the next `open`."""
        self._outputs = None

    def kept(self, call: AttentionCall) -> Kept:
        """What to keep of a call."""
        outputs, self._outputs = self._outputs or [], []
        q, k = (any(_heads_of(y, x) for y in reversed(outputs)) for x in (call.map.q, call.map.k))
        return Kept(call, (q, k))


def _heads_of(y: Tensor, x: Tensor) -> bool:
    """Whether x [b, h, n, d] is a part of y [b, n, …], evenly spaced."""
    b, h, n, d = x.shape
    if y.shape[:2] != (b, n) or y.shape[-1] % d or y.dtype != x.dtype or not x.numel():
        return False
    pieces = y.unflatten(-1, (-1, d))
    firsts, seconds = (
        [int(i) for i in (bits(pieces[0, -1]) == bits(x[0, head, -1])).all(-1).nonzero()] for head in (0, min(1, h - 1))
    )
    for start in firsts:
        for step in {1} if h == 1 else {one - start for one in seconds if one > start}:
            part = pieces[:, :, start::step][:, :, :h]
            if part.shape[2] == h and torch.equal(bits(part.transpose(1, 2)), bits(x)):
                return True
    return False


class Maps(dict[str, Any]):
    """name of the module → `AttentionMap` or `Picture`, in the order of the calls; TransformerLens's names too:
    `maps["blocks.3.attn.hook_pattern"]` are the weights of layer 3, the fourth of them."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept = kept
        self.kept_of: dict[str, Kept] = {}

    def __missing__(self, name: str) -> Any:
        """What TransformerLens calls so; KeyError with the closest names otherwise."""
        named = _NAME.fullmatch(str(name))
        if named is not None and int(named[1]) < len(self):
            layer = [*self][int(named[1])]
            try:
                return hook(named[2], self[layer], self.kept_of.get(layer))
            except KeyError as error:
                raise KeyError(f"record.maps[{name!r}]: {error.args[0]}") from None
        if not self:
            why = (
                "it keeps none: give hw.watch(…, maps='lazy')" if self.kept == "none" else "no forward was measured yet"
            )
            raise KeyError(f"record.maps[{name!r}]: {why}")
        close = closest(name, self) or [*self][:3]
        meant = ", ".join(map(repr, close))
        raise KeyError(f"record.maps[{name!r}]: no such module among {len(self)}; did you mean {meant}?")


SIZE = 64


@dataclass(frozen=True, eq=False)
class Picture:
    """A map downsampled to at most 64 × 64 cells, each a square of weights.

    Attributes:
        mean, largest: of each square, [b, h, rows, columns].
        shape: (b, h, n, m) of the map. gap: the tokens that are not among its keys, as of `Grid`.
    """

    mean: Tensor
    largest: Tensor
    shape: tuple[int, int, int, int]
    gap: Span = NO_GAP

    def __repr__(self) -> str:
        b, h, n, m = self.shape
        return f"Picture({b} × {h} heads, {n} queries × {m} keys as {self.mean.shape[2]} × {self.mean.shape[3]})"


def picture(amap: AttentionMap) -> Picture:
    """Downsample a map."""
    return Picture(amap.pool(SIZE), amap.pool(SIZE, "max"), amap.shape, amap.rule.grid.gap)
