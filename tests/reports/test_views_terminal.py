"""The table in terminals of several widths, in colour and through a pipe."""

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from view_samples import heads_of, label, passage, report_of, weights

from headwise.analysis.checks import head_name
from headwise.errors import ConfigError
from headwise.reports.data import Passage, Report
from headwise.reports.findings import HEADS, findings
from headwise.reports.messages import message
from headwise.reports.passages import in_words
from headwise.reports.views import LINES, print_report
from headwise.wording import in_language

NAMES = (
    "entropy", "normalized_entropy", "effective_keys", "top1_mass", "max_logit", "mean_distance", "local_mass",
    "sink_mass", "previous_mass", "self_mass", "received_mass", "punctuation_mass",
)  # fmt: skip


def wide() -> Report:
    """Two layers of three heads with every statistic that `see` gives."""
    rng = np.random.default_rng(1)
    statistics = heads_of(3, 3, columns={name: rng.random((2, 3)) * 10 ** (k % 4) for k, name in enumerate(NAMES)})
    patterns = [["previous 0.93, nearby 0.95", "after the same character 0.61, first 0.22", "mixed"]] * 2
    return Report("r", [passage("水浒")], statistics, patterns, [("model", "small"), ("kernel", "fast")], ["A note."])


def printed(report: Report, width: int, **options) -> str:
    """All heads, unless options say otherwise."""
    out = io.StringIO()
    print_report(report, Console(file=out, width=width), **{"everything": True, **options})
    return out.getvalue()


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.split()[:1] and line.split()[0].isdigit()]


@pytest.mark.thorough_except("200")
@pytest.mark.parametrize("width", [80, 120, 200])
def test_every_head_has_one_line_that_fits(width):
    text = printed(wide(), width)
    assert [(row[0], row[1]) for row in rows(text)] == [(str(la), str(h)) for la in range(2) for h in range(3)]
    assert max(cell_len(line.rstrip()) for line in text.splitlines()) <= width
    assert "previous 0.93" in text
    assert "…" not in text
    assert "\x1b" not in text


@pytest.mark.thorough
def test_what_has_no_room_is_named():
    narrow, broad = printed(wide(), 80), printed(wide(), 200)
    assert "Not shown here: received_mass, normalized_entropy" in narrow
    assert "Not shown here" not in broad
    assert "nearby 0.95" in broad
    assert any("received" in line and "entropy" in line for line in broad.split("\n"))


def test_numbers_are_those_of_the_report_and_bars_say_which_is_largest():
    report = report_of(passage("武松打虎"))
    entropy = report.statistics.dense("entropy").numpy()
    found = rows(printed(report, 120))
    assert [float(row[2]) for row in found] == pytest.approx(entropy.ravel(), abs=0.005)
    assert found[int(entropy.argmax())][3] == "█"
    assert found[2][4] == "—"


def test_sorting_puts_the_largest_first_and_the_unknown_last():
    report = report_of(passage("武松打虎"))
    sink = report.statistics.dense("sink_mass").numpy()
    known = sorted((at for at in np.ndindex(2, 3) if at != (0, 2)), key=lambda at: -sink[at])
    found = [(int(row[0]), int(row[1])) for row in rows(printed(report, 120, sort="sink_mass"))]
    assert found == [*known, (0, 2)]
    with pytest.raises(ConfigError, match=r"'entropi'.*'entropy' or 'sink_mass'"):
        printed(report, 80, sort="entropi")


@pytest.mark.thorough
def test_the_column_that_is_sorted_by_is_never_dropped():
    assert "received ↓" in printed(wide(), 80, sort="received_mass")


def test_users_words_are_not_taken_for_markup():
    report = report_of(passage("ab"), facts=[("[red]x", "[bold]y[/bold]")], notes=["[/nonsense]"])
    text = printed(report, 80)
    assert "[red]x  [bold]y[/bold]" in text
    assert "[/nonsense]" in text


