"""Findings as a table in the terminal, as Markdown and as JSON, in English and in Chinese."""

import html
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwise.wording import Bilingual, in_language, joined, language_of
from headwise_textbook.claims.claim import Finding
from headwise_textbook.claims.evidence import Check, Role, Verdict
from headwise_textbook.claims.registry import group_of
from headwise_textbook.curves import Curve
from headwise_textbook.texts import Place

STYLES = {
    Verdict.HOLDS: "green", Verdict.CONDITIONS: "yellow", Verdict.FAILS: "red", Verdict.MISLEADING: "magenta",
    Verdict.UNDECIDED: "bold red reverse",
}  # fmt: skip
CLAIM, MEASURED = Bilingual("claim", "论断"), Bilingual("measured", "实测")
VERDICT, EXPECTED = Bilingual("verdict", "结论"), Bilingual("expected", "预期")
CONTROL = Bilingual("control", "对照")
MARK = "⇄"  # of a control
_COLON = {"en": ": ", "zh": "："}


def print_findings(findings: Sequence[Finding], console: Console, *, skipped: int = 0, lang: str | None = None) -> None:
    """Print each claim with its checks, controls and sources, by groups, then a summary.

    Args:
        skipped: number of claims that were not run. lang: "en" or "zh"; None for that of the locale.
    """
    lang = language_of(lang)
    for number, (title, part) in enumerate(by_group(findings).items()):
        for at, finding in enumerate(part):
            table = Table(
                title=None if at else in_language(title, lang), title_style="bold", title_justify="left", box=None,
                header_style="dim", expand=True, show_header=number == at == 0, pad_edge=False, padding=(0, 2, 0, 0),
            )  # fmt: skip
            # The words of a verdict are short and wrap well; the remaining width is for the claim and its numbers.
            for name, ratio in ((CLAIM, 4), (MEASURED, 5)):
                table.add_column(in_language(name, lang), min_width=24, ratio=ratio, overflow="fold")
            for name in (VERDICT, EXPECTED):
                table.add_column(in_language(name, lang), width=11)
            statement = in_language(finding.claim.statement, lang)
            table.add_row(
                Text(f"{finding.claim.id}\n", style="cyan").append(statement, style="default"),
                _checks(finding, lang),
                Text(in_language(finding.verdict.words, lang), style=STYLES[finding.verdict]),
                Text(in_language(finding.claim.expected.words, lang), style="dim" if finding.agrees else "bold red"),
            )
            console.print(table)
            console.print(_sources(finding, lang))
            console.print()
    for line in summary(findings, skipped):
        wrong = line.startswith("Not as expected")
        console.print(Text(in_language(line, lang), style="bold" if wrong else ""))


def summary(findings: Sequence[Finding], skipped: int = 0) -> list[Bilingual]:
    """A summary of the findings in sentences."""
    count = Counter(finding.verdict for finding in findings)
    parts = joined(
        Bilingual(f"{count[v]} {_plural(v, count[v])}", f"{count[v]} 条{v.words.zh}") for v in Verdict if count[v]
    )
    seconds, claims = sum(finding.seconds for finding in findings), "claim" if len(findings) == 1 else "claims"
    lines = [
        Bilingual(
            f"{len(findings)} {claims} in {seconds:.0f} s: {parts}.",
            f"{len(findings)} 条论断，用时 {seconds:.0f} 秒：{parts.zh}。",
        )
    ]
    if wrong := ", ".join(finding.claim.id for finding in findings if not finding.agrees):
        lines.append(Bilingual(f"Not as expected: {wrong}.", f"与预期不符：{wrong}。"))
    if skipped:
        all_ = "headwise claims --all"
        lines.append(Bilingual(f"{skipped} more take longer: {all_}.", f"另有 {skipped} 条用时较长：{all_}。"))
    return lines


def to_json(findings: Sequence[Finding], lang: str | None = None) -> str:
    """The findings as JSON with unrounded numbers, words in one language; `places` as in `headwise_textbook.texts`."""
    lang = language_of(lang)
    content = [
        {
            "id": finding.claim.id, "statement": finding.claim.statement, "source": finding.claim.source,
            "places": [_place(place, lang) for place in finding.claim.places], "also": finding.claim.also,
            "verdict": finding.verdict.words, "expected": finding.claim.expected.words, "agrees": finding.agrees,
            "formula": finding.claim.formula, "why": finding.claim.note, "control": finding.claim.control,
            "code": finding.claim.code, "function": finding.claim.function, "seconds": finding.seconds,
            "checks": [{**asdict(c), "what": in_language(c.what, lang), "role": c.role.value, "held": c.held}
                       for c in finding.checks],
            "curves": [asdict(curve.worded(lang)) for curve in finding.curves],
        }
        for finding in findings
    ]  # fmt: skip
    words = [{k: in_language(x, lang) if isinstance(x, Bilingual) else x for k, x in one.items()} for one in content]
    return json.dumps(words, ensure_ascii=False, indent=2) + "\n"


