"""The viewer's page in a real browser: search, links, pictures, keys, languages; and text that is only text."""

from itertools import pairwise
from urllib.parse import parse_qsl

import numpy as np
import pytest
from fake_server import weights
from page_steps import IDLE, TEXT, at, change, fragment_of, idle, number, pixels, plot, text_of

pytestmark = pytest.mark.browser


@pytest.mark.thorough
def test_a_search_jumps_marks_and_goes_on(view, fake):
    page = view("layer=0&head=0")
    page.do("document.querySelector('#map').focus()")
    page.press("/")
    assert page.do("document.activeElement.id") == "query"
    page.type("7武松")
    page.press("Enter")
    page.wait("document.querySelectorAll('#hits li').length")
    places = [i for i in range(len(TEXT)) if TEXT.startswith("7武松", i)]
    assert len(places) == 30
    page.wait("document.querySelector('#hits mark')")
    idle(page)
    assert text_of(page, "#hits-say") == "1 of 30"
    assert page.do("[...document.querySelectorAll('#hits .place')].map((e) => e.textContent)") == [
        f"{i:,}" for i in places
    ]
    assert text_of(page, "#hits mark") == "7武松"
    now = fragment_of(page)
    assert float(now["zoom"]) == 18  # characters can be read
    page.press("Escape")
    for step, index in (("n", 1), ("n", 2), ("N", 1), ("N", 0), ("N", 29), ("n", 0), ("n", 1), ("n", 2), ("n", 3)):
        page.press(step)
        idle(page)
        assert text_of(page, "#hits-say") == f"{index + 1} of 30"
    now = fragment_of(page)
    assert (float(now["x"]), float(now["y"])) == (places[3] + 0.5, places[3] + 0.5)
    row = at(page, places[3], places[3], 18, places[3] + 0.5, places[3] + 0.5)
    mark, beside = pixels(page, (plot(page)["left"] - 22, row[1]), (plot(page)["left"] - 22, row[1] + 3 * 18))
    assert mark[3] > 100  # a tint behind the letter
    assert beside[3] == 0
    change(page, "#query", "", "input")
    page.do("document.querySelector('#query').focus()")
    page.type("没有")
    page.press("Enter")
    page.wait("document.querySelector('#hits-say').textContent.includes('No matches')")
    assert text_of(page, "#hits-say") == "No matches for “没有”."


@pytest.mark.thorough
@pytest.mark.parametrize(
    "given",
    [
        "layer=2&head=1&reduce=max&scale=sqrt&x=812.5&y=900.25&zoom=7.5&top=0.25&low=0.001&row=903&col=811",
        "layer=0&head=3&reduce=mean&scale=log",
        "layer=1&head=0&reduce=mean&scale=linear&x=10.5&y=3000&zoom=40",
    ],
)
def test_a_link_restores_the_view(view, chromium, fake, given):
    page = view(given)
    wanted = {"text": "t0"} | dict(parse_qsl(given))
    kept = fragment_of(page)
    for name in ("x", "y"):  # at the map's edge a view is held
        if name in wanted:
            assert abs(float(kept.pop(name)) - float(wanted.pop(name))) < 12
    assert kept == wanted
    before = page.picture()
    other = chromium.page()
    other.open(page.do("location.href"))
    other.wait("!document.querySelector('#stage').hidden")
    idle(other)
    other.do("new Promise((done) => setTimeout(done, 500))")
    page.do("new Promise((done) => setTimeout(done, 200))")
    assert fragment_of(other) == fragment_of(page)
    if "row" in given:
        assert text_of(other, "#readout dt") == "query 903"
        assert number(float(weights(2, 1, [903], [811])[0, 0]))[:4] == text_of(other, "#readout .weight b")[:4]
    assert before[:8] == other.picture()[:8] == b"\x89PNG\r\n\x1a\n"
    other.close()


@pytest.mark.thorough
@pytest.mark.parametrize("wrong", ["layer=7&head=0", "layer=0&head=4", "layer=x", "layer=-1&head=0", "head=1"])
def test_a_link_that_makes_no_sense_shows_all_heads(view, fake, wrong):
    page = view()
    page.open(fake.url + f"#text=t0&{wrong}")
    page.wait("!document.querySelector('#stage').hidden")
    page.do(IDLE)
    assert page.do("document.querySelector('#map-panel').hidden")


@pytest.mark.thorough
def test_a_text_that_is_gone_is_said_to_be(chromium, fake):
    page = chromium.page()
    page.open(fake.url + "#text=gone&layer=0&head=0")
    page.wait("!document.querySelector('#alert').hidden")
    assert text_of(page, "#alert") == "The server no longer has this text; load it again."
    assert not page.do("document.querySelector('#form').closest('[hidden]')")
    page.close()


