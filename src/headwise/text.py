"""Texts in English whose Chinese is looked up in a catalogue when they are shown.

>>> text = tr("{count} of {of} KV heads", count=3, of=32)
>>> text, in_language(text, "zh")
('3 of 32 KV heads', '32 个键值头中的 3 个')
>>> trn("{count:,} token", "{count:,} tokens", count=1200).zh
'1,200 个词元'

The catalogue of a package is `locale/zh/LC_MESSAGES/<package>.po` beside its modules, a file of gettext that is read as
it is, at first use. A text of a package is looked up in its own catalogue, then in that of headwise.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from numbers import Number
from pathlib import Path
from typing import Any

__all__ = ["BLANK", "COMMA", "LIST", "Bilingual", "Message", "in_language", "joined", "looked_up", "tr", "trn"]

OURS = "headwise"


class Bilingual(str):
    """An English string with its Chinese version in `zh`, for texts that are data in both languages."""

    zh: str

    def __new__(cls, en: str, zh: str) -> "Bilingual":
        """The string `en` with the attribute `zh`."""
        made = super().__new__(cls, en)
        made.zh = zh
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return str(self), self.zh


class Message(Bilingual):
    """An English text made from a template, which keeps the template and its values.

    Attributes:
        template: of `str.format`; without values, the text itself. many: that for a `count` other than 1, or "".
        values: what the template is filled with; texts among them follow the language.
        sense: tells texts apart that are equal in English. domain: the package that brings the text.
        code: the name of a sentence in a table.
    """

    template: str
    values: Mapping[str, Any]
    sense: str
    many: str
    domain: str
    code: str

    def __new__(
        cls, template: str, values: Mapping[str, Any] | None = None, sense: str = "", many: str = "",
        domain: str = OURS, code: str = "",
    ) -> "Message":  # fmt: skip
        """The English text; `tr` and `trn` make it."""
        kept = {name: _kept(value) for name, value in (values or {}).items()}
        form = many if many and kept["count"] != 1 else template
        made = str.__new__(cls, form.format(**kept) if kept else form)
        made.template, made.values, made.sense = template, kept, sense
        made.many, made.domain, made.code = many, domain, code
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.template, self.values, self.sense, self.many, self.domain, self.code

    @property
    def zh(self) -> str:  # type: ignore[override]
        """The text in Chinese; in English where no catalogue has it."""
        found = looked_up(self.template, self.domain, self.sense)
        if found is None and not any(isinstance(value, Bilingual) for value in self.values.values()):
            return str(self)
        chinese = {name: in_language(x, "zh") if isinstance(x, str) else x for name, x in self.values.items()}
        form = found or (self.many if self.many and chinese["count"] != 1 else self.template)
        try:
            return form.format(**chinese) if chinese else form
        except (LookupError, ValueError):  # a catalogue of others may name what the text has not
            return str(self)

    def filled(self, code: str = "", /, **values: Any) -> "Message":
        """The text of this template with values; code: its name in a table."""
        return Message(self.template, values, self.sense, self.many, self.domain, code)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: text, zh, code and values, which may be texts themselves."""
        named = ((name, x) for name, x in self.values.items() if not name.startswith("_"))  # not those of `joined`
        values = {name: x.to_dict() if isinstance(x, Message) else x for name, x in named}
        return {"text": str(self), "zh": self.zh, "code": self.code, "values": values}


class _Shown(str):
    """What a value looks like that is neither text nor number: a text need not keep the value itself."""

    shown: str

    def __new__(cls, plain: str, shown: str) -> "_Shown":
        made = super().__new__(cls, plain)
        made.shown = shown
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return str(self), self.shown

    def __repr__(self) -> str:
        return self.shown


def caller() -> str:
    """The package of the code that calls the function that calls this."""
    name: str = sys._getframe(2).f_globals.get("__name__", OURS)
    return name.partition(".")[0]


