"""What is known about one model type of transformers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headwise.errors import ConfigError
from headwise.models.configuration.windows import Windows, nowhere

Options = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """One model type.

    sizes: fields of `ModelConfig` by a configuration; "heads" are the sizes of an attention layer besides num_heads,
        "layer_heads" more of each layer if they differ, "decoder_heads" those in a decoder with cross attention.
    windows: those of the layers. auto: the class of transformers that builds the model. per_layer: whether
        `per_layer_config` is read.
    """

    sizes: Callable[[Any], Options]
    windows: Windows = nowhere
    auto: str = "AutoModelForCausalLM"
    per_layer: bool = False


def output(c: Any) -> str:
    """Whether the output matrix is the embedding: `ModelConfig.output`."""
    return "tied" if getattr(c, "tie_word_embeddings", False) else "own"


def require(c: Any, **values: Any) -> None:
    """Raise ConfigError, which names the key, unless a configuration has these values of keys, or lacks the keys."""
    for name, value in values.items():
        found = getattr(c, name, value)
        if found != value:
            raise ConfigError(
                f"{name}={found!r}: not supported for model_type={c.model_type!r}",
                f"model_type={c.model_type!r} 不支持 {name}={found!r}",
            )
