"""What surgery refuses, and why: designs whose heads depend on each other, weights that are not plain or not alone."""

from collections import defaultdict
from collections.abc import Sequence
from inspect import signature

import torch
from torch import Tensor, nn

from headwise.edit.places import place
from headwise.errors import ConfigError
from headwise.models import HeadSite
from headwise.nn.base import AttentionLayer
from headwise.nn.block_diagonal import BlockDiagonalAttention
from headwise.nn.contraction import ContractionAttention
from headwise.nn.convolution import ConvolutionAttention
from headwise.nn.gated_output import GatedAttention
from headwise.nn.grouped_mlp import GroupedMLPAttention
from headwise.nn.head_mixing import HeadMixingAttention
from headwise.nn.latent import LatentAttention
from headwise.nn.mixture_of_heads import MixtureOfHeads
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.per_head import PerHeadAttention
from headwise.nn.single_head import SingleHeadAttention
from headwise.nn.sparse_mixture import SparseHeadMixture
from headwise.nn.talking_heads import TalkingHeadsAttention

# By class, not by subclass: a subclass may have weights that are laid out by heads and are not known here.
INDEPENDENT: tuple[type[AttentionLayer], ...] = (
    MultiHeadAttention, PerHeadAttention, ContractionAttention, SingleHeadAttention, LatentAttention, GatedAttention,
    ConvolutionAttention,
)  # fmt: skip
_GATE = "its gate chooses among the heads: with one less, tokens would choose others, which is not masking it"
DEPENDENT: dict[type[AttentionLayer], str] = {
    BlockDiagonalAttention: "head i reads the i-th of h equal slices of the channels, so none can go; to_multi_head() "
    "gives the same function, whose heads can",
    SparseHeadMixture: _GATE,
    MixtureOfHeads: _GATE,
    GroupedMLPAttention: "its groups hold the same number of heads each, and their matrices are square",
    HeadMixingAttention: "every head is a key and a value for the other heads of its token",
    TalkingHeadsAttention: "every head's scores and weights are mixed into those of the others",
}
KEPT_NORMS = ("q_norm", "k_norm")  # of one head's size, for all heads alike


def check_independent(site: HeadSite) -> None:
    """Raise if the other heads would not stay what they are without one of them."""
    kind = type(site.module)
    if site.kind == "torch":
        raise ConfigError(
            f"{place(site)}: nn.MultiheadAttention takes num_heads · head_dim = embed_dim for granted, so it cannot "
            f"hold fewer heads. Mask them instead: headwise.models.scale_heads(headwise.find_heads(model), gates), "
            f"with 0 for a head. Where your own code calls the module, "
            f"prune(headwise.MultiHeadAttention.from_torch(module), […]) is called layer(x, mask=…) in its place; "
            f"nn.TransformerEncoderLayer and its like cannot call it"
        )
    if site.kind == "t5" and "position_bias" in signature(kind.forward).parameters:
        raise ConfigError(
            f"{place(site)}: the layers of {kind.__name__} hand on one relative bias [1, heads, n, m], so that none "
            f"can hold fewer heads than the others. Mask them instead: "
            f"headwise.models.scale_heads(headwise.find_heads(model), gates), with 0 for a head"
        )
    if not isinstance(site.module, AttentionLayer):
        return
    if kind in DEPENDENT:
        raise ConfigError(f"{place(site)}: {kind.__name__} cannot lose a head: {DEPENDENT[kind]}")
    if kind not in INDEPENDENT:
        known = ", ".join(each.__name__ for each in INDEPENDENT)
        raise ConfigError(f"{place(site)}: {kind.__name__} is not known to keep its heads apart; known: {known}")


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
    if isinstance(site.module, AttentionLayer):
        return  # by class, in `check_independent`
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
