"""Structured head pruning, and what can be removed: rows and columns of heads; outputs equal those with masked heads.

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

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from headwise.base.run import without_memory
from headwise.errors import ConfigError, whole_number
from headwise.models import HeadSite, find_heads
from headwise.models.configuration.sizes import difference, update_config
from headwise.models.site import Order, pick_heads
from headwise.nn.owned import check_maps, check_plain, check_unshared, copied, sharers, tensors
from headwise.table.show import as_text

Value = TypeVar("Value")


def by_site(argument: str, sites: Sequence[HeadSite], given: Mapping[str | int, Value]) -> dict[int, Value]:
    """Return the values by the number of their site; ConfigError for a site that does not exist or is given twice."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{argument}: expected a mapping from sites, by name or by number, got {given!r}")
    names = [site.name for site in sites]
    found: dict[int, Value] = {}
    for key, value in given.items():
        number = whole_number(key)
        if isinstance(key, str) and key in names:
            i = names.index(key)
        elif number is not None and 0 <= number < len(sites):
            i = number
        else:
            some = ", ".join(map(repr, names[:3])) + (" …" if len(names) > 3 else "")
            raise ConfigError(f"{argument}: no site {key!r}; expected 0 to {len(sites) - 1}, or a name of {some}")
        if i in found:
            raise ConfigError(f"{argument}: {names[i]!r} is given twice, by its name and by its number {i}")
        found[i] = value
    return found


KEPT_NORMS = ("q_norm", "k_norm")  # of the size of one head, shared by all heads


def check_independent(site: HeadSite) -> None:
    """Raise ConfigError if heads of the site cannot be removed."""
    if reason := site.anatomy.resizing(site).fixed:
        raise ConfigError(f"{site.place}: {reason}")


def check_weights(model: nn.Module, sites: Sequence[HeadSite]) -> None:
    """ConfigError for weights that the model does not compute with (`headwise.nn.owned`), sharded or shared ones."""
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise ConfigError(
            "model: DistributedDataParallel sums the gradients of the parameters that it was given, not of those that "
            "replace them; change the model first, then wrap it"
        )
    together = sharers(model)
    for site in sites:
        parts = site.parts()
        check_plain(site.place, site.module, parts)
        for part in parts:
            owner = part.owner
            plain = isinstance(owner, nn.Linear | nn.Embedding) or type(owner).__name__ == "Conv1D"
            # A map of a class of its own may hold more by its size, such as I-BERT's buffers.
            if not (plain or owner is site.module or site.anatomy.by_class):
                raise ConfigError(
                    f"{site.place}: {type(owner).__name__} is not known; expected linear maps that are nn.Linear, or "
                    f"Conv1D of transformers"
                )
            for _, _, x in tensors(part):
                if type(x.data) is not Tensor:
                    raise ConfigError(
                        f"{site.place}: {type(part.owner).__name__}.{part.name} is split over ranks (a DTensor), and "
                        f"its heads cannot be removed or merged; change the model before it is split, or one that is "
                        f"loaded from its full_tensor()s"
                    )
        check_maps(site.place, site.module, parts)
        check_unshared(site.place, parts, together)
        _check_known(site, {id(part.owner._parameters.get(part.name)) for part in parts})


def check_finite(sites: Sequence[HeadSite]) -> None:
    """Raise ConfigError for weights that have no values or are not finite, of which there is no mean."""
    for site in sites:
        for part in site.parts():
            where = f"{site.place}: {type(part.owner).__name__}.{part.name}"
            for _, _, tensor in tensors(part):
                if tensor.is_meta:
                    raise ConfigError(f"{where} is on the meta device, where tensors have no values; load them first")
                if not bool(tensor.isfinite().all()):
                    raise ConfigError(f"{where} has numbers that are not finite")


def _check_known(site: HeadSite, known: set[int]) -> None:
    """Raise ConfigError if the module has parameters that may belong to heads but are not in its parts."""
    if site.anatomy.by_class:
        return  # parameters in no part are shared by all heads
    for name, parameter in site.module.named_parameters():
        inner, _, leaf = name.rpartition(".")
        of_output = site.output is not None and parameter is getattr(site.output, "bias", None)
        norm = inner in KEPT_NORMS and leaf == "weight" and parameter.shape == (site.head_dim,)
        if id(parameter) not in known and not of_output and not norm:
            raise ConfigError(
                f"{site.place}: {type(site.module).__name__} has {name} {tuple(parameter.shape)}, and how it belongs "
                f"to the heads is not known"
            )


