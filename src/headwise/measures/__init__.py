"""Per-head statistics as streaming reducers over the tiles of an attention matrix."""

from headwise.measures.base import Measure, RowMeasure, row_measure
from headwise.measures.engine import Measurements, measure
from headwise.measures.pattern import ClassMass, SinkMass
from headwise.measures.reach import LocalMass
from headwise.measures.registry import GIVEN, MEASURES
from headwise.measures.spread import TopKMass
from headwise.measures.tokens import DuplicateMass, InductionMass

__all__ = [
    "GIVEN",
    "MEASURES",
    "ClassMass",
    "DuplicateMass",
    "InductionMass",
    "LocalMass",
    "Measure",
    "Measurements",
    "RowMeasure",
    "SinkMass",
    "TopKMass",
    "measure",
    "row_measure",
]
