"""Weights between words and the patches of an image, over the image."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.reports.images import image_figure, image_weights, write_image_maps

ROWS, COLUMNS, CELL = 6, 9, 8
WORDS = {"red": (1.0, 0.0, 0.0), "blue": (0.0, 0.0, 1.0), "天": (0.0, 1.0, 0.0)}


def picture() -> np.ndarray:
    """A red disc and a blue square on green."""
    y, x = np.mgrid[: ROWS * CELL, : COLUMNS * CELL]
    image = np.zeros((*y.shape, 3))
    image[..., 1] = 0.6
    image[(y - 20) ** 2 + (x - 18) ** 2 < 12**2] = (0.9, 0.1, 0.1)
    image[24:44, 44:68] = (0.1, 0.2, 0.9)
    return image


def patches(image: np.ndarray) -> torch.Tensor:
    """The mean colour of each patch, [patches, 3]."""
    cells = image.reshape(ROWS, CELL, COLUMNS, CELL, 3).mean((1, 3)).reshape(-1, 3)
    return torch.from_numpy(cells - 0.4).float()


def maps(before: int = 0) -> hw.AttentionMap:
    """Words attend to patches of their colour: head 0 sharply, head 1 to all. `before` other keys and queries."""
    keys = torch.cat([torch.zeros(before, 3), patches(picture())])
    words = torch.cat([torch.zeros(before, 3), torch.tensor(list(WORDS.values()))])
    q = torch.stack([words * 12, words * 0])[None]
    return hw.attend(q, keys[None, None].expand(1, 2, -1, -1), keys[None, None].expand(1, 2, -1, -1),
                     scale=1.0, return_map=True)[1]  # fmt: skip


OPTIONS: dict[str, Any] = {"grid": (ROWS, COLUMNS), "side": "keys", "image_start": 0, "text_start": 0, "heads": [0],
                           "batch": 0}  # fmt: skip


def test_words_lie_on_what_they_name() -> None:
    red, blue, _ = image_weights(maps(), count=3, **OPTIONS)
    assert divmod(int(red.argmax()), COLUMNS) in [(2, 1), (2, 2), (1, 2), (1, 1), (2, 3)]
    assert float(blue[3:5, 6:8].sum()) > 0.8
    torch.testing.assert_close(red.sum(), torch.tensor(1.0))


def test_heads_are_averaged_and_positions_may_start_anywhere() -> None:
    plain, shifted = maps(), maps(before=2)
    both = image_weights(plain, count=3, **{**OPTIONS, "heads": None})
    torch.testing.assert_close(both, plain[0].mean(0).reshape(3, ROWS, COLUMNS))
    found = image_weights(shifted, count=2, **{**OPTIONS, "image_start": 2, "text_start": 3})
    torch.testing.assert_close(found, shifted[0, 0, 3:5, 2:].reshape(2, ROWS, COLUMNS))


def test_an_image_that_attends_to_text() -> None:
    keys = torch.tensor(list(WORDS.values()))[None, None]
    queries = patches(picture())[None, None] * 12
    _, amap = hw.attend(queries, keys, keys, return_map=True)
    found = image_weights(amap, count=3, **{**OPTIONS, "side": "queries"})
    torch.testing.assert_close(found.sum(0), torch.ones(ROWS, COLUMNS))
    assert float(found[1, 4, 7]) > 0.9


@pytest.mark.thorough
def test_the_picture_has_a_panel_for_each_word(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the view extra")
    figure = image_figure(maps(), picture(), tokens=list(WORDS), grid=(ROWS, COLUMNS), heads=[0], title="layer 3")
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[:3] == ["red  1.00", "blue  1.00", "天  1.00"]
    bytes_ = (picture() * 255).astype(np.uint8)
    path = write_image_maps(maps(), bytes_, tmp_path / "maps.png", tokens=list(WORDS), grid=(ROWS, COLUMNS))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"side": "rows"}, hw.ConfigError, "side='rows': expected 'keys' or 'queries'"),
    ({"grid": (7, 9)}, hw.ShapeError, "keys: grid has 63 of them from position 0 on, but the map has 54"),
    ({"text_start": 1}, hw.ShapeError, "queries: tokens has 3 of them from position 1 on, but the map has 3"),
    ({"grid": (0, 9)}, hw.ConfigError, r"grid=\(0, 9\)"), ({"heads": [2]}, hw.ConfigError, r"heads=\[2\]"),
    ({"batch": 1}, hw.ConfigError, "batch=1: expected 0 to 0"), ({"tokens": []}, hw.ConfigError, "tokens: got none"),
    ({"image": np.zeros((3, 3, 2))}, hw.ShapeError, r"image: shape \(3, 3, 2\)"),
    ({"image": np.full((3, 3), 2.0)}, hw.ConfigError, "image: expected numbers from 0 to 1"),
    ({"image": np.full((3, 3), np.nan)}, hw.ConfigError, "image: expected numbers from 0 to 1"),
    ({"image": np.full((3, 3), "a")}, hw.ConfigError, "expected numbers from 0 to 1 or bytes"),
])  # fmt: skip
def test_bad_input(changes: dict[str, Any], error: type, message: str) -> None:
    options = {"image": picture(), "tokens": list(WORDS), "grid": (ROWS, COLUMNS), **changes}
    with pytest.raises(error, match=message):
        image_figure(maps(), **options)


@pytest.mark.thorough
def test_words_of_a_vision_language_model_over_its_image() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 19, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(image_size=16, patch_size=4, **small),
        text_config=transformers.LlamaConfig(vocab_size=40, **small), image_token_index=39, image_token_id=39,
        image_seq_length=16,
    )  # fmt: skip
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ids = torch.tensor([[1, *[39] * 16, 5, 6, 7]])
    inputs = {"input_ids": ids, "pixel_values": torch.rand(1, 3, 16, 16)}
    with torch.no_grad(), hw.watch(model, maps="lazy") as record:
        model(**inputs)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        theirs = model(**inputs, output_attentions=True).attentions[1]
    (name,) = [name for name in record.maps if "language" in name and ".1." in name]
    found = image_weights(record.maps[name], count=3, grid=(4, 4), side="keys", image_start=1, text_start=17,
                          heads=None, batch=0)  # fmt: skip
    torch.testing.assert_close(found, theirs[0].mean(0)[17:, 1:17].reshape(3, 4, 4), rtol=1e-4, atol=1e-6)
