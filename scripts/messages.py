"""The Chinese catalogues: what is to be translated is read from the code and merged into `locale/zh/LC_MESSAGES/*.po`.

    python scripts/messages.py                  # those of headwise and headwise_textbook
    python scripts/messages.py your_package     # that of an installed package of your own
    python scripts/messages.py --check          # write nothing; list what is missing or wrong, exit 1

Texts are literals in `tr`, `trn` and errors with values, the help of commands, and the words of measures. A new text
has no Chinese yet; one that was changed keeps the Chinese of the most similar old one, marked `#, fuzzy`: it is shown
in English until the mark is removed.
"""

import argparse
import ast
import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from string import Formatter
from typing import Any

PACKAGES = "headwise", "headwise_textbook"
HEADER = """msgid ""
msgstr ""
"Project-Id-Version: {package}\\n"
"Language: zh\\n"
"Content-Type: text/plain; charset=UTF-8\\n"
"Content-Transfer-Encoding: 8bit\\n"
"Plural-Forms: nplurals=1; plural=0;\\n"
"""
_PART = re.compile(r'^(msgctxt|msgid|msgid_plural|msgstr|msgstr\[0\]) ("(?:.*")(?:\n".*")*)$', re.MULTILINE)
Key = tuple[str, str]  # sense, English


@dataclass(frozen=True)
class Entry:
    """An entry of a catalogue. many: the plural, or "". where: the file that has the text."""

    sense: str
    one: str
    many: str = ""
    chinese: str = ""
    where: str = ""
    fuzzy: bool = False

    @property
    def key(self) -> Key:
        """What it is looked up by."""
        return self.sense, self.one

    def written(self) -> str:
        """As the file has it."""
        lines = [f"#: {self.where}"] if self.where else []
        lines += ["#, fuzzy"] if self.fuzzy else []
        lines += [f"msgctxt {_quoted(self.sense)}"] if self.sense else []
        lines += [f"msgid {_quoted(self.one)}"]
        lines += [f"msgid_plural {_quoted(self.many)}"] if self.many else []
        return "\n".join([*lines, f"{'msgstr[0]' if self.many else 'msgstr'} {_quoted(self.chinese)}"])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def catalogue(package: str) -> Path:
    """The file of a package."""
    folder = Path(str(importlib.import_module(package).__file__)).parent
    return folder / "locale" / "zh" / "LC_MESSAGES" / f"{package}.po"


def read(file: Path) -> list[Entry]:
    """The entries of a catalogue; none if there is no file."""
    found = []
    for block in re.split(r"\n\s*\n", file.read_text(encoding="utf-8") if file.is_file() else ""):
        part = {key: "".join(map(json.loads, quoted.split("\n"))) for key, quoted in _PART.findall(block)}
        if part.get("msgid"):
            where = re.search(r"^#: (.*)$", block, re.MULTILINE)
            found.append(
                Entry(
                    part.get("msgctxt", ""), part["msgid"], part.get("msgid_plural", ""),
                    part.get("msgstr") or part.get("msgstr[0]") or "", where[1] if where else "", "#, fuzzy" in block,
                )
            )  # fmt: skip
    return found


def texts(package: str) -> list[Entry]:
    """What a package has to translate, each once, in the order of its files."""
    folder = catalogue(package).parents[3]
    found: dict[Key, Entry] = {}
    for path in sorted(folder.rglob("*.py")):
        for entry in in_source(path.read_text(encoding="utf-8"), path.relative_to(folder).as_posix()):
            found.setdefault(entry.key, entry)
    for entry in [*of_commands(package), *of_measures(package)]:
        found.setdefault(entry.key, entry)
    return list(found.values())


