"""The measures that are called by name. A new one is a class in its file and a line here."""

from collections.abc import Callable, Sequence

from headwise.errors import ConfigError
from headwise.stats import pattern, reach, spread, tokens
from headwise.stats.base import Measure

MEASURES: dict[str, Callable[[], Measure]] = {
    "max_logit": spread.MaxLogit,
    "logsumexp": spread.LogSumExp,
    "entropy": spread.Entropy,
    "normalized_entropy": spread.NormalizedEntropy,
    "effective_keys": spread.EffectiveKeys,
    "top1_mass": spread.Top1Mass,
    "topk_mass": spread.TopKMass,
    "learned_sink_mass": spread.LearnedSinkMass,
    "mean_distance": reach.MeanDistance,
    "distance_variance": reach.DistanceVariance,
    "local_mass": reach.LocalMass,
    "sink_mass": pattern.SinkMass,
    "previous_mass": pattern.PreviousMass,
    "self_mass": pattern.SelfMass,
    "next_mass": pattern.NextMass,
    "received_mass": pattern.ReceivedMass,
}
# Known by name, but in need of something that only the caller has.
GIVEN: dict[str, tuple[type[Measure], str]] = {
    "class_mass": (
        pattern.ClassMass,
        "ClassMass(members) with a boolean [m] or [b, m], or ClassMass.of_tokens(tokens, 'punctuation')",
    ),
    "duplicate_mass": (tokens.DuplicateMass, "DuplicateMass(ids) with integer tokens [m] or [b, m]"),
    "induction_mass": (tokens.InductionMass, "InductionMass(ids) with integer tokens [m] or [b, m]"),
}


def resolve(wanted: Sequence[str | Measure]) -> list[Measure]:
    """Names and measures as measures, each name once."""
    if isinstance(wanted, str):
        wanted = (wanted,)
    found: list[Measure] = []
    for item in wanted:
        if isinstance(item, Measure):
            found.append(item)
        elif item in MEASURES:
            found.append(MEASURES[item]())
        elif item in GIVEN:
            raise ConfigError(f"measure {item!r} needs to be told of the tokens; give {GIVEN[item][1]}")
        else:
            raise ConfigError(f"unknown measure {item!r}; known are {', '.join([*MEASURES, *GIVEN])}")
    names = [m.name for m in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"measure {twice.pop()!r} is asked for twice; give one of them another name")
    return found
