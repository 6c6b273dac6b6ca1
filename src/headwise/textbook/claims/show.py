"""Findings as a table in the terminal, as Markdown and as JSON."""

import html
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwise.reports.curves import Curve
from headwise.textbook.claims.claim import Finding
from headwise.textbook.claims.evidence import Check, Verdict
from headwise.textbook.claims.registry import group_of

STYLES = {
    Verdict.HOLDS: "green", Verdict.CONDITIONS: "yellow", Verdict.FAILS: "red", Verdict.MISLEADING: "magenta",
    Verdict.UNDECIDED: "bold red reverse",
}  # fmt: skip
INTRODUCTION = """# What the texts claim

Textbooks and tutorials on multi-head attention make many claims. Here each one is run, on random numbers, on small
layers or on the trained model that comes with headwise, and judged by what was measured. This page is the output of
`headwise claims --all --markdown`; `headwise claims --html claims.html` makes a page of it, with plots. `headwise
claims` runs the quick ones, `--only ID` a single one; the command fails if a verdict is no longer the expected one.

A check compares a number with its expected value: ✓ it holds, ✗ it does not. The verdict follows from the checks:

- **holds**: all checks hold.
- **holds under conditions**: it holds within its conditions, and fails outside of them.
- **does not hold**: no check holds.
- **faithful but misleading**: what it states is true, what it suggests is not.

Some claims also have controls, which check that the measurement can fail. They are not shown.
Errors are the largest difference over the largest entry, in float64 unless stated otherwise. "5.3.1" and "§5.3" are a
mathematical treatment of multi-head attention, "ch. 11" a chapter of a textbook on Transformers, the "first tutorial"
one in seven parts with PyTorch code, the "second tutorial" notes on shapes; the other sources are named."""


def print_findings(findings: Sequence[Finding], console: Console, *, skipped: int = 0) -> None:
    """Print a table for each group of claims, then a summary. skipped: number of claims that were not run."""
    for number, (title, part) in enumerate(by_group(findings).items()):
        table = Table(
            title=title, title_style="bold", title_justify="left", box=None, header_style="dim", expand=True,
            show_header=number == 0, pad_edge=False, padding=(0, 2, 1, 0),
        )  # fmt: skip
        # The words of a verdict are short and wrap well; the remaining width is for the claim and its numbers.
        for name, width, ratio in (("claim", 24, 4), ("measured", 24, 5)):
            table.add_column(name, min_width=width, ratio=ratio, overflow="fold")
        for name in ("verdict", "expected"):
            table.add_column(name, width=11)
        for finding in part:
            statement = Text(f"{finding.claim.id}\n", style="cyan").append(finding.claim.statement, style="default")
            expected = Text(finding.claim.expected.value, style="dim" if finding.agrees else "bold red")
            verdict = Text(finding.verdict.value, style=STYLES[finding.verdict])
            table.add_row(statement, _checks(finding), verdict, expected)
        console.print(table)
        console.print()
    for line in summary(findings, skipped):
        console.print(Text(line, style="bold" if line.startswith("Not as expected") else ""))


def summary(findings: Sequence[Finding], skipped: int = 0) -> list[str]:
    """A summary of the findings in sentences."""
    count = Counter(finding.verdict for finding in findings)
    parts = [f"{count[verdict]} {_plural(verdict, count[verdict])}" for verdict in Verdict if count[verdict]]
    seconds = sum(finding.seconds for finding in findings)
    lines = [f"{len(findings)} {'claim' if len(findings) == 1 else 'claims'} in {seconds:.0f} s: {', '.join(parts)}."]
    wrong = [finding.claim.id for finding in findings if not finding.agrees]
    lines += [f"Not as expected: {', '.join(wrong)}."] if wrong else []
    return lines + ([f"{skipped} more take longer: headwise claims --all."] if skipped else [])


def to_json(findings: Sequence[Finding]) -> str:
    """The findings as JSON with unrounded numbers."""
    content = [
        {
            "id": finding.claim.id, "statement": finding.claim.statement, "source": finding.claim.source,
            "verdict": finding.verdict.value, "expected": finding.claim.expected.value, "agrees": finding.agrees,
            "formula": finding.claim.formula, "why": finding.claim.why, "code": finding.claim.code,
            "function": finding.claim.function, "seconds": finding.seconds,
            "checks": [{**asdict(c), "role": c.role.value, "held": c.held} for c in finding.checks],
            "curves": [asdict(curve) for curve in finding.curves],
        }
        for finding in findings
    ]  # fmt: skip
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"


def to_markdown(findings: Sequence[Finding]) -> str:
    """The findings as Markdown, as in docs/claims.md: an introduction, a summary, and a table for each group."""
    lines = [*INTRODUCTION.splitlines(), "", " ".join(summary(findings)), ""]
    for title, part in by_group(findings).items():
        code = part[0].claim.code
        lines += [f"## {title}", "", f"Measured in [`{code}`](../{code}).", ""]
        lines += ["| claim | verdict | measured |", "| --- | --- | --- |"]
        for finding in part:
            claim = finding.claim
            words = f"**{claim.id}** {claim.statement} `{claim.formula}` *({claim.source})*"
            verdict = f"**{finding.verdict.value}**" + (f"<br>{claim.why}" if claim.why else "")
            cells = (words, verdict, "<br>".join(f"{_mark(check)} {check.text}" for check in finding.shown))
            lines.append(_cells(cells))
        for finding in part:
            for curve in finding.curves:
                lines += ["", *_numbers(finding.claim.id, curve)]
        lines.append("")
    return "\n".join(lines)


def by_group(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    """Group the findings: title → findings."""
    parts: dict[str, list[Finding]] = {}
    for finding in findings:
        parts.setdefault(group_of(finding.claim), []).append(finding)
    return parts


def _numbers(name: str, curve: Curve) -> list[str]:
    """A curve as a small Markdown table."""
    lines = [f"<details><summary>{html.escape(curve.title)} (<code>{name}</code>)</summary>", ""]
    lines += [_cells([f"{curve.x_name}", *(f"{x:,.6g}" for x in curve.x)]), _cells(["---"] * (1 + len(curve.x)))]
    lines += [_cells([f"{curve.y_name}, {line.name}", *(f"{y:.3g}" for y in line.y)]) for line in curve.lines]
    return [*lines, "", "</details>"]


def _cells(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _checks(finding: Finding) -> Table:
    """One line for each check, with a mark for whether it holds."""
    grid = Table.grid(padding=(0, 1))
    for check in finding.shown:
        grid.add_row(Text(_mark(check), style="green" if check.held else "red"), Text(check.text))
    return grid


def _mark(check: Check) -> str:
    return "✓" if check.held else "✗"


def _plural(verdict: Verdict, count: int) -> str:
    words = {
        Verdict.HOLDS: ("holds", "hold"), Verdict.CONDITIONS: ("holds under conditions", "hold under conditions"),
        Verdict.FAILS: ("does not hold", "do not hold"), Verdict.MISLEADING: ("is misleading", "are misleading"),
        Verdict.UNDECIDED: ("is undecided", "are undecided"),
    }  # fmt: skip
    return words[verdict][count != 1]
