"""Per-head statistics as streaming reducers over the tiles of an attention matrix.

A file here has a statistic, or a few that belong together, and all that is known about it: its formula on a tile, what
a kernel accumulates for it, how the numbers of two sets of keys and of two blocks of queries join, and its label, unit,
range and source. `register` makes a class of measures known by its name.

>>> import headwise as hw
>>> from headwise import stats
>>> stats.Entropy.unit, stats.Entropy().words("zh").label
('nats', '熵')
>>> "entropy" in stats.MEASURES
True
"""

from headwise.stats.base import Measure, RowMeasure, Tokens, row_measure
from headwise.stats.classes import (
    ClassMass,
    KeyWeights,
    OfPieces,
    PunctuationMass,
    SeparatorMass,
    SpecialMass,
)
from headwise.stats.concentration import CONCENTRATION, SQUARES, EffectiveKeys, SquaredWeights
from headwise.stats.distance import DISTANCE, DISTANCE_VARIANCE, DistanceVariance, MeanDistance
from headwise.stats.engine import Measurements, measure, statistics_for
from headwise.stats.entropy import ENTROPY, Entropy, NormalizedEntropy
from headwise.stats.largest import LARGEST, MaxLogit, Top1Mass
from headwise.stats.normalizer import LearnedSinkMass, LogSumExp
from headwise.stats.range_mass import LocalMass, NextMass, PreviousMass, RangeMass, SelfMass, SinkMass
from headwise.stats.received import COLUMN_MASS, ReceivedMass
from headwise.stats.registry import GIVEN, MEASURES, describe, known, of_tokens, register, resolve, shown_in
from headwise.stats.statistic import MASS, Compiled, Join, OfWeights, Part, Statistic
from headwise.stats.tokens import DuplicateMass, InductionMass, SameLabel
from headwise.stats.top import TopKeys, TopKMass, TopWeights
from headwise.stats.words import Chinese, Words

__all__ = [
    "COLUMN_MASS",
    "CONCENTRATION",
    "DISTANCE",
    "DISTANCE_VARIANCE",
    "ENTROPY",
    "GIVEN",
    "LARGEST",
    "MASS",
    "MEASURES",
    "SQUARES",
    "Chinese",
    "ClassMass",
    "Compiled",
    "DistanceVariance",
    "DuplicateMass",
    "EffectiveKeys",
    "Entropy",
    "InductionMass",
    "Join",
    "KeyWeights",
    "LearnedSinkMass",
    "LocalMass",
    "LogSumExp",
    "MaxLogit",
    "MeanDistance",
    "Measure",
    "Measurements",
    "NextMass",
    "NormalizedEntropy",
    "OfPieces",
    "OfWeights",
    "Part",
    "PreviousMass",
    "PunctuationMass",
    "RangeMass",
    "ReceivedMass",
    "RowMeasure",
    "SameLabel",
    "SelfMass",
    "SeparatorMass",
    "SinkMass",
    "SpecialMass",
    "SquaredWeights",
    "Statistic",
    "Tokens",
    "Top1Mass",
    "TopKMass",
    "TopKeys",
    "TopWeights",
    "Words",
    "describe",
    "known",
    "measure",
    "of_tokens",
    "register",
    "resolve",
    "row_measure",
    "shown_in",
    "statistics_for",
]
