"""All head designs by name, with options and costs. A design is an `AttentionLayer` in a file and one line here.

Options and sizes are those of a file or a command line:

>>> build("gqa", 64, 8, {"num_kv_heads": 2}).num_kv_heads
2
>>> counts_of("mqa", {"d_model": 512, "num_heads": 8}).cache
128
"""

import inspect
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from headwise.costs.configs import ModelConfig
from headwise.costs.work import Attentions, Counts
from headwise.errors import ConfigError, unknown_name, unknown_option
from headwise.nn.base import AttentionLayer
from headwise.nn.block_diagonal import BlockDiagonalAttention, GroupedMLPAttention
from headwise.nn.convolution import ConvolutionAttention
from headwise.nn.forms import ContractionAttention, PerHeadAttention, SingleHeadAttention
from headwise.nn.gated_output import GatedAttention
from headwise.nn.head_mixing import HeadMixingAttention, TalkingHeadsAttention
from headwise.nn.latent import LatentAttention
from headwise.nn.layout import Coupling, Resizing, check_option, parameters_of
from headwise.nn.mixture import MixtureOfHeads, SparseHeadMixture
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.steps import Notes, Preset
from headwise.wording import LIST, Bilingual, in_language, joined, tr

# What a design defines, each in its own class body: what it inherits describes another design.
CONTRACT = {
    "costs": "costs(d_model, num_heads, …) -> Counts, static: parameters, work and cache by formulas",
    "steps": "steps(x, note): self attention on x by its definition, each step with formula, words and axes",
    "notes": "notes = Notes(…): what it is, its source, and remarks for documentation and reports",
    "coupling": "coupling = INDEPENDENT, or Coupling(…): where its heads depend on each other, and why",
    "resizing": "resizing = Resizing(…): which numbers of heads can change, or why not",
    "outside_attend": "outside_attend = '', or how tokens interact outside one call of attend",
    "layout": "layout() -> Layout: which slices of which parameter are head i",
}
_KINDS: dict[str, type] = {"notes": Notes, "coupling": Coupling, "resizing": Resizing, "outside_attend": str}


class Designs(UserDict[str, type[AttentionLayer]]):
    """Designs by name, in the order of the documentation; only those that describe themselves."""

    def __setitem__(self, name: str, design: type[AttentionLayer]) -> None:
        """ConfigError for a name, its own or of one of its presets, that another design has; and for a part of
        `CONTRACT` that its class does not define, or defines as something else, with the line of the contract."""
        if not (isinstance(design, type) and issubclass(design, AttentionLayer)):
            raise ConfigError(f"design={name!r}: expected a class of AttentionLayer, got {design!r}")
        for part, line in CONTRACT.items():
            if part not in vars(design):
                raise ConfigError(f"design={name!r}: {design.__name__} does not define {part} in its own class: {line}")
            if not isinstance(value := vars(design)[part], _KINDS.get(part, Callable)):  # type: ignore[arg-type]
                raise ConfigError(f"design={name!r}: {design.__name__}.{part} is {value!r}; expected {line}")
        taken = {each: owner for at, held in self.items() if at != name for each, owner in _names(at, held).items()}
        if self.get(name, design) is not design:
            taken[name] = self[name]
        for each in _names(name, design):
            if each in taken:
                raise ConfigError(
                    f"design={name!r}: {taken[each].__name__} has the name {each!r} already; give {design.__name__} "
                    f"another name, or delete the other first: del DESIGNS[…]"
                )
        super().__setitem__(name, design)


def _names(name: str, design: type[AttentionLayer]) -> dict[str, type[AttentionLayer]]:
    """The names of a design: its own, and those of its presets, without those that it inherits."""
    return dict.fromkeys((name, *(preset.name for preset in vars(design).get("presets", ()))), design)


DESIGNS = Designs(
    multi_head=MultiHeadAttention,
    per_head=PerHeadAttention,
    contraction=ContractionAttention,
    single_head=SingleHeadAttention,
    block_diagonal=BlockDiagonalAttention,
    sparse_mixture=SparseHeadMixture,
    mixture_of_heads=MixtureOfHeads,
    grouped_mlp=GroupedMLPAttention,
    head_mixing=HeadMixingAttention,
    talking_heads=TalkingHeadsAttention,
    latent=LatentAttention,
    gated_output=GatedAttention,
    convolution=ConvolutionAttention,
)
# The standard layer: what is built where no design is named, and what others are compared with.
STANDARD = "multi_head"


