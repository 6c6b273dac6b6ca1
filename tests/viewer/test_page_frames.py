"""How long the page's frames take on 100,000 tokens: `pytest -m bench tests/viewer/test_page_frames.py` prints it."""

import numpy as np
import pytest
from page_steps import BOX, IDLE, idle

pytestmark = [pytest.mark.browser, pytest.mark.bench]

WATCH = """
window.spent = []; window.began = [];
const frame = requestAnimationFrame;
window.requestAnimationFrame = (act) => frame.call(window, (now) => {
  const from = performance.now();
  act(now);
  window.spent.push(performance.now() - from); window.began.push(now);
});
"""


@pytest.mark.parametrize("scale", [1, 2])
def test_frames_of_a_hundred_thousand_tokens(chromium, fake, scale, capsys):
    name = fake.add("话说大宋仁宗天子在位，" * 9091)
    page = chromium.page(scale=scale, still=False)
    page.before(WATCH)
    page.open(fake.url + f"#text={name}&layer=0&head=2")
    idle(page)
    left, top, width, height = page.do(BOX)
    x, y = left + width / 2, top + height / 2
    lines = []

    def told(what: str) -> None:
        idle(page)
        spent, began = np.array(page.do("spent.splice(0)")), np.array(page.do("began.splice(0)"))
        gaps = np.diff(began)
        gaps = gaps[gaps < 200]  # pauses between two movements are no frames
        lines.append(
            f"{what:28} {len(spent):5} frames, script {np.median(spent):5.1f} ms "
            f"(95 %: {np.quantile(spent, 0.95):5.1f}), from frame to frame {np.median(gaps):5.1f} ms"
        )
        assert np.median(spent) < 16.7

    page.do(f"{IDLE}; spent.splice(0); began.splice(0)")
    for _ in range(25):
        page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100)
    told("zoom in")
    for _ in range(4):
        page.drag(x + 200, y + 100, -400, -200, steps=40)
    told("pan, every weight")
    for _ in range(17):
        page.mouse("mouseWheel", x, y, deltaX=0, deltaY=70)
    told("zoom out")
    for _ in range(4):
        page.drag(x + 200, y + 100, -400, -200, steps=40)
    told("pan, " + page.do("document.querySelector('#level').textContent"))
    for step in range(40):
        page.do(f"document.querySelector('#high').value = {-3 + step / 20}")
        page.do("document.querySelector('#high').dispatchEvent(new Event('input'))")
    told("another range, 40 times")
    page.close()
    with capsys.disabled():
        print(f"\n1280 × 800, {scale} pixels a css pixel\n" + "\n".join(lines))
