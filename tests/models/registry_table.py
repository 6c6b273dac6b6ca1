"""What a run over every model type found: stored in a letter a check, and shown in docs/model_types.md."""

import json
import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("registry_results.jsonl")
LETTERS = {"pass": "p", "not applicable": "-", "refused": "r", "in part": "i", "wrong": "W", "crash": "C"}
STATUSES = {
    "pass": "every check that applies passes",
    "in part": (
        "right, and some of its attention modules compute by themselves: `attach` warns and lists them; an "
        "`nn.MultiheadAttention` among them is attached like any other"
    ),
    "refused": "`attach` or the first call raises `ConfigError` with the reason, and changes nothing",
    "wrong": "outputs differ, or a module keeps its own attention and nothing says so",
    "crash": "headwise fails without a reason of its own",
    "no attention": "convolutions, state spaces and other models without softmax attention",
    "not made": "no small model of it could be made, or called, in this run",
}

Row = dict[str, Any]


def read(path: Path) -> dict[str, Row]:
    """The rows by type; the last one of each counts."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return {row["type"]: row for row in rows if "type" in row}


def made_with(path: Path) -> dict[str, Any]:
    """The versions that the stored rows come from, and what the checks are."""
    return dict(json.loads(path.read_text(encoding="utf-8").partition("\n")[0]))


def short(row: Row) -> Row:
    """A row as it is stored: a letter a check, and the reason where headwise refused, differed or failed."""
    kept = {
        name: row[name] for name in ("type", "class", "size", "inputs", "status", "why", "arguments") if name in row
    }
    if "why" in kept:
        kept["why"] = kept["why"].partition(" || ")[0][:300]
    if "checks" in row:
        kept["checks"] = "".join(LETTERS[said.partition(":")[0]] for said in row["checks"].values())
        notes = {name: said for name, said in row["checks"].items() if LETTERS[said.partition(":")[0]] in "riWC"}
        if row["status"] in ("refused", "in part"):  # they all repeat why
            notes = {name: said for name, said in notes.items() if not said.startswith(row["status"])}
        kept |= {"notes": notes} if notes else {}
    return kept


def store(path: Path, rows: dict[str, Row], first: dict[str, Any]) -> None:
    """Write rows, one a line, ordered by type, after a line of versions and checks."""
    lines = [first, *(rows[name] for name in sorted(rows, key=str.lower))]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def markdown(first: dict[str, Any], rows: dict[str, Row]) -> str:
    """The part of docs/model_types.md that shows the stored rows."""
    counts = Counter(row["status"] for row in rows.values())
    checked = [row["checks"] for row in rows.values() if "checks" in row and row["status"] != "refused"]
    text = [
        f"Of the {len(rows)} model types of transformers {first['transformers']}:",
        "",
        *_table(["", "types", ""], [[name, str(counts[name]), means] for name, means in STATUSES.items()]),
        "",
        "The checks, and of how many types each passes, is refused or holds in part, or does not apply:",
        "",
        *_table(["check", "pass", "refused or in part", "not applicable", ""], [
            [name, *(str(sum(letters[at] in kind for letters in checked)) for kind in ("p", "ri", "-")), means]
            for at, (name, means) in enumerate(first["checks"].items())
        ]),
        "",
        f"**Pass:** {_names(rows, 'pass')}.",
        "",
    ]  # fmt: skip
    for status in ("wrong", "crash"):
        if counts[status]:
            found = [[row["type"], _cell(_why(row))] for row in rows.values() if row["status"] == status]
            text += [f"**{status.capitalize()}:**", "", *_table(["type", "what"], found), ""]
    text += ["**In part:**", "", *_table(["types", "what"], _by_reason(rows, "in part")), ""]
    notes = [[row["type"], name, _cell(said)] for row in rows.values() if row["status"] in ("pass", "in part")
             for name, said in row.get("notes", {}).items()]  # fmt: skip
    if notes:
        text += ["Of these and of those that pass, single checks:", "", *_table(["type", "check", "what"], notes), ""]
    text += ["**Refused:**", "", *_table(["types", "why"], _by_reason(rows, "refused")), ""]
    text += [f"**No attention:** {_names(rows, 'no attention')}.", ""]
    text += ["**Not made:**", "", *_table(["types", "why"], _by_reason(rows, "not made"))]
    return "\n".join(text)


def _names(rows: dict[str, Row], status: str) -> str:
    return ", ".join(row["type"] for row in rows.values() if row["status"] == status)


def _why(row: Row) -> str:
    return row.get("why") or "; ".join(f"{name}: {said}" for name, said in row.get("notes", {}).items())


# What many reasons have in common; the first that fits stands for the whole.
_KINDS = (
    (r"computes its attention by itself", "it computes its attention by itself"),
    (r"requires the (\w+) library", r"it needs the package \1"),
    (r"LookupError: no model of transformers has", "a configuration for a part that is no model of its own"),
    (r"MemoryError", "no size of it has less than 60 million parameters"),
    (r"calls its attention with (\w+)=…", r"its attention is called with \1=…, which headwise does not know"),
    (r"attention modules compute by themselves: (.*)", r"\1"),
    (r"no inputs found|missing \d+ required positional arguments?", "this run finds no inputs for it"),
    (r"^tiny: (?:configuration|model): ", "this run finds no small configuration of it"),
    (r"^tiny: |TypeError: unhashable", "this run finds no inputs for it"),
    (r"ValueError: Could not find", "a class that the installed transformers does not have"),
)


def _by_reason(rows: dict[str, Row], status: str) -> list[list[str]]:
    """Types with one reason in one line."""
    found: dict[str, list[str]] = {}
    for row in rows.values():
        if row["status"] == status:
            why = _cell(_why(row))
            for pattern, instead in _KINDS:
                if match := re.search(pattern, why):
                    why = match.expand(instead)
                    break
            found.setdefault(why, []).append(row["type"])
    return [[", ".join(types), why] for why, types in sorted(found.items(), key=lambda item: -len(item[1]))]


def _cell(text: str) -> str:
    return textwrap.shorten(text.replace("|", "/"), 200, placeholder=" …")


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]
