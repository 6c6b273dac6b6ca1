"""Training the decoder: resumable after a kill at any moment, the same losses for the same seed."""

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import CheckpointError, ConfigError
from headwise.files import atomic_path
from headwise.lm.checkpoint import MODEL_FILE, header_of, load_model, read, save_model, unpack, write
from headwise.lm.corpus import Corpus, step_seed
from headwise.lm.loss import mean_loss
from headwise.lm.model import Decoder, DecoderConfig
from headwise.lm.schedule import learning_rate_factor, read_shares, share_at
from headwise.lm.training_state import training_state
from headwise.lm.watch_heads import HeadWatcher

TRAINING_FILE = "training.safetensors"
LOG_FILE = "log.jsonl"


@dataclass(frozen=True)
class Progress:
    """What a watcher is told after each step."""

    step: int
    steps: int
    loss: float  # nats a token, of this step's batch
    heldout: float | None  # the latest held-out loss
    tokens_per_second: float


@dataclass(frozen=True)
class Outcome:
    """How training ended."""

    step: int
    finished: bool  # False if it was interrupted
    heldout: dict[str, float]  # nats a token for each file, and "all", of the best model
    log: list[dict[str, Any]]


def train(
    files: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    d_model: int = 256,
    num_layers: int = 4,
    num_heads: int = 8,
    num_kv_heads: int | None = None,
    d_ff: int = 640,
    context: int = 256,
    dropout: float = 0.1,
    design: str = "multi_head",
    options: Mapping[str, Any] | None = None,
    order: str = "pre",
    steps: int = 2000,
    batch_size: int = 16,
    lr: float = 2e-3,
    warmup: int = 200,
    weight_decay: float = 0.1,
    repeat_share: float | str = 0.0,
    seed: int = 0,
    eval_every: int = 250,
    precision: str = "bfloat16",
    init: str | os.PathLike[str] | None = None,
    resume: bool = True,
    watch: Callable[[Progress], None] | None = None,
    watch_heads: bool = False,
) -> Outcome:
    """Train a character decoder on text files and leave it in the folder `out`.

    Args:
        files: UTF-8 texts; the last 5 % of each is held out.
        out: gets model.safetensors (the best held-out loss), training.safetensors (all that resuming needs, written
            every `eval_every` steps) and log.jsonl.
        design, options, order: of the attention and the blocks, as in `DecoderConfig`.
        lr: peak of AdamW's learning rate, after `warmup` steps; then a cosine down to a twentieth.
        repeat_share: share of the training windows whose text repeats itself (see `Corpus.batch`); "0.04,0.4@2000"
            changes it at step 2000.
        precision: "bfloat16" runs the products in bfloat16 (weights and optimiser stay float32), or "float32".
        init: start from this model's weights and vocabulary; its sizes and its design (d_model to d_ff, design to
            order) then hold, whatever is given.
        resume: go on from training.safetensors if it is there.
        watch: called after each step.
        watch_heads: look at every head before the first step and at each evaluation, into heads.jsonl (see
            `headwise.lm.watch_heads`); losses and weights stay what they are without.
    Returns:
        the outcome. Ctrl-C saves and returns with finished=False.
    Raises:
        TextError, ConfigError; CheckpointError if `out` holds a run with other settings or cannot be written.
    """
    _positive(steps=steps, batch_size=batch_size, eval_every=eval_every, context=context)
    if precision not in ("bfloat16", "float32"):
        raise ConfigError(f"precision={precision!r}: expected 'bfloat16' or 'float32'")
    shares = read_shares(repeat_share)
    if lr <= 0 or weight_decay < 0 or warmup < 0:
        raise ConfigError(f"lr={lr}, weight_decay={weight_decay}, warmup={warmup}: expected lr > 0, the others >= 0")
    base, tokenizer, made = load_model(init) if init is not None else (None, None, None)
    corpus = Corpus.read(files, context=context, tokenizer=tokenizer, seed=seed)
    if base is not None:
        config = replace(base.config, context=context, dropout=dropout)
    else:
        config = DecoderConfig(
            corpus.tokenizer.vocab_size, d_model, num_layers, num_heads, num_kv_heads, d_ff, context, dropout, design,
            dict(options or {}), order,
        )  # fmt: skip
    torch.manual_seed(seed)
    decoder = Decoder(config)
    if base is not None:
        decoder.load_state_dict(base.state_dict())
    decay = [p for p in decoder.parameters() if p.ndim > 1]
    plain = [p for p in decoder.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    settings = {
        "files": corpus.names, "tokens": [len(s) for s in corpus.train], "steps": steps, "batch_size": batch_size,
        "lr": lr, "warmup": warmup, "weight_decay": weight_decay, "repeat_share": str(repeat_share), "seed": seed,
        "precision": precision, "init": made,
    }  # fmt: skip
    run = _Run(Path(out), corpus, decoder, optimizer, settings)
    if resume:
        run.restore()
    windows = corpus.heldout_windows(context, most=24)
    watcher = None
    if watch_heads:
        watcher = HeadWatcher(run.folder, decoder, corpus, windows, settings, run.step if resume else None)
        if run.step == 0:
            watcher.record(0)
    with _interruptible() as stopped:
        while run.step < steps:
            begun = time.perf_counter()
            batch = corpus.batch(batch_size, context, seed=seed, step=run.step, repeat_share=share_at(run.step, shares))
            loss = _step(run, batch, lr * learning_rate_factor(run.step, steps, warmup), seed, precision)
            run.step += 1
            evaluated = run.step % eval_every == 0 or run.step == steps
            if evaluated:
                run.evaluate(windows, loss, precision)
                if watcher is not None:
                    watcher.record(run.step)
                run.save()
            if watch is not None:
                rate = batch_size * context / (time.perf_counter() - begun)
                watch(Progress(run.step, steps, loss, run.last_heldout, rate))
            if stopped:  # looked at once, after the watcher: whenever Ctrl-C came, the step is saved
                if not evaluated:
                    run.save()
                break
    return Outcome(run.step, run.step >= steps, run.best, run.log)


def heldout_loss(decoder: Decoder, windows: Sequence[Tensor], precision: str = "float32") -> list[float]:
    """Mean loss in nats a token over each tensor of windows [w, context + 1]."""
    training = decoder.training
    decoder.eval()
    losses = []
    with torch.no_grad():
        for group in windows:
            parts = [mean_loss(decoder, batch, precision).item() * len(batch) for batch in group.split(16)]
            losses.append(sum(parts) / len(group))
    decoder.train(training)
    return losses


def _step(run: "_Run", batch: Tensor, lr: float, seed: int, precision: str) -> float:
    decoder, optimizer = run.decoder, run.optimizer
    torch.manual_seed(step_seed(seed, run.step))  # dropout follows the step, so resuming repeats it
    for group in optimizer.param_groups:
        group["lr"] = lr
    decoder.train()
    loss = mean_loss(decoder, batch, precision)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
    optimizer.step()
    value = loss.item()
    if not math.isfinite(value):
        raise ConfigError(f"the loss became {value} at step {run.step}; start again with a smaller --lr than {lr:g}")
    return value


class _Run:
    """The state of a training run and its files."""

    def __init__(
        self,
        folder: Path,
        corpus: Corpus,
        decoder: Decoder,
        optimizer: torch.optim.Optimizer,
        settings: dict[str, Any],
    ) -> None:
        self.folder, self.corpus, self.decoder, self.optimizer = folder, corpus, decoder, optimizer
        self.settings = settings
        self.step = 0
        self.log: list[dict[str, Any]] = []
        self.best: dict[str, float] = {}
        self.seconds, self.since = 0.0, time.perf_counter()

    @property
    def last_heldout(self) -> float | None:
        return self.log[-1]["heldout_loss"] if self.log else None

    def evaluate(self, windows: Sequence[Tensor], loss: float, precision: str) -> None:
        """Held-out loss into the log; the best model so far into its file."""
        parts = heldout_loss(self.decoder, windows, precision)
        losses = {**dict(zip(self.corpus.names, parts, strict=True)), "all": sum(parts) / len(parts)}
        entry = {"step": self.step, "train_loss": loss, "heldout_loss": losses["all"], "heldout": losses}
        self.log.append({**entry, "seconds": round(self._clock(), 1)})
        if not self.best or losses["all"] < self.best["all"]:
            self.best = losses
            info = {"settings": self.settings, "step": self.step, "heldout": losses}
            save_model(self.folder / MODEL_FILE, self.decoder, self.corpus.tokenizer, info)
        with atomic_path(self.folder / LOG_FILE) as temporary:
            temporary.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self.log))

    def save(self) -> None:
        """All that resuming needs, in one file."""
        tensors = {f"model.{name}": x.detach() for name, x in self.decoder.state_dict().items()}
        for i, parameter in enumerate(self._parameters()):
            for name, x in self.optimizer.state[parameter].items():
                tensors[f"optimizer.{i}.{name}"] = x
        info = {
            "settings": self.settings, "step": self.step, "best": self.best, "log": self.log,
            "seconds": self._clock(),
        }  # fmt: skip
        write(self.folder / TRAINING_FILE, tensors, header_of(self.decoder.config, self.corpus.tokenizer, info))

    def restore(self) -> None:
        """Go on where training.safetensors stopped, if it is there."""
        path = self.folder / TRAINING_FILE
        if not path.exists():
            return
        tensors, header = read(path)
        config, tokenizer, info = unpack(header, path)
        same = config == self.decoder.config and tokenizer.characters == self.corpus.tokenizer.characters
        then = info.get("settings")
        settings = then if isinstance(then, dict) else {}
        differ = [key for key, value in self.settings.items() if settings.get(key) != value]
        if not same or differ:
            what = ", ".join(differ) or "the model's sizes or its vocabulary"
            raise CheckpointError(
                f"{str(path)!r} is a run with other settings ({what}); give the same ones, another --out, or --fresh"
            )
        parameters = list(self._parameters())
        state = training_state(path, tensors, info, self.decoder.state_dict(), parameters)
        self.decoder.load_state_dict(state.model)
        for parameter, moments in zip(parameters, state.optimizer, strict=True):
            self.optimizer.state[parameter] = moments
        self.step, self.best, self.log, self.seconds = state.step, state.best, state.log, state.seconds

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _clock(self) -> float:
        return self.seconds + time.perf_counter() - self.since


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """A list that Ctrl-C fills, so that a step is never cut in half; a second Ctrl-C stops at once."""
    stopped: list[int] = []

    def note(number: int, frame: Any) -> None:
        if stopped:
            raise KeyboardInterrupt
        stopped.append(number)

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not in the main thread: then Ctrl-C does not come here either
        yield stopped
        return
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name}={value}: expected at least 1")