HOSTILE = '<img src=x onerror="document.title=1">&lt;</script><b>虎\u202e'


@pytest.mark.thorough
def test_hostile_text_is_text(view):
    page = view("layer=0&head=0&x=8&y=12&zoom=30", text=HOSTILE * 4, title=HOSTILE)
    page.mouse("mouseMoved", *at(page, 12, 8, 30, 8, 12))
    page.do("document.querySelector('#query').value = '<img'; document.querySelector('#search-form').requestSubmit()")
    page.wait("document.querySelectorAll('#hits li').length === 4")
    idle(page)
    assert text_of(page, "#reading-title") == HOSTILE
    assert text_of(page, "#hits mark") == "<img"
    assert "<img src=x" in text_of(page, "#hits li .context")
    assert page.do("document.images.length + document.querySelectorAll('b.x, main b > img').length") == 0
    assert page.do("document.title") == "headwise"


@pytest.mark.thorough
def test_the_picture_holds_the_map_its_axes_and_a_title(view):
    page = view("layer=1&head=1&x=700&y=720&zoom=20")
    size = page.do("""(async () => {
      const made = URL.createObjectURL;
      const blob = new Promise((done) => {
        URL.createObjectURL = (what) => { done(what); return made.call(URL, what); };
      });
      HTMLAnchorElement.prototype.click = function () { window.name = this.download; };
      document.querySelector("#save").click();
      const file = await blob, map = await createImageBitmap(file);
      const copy = new OffscreenCanvas(map.width, map.height).getContext("2d", { willReadFrequently: true });
      copy.drawImage(map, 0, 0);
      const inks = (x, y, w, h) => {
        const data = copy.getImageData(x, y, w, h).data, found = new Set();
        for (let i = 0; i < data.length; i += 4) found.add(`${data[i]},${data[i + 1]},${data[i + 2]},${data[i + 3]}`);
        return found.size;
      };
      const { width, height } = map;
      return {
        type: file.type, width, height, name: window.name, title: inks(0, 0, width, 100),
        map: inks(300, 200, width - 400, height - 500), axis: inks(40, 200, 100, height - 500),
        bar: inks(0, height - 130, width, 130), alpha: copy.getImageData(2, 2, 1, 1).data[3],
      };
    })()""")
    box = page.do("(({clientWidth, clientHeight}) => [clientWidth, clientHeight])(document.querySelector('#map'))")
    assert size["type"] == "image/png"
    assert (size["width"], size["height"]) == (round(2 * box[0]), round(2 * (box[1] + 58 + 66)))
    assert size["name"] == "layer1-head1-exact.png"
    assert size["alpha"] == 255
    assert min(size["title"], size["axis"]) > 10  # letters have soft edges
    assert size["map"] > 60
    assert size["bar"] > 200


@pytest.mark.thorough
def test_keys_move_zoom_turn_and_read(view, fake):
    page = view("layer=0&head=3&x=1500&y=1600&zoom=30")
    page.do("document.querySelector('#map').focus()")
    page.press("Enter")
    for key in ("ArrowUp", "ArrowLeft", "ArrowLeft"):
        page.press(key)
    idle(page)
    exact = float(weights(0, 3, [1599], [1498])[0, 0])
    assert text_of(page, "#spoken").startswith("query 1,599")
    assert text_of(page, "#spoken").endswith(f"weight {number(exact)}")
    page.press("ArrowDown", modifiers=8)
    assert text_of(page, "#spoken").startswith("query 1,609")
    kept = fragment_of(page)
    assert (kept["row"], kept["col"]) == ("1609", "1498")
    page.press("Escape")
    before = float(fragment_of(page)["y"])
    page.press("ArrowDown")
    idle(page)
    assert float(fragment_of(page)["y"]) > before
    page.press("]")
    idle(page)
    assert text_of(page, "#map-title") == "Layer 1 · head 0"
    page.press("[")
    page.press("m")
    idle(page)
    kept = fragment_of(page)
    assert (kept["layer"], kept["head"], kept["reduce"]) == ("0", "3", "max")
    page.press("0")
    idle(page)
    assert "zoom" not in fragment_of(page)
    page.press("Escape")
    assert page.do("document.querySelector('#map-panel').hidden")
    assert page.do("[document.activeElement.layer, document.activeElement.head]") == [0, 3]  # and on from there


