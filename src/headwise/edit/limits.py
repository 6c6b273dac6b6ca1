"""Checks before pruning and merging, heads by name or by number, and results as text."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor, nn

from headwise.errors import ConfigError, whole_number
from headwise.models import HeadSite
from headwise.nn.owned import check_maps, check_plain, check_unshared, sharers, tensors
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
            _check_map(site, part.owner)
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


def _check_map(site: HeadSite, owner: nn.Module) -> None:
    """Raise ConfigError for a map of a class of its own, which may hold more by its size, such as I-BERT's buffers."""
    plain = isinstance(owner, nn.Linear | nn.Embedding) or type(owner).__name__ == "Conv1D" or owner is site.module
    if not (plain or site.anatomy.by_class):
        raise ConfigError(
            f"{site.place}: {type(owner).__name__} is not known; expected linear maps that are nn.Linear, or Conv1D "
            f"of transformers"
        )


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
