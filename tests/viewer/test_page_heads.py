"""The viewer's page in a real browser: a text is read, and all heads are shown."""

import time

import numpy as np
import pytest
from fake_server import overview
from page_steps import IDLE, TEXT, change, fragment_of, idle, text_of

pytestmark = pytest.mark.browser


@pytest.mark.thorough
def test_a_text_is_read_with_progress_and_all_heads_are_shown(chromium, fake):
    page = chromium.page()
    fake.steps = 4
    page.open(fake.url)
    page.wait("document.activeElement.id === 'text'")
    page.type(TEXT)
    page.wait("document.querySelector('#count').textContent === '3,300 of 200,000 characters'")
    page.do("document.querySelector('#read').click()")
    said = set()
    page.wait("!document.querySelector('#progress').hidden")
    while not page.do("document.querySelector('#progress').hidden"):
        said.add(text_of(page, "#doing"))
    assert "Drawing layer 1 of 3 · 2 of 11 heads drawn" in said
    assert "Computing layer 1 of 3 · 5 of 11 heads drawn" in said
    page.wait("[...document.querySelectorAll('.thumb canvas')].every((c) => c.width === 52)")  # cells of 64 tokens
    assert page.do("document.querySelectorAll('.thumb').length") == 11
    assert text_of(page, "#reading-facts") == "fake · 3,300 tokens"
    assert text_of(page, "#notes") == "A note."
    assert "mean of 64×64" in text_of(page, "#heads-cell")
    assert page.said() == []
    page.close()


@pytest.mark.thorough
def test_reading_can_be_cancelled_and_a_failure_is_told(chromium, fake):
    page = chromium.page()
    fake.steps = 10_000
    page.open(fake.url)
    page.wait("document.querySelector('#model').textContent")
    page.do("document.querySelector('#text').value = '虎'; document.querySelector('#read').click()")
    page.wait("document.querySelector('#doing').textContent.includes('layer 1 of 3')")
    page.do("document.querySelector('#cancel').click()")
    page.wait("document.querySelector('#progress').hidden")
    assert text_of(page, "#alert") == "Cancelled."
    until = time.monotonic() + 30
    while fake.texts["t0"]["state"] != "cancelled":
        assert time.monotonic() < until, "the server was not told"
        page.do(IDLE)
    page.do("document.querySelector('#read').click()")
    page.wait("document.querySelector('#doing').textContent.includes('layer 1 of 3')")
    failed = {"text": "there is no memory left", "zh": "内存不足，请换一段较短的文本。"}
    fake.texts["t1"] |= {"state": "failed", "error": failed}
    page.wait("document.querySelector('#alert').textContent.includes('there is no memory left')")
    page.do("document.querySelector('#language').click()")
    assert text_of(page, "#alert") == "无法载入这段文本：内存不足，请换一段较短的文本。"
    assert page.said() == []
    page.close()


@pytest.mark.thorough
def test_heads_can_be_opened_before_all_are_drawn(chromium, fake):
    page = chromium.page()
    fake.steps, heads = 10_000, "[...document.querySelectorAll('.thumb')]"
    page.open(fake.url)
    page.wait("document.querySelector('#model').textContent")
    page.do(f"document.querySelector('#text').value = {TEXT!r}; document.querySelector('#read').click()")
    page.wait("document.querySelector('#doing').textContent.includes('layer 1 of 3')")
    assert page.do("document.querySelector('#stage').hidden")
    fake.texts["t0"]["left"] = 7000
    page.wait(f"{heads}.filter((t) => !t.disabled).length === 3")
    assert not page.do("document.querySelector('#progress').hidden")
    page.do(f"{heads}[2].click()")
    idle(page)
    page.press("]")  # the next that is drawn
    assert text_of(page, "#map-title") == "Layer 0 · head 0"
    fake.texts["t0"]["left"] = 5000
    page.wait(f"{heads}.filter((t) => !t.disabled).length === 5")
    idle(page)
    assert text_of(page, "#map-title") == "Layer 0 · head 0"  # what is looked at stays
    page.open(fake.url + "#text=t0&layer=2&head=1&x=900&y=950&zoom=20")
    page.wait(f"{heads}.length === 11")
    page.do(IDLE)
    assert page.do("document.querySelector('#map-panel').hidden")
    fake.texts["t0"]["left"] = 0
    page.wait("!document.querySelector('#map-panel').hidden")
    page.wait("document.querySelector('#progress').hidden")
    assert fragment_of(page)["zoom"] == "20"
    page.open(fake.url + "#text=t0")
    page.wait("!document.querySelector('#stage').hidden")
    fake.texts["t0"]["state"] = "cancelled"
    assert page.said() == []
    page.close()


