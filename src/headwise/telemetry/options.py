"""The options of `watch`, validated once."""

from collections.abc import Sequence
from dataclasses import dataclass

from headwise.errors import ConfigError, check_choice
from headwise.stats import Measure, resolve, shown_in
from headwise.telemetry.alarms import Alarm

_CHOICES = {
    "maps": ("none", "lazy", "pooled"),
    "steps": ("forward", "manual"),
    "during": ("always", "training", "evaluation"),
    "on_error": ("warn", "raise"),
}


@dataclass(frozen=True)
class Options:
    """The arguments of `watch`, except for the model and its layers.

    Attributes:
        names: of the measures, in the order of `measures`.
    """

    names: tuple[str, ...]
    measures: tuple[Measure, ...]
    every: int
    heads: tuple[int, ...] | None
    maps: str
    values: bool
    history: int
    steps: str
    during: str
    alarms: tuple[Alarm, ...]
    on_error: str


def options(
    *, measures: Sequence[str | Measure] | None, every: int, heads: Sequence[int] | None, maps: str, values: bool,
    history: int, steps: str, during: str, alarms: Sequence[Alarm], on_error: str,
) -> Options:  # fmt: skip
    """The validated options; raises a ConfigError that names the invalid one."""
    for name, value in (("maps", maps), ("steps", steps), ("during", during), ("on_error", on_error)):
        check_choice(name, value, _CHOICES[name])
    for name, number in (("every", every), ("history", history)):
        if type(number) is not int or number < 1:
            raise ConfigError(f"{name}={number!r}: expected an integer of at least 1")
    if type(values) is not bool or (values and maps != "lazy"):
        raise ConfigError(
            f"values={values!r} with maps={maps!r}: expected True or False; values=True needs maps='lazy'"
        )
    chosen = None if heads is None else tuple(heads)
    if chosen is not None and (
        not chosen or len(set(chosen)) < len(chosen) or any(type(head) is not int or head < 0 for head in chosen)
    ):
        raise ConfigError(f"heads={heads!r}: expected head numbers from 0 on, each once; None for all")
    for alarm in alarms:
        if not isinstance(alarm, Alarm):
            raise ConfigError(f"alarms: expected alarms such as MaxLogitAlarm(100.0), got {type(alarm).__name__}")
    if measures is None:
        measures = shown_in("watch")
    asked = [measures] if isinstance(measures, str | Measure) else list(measures)
    known = [one.name if isinstance(one, Measure) else one for one in asked]
    asked += [name for name in dict.fromkeys(name for alarm in alarms for name in alarm.needs) if name not in known]
    if not asked:
        raise ConfigError("measures=(): give at least one; `headwise measures` lists them")
    found = tuple(resolve(asked))
    names = tuple(measure.name for measure in found)
    return Options(names, found, every, chosen, maps, values, history, steps, during, tuple(alarms), on_error)
