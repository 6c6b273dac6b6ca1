"""All head designs by name. A design is an `AttentionLayer` in a file of its own, and one line here."""

from headwise.heads.base import AttentionLayer
from headwise.heads.block_diagonal import BlockDiagonalAttention
from headwise.heads.contraction import ContractionAttention
from headwise.heads.multi_head import MultiHeadAttention
from headwise.heads.per_head import PerHeadAttention
from headwise.heads.single_head import SingleHeadAttention

DESIGNS: dict[str, type[AttentionLayer]] = {
    "multi_head": MultiHeadAttention,
    "per_head": PerHeadAttention,
    "contraction": ContractionAttention,
    "single_head": SingleHeadAttention,
    "block_diagonal": BlockDiagonalAttention,
}
