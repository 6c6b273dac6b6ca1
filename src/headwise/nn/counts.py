"""Costs of designs by name: `AttentionLayer.costs` with sizes from a file or a command line.

>>> counts_of("mqa", {"d_model": 512, "num_heads": 8}).cache
128
"""

import inspect
from collections.abc import Mapping
from typing import Any

from headwise.costs.configs import ModelConfig
from headwise.costs.counts import Attentions, Counts
from headwise.errors import ConfigError, unknown_option
from headwise.nn.named import design_of, preset_of
from headwise.nn.registry import DESIGNS, STANDARD
from headwise.wording import Bilingual


def sizes_of(design: str) -> dict[str, bool]:
    """Return the sizes of a design, and whether each is required; ConfigError for an unknown name."""
    preset = preset_of(design)
    needs = () if preset is None else preset.needs
    return {name: p.default is p.empty or name in needs for name, p in _sizes(design).items()}


def kinds_of(design: str) -> dict[str, Any]:
    """Return the sizes of a design with their types, the annotations of its `costs`."""
    return {name: parameter.annotation for name, parameter in _sizes(design).items()}


def counts_of(design: str, sizes: Mapping[str, Any]) -> Counts:
    """Return the counts of a design by name; ConfigError for an unknown name or size, or a missing size."""
    taken, preset = sizes_of(design), preset_of(design)
    for name in sizes:
        if name not in taken:
            raise unknown_option(name, sizes[name], design, taken)
    missing = [name for name, needed in taken.items() if needed and name not in sizes]
    if missing:
        raise ConfigError(
            f"{design} requires {' and '.join(missing)}; it supports {', '.join(taken)}",
            f"{design} 需要 {'、'.join(missing)}；它支持 {'、'.join(taken)}",
        )
    return design_of(design).costs(**sizes, **({} if preset is None else preset.given))


def _sizes(design: str) -> dict[str, inspect.Parameter]:
    found: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(design_of(design).costs).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            standard = inspect.signature(DESIGNS[STANDARD].costs).parameters
            found |= {option: p for option, p in standard.items() if p.kind is p.KEYWORD_ONLY}
        else:
            found[name] = parameter
    preset = preset_of(design)
    return {name: p for name, p in found.items() if preset is None or name not in preset.given}


def attentions_of(config: ModelConfig) -> Attentions:
    """Return the counts of all attention layers of a model."""
    every = config.attention_sizes
    of = {sizes: counts_of(config.design, {"d_model": config.d_model, **dict(sizes)}) for sizes in dict.fromkeys(every)}
    found = tuple(of[sizes] for sizes in every)
    layers, decoder = found[: config.self_attentions], found[config.self_attentions :]
    return Attentions(layers, decoder[::2], decoder[1::2])


def summary_of(design: str) -> Bilingual:
    """Return the description of a design for `headwise plan`: one paragraph with its formula or its source."""
    preset = preset_of(design)
    text = (design_of(design).costs.__doc__ or "") if preset is None else preset.summary.en
    words = design_of(design).notes.summary if preset is None else preset.summary
    return Bilingual(" ".join(text.partition("\n\n")[0].split()), words.zh)
