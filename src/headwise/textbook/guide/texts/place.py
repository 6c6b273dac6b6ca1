"""A place in a textbook: a section, an equation, a listing, a table or a figure, and what in headwise shows it."""

from dataclasses import dataclass

from headwise.wording import Bilingual

KINDS = {
    "section": Bilingual("section", "节"),
    "equation": Bilingual("equation", "公式"),
    "listing": Bilingual("listing", "代码"),
    "table": Bilingual("table", "表"),
    "figure": Bilingual("figure", "图"),
}


@dataclass(frozen=True)
class Place:
    """One place of a text.

    Attributes:
        key: such as "11.2.1", "(5.3.4)" or "tutorial 2". kind: a key of `KINDS`. what: its content in our words.
        topic: the topic of the guide. code: an expression or statements whose output is this place's result; without
            it, the verdicts of `claims` are.
        claims: ids of claims made there. works: whether headwise gives what the text says. why: where it does not.
        command: another command than `headwise tour KEY`.
    """

    key: str
    kind: str
    what: Bilingual
    topic: str
    code: str = ""
    claims: tuple[str, ...] = ()
    works: bool = True
    why: Bilingual | None = None
    command: str = ""
