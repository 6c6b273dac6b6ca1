"""What each head writes into the residual stream as a direct effect on the logits: logit attribution.

Norms on the way, the final one and those between an attention and the residual stream, are applied with the scale that
they have at each position, so that the effect is linear in what a head writes. Everything that this assumes of a model
is checked on the numbers of its run, down to the logits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.errors import ConfigError
from headwise.models import HeadSite, find_heads, record_heads
from headwise.table import HeadColumn, HeadTable
from headwise.table.heads import Tabled

ROWS = 64  # of the logits that are compared
LEAST = 2  # tokens: the last one has none that follows
TOLERANCE = 1e-3  # of the largest number, for what must be equal
_MEAN = "Direct effect on the logit of the next token, mean over the text"
WORK = 2e12  # operations for the tokens that a head makes more likely


@dataclass(frozen=True, repr=False)
class DirectEffects(Tabled):
    """The direct effects of heads on logits, each relative to the mean over the vocabulary.

    Attributes:
        next_token: for each layer [h, n]: on the logit of the token that follows; NaN for the last one.
        values, tokens: for each layer [h, n, top]: the largest effects and their tokens; [] where that would take more
            than `WORK` operations.
    """

    next_token: list[Tensor]
    values: list[Tensor]
    tokens: list[Tensor]

    @property
    def table(self) -> HeadTable:
        """The effect of each head on the logit of the token that follows, mean over the text."""
        column = HeadColumn([row[:, :-1].mean(1) for row in self.next_token], unit="logit", description=_MEAN)
        return HeadTable({"direct effect": column}, title=_MEAN)


@torch.no_grad()
def direct_effects(
    model: nn.Module,
    run: Callable[[], Any],
    ids: Tensor,
    unembedding: Tensor,
    *,
    sites: Sequence[HeadSite] | None = None,
    top: int = 3,
) -> DirectEffects:
    """The direct effect of every head on the logits at every position: norm(o_i W_O) · W_U, with the scale of the final
    norm at that position kept. Factors of the residual stream and of the logits, and a norm between an attention and
    the stream, are part of it.

    It is exact for that path: the sum over all heads, feed-forward layers and the embedding is the logits, up to the
    mean over the vocabulary. What later layers make of a head's output is not in it.

    Args:
        model: a decoder whose attention adds to a residual stream.
        run: a function that runs the model once on `ids`, with a batch of one; if that computes no logits, those of
            norm(x) · W_U are meant. ids: [n].
        unembedding: W_U, [vocabulary, d_model].
        sites: of `find_heads(model)`, in the order of the layers; all by default.
        top: tokens to return with the largest effects.
    Returns:
        `DirectEffects`.
    Raises:
        ConfigError: with the reason, for a model whose heads do not add to a residual stream that ends in a norm, or
            whose logits are not a multiple of norm(x) · W_U, as where they have a soft cap.
    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; nostalgebraist 2020, "logit lens".
    """
    if len(ids) < LEAST:
        raise ConfigError(f"ids: {len(ids)} tokens; direct effects require at least {LEAST}")
    sites = find_heads(model) if sites is None else sites
    with _Stream(model, sites).followed() as stream, record_heads(sites) as outputs:
        run()
        outputs = [out[0].float() for out in outputs]  # [h, n, d_v]
    weights = []
    for site in sites:
        output = site.weights().get("o")
        if output is None:
            raise ConfigError(f"{site.name}: has no output projection of each head")
        weights.append(output.float())
    paths = stream.paths(outputs, weights)
    last = stream.norm()
    words = unembedding.float()
    if words.ndim != 2 or words.shape[1] != len(last.gain):
        raise ConfigError(
            f"unembedding: shape {tuple(words.shape)}, expected [vocabulary, {len(last.gain)}], the width of the final "
            f"norm"
        )
    words = last.back(words - words.mean(0)) * stream.factor_of_logits(last, unembedding)  # [V, d_model]
    work = sum(2.0 * o.shape[0] * o.shape[1] * len(words) * (o.shape[2] + len(ids)) for o in weights)
    found = DirectEffects([], [], [])
    for out, o, path in zip(outputs, weights, paths, strict=True):
        o, scale = path.on(o), last.scale * path.scale
        following = ((out @ o)[:, :-1] * words[ids[1:]]).sum(-1) * scale[:-1]  # [h, n - 1]
        found.next_token.append(torch.cat((following, following.new_full((len(out), 1), torch.nan)), 1))
        if work > WORK:
            continue
        best = [((x @ (y @ words.T)) * scale[:, None]).topk(top) for x, y in zip(out, o, strict=True)]
        found.values.append(torch.stack([one.values for one in best]))
        found.tokens.append(torch.stack([one.indices for one in best]))
    return found


class _Linear(NamedTuple):
    """x → gain · scale · (x − its mean if centred): a norm at the scale that it has at each position, or a factor."""

    gain: Tensor  # [d_model]
    scale: Tensor  # [n]
    centred: bool = False
    out: Tensor | None = None  # what it made, [n, d_model]

    def on(self, x: Tensor) -> Tensor:
        """The rows [..., d_model] but for the scale."""
        return (x - x.mean(-1, keepdim=True) if self.centred else x) * self.gain

    def back(self, x: Tensor) -> Tensor:
        """Vectors [..., d_model] that products with a result are taken with, as those for products with its input."""
        x = x * self.gain
        return x - x.mean(-1, keepdim=True) if self.centred else x


@dataclass
class _Pass:
    """The first call of a module: its first tensor, and the first tensor that it returned, of batch entry 0."""

    given: Tensor | None = None
    made: Tensor | None = None


@dataclass
class _Stream:
    """The residual stream of a model: inputs and outputs of the blocks, and of all modules in and after them."""

    model: nn.Module
    sites: Sequence[HeadSite]
    passes: dict[nn.Module, _Pass] = field(default_factory=dict)

    @contextmanager
    def followed(self) -> Iterator["_Stream"]:
        """Within it, the first call of every module is recorded."""

        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            if module not in self.passes:
                self.passes[module] = _Pass(_tensor((*args, *kwargs.values())), _tensor((out,)))

        with ExitStack() as hooks:
            for module in self.model.modules():
                hooks.enter_context(module.register_forward_hook(record, with_kwargs=True))
            yield self

    def paths(self, outputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[_Linear]:
        """How each attention is added to the stream; ConfigError unless it is the sum of its heads."""
        found, previous = [], None
        for site, out, o in zip(self.sites, outputs, weights, strict=True):
            block = self._block(site)
            written, attention = (out @ o).sum(0), self.passes[site.module].made
            before, after = self.passes[block].given, self.passes[block].made
            if attention is None or before is None or after is None or attention.shape != written.shape:
                raise ConfigError(f"{site.name}: is not computed on one sequence of hidden states")
            rest = attention - written
            if not _equal(rest, rest[:1].expand_as(rest), attention):
                raise ConfigError(f"{site.name}: its output is not the sum of what its heads write")
            path = self._added(block, attention, after - before, after)
            if path is None:
                raise ConfigError(
                    f"{site.name}: its output, or a multiple or norm of it, is not added to a residual stream"
                )
            if previous is not None and not _equal(before, previous, before):
                raise ConfigError(f"{site.name}: does not read the output of the block before")
            previous = after
            found.append(path)
        return found

    def _added(self, block: nn.Module, attention: Tensor, change: Tensor, like: Tensor) -> _Linear | None:
        """How the attention is part of what the block adds to the stream, beside at most one other output, or None."""
        passes = [(module, self.passes[module]) for module in block.modules() if module in self.passes]
        others = [one.made for _, one in passes if one.made is not None and one.made.shape == change.shape]
        same = _Linear(torch.ones_like(attention[0]), torch.ones_like(attention[:, 0]), out=attention)
        ways = [same]
        for module, one in passes:
            x, y = one.given, one.made
            if x is not None and y is not None and x.shape == y.shape == attention.shape and _equal(x, attention, x):
                norm = _fitted(module, x, y)
                ways += [] if norm is None else [norm]
        for way in ways:
            assert way.out is not None
            if any(_equal(change, way.out + x, like) for x in others) or _equal(change, way.out, like):
                return way
        for way in ways:  # with factors, such as those of residual multipliers
            assert way.out is not None
            for x in others:
                basis = torch.stack((way.out.flatten(), x.flatten()), 1).double()
                a, c = torch.linalg.lstsq(basis, change.flatten()[:, None].double()).solution.flatten().tolist()
                if abs(a) > TOLERANCE and _equal(change, a * way.out + c * x, change):
                    return way._replace(gain=a * way.gain)
        return None

    def norm(self) -> _Linear:
        """The final norm."""
        blocks = [self._block(site) for site in self.sites]
        inside = {module for block in blocks for module in block.modules()}
        last = self.passes[blocks[-1]].made
        assert last is not None
        for module, one in self.passes.items():
            x, y = one.given, one.made
            if module in inside or x is None or y is None or x.shape != last.shape or y.shape != x.shape:
                continue
            if _equal(x, last, last) and (found := _fitted(module, x, y)) is not None:
                return found
        raise ConfigError("model: no norm follows the last block")

    def factor_of_logits(self, last: _Linear, unembedding: Tensor) -> float:
        """The factor of the logits beside norm(x) · W_U and a bias; 1 if the run computed none."""
        found = [one.made for one in self.passes.values() if one.made is not None]  # the outermost module is the last
        logits = next((x for x in reversed(found) if x.shape[-1] == len(unembedding)), None)
        if logits is None or len(logits) < LEAST:
            return 1.0
        assert last.out is not None
        rows = torch.linspace(0, len(logits) - 1, min(len(logits), ROWS)).long()
        ours = last.out[-len(logits) :][rows] @ unembedding.float().T
        ours, theirs = (x - x.mean(0) for x in (ours, logits[rows]))  # a bias is the same at all positions
        factor = float((ours * theirs).sum() / ours.square().sum().clamp_min(torch.finfo(ours.dtype).tiny))
        if not _equal(factor * ours, theirs, theirs):
            raise ConfigError(
                "model: its logits are not a multiple of norm(x) · unembedding, with or without a bias; under a soft "
                "cap, for instance, no effect is linear in what a head writes"
            )
        return factor

    def _block(self, site: HeadSite) -> nn.Module:
        block = self.model.get_submodule(site.name.rpartition(".")[0])
        if block not in self.passes or site.module not in self.passes:
            raise ConfigError(f"{site.name}: is in no block that is called")
        return block


def _fitted(module: nn.Module, x: Tensor, y: Tensor) -> _Linear | None:
    """What the module does if it is an RMS or layer norm that maps x to y, or None. Some store their gain less one."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, Tensor) or weight.shape != x.shape[-1:]:
        return None
    eps = next((e for e in (getattr(module, name, None) for name in ("eps", "variance_epsilon")) if e), 1e-30)
    for centred in (False, True):
        inner = x - x.mean(-1, keepdim=True) if centred else x
        scale = inner.square().mean(-1).add(eps).rsqrt()
        for gain in (weight.float(), 1 + weight.float()):
            shifted = inner * scale[:, None] * gain + (0 if bias is None else bias.float())
            if _equal(y, shifted, y):
                return _Linear(gain, scale, centred, y)
    return None


def _tensor(values: Sequence[Any]) -> Tensor | None:
    """The first tensor of hidden states, of batch entry 0: [n, d]. Some modules have all entries in one axis."""
    flat = [x for value in values for x in (value.values() if isinstance(value, Mapping) else [value])]
    flat = [x[0] if isinstance(x, tuple | list) and x else x for x in flat]
    floats = [x for x in flat if isinstance(x, Tensor) and x.is_floating_point()]
    for ndim in (3, 2):
        for x in floats:
            if x.ndim == ndim:
                return (x[0] if ndim == 3 else x).float()
    return None


def _equal(one: Tensor, other: Tensor, like: Tensor) -> bool:
    return bool((one - other).abs().max() <= TOLERANCE * like.abs().max())
