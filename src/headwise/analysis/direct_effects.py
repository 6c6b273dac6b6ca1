"""What each head writes into the residual stream as a direct effect on the logits: logit attribution.

The final norm is applied with the scale that it has at each position, so that the effect is linear in what a head
writes. Everything that this assumes of a model is checked on the numbers of its run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import ConfigError
from headwise.models import HeadSite, find_heads, record_heads
from headwise.table import HeadColumn, HeadTable

LEAST = 2  # tokens: the last one has none that follows
TOLERANCE = 1e-3  # of the largest number, for what must be equal
_MEAN = "Direct effect on the logit of the next token, mean over the text"
WORK = 2e12  # operations for the tokens that a head makes more likely


@dataclass(frozen=True)
class DirectEffects:
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

    def __repr__(self) -> str:
        return repr(self.table)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()


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
    norm at that position kept.

    It is exact for that path: the sum over all heads, feed-forward layers and the embedding is the logits, up to the
    mean over the vocabulary. What later layers make of a head's output is not in it.

    Args:
        model: a decoder whose attention adds to a residual stream.
        run: a function that runs the model once on `ids`, with a batch of one. ids: [n].
        unembedding: W_U, [vocabulary, d_model].
        sites: of `find_heads(model)`, in the order of the layers; all by default.
        top: tokens to return with the largest effects.
    Returns:
        `DirectEffects`.
    Raises:
        ConfigError: with the reason, for a model whose heads do not add to a residual stream that ends in a norm.
    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; nostalgebraist 2020, "logit lens".
    """
    if len(ids) < LEAST:
        raise ConfigError(f"ids: {len(ids)} tokens; direct effects require at least {LEAST}")
    sites = find_heads(model) if sites is None else sites
    with _Stream(model, sites).followed() as stream, record_heads(sites) as outputs:
        run()
        outputs = [out[0].float() for out in outputs]  # [h, n, d_v]
    weights = [_output(site) for site in sites]
    stream.check(outputs, weights)
    scale, gain, centre = stream.norm()
    words = unembedding.float()
    words = (words - words.mean(0)) * gain  # [V, d_model]
    if centre:
        words = words - words.mean(1, keepdim=True)
    work = sum(2.0 * o.shape[0] * o.shape[1] * len(words) * (o.shape[2] + len(ids)) for o in weights)
    found = DirectEffects([], [], [])
    for out, o in zip(outputs, weights, strict=True):
        following = ((out @ o)[:, :-1] * words[ids[1:]]).sum(-1) * scale[:-1]  # [h, n - 1]
        found.next_token.append(torch.cat((following, following.new_full((len(out), 1), torch.nan)), 1))
        if work > WORK:
            continue
        best = [((x @ (y @ words.T)) * scale[:, None]).topk(top) for x, y in zip(out, o, strict=True)]
        found.values.append(torch.stack([one.values for one in best]))
        found.tokens.append(torch.stack([one.indices for one in best]))
    return found


def _output(site: HeadSite) -> Tensor:
    weights = site.weights()
    if "o" not in weights:
        raise ConfigError(f"{site.name}: has no output projection of each head")
    return weights["o"].float()


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

        hooks = [module.register_forward_hook(record, with_kwargs=True) for module in self.model.modules()]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    def check(self, outputs: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Raise ConfigError unless each attention is the sum of its heads, and each block adds it to the stream."""
        previous = None
        for site, out, o in zip(self.sites, outputs, weights, strict=True):
            block = self._block(site)
            written, attention = (out @ o).sum(0), self.passes[site.module].made
            before, after = self.passes[block].given, self.passes[block].made
            if attention is None or before is None or after is None or attention.shape != written.shape:
                raise ConfigError(f"{site.name}: is not computed on one sequence of hidden states")
            rest = attention - written
            if not _equal(rest, rest[:1].expand_as(rest), attention):
                raise ConfigError(f"{site.name}: its output is not the sum of what its heads write")
            others = (self.passes[child].made for child in block.modules() if child in self.passes)
            sums = (before + attention + x for x in others if x is not None and x.shape == after.shape)
            if not any(_equal(after, total, after) for total in sums):
                raise ConfigError(f"{site.name}: its output is not added to a residual stream")
            if previous is not None and not _equal(before, previous, before):
                raise ConfigError(f"{site.name}: does not read the output of the block before")
            previous = after

    def norm(self) -> tuple[Tensor, Tensor, bool]:
        """The final norm as (factor of each position [n], gain [d_model], whether it subtracts the mean)."""
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

    def _block(self, site: HeadSite) -> nn.Module:
        block = self.model.get_submodule(site.name.rpartition(".")[0])
        if block not in self.passes or site.module not in self.passes:
            raise ConfigError(f"{site.name}: is in no block that is called")
        return block


def _fitted(module: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, bool] | None:
    """The factors, the gain and whether the mean is subtracted, if the module is an RMS or layer norm that maps x to y;
    None otherwise. Some norms store their gain less one."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, Tensor) or weight.shape != x.shape[-1:]:
        return None
    eps = next((e for e in (getattr(module, name, None) for name in ("eps", "variance_epsilon")) if e), 1e-30)
    for centre in (False, True):
        inner = x - x.mean(-1, keepdim=True) if centre else x
        factor = inner.square().mean(-1).add(eps).rsqrt()
        for gain in (weight.float(), 1 + weight.float()):
            shifted = inner * factor[:, None] * gain + (0 if bias is None else bias.float())
            if _equal(y, shifted, y):
                return factor, gain, centre
    return None


def _tensor(values: Sequence[Any]) -> Tensor | None:
    """The first tensor of hidden states, of batch entry 0: [n, d]."""
    for value in values:
        value = value[0] if isinstance(value, tuple | list) and value else value
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3:
            return value[0].float()
    return None


def _equal(one: Tensor, other: Tensor, like: Tensor) -> bool:
    return bool((one - other).abs().max() <= TOLERANCE * like.abs().max())