# Types of options that a file or a command line can give; others are available in Python only.
EXPECTED = {
    int: tr("a whole number"), int | None: tr("a whole number"),
    float: tr("a number"), float | None: tr("a number"),
    bool: tr("true or false"), str: tr("a word"),
}  # fmt: skip


def names() -> tuple[str, ...]:
    """Return all names: each design, followed by its presets."""
    return tuple(_named())


def _named() -> dict[str, tuple[type[AttentionLayer], Preset | None]]:
    found: dict[str, tuple[type[AttentionLayer], Preset | None]] = {}
    for name, design in DESIGNS.items():
        presets: tuple[Preset, ...] = vars(design).get("presets", ())  # inherited presets belong to another design
        found |= {name: (design, None), **{preset.name: (design, preset) for preset in presets}}
    return found


def design_of(name: str) -> type[AttentionLayer]:
    """Return the design of this name; ConfigError with the closest names if it is unknown."""
    if name not in (known := _named()):
        raise unknown_name("design", name, known)
    return known[name][0]


def preset_of(name: str) -> Preset | None:
    """Return the preset of this name, or None for the name of a design itself; ConfigError as in `design_of`."""
    design_of(name)
    return _named()[name][1]


def options_of(name: str) -> dict[str, Any]:
    """Return the options of a design and their defaults, without `d_model` and `num_heads`."""
    return {option: parameter.default for option, parameter in _parameters(design_of(name)).items()}


def build(name: str, d_model: int, num_heads: int, options: Mapping[str, Any] | None = None) -> AttentionLayer:
    """Build a design by name.

    Args:
        name: of a design or a preset. d_model, num_heads: its sizes. options: its own options, by name.
    Returns:
        The layer.
    Raises:
        ConfigError: for an unknown name, and for an option that the design does not support.
    """
    design, given = design_of(name), dict(options or {})
    known = _parameters(design)
    for option, value in given.items():
        check_option(name, option, value, known)
        kind = known[option].annotation
        accepted = kind | int if kind in (float, float | None) else kind
        is_flag = isinstance(value, bool) and kind is not bool  # Python's own booleans are numbers too
        if is_flag or not isinstance(value, accepted):
            raise ConfigError(
                "{option}={value!r}: expected {expected}", option=option, value=value, expected=EXPECTED[kind]
            )
    preset = preset_of(name)
    if preset is None:
        return design.build(d_model, num_heads, **given)
    for option, what in preset.needs.items():
        if given.get(option) is None:
            raise ConfigError("{option}: {name} requires it, {what}", option=option, name=preset.name, what=what)
    for option, value in preset.given.items():
        if given.get(option) not in (None, value):
            raise ConfigError(
                "{option}={given}: {name} has {value}; see {instead} for other values",
                option=option,
                given=given[option],
                name=preset.name,
                value=value,
                instead=preset.instead,
            )
    return design.build(d_model, num_heads, **{**given, **preset.given})


def _parameters(design: type[AttentionLayer]) -> dict[str, inspect.Parameter]:
    """Return the options that a file or a command line can give."""
    known = parameters_of(design)
    return {name: p for name, p in known.items() if p.annotation in EXPECTED and name not in design.refused_options}


def read_options(assigned: Iterable[str]) -> dict[str, Any]:
    """Parse options written as NAME=VALUE: numbers, true, false, none, or words. ConfigError for other forms.

    >>> read_options(["top-k=2", "per=token", "renormalise=true"])
    {'top_k': 2, 'per': 'token', 'renormalise': True}
    """
    found: dict[str, Any] = {}
    for text in assigned:
        name, sign, value = (part.strip() for part in text.partition("="))
        if not (sign and name and value):
            raise ConfigError("--set {text!r}: expected NAME=VALUE, for example latent_dim=512", text=text)
        words: dict[str, Any] = {"true": True, "false": False, "none": None}
        read: Any = words.get(value.lower(), value)
        for kind in (float, int) if read is value else ():
            with suppress(ValueError):
                read = kind(value)
        found[name.replace("-", "_")] = read
    return found


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
            "{design} requires {missing}; it supports {taken}",
            design=design,
            missing=joined(missing, tr(" and ")),
            taken=joined(taken, LIST),
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
    text = (design_of(design).costs.__doc__ or "") if preset is None else preset.summary
    words = design_of(design).notes.summary if preset is None else preset.summary
    return Bilingual(" ".join(text.partition("\n\n")[0].split()), in_language(words, "zh"))
