"""What a measure is called, and what it is, in the languages of the reports."""

import re
from typing import Any, NamedTuple

from headwise.wording import Bilingual

UNITS = {
    "nats": "奈特", "share": "比例", "keys": "个键", "logit": "分数", "tokens": "个词元", "tokens²": "词元²",
    "mass": "权重", "probability": "概率", "loss": "损失",
}  # fmt: skip
RANGES = {"any": "任意", "0 to 1": "0 至 1", "≥ 0": "≥ 0"}


def unit_of(unit: str) -> Bilingual:
    """A unit in both languages."""
    return Bilingual(unit, UNITS.get(unit, unit))


class Chinese(NamedTuple):
    """A measure in Chinese; its unit and range only where `UNITS` and `RANGES` lack them."""

    label: str
    about: str
    unit: str = ""
    range: str = ""


class Words(NamedTuple):
    """A measure in one language, as reports show it.

    Attributes:
        label: its name in words; short: the same for a narrow column.
        about: what it is; summary: the first sentence of that.
    """

    label: str
    short: str
    about: str
    summary: str
    unit: str
    range: str


def words_of(measure: Any, lang: str) -> Words:
    """The words of a measure, or of a class of measures, in English ("en") or Chinese ("zh"); its name and description
    are in English where its class has no Chinese."""
    kind = measure if isinstance(measure, type) else type(measure)
    text = re.sub(r"\s+", " ", (kind.__doc__ or "").split("\n\n")[0]).strip()
    summary = re.split(r"(?<=[.:;])\s", text, maxsplit=1)[0].rstrip(":;")
    label = measure.label or measure.name.replace("_", " ")
    english = Words(label, measure.short or label, text, summary, measure.unit, measure.range)
    if lang != "zh":
        return english
    unit, range = UNITS.get(measure.unit, measure.unit), RANGES.get(measure.range, measure.range)
    chinese: Chinese | None = measure.chinese
    if chinese is None:
        return english._replace(unit=unit, range=range)
    summary = re.split(r"(?<=[。；：])", chinese.about, maxsplit=1)[0].rstrip("；：")
    return Words(
        chinese.label, chinese.label, chinese.about, summary, chinese.unit or unit, chinese.range or range
    )  # fmt: skip
