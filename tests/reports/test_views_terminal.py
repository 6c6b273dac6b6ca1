"""The table in terminals of several widths, in colour and through a pipe."""

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from view_samples import heads_of, passage, report_of

from headwise.errors import ConfigError
from headwise.reports.data import Report
from headwise.reports.views import print_report

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
    out = io.StringIO()
    print_report(report, Console(file=out, width=width), **options)
    return out.getvalue()


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]


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
    assert "received" in broad.split("\n")[3]


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


@pytest.mark.thorough
def test_long_facts_are_broken_at_blanks_beside_their_names():
    report = replace(wide(), facts=[("loss", "one two three four five six seven"), ("file", "/a" * 20)])
    out = io.StringIO()
    print_report(report, Console(file=out, width=30, force_terminal=True, color_system=None))
    assert [line.rstrip() for line in out.getvalue().splitlines()[:4]] == [
        "loss  one two three four five", "      six seven", f"file  {'/a' * 20}", "",
    ]  # fmt: skip
    assert "one two three four five six seven\n" in printed(report, 30)
