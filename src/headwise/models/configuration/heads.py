"""The numbers of heads in the configuration of a model of transformers."""

from copy import deepcopy
from typing import Any

import torch
from torch import nn

from headwise.models.find import find_heads


def update_config(model: nn.Module) -> None:
    """Set the numbers of heads in a model's configuration, which `save_pretrained` writes and other programs read, to
    those of its layers. Unchanged if the layers differ, if the model's class builds other shapes from these numbers, as
    that of a model whose heads have d_model / num_attention_heads dimensions in every case, or if its configuration
    refuses them when it is read, as Llama's does unless num_attention_heads divides d_model."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "num_attention_heads"):
        return
    sizes = {(site.num_heads, site.num_kv_heads, site.head_dim) for site in find_heads(model)}
    if len(sizes) != 1:
        return
    num_heads, num_kv_heads, head_dim = sizes.pop()
    wanted = {"num_attention_heads": num_heads}
    if hasattr(config, "num_key_value_heads"):
        wanted["num_key_value_heads"] = num_kv_heads
    if all(getattr(config, name) == value for name, value in wanted.items()):
        return
    for values in (wanted, {**wanted, "head_dim": head_dim}):
        if _shapes_of(type(model), config, values) == {name: x.shape for name, x in model.named_parameters()}:
            for name, value in values.items():
                setattr(config, name, value)
            return


def _shapes_of(kind: type[nn.Module], config: Any, values: dict[str, int]) -> dict[str, torch.Size] | None:
    """The shapes of the parameters of a model with these values, built without memory; None if the
    configuration could not be read, or the model not be built."""
    changed = deepcopy(config)
    try:
        for name, value in values.items():
            setattr(changed, name, value)
        changed = type(changed).from_dict(changed.to_dict())  # setattr checks no value against others, reading does
        with torch.device("meta"):
            return {name: x.shape for name, x in kind(changed).named_parameters()}
    except Exception:  # their code, with other values
        return None
