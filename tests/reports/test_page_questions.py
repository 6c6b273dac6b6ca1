"""What the page answers, in a real browser: arcs, search, a token in all heads, two maps side by side, files, links."""

import base64
import csv
import io
import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from settled import SETTLED
from view_samples import HOSTILE, compared, passage, report_of

from chromium import Page
from parameters import thorough

pytestmark = pytest.mark.browser


def texts(page: Page, css: str) -> list[str]:
    return page.do(f"[...document.querySelectorAll({json.dumps(css)})].map((e) => e.textContent)")


def click(page: Page, css: str) -> None:
    page.do(f"document.querySelector({json.dumps(css)}).click()")
    page.do(SETTLED)


def enter(page: Page, css: str, value: str, event: str) -> None:
    page.do(
        f"(() => {{ const e = document.querySelector({json.dumps(css)}); e.value = {json.dumps(value)}; "
        f"e.dispatchEvent(new Event({json.dumps(event)}, {{ bubbles: true }})); }})()"
    )
    page.do(SETTLED)


def saved(page: Page, css: str) -> str:
    click(page, css)
    return page.do("fileText()")


def number(text: str) -> float:
    return float(text.replace("−", "-").replace("+", ""))


@pytest.mark.thorough
def test_arcs_join_queries_to_keys_and_a_pinned_token_keeps_its_own(show, chinese):
    page = show(chinese, "layer=0&head=2&text=arcs")
    weights, tokens = chinese.passages[0].maps[0, 2], chinese.passages[0].tokens
    assert texts(page, "#arcs text") == tokens * 2
    lines = "[...document.querySelectorAll('#arcs path')].map((e) => Number(e.getAttribute('stroke-opacity')))"
    drawn = page.do(lines)
    assert drawn == sorted(drawn)  # the strongest on top
    assert 9 <= len(drawn) <= (weights > 0).sum()
    page.do("document.querySelector('#arcs [data-arc=q4]').dispatchEvent(new MouseEvent('click', { bubbles: true }))")
    page.do(SETTLED)
    assert len(page.do(lines)) == 5 + 4  # its five keys, and the four later queries that attend to it
    assert page.do("document.querySelectorAll('#arcs text.chosen').length") == 2
    assert "pin=4" in page.do("location.hash")
    picture = ElementTree.fromstring(saved(page, "#save-arcs"))
    assert len(picture.findall(".//{http://www.w3.org/2000/svg}path")) == 9


HEADS = "[...document.querySelectorAll('#arc-heads button')]"
LINES = "[...document.querySelectorAll('#arcs path')]"
COLOURS = f"[...new Set({LINES}.map((e) => e.getAttribute('stroke')))]"


@pytest.mark.parametrize("theme", thorough(["light", "dark"], {"light"}))
def test_arcs_of_all_heads_of_a_layer_have_a_colour_each_and_are_switched(show, chinese, theme):
    page = show(chinese, "layer=1&head=2&text=layer", theme=theme)
    maps = chinese.passages[0].maps[1]
    dots = page.do(f"{HEADS}.map((e) => e.style.getPropertyValue('--kind')).filter(Boolean)")
    assert len(set(dots)) == 3
    assert sorted(page.do(COLOURS)) == sorted(dots)
    count = f"{LINES}.length"
    assert page.do(count) == (maps >= maps.max() / 1000).sum()
    # One scale for all heads: the strongest line is that of the largest weight of the layer.
    strongest = page.do(f"{LINES}.at(-1).getAttribute('stroke')")
    assert dots.index(strongest) == np.unravel_index(maps.argmax(), maps.shape)[0]
    click(page, "#arc-heads button")
    assert sorted(page.do(COLOURS)) == sorted(dots[1:])
    assert "off=0" in page.do("location.hash")
    page.do(f"{HEADS}[0].focus()")
    page.press("ArrowRight")
    page.press("Enter")
    page.do(SETTLED)
    assert page.do(COLOURS) == dots[2:]
    assert len(show(chinese, page.do("location.hash")[1:], theme=theme).do(COLOURS)) == 1


