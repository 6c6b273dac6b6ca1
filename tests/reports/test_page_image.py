"""An image whose patches are tokens, under the weights of a token, in a real browser."""

import base64
import builtins
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from settled import SETTLED
from test_over_image import COLUMNS, ROWS, WORDS, patches, picture

import headwise as hw
from chromium import Page
from headwise.reports.data import Passage, Patches, Report
from headwise.reports.images import SIDE, embedded, pixels
from headwise.reports.page import write_report
from headwise.reports.watched import of_maps
from parameters import thorough

PATCHES = ROWS * COLUMNS
PIECES = ["<s>", *["<image>"] * PATCHES, *WORDS]


def sequence() -> hw.AttentionMap:
    """A marker, the patches and words that attend to patches of their colour; patches attend to those of their own.
    Head 1 attends to all."""
    colours = torch.cat([torch.zeros(1, 3), patches(picture()), torch.zeros(len(WORDS), 3)])
    q = colours * 12
    q[1 + PATCHES :] = torch.tensor(list(WORDS.values())) * 12
    k = colours[None, None].expand(1, 2, -1, -1)
    return hw.attend(torch.stack([q, q * 0])[None], k, k, scale=1.0, mask=hw.Causal(), return_map=True)[1]


def crossing() -> hw.AttentionMap:
    """Patches that attend to words of their colour."""
    keys = torch.tensor(list(WORDS.values()))[None, None]
    return hw.attend(patches(picture())[None, None] * 12, keys, keys, return_map=True)[1]


def of_sequence(**options: Any) -> Report:
    return hw.show(sequence(), pieces=PIECES, image=picture(), grid=(ROWS, COLUMNS), image_start=1, **options)


@pytest.fixture
def show(show: Callable[..., Page]) -> Callable[..., Page]:
    """As `show`; the image is drawn."""

    def opened(*args: Any, **options: Any) -> Page:
        page = show(*args, **options)
        page.wait("document.querySelector('#image-canvas').width !== 300")
        page.do(SETTLED)
        return page

    return opened


def at(page: Page, row: int, column: int) -> tuple[float, float]:
    """The middle of a patch on the screen."""
    x, y, width, height = page.do(
        "(() => { const e = document.querySelector('#image-canvas'); e.scrollIntoView({ block: 'center' });"
        " const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
    )
    return x + (column + 0.5) * width / COLUMNS, y + (row + 0.5) * height / ROWS


def shades(page: Page) -> np.ndarray:
    """The middle of each patch as drawn, [rows, columns, 3]."""
    found = page.do(
        f"(() => {{ const c = document.querySelector('#image-canvas'), out = [];"
        f" const copy = new OffscreenCanvas(c.width, c.height).getContext('2d', {{ willReadFrequently: true }});"
        f" copy.drawImage(c, 0, 0); const {{ data }} = copy.getImageData(0, 0, c.width, c.height);"
        f" for (let i = 0; i < {PATCHES}; i++) {{ const x = Math.floor((i % {COLUMNS} + .5) / {COLUMNS} * c.width),"
        f" y = Math.floor((Math.floor(i / {COLUMNS}) + .5) / {ROWS} * c.height);"
        f" out.push(...data.slice(4 * (y * c.width + x), 4 * (y * c.width + x) + 3)); }} return out; }})()"
    )
    return np.array(found, float).reshape(ROWS, COLUMNS, 3)


def says(page: Page) -> str:
    return page.do("document.querySelector('#image-says').textContent")


@pytest.mark.thorough
@pytest.mark.browser
@pytest.mark.parametrize("lang", thorough(["en", "zh"], {"zh"}))
def test_a_token_lies_on_the_patches_it_attends_to(show, lang: str) -> None:
    theme = {"en": "light", "zh": "dark"}[lang]
    report, weights = of_sequence(), sequence()[0, 0, -2, 1 : 1 + PATCHES].reshape(ROWS, COLUMNS)
    page = show(report, f"layer=0&head=0&pin={PATCHES + 2}", lang=lang, theme=theme)
    blue = shades(page)
    page.do("document.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape', bubbles: true }))")
    page.do(SETTLED)
    plain = shades(page)
    changed = np.abs(blue - (plain + blue[0, 0] - plain[0, 0])).sum(2)
    heavy = np.argwhere(weights.numpy() > 0.5 * float(weights.max()))
    darkest = sorted(map(tuple, np.argwhere(changed >= np.sort(changed, axis=None)[-len(heavy)])))
    assert darkest == sorted(map(tuple, heavy))
    expected = "Select a token" if lang == "en" else "选择一个词元"
    assert says(page).startswith(expected)
    assert page.do("document.querySelectorAll('#strip [data-unit]:not([hidden])').length") == 1 + len(WORDS)


