"""Tested claims as one HTML page with plots: a single file without scripts or network access, light and dark.

A finding has `claim`, `verdict`, `shown`, `curves`, `seconds` and `agrees`, as `headwise.textbook.claims.Finding` does.
"""

import os
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from importlib import metadata
from typing import Any

import torch

from headwise.reports.curves import Curve, legend, svg
from headwise.reports.template import digest, source

LEAD = (
    "Textbooks and tutorials on multi-head attention make many claims. Here each one is run, on random numbers, on "
    "small layers or on the trained model that comes with headwise, and judged by what was measured. ✓ it is so, ✗ it "
    "is not: the verdict follows from these checks. Dashed lines were not measured: they are what was claimed, or what "
    "a formula says. Errors are the largest difference over the largest entry, in float64 unless stated otherwise."
)
COLUMNS = "claim", "verdict", "measured", "formula", "what was run"
THEMES = {"auto": "as the system", "light": "light", "dark": "dark"}


def claims_page(groups: Mapping[str, Sequence[Any]], summary: Sequence[str]) -> str:
    """The whole page: a summary, then a table and the plots of each group. groups: findings by title."""
    findings = [finding for part in groups.values() for finding in part]
    count = Counter(finding.verdict for finding in findings)
    kinds = [verdict for verdict in (type(next(iter(count))) if count else ()) if count[verdict]]
    hidden = "".join(
        f":root:has(#only-{v.name.lower()}:checked) :is(.claims tr, figure):not(.{v.name.lower()}):not(.head),"
        f":root:has(#only-{v.name.lower()}:checked) section:not(:has(tr.{v.name.lower()}))"
        "{display:none}\n"
        for v in kinds
    )  # fmt: skip
    style = source("claims.css") + hidden
    # Nothing may load and nothing may run, so that text can never act as code.
    policy = f"default-src 'none'; style-src {digest(style)}; base-uri 'none'; form-action 'none'"
    choices = [("all", f"all {len(findings)}"), *((v.name.lower(), f"{v.value} {count[v]}") for v in kinds)]
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>What the texts claim, measured</title>\n<style>{style}</style>\n</head>\n<body>",
        *_head(summary),
        '<div class="choices">',
        _choice("only", "show", choices) + _choice("theme", "colours", list(THEMES.items())) + "</div>",
        *(_section(title, part) for title, part in groups.items()),
        "<footer>Written by <code>headwise claims --html</code>; verdicts and plots are from one run.</footer>",
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def repository() -> str | None:
    """The URL of the source code from the package metadata, such as https://example.org/headwise, or None."""
    try:
        given = metadata.metadata("headwise").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return None
    urls = {name.strip().lower(): url.strip() for name, _, url in (line.partition(",") for line in given)}
    found = next((urls[name] for name in ("repository", "source", "source code", "homepage") if name in urls), "")
    return found.rstrip("/") if found.startswith("https://") else None


def _head(summary: Sequence[str]) -> list[str]:
    threads, vectors = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    facts = {
        "measured": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "torch": f"{torch.__version__}, {vectors}, {threads} thread{'s' * (threads != 1)}",
        "headwise": _version(),
        "Python": platform.python_version(),
    }
    return [
        f'<h1>What the texts claim, measured</h1>\n<p class="lead">{escape(LEAD)}</p>',
        f"<p>{escape(summary[0])}</p>",
        *(f'<p class="wrong">{escape(line)}</p>' for line in summary[1:]),
        f'<dl class="facts">{"".join(f"<div><dt>{k}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())}</dl>',
    ]


def _choice(name: str, title: str, options: Sequence[tuple[str, str]]) -> str:
    """Radio buttons that the style sheet reacts to; the first is selected."""
    inputs = "".join(
        f'<input type="radio" name="{name}" id="{name}-{value}"{" checked" if not at else ""}>'
        f'<label for="{name}-{value}">{escape(words)}</label>'
        for at, (value, words) in enumerate(options)
    )
    return f"<fieldset><legend>{title}</legend>{inputs}</fieldset>"