def test_a_token_under_the_pointer_shows_its_arcs_of_all_heads_alone(show, chinese):
    page = show(chinese, "layer=0&head=2&text=layer")
    every = page.do(f"{LINES}.length")
    hover = "document.querySelector('#arcs [data-arc=q4]').dispatchEvent(new PointerEvent('{}', {{ bubbles: true }}))"
    page.do(hover.format("pointerover"))
    maps = chinese.passages[0].maps[0]
    own = np.zeros((9, 9), bool)
    own[4], own[:, 4] = True, True
    assert page.do(f"{LINES}.length") == (maps[:, own] >= maps.max() / 1000).sum() < every
    page.do("document.querySelector('#arcs').dispatchEvent(new PointerEvent('pointerleave'))")
    assert page.do(f"{LINES}.length") == every
    picture = ElementTree.fromstring(saved(page, "#save-arcs"))
    names = [e.text for e in picture.findall(".//{http://www.w3.org/2000/svg}text")]
    assert names[-3:] == ["L0H0", "L0H1", "L0H2"]


@pytest.mark.thorough
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_word_is_found_marked_and_visited(show, theme):
    page = show(report_of(passage("The tiger is a Tiger. A tiger!")), "layer=0&head=0", theme=theme)
    enter(page, "#find", "TIGER", "input")
    assert texts(page, "#found") == ["3 matches"]
    marked = (
        "[...document.querySelectorAll('#strip [data-unit]')].flatMap((e, i) => e.classList.contains('hit') ? i : [])"
    )
    assert page.do(marked) == [at + i for at in (4, 15, 24) for i in range(5)]
    page.do("document.querySelector('#find').focus()")
    for at, words in ((4, "1 of 3"), (15, "2 of 3"), (24, "3 of 3"), (4, "1 of 3")):
        page.press("Enter")
        page.do(SETTLED)
        assert texts(page, "#found") == [words]
        assert f"pin={at}" in page.do("location.hash")
    again = show(report_of(passage("The tiger is a Tiger. A tiger!")), page.do("location.hash")[1:])
    assert len(again.do(marked)) == 15
    enter(again, "#find", "lion", "input")
    assert texts(again, "#found") == ["0 matches"]
    assert again.do("document.querySelector('#find-after').disabled")


@pytest.mark.thorough
def test_one_token_in_all_heads_names_the_strongest_heads(show):
    shown = passage("武松打了一只大虎。")
    page = show(report_of(shown), "layer=0&head=0&pin=4")
    maps, tokens = shown.maps, shown.tokens

    def said(which: int) -> list[tuple[int, int, int, float]]:
        lists = f"[...document.querySelectorAll('#everywhere ol')[{which}].children]"
        parts = f"{lists}.map((li) => ['button', 'b', 'span:last-child'].map((c) => li.querySelector(c).textContent))"
        return [(int(h[1]), int(h[3]), tokens.index(t[2:]), float(w)) for h, t, w in page.do(parts)]

    def check(rows: np.ndarray, found: list[tuple[int, int, int, float]]) -> None:
        """rows: [2, 3, 9] the weights that count."""
        assert {(layer, head) for layer, head, _, _ in found} == {at for at in np.ndindex(2, 3) if rows[at].any()}
        assert [weight for *_, weight in found] == sorted((weight for *_, weight in found), reverse=True)
        for layer, head, token, weight in found:
            assert weight == pytest.approx(rows[layer, head].max(), rel=1e-2)
            assert rows[layer, head, token] == pytest.approx(weight, rel=1e-2)

    check(maps[:, :, 4], said(0))
    check(maps[:, :, :, 4], said(1))
    click(page, "#no-sink")
    others = maps[:, :, 4].copy()
    others[..., [0, 4]] = 0
    check(others, said(0))
    layer, head, *_ = said(0)[0]
    click(page, "#everywhere button")
    assert texts(page, "#map-title") == [f"Layer {layer} · head {head}"]


