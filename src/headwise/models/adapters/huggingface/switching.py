"""Turning models of transformers to headwise, and back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from headwise.errors import ConfigError
from headwise.models.adapters.huggingface.attention import attention_forward
from headwise.models.adapters.huggingface.interface import calls_interface, left_out
from headwise.models.adapters.huggingface.library import library
from headwise.models.adapters.huggingface.masks import make_mask

NAME = "headwise"
_BEFORE = "_headwise_before"  # on a model that was turned: its configurations and what each of them said


def install() -> None:
    """Let transformers know attn_implementation="headwise", for models that are loaded by that name.

    It is registered with both: attention, and how masks are made for it. Calling it again changes nothing.

    Raises:
        ConfigError: if transformers is not installed: `pip install 'transformers>=5'`.
    """
    # torch.compile cannot look into masks that are read from closures; it compiles what lies between.
    library("modeling_utils").AttentionInterface.register(NAME, torch.compiler.disable(attention_forward))
    library("masking_utils").AttentionMaskInterface.register(NAME, torch.compiler.disable(make_mask))


def left(model: nn.Module) -> dict[str, str]:
    """The attention modules of a transformers model that `turn` leaves as they are: name → class."""
    return left_out(model, [name for name, module in model.named_modules() if calls_interface(module)])


def turn(model: Any) -> None:
    """Let headwise compute the attention of a loaded transformers model, all its parts included, in place.

    Modules in it that compute their attention by themselves, as some image encoders do, continue to do so.

    Raises:
        ConfigError: if a part of it ignores attn_implementation or none of it takes its attention from outside (named;
            nothing is changed then), or if transformers is too old.
    """
    pretrained = library("modeling_utils").PreTrainedModel
    parts = [part for part in model.modules() if isinstance(part, pretrained)]
    for part in parts:
        if not part._can_set_attn_implementation():
            raise ConfigError(
                f"{type(part).__name__} computes its attention by itself and ignores "
                f"attn_implementation, so headwise cannot compute it"
            )
    if not any(map(calls_interface, model.modules())):
        others = left(model)
        raise ConfigError(
            f"{type(model).__name__} "
            + (f"computes its attention by itself: {_listed(others)}" if others else "has no attention")
        )
    install()
    own = [module.config for module in model.modules() if calls_interface(module)]
    before = [(config, config._attn_implementation_internal) for config in _configs(own, model, parts)]
    model.set_attn_implementation(NAME)
    for config in own:  # some modules have a copy of their model's, which the model does not know of
        config._attn_implementation_internal = NAME
    object.__setattr__(model, _BEFORE, before)
    stayed = sorted({type(part).__name__ for part in parts if part.config._attn_implementation != NAME})
    if stayed:
        turn_back(model)
        raise ConfigError(f"{', '.join(stayed)} did not take attn_implementation='headwise'")


def turn_back(model: Any) -> None:
    """Put back what computed the attention of a model before `turn`, part by part."""
    for config, implementation in model.__dict__[_BEFORE]:
        config._attn_implementation_internal = implementation
    object.__delattr__(model, _BEFORE)


def was_turned(model: Any) -> bool:
    """Whether `turn` was called for it, or for the model that it is a copy of."""
    return _BEFORE in model.__dict__


def _configs(own: list[Any], model: Any, parts: list[Any]) -> list[Any]:
    """Every configuration that says how attention is computed, each once: those of modules, of models and of parts."""
    found: dict[int, Any] = {}
    waiting = [*own, *(part.config for part in (model, *parts))]
    while waiting:
        config = waiting.pop()
        if id(config) not in found:
            found[id(config)] = config
            waiting += [sub for name in config.sub_configs if (sub := getattr(config, name, None)) is not None]
    return list(found.values())


def _listed(found: Mapping[str, str]) -> str:
    """Modules by class, with the name of the first of each."""
    names: dict[str, list[str]] = {}
    for name, kind in found.items():
        names.setdefault(kind, []).append(name or "the model itself")
    return "; ".join(
        f"{kind} ({those[0]}{f' and {len(those) - 1} more' if len(those) > 1 else ''})" for kind, those in names.items()
    )
