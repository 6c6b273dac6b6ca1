"""A short training of a changed model on the text, before it is written."""

import math

from headwise.compress.texts import Texts
from headwise.edit import heal
from headwise.edit.healing import HealingStep
from headwise.errors import ConfigError
from headwise.lm.model import Decoder, mean_loss
from headwise.progress import Progress


def check_healing(steps: int, lr: float) -> None:
    """Raise ConfigError for options of `healed` that are out of range."""
    if steps < 0:
        raise ConfigError(
            f"--heal {steps}: expected a number of steps, or 0 for none", f"--heal {steps}：应为步数，0 表示不训练"
        )
    if not 0.0 < lr < math.inf:
        raise ConfigError(f"--lr {lr}: expected a finite number above 0", f"--lr {lr}：应为大于 0 的有限数")


def healed(decoder: Decoder, texts: Texts, steps: int, lr: float, progress: Progress, *, seed: int = 0) -> Decoder:
    """A trained copy, as returned by `heal`, on windows of the first 95 % of the text. `seed` determines the windows
    and dropout. Raises ConfigError as `heal` does."""

    def watch(done: HealingStep) -> None:
        progress(f"healing, loss {done.loss:.3f}", done.step, done.steps)

    batches = texts.healing(steps, seed)
    model = heal(decoder, batches, mean_loss, steps, lr=lr, seed=seed, watch=watch, copy=True).model
    assert isinstance(model, Decoder)
    return model.eval()