@pytest.mark.thorough
def test_a_text_that_is_taken_away_while_it_is_drawn_is_told_of(chromium, fake):
    page = chromium.page()
    fake.steps = 10_000
    fake.notes = [{"text": "Long ago.", "zh": "很久以前。"}]
    page.open(fake.url)
    page.wait("document.querySelector('#model').textContent")
    page.do(f"document.querySelector('#text').value = {TEXT!r}; document.querySelector('#read').click()")
    page.wait("document.querySelector('#doing').textContent.includes('layer 1 of 3')")
    fake.texts["t0"]["left"] = 7000
    page.wait("!document.querySelector('#stage').hidden")
    assert text_of(page, "#notes") == "Long ago."
    page.do("document.querySelector('#language').click()")
    assert text_of(page, "#notes") == "很久以前。"
    assert "共 3 层" in text_of(page, "#doing")
    fake.texts["t0"]["state"] = "cancelled"
    page.wait("document.querySelector('#stage').hidden")
    assert text_of(page, "#alert") == "这段文本的计算已停止：已被取消，或被新的文本取代。"
    page.wait("document.querySelector('#progress').hidden")
    assert page.said() == []
    page.close()


@pytest.mark.thorough
def test_heads_are_sorted_and_coloured_by_a_statistic(view, fake):
    page = view()
    order = "[...document.querySelectorAll('.thumb')].map((t) => [t.layer, t.head])"
    by_layer = [[layer, head] for layer, heads in enumerate(fake.heads) for head in range(heads)]
    assert page.do(order) == by_layer
    change(page, "#statistic", "mean_distance")
    change(page, "#order", "down")
    values = fake.state("t0")["statistics"]["mean_distance"]["values"]
    known = [place for place in by_layer if values[place[0]][place[1]] is not None]
    down = sorted(known, key=lambda place: -values[place[0]][place[1]])
    assert page.do(order) == [*down, [0, 1]]  # what has no value stands last
    assert "L0H1 · –" in page.do("document.querySelector('.thumb:last-child').textContent")
    change(page, "#order", "up")
    assert page.do(order)[-1] == [0, 1]
    light = page.do("[...document.querySelectorAll('.thumb')].map((t) => t.style.getPropertyValue('--kind'))")
    assert light[-1] == "transparent"
    assert len(set(light[:-1])) == len({values[layer][head] for layer, head in known})
    assert not any("/tiles/" in line for line in fake.asked)


@pytest.mark.thorough
def test_small_maps_show_the_overview(view, fake):
    page = view()
    page.wait("[...document.querySelectorAll('.thumb canvas')].every((c) => c.width === 52)")
    shown = page.do("""[...document.querySelectorAll('.thumb canvas')].map((canvas) => {
      const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
      copy.drawImage(canvas, 0, 0);
      return [...copy.getImageData(0, 0, canvas.width, canvas.height).data].filter((_, i) => i % 4 === 3);
    })""")
    maps = overview(fake, "t0", 64, "mean")
    assert len(shown) == len(maps) == 11
    for alpha, small in zip(shown, maps, strict=True):
        assert (np.array(alpha).reshape(small.shape) == 255 * ~np.isnan(small)).all()


@pytest.mark.thorough
def test_back_leads_to_all_heads_and_forward_to_the_head(view):
    page = view()
    fragment_of(page)
    page.do("document.querySelectorAll('.thumb')[5].click()")
    idle(page)
    assert text_of(page, "#map-title") == "Layer 1 · head 1"
    fragment_of(page)
    page.do("history.back()")
    page.wait("document.querySelector('#map-panel').hidden")
    page.do("history.forward()")
    page.wait("!document.querySelector('#map-panel').hidden")
    assert text_of(page, "#map-title") == "Layer 1 · head 1"


@pytest.mark.thorough
def test_a_text_that_the_server_reads_already_is_shown(chromium, fake):
    fake.present = fake.add(TEXT, "水浒")
    fake.texts[fake.present]["left"] = 2
    page = chromium.page()
    page.open(fake.url)
    page.wait("!document.querySelector('#stage').hidden")
    assert text_of(page, "#reading-title") == "水浒"
    assert fragment_of(page) == {"text": fake.present}
    page.close()
