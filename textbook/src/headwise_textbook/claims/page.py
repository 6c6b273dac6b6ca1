"""Findings as one HTML page with plots: a single file without scripts or network access, in light and dark colours.

>>> from headwise_textbook.claims import choose, run, write_page
>>> write_page(run(choose()), "claims.html")                               # doctest: +SKIP
PosixPath('claims.html')
"""

import base64
import hashlib
import os
import platform
import re
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from html import escape
from importlib import metadata, resources
from pathlib import Path

import torch

from headwise.base import write_text
from headwise.errors import ConfigError
from headwise.reports import font_face
from headwise.wording import Bilingual, in_language, language_of
from headwise_textbook.claims.claim import Claim, Finding
from headwise_textbook.claims.evidence import Check
from headwise_textbook.claims.show import by_group, summary
from headwise_textbook.curves import Curve, legend, svg

LEAD = Bilingual(
    "Textbooks and tutorials on multi-head attention make many claims. Here each one is run, on random numbers, on "
    "small layers or on the trained model that comes with headwise, and judged by what was measured. ✓ it is so, ✗ it "
    "is not: the verdict follows from these checks. ⇄ marks controls: the same measurement where the result must be "
    "another one, or on a baseline. Dashed lines were not measured: they are what was claimed, or what a formula says. "
    "Errors are the largest difference over the largest entry, in float64 unless stated otherwise.",
    "关于多头注意力，教科书和教程提出了许多论断。这里逐条实测：用随机数、小型的层，或 headwise 内置的训练好的模型，再"
    "依测得的数值判断。"
    "✓ 相符，✗ 不符，结论由这些检验得出。⇄ 标出对照：在结果必须不同的情形下、或在基线上做同样的测量。虚线不是测得的，"
    "而是所述的或公式给出的。"
    "误差为最大差值与最大元素之比；除另有说明外，用 float64 计算。",
)
TITLE = Bilingual("What the texts claim, measured", "书中的论断，逐条实测")
COLUMNS = {
    "claim": Bilingual("claim", "论断"), "verdict": Bilingual("verdict", "结论"),
    "measured": Bilingual("measured", "实测"), "formula": Bilingual("formula", "公式"),
    "what was run": Bilingual("what was run", "怎样测量"),
}  # fmt: skip
THEMES = {
    "auto": Bilingual("as the system", "跟随系统"), "light": Bilingual("light", "浅色"),
    "dark": Bilingual("dark", "深色"),
}  # fmt: skip
SHOW, COLOURS = Bilingual("show", "显示"), Bilingual("colours", "配色")
LANGUAGE = {"en": "en", "zh": "zh-Hans"}
CONTROL, EXPECTED = Bilingual("control", "对照"), Bilingual("expected", "预期")
PLOT, NUMBERS = Bilingual("plot", "图"), Bilingual("numbers", "数值")
FOOT = Bilingual("Written by {}; verdicts and plots are from one run.", "由 {} 生成；结论与图出自同一次运行。")


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
    kinds = [verdict for verdict in (type(next(iter(count))) if count else ()) if count[verdict]]
    hidden = "".join(
        f":root:has(#only-{v.name.lower()}:checked) :is(.claims tr, figure):not(.{v.name.lower()}):not(.head),"
        f":root:has(#only-{v.name.lower()}:checked) section:not(:has(tr.{v.name.lower()}))"
        "{display:none}\n"
        for v in kinds
    )  # fmt: skip
    all_ = Bilingual(f"all {len(findings)}", f"全部 {len(findings)}")
    choices = [("all", in_language(all_, lang))]
    choices += [(v.name.lower(), f"{in_language(v.words, lang)} {count[v]}") for v in kinds]
    themes = [(name, in_language(words, lang)) for name, words in THEMES.items()]
    written = escape(in_language(FOOT, lang)).format("<code>headwise claims --html</code>")
    body = [
        *_head(summary(findings), lang),
        '<div class="choices">',
        _choice("only", in_language(SHOW, lang), choices)
        + _choice("theme", in_language(COLOURS, lang), themes)
        + "</div>",
        *(_section(title, part, lang) for title, part in by_group(findings).items()),
        f"<footer>{written}</footer>",
    ]
    text = "".join(body)
    han = any("\u3400" <= c <= "\u9fff" for c in text)
    style = (
        resources.files(__package__).joinpath("page.css").read_text("utf-8") + hidden + (font_face(text) if han else "")
    )
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


