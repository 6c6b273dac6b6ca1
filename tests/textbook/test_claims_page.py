"""`headwise claims --html`: everything that was found, in one file that loads nothing and runs nothing."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib import metadata
from pathlib import Path

import pytest

from headwise.errors import ConfigError
from headwise.wording import Bilingual
from headwise_textbook.claims import Finding, choose, run, show, sizes, write_page
from headwise_textbook.claims.show import by_group
from headwise_textbook.curves import Curve

IDS = ["splitting", "splitting-lowers-cost", "four-d-squared", "kv-cache", "many-heads-beat-one", "block-diagonal"]
HOSTILE = '</td></svg><script>alert(1)</script><img src=x onerror="alert(2)">&amp;\'"'
VOID = {"meta", "br", "input"}


@pytest.fixture(scope="module")
def found() -> list[Finding]:
    return run(choose(IDS))


class Reader(HTMLParser):
    """Checks that tags are closed in order, and keeps the tags, the attributes and the text of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: dict[str, str] = {}
        self.row = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr" and dict(attrs).get("id"):
            self.row = dict(attrs)["id"]
            self.rows[self.row] = ""

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "tr":
            self.row = ""

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.row:
            self.rows[self.row] += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


def flat(text: str) -> str:
    return "".join(text.split())


def test_every_claim_is_there_with_all_that_was_found(found, tmp_path):
    reader = read(write_page(found, tmp_path / "claims.html").read_text(encoding="utf-8"))
    assert set(reader.rows) == set(IDS)
    for one in found:
        row = flat(reader.rows[one.claim.id])
        assert flat(one.claim.statement) in row
        assert all(flat(place.where) + flat(place.says) in row for place in one.claim.places)
        assert flat(one.claim.note) in row
        assert flat(one.claim.control) in row
        assert flat(one.verdict.value) in row
        assert flat(re.sub(r"[_^]\{([^}]*)\}|[_^]", r"\1", one.claim.formula)) in row
        assert flat(f"{one.claim.code} · {one.claim.function}") in row
        for check in one.checks:
            assert flat(check.text) in row
        assert "expected:" not in row


def test_every_curve_is_drawn_and_linked(found):
    reader = read(show.to_html(found))
    curves = sum(len(one.curves) for one in found)
    figures = [attributes["id"] for tag, attributes in reader.tags if tag == "figure"]
    targets = [a["href"][1:] for tag, a in reader.tags if tag == "a" and a["href"].startswith("#plot-")]
    assert len(figures) == curves > 2
    assert figures == targets
    ids = [attributes["id"] for _, attributes in reader.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))