def aligned(head: Sequence[str], rows: Iterable[Sequence[object]], *, words: int = 1) -> str:
    """Align columns under their headings: the first `words` columns to the left, the others to the right."""
    return as_text(head, [[str(cell) for cell in row] for row in rows], words=words, gap="  ")


def numbers(values: Iterable[int], most: int = 12) -> str:
    """Format head numbers, at most `most` of them: 0 3 7 … (31 in all)."""
    found = list(values)
    shown = " ".join(map(str, found[:most]))
    return shown if len(found) <= most else f"{shown} … ({len(found)} in all)"


def change(before: int, after: int) -> str:
    """Format a change: 1,234 → 1,000 (−19.0 %)."""
    share = f" ({100 * (after - before) / before:+.1f} %)".replace("-", "−") if before and after != before else ""
    return f"{before:,} → {after:,}{share}"


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a model; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


Heads = Mapping[str | int, Iterable[int]] | Iterable[int] | Iterable[tuple[int, int]]


@dataclass(frozen=True)
class Cut:
    """The query heads that were removed from one module and those that are kept, by their previous numbers: head i is
    now what kept[i] was. kept_kv: of the KV heads. num_heads, num_kv_heads: before pruning."""

    module: str
    removed: tuple[int, ...]
    kept: tuple[int, ...]
    kept_kv: tuple[int, ...]
    num_heads: int
    num_kv_heads: int


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


def prune(model: nn.Module, heads: Heads, *, uniform: bool = False, copy: bool = False) -> Pruned:
    """Remove heads from a model: their rows and columns of W_Q, W_K, W_V and W_O, biases, and gates.

    Outputs equal those with these heads scaled by 0 (`scale_heads`), up to rounding. With grouped keys, a KV head is
    removed with the last query head that reads it; all groups that remain must keep the same number of query heads.

    If all layers keep the same numbers of heads, they are set in the configuration of a model of transformers where it
    can express them, so that `save_pretrained` and `from_pretrained` work; `save_pruned` writes all others, which
    `load_pruned` alone reads. With `uniform`, all layers do keep the same numbers, and other models are refused.

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
        uniform: keep the same number of heads in every module: of those given, the first of each, in their order, as
            many as all modules can spare. With grouped keys, only whole KV heads go: those whose query heads are all
            given. A number of each layer, by its own ranking:

                least = {layer: values.argsort() for layer, values in enumerate(importance.column)}
                hw.edit.prune(model, {layer: order[:2] for layer, order in least.items()}, uniform=True)
        copy: prune a deepcopy; the model itself is unchanged.
    Returns:
        `Pruned`. It prints as a table.
    Raises:
        ConfigError: for heads that do not exist, are given twice, or are all heads of a module; for designs whose
            heads depend on each other and for `nn.MultiheadAttention`, with the reason; for weights that are
            quantized, parametrized, unknown, or shared by two modules; with `uniform`, if a module has no head among
            those given, and for models of transformers whose configuration cannot say the numbers of heads that remain
            (GPT-2's and BERT's say d_model / d_head). The model is unchanged then.
    Source: structured head pruning, Michel et al. 2019, 1905.10650; Voita et al. 2019, 1905.09418.
    """
    sites = find_heads(model)
    given = by_site("heads", sites, heads if isinstance(heads, Mapping) else _mapping(sites, heads))
    listed = {i: _checked(sites[i], removed) for i, removed in sorted(given.items())}
    if uniform:
        listed = _even(sites, listed)
    chosen = {i: tuple(sorted(removed)) for i, removed in listed.items() if removed}
    for i, removed in chosen.items():
        if len(removed) == (h := sites[i].num_heads):
            raise ConfigError(f"heads: {sites[i].place}: all {h} heads would be removed; expected to keep at least one")
        check_independent(sites[i])
    plans = {i: _plan(sites[i], removed) for i, removed in chosen.items()}
    check_weights(model, [sites[i] for i in chosen])
    if uniform and hasattr(model, "_from_config"):
        _check_said(model, plans)
    before = count_parameters(model)
    result = copied(model) if copy else model
    own = find_heads(result) if copy else sites
    for i, plan in plans.items():
        pick_heads(own[i], list(plan.kept), list(plan.kept_kv))
    update_config(result)
    return Pruned(result, {sites[i].name: plan for i, plan in plans.items()}, before, count_parameters(result))