def repository() -> str | None:
    """The URL of the source code from the package metadata, such as https://example.org/headwise, or None."""
    try:
        given = metadata.metadata("headwise").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return None
    urls = {name.strip().lower(): url.strip() for name, _, url in (line.partition(",") for line in given)}
    found = next((urls[name] for name in ("repository", "source", "source code", "homepage") if name in urls), "")
    return found.rstrip("/") if found.startswith("https://") else None


def _head(said: Sequence[str], lang: str) -> list[str]:
    threads, vectors = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    machine, used = f"{platform.system()} {platform.machine()}", f"{torch.__version__}, {vectors}"
    facts = {
        COLUMNS["measured"]: datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        Bilingual("machine", "机器"): Bilingual(
            f"{machine}, {os.cpu_count()} cores", f"{machine}，{os.cpu_count()} 核"
        ),
        "torch": Bilingual(f"{used}, {threads} thread{'s' * (threads != 1)}", f"{used}，{threads} 线程"),
        "headwise": _version(),
        "Python": platform.python_version(),
    }
    listed = "".join(
        f"<div><dt>{in_language(name, lang)}</dt><dd>{escape(in_language(fact, lang))}</dd></div>"
        for name, fact in facts.items()
    )
    lines = [escape(in_language(line, lang)) for line in said]
    return [
        f'<h1>{escape(in_language(TITLE, lang))}</h1>\n<p class="lead">{escape(in_language(LEAD, lang))}</p>',
        f"<p>{lines[0]}</p>",
        *(f'<p class="wrong">{line}</p>' for line in lines[1:]),
        f'<dl class="facts">{listed}</dl>',
    ]


def _choice(name: str, title: str, options: Sequence[tuple[str, str]]) -> str:
    """Radio buttons that the style sheet reacts to; the first is selected."""
    inputs = "".join(
        f'<input type="radio" name="{name}" id="{name}-{value}"{" checked" if not at else ""}>'
        f'<label for="{name}-{value}">{escape(words)}</label>'
        for at, (value, words) in enumerate(options)
    )
    return f"<fieldset><legend>{title}</legend>{inputs}</fieldset>"


def _section(title: str, part: Sequence[Finding], lang: str) -> str:
    head = "".join(f"<th>{in_language(name, lang)}</th>" for name in COLUMNS.values())
    rows = "\n".join(_row(finding, lang) for finding in part)
    figures = [_figure(finding, i, lang) for finding in part for i in range(len(finding.curves))]
    plots = f'\n<div class="figures">\n{"".join(figures)}</div>' if figures else ""
    return (
        f"<section>\n<h2>{escape(in_language(title, lang))}</h2>\n"
        f'<table class="claims"><thead><tr class="head">{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>{plots}\n'
        "</section>"
    )


