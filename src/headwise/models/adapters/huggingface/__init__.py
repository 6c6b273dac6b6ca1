"""Hugging Face transformers models with attention computed by headwise (`pip install 'transformers>=5.18'`).

    import headwise as hw
    with hw.attach(model), hw.models.observe(callback, model=model, measures=["entropy"]):
        model(**inputs)

or, once for all models, `install()` and then `AutoModel.from_pretrained(…, attn_implementation="headwise")`.

Outputs equal those of `attn_implementation="eager"` to rounding; a fully masked query gives zeros. Keys and values are
not repeated for grouped queries. A model gets the mask of eager attention, which is computed only if the model reads
it; otherwise causal attention, windows, packed sequences and padding need no n×m mask. `output_attentions=True`, as an
argument of a call, returns `AttentionWeights`: tensors computed on first use, of the weights before dropout.
docs/models.md lists the tested models.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from headwise.errors import ConfigError
from headwise.models.adapters.huggingface.attention import FORMER, attention_in_graphs
from headwise.models.adapters.huggingface.library import calls_interface, left_out, library
from headwise.models.adapters.huggingface.masks import make_mask

NAME = "headwise"
_BEFORE = "_headwise_before"  # on a converted model: its configurations with their former implementation


def install() -> None:
    """Register attn_implementation="headwise" with transformers: the attention and its masks.

    Calling it again changes nothing, also if another library has wrapped the attention functions meanwhile.

    Raises:
        ConfigError: if transformers is not installed or too old: `pip install 'transformers>=5.18'`.
    """
    models = library("modeling_utils")
    if NAME in models.ALL_ATTENTION_FUNCTIONS.valid_keys():
        return
    models.AttentionInterface.register(NAME, attention_in_graphs)
    library("masking_utils").AttentionMaskInterface.register(NAME, make_mask)


def left(model: nn.Module) -> dict[str, str]:
    """The attention modules of a transformers model that `convert` does not change: name → class."""
    return left_out(model, [name for name, module in model.named_modules() if calls_interface(module)])


def refusal(model: Any) -> str:
    """Why a transformers model cannot be converted, as far as that is known before; "" if nothing is."""
    try:
        parts = _parts(model)
        library("masking_utils")
    except ConfigError as error:  # transformers is too old
        return str(error)
    if alone := [part for part in parts if not part._can_set_attn_implementation()]:
        return (
            f"{type(alone[0]).__name__} computes its attention by itself and ignores "
            f"attn_implementation, so headwise cannot compute it"
        )
    if not any(map(calls_interface, model.modules())):
        others = left(model)
        return f"{type(model).__name__} " + (
            f"computes its attention by itself: {_listed(others)}" if others else "has no attention"
        )
    if type(model).set_attn_implementation is not library("modeling_utils").PreTrainedModel.set_attn_implementation:
        try:
            _switch(model)  # a method of the model's own shows which parts take the setting only when it is called
        except ConfigError as error:
            return str(error)
        restore(model)
    return ""


def _parts(model: nn.Module) -> list[Any]:
    pretrained = library("modeling_utils").PreTrainedModel
    return [part for part in model.modules() if isinstance(part, pretrained)]


def convert(model: Any) -> None:
    """Convert a transformers model with all its parts to headwise, in place; ConfigError if that is refused."""
    if why := refusal(model):
        raise ConfigError(why)
    _switch(model)


def _switch(model: Any) -> None:
    install()
    parts = _parts(model)
    attention = [module for module in model.modules() if calls_interface(module)]
    own = [module.config for module in attention]
    configs: dict[int, Any] = {}  # each once
    waiting = [*own, *(part.config for part in (model, *parts))]
    while waiting:
        config = waiting.pop()
        if id(config) not in configs:
            configs[id(config)] = config
            waiting += [sub for name in config.sub_configs if (sub := getattr(config, name, None)) is not None]
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    for module in attention:
        module.__dict__[FORMER] = module.config._attn_implementation_internal
    object.__setattr__(model, _BEFORE, before)
    try:
        model.set_attn_implementation(NAME)
        for config in own:  # some modules have a copy of their model's configuration
            config._attn_implementation_internal = NAME
        stayed = sorted({type(part).__name__ for part in parts if part.config._attn_implementation != NAME})
        if stayed:
            raise ConfigError(f"{', '.join(stayed)} did not take attn_implementation='headwise'")
    except BaseException:
        restore(model)
        raise


def restore(model: Any) -> None:
    """Restore the attention implementations from before `convert`, part by part."""
    for config, implementation in model.__dict__[_BEFORE]:
        config._attn_implementation_internal = implementation
    object.__delattr__(model, _BEFORE)
    for module in model.modules():
        module.__dict__.pop(FORMER, None)


def was_converted(model: Any) -> bool:
    """Whether `convert` was called on it or on the model that it is a copy of."""
    return _BEFORE in model.__dict__


def _listed(found: Mapping[str, str]) -> str:
    """Format modules by class, with the name of the first of each."""
    names: dict[str, list[str]] = {}
    for name, kind in found.items():
        names.setdefault(kind, []).append(name or "the model itself")
    return "; ".join(
        f"{kind} ({those[0]}{f' and {len(those) - 1} more' if len(those) > 1 else ''})" for kind, those in names.items()
    )