@pytest.mark.thorough
@pytest.mark.browser
def test_pointing_at_a_patch_shows_the_exact_weight_and_a_click_pins_it(show) -> None:
    weights = sequence()[0, 0]
    page = show(of_sequence(), f"layer=0&head=0&pin={PATCHES + 1}")  # red
    said = re.fullmatch(r"Weights of “red” on the patches, ([\d.]+) in all\.", says(page))
    assert said is not None
    assert float(said[1]) == pytest.approx(float(weights[-3, 1 : 1 + PATCHES].sum()), rel=5e-3)
    row, column = divmod(int(weights[-3, 1 : 1 + PATCHES].argmax()), COLUMNS)
    page.mouse("mouseMoved", *at(page, row, column))
    page.do(SETTLED)
    tip = "[...document.querySelectorAll('#tip .both > *')].map((e) => e.textContent)"
    name, weight, *_ = page.do(tip)
    assert name == f"red → [{row},{column}]"
    assert float(weight) == pytest.approx(float(weights[-3].max()), rel=1e-2)
    page.click(*at(page, row, column))
    page.do(SETTLED)
    assert f"pin={1 + row * COLUMNS + column}" in page.do("location.hash")
    tinted = (
        "[...document.querySelectorAll('#strip [data-unit]:not([hidden])')]"
        ".flatMap((e) => Number(/, ([\\d.]+)\\)/.exec(e.style.backgroundImage)?.[1] ?? 0))"
    )
    red, blue, green = page.do(tinted)[-3:]
    assert red > 0.3 > max(blue, green)  # which words attend to the patch
    assert not page.do("document.querySelector('#image-towards').hidden")  # a patch attends and is attended to
    page.do("document.querySelector('#image-looked').click()")
    assert says(page).startswith(f"Weights of the patches on “[{row},{column}]”")
    again = show(of_sequence(), page.do("location.hash")[1:])
    assert says(again) == says(page)