@pytest.mark.thorough
def test_both_languages_and_both_themes(view):
    page = view("layer=0&head=0", theme="dark")
    assert page.do("document.documentElement.dataset.theme") == "dark"
    assert text_of(page, "#map-title") == "Layer 0 · head 0"
    page.do("document.querySelector('#language').click()")
    idle(page)
    assert page.do("document.documentElement.lang") == "zh"
    assert text_of(page, "#map-title") == "第 0 层 · 第 0 头"
    assert text_of(page, "#reading-facts") == "fake · 3,300 个词元"
    left = page.do("""[...document.querySelectorAll('[data-t]')].filter((e) => e.checkVisibility())
      .map((e) => e.textContent).filter((words) => /^[a-z ]{4,}$/i.test(words) && words !== 'English')""")
    assert left == []


@pytest.mark.thorough
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut_off_at_this_width(view, width):
    page = view("layer=0&head=0", width=width, height=800)
    assert page.do("document.documentElement.scrollWidth") == width
    page.do("document.querySelector('#close').click()")
    page.do(IDLE)
    assert page.do("document.documentElement.scrollWidth") == width


@pytest.mark.thorough
def test_every_control_has_a_name(view):
    page = view("layer=0&head=0")
    nameless = page.do("""[...document.querySelectorAll("button, input, select, textarea, canvas[role]")]
      .filter((e) => e.checkVisibility())
      .filter((e) => !(e.textContent.trim() || e.title || e.getAttribute("aria-label") || e.labels?.length))
      .map((e) => e.outerHTML)""")
    assert nameless == []


@pytest.mark.thorough
def test_words_keep_their_spaces_and_find_room_on_the_axes(view, fake):
    fake.words = True
    page = view("layer=0&head=0&x=9&y=12&zoom=24", text="The tiger is dead, said Song. " * 40)
    page.do("document.querySelector('#query').value = 'dead'")
    page.do("document.querySelector('#search-form').requestSubmit()")
    page.wait("document.querySelector('#hits mark')")
    idle(page)
    assert text_of(page, "#hits li .context").startswith("The tiger is dead, said Song. The")
    page.do("document.querySelector('#map').focus()")
    page.press("Enter")
    page.do(IDLE)
    contexts = page.do("[...document.querySelectorAll('#readout dd')].map((e) => e.textContent)")
    assert all("tiger is dead, said Song" in context for context in contexts)
    # The plot begins further right than beside single characters.
    left = plot(page)["left"]
    inside, margin = pixels(page, (left + 100, plot(page)["top"] + 200), (left + 41, plot(page)["top"] + 200))
    assert inside[3] == 255
    assert margin[3] == 0


def test_a_pinned_token_lists_its_strongest_keys_and_queries_and_a_search_takes_the_pin_away(view, fake):
    page = view("layer=1&head=0&x=600&y=610&zoom=30&row=612&col=604")
    page.wait("document.querySelectorAll('#tops ol').length === 2")
    parts = "[...list.children].map((li) => [li.children[1].textContent, li.lastChild.textContent])"
    keys, queries = page.do(f"[...document.querySelectorAll('#tops ol')].map((list) => {parts})")
    every = np.arange(len(TEXT))
    for found, row in ((keys, weights(1, 0, [612], every)[0]), (queries, weights(1, 0, every, [612])[:, 0])):
        order = np.argsort(-np.nan_to_num(row))[:8]
        assert found == [[f"{i:,}", number(float(row[i]))] for i in order]
    page.do("document.querySelectorAll('#tops button')[1].click()")
    idle(page)
    kept = fragment_of(page)
    assert (kept["row"], kept["col"]) == ("612", keys[1][0])
    page.do("document.querySelector('#query').value = '武松'; document.querySelector('#search-form').requestSubmit()")
    page.wait("document.querySelectorAll('#hits li').length")
    idle(page)
    assert not {"row", "col"} & set(fragment_of(page))
    hit = TEXT.index("武松")
    page.wait(f"[...document.querySelectorAll('#tops .place')].some((e) => e.textContent === '{hit}')")


@pytest.mark.thorough
@pytest.mark.parametrize("width", [390, 1280])
def test_labels_of_the_colour_bar_do_not_meet(view, width):
    page = view("layer=0&head=0&scale=log&top=0.123&low=0.0000456", width=width, height=844)
    drawn = page.do("""(() => {
      const bar = document.querySelector("#bar"), found = [], write = CanvasRenderingContext2D.prototype.fillText;
      CanvasRenderingContext2D.prototype.fillText = function (text, x, ...more) {
        const half = this.measureText(text).width / 2;
        if (this.canvas === bar) found.push([x - half, x + half]);
        return write.call(this, text, x, ...more);
      };
      document.querySelector("#theme").click();
      return [found, bar.clientWidth];
    })()""")
    spans, room = sorted(drawn[0]), drawn[1]
    assert len(spans) >= 2
    assert spans[0][0] >= 0
    assert spans[-1][1] <= room
    assert all(one[1] < other[0] for one, other in pairwise(spans))
