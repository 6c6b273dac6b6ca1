"""Images that a caller gives: validated, and as a bounded picture for a page.

>>> import numpy as np
>>> pixels(np.zeros((2, 3), np.uint8)).shape
(2, 3, 3)
"""

import base64
import io
from typing import Any

import numpy as np
import torch

from headwise.errors import ConfigError, ShapeError
from headwise.pictures.png import data_url, rgb_png

SIDE = 448  # pixels of the longer side of an embedded picture, at most
QUALITY = 85  # of a JPEG


def pixels(image: Any) -> np.ndarray:
    """An image as [H, W, 3] float64 from 0 to 1.

    Args:
        image: [H, W, 3], [H, W, 4] (whose last channel is ignored) or [H, W], numbers from 0 to 1 or bytes; or a PIL
            image.
    Raises:
        ConfigError, ShapeError: naming the argument `image`.
    """
    values = np.asarray(image.convert("RGB") if hasattr(image, "convert") else image)
    if values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] not in (3, 4)) or 0 in values.shape:
        raise ShapeError(f"image: shape {values.shape}, expected [H, W, 3] or [H, W]")
    if values.dtype.kind not in "fiub":
        raise ConfigError(f"image: {values.dtype}, expected numbers from 0 to 1 or bytes")
    numbers = values.astype(np.float64) / (255.0 if values.dtype == np.uint8 else 1.0)
    if not np.isfinite(numbers).all() or numbers.min() < 0 or numbers.max() > 1:
        raise ConfigError("image: expected numbers from 0 to 1, or bytes")
    return np.repeat(numbers[..., None], 3, 2) if numbers.ndim == 2 else numbers[..., :3]


def embedded(image: np.ndarray) -> str:
    """[H, W, 3] from 0 to 1 as a data URL, at most `SIDE` pixels along a side: a JPEG where Pillow is installed, else a
    PNG, which takes more bytes."""
    height, width = image.shape[:2]
    by = min(1.0, SIDE / max(height, width))
    size = max(1, round(height * by)), max(1, round(width * by))
    small = torch.nn.functional.adaptive_avg_pool2d(torch.from_numpy(image).permute(2, 0, 1), size)
    bytes_ = (small.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
    try:
        from PIL import Image
    except ImportError:
        return data_url(rgb_png(bytes_))
    file = io.BytesIO()
    Image.fromarray(bytes_).save(file, "JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
