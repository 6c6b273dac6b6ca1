"""What a run over every model type found: stored in few letters, and shown in docs/models.md."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("registry_results.jsonl")
LETTERS = {"pass": "p", "not applicable": "-", "refused": "r", "in part": "i", "wrong": "W", "crash": "C"}
STATUSES = "pass", "in part", "refused", "wrong", "crash", "no attention", "not made"

Row = dict[str, Any]


def read(path: Path) -> dict[str, Row]:
    """The rows by type; the last one of each counts."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return {row["type"]: row for row in rows if "type" in row}


def versions(path: Path) -> dict[str, str]:
    """Of what the stored rows were made with."""
    return json.loads(path.read_text(encoding="utf-8").partition("\n")[0])


def short(row: Row) -> Row:
    """A row as it is stored: a letter a check, and why where it did not pass, wherever that is headwise's doing."""
    kept = {name: row[name] for name in ("type", "class", "size", "inputs", "status", "why") if name in row}
    if "why" in kept:
        kept["why"] = kept["why"].partition(" || ")[0][:300]
    if "checks" in row:
        kept["checks"] = "".join(LETTERS[said.partition(":")[0]] for said in row["checks"].values())
        notes = {name: said for name, said in row["checks"].items() if LETTERS[said.partition(":")[0]] in "riWC"}
        kept |= {"notes": notes} if notes else {}
    return kept


def store(path: Path, rows: dict[str, Row], made_with: dict[str, Any]) -> None:
    """Write the rows, one a line, ordered by type, after a line of versions and the names of the checks."""
    lines = [made_with, *(rows[name] for name in sorted(rows, key=str.lower))]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def markdown(made_with: dict[str, Any], rows: dict[str, Row]) -> str:
    """The part of docs/models.md that says what was found."""
    counts = Counter(row["status"] for row in rows.values())
    checks = made_with["checks"]
    text = [
        f"transformers {made_with['transformers']} knows {len(rows)} model types, parts of models included.",
        "",
        *_table(["", "types", ""], [[status, str(counts[status]), _MEANS[status]] for status in STATUSES]),
        "",
        "What is checked, and of how many types:",
        "",
        *_table(["check", "pass", "refused", "wrong", "not applicable", ""], [
            [name, *(str(sum(row.get("checks", "")[at : at + 1] in letters for row in rows.values() if "checks" in row))
                     for letters in ("p", "r", ("W", "C"), "-")), made_with["checks"][name]]
            for at, name in enumerate(checks)
        ]),
        "",
    ]  # fmt: skip
    text += ["**Pass:** " + _names(rows, "pass"), ""]
    for status in ("wrong", "crash"):
        if counts[status]:
            found = [[row["type"], row.get("why") or "; ".join(f"{k}: {v}" for k, v in row.get("notes", {}).items())]
                     for row in rows.values() if row["status"] == status]  # fmt: skip
            text += [f"**{status.capitalize()}:**", "", *_table(["type", "what"], found), ""]
    text += ["**Refused**, and why:", "", *_table(["types", "why"], _by_reason(rows, "refused")), ""]
    partly = {row["type"]: {"status": "partly", "why": next(iter(row["notes"].values())).partition(": ")[2], **row}
              for row in rows.values() if row["status"] == "pass" and "notes" in row}  # fmt: skip
    if partly:
        text += ["**Passes, but something of it is refused:**", "",
                 *_table(["type", "check", "why"], [[name, ", ".join(row["notes"]), _cell(row["why"])]
                                                    for name, row in partly.items()]), ""]  # fmt: skip
    text += ["**No attention:** " + _names(rows, "no attention"), ""]
    text += ["**Not made here**, and why:", "", *_table(["type", "why"], [
        [row["type"], _cell(row["why"])] for row in rows.values() if row["status"] == "not made"
    ])]  # fmt: skip
    return "\n".join(text)


_MEANS = {
    "pass": "every check that applies passes",
    "in part": "`switch` leaves some of its attention modules to compute by themselves; the others are computed here",
    "refused": "`switch`, or the first call, says why headwise does not compute it; nothing is changed",
    "wrong": "headwise computes something else",
    "crash": "headwise fails with no reason given",
    "no attention": "nothing to compute here: convolutions, state spaces, tables",
    "not made": "no small model of it could be made or called in this run",
}


def _names(rows: dict[str, Row], status: str) -> str:
    return ", ".join(row["type"] for row in rows.values() if row["status"] == status) + "."


def _by_reason(rows: dict[str, Row], status: str) -> list[list[str]]:
    """Types with one reason in one line; names of classes in a reason do not tell two apart."""
    found: dict[str, list[str]] = {}
    for row in rows.values():
        if row["status"] == status:
            why = re.sub(r"^switch\(model\): ", "", row["why"])
            why = re.sub(r"\b[A-Z]\w*[a-z]\w*[A-Z]\w*\b", "…", why)
            found.setdefault(_cell(why), []).append(row["type"])
    return [[", ".join(types), why] for why, types in sorted(found.items(), key=lambda item: -len(item[1]))]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:240]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]