@pytest.mark.thorough
def test_two_heads_are_subtracted(show):
    shown = passage("武松打了一只大虎。")
    page = show(report_of(shown), "tab=sides&beside=0.0.0-0.1.2")
    maps, tokens = shown.maps, shown.tokens
    difference = maps[0, 0] - maps[1, 2]
    items = "[...document.querySelectorAll('#differences li')]"
    lines = f"{items}.map((li) => [li.firstChild, li.lastChild].map((e) => e.textContent))"
    largest = np.sort(np.abs(difference), axis=None)[::-1]
    for (name, value), size in zip(page.do(lines), largest[:12], strict=True):
        assert abs(number(value)) == pytest.approx(size, rel=2e-2, abs=1e-3)
        i, j = map(tokens.index, name.split(" → "))
        assert number(value) == pytest.approx(difference[i, j], rel=2e-2, abs=1e-3)
    rows = list(csv.reader(io.StringIO(saved(page, "#save-d-csv").removeprefix("\ufeff"))))
    assert len(rows) == 1 + 9 * 10 // 2
    assert [float(row[4]) for row in rows[1:]] == pytest.approx(difference[np.tril_indices(9)], abs=8e-3)
    assert "beside=0.0.0-0.1.2" in page.do("location.hash")


@pytest.mark.thorough
def test_two_texts_are_compared_over_what_they_share(show):
    one, other = passage("abcdef"), passage("abXcdef", seed=6)
    page = show(report_of(one, other), "tab=sides&beside=0.1.1-1.1.1")
    rows = list(csv.reader(io.StringIO(saved(page, "#save-d-csv").removeprefix("\ufeff"))))
    kept = [0, 1, 3, 4, 5, 6]
    difference = one.maps[1, 1] - other.maps[1, 1][np.ix_(kept, kept)]
    assert [float(row[4]) for row in rows[1:]] == pytest.approx(difference[np.tril_indices(6)], abs=8e-3)
    assert "6 common positions, of 6 and 7" in texts(page, "#side-note")[0]
    apart = show(report_of(passage("abc"), passage("wxyz")), "tab=sides&beside=0.1.1-1.1.1")
    assert texts(apart, "#side-note")[0].startswith("No difference")
    assert apart.do("document.querySelector('#side-d').hidden")


