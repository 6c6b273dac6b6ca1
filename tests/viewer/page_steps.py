"""What tests of the viewer's page do and look at: places in the map, its pixels, its words."""

import json
import re
from urllib.parse import parse_qsl

import numpy as np

from chromium import Page
from headwise.reports.colours import stops

TEXT = "".join(f"{i:04d}武松，打虎 \n" for i in range(300))  # 3,300 tokens of a character each
RESTS = (
    "document.querySelector('#map').getAttribute('aria-busy') === 'false' && !document.querySelector('#stage').hidden"
)
BOX = "(({x, y, width, height}) => [x, y, width, height])(document.querySelector('#map').getBoundingClientRect())"
IDLE = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 20))))"
LEFT, TOP = 78, 6  # the plot's corner in the map


def idle(page: Page) -> None:
    """Until every tile in view is drawn."""
    page.do(IDLE)
    page.wait(RESTS)
    page.do(IDLE)


def fragment_of(page: Page) -> dict[str, str]:
    """What the address keeps; it is written at once where a link is wanted."""
    page.do(IDLE)
    page.do("document.querySelector('#link').click()")
    return dict(parse_qsl(page.do("location.hash").removeprefix("#")))


def plot(page: Page) -> dict[str, float]:
    """The plot in the window: left, top, width, height."""
    x, y, width, height = page.do(BOX)
    return {"left": x + LEFT, "top": y + TOP, "width": width - LEFT - 8, "height": height - TOP - 62}


def at(page: Page, row: float, col: float, zoom: float, x: float, y: float) -> tuple[float, float]:
    """Where a cell's middle stands in the window, in a view with that centre."""
    box = plot(page)
    left = box["left"] + box["width"] / 2 + (col + 0.5 - x) * zoom
    return left, box["top"] + box["height"] / 2 + (row + 0.5 - y) * zoom


def pixels(page: Page, *points: tuple[float, float]) -> list[list[int]]:
    """Colours of the map at points of the window."""
    return page.do(f"""(() => {{
      const map = document.querySelector("#map-base"), box = map.getBoundingClientRect(), ratio = map.width / box.width;
      const copy = new OffscreenCanvas(map.width, map.height).getContext("2d", {{ willReadFrequently: true }});
      copy.drawImage(map, 0, 0);
      const pixel = ([x, y]) => [...copy.getImageData((x - box.left) * ratio, (y - box.top) * ratio, 1, 1).data];
      return {json.dumps(points)}.map(pixel);
    }})()""")


def text_of(page: Page, css: str) -> str:
    """What an element says."""
    return page.do(f"document.querySelector({json.dumps(css)}).textContent")


def change(page: Page, css: str, value: str, event: str = "change") -> None:
    """Choose a value."""
    page.do(f"""(() => {{
      const field = document.querySelector("{css}");
      field.value = "{value}";
      field.dispatchEvent(new Event("{event}", {{ bubbles: true }}));
    }})()""")


def colour(weight: float, low: float, top: float, theme: str = "light") -> np.ndarray:
    """The linear scale's colours at and beside a weight, [3, 3]."""
    ends = np.array([[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops(theme)], float)
    index = np.clip(255 * (weight - low) / (top - low), 0, 255).round() + np.array([-1, 0, 1])
    where = np.clip(index, 0, 255) / 255 * (len(ends) - 1)
    return np.stack([np.interp(where, np.arange(len(ends)), ends[:, c]) for c in range(3)], 1)


def number(weight: float) -> str:
    """Three digits, as the page writes them."""
    if weight < 1e-4:
        return re.sub(r"e-0?", "e-", f"{weight:.1e}")
    return f"{weight:.{min(5, 2 - int(np.floor(np.log10(weight))))}f}"