def _row(finding: Finding, lang: str) -> str:
    claim, many = finding.claim, len(finding.curves) > 1
    plots = "".join(
        f' <a href="#{_anchor(claim, i)}">{in_language(PLOT, lang)}{f" {i + 1}" if many else ""}</a>'
        for i in range(len(finding.curves))
    )
    seconds = f'<span class="seconds">{finding.seconds:.1f} s</span>' if finding.seconds >= 0.05 else ""
    colon = "：" if lang == "zh" else ": "
    hoped = f"{in_language(EXPECTED, lang)}{colon}{in_language(claim.expected.words, lang)}"
    expected = "" if finding.agrees else f'<br><span class="unexpected">{escape(hoped)}</span>'
    control = f"{in_language(CONTROL, lang)}{colon}{in_language(claim.control, lang)}"
    cells = (
        f'<a class="id" href="#{claim.id}">{claim.id}</a>{plots}<br>{escape(in_language(claim.statement, lang))}'
        f'<ul class="sources">{_sources(claim, lang)}</ul>',
        f'<span class="verdict">{in_language(finding.verdict.words, lang)}</span>{expected}',
        f'<ul class="checks">{_checks(finding.shown, lang)}</ul><span class="control">{escape(control)}</span>'
        f'<ul class="checks controls">{_checks(finding.controls, lang)}</ul>',
        f'<span class="formula">{_raised(escape(in_language(claim.formula, lang)))}</span>',
        f'<span class="why">{escape(in_language(claim.note, lang))}</span><br>{_code(claim)} {seconds}',
    )
    named = (
        f'<td data-name="{in_language(name, lang)}">{cell}</td>'
        for name, cell in zip(COLUMNS.values(), cells, strict=True)
    )
    return f'<tr id="{claim.id}" class="{finding.verdict.name.lower()}">{"".join(named)}</tr>'


def _sources(claim: Claim, lang: str) -> str:
    """List items: each place with what the text says there, and other literature."""
    items = [
        f'<li><span class="source">{escape(in_language(place.where, lang))}</span> '
        f"{escape(in_language(place.says, lang))}</li>"
        for place in claim.places
    ]
    also = f'<li><span class="source">{escape(in_language(claim.also, lang))}</span></li>' if claim.also else ""
    return "".join(items) + also


def _checks(checks: Sequence[Check], lang: str) -> str:
    return "".join(
        f'<li class="{"yes" if check.held else "no"}">{_unbroken(escape(in_language(check.text, lang)))}</li>'
        for check in checks
    )


def _unbroken(text: str) -> str:
    """Keep numbers such as 1e-12 on one line."""
    return re.sub(r"\d[\d.]*e-\d+", r'<span class="number">\g<0></span>', text)


def _raised(formula: str) -> str:
    """Format W_i^Q, x_{i+1} and e^{−α} with subscripts and superscripts."""
    for sign, tag in (("_", "sub"), (r"\^", "sup")):
        formula = re.sub(sign + r"(?:\{([^}]*)\}|((?:[^\W²³]|≤)+))", rf"<{tag}>\1\2</{tag}>", formula)
    return formula


def _code(claim: Claim) -> str:
    """File and function, as a link if the URL of the source code is known."""
    words = f"{escape(claim.code)} · {escape(claim.function)}"
    url = repository()
    if url is None:
        return f'<span class="code">{words}</span>'
    return f'<a class="code" href="{escape(url)}/blob/main/{escape(claim.code)}#L{claim.line}">{words}</a>'


def _figure(finding: Finding, i: int, lang: str) -> str:
    """One plot with its legend and a table of its numbers."""
    claim, curve = finding.claim, finding.curves[i].worded(lang)
    return (
        f'<figure id="{_anchor(claim, i)}" class="{finding.verdict.name.lower()}"><figcaption>'
        f'<span class="y-name">{escape(curve.y_name)}</span><span>{escape(curve.title)}</span>'
        '<a class="id" '
        f'href="#{claim.id}">{claim.id}</a></figcaption>{svg(curve)}{legend(curve)}{_numbers(curve, lang)}'
        "</figure>\n"
    )


def _numbers(curve: Curve, lang: str) -> str:
    head = "".join(f"<td>{x:,.6g}</td>" for x in curve.x)
    rows = "".join(
        f"<tr><th>{escape(line.name)}</th>{''.join(f'<td>{y:,.4g}</td>' for y in line.y)}</tr>" for line in curve.lines
    )
    table = f"<table><tr><th>{escape(curve.x_name)}</th>{head}</tr>{rows}</table>"
    return f"<details><summary>{in_language(NUMBERS, lang)}</summary><div>{table}</div></details>"


def _anchor(claim: Claim, i: int) -> str:
    return f"plot-{claim.id}-{i + 1}"


def _version() -> str:
    try:
        return metadata.version("headwise")
    except metadata.PackageNotFoundError:
        return "not installed"
