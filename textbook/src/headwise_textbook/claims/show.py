"""Findings as a table in the terminal, as Markdown, as JSON and as HTML, in English and in Chinese.

The HTML page has plots and is a single file without scripts or network access, in light and dark colours.

>>> from headwise_textbook.claims import choose, run, write_page
>>> write_page(run(choose()), "claims.html")                               # doctest: +SKIP
PosixPath('claims.html')
"""

import base64
import hashlib
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from html import escape
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlsplit

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import headwise
from headwise.base import write_text
from headwise.errors import ConfigError
from headwise.reports import font_face
from headwise.wording import BLANK, Bilingual, in_language, joined, language_of, tr, trn
from headwise_textbook.claims.claim import GROUPS, VERDICTS, Check, Claim, Finding, Role, Verdict
from headwise_textbook.curves import Curve, legend, svg

CLAIM, MEASURED = tr("claim"), tr("measured")
VERDICT, EXPECTED = tr("verdict"), tr("expected")
CONTROL = tr("control")
MARK, OPEN = "⇄", "◇"  # of a control, and of what depends on the machine
COLON = {"en": ": ", "zh": "："}
# Of the page.
LEAD = tr(
    "Textbooks and tutorials on multi-head attention make many claims. Here each one is run, on random numbers, on "
    "small layers or on the trained model that comes with headwise, and judged by what was measured. ✓ it is so, ✗ it "
    "is not: the verdict follows from these checks. ⇄ marks controls: the same measurement where the result must be "
    "another one, or on a baseline, ◇ times that may be otherwise on another machine. Dashed lines were not measured: "
    "they are what was claimed, or what a formula says. Errors are the largest difference over the largest entry, in "
    "float64 unless stated otherwise."
)
TITLE = tr("What the texts claim, measured")
COLUMNS = (CLAIM, VERDICT, MEASURED, tr("formula"), tr("what was run"))
THEMES = {
    "auto": tr("as the system"), "light": tr("light"),
    "dark": tr("dark"),
}  # fmt: skip
SHOW, COLOURS = tr("show"), tr("colours")
LANGUAGE = {"en": "en", "zh": "zh-Hans"}
PLOT, NUMBERS = tr("plot"), tr("numbers")
FOOT = tr("Written by {}; verdicts and plots are from one run.")


def print_findings(findings: Sequence[Finding], console: Console, *, skipped: int = 0, lang: str | None = None) -> None:
    """Print each claim with its checks, controls and sources, by groups, then a summary.

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
                Text(in_language(finding.verdict.words, lang), style=VERDICTS[finding.verdict.name]["style"]),
                Text(in_language(finding.claim.expected.words, lang), style="dim" if finding.agrees else "bold red"),
            )
            sources = Table.grid()
            sources.add_column(width=2)
            sources.add_column(overflow="fold")
            for where, says in _sources(finding.claim, lang):
                words = Text(where, style="dim italic")
                sources.add_row("", words.append(f"{COLON[lang]}{says}", style="dim") if says else words)
            console.print(table)
            console.print(sources)
            console.print()
    for line in summary(findings, skipped):
        wrong = line.startswith("Not as expected")
        console.print(Text(in_language(line, lang), style="bold" if wrong else ""))


def _checks(finding: Finding, lang: str) -> Table:
    """One line for each check, with a mark for whether it holds; the controls last, after what they are."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column()
    grid.add_column(overflow="fold")
    for check in finding.shown:
        grid.add_row(Text(_mark(check), style="green" if check.held else "red"), Text(in_language(check.text, lang)))
    grid.add_row(Text(MARK, style="dim"), Text(_control(finding.claim, lang), style="dim"))
    for check in finding.controls:
        style = "dim" if check.held else "bold red"
        grid.add_row(Text(_mark(check), style=style), Text(in_language(check.text, lang), style=style))
    return grid


def _mark(check: Check) -> str:
    if check.role is Role.CONTROL:
        return f"{MARK}{'' if check.held else ' ✗'}"
    return OPEN if check.role is Role.MACHINE else "✓" if check.held else "✗"


def _control(claim: Claim, lang: str) -> str:
    """The sentence that says what the controls of a claim are."""
    return in_language(tr("{word}: {control}.", word=CONTROL, control=claim.control), lang)


def _sources(claim: Claim, lang: str) -> list[tuple[str, str]]:
    """Each place with what the text says there, and other literature, about which nothing is said."""
    sources = [(in_language(place.where, lang), in_language(place.says, lang)) for place in claim.places]
    return [*sources, *([(in_language(claim.also, lang), "")] if claim.also else [])]


