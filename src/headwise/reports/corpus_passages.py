"""Passages of a corpus as data of a page, and as lines in a terminal."""

import json
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from headwise.analysis.checks import head_name
from headwise.corpus.passages import CorpusPassage, Passages
from headwise.reports.corpus_words import PLACES, TERMINAL, by_name
from headwise.reports.data import visible
from headwise.reports.pack import blob
from headwise.reports.words import unit
from headwise.wording import in_language, language

BLOB = "corpus-passages"
LINES = 5  # heads in a terminal


def passages_data(passages: Passages, lang: str) -> tuple[dict[str, Any], str, str]:
    """What a page says of the strengths, the passages of all heads as a compressed element, and their characters."""
    heads = {
        f"{layer}-{head}": {
            part: [vars(one) | {"where": _where(one.where, lang)} for one in getattr(found, part)]
            for part in ("strongest", "sampled")
        }
        for (layer, head), found in passages.items()
    }
    about = {"by": passages.by, "name": in_language(by_name(passages.by), lang), "unit": unit(passages.unit, lang)}
    code = json.dumps(heads, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return about, blob(BLOB, code.encode("utf-8", "replace")), "".join(sorted(set(code)))


def print_passages(passages: Passages, console: Console) -> None:
    """Print a line for each of the heads that attend strongly in few passages; nothing without such heads."""
    places = passages.distinctive(LINES)
    if not places:
        return
    lang = language()
    title = TERMINAL["distinctive"][lang == "zh"].format(by=in_language(by_name(passages.by), lang))
    console.print()
    console.print(Text(title, style="bold"), soft_wrap=True)
    for layer, head in places:
        console.print(_line(head_name(layer, head), passages, (layer, head), console.width), soft_wrap=True)


def _line(name: str, passages: Passages, place: tuple[int, int], width: int) -> Text:
    found = passages[place]
    best = found.strongest[0]
    usual = sum(one.strength for one in found.sampled) / len(found.sampled) if found.sampled else 0.0
    key = next((key for key in best.keys if key.position not in (0, best.query)), None)
    pair = f"{_token(best.token)} → {_token(key.token)}" if key is not None else _token(best.token)
    start = f"{name:>7}  {best.strength:.3g} ({usual:.3g})  {pair}  "
    room = width - cell_len(start) - 1
    return Text(start) + Text(set_cell_size(_around(best, room), max(0, room)).rstrip() if room > 8 else "", "dim")


def _around(one: CorpusPassage, room: int) -> str:
    """The text around the query, which is in the middle."""
    at = one.positions.index(one.query)
    before, after = ("".join(map(_plain, part)) for part in (one.tokens[:at], one.tokens[at:]))
    half = room // 2
    while cell_len(before) > half:
        before = before[1:]
    return f"…{before.replace('␣', ' ')}{after.replace('␣', ' ')}"


def _token(text: str) -> str:
    return f"“{_plain(text.strip() or text)}”"


def _plain(text: str) -> str:
    """As `visible`, and with nothing that could change the order of a terminal's line."""
    return "".join(c if c.isprintable() else "·" for c in visible(text.replace("\u3000", " ")))


def _where(where: str, lang: str) -> str:
    """ "byte 4,096" or "row 3" of a file, in that language."""
    kind, _, number = where.partition(" ")
    return PLACES[kind][lang == "zh"].format(at=number) if kind in PLACES else where