def _section(title: str, part: Sequence[Any]) -> str:
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    rows = "\n".join(map(_row, part))
    figures = [_figure(finding, i) for finding in part for i in range(len(finding.curves))]
    plots = f'\n<div class="figures">\n{"".join(figures)}</div>' if figures else ""
    return (
        f'<section>\n<h2>{escape(title)}</h2>\n<table class="claims"><thead><tr class="head">{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table>{plots}\n</section>"
    )


def _row(finding: Any) -> str:
    claim = finding.claim
    checks = "".join(
        f'<li class="{"yes" if check.held else "no"}">{_unbroken(escape(check.text))}</li>' for check in finding.shown
    )
    plots = "".join(
        f' <a href="#{_anchor(claim, i)}">plot{f" {i + 1}" if len(finding.curves) > 1 else ""}</a>'
        for i in range(len(finding.curves))
    )
    seconds = f'<span class="seconds">{finding.seconds:.1f} s</span>' if finding.seconds >= 0.05 else ""
    expected = "" if finding.agrees else f'<br><span class="unexpected">expected: {finding.claim.expected.value}</span>'
    cells = (
        f'<a class="id" href="#{claim.id}">{claim.id}</a>{plots}<br>{escape(claim.statement)}<br>'
        f'<span class="source">{escape(claim.source)}</span>',
        f'<span class="verdict">{finding.verdict.value}</span>{expected}',
        f'<ul class="checks">{checks}</ul>',
        f'<span class="formula">{_raised(escape(claim.formula))}</span>',
        f'<span class="why">{escape(claim.why)}</span><br>{_code(claim)} {seconds}',
    )
    named = (f'<td data-name="{name}">{cell}</td>' for name, cell in zip(COLUMNS, cells, strict=True))
    return f'<tr id="{claim.id}" class="{finding.verdict.name.lower()}">{"".join(named)}</tr>'


def _unbroken(text: str) -> str:
    """Keep numbers such as 1e-12 on one line."""
    return re.sub(r"\d[\d.]*e-\d+", r'<span class="number">\g<0></span>', text)


def _raised(formula: str) -> str:
    """Format W_i^Q, x_{i+1} and e^{−α} with subscripts and superscripts."""
    for sign, tag in (("_", "sub"), (r"\^", "sup")):
        formula = re.sub(sign + r"(?:\{([^}]*)\}|((?:[^\W²³]|≤)+))", rf"<{tag}>\1\2</{tag}>", formula)
    return formula


def _code(claim: Any) -> str:
    """File and function, as a link if the URL of the source code is known."""
    words = f"{escape(claim.code)} · {escape(claim.function)}"
    url = repository()
    if url is None:
        return f'<span class="code">{words}</span>'
    return f'<a class="code" href="{escape(url)}/blob/main/{escape(claim.code)}#L{claim.line}">{words}</a>'


def _figure(finding: Any, i: int) -> str:
    """One plot with its legend and a table of its numbers."""
    claim, curve = finding.claim, finding.curves[i]
    return (
        f'<figure id="{_anchor(claim, i)}" class="{finding.verdict.name.lower()}"><figcaption>'
        f'<span class="y-name">{escape(curve.y_name)}</span><span>{escape(curve.title)}</span>'
        f'<a class="id" href="#{claim.id}">{claim.id}</a></figcaption>{svg(curve)}{legend(curve)}{_numbers(curve)}'
        "</figure>\n"
    )


def _numbers(curve: Curve) -> str:
    head = "".join(f"<td>{x:,.6g}</td>" for x in curve.x)
    rows = "".join(
        f"<tr><th>{escape(line.name)}</th>{''.join(f'<td>{y:,.4g}</td>' for y in line.y)}</tr>" for line in curve.lines
    )
    table = f"<table><tr><th>{escape(curve.x_name)}</th>{head}</tr>{rows}</table>"
    return f"<details><summary>numbers</summary><div>{table}</div></details>"


def _anchor(claim: Any, i: int) -> str:
    return f"plot-{claim.id}-{i + 1}"


def _version() -> str:
    try:
        return metadata.version("headwise")
    except metadata.PackageNotFoundError:
        return "not installed"
