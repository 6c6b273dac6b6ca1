"""All head designs by name. A design is an `AttentionLayer` in a file of its own, and one line here."""

from collections import UserDict
from collections.abc import Callable

from headwise.errors import ConfigError
from headwise.nn.base import AttentionLayer
from headwise.nn.block_diagonal import BlockDiagonalAttention
from headwise.nn.contraction import ContractionAttention
from headwise.nn.convolution import ConvolutionAttention
from headwise.nn.gated_output import GatedAttention
from headwise.nn.grouped_mlp import GroupedMLPAttention
from headwise.nn.head_mixing import HeadMixingAttention
from headwise.nn.latent import LatentAttention
from headwise.nn.layout import Coupling, Resizing
from headwise.nn.mixture_of_heads import MixtureOfHeads
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.notes import Notes
from headwise.nn.per_head import PerHeadAttention
from headwise.nn.single_head import SingleHeadAttention
from headwise.nn.sparse_mixture import SparseHeadMixture
from headwise.nn.talking_heads import TalkingHeadsAttention

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
        """Register a design.

        Raises:
            ConfigError: for a name, its own or of one of its presets, that another design has; and for a part of
                `CONTRACT` that its class does not define, or defines as something else, with the line of the contract.
        """
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
