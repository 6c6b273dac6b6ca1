"""The viewer's map in a real browser, on maps that are formulas: exact, thrifty, where it should be."""

from itertools import pairwise

import numpy as np
import pytest
from fake_server import cells, decoded, encode, weights
from page_steps import BOX, IDLE, TEXT, at, change, colour, fragment_of, idle, number, pixels, plot, text_of

pytestmark = pytest.mark.browser


@pytest.mark.thorough
def test_a_cell_of_one_token_shows_its_weight_exactly(view):
    x, y, zoom, low, top = 1203.5, 1210.25, 30, 0.0, 0.6
    page = view(f"layer=1&head=2&x={x}&y={y}&zoom={zoom}&scale=linear&low={low}&top={top}")
    assert text_of(page, "#level") == "every weight"
    tile = decoded(encode(cells(1, 2, len(TEXT), 1, range(1024, 1280), range(1024, 1280))[None]))[0]
    places = [(1210, 1203), (1205, 1199), (1214, 1209), (1208, 1208), (1203, 1195), (1216, 1193)]
    points = [at(page, row, col, zoom, x, y) for row, col in places]
    for (row, col), point, pixel in zip(places, points, pixels(page, *points), strict=True):
        exact = float(weights(1, 2, [row], [col])[0, 0])
        told = tile[row - 1024, col - 1024]
        assert told == pytest.approx(exact, rel=2**-10)
        assert np.abs(colour(told, low, top) - pixel[:3]).max(1).min() <= 1, (row, col)
        page.mouse("mouseMoved", *point)
        page.do(IDLE)
        assert text_of(page, "#readout .weight b") == number(told)
        assert text_of(page, "#readout .weight small") == "weight"
        sides = page.do("[...document.querySelectorAll('#readout dt')].map((e) => e.textContent)")
        assert sides == [f"query {row:,}", f"key {col:,}"]
        marks = page.do("[...document.querySelectorAll('#readout mark')].map((e) => e.textContent)")
        signs = {" ": "␣", "\n": "↵"}
        assert marks == [signs.get(TEXT[i], TEXT[i]) for i in (row, col)]
    page.mouse("mouseMoved", *at(page, 1203, 1212, zoom, x, y))
    page.do(IDLE)
    assert text_of(page, "#readout .weight") == "–masked"


def test_a_pinned_cell_is_read_from_the_map_in_all_heads_and_tiny_weights_keep_their_digits(view):
    page = view("layer=0&head=1&x=60.5&y=400.5&zoom=12&scale=log")
    for col, said in ((60, number(float(weights(0, 1, [400], [60])[0, 0]))), (88, "< 5.4e-20")):
        page.mouse("mouseMoved", *at(page, 400, col, 12, 60.5, 400.5))
        page.do(IDLE)
        assert text_of(page, "#readout .weight b") == said
    page.click(*at(page, 400, 60, 12, 60.5, 400.5))
    page.wait("!document.querySelector('#pairs').hidden")
    exact = [[float(np.float32(weights(i, h, [400], [60])[0, 0])) for h in range(n)] for i, n in enumerate((4, 4, 3))]
    assert float(text_of(page, "#readout .weight b")) == pytest.approx(exact[0][1], rel=1e-5)
    assert text_of(page, "#pairs h3") == "This pair of tokens, in all heads"
    titles = page.do("[...document.querySelectorAll('#pairs button')].map((e) => e.title)")
    assert titles == [f"Layer {i} · head {h}: {number(w)}" for i, row in enumerate(exact) for h, w in enumerate(row)]
    page.do("document.querySelectorAll('#pairs button')[10].click()")
    idle(page)
    assert text_of(page, "#map-title") == "Layer 2 · head 2"
    assert float(text_of(page, "#readout .weight b")) == pytest.approx(exact[2][2], rel=1e-5)


