"""Writes the pictures of the report and of the viewer in docs/pictures, by a headless Chromium.

python scripts/page_pictures.py water_margin_simplified.txt                         the pictures of the documentation
python scripts/page_pictures.py water_margin_simplified.txt --looks FOLDER          each page in both languages and
                                                                        themes, on a desktop and on a narrow phone
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "viewer")]

from page_steps import idle  # noqa: E402

import headwise as hw  # noqa: E402
from chromium import Browser, Page  # noqa: E402
from headwise.reports import write_report  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
TOKENS = 20_000  # characters of the text in the viewer
DRAWN = "document.querySelector('#map canvas').width > 300 && document.querySelector('#card').children.length"
PINNED = {
    "en": "#passage=0&layer=1&head=5&kind=mean&scale=sqrt&range=own&pin=126",
    "zh": "#passage=0&layer=1&head=6&kind=mean&scale=sqrt&range=own&pin=74",
}
COMPARED = "#tab=compare&passage=0&layer=1&head=6"
ZOOMED = "&layer=1&head=6&reduce=mean&scale=log&x=3478&y=3475&zoom=24&row=3482&col=3478"


@contextmanager
def viewer(file: Path, lang: str) -> Iterator[str]:
    """The address of a viewer that shows the file."""
    command = [sys.executable, "-m", "headwise", "view", "--no-open", "--lang", lang, "--file", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def show_report(page: Page, path: Path, fragment: str) -> None:
    """Open a report, and wait until it is drawn."""
    page.open(path.as_uri() + fragment)
    page.wait("!document.querySelector('#compare').hidden" if "compare" in fragment else DRAWN)
    page.do("document.fonts.ready.then(() => new Promise((done) => setTimeout(done, 300)))")


def show_viewer(page: Page, address: str, fragment: str = "") -> None:
    """Open the viewer on the text that it computes, and wait until every head is drawn."""
    page.open(address)
    page.wait("location.hash.includes('text=') && document.querySelector('#progress').hidden", 300)
    if fragment:
        page.open(address + page.do("location.hash") + fragment)
        page.wait("!document.querySelector('#map-panel').hidden", 60)
        idle(page)
    page.do("new Promise((done) => setTimeout(done, 500))")


def search(page: Page, text: str, match: int) -> None:
    """Search in the viewer, and go to a match without moving the map."""
    page.do("document.querySelector('#query').focus()")
    page.type(text)
    page.press("Enter")
    page.wait("document.querySelectorAll('#hits li').length > 1")
    page.do(f"document.querySelectorAll('#hits button')[{match}].click()")
    idle(page)
    page.do("new Promise((done) => setTimeout(done, 500))")


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="Water Margin in simplified characters")
    parser.add_argument("--looks", type=Path, help="write pictures of every combination to this folder instead")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "water-margin.txt"
        text.write_text(given.file.read_text(encoding="utf-8")[:TOKENS], encoding="utf-8")
        browser = Browser(folder / "profile")
        try:
            if given.looks is None:
                documentation(browser, folder, text)
            else:
                looks(browser, folder, text, given.looks)
        finally:
            browser.close()


def documentation(browser: Browser, folder: Path, text: Path) -> None:
    """The pictures of the documentation."""
    reports = {lang: write_report(hw.see(lang=lang), folder / f"{lang}.html", lang=lang) for lang in ("en", "zh")}
    shown = (
        ("en", "report", PINNED["en"], 960),
        ("zh", "report.zh", PINNED["zh"], 960),
        ("en", "report_compare", COMPARED, 1090),
    )
    for lang, name, fragment, height in shown:
        page = browser.page(1400, height)
        show_report(page, reports[lang], fragment)
        page.picture(PICTURES / f"{name}.png")
        page.close()
    with viewer(text, "en") as address:
        page = browser.page(1280, 800)
        show_viewer(page, address)
        page.picture(PICTURES / "viewer_heads.png")
        show_viewer(page, address, ZOOMED)
        search(page, "大虫", 4)
        page.picture(PICTURES / "viewer_map.png")
        page.close()


def looks(browser: Browser, folder: Path, text: Path, out: Path) -> None:
    """Every page in both languages and themes, wide and narrow."""
    out.mkdir(parents=True, exist_ok=True)
    sizes = {"wide": (1400, 960), "narrow": (390, 844)}
    for lang in ("en", "zh"):
        path = write_report(hw.see(lang=lang), folder / f"{lang}.html", lang=lang)
        with viewer(text, lang) as address:
            for theme, (size, (width, height)) in product(("light", "dark"), sizes.items()):
                page = browser.page(width, height, theme=theme, touch=size == "narrow")
                for name, fragment in (("report", PINNED[lang]), ("compare", COMPARED)):
                    show_report(page, path, fragment)
                    page.picture(out / f"{name}-{lang}-{theme}-{size}.png")
                show_viewer(page, address)
                page.picture(out / f"heads-{lang}-{theme}-{size}.png")
                show_viewer(page, address, ZOOMED)
                page.picture(out / f"map-{lang}-{theme}-{size}.png")
                page.close()


if __name__ == "__main__":
    main()
