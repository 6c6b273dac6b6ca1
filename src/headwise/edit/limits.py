"""What surgery refuses, and why: modules whose heads are fixed, weights that are not plain or not alone."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headwise.edit.places import place
from headwise.errors import ConfigError
from headwise.models import HeadSite

KEPT_NORMS = ("q_norm", "k_norm")  # of one head's size, for all heads alike


def check_independent(site: HeadSite) -> None:
    """Raise if the other heads would not stay what they are without one of them."""
    if reason := site.anatomy.resizing(site).fixed:
        raise ConfigError(f"{place(site)}: {reason}")


def check_weights(model: nn.Module, sites: Sequence[HeadSite]) -> None:
    """Raise for weights that are quantised, made by a parametrisation or an adapter, unknown, or of two modules."""
    names = _names_of_tensors(model)
    for site in sites:
        parts = site.parts()
        for part in parts:
            x = part.tensor
            tensors = list(x) if isinstance(x, nn.ParameterList) else [x]
            for tensor in tensors:
                _check_plain(site, part.owner, part.name, tensor)
                held = names[_address(tensor)]
                if len(held) > 1:
                    raise ConfigError(
                        f"{place(site)}: {held[0]!r} and {held[1]!r} are one tensor; cut in one place it would be cut "
                        f"in both. Give each module its own weights first (deepcopy)"
                    )
        _check_known(site, {id(part.owner._parameters.get(part.name)) for part in parts})


def _check_plain(site: HeadSite, owner: nn.Module, name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise ConfigError(f"{place(site)}: {type(owner).__name__}.{name} is no tensor; quantised modules are not cut")
    if not x.is_floating_point():
        raise ConfigError(
            f"{place(site)}: {name} is {x.dtype}: quantised weights are not cut; load the model unquantised"
        )
    is_plain = type(x.data) is torch.Tensor
    held = owner._parameters.get(name) is x or isinstance(getattr(owner, name), nn.ParameterList)
    if not is_plain or not held:
        raise ConfigError(
            f"{place(site)}: {type(owner).__name__}.{name} is no plain parameter (a parametrisation, an adapter or a "
            f"quantised tensor stands there); merge it into the weights first"
        )


def _check_known(site: HeadSite, known: set[int]) -> None:
    """Raise if the module has parameters that may belong to heads and are not in its parts."""
    if site.anatomy.by_class:
        return  # what is in no part is common to all heads
    for name, parameter in site.module.named_parameters():
        inner, _, leaf = name.rpartition(".")
        of_output = site.output is not None and parameter is getattr(site.output, "bias", None)
        norm = inner in KEPT_NORMS and leaf == "weight" and parameter.shape == (site.head_dim,)
        if id(parameter) not in known and not of_output and not norm:
            raise ConfigError(
                f"{place(site)}: {type(site.module).__name__} has {name} {tuple(parameter.shape)}, and how it belongs "
                f"to the heads is not known"
            )


def _names_of_tensors(model: nn.Module) -> dict[tuple[int, int], list[str]]:
    names: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[_address(parameter)].append(name)
    return names


def _address(x: Tensor) -> tuple[int, int]:
    """Where a tensor lies: by address, as parameters may lie one after the other in one storage. One without an
    address (empty, or on no device) is only itself."""
    return (x.data_ptr(), 0) if x.data_ptr() else (0, id(x))
