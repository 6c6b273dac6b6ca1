"""All head designs by name. A design is an `AttentionLayer` in a file of its own, and one line here."""

from headwise.heads.base import AttentionLayer
from headwise.heads.block_diagonal import BlockDiagonalAttention
from headwise.heads.contraction import ContractionAttention
from headwise.heads.convolution import ConvolutionAttention
from headwise.heads.gated_output import GatedAttention
from headwise.heads.grouped_mlp import GroupedMLPAttention
from headwise.heads.head_mixing import HeadMixingAttention
from headwise.heads.latent import LatentAttention
from headwise.heads.mixture_of_heads import MixtureOfHeads
from headwise.heads.multi_head import MultiHeadAttention
from headwise.heads.per_head import PerHeadAttention
from headwise.heads.single_head import SingleHeadAttention
from headwise.heads.sparse_mixture import SparseHeadMixture
from headwise.heads.talking_heads import TalkingHeadsAttention

DESIGNS: dict[str, type[AttentionLayer]] = {
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