def _check_said(model: Any, plans: Mapping[int, Cut]) -> None:
    """ConfigError if the configuration cannot say the numbers of heads that are kept, tried on a copy on meta."""
    bare = deepcopy(model, {
        **{id(x): nn.Parameter(x.detach().to("meta"), requires_grad=x.requires_grad) for x in model.parameters()},
        **{id(x): x.to("meta") for x in model.buffers()},
    })  # fmt: skip
    sites = find_heads(bare)
    for i, plan in plans.items():
        pick_heads(sites[i], list(plan.kept), list(plan.kept_kv))
    update_config(bare)
    with without_memory():
        built = model._from_config(deepcopy(bare.config))
    if why := difference(bare, built):
        raise ConfigError(
            "uniform=True: from_pretrained of transformers could not read the model, as {config} cannot say "
            "{num_heads} heads of {head_dim}: {why}; leave uniform out, and save with save_pruned, which load_pruned "
            "reads",
            config=type(model.config).__name__, num_heads=len(next(iter(plans.values())).kept),
            head_dim=sites[0].head_dim, why=why,
        )  # fmt: skip


def removed_together(site: HeadSite) -> int:
    """How many query heads are removed together: those that share a KV head, if there are several KV heads."""
    return site.num_heads // site.num_kv_heads if site.num_kv_heads > 1 else 1


def _even(sites: Sequence[HeadSite], listed: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """As many of the listed heads, in their order and in whole groups, that all sites keep the same number."""
    groups = [removed_together(site) for site in sites]
    whole: list[list[int]] = []  # the groups of which all heads are listed, as their last one is
    for i, group in enumerate(groups):
        units = [head // group for head in listed.get(i, ())]
        whole.append([unit for at, unit in enumerate(units, 1) if units[:at].count(unit) == group])
    heads = [site.num_heads for site in sites]
    kept = [h - group * len(units) for h, group, units in zip(heads, groups, whole, strict=True)]
    most = max(kept)
    if len(set(groups)) > 1 or most > min(heads) or most == max(heads):
        raise ConfigError(
            "heads: uniform=True removes heads of every module, {groups} at a time, those that share a KV head; of "
            "{place}, with {num_heads} heads, it is given {listed}",
            groups=" or ".join(map(str, sorted(set(groups)))), place=sites[last := kept.index(most)].place,
            num_heads=heads[last], listed=list(listed.get(last, ())),
        )  # fmt: skip
    return {
        i: [unit * group + j for unit in units[: (h - most) // group] for j in range(group)]
        for i, (h, group, units) in enumerate(zip(heads, groups, whole, strict=True))
    }


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


def _checked(site: HeadSite, removed: Any) -> list[int]:
    name, h = site.place, site.num_heads
    found: list[int] = []
    for given in _listed(f"heads: {name}", removed):
        head = whole_number(given)
        if head is None or not 0 <= head < h:
            raise ConfigError(f"heads: {name} has no head {given!r}; expected 0 to {h - 1}")
        if head in found:
            raise ConfigError(f"heads: {name}: head {head} is given twice")
        found.append(head)
    return found


def _plan(site: HeadSite, removed: tuple[int, ...]) -> Cut:
    """Return which heads are kept; raises if the remaining groups have different sizes."""
    group = site.num_heads // site.num_kv_heads
    kept: Order = [head for head in range(site.num_heads) if head not in removed]
    counts = [sum(head // group == j for head in kept) for j in range(site.num_kv_heads)]
    if len({count for count in counts if count}) > 1:
        raise ConfigError(
            "heads: {place}: {group} query heads share a KV head, and {counts} of them would remain; expected the "
            "same number in every remaining group: remove whole groups, or equally many from each",
            place=site.place,
            group=group,
            counts=counts,
        )
    kept_kv = tuple(j for j, count in enumerate(counts) if count)
    return Cut(site.place, removed, tuple(kept), kept_kv, site.num_heads, site.num_kv_heads)
