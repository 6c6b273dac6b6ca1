"""Attention layers: `MultiHeadAttention`, twelve other designs, and the Transformer block around any of them."""

from headwise.nn.base import AttentionLayer
from headwise.nn.block import TransformerBlock
from headwise.nn.block_diagonal import BlockDiagonalAttention
from headwise.nn.contraction import ContractionAttention
from headwise.nn.convolution import ConvolutionAttention, from_conv1d, from_conv2d
from headwise.nn.counts import counts_of
from headwise.nn.gated_output import GatedAttention
from headwise.nn.gating import Gates
from headwise.nn.grouped_mlp import GroupedMLPAttention
from headwise.nn.head_mixing import HeadMixingAttention
from headwise.nn.latent import LatentAttention
from headwise.nn.mixture_of_heads import MixtureOfHeads
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.named import build, read_options
from headwise.nn.per_head import PerHeadAttention
from headwise.nn.positions import Rotary
from headwise.nn.registry import CONTRACT, DESIGNS, STANDARD
from headwise.nn.single_head import SingleHeadAttention
from headwise.nn.sparse_mixture import SparseHeadMixture
from headwise.nn.steps import Step, Steps
from headwise.nn.talking_heads import TalkingHeadsAttention

__all__ = [
    "CONTRACT",
    "DESIGNS",
    "STANDARD",
    "AttentionLayer",
    "BlockDiagonalAttention",
    "ContractionAttention",
    "ConvolutionAttention",
    "GatedAttention",
    "Gates",
    "GroupedMLPAttention",
    "HeadMixingAttention",
    "LatentAttention",
    "MixtureOfHeads",
    "MultiHeadAttention",
    "PerHeadAttention",
    "Rotary",
    "SingleHeadAttention",
    "SparseHeadMixture",
    "Step",
    "Steps",
    "TalkingHeadsAttention",
    "TransformerBlock",
    "build",
    "counts_of",
    "from_conv1d",
    "from_conv2d",
    "read_options",
]
