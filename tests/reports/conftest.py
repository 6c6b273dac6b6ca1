"""The report that most tests of the views show, and reports in a real browser."""

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from settled import KEPT, SETTLED
from view_samples import passage, report_of

from chromium import Page
from headwise.reports.data import Passage, Report
from headwise.reports.page import write_report

HELPERS = (Path(__file__).parent / "browser.js").read_text(encoding="utf-8")


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


@pytest.fixture
def played(new_page: Callable[..., Page], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What steps (JavaScript) put into `out`, run in a copy of the report whose policy lets this one script in:
    played(report, steps, "layer=0&head=1") -> out. The console stays silent."""

    def run(report: Report, steps: str, fragment: str = "") -> dict[str, Any]:
        code = write_report(report, tmp_path / "page.html").read_text(encoding="utf-8")
        script = "{\n" + HELPERS + "\nconst steps = async () => {\n" + steps + "\n};\n}"
        named = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        code = code.replace("script-src ", f"script-src 'sha256-{named}' ", 1)
        code = code.replace("</body>", f"<script>{script}</script></body>")
        (tmp_path / "played.html").write_text(code, encoding="utf-8")
        page = new_page(width=1400, height=1200)
        page.open((tmp_path / "played.html").as_uri() + fragment)
        page.wait("document.documentElement.dataset.result")
        out = json.loads(page.do("document.documentElement.dataset.result"))
        assert "error" not in out, out["error"]
        return out

    return run