def to_markdown(findings: Sequence[Finding], lang: str | None = None) -> str:
    """The findings as Markdown, as in docs/claims.md: an introduction, a summary, and a table for each group."""
    lang = language_of(lang)
    lines = [*_introduction(lang).splitlines(), ""]
    lines += [in_language(joined(summary(findings), " ", ""), lang), ""]
    heads = [in_language(name, lang) for name in (CLAIM, VERDICT, MEASURED)]
    for title, part in by_group(findings).items():
        code = part[0].claim.code
        where = Bilingual(f"Measured in [`{code}`](../{code}).", f"测量代码：[`{code}`](../{code})。")
        lines += [f"## {in_language(title, lang)}", "", in_language(where, lang), ""]
        lines += [_cells(heads), "| --- | --- | --- |"]
        lines += [_row(finding, lang) for finding in part]
        for finding in part:
            for curve in finding.curves:
                lines += ["", *_numbers(finding.claim.id, curve.worded(lang), lang)]
        lines.append("")
    return "\n".join(lines)


def by_group(findings: Sequence[Finding]) -> dict[Bilingual, list[Finding]]:
    """Group the findings: title → findings."""
    parts: dict[Bilingual, list[Finding]] = {}
    for finding in findings:
        parts.setdefault(group_of(finding.claim), []).append(finding)
    return parts


def control_words(finding: Finding) -> Bilingual:
    """The sentence that says what the controls of a claim are."""
    control = finding.claim.control
    return Bilingual(f"{CONTROL}: {control}.", f"{CONTROL.zh}：{control.zh}。")


def _introduction(lang: str) -> str:
    """The introduction of docs/claims.md and docs/claims.zh.md."""
    return files(__package__).joinpath(f"introduction.{lang}.md").read_text(encoding="utf-8").rstrip("\n")


def _row(finding: Finding, lang: str) -> str:
    claim = finding.claim
    colon = _COLON[lang]
    sources = [f"*{in_language(place.where, lang)}*{colon}{in_language(place.says, lang)}" for place in claim.places]
    sources += [f"*{in_language(claim.also, lang)}*"] if claim.also else []
    formula = f"`{in_language(claim.formula, lang)}`"
    words = f"**{claim.id}** {in_language(claim.statement, lang)} {formula}<br>" + "<br>".join(sources)
    verdict = f"**{in_language(finding.verdict.words, lang)}**<br>{in_language(claim.note, lang)}"
    verdict += f"<br>{MARK} {in_language(control_words(finding), lang)}"
    checks = (f"{_mark(check)} {in_language(check.text, lang)}" for check in (*finding.shown, *finding.controls))
    return _cells((words, verdict, "<br>".join(checks)))


def _place(place: Place, lang: str) -> dict[str, Any]:
    """A place as plain values, with the words in one language."""
    return {**asdict(place), "says": in_language(place.says, lang), "where": in_language(place.where, lang)}


def _numbers(name: str, curve: Curve, lang: str) -> list[str]:
    """A curve as a small Markdown table."""
    named = in_language(Bilingual(f" (<code>{name}</code>)", f"（<code>{name}</code>）"), lang)
    lines = [f"<details><summary>{html.escape(curve.title)}{named}</summary>", ""]
    lines += [_cells([f"{curve.x_name}", *(f"{x:,.6g}" for x in curve.x)]), _cells(["---"] * (1 + len(curve.x)))]
    rows = [(in_language(joined([curve.y_name, line.name]), lang), line.y) for line in curve.lines]
    lines += [_cells([row, *(f"{y:.3g}" for y in values)]) for row, values in rows]
    return [*lines, "", "</details>"]


def _cells(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _sources(finding: Finding, lang: str) -> Table:
    """Each place with what the text says there, and other literature, indented, over the whole width."""
    grid = Table.grid()
    grid.add_column(width=2)
    grid.add_column(overflow="fold")
    for place in finding.claim.places:
        words = Text(in_language(place.where, lang), style="dim italic")
        grid.add_row("", words.append(f"{_COLON[lang]}{in_language(place.says, lang)}", style="dim"))
    if finding.claim.also:
        grid.add_row("", Text(in_language(finding.claim.also, lang), style="dim italic"))
    return grid


def _checks(finding: Finding, lang: str) -> Table:
    """One line for each check, with a mark for whether it holds; the controls last, after what they are."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column()
    grid.add_column(overflow="fold")
    for check in finding.shown:
        grid.add_row(Text(_mark(check), style="green" if check.held else "red"), Text(in_language(check.text, lang)))
    grid.add_row(Text(MARK, style="dim"), Text(in_language(control_words(finding), lang), style="dim"))
    for check in finding.controls:
        style = "dim" if check.held else "bold red"
        grid.add_row(Text(_mark(check), style=style), Text(in_language(check.text, lang), style=style))
    return grid


def _mark(check: Check) -> str:
    return ("✓" if check.held else "✗") if check.role is not Role.CONTROL else f"{MARK}{'' if check.held else ' ✗'}"


def _plural(verdict: Verdict, count: int) -> str:
    words = {
        Verdict.HOLDS: ("holds", "hold"), Verdict.CONDITIONS: ("holds under conditions", "hold under conditions"),
        Verdict.FAILS: ("does not hold", "do not hold"), Verdict.MISLEADING: ("is misleading", "are misleading"),
        Verdict.UNDECIDED: ("is undecided", "are undecided"),
    }  # fmt: skip
    return words[verdict][count != 1]