@pytest.mark.browser
@pytest.mark.thorough
def test_arrow_keys_walk_over_the_patches(show) -> None:
    page = show(of_sequence(), "layer=0&head=0")
    page.do("document.querySelector('#image-canvas').focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "Enter"):
        page.press(key)
    assert f"pin={1 + COLUMNS + 1}" in page.do("location.hash")
    page.press("ArrowUp")
    page.press("ArrowUp")
    assert "pin=2" in page.do("location.hash").split("&")


@pytest.mark.thorough
@pytest.mark.browser
def test_patches_that_are_queries_show_how_they_attend_to_a_word(show) -> None:
    report = hw.show(crossing(), pieces=list(WORDS), image=picture(), grid=(ROWS, COLUMNS), side="queries")
    page = show(report)
    word = re.search("“(.*)”", says(page))
    assert word is not None
    assert word[1] in WORDS
    assert says(page).startswith("Weights of the patches on")
    page.click(*at(page, 4, 7))  # the blue square
    page.do(SETTLED)
    assert page.do("document.querySelector('#tops b').textContent") == "blue"


@pytest.mark.browser
@pytest.mark.thorough
def test_on_a_phone_and_on_paper(show) -> None:
    page = show(of_sequence(), f"layer=0&head=0&pin={PATCHES + 2}", width=390, height=844, touch=True, theme="dark")
    assert page.do("document.documentElement.scrollWidth") <= 390
    wide = page.do("document.querySelector('#image-canvas').getBoundingClientRect().width")
    assert 250 < wide < 390
    page.send("Emulation.setEmulatedMedia", media="print")
    page.do("dispatchEvent(new Event('beforeprint'))")
    page.do(SETTLED)
    assert page.do("document.querySelector('#image-canvas').getBoundingClientRect().height") > 50
    assert shades(page).mean() > 128  # light
    bar = "(([c]) => c.width / c.height / (c.clientWidth / c.clientHeight))(document.querySelectorAll('#image-bar'))"
    assert page.do(bar) == pytest.approx(1, abs=0.02)


@pytest.mark.thorough
def test_patches_are_tokens_of_their_own() -> None:
    report = of_sequence()
    shown = report.passages[0]
    assert shown.tokens[1:4] == ["[0,0]", "[0,1]", "[0,2]"]
    assert shown.tokens[PATCHES] == f"[{ROWS - 1},{COLUMNS - 1}]"
    assert shown.image is not None
    assert (shown.image.query, shown.image.key) == (1, 1)
    found = {label.role for row in report.labels for head in row for label in head}
    assert found.isdisjoint({"separator", "duplicate"})
    pooled = of_maps({"": sequence()}, (None, None), 0, "t", 20, images=None)
    assert pooled.passages[0].image is None
    assert hw.show(sequence(), image=picture(), grid=(ROWS, COLUMNS), image_start=1, cells=20).passages[0].cell == 3


@pytest.mark.thorough
def test_a_record_of_a_vision_language_model_has_its_image() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 19, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(image_size=16, patch_size=4, **small),
        text_config=transformers.LlamaConfig(vocab_size=40, **small), image_token_index=39, image_token_id=39,
        image_seq_length=16,
    )  # fmt: skip
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ids = torch.tensor([[1, 2, *[39] * 16, 5, 6, 7]])
    with torch.no_grad(), hw.watch(model, maps="lazy") as record:
        model(input_ids=ids, pixel_values=torch.rand(1, 3, 16, 16))
    report = hw.report(record, tokens=ids, image=picture(), grid=(4, 4), image_start=2)
    placed = {len(shown.tokens): shown.image for shown in report.passages}
    assert placed[17] is None  # the tower, whose tokens are others
    image = placed[21]
    assert image is not None
    assert (image.query, image.key, image.rows, image.columns) == (2, 2, 4, 4)
    with pytest.raises(hw.ShapeError, match="give tokens or pieces of the sequence with the image"):
        hw.report(record, image=picture(), grid=(4, 4), image_start=0)
    tower = hw.report(record, image=picture(), grid=(4, 4), image_start=1)
    assert [shown.image is not None for shown in tower.passages] == [True, False]


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"grid": None}, hw.ConfigError, r"image: requires grid=\(rows, columns\)"),
    ({"image": None}, hw.ConfigError, "grid: requires image="),
    ({"grid": (7, 9)}, hw.ShapeError, "7 × 9 patches from position 1 on need 64 tokens, .* have 58"),
    ({"grid": (2.0, 3)}, hw.ConfigError, "grid="), ({"image_start": -1}, hw.ConfigError, "image_start=-1"),
    ({"side": "rows"}, hw.ConfigError, "side='rows'"), ({"image": []}, hw.ConfigError, "image: got an empty list"),
    ({"image": [picture()] * 3}, hw.ShapeError, "image: 3 of them for a batch of 1"),
    ({"image": np.zeros((3, 3, 2))}, hw.ShapeError, r"image: shape \(3, 3, 2\)"),
])  # fmt: skip
def test_bad_input(changes: dict[str, Any], error: type, message: str) -> None:
    options = {"pieces": PIECES, "image": picture(), "grid": (ROWS, COLUMNS), "image_start": 1, **changes}
    with pytest.raises(error, match=message):
        hw.show(sequence(), **options)
    with pytest.raises(hw.ConfigError, match=r"show\(image=…\)"):
        hw.show(text="a", image=picture())


def test_a_passage_refuses_patches_beyond_its_tokens() -> None:
    maps = np.full((1, 1, 5, 5), 0.2, np.float32)
    wrong = {(2, 2, 2, 2): "has 5 tokens", (1, 1, None, None): "query, key", (1, 1, 0, 1): "differ"}
    for given, message in wrong.items():
        image = Patches("data:,", 1, 1, *given)  # type: ignore[arg-type]
        with pytest.raises(hw.ShapeError, match=message):
            Passage("t", list("abcde"), maps, image=image)


@pytest.mark.parametrize("pillow", [True, False])
def test_a_large_image_takes_few_bytes(pillow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if pillow:
        pytest.importorskip("PIL")
    else:
        real = builtins.__import__

        def without(name: str, *args: Any) -> Any:
            if name == "PIL":
                raise ImportError(name)
            return real(name, *args)

        monkeypatch.setattr(builtins, "__import__", without)
    y, x = np.mgrid[:600, :1501]
    kind, code = embedded(pixels(np.stack([y / 600, x / 1501, (x + y) % 97 / 97], 2))).split(";base64,")
    monkeypatch.undo()
    assert kind == ("data:image/jpeg" if pillow else "data:image/png")
    assert len(code) < 200_000
    image = pytest.importorskip("PIL.Image").open(io.BytesIO(base64.b64decode(code)))
    assert image.size == (SIDE, round(600 * SIDE / 1501))
    middle = np.asarray(image.convert("RGB"))[100, 200] / 255
    assert middle[:2] == pytest.approx([100.5 / 179, 200.5 / SIDE], abs=0.03)


def test_the_image_is_data_and_not_code(tmp_path: Path) -> None:
    page = write_report(of_sequence(), tmp_path / "r.html").read_text()
    data = json.loads(re.search(r'id="report">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    assert data["passages"][0]["image"]["source"].startswith("data:image/")
    assert "img-src data: blob:" in page
