"""A short training of a changed model on the text, before it is written."""

from headwise.compress.texts import Texts
from headwise.edit import heal
from headwise.edit.healing import HealingStep
from headwise.lm.loss import mean_loss
from headwise.lm.model import Decoder
from headwise.progress import Progress


def healed(decoder: Decoder, texts: Texts, steps: int, lr: float, progress: Progress, *, seed: int = 0) -> Decoder:
    """A trained copy, as `heal` says; on windows of the first 95 % of the text, drawn by `seed` as dropout is.
    ConfigError as there."""

    def watch(done: HealingStep) -> None:
        progress(f"healing, loss {done.loss:.3f}", done.step, done.steps)

    batches = texts.healing(steps, seed)
    model = heal(decoder, batches, mean_loss, steps, lr=lr, seed=seed, watch=watch, copy=True).model
    assert isinstance(model, Decoder)
    return model.eval()