def _kept(value: Any) -> Any:
    """A value as a text keeps it: numbers and text as they are, an error by its text, anything else as it looks."""
    if isinstance(value, BaseException) and value.args and isinstance(value.args[0], Bilingual):
        value = value.args[0]
    if value is None or isinstance(value, (str, Number)):
        return value
    return _Shown(str(value), repr(value))


def tr(template: str, /, *, sense: str = "", **values: Any) -> Message:
    """A text in English, to be shown in the reader's language.

    Args:
        template: the English text, a literal, so that `scripts/messages.py` finds it; with values, as in `str.format`.
        sense: tells texts apart that are equal in English and differ in Chinese.
        values: what stands in the template; texts among them are shown in the same language.
    Returns:
        The text; `in_language` and its `zh` look it up.
    """
    return Message(template, values, sense, "", caller())


def trn(one: str, many: str, /, *, count: int, sense: str = "", **values: Any) -> Message:
    """A text as `tr` makes it, with a plural.

    Args:
        one, many: the template for a count of 1, and that for all others; literals.
        count: a value of both. sense, values: as for `tr`.
    Returns:
        The text.
    """
    return Message(one, {"count": count, **values}, sense, many, caller())


COMMA = tr(", ")
LIST = tr(", ", sense="list")
BLANK = Bilingual(" ", "")  # between sentences


def joined(parts: Iterable[str], separator: str = COMMA) -> Message:
    """Texts in one, with a separator between them, all in the language in which they are shown: `COMMA` between
    phrases, `LIST` between names, or another `tr(…)`."""
    every = {f"_{i}": part for i, part in enumerate(parts)}
    return Message("{_by}".join(f"{{{name}}}" for name in every), {**every, "_by": separator})


def in_language(text: str, lang: str) -> str:
    """The text in that language, "en" or "zh", if it has a version in it, otherwise the text itself."""
    return text.zh if lang == "zh" and isinstance(text, Bilingual) else text


def looked_up(template: str, domain: str = OURS, sense: str = "") -> str | None:
    """The Chinese of an English template.

    Args:
        template: the English text. domain: the package whose catalogue is read before ours. sense: as for `tr`.
    Returns:
        The template in Chinese; None if neither catalogue has it.
    """
    return _catalogue(domain).get((sense, template)) or _catalogue(OURS).get((sense, template))


@cache
def _catalogue(package: str) -> dict[tuple[str, str], str]:
    """Sense and English → Chinese, of the .po of a package or a module alone; empty if it has none."""
    found: dict[tuple[str, str], str] = {}
    module = sys.modules.get(package)
    beside = [Path(alone).parent] if (alone := getattr(module, "__file__", None)) else []
    for folder in getattr(module, "__path__", beside):
        file = Path(folder, "locale", "zh", "LC_MESSAGES", f"{package}.po")
        if file.is_file():
            found |= entries(file.read_text(encoding="utf-8"))
    return found


def entries(po: str) -> dict[tuple[str, str], str]:
    """Sense and English → Chinese of a catalogue; entries that are fuzzy, obsolete or without Chinese are left out."""
    found: dict[tuple[str, str], str] = {}
    part: dict[str, str] = {}
    key = ""
    for line in [*po.split("\n"), ""]:
        if line.startswith(("msg", '"')):
            key, _, quoted = line.partition(" ") if line.startswith("msg") else (key, "", line)
            try:
                part[key] = part.get(key, "") + (json.loads(quoted) if "\\" in quoted else quoted[1:-1])
            except ValueError:
                part["fuzzy"] = line
        elif line.startswith("#,") and "fuzzy" in line:
            part["fuzzy"] = line
        elif not line.strip():
            if (chinese := part.get("msgstr") or part.get("msgstr[0]")) and part.get("msgid") and "fuzzy" not in part:
                found[part.get("msgctxt", ""), part["msgid"]] = chinese
            part = {}
    return found
