"""The measures that are known by name. A new one is a class in its file and a line here."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from headwise.errors import ConfigError, unknown_name
from headwise.stats import keys, places, weights
from headwise.stats.base import PLACES, Measure, Tokens, Words, words_of
from headwise.wording import language_of, tr

MEASURES: dict[str, Callable[[], Measure]] = {}
# Known by name, but in need of something that only the caller has: the tokens.
GIVEN: dict[str, type[Measure]] = {}

Kind = TypeVar("Kind", bound=type[Measure])


def register(kind: Kind) -> Kind:
    """Make a class of measures known by its name, everywhere that measures are named, listed or shown; returns it, so
    that it can be a decorator.

    Raises:
        ConfigError: if it is no class of measures, if another one has the name, if its docstring, unit, range or source
            is empty, or if `shown` names another place than those of `PLACES`.
    """
    if not (isinstance(kind, type) and issubclass(kind, Measure)):
        raise ConfigError(f"register(kind): expected a class of Measure, got {kind!r}")
    if (MEASURES | GIVEN).get(kind.name, kind) is not kind:
        raise ConfigError(f"register({kind.__name__}): there is another measure {kind.name!r}; give it another name")
    given = {name: getattr(kind, name) for name in ("name", "unit", "range", "source")} | {"docstring": kind.__doc__}
    missing = [name for name, value in given.items() if not (isinstance(value, str) and value.strip())]
    if missing:
        raise ConfigError(f"register({kind.__name__}): expected words in {', '.join(missing)}, which reports show")
    if unknown := [place for place in kind.shown if place not in PLACES]:
        raise ConfigError(
            f"register({kind.__name__}): shown={{{unknown[0]!r}: …}}: no such place; expected "
            f"{', '.join(map(repr, PLACES))}"
        )
    if kind.requires:
        GIVEN[kind.name] = kind
    else:
        MEASURES[kind.name] = kind
    return kind


for _kind in (
    weights.MaxLogit, weights.LogSumExp, weights.Entropy, weights.NormalizedEntropy, weights.EffectiveKeys,
    weights.SquaredWeights, weights.Top1Mass, weights.TopKMass, weights.LearnedSinkMass,
    places.MeanDistance, places.DistanceVariance, places.LocalMass, places.SinkMass, places.PreviousMass,
    places.SelfMass, places.NextMass,
    keys.ReceivedMass, keys.ClassMass, keys.PunctuationMass, keys.SeparatorMass, keys.SpecialMass, keys.DuplicateMass,
    keys.InductionMass,
):  # fmt: skip
    register(_kind)


def resolve(wanted: Sequence[str | Measure]) -> list[Measure]:
    """Names and measures as measures, each name once."""
    if isinstance(wanted, str):
        wanted = (wanted,)
    found: list[Measure] = []
    for item in wanted:
        if isinstance(item, Measure):
            found.append(item)
        elif not isinstance(item, str):
            raise ConfigError(f"measures: expected names or Measures, each its own argument or item; got {item!r}")
        elif item in MEASURES:
            found.append(MEASURES[item]())
        elif item in GIVEN:
            raise ConfigError(f"measure {item!r} requires the tokens; give {GIVEN[item].requires}")
        else:
            raise _unknown(item)
    names = [m.name for m in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"measure {twice.pop()!r} is requested twice; give one of them another name")
    return found


def shown_in(place: str) -> tuple[str, ...]:
    """The measures that are shown there without being named, in their order: in a "report" or the "viewer", by "watch",
    or of a "corpus"."""
    order = {name: kind.shown[place] for name in (*MEASURES, *GIVEN) if place in (kind := known(name)).shown}
    return tuple(sorted(order, key=order.__getitem__))


def of_tokens(name: str, tokens: Tokens) -> Measure | None:
    """The measure of that name for an input with these tokens; None if they do not say what it requires.

    Raises:
        ConfigError: for an unknown name, with those that are near.
    """
    if name in GIVEN:
        return GIVEN[name].of(tokens)
    if name in MEASURES:
        return MEASURES[name]()
    raise _unknown(name)


def _unknown(name: object) -> ConfigError:
    return unknown_name("measure", name, [*MEASURES, *GIVEN], listed=tr("`headwise measures` lists all"))


def known(name: str) -> Any:
    """The class of the measures of that name, or one of them, for its attributes; None for an unknown one."""
    kind = GIVEN.get(name) or MEASURES.get(name)
    return kind if kind is None or isinstance(kind, type) else kind()


def describe(name: str, lang: str | None = None) -> Words | None:
    """What the measure of that name is called and what it is, in English ("en") or Chinese ("zh"), by default in
    the language of the locale; None for an unknown one."""
    found = known(name)
    return None if found is None else words_of(found, language_of(lang))