@pytest.mark.thorough
def test_a_table_holds_what_is_in_view_and_no_formula(show):
    tokens = ["=1+1", '"', "a,b", "\n", "@x", HOSTILE]
    report = report_of(passage(tokens))
    page = show(report, "layer=1&head=2&view=1-6-0-4")
    rows = list(csv.reader(io.StringIO(saved(page, "#save-csv").removeprefix("\ufeff"))))
    assert rows[0] == ["query", "query_text", "key", "key_text", "weight"]
    places = [(i, j) for i in range(1, 6) for j in range(4) if j <= i]
    assert [(int(row[0]), int(row[2])) for row in rows[1:]] == places
    assert [(json.loads(row[1]), json.loads(row[3])) for row in rows[1:]] == [(tokens[i], tokens[j]) for i, j in places]
    assert all(cell[0] not in "=+@-" for row in rows[1:] for cell in row)
    exact = [report.passages[0].maps[1, 2, i, j] for i, j in places]
    assert [float(row[4]) for row in rows[1:]] == pytest.approx(exact, rel=7e-3, abs=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("width", [390, 1400])
def test_a_picture_is_whole_with_every_label_inside(show, width):
    names = ["antidisestablishmentarianism", HOSTILE, *(f"token{i}" for i in range(9))]
    page = show(report_of(passage(names, layers=1, heads=2)), "layer=0&head=1", width=width, height=844)
    code = saved(page, "#save-svg")
    root = ElementTree.fromstring(code)
    assert len(root.findall(".//{http://www.w3.org/2000/svg}rect")) > 121
    outside = page.do(
        """(async () => {
          const read = new DOMParser().parseFromString(await fileText(), "image/svg+xml");
          const svg = document.body.appendChild(read.documentElement), box = svg.getBoundingClientRect();
          return [...svg.querySelectorAll("text")].filter((e) => {
            const b = e.getBoundingClientRect();
            return b.left < box.left - 1 || b.top < box.top - 1 || b.right > box.right + 1 || b.bottom > box.bottom + 1;
          }).map((e) => e.textContent);
        })()"""
    )
    assert outside == []
    assert page.do("document.images.length") == 0
    click(page, "#save-png")
    head = page.do(
        "files.at(-1).arrayBuffer().then((b) => btoa(String.fromCharCode(...new Uint8Array(b.slice(0, 8)))))"
    )
    assert base64.b64decode(head) == b"\x89PNG\r\n\x1a\n"


@pytest.mark.thorough
def test_a_link_keeps_the_zoom_and_refuses_another(show, chinese):
    page = show(chinese, "layer=1&head=1&view=2-7-1-5&pin=3")
    assert "view=2-7-1-5" in page.do("location.hash")
    assert not page.do("document.querySelector('#unzoom').hidden")
    assert page.do("document.querySelectorAll('#strip .out').length") == 3  # the last two, and the first
    for wrong in ("0-99-0-4", "5-2-0-4", "a-b-c-d", "0-9-0-9-0", "3-4-0-9"):
        assert "view=" not in show(chinese, f"layer=0&head=0&view={wrong}").do("location.hash")


@pytest.mark.thorough
def test_tables_have_one_tab_stop(show):
    page = show(compared(), "layer=1&head=1")
    stops = "[...document.querySelectorAll('#table [tabindex], #table button')].filter((e) => e.tabIndex === 0).length"
    assert page.do(stops) == 1
    page.do("document.querySelector('#table [tabindex=\"0\"]').focus()")
    at = "[document.activeElement.layer, document.activeElement.head, document.activeElement.tagName]"
    assert page.do(at) == [1, 1, "TR"]
    page.press("ArrowDown")
    assert page.do(at) == [1, 2, "TR"]
    for _ in range(6):
        page.press("ArrowUp")
    assert page.do("document.activeElement.tagName") == "BUTTON"
    page.press("ArrowRight")
    assert page.do("document.activeElement.textContent") == "Head"
    assert page.do(stops) == 1
    click(page, "#tab-compare")
    assert page.do("[...document.querySelectorAll('#weighty button')].filter((e) => e.tabIndex === 0).length") == 1


@pytest.mark.thorough
def test_on_a_phone_a_tapped_head_comes_into_view(show, chinese):
    page = show(chinese, "layer=0&head=0", width=390, height=844, touch=True)
    assert page.do("document.documentElement.scrollWidth") <= 390
    x, y = page.do(
        "(() => { const e = document.querySelectorAll('.thumb')[4]; e.scrollIntoView({ block: 'center' });"
        " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
    )
    page.touch("touchStart", (x, y))
    page.touch("touchEnd")
    page.wait("document.querySelector('#map-title').textContent === 'Layer 1 · head 1'")
    page.do(SETTLED)
    top, bottom = page.do(
        "(({ top, bottom }) => [top, bottom])(document.querySelector('#map').getBoundingClientRect())"
    )
    assert 0 <= top < bottom <= 844


@pytest.mark.parametrize("lang", thorough(["en", "zh"], {"en"}))
def test_a_phones_first_screen_has_the_title_the_first_finding_and_the_whole_map(show, lang):
    text = "The tiger sleeps in the shade of the old tree. A bird sings to it, and it hears nothing at all."
    page = show(report_of(passage(text), title=text), lang=lang, width=390, height=844, touch=True)
    boxes = "(css) => { const b = document.querySelector(css).getBoundingClientRect(); return [b.top, b.bottom]; }"
    title, first, second, chart, about = (
        page.do(f"({boxes})('{css}')") for css in ("h1", "#findings li", "#findings li:last-child", "#map", ".about")
    )
    assert 0 <= title[0] < title[1] <= first[0] < first[1] < chart[0] < chart[1] <= 844 < about[0]
    assert second == [0, 0]
    click(page, "#findings .more")
    assert page.do("document.querySelector('#findings li:last-child').clientHeight") > 0
    assert page.do("document.querySelector('#findings .more').ariaExpanded") == "true"
    assert page.do("document.documentElement.scrollWidth") <= 390


@pytest.mark.thorough
def test_in_a_long_text_the_chosen_token_comes_into_view(show):
    page = show(report_of(passage("水浒传。" * 350, layers=1, heads=1, cell=4)), "layer=0&head=0&pin=340")
    inside = """(() => {
      const [box, one] = ["#strip", "#strip .pin"].map((css) => document.querySelector(css).getBoundingClientRect());
      return one.top >= box.top - 1 && one.bottom <= box.bottom + 1;
    })()"""
    assert page.do("document.querySelector('#strip').scrollTop") > 0
    assert page.do(inside)


@pytest.mark.thorough
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_paper_shows_everything_in_light_colours(show, theme):
    report = compared("武松打虎。" * 5)
    page = show(report, "layer=0&head=0&pin=12&text=arcs", theme=theme, width=703, height=1000)
    wished = [{"name": "prefers-color-scheme", "value": "light"}]  # as on paper, whatever the screen has
    page.send("Emulation.setEmulatedMedia", media="print", features=wished)
    page.do("dispatchEvent(new Event('beforeprint'))")
    page.do(SETTLED)
    assert page.do("document.documentElement.dataset.theme") == "light"
    assert not page.do("document.querySelector('#compare').hidden || document.querySelector('#maps').hidden")
    ratios = page.do(
        "[...document.querySelectorAll('#map-base, #bar, #matrix')]"
        ".map((c) => c.width / c.height / (c.clientWidth / c.clientHeight))"
    )
    assert ratios == pytest.approx([1, 1, 1], abs=0.02)
    assert page.do(
        "document.querySelector('#table').scrollWidth <= document.querySelector('#table').parentElement.clientWidth"
    )
    tinted = (
        "[...document.querySelectorAll('#strip [data-unit]')].filter((e) => e.style.backgroundImage"
        " && getComputedStyle(e).printColorAdjust === 'exact').length"
    )
    assert page.do(tinted) > 5
    assert page.do("document.querySelector('#arcs').hidden")
    assert all(page.do("[...document.querySelectorAll('.thumb canvas')].map((c) => c.width > 1)"))
    page.send("Emulation.setEmulatedMedia", media="", features=[{**wished[0], "value": theme}])
    page.do("dispatchEvent(new Event('afterprint'))")
    page.do(SETTLED)
    assert page.do("document.documentElement.dataset.theme") == theme
    assert page.do("document.querySelector('#compare').hidden")
    assert not page.do("document.querySelector('#arcs').hidden")
    pages = base64.b64decode(page.send("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"])
    assert 2 <= pages.count(b"/Type /Page\n") <= 5


@pytest.mark.thorough
def test_hostile_text_is_text_everywhere(show):
    tokens = [HOSTILE, "<b>x</b>", "&amp;", "javascript:alert(1)"]
    hostile = passage(tokens, HOSTILE)
    page = show(report_of(hostile, hostile, title=HOSTILE), "layer=0&head=0&pin=2&text=arcs&find=%3Cb%3E")
    assert texts(page, "#arcs text")[1] == "<b>x</b>"
    click(page, "#tab-sides")
    assert page.do("document.images.length + document.querySelectorAll('b.x, #strip b, #differences b b').length") == 0
    assert page.do("document.title") == HOSTILE
