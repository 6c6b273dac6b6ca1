"""Attention layers: `MultiHeadAttention`, twelve other designs, and the Transformer block around any of them."""

from headwise.nn.base import AttentionLayer
from headwise.nn.block import TransformerBlock
from headwise.nn.block_diagonal import BlockDiagonalAttention, GroupedMLPAttention
from headwise.nn.convolution import ConvolutionAttention, from_conv1d, from_conv2d
from headwise.nn.forms import ContractionAttention, PerHeadAttention, SingleHeadAttention
from headwise.nn.gated_output import GatedAttention, Gates
from headwise.nn.head_mixing import HeadMixingAttention, TalkingHeadsAttention
from headwise.nn.latent import LatentAttention
from headwise.nn.mixture import MixtureOfHeads, SparseHeadMixture
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.registry import CONTRACT, DESIGNS, STANDARD, build, counts_of, read_options
from headwise.nn.steps import Rotary, Step, Steps

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
