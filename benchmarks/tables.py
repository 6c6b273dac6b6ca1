"""A report in words: lines for the terminal while it runs, Markdown for docs/performance_tables.md."""

from benchmarks.cases import REWRITES, Case
from benchmarks.results import Report, Row, best_kernel, median_of, ratio
from benchmarks.runner import SLOW

TITLES = {
    "forward": "Output alone",
    "small": "Many small sequences",
    "tiny": "Call overhead",
    "statistics": "With statistics of every head",
    "train": "Forward and backward",
    "losses": "Forward and backward, with statistics in the loss",
    "decode": "One query against a cache",
    "long": "131,072 tokens, one head: output, 13 statistics and a pooled 1024 × 1024 map",
    "memory": "Memory at n = 32,768",
}
HEAD = (
    ("", 18),
    ("median ms", 11),
    ("spread", 7),
    ("/ sdpa", 8),
    ("peak", 6),
    ("read", 6),
    ("memory MB", 10),
    ("error", 9),
)

NOISY = 0.2  # spread; above it, a row is marked
TOO_SLOW = "one call would take longer than the patience of that run"


def case_lines(case: Case, rows: list[Row], *, judged: bool) -> list[str]:
    """One case for the terminal."""
    lines = ["", f"{case.name}: {describe(case)}; limited by {case.limit}"]
    lines.append("".join(word.rjust(width) for word, width in HEAD))
    for row in rows:
        if row.skipped is not None:
            lines.append(f"{row.contestant:>18}  left out: {row.skipped}")
            continue
        cells = (
            row.contestant, _ms(row.median), _share(row.spread), _times(ratio(rows, row)), _share(row.peak_share),
            _share(row.bandwidth_share), _mb(row.memory), "" if row.error is None else f"{row.error:.0e}",
        )  # fmt: skip
        lines.append("".join(cell.rjust(width) for cell, (_, width) in zip(cells, HEAD, strict=True)))
        if row.memory_note:
            lines.append(f"{'':>18}  memory unknown: {row.memory_note}")
    if judged:
        lines += [f"{'':>18}  {line}" for line in verdicts(case, rows)]
    return lines


def describe(case: Case) -> str:
    """Sizes, mask and dtype in words."""
    words = [f"q {case.size}"]
    if case.keys or case.kv_heads:
        words.append(f"k, v {case.kv_size}")
    words += [case.mask, case.dtype]
    if case.statistics:
        words.append(f"{len(case.statistics)} statistics")
    if case.pooled:
        words.append(f"pooled to {case.pooled}²")
    if case.backward:
        words.append("forward and backward")
    return ", ".join(words)


def verdicts(case: Case, rows: list[Row]) -> list[str]:
    """Each goal and how far the best kernel is from it."""
    best = best_kernel(rows)
    lines = []
    for goal in case.goals:
        found = None if best is None else ratio(rows, best, goal.of)
        if best is None or found is None:
            lines.append(f"goal {goal}: not known")
        else:
            met = "met" if found <= goal.ratio else "not met"
            lines.append(f"goal {goal}: {best.contestant} is at {found:.2f}, {met}")
    return lines


def markdown(report: Report) -> str:
    """All tables, a family each, under a description of the machine."""
    lines = [f"- {line}" for line in report.machine.lines()]
    if report.quick:
        lines += ["", "**Small sizes (`--quick`): these times say nothing.**"]
    if any((row.spread or 0.0) > NOISY for row in report.rows):
        lines += ["", "Bold spread: other processes disturbed that row; its times and ratios say little."]
    families = {case.family: [] for case in report.cases()}  # type: dict[str, list[Case]]
    for case in report.cases():
        families[case.family].append(case)
    for family, cases in families.items():
        lines += ["", f"### {TITLES[family]}", ""]
        lines += _memory_table(report, cases) if family == "memory" else _time_table(report, cases)
        lines += _left_out(report, cases)
    return "\n".join(lines) + "\n"


