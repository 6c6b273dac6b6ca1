"""A short training of a changed model on the text, before it is written."""

from headwise.lm.loss import mean_loss
from headwise.lm.model import Decoder
from headwise.refit.judging import Step
from headwise.refit.texts import Texts
from headwise.surgery import heal
from headwise.surgery.healing import Step as Healing


def healed(decoder: Decoder, texts: Texts, steps: int, lr: float, step: Step) -> Decoder:
    """A trained copy, as `heal` says; on windows of the first 95 % of the text. ConfigError as there."""
    copy = Decoder(decoder.config)
    copy.load_state_dict(decoder.state_dict())

    def watch(done: Healing) -> None:
        step(f"healing, loss {done.loss:.3f}", done.step, done.steps)

    heal(copy, texts.healing(steps), mean_loss, steps, lr=lr, watch=watch)
    return copy.eval()
