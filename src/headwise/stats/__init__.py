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

from headwise.stats.base import Measure, RowMeasure, Tokens, Words, row_measure
from headwise.stats.engine import Measurements, measure, statistics_for
from headwise.stats.keys import (
    COLUMN_MASS,
    ClassMass,
    DuplicateMass,
    InductionMass,
    KeyWeights,
    LargestOther,
    OfPieces,
    PunctuationMass,
    ReceivedMass,
    SameLabel,
    SeparatorMass,
    SpecialMass,
)
from headwise.stats.places import (
    DISTANCE,
    DISTANCE_VARIANCE,
    DistanceVariance,
    LocalMass,
    MeanDistance,
    NextMass,
    PreviousMass,
    RangeMass,
    SelfMass,
    SinkMass,
)
from headwise.stats.registry import GIVEN, MEASURES, describe, known, of_tokens, register, resolve, shown_in
from headwise.stats.statistic import MASS, Compiled, Join, OfWeights, Part, Statistic
from headwise.stats.weights import (
    CONCENTRATION,
    ENTROPY,
    LARGEST,
    SQUARES,
    EffectiveKeys,
    Entropy,
    LearnedSinkMass,
    LogSumExp,
    MaxLogit,
    NormalizedEntropy,
    SquaredWeights,
    Top1Mass,
    TopKeys,
    TopKMass,
    TopWeights,
)

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
    "ClassMass",
    "Compiled",
    "DistanceVariance",
    "DuplicateMass",
    "EffectiveKeys",
    "Entropy",
    "InductionMass",
    "Join",
    "KeyWeights",
    "LargestOther",
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