def _time_table(report: Report, cases: list[Case]) -> list[str]:
    rows = {case.name: report.of(case.name) for case in cases}
    names = _columns([row for some in rows.values() for row in some])
    share = "bandwidth" if cases[0].family == "decode" else "peak"
    weighed = any(row.memory is not None for some in rows.values() for row in some)  # not with --no-memory
    head = ["case", "SDPA ms", *names, f"share of {share}", *["memory MB"] * weighed, "spread", "goal"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for case in cases:
        some = rows[case.name]
        best = best_kernel(some)
        spreads = [row.spread for row in some if row.spread is not None]
        part = None if best is None else best.bandwidth_share if share == "bandwidth" else best.peak_share
        cells = [
            f"`{case.name}`",
            _ms(median_of(some, "sdpa")),
            *(_cell(some, name) for name in names),
            _share(part) or "—",
            *[" · ".join(_memory(some, name) for name in _compared(best))] * weighed,
            _worst(spreads),
            "; ".join(map(str, case.goals)) or "—",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _worst(spreads: list[float]) -> str:
    if not spreads:
        return "—"
    return f"**≤ {max(spreads):.0%}**" if max(spreads) > NOISY else f"≤ {max(spreads):.0%}"


def _memory_table(report: Report, cases: list[Case]) -> list[str]:
    names = _columns([row for case in cases for row in report.of(case.name)], with_sdpa=True)
    lines = [
        "| case | all weights | " + " | ".join(f"{name}, MB" for name in names) + " |",
        "| --- |" + " ---: |" * (len(names) + 1),
    ]
    for case in cases:
        cells = [f"`{case.name}`", f"{case.matrix_bytes / 1e9:.1f} GB"]
        cells += [_memory(report.of(case.name), name) for name in names]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _left_out(report: Report, cases: list[Case]) -> list[str]:
    """Who did not take part, each reason once."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for row in report.of(case.name):
            if row.skipped is not None:
                why = TOO_SLOW if row.skipped.startswith(SLOW) else row.skipped
                reasons.setdefault((row.contestant, why), []).append(f"`{case.name}`")
    if not reasons:
        return []
    return ["", "Left out:", ""] + [
        f"- {name} in {', '.join(where) if len(where) < len(cases) else 'all of them'}: {why}"
        for (name, why), where in reasons.items()
    ]


def _columns(rows: list[Row], with_sdpa: bool = False) -> list[str]:
    """Kernels first, then peers; only those that took part somewhere."""
    present = [row for row in rows if row.skipped is None]
    kernels = dict.fromkeys(row.contestant for row in present if row.kernel)
    peers = dict.fromkeys(row.contestant for row in present if not row.kernel)
    rewrites = ["rewrite"] if any(name in REWRITES for name in peers) else []
    others = [name for name in peers if name not in REWRITES and (with_sdpa or name != "sdpa")]
    return [*kernels, *rewrites, *others]


def _cell(rows: list[Row], name: str) -> str:
    """A contestant's time over SDPA's, or its milliseconds where SDPA did not take part."""
    mine, base = median_of(rows, name), median_of(rows, "sdpa")
    if mine is None:
        return "—"
    return f"{_ms(mine)} ms" if base is None else f"{mine / base:.2f}"


def _compared(best: Row | None) -> list[str]:
    return ([best.contestant] if best is not None else []) + ["sdpa", "eager"]


def _memory(rows: list[Row], name: str) -> str:
    found = [row.memory for row in rows if row.contestant == name and row.memory is not None]
    return _mb(found[0]) if found else "—"


def _ms(seconds: float | None) -> str:
    return "—" if seconds is None else f"{seconds * 1e3:.4g}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _times(value: float | None) -> str:
    return "—" if value is None else f"{value:.2f}"


def _mb(size: int | None) -> str:
    if size is None:
        return "—"
    return f"{size / 1e6:.0f}" if size >= 1e7 else f"{size / 1e6:.1f}"