def by_group(findings: Sequence[Finding]) -> dict[Bilingual, list[Finding]]:
    """Group the findings: title → findings."""
    parts: dict[Bilingual, list[Finding]] = {}
    for finding in findings:
        parts.setdefault(GROUPS[finding.claim.group], []).append(finding)
    return parts


def summary(findings: Sequence[Finding], skipped: int = 0) -> list[Bilingual]:
    """A summary of the findings in sentences."""
    count = Counter(finding.verdict for finding in findings)
    verdicts = (
        (n, Bilingual(VERDICTS[v.name]["one" if n == 1 else "many"], v.words.zh)) for v in Verdict if (n := count[v])
    )
    parts = joined(tr("{count} {verdict}", count=n, verdict=words) for n, words in verdicts)
    lines: list[Bilingual] = [
        trn(
            "{count} claim in {seconds:.0f} s: {parts}.",
            "{count} claims in {seconds:.0f} s: {parts}.",
            count=len(findings),
            seconds=sum(finding.seconds for finding in findings),
            parts=parts,
        )
    ]
    if wrong := ", ".join(finding.claim.id for finding in findings if not finding.agrees):
        lines.append(tr("Not as expected: {wrong}.", wrong=wrong))
    if skipped:
        command = "headwise claims --all"
        lines.append(tr("{skipped} more take longer: {command}.", skipped=skipped, command=command))
    return lines