def test_nothing_is_loaded_and_nothing_runs(found):
    text = show.to_html(found)
    text = re.sub(r'<a class="code" href="https://[^"]*"', '<a class="code"', text)  # a link loads nothing
    reader = read(text)
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & {tag for tag, _ in reader.tags}
    for tag, attributes in reader.tags:
        assert not {"src", "style", "srcset", "xlink:href"} & set(attributes), tag
        assert not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"url\(|@import|https?:", text)
    style = re.search(r"<style>(.*?)</style>", text, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'sha256-{digest}'" in text


def test_what_a_claim_says_is_text(found):
    one = found[1]
    text = Bilingual(HOSTILE, HOSTILE)
    places = tuple(replace(place, says=text) for place in one.claim.places)
    hostile = replace(one.claim, statement=text, formula=text, also=text, control=text, note=text, places=places)
    checks = tuple(replace(check, what=text) for check in one.checks)
    curve = Curve.of(HOSTILE, HOSTILE, HOSTILE, {HOSTILE: {1: 1.0, 2: 2.0}})
    reader = read(show.to_html([Finding(hostile, checks, 1.0, (curve,))]))
    assert not {"script", "img"} & {tag for tag, _ in reader.tags}
    assert HOSTILE in reader.rows[one.claim.id]


@pytest.mark.thorough
def test_the_page_in_chinese_has_no_english_words_of_its_own(found):
    text = show.to_html(found, "zh")
    reader = read(text)
    for one in found:
        row = flat(reader.rows[one.claim.id])
        assert flat(one.claim.statement.zh) in row
        assert flat(one.verdict.words.zh) in row
        assert all(flat(place.says.zh) in row for place in one.claim.places)
        assert all(flat(check.text.zh) in row for check in one.checks)
    assert '<html lang="zh-Hans">' in text
    shown = re.sub(r"<[^>]*>", " ", text.split("</style>")[1])
    for word in ("what was run", "holds", "numbers", "colours", "measured", "control"):
        assert word not in shown, word


def test_a_contradiction_is_told(found):
    wrong = replace(found[0], claim=replace(found[0].claim, expected=found[1].verdict))
    reader = read(show.to_html([wrong, *found[1:]]))
    assert "expected: does not hold" in reader.rows["splitting"]
    assert "Not as expected: splitting." in show.to_html([wrong, *found[1:]])


@pytest.mark.parametrize(
    ("lines", "url"),
    [
        (["Repository, https://example.org/headwise/"], "https://example.org/headwise"),
        (["Homepage, https://example.org/a", "Source, https://example.org/b"], "https://example.org/b"),
        (["Repository, javascript:alert(1)"], None),
        (["Repository, https://example.invalid/headwise"], None),
        (["Changelog, https://example.org/c"], None),
        (None, None),
    ],
)
def test_code_is_linked_where_the_project_says_where_it_is(found, monkeypatch, lines, url):
    class Installed:
        def get_all(self, name):
            assert name == "Project-URL"
            return lines

    monkeypatch.setattr(metadata, "metadata", lambda name: Installed())
    assert show.repository() == url
    links = [a["href"] for tag, a in read(show.to_html(found)).tags if tag == "a" and a.get("class") == "code"]
    assert len(links) == (len(found) if url else 0)
    if url:
        claim = found[0].claim
        assert links[0] == f"{url}/blob/main/textbook/src/headwise_textbook/claims/formulas.py#L{claim.line}"
        root = Path(show.__file__).parents[4]
        lines_there = (root / claim.code).read_text(encoding="utf-8").splitlines()
        named = next(line for line in lines_there[claim.line - 1 :] if line.startswith("def "))
        assert named.startswith(f"def {claim.function}(")


def test_a_folder_is_refused_and_an_old_page_stays_if_writing_fails(found, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="is a folder"):
        write_page(found, tmp_path)
    path = tmp_path / "page.html"
    path.write_text("old", encoding="utf-8")
    monkeypatch.setattr(show, "to_html", lambda findings, lang: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_page(found, path)
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


# The command.


@pytest.mark.thorough
def test_command_writes_the_page_beside_what_it_says(headwise, tmp_path):
    path = tmp_path / "new" / "claims.html"
    code, out, _ = headwise("claims", "--only", "splitting,mqa-parameters", "--html", str(path))
    assert code == 0
    assert "open it in a browser" in " ".join(out.split())
    assert set(read(path.read_text(encoding="utf-8")).rows) == {"splitting", "mqa-parameters"}
    path.unlink()
    code, out, _ = headwise("claims", "--only", "splitting", "--json", "--html", str(path))
    assert (code, [one["id"] for one in json.loads(out)]) == (0, ["splitting"])
    assert path.exists()


def test_command_takes_all_claims_where_none_is_named(headwise, tmp_path, monkeypatch):
    asked = []
    quick = choose(["splitting"])
    monkeypatch.setattr("headwise_textbook.claims.choose", lambda only=(), *, slow=False: asked.append(slow) or quick)
    assert headwise("claims", "--html", str(tmp_path / "claims.html")).code == 0
    assert asked[0] is True


def test_command_writes_the_page_also_if_a_verdict_is_not_the_expected_one(headwise, tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "size_of", lambda module: 1)
    code, _, _ = headwise("claims", "--only", "mqa-parameters", "--html", str(tmp_path / "claims.html"))
    assert code == 1
    assert "Not as expected: mqa-parameters." in (tmp_path / "claims.html").read_text(encoding="utf-8")


def test_command_refuses_a_folder_before_it_measures(headwise, tmp_path):
    code, out, err = headwise("claims", "--html", str(tmp_path))
    assert (code, out) == (2, "")
    assert "is a folder" in err
    assert len(err.strip().splitlines()) == 1


# In a browser.

LOOK = """
addEventListener("load", () => {
  const seen = (css) => [...document.querySelectorAll(css)].filter((e) => e.getClientRects().length);
  const out = {};
  for (const kind of ["all", "holds", "fails"]) {
    document.getElementById("only-" + kind).checked = true;
    out[kind] = [seen("tr[id]").map((e) => e.id), seen("figure").length, seen("section").length];
  }
  document.getElementById("only-all").checked = true;
  const paper = () => getComputedStyle(document.body).backgroundColor;
  for (const theme of ["light", "dark"]) {
    document.getElementById("theme-" + theme).checked = true;
    out[theme] = paper();
  }
  out.strokes = [...document.querySelectorAll("figure path")].map((e) => getComputedStyle(e).stroke);
  out.overflow = document.documentElement.scrollWidth - innerWidth;
  document.documentElement.dataset.result = JSON.stringify(out);
});
"""


@pytest.mark.thorough
@pytest.mark.browser
@pytest.mark.parametrize("width", [500, 1400])
def test_page_in_a_browser_shows_what_is_chosen_in_both_themes(found, new_page, tmp_path, width):
    code = base64.b64encode(hashlib.sha256(LOOK.encode()).digest()).decode()
    text = show.to_html(found).replace("default-src 'none'; ", f"default-src 'none'; script-src 'sha256-{code}'; ", 1)
    path = tmp_path / "page.html"
    path.write_text(text.replace("</body>", f"<script>{LOOK}</script></body>"), encoding="utf-8")
    tab = new_page(width=width, height=1200)
    tab.open(path.as_uri())
    tab.wait("document.documentElement.dataset.result")
    out = json.loads(tab.do("document.documentElement.dataset.result"))
    assert out["all"][0] == [claim for part in by_group(found).values() for claim in (f.claim.id for f in part)]
    for kind, verdict in (("holds", "holds"), ("fails", "does not hold")):
        part = [one for one in found if one.verdict.value == verdict]
        assert set(out[kind][0]) == {one.claim.id for one in part}
        assert out[kind][1] == sum(len(one.curves) for one in part)
        assert out[kind][2] == len(by_group(part))
    assert out["light"] == "rgb(244, 243, 238)"
    assert out["dark"] == "rgb(17, 17, 24)"
    assert out["strokes"]
    assert "none" not in out["strokes"]
    assert out["overflow"] <= 0
