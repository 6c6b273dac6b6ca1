"""All head designs by name. A design is an `AttentionLayer` in a file of its own, and one line here."""

from collections import UserDict

from headwise.errors import ConfigError
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

# What a design says of itself, each in its own class body: what it inherits describes another design.
CONTRACT = {
    "costs": "costs(d_model, num_heads, …) -> Counts, static: parameters, work and cache by formulas",
    "steps": "steps(x, note): self attention on x by its definition, each step with formula, words and axes",
    "notes": "notes = Notes(…): what it is, its source, and remarks for documentation and reports",
    "coupling": "coupling = INDEPENDENT, or Coupling(…): where its heads depend on each other, and why",
    "resizing": "resizing = Resizing(…): which numbers of heads can change, or why not",
    "beyond_attend": "beyond_attend = '', or why tokens meet elsewhere than in one call of attend",
    "layout": "layout() -> Layout: which slices of which parameter are head i",
}


class Designs(UserDict[str, type[AttentionLayer]]):
    """Designs by name, in the order of the documentation; only those that describe themselves."""

    def __setitem__(self, name: str, design: type[AttentionLayer]) -> None:
        """Register a design; ConfigError with the line of `CONTRACT` that its class does not define."""
        for part, line in CONTRACT.items():
            if part not in vars(design):
                raise ConfigError(f"design={name!r}: {design.__name__} does not define {part} in its own class: {line}")
        super().__setitem__(name, design)


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
