"""The report that most tests of the views show, and reports in a real browser."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from settled import KEPT, SETTLED
from view_samples import passage, report_of

from chromium import Page
from headwise.reports.data import Passage, Report
from headwise.reports.html import write_report


@pytest.fixture
def chinese() -> Report:
    """Two sentences of nine characters, exact."""
    one = passage("武松打虎。虎死了！")
    return report_of(Passage(one.title, one.tokens, one.maps, sentences=[(0, 5), (5, 9)]), title="《水浒传》")


@pytest.fixture
def show(new_page: Callable[..., Page], tmp_path: Path) -> Callable[..., Page]:
    """Open a report: show(report, "layer=0&head=1", theme="dark", …) -> Page. The console stays silent."""

    def opened(report: Report, fragment: str = "", lang: str = "en", **options: Any) -> Page:
        path = write_report(report, tmp_path / "report.html", lang=lang)
        page = new_page(**{"width": 1400, "height": 1000, **options})
        page.before(KEPT)
        page.open(path.as_uri() + ("#" + fragment if fragment else ""))
        page.do(SETTLED)
        return page

    return opened
