"""The documentation site, built and walked through. Some fifty seconds: pytest -m slow tests/app/test_site.py"""

import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import pytest

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := found.get(name))}
        for name in ("href", "src"):
            if value := found.get(name):
                self.links.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("sphinx", "myst_parser", "furo", "latex2mathml", "sphinx_copybutton"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", str(DOCS), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "WARNING" in line and "more than one target" not in line] == []
    return folder


def broken(site: Path) -> Iterator[str]:
    pages = {path: Page(path.read_text("utf-8")) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            target, anchor = urldefrag(link)
            if urlparse(target).scheme or target.startswith("//"):
                continue
            to = (path.parent / unquote(target.partition("?")[0])).resolve() if target else path
            if not to.exists() or (anchor and to in pages and unquote(anchor) not in pages[to].anchors | {""}):
                yield f"{path.relative_to(site)}: {link}"


def test_no_link_within_the_site_is_broken(site: Path) -> None:
    assert list(broken(site)) == []


def test_both_guides_and_the_reference_are_there_and_nothing_is_loaded_from_the_network(site: Path) -> None:
    for name in ("guide/en/splitting.html", "guide/zh/splitting.html", "api/nn.html", "claims.zh.html"):
        text = (site / name).read_text("utf-8")
        assert "<math" in text or "guide" not in name
        assert 'src="http' not in text


def test_the_reference_has_types_sources_and_links_to_other_packages(site: Path) -> None:
    pages = {path.name: path.read_text("utf-8") for path in (site / "api").glob("*.html")}
    assert [name for name, text in pages.items() if "Alias for field" in text] == []
    assert all('class="viewcode-link"' in pages[name] for name in ("top.html", "nn.html", "stats.html"))
    assert 'href="https://docs.pytorch.org/docs/stable/tensors.html#torch.Tensor"' in pages["top.html"]
    assert "copybutton.js" in pages["top.html"]
    assert "make test-all" in (site / "contributing.html").read_text("utf-8")
    assert "Unreleased" in (site / "changelog.html").read_text("utf-8")