def to_json(findings: Sequence[Finding], lang: str | None = None) -> str:
    """The findings as JSON with unrounded numbers, words in one language; `places` as in `headwise_textbook.texts`."""
    lang = language_of(lang)
    content = [
        {
            "id": finding.claim.id, "statement": finding.claim.statement, "source": finding.claim.source,
            "places": [{**asdict(place), "says": in_language(place.says, lang),
                        "where": in_language(place.where, lang)} for place in finding.claim.places],
            "also": finding.claim.also,
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
    lines = [files(__package__).joinpath(f"introduction.{lang}.md").read_text(encoding="utf-8").rstrip("\n"), ""]
    lines += [in_language(joined(summary(findings), BLANK), lang), ""]
    heads = [in_language(name, lang) for name in (CLAIM, VERDICT, MEASURED)]
    for title, part in by_group(findings).items():
        code = part[0].claim.code
        where = tr("Measured in [`{code}`](../{code}).", code=code)
        lines += [f"## {in_language(title, lang)}", "", in_language(where, lang), ""]
        lines += [_cells(heads), "| --- | --- | --- |"]
        lines += [_row(finding, lang) for finding in part]
        for finding in part:
            for curve in finding.curves:
                lines += ["", *_numbers(finding.claim.id, curve.worded(lang), lang)]
        lines.append("")
    return "\n".join(lines)


def _row(finding: Finding, lang: str) -> str:
    claim = finding.claim
    sources = [f"*{where}*{COLON[lang]}{says}" if says else f"*{where}*" for where, says in _sources(claim, lang)]
    formula = f"`{in_language(claim.formula, lang)}`"
    words = f"**{claim.id}** {in_language(claim.statement, lang)} {formula}<br>" + "<br>".join(sources)
    verdict = f"**{in_language(finding.verdict.words, lang)}**<br>{in_language(claim.note, lang)}"
    verdict += f"<br>{MARK} {_control(claim, lang)}"
    checks = (f"{_mark(check)} {in_language(check.text, lang)}" for check in (*finding.shown, *finding.controls))
    return _cells((words, verdict, "<br>".join(checks)))


def _numbers(name: str, curve: Curve, lang: str) -> list[str]:
    """A curve as a small Markdown table."""
    named = in_language(tr(" (<code>{name}</code>)", name=name), lang)
    lines = [f"<details><summary>{escape(curve.title)}{named}</summary>", ""]
    lines += [_cells([f"{curve.x_name}", *(f"{x:,.6g}" for x in curve.x)]), _cells(["---"] * (1 + len(curve.x)))]
    rows = [(in_language(joined([curve.y_name, line.name]), lang), line.y) for line in curve.lines]
    lines += [_cells([row, *(f"{y:.3g}" for y in values)]) for row, values in rows]
    return [*lines, "", "</details>"]


def _cells(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def write_page(findings: Sequence[Finding], path: str | os.PathLike[str], *, lang: str | None = None) -> Path:
    """Write the page to `path` and return the path. lang: "en" or "zh"; None for the locale's.

    Raises:
        ConfigError: if `path` is a folder.
        CheckpointError: if the file cannot be written; an existing file is then unchanged.
    """
    if Path(path).is_dir():
        raise ConfigError(f"{os.fspath(path)!r} is a folder; expected a file name, such as claims.html")
    write_text(path, to_html(findings, lang))
    return Path(path)


def to_html(findings: Sequence[Finding], lang: str | None = None) -> str:
    """The whole page: a summary, then a table and the plots of each group."""
    lang = language_of(lang)
    count = Counter(finding.verdict for finding in findings)
    kinds = [verdict for verdict in Verdict if count[verdict]]
    hidden = "".join(
        f":root:has(#only-{v.name.lower()}:checked) :is(.claims tr, figure):not(.{v.name.lower()}):not(.head),"
        f":root:has(#only-{v.name.lower()}:checked) section:not(:has(tr.{v.name.lower()}))"
        "{display:none}\n"
        for v in kinds
    )  # fmt: skip
    all_ = tr("all {count}", count=len(findings))
    choices = [("all", in_language(all_, lang))]
    choices += [(v.name.lower(), f"{in_language(v.words, lang)} {count[v]}") for v in kinds]
    themes = [(name, in_language(words, lang)) for name, words in THEMES.items()]
    written = escape(in_language(FOOT, lang)).format("<code>headwise claims --html</code>")
    said = [escape(in_language(line, lang)) for line in summary(findings)]
    body = [
        f'<h1>{escape(in_language(TITLE, lang))}</h1>\n<p class="lead">{escape(in_language(LEAD, lang))}</p>',
        f"<p>{said[0]}</p>",
        *(f'<p class="wrong">{line}</p>' for line in said[1:]),
        f'<dl class="facts">{_facts(lang)}</dl>',
        '<div class="choices">',
        _choice("only", in_language(SHOW, lang), choices)
        + _choice("theme", in_language(COLOURS, lang), themes)
        + "</div>",
        *(_section(title, part, lang) for title, part in by_group(findings).items()),
        f"<footer>{written}</footer>",
    ]
    text = "".join(body)
    han = any("\u3400" <= c <= "\u9fff" for c in text)
    style = files(__package__).joinpath("page.css").read_text("utf-8") + hidden + (font_face(text) if han else "")
    # Nothing may load and nothing may run, so that text can never act as code.
    fonts = "; font-src data:" if han else ""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'{fonts}; base-uri 'none'; form-action 'none'"
    parts = [
        f'<!DOCTYPE html>\n<html lang="{LANGUAGE[lang]}">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(in_language(TITLE, lang))}</title>\n<style>{style}</style>\n</head>\n<body>",
        *body,
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _facts(lang: str) -> str:
    """When and on what the claims were measured."""
    threads, vectors = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    machine, used = f"{platform.system()} {platform.machine()}", f"{torch.__version__}, {vectors}"
    facts = {
        MEASURED: datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        tr("machine"): tr("{machine}, {cpu_count} cores", machine=machine, cpu_count=os.cpu_count()),
        "torch": trn("{used}, {count} thread", "{used}, {count} threads", count=threads, used=used),
        "headwise": headwise.__version__,
        "Python": platform.python_version(),
    }
    return "".join(
        f"<div><dt>{in_language(name, lang)}</dt><dd>{escape(in_language(fact, lang))}</dd></div>"
        for name, fact in facts.items()
    )


def _choice(name: str, title: str, options: Sequence[tuple[str, str]]) -> str:
    """Radio buttons that the style sheet reacts to; the first is selected."""
    inputs = "".join(
        f'<input type="radio" name="{name}" id="{name}-{value}"{" checked" if not at else ""}>'
        f'<label for="{name}-{value}">{escape(words)}</label>'
        for at, (value, words) in enumerate(options)
    )
    return f"<fieldset><legend>{title}</legend>{inputs}</fieldset>"


def _section(title: str, part: Sequence[Finding], lang: str) -> str:
    head = "".join(f"<th>{in_language(name, lang)}</th>" for name in COLUMNS)
    rows = "\n".join(_html_row(finding, lang) for finding in part)
    figures = [_figure(finding, i, lang) for finding in part for i in range(len(finding.curves))]
    plots = f'\n<div class="figures">\n{"".join(figures)}</div>' if figures else ""
    return (
        f"<section>\n<h2>{escape(in_language(title, lang))}</h2>\n"
        f'<table class="claims"><thead><tr class="head">{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>{plots}\n'
        "</section>"
    )


def _html_row(finding: Finding, lang: str) -> str:
    claim, many = finding.claim, len(finding.curves) > 1
    plots = "".join(
        f' <a href="#plot-{claim.id}-{i}">{in_language(PLOT, lang)}{f" {i}" if many else ""}</a>'
        for i in range(1, len(finding.curves) + 1)
    )
    seconds = f'<span class="seconds">{finding.seconds:.1f} s</span>' if finding.seconds >= 0.05 else ""
    hoped = f"{in_language(EXPECTED, lang)}{COLON[lang]}{in_language(claim.expected.words, lang)}"
    expected = "" if finding.agrees else f'<br><span class="unexpected">{escape(hoped)}</span>'
    control = f"{in_language(CONTROL, lang)}{COLON[lang]}{in_language(claim.control, lang)}"
    sources = "".join(
        f'<li><span class="source">{escape(where)}</span>{f" {escape(says)}" if says else ""}</li>'
        for where, says in _sources(claim, lang)
    )
    code, url = f"{escape(claim.code)} · {escape(claim.function)}", repository()
    if url is None:
        link = f'<span class="code">{code}</span>'
    else:
        link = f'<a class="code" href="{escape(url)}/blob/main/{escape(claim.code)}#L{claim.line}">{code}</a>'
    cells = (
        f'<a class="id" href="#{claim.id}">{claim.id}</a>{plots}<br>{escape(in_language(claim.statement, lang))}'
        f'<ul class="sources">{sources}</ul>',
        f'<span class="verdict">{in_language(finding.verdict.words, lang)}</span>{expected}',
        f'<ul class="checks">{_items(finding.shown, lang)}</ul><span class="control">{escape(control)}</span>'
        f'<ul class="checks controls">{_items(finding.controls, lang)}</ul>',
        f'<span class="formula">{_raised(escape(in_language(claim.formula, lang)))}</span>',
        f'<span class="why">{escape(in_language(claim.note, lang))}</span><br>{link} {seconds}',
    )
    named = (
        f'<td data-name="{in_language(name, lang)}">{cell}</td>' for name, cell in zip(COLUMNS, cells, strict=True)
    )
    return f'<tr id="{claim.id}" class="{finding.verdict.name.lower()}">{"".join(named)}</tr>'


def repository() -> str | None:
    """The URL of the source code from the package metadata, such as https://example.org/headwise, or None."""
    try:
        given = metadata.metadata("headwise").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return None
    urls = {name.strip().lower(): url.strip() for name, _, url in (line.partition(",") for line in given)}
    found = next((urls[name] for name in ("repository", "source", "source code", "homepage") if name in urls), "")
    site = urlsplit(found)
    return found.rstrip("/") if site.scheme == "https" and not (site.hostname or "").endswith(".invalid") else None


def _items(checks: Sequence[Check], lang: str) -> str:
    """Checks as items of a list, numbers such as 1e-12 each on one line."""
    number = r"\d[\d.]*e-\d+"
    texts = (re.sub(number, r'<span class="number">\g<0></span>', escape(in_language(c.text, lang))) for c in checks)
    kinds = ("open" if c.role is Role.MACHINE else "yes" if c.held else "no" for c in checks)
    return "".join(f'<li class="{kind}">{text}</li>' for kind, text in zip(kinds, texts, strict=True))


def _raised(formula: str) -> str:
    """Format W_i^Q, x_{i+1} and e^{−α} with subscripts and superscripts."""
    for sign, tag in (("_", "sub"), (r"\^", "sup")):
        formula = re.sub(sign + r"(?:\{([^}]*)\}|((?:[^\W²³]|≤)+))", rf"<{tag}>\1\2</{tag}>", formula)
    return formula


def _figure(finding: Finding, i: int, lang: str) -> str:
    """One plot with its legend and a table of its numbers."""
    claim, curve = finding.claim, finding.curves[i].worded(lang)
    head = "".join(f"<td>{x:,.6g}</td>" for x in curve.x)
    rows = "".join(
        f"<tr><th>{escape(line.name)}</th>{''.join(f'<td>{y:,.4g}</td>' for y in line.y)}</tr>" for line in curve.lines
    )
    table = f"<table><tr><th>{escape(curve.x_name)}</th>{head}</tr>{rows}</table>"
    return (
        f'<figure id="plot-{claim.id}-{i + 1}" class="{finding.verdict.name.lower()}"><figcaption>'
        f'<span class="y-name">{escape(curve.y_name)}</span><span>{escape(curve.title)}</span>'
        f'<a class="id" href="#{claim.id}">{claim.id}</a></figcaption>{svg(curve)}{legend(curve)}'
        f"<details><summary>{in_language(NUMBERS, lang)}</summary><div>{table}</div></details></figure>\n"
    )
