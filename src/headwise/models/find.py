"""The registry of kinds of attention modules, and the search of a model for them."""

from typing import Any

from torch import nn

from headwise.errors import ConfigError
from headwise.models.families import OF_STRUCTURE, HeadwiseKind, TorchKind
from headwise.models.site import HeadSite, HeadSites, Kind
from headwise.models.traced import TracedKind

KINDS: list[Kind] = [HeadwiseKind(), TorchKind(), TracedKind(), *OF_STRUCTURE]


def register(kind: Kind) -> Kind:
    """Register a kind of attention modules, to be tried after the others. Returns it.

    Raises:
        ConfigError: if it is no `Kind`, or another one has its name.
    """
    if not isinstance(kind, Kind):
        raise ConfigError(f"register({kind!r}): expected a headwise.models.Kind")
    if any(other.name == kind.name and type(other) is not type(kind) for other in KINDS):
        raise ConfigError(f"register({type(kind).__name__}): there is another kind {kind.name!r}; give it another name")
    KINDS[:] = [*(other for other in KINDS if other.name != kind.name), kind]
    return kind


def find_heads(model: nn.Module, batch: Any = None) -> HeadSites:
    """Every attention module of a model whose kind is registered, in the order of registration in the model.

    >>> import headwise as hw
    >>> [site.name for site in find_heads(hw.TransformerBlock(hw.MultiHeadAttention(16, 4), d_ff=32))]
    ['attention']

    They are recognised by class or by structure; transformers is not imported. A module that occurs twice is listed
    once. The list prints as a table.

    Args:
        batch: a tensor, a tuple of arguments or a mapping of keyword arguments with which the model is called once, in
            evaluation mode. Attention that is written by hand is found then: it is recognised as `recognise` does, and
            derivatives show which parameters belong to which head. Later calls find it without a batch, as do `prune`,
            `merge_kv` and others. What a module does not support is said by what needs it: `site.layout().missing`,
            `site.anatomy.resizing(site).fixed`.
    Raises:
        ConfigError: naming the known kinds, if there is none.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={type(model).__name__}: expected an nn.Module")
    if batch is not None:
        from headwise.models.traced.tracing import trace

        own = [site for site in _sites(model) if site.kind != TracedKind.name]
        library = "transformers."
        trace(model, batch, {
            site.module for site in own if site.anatomy.by_class or type(site.module).__module__.startswith(library)
        })  # fmt: skip
    found = _sites(model)
    if not found:
        raise _none_found(model, batch is not None)
    return found


def _none_found(model: nn.Module, tried: bool) -> ConfigError:
    """The error for a model without heads; `tried`: whether it was called with a batch."""
    what = f"model={type(model).__name__}: no attention heads "
    known = "; ".join(f"{kind.name}: {kind.about}" for kind in KINDS if kind.name != TracedKind.name)
    if tried:
        return ConfigError(
            f"{what}were found, nor recognised on the batch (hw.models.recognise(model, …) names what came nearest). "
            f"Known without a batch: {known}"
        )
    return ConfigError(
        f"{what}of a known kind. If its attention is written by hand, call find_heads(model, batch) first, with any "
        f"batch: it is recognised then, as of the kind {TracedKind.name!r}. Known without a batch: {known}"
    )


def _sites(model: nn.Module) -> HeadSites:
    """The sites of a model, one for each module: of its class, or else traced, or else of its structure."""
    found: dict[nn.Module, HeadSite] = {}
    for name, module in model.named_modules():
        for kind in KINDS:
            site = kind.site(name, module)
            if site is not None and site.module not in found:
                found[site.module] = site
    return HeadSites(found.values())