@pytest.mark.thorough
def test_coarser_cells_say_what_they_are(view):
    page = view("layer=0&head=3&x=1500&y=1600&zoom=0.3")  # 0.25 < 0.3 < 0.5: cells of four tokens
    page.mouse("mouseMoved", *at(page, 1600, 1500, 0.3, 1500, 1600))
    page.do(IDLE)
    assert text_of(page, "#level") == "mean of 4×4"
    sides = page.do("[...document.querySelectorAll('#readout dt span')].map((e) => e.textContent)")
    (top, last), (left, end) = (map(int, side.replace(",", "").split("–")) for side in sides)
    assert (last - top, end - left, top % 4, left % 4) == (3, 3, 0, 0)
    assert max(abs(top - 1600), abs(left - 1500)) <= 8  # a pixel is three tokens
    tile = decoded(encode(cells(0, 3, len(TEXT), 4, range(256, 512), range(256, 512))[None]))[0]
    value = tile[top // 4 - 256, left // 4 - 256]
    assert text_of(page, "#readout .weight") == f"{number(value)}mean of 4×4 weights"
    change(page, "#reduce", "max")
    idle(page)
    assert text_of(page, "#readout .weight") == f"{number(1.5 * value)}largest of 4×4 weights"
    assert text_of(page, "#level") == "maximum of 4×4"


@pytest.mark.thorough
def test_panning_asks_only_for_new_tiles_and_only_for_what_is_in_view(view, fake):
    x, y, zoom = 1400, 1800, 2
    page = view(f"layer=0&head=0&x={x}&y={y}&zoom={zoom}")

    def in_view() -> set[str]:
        box, now = plot(page), fragment_of(page)
        spans = []
        for middle, size in ((now["y"], box["height"]), (now["x"], box["width"])):
            half = size / 2 / zoom
            first, last = max(0, float(middle) - half) // 256, min(len(TEXT), float(middle) + half - 1e-3) // 256
            spans.append(range(int(first), int(last) + 1))
        return {f"0/0/1/{row}/{col}?mean" for row in spans[0] for col in spans[1]}

    first = fake.tiles()
    assert len(first) == len(set(first))
    assert set(first) == in_view()
    box = plot(page)
    page.drag(box["left"] + 600, box["top"] + 400, -500, -300)
    idle(page)
    second = fake.tiles()[len(first) :]
    assert second
    assert set(second) == in_view() - set(first)
    page.drag(box["left"] + 100, box["top"] + 100, 500, 300)
    idle(page)
    assert fake.tiles()[len(first) + len(second) :] == []
    page.wait(f"location.hash.includes('&x={x}&y={y}&')")  # the address follows by itself


@pytest.mark.thorough
def test_what_nobody_may_see_is_not_asked_for(view, fake):
    page = view("layer=0&head=0")
    before = len(fake.tiles())
    box = plot(page)
    side = min(box["width"], box["height"])
    corner = (box["left"] + box["width"] / 2 + 0.4 * side, box["top"] + box["height"] / 2 - 0.4 * side)  # upper right
    for _ in range(12):
        page.mouse("mouseWheel", *corner, deltaX=0, deltaY=-200)
        idle(page)
    assert text_of(page, "#level") == "every weight"
    asked = [list(map(int, line.split("?")[0].split("/")[3:5])) for line in fake.tiles()[before:]]
    assert all(col <= row for row, col in asked)
    assert len(asked) < 12  # from nine levels
    assert pixels(page, corner)[0][3] == 255  # drawn as a pattern


@pytest.mark.thorough
def test_recolouring_asks_for_nothing(view, fake):
    page = view("layer=0&head=3&x=600&y=700&zoom=6&scale=linear&top=0.9")
    point = at(page, 705, 615, 6, 600, 700)
    asked, seen = len(fake.asked), [pixels(page, point)[0]]
    change(page, "#scale", "sqrt")
    page.do(IDLE)
    seen.append(pixels(page, point)[0])
    change(page, "#high", "-0.2", "input")
    page.do(IDLE)
    seen.append(pixels(page, point)[0])
    assert text_of(page, "#range-says") == "0 – 0.631"
    change(page, "#low", "-1", "input")
    page.do(IDLE)
    seen.append(pixels(page, point)[0])
    page.do("document.querySelector('#auto').click()")
    page.do("new Promise((done) => setTimeout(done, 400))")
    seen.append(pixels(page, point)[0])
    page.do("document.querySelector('#theme').click()")
    page.do(IDLE)
    seen.append(pixels(page, point)[0])
    assert all(one != other for one, other in pairwise(seen)), seen
    assert len(fake.asked) == asked


@pytest.mark.thorough
def test_zooming_keeps_what_is_under_the_pointer(view):
    page = view("layer=0&head=0&x=1000&y=1100&zoom=4")
    point = at(page, 1130, 1030, 4, 1000, 1100)
    page.mouse("mouseMoved", *point)
    for delta in (-120, -120, 200, -60):
        page.mouse("mouseWheel", *point, deltaX=0, deltaY=delta)
        idle(page)
        sides = page.do("[...document.querySelectorAll('#readout dt span')].map((e) => e.textContent)")
        assert sides == ["1,130", "1,030"]
    assert float(fragment_of(page)["zoom"]) == pytest.approx(4 * 1.6, rel=1e-3)
    page.click(*point, count=2)
    idle(page)
    assert float(fragment_of(page)["zoom"]) == pytest.approx(8 * 1.6, rel=1e-3)


@pytest.mark.thorough
def test_two_fingers_zoom_and_one_pans(view):
    page = view("layer=0&head=0&x=1000&y=1000&zoom=4", width=390, height=844, touch=True)
    left, top, width, height = page.do(BOX)
    x, y = left + width / 2, top + height / 2
    page.touch("touchStart", (x - 40, y), (x + 40, y))
    for spread in (50, 60, 70, 80):
        page.touch("touchMove", (x - spread, y), (x + spread, y))
    page.touch("touchEnd")
    idle(page)
    now = fragment_of(page)
    assert float(now["zoom"]) == pytest.approx(8, rel=0.02)
    page.touch("touchStart", (x, y))
    for moved in (10, 20, 40):
        page.touch("touchMove", (x - moved, y))
    page.touch("touchEnd")
    idle(page)
    assert float(fragment_of(page)["x"]) > float(now["x"]) + 3
    assert float(fragment_of(page)["y"]) == pytest.approx(float(now["y"]), abs=0.5)


@pytest.mark.thorough
def test_coarser_tiles_stand_in_until_finer_ones_arrive(view, fake):
    page = view("layer=0&head=2&x=1000&y=1060&zoom=0.5&scale=log&low=1e-6&top=0.3")
    fake.delay = 2.0
    box = plot(page)
    middle = (box["left"] + box["width"] / 2 - 30, box["top"] + box["height"] / 2)
    page.mouse("mouseWheel", *middle, deltaX=0, deltaY=-200)
    page.do(IDLE)
    assert page.do("document.querySelector('#map').getAttribute('aria-busy')") == "true"
    spread = [(middle[0] + dx, middle[1] + dy) for dx in range(-40, 41, 8) for dy in (-20, 0, 20)]
    hatching = pixels(page, (box["left"] + box["width"] - 60, box["top"] + 20))[0]
    assert len({tuple(pixel) for pixel in pixels(page, *spread)} - {tuple(hatching)}) > 4


@pytest.mark.thorough
def test_tiles_come_nearest_first_and_six_at_once(view, fake):
    page = view("layer=0&head=2")
    before = len(fake.tiles())
    fake.delay = 1.5
    page.do("document.querySelector('#map').focus()")
    for _ in range(2):
        page.press("+")
        page.do(IDLE)
    page.wait("document.querySelector('#level').textContent === 'mean of 2×2'")
    now, box = fragment_of(page), plot(page)
    level = [line for line in fake.tiles()[before:] if line.split("/")[2] == "2"]
    assert len(level) == 6
    idle(page)
    later = [line for line in fake.tiles()[before:] if line.split("/")[2] == "2"][6:]
    centre = np.array([float(now["y"]), float(now["x"])])
    half = np.array([box["height"], box["width"]]) / 2 / float(now["zoom"])

    def far(line: str) -> float:
        place = np.array(list(map(int, line.split("?")[0].split("/")[3:5])))
        low, high = np.maximum(place * 512, centre - half), np.minimum((place + 1) * 512, centre + half)
        return float(np.linalg.norm((low + high) / 2 - centre))

    assert later
    assert max(map(far, level)) <= min(map(far, later)) + 2


@pytest.mark.thorough
def test_requests_for_what_left_the_view_are_called_off(view, fake):
    page = view("layer=0&head=2")
    page.send("Network.enable")
    before = len(fake.tiles())
    fake.delay = 20.0
    page.do("document.querySelector('#map').focus()")
    page.press("+")
    page.do("new Promise((done) => setTimeout(done, 300))")
    asked = fake.tiles()[before:]
    assert 1 <= len(asked) <= 6
    page.press("0")
    page.do(IDLE)
    gone = [event["params"]["canceled"] for event in page.events() if event["method"] == "Network.loadingFailed"]
    assert gone == [True] * len(asked)
    idle(page)  # the whole map is still here
