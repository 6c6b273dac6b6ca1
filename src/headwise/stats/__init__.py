"""Per-head statistics as streaming reducers over the tiles of an attention matrix."""

from headwise.stats.base import Measure, RowMeasure, row_measure
from headwise.stats.engine import Measurements, measure
from headwise.stats.pattern import ClassMass, SinkMass
from headwise.stats.reach import LocalMass
from headwise.stats.registry import GIVEN, MEASURES
from headwise.stats.spread import TopKMass
from headwise.stats.tokens import DuplicateMass, InductionMass

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
