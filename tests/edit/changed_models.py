"""Small models, and what somebody did to them: weights that are shared or computed, wrappers, replaced forwards."""

import functools
import types
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune as masks

import headwise as hw


@dataclass
class Subject:
    """A model of two layers."""

    model: nn.Module

    @property
    def layer(self) -> Any:
        """The layer to which something was done."""
        return layers_in(self.model)[1]

    @property
    def sites(self) -> Any:
        return hw.find_heads(self.model)


X = torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 3


def out(model: Any) -> Tensor:
    with torch.no_grad():
        return model(X)


class Both(nn.Sequential):
    """Layers that read the same input, so that what is done to one does not change what another reads."""

    def forward(self, x: Tensor) -> Tensor:
        return self[0](x) + self[1](x)


def plain(*, bias: bool = False) -> Both:
    torch.manual_seed(5)
    return Both(*(hw.MultiHeadAttention(12, 3, bias=bias) for _ in range(2))).double().eval()


class Adapter(nn.Module):
    """A linear map plus one of rank 2."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.in_features, self.out_features = base, base.in_features, base.out_features
        self.down, self.up = nn.Linear(12, 2, bias=False).double(), nn.Linear(2, 12, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class LoraLinear(nn.Linear):
    """As `Adapter`, within a linear map that keeps its weight."""

    def __init__(self) -> None:
        super().__init__(12, 12, bias=False)
        self.up = nn.Parameter(torch.randn(12, 12))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.up


def weights_of(wrap: Callable[[nn.Module], Any]) -> Callable[[Both], nn.Module]:
    def apply(model: Both) -> nn.Module:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            wrap(getattr(model[1], name))
        return model

    return apply


def stale(model: Both) -> nn.Module:
    """Old weight norm whose weight is computed anew by the next call only."""
    weights_of(nn.utils.weight_norm)(model)
    with torch.no_grad():
        model[1].q_proj.weight_g.mul_(2.0)
    return model


def adapted(model: Both) -> nn.Module:
    model[1].q_proj = Adapter(model[1].q_proj)
    return model


def lora(model: Both) -> nn.Module:
    model[1].q_proj = LoraLinear().double()
    return model


def added_by_hook(model: Both) -> nn.Module:
    for name in ("q_proj", "o_proj"):
        getattr(model[1], name).register_forward_hook(lambda module, args, y: y + 1.0)
    return model


def put_back_by_hook(model: Both) -> nn.Module:
    """A hook that sets the weight before each call, as a constraint on its norm does."""
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        linear = getattr(model[1], name)
        kept = linear.weight.detach().clone()

        def put_back(module: Any, args: Any, kept: Tensor = kept) -> None:
            module.weight.data.copy_(kept)

        linear.register_forward_pre_hook(put_back)
    return model


def tied(*names: str) -> Callable[[Both], nn.Module]:
    """Parameters of the first layer in the second, too."""

    def apply(model: Both) -> nn.Module:
        for name in names:
            getattr(model[1], name).weight = getattr(model[0], name).weight
        return model

    return apply


def one_map(model: Both) -> nn.Module:
    model[1].k_proj = model[1].q_proj
    return model


def one_module(model: Both) -> nn.Module:
    return Both(model[0], model[0])


def tied_outside(model: Both) -> nn.Module:
    model.register_module("head", nn.Identity())
    model.head.weight = model[1].q_proj.weight
    return model


def overlapping(model: Both) -> nn.Module:
    flat = nn.Parameter(torch.randn(15, 12).double())
    model[1].q_proj.weight = nn.Parameter(flat.detach()[:12])
    model[1].k_proj.weight = nn.Parameter(flat.detach()[3:])
    return model


def forwards(replace: Callable[[Any], Callable[..., Any]], *names: str) -> Callable[[Both], nn.Module]:
    def apply(model: Both) -> nn.Module:
        for name in names or ("",):
            module = model[1].get_submodule(name)
            module.forward = replace(module)
        return model

    return apply


def passing(module: Any) -> Callable[..., Any]:
    return functools.wraps(module.forward)(lambda *args, old=module.forward, **kwargs: old(*args, **kwargs))


def unmarked(module: Any) -> Callable[..., Any]:
    old = module.forward
    return lambda *args, **kwargs: old(*args, **kwargs)


def apart(module: Any) -> Callable[..., Any]:
    copy = deepcopy(module)
    return types.MethodType(lambda self, *args, **kwargs: copy(*args, **kwargs), module)


def compiled(model: Both) -> nn.Module:
    """Called once, so that there is code that knows of no later hooks."""
    found = torch.compile(model, backend="eager")
    out(found)
    return found


def compiled_inside(model: Both) -> nn.Module:
    model[1].compile(backend="eager")
    model[1].q_proj.compile(backend="eager")
    out(model)
    return model


class Around(nn.Module):
    """A module around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def distributed(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
DONE: dict[str, Callable[[Both], nn.Module]] = {
    "plain": lambda model: model,
    "shared q": tied("q_proj"),
    "shared layer": tied(*PROJECTIONS),
    "one module at two places": one_module,
    "q is k": one_map,
    "shared outside": tied_outside,
    "overlapping": overlapping,
    "weight norm": weights_of(parametrizations.weight_norm),
    "spectral norm": weights_of(parametrizations.spectral_norm),
    "orthogonal": weights_of(parametrizations.orthogonal),
    "old weight norm": weights_of(nn.utils.weight_norm),
    "old weight norm, stale": stale,
    "old spectral norm": weights_of(nn.utils.spectral_norm),
    "pruning mask": weights_of(lambda module: masks.l1_unstructured(module, "weight", 0.3)),
    "adapter": adapted,
    "adapter in a linear map": lora,
    "hook that adds": added_by_hook,
    "hook that puts back": put_back_by_hook,
    "compiled": compiled,
    "compiled in place": compiled_inside,
    "distributed": distributed,
    "within a module": Around,
    "forward that passes on": forwards(passing),
    "forward that passes on, unmarked": forwards(unmarked),
    "forward of a copy": forwards(apart),
    "forwards of maps that pass on": forwards(unmarked, *PROJECTIONS),
    "forwards of copies of maps": forwards(apart, *PROJECTIONS),
}


def twin_of(model: nn.Module) -> Both:
    """A plain model that computes what the model computes: its weights are read off what the linear maps return."""
    twin, layers = plain(bias=True), layers_in(model)
    with torch.no_grad():
        for mine, layer in zip(twin, layers, strict=True):
            for name in PROJECTIONS:
                own, linear = getattr(mine, name), getattr(layer, name)
                own.bias.copy_(linear(torch.zeros(12).double()))
                own.weight.copy_((linear(torch.eye(12).double()) - own.bias).mT)
    return Both(twin[0], twin[0]) if layers[0] is layers[1] else twin


def layers_in(model: nn.Module) -> list[Any]:
    return [m for _, m in model.named_modules(remove_duplicate=False) if isinstance(m, hw.MultiHeadAttention)]
