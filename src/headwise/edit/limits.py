"""Checks before pruning and merging: heads that cannot change, and weights that are not plain or are shared."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headwise.edit.places import place
from headwise.errors import ConfigError
from headwise.models import HeadSite
from headwise.nn.layout import Part
from headwise.spread import is_dtensor

KEPT_NORMS = ("q_norm", "k_norm")  # of the size of one head, shared by all heads


def check_independent(site: HeadSite) -> None:
    """Raise ConfigError if heads of the site cannot be removed."""
    if reason := site.anatomy.resizing(site).fixed:
        raise ConfigError(f"{place(site)}: {reason}")


def check_weights(model: nn.Module, sites: Sequence[HeadSite]) -> None:
    """Raise ConfigError for weights that are quantized, parametrized, of an adapter, unknown, or shared."""
    names = _names_of_tensors(model)
    for site in sites:
        parts = site.parts()
        for part in parts:
            for tensor in _tensors(part):
                if is_dtensor(tensor):
                    raise ConfigError(
                        f"{place(site)}: {type(part.owner).__name__}.{part.name} is split over ranks (a DTensor), and "
                        f"its heads cannot be removed or merged; change the model before it is split, or one that is "
                        f"loaded from its full_tensor()s"
                    )
                _check_plain(site, part.owner, part.name, tensor)
                _check_map(site, part.owner)
                held = names[_address(tensor)]
                if len(held) > 1:
                    raise ConfigError(
                        f"{place(site)}: {held[0]!r} and {held[1]!r} are one tensor, and changing one would change "
                        f"both. Give each module its own weights first (deepcopy)"
                    )
        _check_known(site, {id(part.owner._parameters.get(part.name)) for part in parts})


def check_finite(sites: Sequence[HeadSite]) -> None:
    """Raise ConfigError for weights that have no values or are not finite, of which there is no mean."""
    for site in sites:
        for part in site.parts():
            where = f"{place(site)}: {type(part.owner).__name__}.{part.name}"
            for tensor in _tensors(part):
                if tensor.is_meta:
                    raise ConfigError(f"{where} is on the meta device, where tensors have no values; load them first")
                if not bool(tensor.isfinite().all()):
                    raise ConfigError(f"{where} has numbers that are not finite")


def _tensors(part: Part) -> list[Tensor]:
    return list(part.tensor) if isinstance(part.tensor, nn.ParameterList) else [part.tensor]


def _check_map(site: HeadSite, owner: nn.Module) -> None:
    """Raise ConfigError for a map of a class of its own, which may hold more by its size, such as I-BERT's buffers."""
    plain = isinstance(owner, nn.Linear | nn.Embedding) or type(owner).__name__ == "Conv1D" or owner is site.module
    if not (plain or site.anatomy.by_class):
        raise ConfigError(
            f"{place(site)}: {type(owner).__name__} is not known; expected linear maps that are nn.Linear, or Conv1D "
            f"of transformers"
        )


def _check_plain(site: HeadSite, owner: nn.Module, name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise ConfigError(
            f"{place(site)}: {type(owner).__name__}.{name} is not a tensor; quantized modules are not supported"
        )
    if not x.is_floating_point():
        raise ConfigError(
            f"{place(site)}: {name} is {x.dtype}: quantized weights are not supported; load the model unquantized"
        )
    is_plain = type(x.data) is torch.Tensor
    held = owner._parameters.get(name) is x or isinstance(getattr(owner, name), nn.ParameterList)
    if not is_plain or not held:
        raise ConfigError(
            f"{place(site)}: {type(owner).__name__}.{name} is not a plain parameter but a parametrization, an adapter "
            f"or a quantized tensor; merge it into the weights first"
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
                f"{place(site)}: {type(site.module).__name__} has {name} {tuple(parameter.shape)}, and how it belongs "
                f"to the heads is not known"
            )


def _names_of_tensors(model: nn.Module) -> dict[tuple[int, int], list[str]]:
    names: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[_address(parameter)].append(name)
    return names


def _address(x: Tensor) -> tuple[int, int]:
    """Identify a tensor by address, as parameters may share one storage without overlapping; by id if it has no address
    (empty, or on the meta device)."""
    return (x.data_ptr(), 0) if x.data_ptr() else (0, id(x))
