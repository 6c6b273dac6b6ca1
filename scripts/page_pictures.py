"""Writes the pictures of the report, the viewer, a notebook and a terminal in docs/pictures, by a headless Chromium.

python scripts/page_pictures.py water_margin_simplified.txt                         the pictures of the documentation
python scripts/page_pictures.py water_margin_simplified.txt --looks FOLDER          each page in both languages and
                                                                        themes, on a desktop and on a narrow phone
"""

import argparse
import fcntl
import html
import io
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

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
CAT = "The cat sat on the mat because it was tired."
ARCS = "#passage=0&layer=2&head=8&text=layer&pin=9"
ZOOMED = "&layer=1&head=6&reduce=mean&scale=log&x=3478&y=3475&zoom=24&row=3482&col=3478"


CELL = """<!doctype html><meta charset="utf-8"><title>notebook</title><style>
body { margin: 16px 20px; font-family: sans-serif; background: #fff; }
div.cell { display: grid; grid-template-columns: 44px minmax(0, 1fr); align-items: start; margin-bottom: 10px; }
div.cell > span { color: #307fc1; font: 13px/1.6 monospace; padding-top: 8px; }
pre { margin: 0; padding: 8px 10px; background: #f5f5f5; border: 1px solid #ddd; font: 13.5px/1.6 monospace; }
</style><div class="cell"><span>[1]:</span><pre>CODE</pre></div>
<div class="cell"><span>[1]:</span><div>SHOWN</div></div>"""
SCREEN = """<!doctype html><meta charset="utf-8"><title>terminal</title><style>
body {{ margin: 0; padding: 12px 14px; background: #16161d; color: #dcdce4; }}
pre {{ margin: 0; font: 15px/1.25 "DejaVu Sans Mono", monospace; }}
</style><pre>{code}</pre>"""


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


def keep(page: Page, name: str) -> None:
    """Write the window as a picture of the documentation, with a palette of 256 colours."""
    whole = Image.open(io.BytesIO(page.picture())).convert("RGB")
    few = whole.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=5, dither=Image.Dither.NONE)  # keeps rare colours
    few.save(PICTURES / f"{name}.png", optimize=True)


def screen(folder: Path, *command: str) -> str:
    """What `headwise` writes to a terminal of 80 × 24, as a page."""
    read, write = pty.openpty()
    fcntl.ioctl(write, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "HEADWISE_LANG": "en"}
    written = b""
    with subprocess.Popen(
        [sys.executable, "-m", "headwise", *command], stdout=write, stderr=subprocess.DEVNULL, cwd=folder,
        env=environment,
    ):  # fmt: skip
        os.close(write)
        while more := _read(read):
            written += more
    os.close(read)
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(Text.from_ansi(f"$ headwise {' '.join(command)}\n{written.decode()}".replace("\r\n", "\n")))
    return console.export_html(code_format=SCREEN, inline_styles=True)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # its last program has ended
        return b""


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
        (folder / "profile").mkdir()
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
        keep(page, name)
        page.close()
    first_screens(browser, folder, reports["en"])
    with viewer(text, "en") as address:
        page = browser.page(1280, 800)
        show_viewer(page, address)
        keep(page, "viewer_heads")
        show_viewer(page, address, ZOOMED)
        search(page, "大虫", 4)
        keep(page, "viewer_map")
        page.close()


def first_screens(browser: Browser, folder: Path, report: Path) -> None:
    """What a reader sees first: in a terminal, on a phone, in a notebook; and the arcs of all heads of a layer."""
    (folder / "screen.html").write_text(screen(folder, "see"), encoding="utf-8")
    page = browser.page(752, 476)
    page.open((folder / "screen.html").as_uri())
    keep(page, "see")
    page.close()
    for theme in ("light", "dark"):
        page = browser.page(390, 844, theme=theme, touch=True)
        show_report(page, report, "")
        keep(page, f"report_phone_{theme}")
        page.close()
        page = browser.page(1280, 800, theme=theme)
        show_report(page, report, "")
        keep(page, f"report_first_{theme}")
        page.close()
    cat = hw.see(CAT, model="minilm", lang="en")
    page = browser.page(1280, 800)
    show_report(page, write_report(cat, folder / "cat.html", lang="en"), ARCS)
    page.do("scrollTo(0, document.querySelector('main').offsetTop - 64)")
    keep(page, "report_arcs")
    page.close()
    code = html.escape(f"import headwise as hw\n\nhw.show('minilm', text='{CAT}')")
    cell = CELL.replace("CODE", code).replace("SHOWN", cat._repr_html_())
    (folder / "cell.html").write_text(cell, encoding="utf-8")
    page = browser.page(1100, 700)
    page.open((folder / "cell.html").as_uri())
    page.do("new Promise((done) => setTimeout(done, 3000))")
    keep(page, "notebook")
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