def in_source(source: str, where: str) -> Iterator[Entry]:
    """The texts of `tr`, `trn` and errors with values. SystemExit if one is no literal, or has other values."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if name not in ("tr", "trn") and not (name.endswith("Error") and call.keywords):
            continue
        forms = call.args[: 2 if name == "trn" else 1]
        literals = [form.value for form in forms if isinstance(form, ast.Constant) and isinstance(form.value, str)]
        given = {word.arg: word.value for word in call.keywords}
        sense = given.pop("sense", ast.Constant(""))
        if len(literals) != (2 if name == "trn" else 1) or not isinstance(sense, ast.Constant) or None in given:
            sys.exit(f"{where}:{call.lineno}: expected literals in {name}(…)")
        for literal in literals if given else ():
            if (names := names_in(literal)) - {"count"} != set(given) - {"count"}:
                sys.exit(f"{where}:{call.lineno}: {literal!r} has {sorted(names)}, and is given {sorted(given)}")
        yield Entry(sense.value, literals[0], "".join(literals[1:]), where=where)


def of_commands(package: str) -> Iterator[Entry]:
    """The help of the commands that a package brings."""
    import typer
    from typer.main import get_command

    commands: list[Any] = []
    if package == "headwise":
        from headwise.cli.program import app

        commands = [get_command(app)]
    for entry in sorted(entry_points(group="headwise.commands"), key=lambda entry: entry.name):
        if entry.value.partition(".")[0] == package:
            program = typer.Typer(add_completion=False)
            program.command(entry.name)(entry.load())
            commands.append(get_command(program))
    while commands:
        command = commands.pop(0)
        commands += [one for one in getattr(command, "commands", {}).values() if type(one).__name__ != "Listed"]
        every = [command.help, command.short_help, *(getattr(param, "help", None) for param in command.params)]
        where = (command.callback.__module__ if command.callback else package).replace(".", "/") + ".py"
        yield from (Entry("", words, where=where.partition("/")[2]) for words in every if words)


def of_measures(package: str) -> Iterator[Entry]:
    """The words of the measures that a package registers."""
    from headwise.stats import GIVEN, MEASURES
    from headwise.stats.base import texts_of

    for made in {**MEASURES, **GIVEN}.values():
        kind = made if isinstance(made, type) else type(made())
        if kind.__module__.partition(".")[0] == package:
            where = kind.__module__.partition(".")[2].replace(".", "/") + ".py"
            yield from (Entry(text.sense, text.template, where=where) for text in texts_of(kind))


def names_in(template: str) -> set[str]:
    """The values that a template names, with how each is written."""
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def merged(wanted: list[Entry], known: list[Entry]) -> list[Entry]:
    """The entries that are wanted, with the Chinese of those that are known."""
    there, keys = {entry.key: entry for entry in known}, {entry.key for entry in wanted}
    gone = {entry.one: entry for entry in known if entry.key not in keys}
    found = []
    for entry in wanted:
        old = there.get(entry.key)
        like = None if old else next(iter(get_close_matches(entry.one, gone, n=1, cutoff=0.7)), None)
        if old is not None:
            entry = replace(entry, chinese=old.chinese, fuzzy=old.fuzzy)
        elif like is not None:
            entry = replace(entry, chinese=gone[like].chinese, fuzzy=True)
        found.append(entry)
    return found


def faults(wanted: list[Entry], known: list[Entry]) -> list[str]:
    """What is missing or wrong in a catalogue."""
    there, keys = {entry.key: entry for entry in known}, {entry.key for entry in wanted}
    counted = Counter(entry.key for entry in known)
    found = [f"missing: {entry.one!r}" for entry in wanted if not (one := there.get(entry.key)) or not one.chinese]
    found += [f"unused: {entry.one!r}" for entry in known if entry.key not in keys]
    found += [f"twice: {one!r}" for (_, one), n in counted.items() if n > 1]
    for entry in known:
        if entry.fuzzy:
            found.append(f"fuzzy: {entry.one!r}")
        try:
            differ = bool(entry.chinese) and names_in(entry.one) != names_in(entry.chinese)
        except ValueError:
            differ = True
        if differ:
            found.append(f"values differ: {entry.one!r}, {entry.chinese!r}")
    return found


def main() -> None:
    """Merge the catalogues, or check them."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is missing")
    asked = parser.parse_args()
    wrong = 0
    for package in asked.packages:
        file, wanted = catalogue(package), texts(package)
        entries = read(file) if asked.check else merged(wanted, read(file))
        if not asked.check:
            file.parent.mkdir(parents=True, exist_ok=True)
            blocks = [HEADER.format(package=package), *(entry.written() + "\n" for entry in entries)]
            file.write_text("\n".join(blocks), encoding="utf-8")
        for fault in (found := faults(wanted, entries)):
            print(f"{package}: {fault}")
        wrong += len(found)
    sys.exit(bool(wrong) if asked.check else 0)


if __name__ == "__main__":
    main()
