"""The ends of scales, and large maps reduced without losing thin lines."""

import numpy as np

# Cells above the end of a colour range have this share of a head's weight: otherwise the first rows, which have few
# keys, would determine the scale.
SATURATED = 0.05
LEVELS = 1023  # of the weights in a page
# Statistics are exact to this share of their size, or to a few roundings of a mass of 1: less is no difference.
ROUNDING, LEAST_RANGE = 1e-5, 5e-7


def value_range(values: np.ndarray) -> tuple[float, float]:
    """The smallest and the largest finite value; one number twice, 0 if it is rounding itself, if they differ by
    rounding alone or there are none."""
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    size = max(abs(low), abs(high))
    if high - low > max(ROUNDING * size, LEAST_RANGE):
        return low, high
    return (0.0, 0.0) if size <= LEAST_RANGE else (high, high)


def halves(weights: np.ndarray) -> tuple[np.ndarray, int]:
    """Weights >= 0 as float16 of weight * 2**shift, and the shift, so that small weights keep eleven bits."""
    most = float(weights.max())
    shift = 14 - int(np.ceil(np.log2(most))) if most > 0 else 0
    return np.ldexp(weights, shift).astype(np.float16), shift


def coded(weights: np.ndarray) -> np.ndarray:
    """Weights >= 0 as uint16: round(LEVELS · √(weight / top)), where top is the largest one.

    The error of top · (code / LEVELS)² is at most √(weight · top) / LEVELS, plus top / 4,000,000.
    """
    top = float(weights.max())
    share = weights.astype(np.float64) / top if top > 0 else np.zeros_like(weights)
    return np.rint(LEVELS * np.sqrt(share)).astype(np.uint16)


def colour_top(scaled: np.ndarray, shift: int) -> float:
    """The weight above which cells have the share `SATURATED` of all weight, from the result of `halves`.

    Exact, by counting the 31,744 finite halves. 1 if all weights are zero.
    """
    counts = np.bincount(scaled.view(np.uint16).ravel(), minlength=1 << 16)[:0x7C00]
    weights = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    above = np.cumsum((counts * weights)[::-1])
    if not above[-1]:
        return 1.0
    at = 0x7C00 - 1 - int(np.searchsorted(above, SATURATED * above[-1]))
    return float(np.ldexp(weights[at], -shift))


def finite(maps: np.ndarray) -> np.ndarray:
    """Weights as float32, with 0 for non-finite ones."""
    return np.nan_to_num(maps.astype(np.float32, copy=False), posinf=0.0, neginf=0.0).clip(min=0)


def reduced(weights: np.ndarray, limit: int) -> np.ndarray:
    """[n, m] as at most [limit, limit]: the largest weight of each square."""
    step = -(-max(weights.shape) // limit)
    if step == 1:
        return weights
    rows, columns = (np.arange(0, size, step) for size in weights.shape)
    return np.maximum.reduceat(np.maximum.reduceat(weights, rows, axis=0), columns, axis=1)
