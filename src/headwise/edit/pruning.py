"""Heads taken out of a model: their rows and columns are gone, and what is left computes what masking them gave.

>>> import torch, headwise as hw
>>> layer = hw.MultiHeadAttention(64, 8)
>>> done = prune(layer, [0, 3, 7], copy=True)
>>> done.model.num_heads, layer.num_heads
(5, 8)
>>> print(done)
removed 3 of 8 heads; parameters 16,384 → 10,240 (−37.5 %)
module              heads  key heads  removed
MultiHeadAttention  8 → 5      8 → 5    0 3 7
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import nn

from headwise.edit.limits import check_independent, check_weights
from headwise.edit.places import by_site, place, whole
from headwise.edit.resize import Order, pick_heads
from headwise.edit.table import aligned, change, count_parameters, numbers
from headwise.errors import ConfigError
from headwise.models import HeadSite, find_heads

Heads = Mapping[str | int, Iterable[int]] | Iterable[int] | Iterable[tuple[int, int]]


@dataclass(frozen=True)
class Cut:
    """What one module lost.

    Attributes:
        removed, kept: numbers of query heads as they were before; kept in order, so head i is now what kept[i] was.
        kept_kv: the same of key and value heads.
        num_heads, num_kv_heads: before.
    """

    module: str
    removed: tuple[int, ...]
    kept: tuple[int, ...]
    kept_kv: tuple[int, ...]
    num_heads: int
    num_kv_heads: int


@dataclass(frozen=True)
class Pruned:
    """The model without the heads, and what was removed.

    Attributes:
        model: the model that was given, or its copy.
        cuts: one for each module that lost a head, by the name of its site.
        parameters_before, parameters_after: of the whole model; a parameter that stands in two places counts once.
    """

    model: nn.Module
    cuts: dict[str, Cut]
    parameters_before: int
    parameters_after: int

    @property
    def num_removed(self) -> int:
        """Query heads that are gone, of all modules together."""
        return sum(len(cut.removed) for cut in self.cuts.values())

    def __str__(self) -> str:
        if not self.cuts:
            return "removed nothing"
        heads = sum(cut.num_heads for cut in self.cuts.values())
        first = (
            f"removed {self.num_removed} of {heads} heads; parameters "
            f"{change(self.parameters_before, self.parameters_after)}"
        )
        rows = [
            (
                cut.module, f"{cut.num_heads} → {len(cut.kept)}", f"{cut.num_kv_heads} → {len(cut.kept_kv)}",
                numbers(cut.removed),
            )
            for cut in self.cuts.values()
        ]  # fmt: skip
        return f"{first}\n{aligned(('module', 'heads', 'key heads', 'removed'), rows)}"


def prune(model: nn.Module, heads: Heads, *, copy: bool = False) -> Pruned:
    """Take heads out of a model: their rows and columns of W_Q, W_K, W_V and W_O, biases, and gates.

    The outputs are those that the model had with these heads scaled by 0 (`scale_heads`), to rounding. Grouped keys:
    a key head goes when all query heads that read it go; the groups that stay must keep the same number of query
    heads each.

    A parameter that is cut is a new `nn.Parameter`: make optimisers after pruning. What the caller gives by head at
    each call (scores, `HeadWindows`, budgets of caches) must be given for the heads in `cuts[name].kept`.

    Args:
        model: a model, or one attention module, that `find_heads` knows (docs/models.md lists them), and whose heads
            are independent: headwise's designs with an empty `coupling` and no `resizing.fixed`, and most kinds of
            transformers. Not `nn.MultiheadAttention`, which cannot hold fewer heads, nor T5, whose layers share one
            bias of all heads: mask them with `scale_heads`.
        heads: for each site, by name or by its number in `find_heads(model)`, the query heads to remove; or pairs
            (number of the site, head), as importance names heads; or head numbers alone if the model has one site.
            Numbers may be NumPy's or torch's, and come in any iterable.

                importance = hw.analysis.gradient_importance(model, batches, loss_fn)
                hw.edit.prune(model, importance.order()[:2])   # the two that matter least
                gates = hw.analysis.learn_gates(model, batches, loss_fn, penalty=0.01)
                hw.edit.prune(model, gates.removed())          # those that are not worth their price
        copy: prune a deepcopy; the model itself is unchanged.
    Returns:
        `Pruned`. It prints as a table.
    Raises:
        ConfigError: for heads that are not there, are named twice, or are all of a module; for designs whose heads
            depend on each other and for `nn.MultiheadAttention`, by name with the reason; for weights that are
            quantised, parametrised, unknown, or shared by two modules. Nothing has been changed then.
    Source: structured head pruning, Michel et al. 2019, 1905.10650; Voita et al. 2019, 1905.09418.
    """
    sites = find_heads(model)
    wanted = {i: removed for i, removed in _by_site(sites, heads).items() if removed}
    for i in wanted:
        check_independent(sites[i])
    plans = {i: _plan(sites[i], removed) for i, removed in wanted.items()}
    check_weights(model, [sites[i] for i in wanted])
    before = count_parameters(model)
    result = deepcopy(model) if copy else model
    own = find_heads(result) if copy else sites
    for i, plan in plans.items():
        pick_heads(own[i], list(plan.kept), list(plan.kept_kv))
    return Pruned(result, {sites[i].name: plan for i, plan in plans.items()}, before, count_parameters(result))


def _by_site(sites: list[HeadSite], heads: Heads) -> dict[int, tuple[int, ...]]:
    """The heads to remove, sorted, by the number of their site; raises for what is not there."""
    if not isinstance(heads, Mapping):
        heads = _mapping(sites, heads)
    return {i: _checked(sites[i], removed) for i, removed in by_site("heads", sites, heads).items()}


def _mapping(sites: list[HeadSite], heads: Any) -> Mapping[str | int, Any]:
    """Head numbers of the one site, or pairs (site, head), by site."""
    given = _listed("heads", heads)
    pairs = [_pair(each) for each in given]
    found: dict[str | int, list[object]] = {}
    for each, pair in zip(given, pairs, strict=True):
        if (pair is None) != (pairs[0] is None):
            raise ConfigError(f"heads: {each!r} beside {given[0]!r}; expected pairs (site, head), or head numbers")
        if pair is not None:
            number = whole(pair[0])
            found.setdefault(pair[0] if number is None else number, []).append(pair[1])
    if found or not given:
        return found
    if len(sites) != 1:
        raise ConfigError(
            f"heads={heads!r}: the model has {len(sites)} attention modules; expected a mapping such as "
            f"{{{sites[0].name!r}: [0]}}, or pairs such as [(0, 0)]"
        )
    return {0: given}


def _pair(each: object) -> tuple[Any, Any] | None:
    """(site, head) if it is two numbers, also as a row of an array."""
    if isinstance(each, str | bytes) or not isinstance(each, Iterable) or whole(each) is not None:
        return None
    try:
        found = tuple(each)
    except TypeError:  # an array of no axis
        return None
    return (found[0], found[1]) if len(found) == 2 else None


def _listed(what: str, heads: Any) -> list[Any]:
    if not isinstance(heads, str | bytes) and isinstance(heads, Iterable):
        try:
            return list(heads)
        except TypeError:  # an array of no axis
            pass
    raise ConfigError(f"{what}: expected a list of head numbers, got {heads!r}")


def _checked(site: HeadSite, removed: Any) -> tuple[int, ...]:
    name, h = place(site), site.num_heads
    found: list[int] = []
    for given in _listed(f"heads: {name}", removed):
        head = whole(given)
        if head is None or not 0 <= head < h:
            raise ConfigError(f"heads: {name} has no head {given!r}; expected 0 to {h - 1}")
        if head in found:
            raise ConfigError(f"heads: {name}: head {head} is named twice")
        found.append(head)
    if len(found) == h:
        raise ConfigError(f"heads: {name}: all {h} heads would go; expected to leave at least one")
    return tuple(sorted(found))


def _plan(site: HeadSite, removed: tuple[int, ...]) -> Cut:
    """Which heads stay; raises if what stays is not grouped evenly."""
    group = site.num_heads // site.num_kv_heads
    kept: Order = [head for head in range(site.num_heads) if head not in removed]
    counts = [sum(head // group == j for head in kept) for j in range(site.num_kv_heads)]
    if len({count for count in counts if count}) > 1:
        raise ConfigError(
            f"heads: {place(site)}: {group} query heads share a key head, and {counts} of "
            f"them would be left; expected the same number in every group that stays: remove whole groups, or as many "
            f"from each"
        )
    kept_kv = tuple(j for j, count in enumerate(counts) if count)
    return Cut(place(site), removed, tuple(kept), kept_kv, site.num_heads, site.num_kv_heads)
