"""Structured head pruning: removes the rows and columns of heads; outputs equal those with the heads masked.

>>> import torch, headwise as hw
>>> layer = hw.MultiHeadAttention(64, 8)
>>> done = prune(layer, [0, 3, 7], copy=True)
>>> done.model.num_heads, layer.num_heads
(5, 8)
>>> print(done)
removed 3 of 8 heads; parameters 16,384 → 10,240 (−37.5 %)
module              heads  KV heads  removed
MultiHeadAttention  8 → 5     8 → 5    0 3 7
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from headwise.edit.limits import aligned, by_site, change, check_independent, check_weights, count_parameters, numbers
from headwise.errors import ConfigError, whole_number
from headwise.models import HeadSite, find_heads
from headwise.models.configuration.sizes import update_config
from headwise.models.site import Order, pick_heads
from headwise.nn.owned import copied

Heads = Mapping[str | int, Iterable[int]] | Iterable[int] | Iterable[tuple[int, int]]


@dataclass(frozen=True)
class Cut:
    """The heads that were removed from one module."""

    module: str
    removed: tuple[int, ...]  # query heads by their previous numbers
    kept: tuple[int, ...]  # head i is now what kept[i] was
    kept_kv: tuple[int, ...]  # the KV heads that are kept
    num_heads: int  # before pruning
    num_kv_heads: int  # before pruning


@dataclass(frozen=True)
class Pruned:
    """The result of `prune`. It prints as a table.

    Attributes:
        model: the model that was given, or its copy.
        cuts: one for each changed module, by the name of its site.
        parameters_before, parameters_after: of the whole model; shared parameters count once.
    """

    model: nn.Module
    cuts: dict[str, Cut]
    parameters_before: int
    parameters_after: int

    @property
    def num_removed(self) -> int:
        """The number of removed query heads in all modules."""
        return sum(len(cut.removed) for cut in self.cuts.values())

    def __repr__(self) -> str:
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
        return f"{first}\n{aligned(('module', 'heads', 'KV heads', 'removed'), rows)}"


def prune(model: nn.Module, heads: Heads, *, copy: bool = False) -> Pruned:
    """Remove heads from a model: their rows and columns of W_Q, W_K, W_V and W_O, biases, and gates.

    Outputs equal those with these heads scaled by 0 (`scale_heads`), up to rounding. With grouped keys, a KV head is
    removed with the last query head that reads it; all groups that remain must keep the same number of query heads.

    If all layers keep the same numbers of heads, they are set in the configuration of a model of transformers where it
    can express them, so that `save_pretrained` and `from_pretrained` work; `save_pruned` writes all others.

    Changed parameters are new `nn.Parameter`s, so create optimizers after pruning. Arguments given per head in each
    call (scores, `HeadWindows`, cache budgets) must be those of the heads in `cuts[name].kept`.

    Args:
        model: a model, or one attention module, that `find_heads` supports (see docs/models.md) and whose heads are
            independent: headwise's designs with an empty `coupling` and no `resizing.fixed`, and most kinds of
            transformers. Not `nn.MultiheadAttention`, which cannot hold fewer heads, nor T5, whose layers share one
            bias of all heads: mask them with `scale_heads`.
        heads: a mapping from sites, by name or by number in `find_heads(model)`, to the query heads to remove; or pairs
            (number of the site, head), as in results of importance; or head numbers, if the model has one site.
            Any iterable of Python, NumPy or torch integers.

                importance = hw.analysis.gradient_importance(model, batches, loss_fn)
                hw.edit.prune(model, importance.order()[:2])   # the two least important heads
                gates = hw.analysis.learn_gates(model, batches, loss_fn, penalty=0.01)
                hw.edit.prune(model, gates.removed())          # the heads whose gates closed
        copy: prune a deepcopy; the model itself is unchanged.
    Returns:
        `Pruned`. It prints as a table.
    Raises:
        ConfigError: for heads that do not exist, are given twice, or are all heads of a module; for designs whose
            heads depend on each other and for `nn.MultiheadAttention`, with the reason; for weights that are
            quantized, parametrized, unknown, or shared by two modules. The model is unchanged then.
    Source: structured head pruning, Michel et al. 2019, 1905.10650; Voita et al. 2019, 1905.09418.
    """
    sites = find_heads(model)
    chosen = {i: removed for i, removed in _by_site(sites, heads).items() if removed}
    for i in chosen:
        check_independent(sites[i])
    plans = {i: _plan(sites[i], removed) for i, removed in chosen.items()}
    check_weights(model, [sites[i] for i in chosen])
    before = count_parameters(model)
    result = copied(model) if copy else model
    own = find_heads(result) if copy else sites
    for i, plan in plans.items():
        pick_heads(own[i], list(plan.kept), list(plan.kept_kv))
    update_config(result)
    return Pruned(result, {sites[i].name: plan for i, plan in plans.items()}, before, count_parameters(result))


def _by_site(sites: list[HeadSite], heads: Heads) -> dict[int, tuple[int, ...]]:
    """Return the heads to remove, sorted, by the number of their site, in the order of the model."""
    if not isinstance(heads, Mapping):
        heads = _mapping(sites, heads)
    return {i: _checked(sites[i], removed) for i, removed in sorted(by_site("heads", sites, heads).items())}


def _mapping(sites: list[HeadSite], heads: Any) -> Mapping[str | int, Any]:
    """Convert head numbers of a single site, or pairs (site, head), to a mapping from sites."""
    given = _listed("heads", heads)
    pairs = [_pair(each) for each in given]
    found: dict[str | int, list[object]] = {}
    for each, pair in zip(given, pairs, strict=True):
        if (pair is None) != (pairs[0] is None):
            raise ConfigError(f"heads: {each!r} with {given[0]!r}; expected pairs (site, head), or head numbers")
        if pair is not None:
            number = whole_number(pair[0])
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
    """Return (site, head) if `each` has two entries, such as a row of an array; else None."""
    if isinstance(each, str | bytes) or not isinstance(each, Iterable) or whole_number(each) is not None:
        return None
    try:
        found = tuple(each)
    except TypeError:  # a 0-dimensional array
        return None
    return (found[0], found[1]) if len(found) == 2 else None


def _listed(what: str, heads: Any) -> list[Any]:
    if not isinstance(heads, str | bytes) and isinstance(heads, Iterable):
        try:
            return list(heads)
        except TypeError:  # a 0-dimensional array
            pass
    raise ConfigError(f"{what}: expected a list of head numbers, got {heads!r}")


def _checked(site: HeadSite, removed: Any) -> tuple[int, ...]:
    name, h = site.place, site.num_heads
    found: list[int] = []
    for given in _listed(f"heads: {name}", removed):
        head = whole_number(given)
        if head is None or not 0 <= head < h:
            raise ConfigError(f"heads: {name} has no head {given!r}; expected 0 to {h - 1}")
        if head in found:
            raise ConfigError(f"heads: {name}: head {head} is given twice")
        found.append(head)
    if len(found) == h:
        raise ConfigError(f"heads: {name}: all {h} heads would be removed; expected to keep at least one")
    return tuple(sorted(found))


def _plan(site: HeadSite, removed: tuple[int, ...]) -> Cut:
    """Return which heads are kept; raises if the remaining groups have different sizes."""
    group = site.num_heads // site.num_kv_heads
    kept: Order = [head for head in range(site.num_heads) if head not in removed]
    counts = [sum(head // group == j for head in kept) for j in range(site.num_kv_heads)]
    if len({count for count in counts if count}) > 1:
        raise ConfigError(
            f"heads: {site.place}: {group} query heads share a KV head, and {counts} of them "
            f"would remain; expected the same number in every remaining group: remove whole groups, or equally many "
            f"from each",
            f"heads：{site.place}：每 {group} 个查询头共享一个键值头，将剩下 {counts} 个；保留的各组头数应相同：请移除"
            f"整组，或从每组移除同样多的头",
        )
    kept_kv = tuple(j for j, count in enumerate(counts) if count)
    return Cut(site.place, removed, tuple(kept), kept_kv, site.num_heads, site.num_kv_heads)