def test_no_statistics_and_no_patterns():
    text = printed(Report("r", [passage("ab")], heads_of(3, 3), [[""] * 3] * 2), 80)
    assert len(rows(text)) == 6
    assert "pattern" not in text
    assert "No head has a label" in text


@pytest.mark.thorough
def test_long_facts_are_broken_at_blanks_beside_their_names():
    report = replace(wide(), facts=[("loss", "one two three four five six seven"), ("file", "/a" * 20)])
    out = io.StringIO()
    print_report(report, Console(file=out, width=30, force_terminal=True, color_system=None), everything=True)
    assert [line.rstrip() for line in out.getvalue().splitlines()[:4]] == [
        "loss  one two three four five", "      six seven", f"file  {'/a' * 20}", "",
    ]  # fmt: skip
    assert "one two three four five six seven\n" in printed(report, 30)


def many(n: int = 14, **options) -> Report:
    """Six layers of eight heads with labels, tendencies, importance, and words as tokens."""
    counts = [8] * 6
    rng = np.random.default_rng(2)
    columns = {name: rng.random((6, 8)) * 9 for name in NAMES}
    kinds = [label("first", 0.7), label("previous", 0.91), label("local", 0.5, sure=False)]
    labels = [[[replace(kinds[h % 3], score=0.9 - (8 * i + h) / 100)] for h in range(8)] for i in range(6)]
    words = [f"word{i}" for i in range(n)]
    facts = [(message("model"), "six layers"), (message("text"), f"{n} tokens"), (message("kernel"), "fast")]
    return Report(
        "many", [Passage("many", words, weights(n, 6, 8))], heads_of(*counts, columns=columns),
        [list(map(in_words, row)) for row in labels], facts, [message("explained"), "A note."], labels=labels,
        importance=heads_of(*counts, columns={"loss without it": rng.random((6, 8))}), **options,
    )  # fmt: skip


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("width", [80, 120])
def test_what_is_printed_first_fits_a_screen_and_ends_with_the_path(width, lang):
    caution = message("unknown_text", loss=6.5, most=4.1, choices=665, usual=60)
    nan = message("not_finite", layer=1, head=2, count=3)
    for report in (many(), replace(many(), facts=[*many().facts, (message("caution"), caution)], notes=[nan] * 9)):
        last = [Text("Wrote the report to report.html; open it in a browser.")]
        lines = printed(report, width, everything=False, lang=lang, last=last).splitlines()
        assert len(lines) <= LINES
        assert max(map(cell_len, lines)) <= width
        assert lines[-1].rstrip() == last[0].plain
        assert [line[:2] for line in lines if line[1:3] == ". "] == ["1.", "2.", "3."]
    assert any(in_language(nan, lang) in line for line in lines)  # what the reader must know is there
    assert in_language(caution, lang)[:12] in "\n".join(lines)


@pytest.mark.thorough
def test_eight_heads_with_their_evidence_begin_with_those_of_the_findings():
    report = many()
    text = printed(report, 100, everything=False)
    heads = [line.split() for line in text.splitlines() if line[:1] == "L" and line[2:3] == "H"]
    assert len([row for row in heads if row[0][-1] != ":"]) == HEADS
    found = findings(report)
    assert len(found) == 3
    assert [row[0] for row in heads[:3]] == [head_name(*one.heads[0]) for one in found]
    assert heads[0][:4] == ["L0H0", "first", "0.90", "0.08"]
    assert "--all prints all 48 heads" in text
    assert "kernel" not in text
    assert "fast" in printed(report, 100)


def test_a_statistic_that_is_sorted_by_has_its_column():
    report = many()
    text = printed(report, 100, everything=False, sort="sink_mass")
    values = report.statistics.dense("sink_mass").numpy()
    best = sorted(report.heads, key=lambda at: -values[at])[:HEADS]
    shown = [line.split()[0] for line in text.splitlines() if line[2:3] == "H" and ":" not in line]
    assert shown == [head_name(*at) for at in best]
    assert "↓" in text
