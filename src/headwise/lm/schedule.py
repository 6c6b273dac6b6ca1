"""Settings that change during training."""

import math

from headwise.errors import ConfigError


def learning_rate_factor(step: int, steps: int, warmup: int) -> float:
    """Linear warmup over `warmup` steps, then a cosine decay to 1/20 (Loshchilov & Hutter 2016)."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))


def share_at(step: int, shares: list[tuple[int, float]]) -> float:
    """The share at a step, of `shares` as returned by `read_shares`."""
    return next(share for start, share in reversed(shares) if start <= step)


def read_shares(value: float | str) -> list[tuple[int, float]]:
    """Parse a share for all steps (0.04), or shares that change at steps ("0.04,0.4@2000"), as (first step, share).

    >>> read_shares("0.04,0.4@2000")
    [(0, 0.04), (2000, 0.4)]
    """
    found: list[tuple[int, float]] = []
    for part in str(value).split(","):
        share, _, start = part.partition("@")
        try:
            found.append((int(start) if start else 0, float(share)))
        except ValueError:
            raise ConfigError(
                f"repeat_share={value!r}: expected a share such as 0.04, or 0.04,0.4@2000 to change it at step 2000",
                f"repeat_share={value!r}：应为比例，例如 0.04；或 0.04,0.4@2000，表示第 2000 步起改变",
            ) from None
    starts = [start for start, _ in found]
    if starts[0] != 0 or starts != sorted(set(starts)) or not all(0.0 <= share <= 1.0 for _, share in found):
        raise ConfigError(
            f"repeat_share={value}: expected shares from 0 to 1, the first from step 0, steps ascending",
            f"repeat_share={value}：比例应在 0 到 1 之间，第一个从第 0 步开始，步数递增",
        )
    return found
