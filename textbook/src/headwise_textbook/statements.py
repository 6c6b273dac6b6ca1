"""The table of statements: what the five texts say at each place, the verdict, and the claim that shows it.

A row for every section, equation, table, listing and figure, and for single sentences that are statements of their own.
Most words are those with which claims cite the place; statements.toml has the rest, and the reasons why some statements
cannot be judged.

>>> found = statements()
>>> len(found), [one.where for one in found if one.single][:2]
(153, ['book chapter 11.2.4, item 7', 'book chapter 11.7.2, item 2'])
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwise.errors import ConfigError
from headwise.wording import BLANK, Bilingual, in_language, joined, tr
from headwise_textbook.claims import Claim, choose
from headwise_textbook.places import Row, paged, rows
from headwise_textbook.texts import TEXTS, place, read_toml, words
from headwise_textbook.topics import cell

NOTHING = Bilingual("", "")
# Of the page: its title, the heads of the columns, and two sentences.
HEAD = (
    tr("Statements and verdicts"), tr("place"), tr("what the text says"), tr("verdict"),
    tr("shown by, or why not judged"),
    tr(
        "Every section, equation, table, listing and figure of five texts on multi-head attention, and sentences that "
        "are statements of their own. Verdicts follow from measurements ([claims](../../claims.md)). Made by "
        "`python scripts/guide.py`."
    ),
)  # fmt: skip
COUNTED = tr("{count} statements: {judged} judged by {claims} claims, {left} not judged, with the reason.")
NOT_JUDGED = tr("not judged")


@dataclass(frozen=True)
class Statement:
    """What a text says at one place."""

    text: str  # the id of the text
    where: Bilingual
    says: tuple[Bilingual, ...]  # in our words: all that each claim cites, or one for all
    claims: tuple[Claim, ...]
    why: Bilingual = NOTHING  # the reason why it, or what the claims leave, is not judged
    single: bool = False  # a sentence rather than a place


def statements() -> list[Statement]:
    """All statements, text by text. ConfigError if one has neither a claim nor a reason, or no words."""
    told = read_toml(__package__, "statements.toml")
    shown = {
        (entry["text"], entry["section"], entry.get("kind", "section"), number): entry
        for entry in told["shown"]
        for number in entry.get("numbers", [""])
    }
    singles = [_single(entry) for entry in told["single"]]
    own = {(one.where, claim.id) for one in singles for claim in one.claims}
    every = [
        _of_row(row, shown.pop((row.text.id, row.section.number, row.kind, row.number), {}), own) for row in rows()
    ]
    if shown:
        raise ConfigError(f"statements.toml: {' '.join(next(iter(shown)))} is no place of the texts")
    found = [one for text in TEXTS for one in (*every, *singles) if one.text == text]
    for one in found:
        if not one.says or not (one.claims or one.why):
            raise ConfigError(f"{one.where}: no words, or neither claim nor reason; expected them in statements.toml")
    return found


def table(lang: str) -> str:
    """The page of all statements."""
    title, *head, lead = (in_language(part, lang) for part in HEAD)
    found = statements()
    judged = [one for one in found if one.claims]
    used = Counter(claim.id for one in judged for claim in one.claims)
    count = COUNTED.filled(count=len(found), judged=len(judged), claims=len(used), left=len(found) - len(judged))
    lines = [(one.text, _line(one, lang)) for one in found]
    return paged("statements", lang, [title, lead, in_language(count, lang)], [("", head), *lines])


def _line(one: Statement, lang: str) -> list[str]:
    says = "<br>".join(cell(in_language(part, lang)) for part in one.says)
    verdicts = "<br>".join(in_language(claim.expected.words, lang) for claim in one.claims)
    by = [claim.id for claim in one.claims]
    if one.why:
        by.append(
            in_language(joined([NOT_JUDGED, one.why], tr(": ")), lang) if one.claims else in_language(one.why, lang)
        )
    return [in_language(one.where, lang), says, verdicts or in_language(NOT_JUDGED, lang), "<br>".join(map(cell, by))]


def _single(entry: Mapping[str, Any]) -> Statement:
    """A sentence; its words are those of its first claim unless it has others."""
    where = {name: value for name, value in entry.items() if name not in ("claims", "why", "en", "zh")}
    claims = tuple(choose(entry.get("claims", ()))) if "claims" in entry else ()
    here = place({"en": entry.get("en", ""), "zh": entry.get("zh", ""), **where})
    cited = [at.says for claim in claims for at in claim.places if at.where == here.where]
    says = (here.says,) if "en" in entry else tuple(cited[:1])
    return Statement(here.text, here.where, says, claims, _why(entry), single=True)


def _of_row(row: Row, entry: Mapping[str, Any], own: set[tuple[Bilingual, str]]) -> Statement:
    """A place: the words and claims that cite it, without those of single sentences unless there are no others."""
    if "en" in entry:
        claims = tuple(choose(entry["claims"])) if "claims" in entry else ()
        return Statement(row.text.id, row.where, (words(entry),), claims, _why(entry))
    said: dict[Claim, list[Bilingual]] = {}
    for at, claim in [one for one in row.cited if (one[0].where, one[1].id) not in own] or row.cited:
        said.setdefault(claim, []).append(at.says)
    says = tuple(joined(dict.fromkeys(parts), BLANK) for parts in said.values())
    return Statement(row.text.id, row.where, says, tuple(said), _why(entry))


def _why(entry: Mapping[str, Any]) -> Bilingual:
    return words(entry["why"]) if "why" in entry else NOTHING
