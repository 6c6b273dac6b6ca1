"""All head designs by name. A design is an `AttentionLayer` in a file of its own, and one line here."""

from collections import UserDict

from headwise.errors import check_declared
from headwise.nn.base import FACTS, METHODS, AttentionLayer
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


class Designs(UserDict[str, type[AttentionLayer]]):
    """Designs by name. Setting one raises ConfigError if the class does not say what each design has to say."""

    def __setitem__(self, name: str, design: type[AttentionLayer]) -> None:
        check_declared(design, design.__mro__[1], FACTS)
        check_declared(design, AttentionLayer, METHODS)
        super().__setitem__(name, design)


DESIGNS = Designs(
    {
        "multi_head": MultiHeadAttention,
        "per_head": PerHeadAttention,
        "contraction": ContractionAttention,
        "single_head": SingleHeadAttention,
        "block_diagonal": BlockDiagonalAttention,
        "sparse_mixture": SparseHeadMixture,
        "mixture_of_heads": MixtureOfHeads,
        "grouped_mlp": GroupedMLPAttention,
        "head_mixing": HeadMixingAttention,
        "talking_heads": TalkingHeadsAttention,
        "latent": LatentAttention,
        "gated_output": GatedAttention,
        "convolution": ConvolutionAttention,
    }
)
