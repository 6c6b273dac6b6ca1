"""Training of the decoder: resumable after a kill at any time, reproducible for a seed."""

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

from headwise.base.files import atomic_path, taken
from headwise.base.read import write_tensors
from headwise.base.run import seeded, step_seed, without_memory
from headwise.costs.work import positive
from headwise.edit.healing import learning_rate_factor
from headwise.errors import CheckpointError, ConfigError, check_choice
from headwise.lm.checkpoint import MODEL_FILE, header_of, load_checkpoint, read, save_model, training_state, unpack
from headwise.lm.model import Decoder, DecoderConfig, mean_loss
from headwise.lm.texts import BYTES, Corpus
from headwise.lm.watch_heads import HeadWatcher


def share_at(step: int, shares: list[tuple[int, float]]) -> float:
    """The share at a step, of `shares` as returned by `read_shares`."""
    return next(share for start, share in reversed(shares) if start <= step)


def read_shares(value: float | str) -> list[tuple[int, float]]:
    """Parse a share (0.04), or shares that change at steps, as (first step, share): "0.04,0.4@2000"."""
    found: list[tuple[int, float]] = []
    for part in str(value).split(","):
        share, _, start = part.partition("@")
        try:
            found.append((int(start) if start else 0, float(share)))
        except ValueError:
            raise ConfigError(
                "repeat_share={value!r}: expected a share such as 0.04, or 0.04,0.4@2000 to change it at step 2000",
                value=value,
            ) from None
    starts = [start for start, _ in found]
    if starts[0] != 0 or starts != sorted(set(starts)) or not all(0.0 <= share <= 1.0 for _, share in found):
        raise ConfigError(
            "repeat_share={value}: expected shares from 0 to 1, the first from step 0, steps ascending", value=value
        )
    return found


TRAINING_FILE = "training.safetensors"
LOG_FILE = "log.jsonl"


@dataclass(frozen=True)
class Resumed:
    """Where a run continues: `step` of `steps` steps are done and were saved `seconds` ago."""

    step: int
    steps: int
    seconds: float


class Run:
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
        self.saved = time.monotonic()

    def evaluated(self, loss: float, parts: list[float]) -> None:
        """Write the held-out loss of each text to the log, and the model to its file if it is the best so far."""
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
        """Write everything required to resume to one file."""
        tensors = {f"model.{name}": x.detach() for name, x in self.decoder.state_dict().items()}
        for i, parameter in enumerate(self._parameters()):
            for name, x in self.optimizer.state[parameter].items():
                tensors[f"optimizer.{i}.{name}"] = x
        info = {
            "settings": self.settings, "step": self.step, "best": self.best, "log": self.log,
            "seconds": self._clock(),
        }  # fmt: skip
        header = header_of(self.decoder.config, self.corpus.tokenizer, info)
        write_tensors(self.folder / TRAINING_FILE, tensors, header)
        self.saved = time.monotonic()

    def restore(self) -> float | None:
        """Continue from training.safetensors if it exists; seconds since it was saved, or None. CheckpointError if it
        is another run's."""
        path = self.folder / TRAINING_FILE
        if not path.exists():
            if (self.folder / MODEL_FILE).exists():  # after a kill between the first evaluation and the first save
                self._same(self.folder / MODEL_FILE, read(self.folder / MODEL_FILE)[1])
            return None
        tensors, header = read(path)
        info = self._same(path, header)
        parameters = list(self._parameters())
        state = training_state(path, tensors, info, self.decoder.state_dict(), parameters)
        self.decoder.load_state_dict(state.model)
        for parameter, moments in zip(parameters, state.optimizer, strict=True):
            self.optimizer.state[parameter] = moments
        self.step, self.best, self.log, self.seconds = state.step, state.best, state.log, state.seconds
        return max(0.0, time.time() - path.stat().st_mtime)

    def _same(self, path: Path, header: dict[str, str]) -> dict[str, Any]:
        """The info of a checkpoint of this run; CheckpointError if it is of another run."""
        config, tokenizer, info = unpack(header, path)
        same = config == self.decoder.config and tokenizer.characters == self.corpus.tokenizer.characters
        then = info.get("settings")
        settings = then if isinstance(then, dict) else {}
        differ = [key for key, value in self.settings.items() if settings.get(key) != value]
        if not same or differ:
            what = ", ".join(differ) or "the model's sizes or its vocabulary"
            raise CheckpointError(
                "{path!r} contains a run with different settings ({what}); use the same settings, another --out, or "
                "--fresh to overwrite it",
                path=str(path),
                what=what,
            )
        return info

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _clock(self) -> float:
        return self.seconds + time.perf_counter() - self.since


@dataclass(frozen=True)
class TrainingStep:
    """The argument of `watch`, which is called after each step."""

    step: int
    steps: int
    loss: float  # nats per token, of this step's batch
    heldout: float | None  # the latest held-out loss
    tokens_per_second: float


@dataclass(frozen=True)
class Outcome:
    """The result of training."""

    step: int
    finished: bool  # False if it was interrupted
    heldout: dict[str, float]  # nats per token for each file, and "all", of the best model
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
    save_seconds: float = 30.0,
    resume: bool = True,
    resumed: Callable[[Resumed], None] | None = None,
    watch: Callable[[TrainingStep], None] | None = None,
    watch_heads: bool = False,
) -> Outcome:
    """Train a character decoder on UTF-8 texts and write model.safetensors (the best held-out loss),
    training.safetensors (a state to resume from, bitwise) and log.jsonl to the folder `out`."""
    positive(steps=steps, batch_size=batch_size, eval_every=eval_every, context=context)
    check_choice("precision", precision, ("bfloat16", "float32"))
    if not save_seconds >= 0:
        raise ConfigError(
            "save_seconds={save_seconds}: expected a number of seconds of at least 0", save_seconds=save_seconds
        )
    shares = read_shares(repeat_share)
    if lr <= 0 or weight_decay < 0 or warmup < 0:
        raise ConfigError(
            "lr={lr}, weight_decay={weight_decay}, warmup={warmup}: expected lr > 0, the others >= 0",
            lr=lr,
            weight_decay=weight_decay,
            warmup=warmup,
        )
    sizes = d_model, num_layers, num_heads, num_kv_heads, d_ff, context, dropout, design, dict(options or {}), order
    if init is None:
        with without_memory():  # raises for options that exclude each other, before the texts are read
            Decoder(DecoderConfig(BYTES, *sizes))
    with taken(out, "out", folder=True):
        base, tokenizer, made = load_checkpoint(init) if init is not None else (None, None, None)
        corpus = Corpus.read(files, context=context, tokenizer=tokenizer, seed=seed)
        if base is not None:
            config = replace(base.config, context=context, dropout=dropout)
        else:
            config = DecoderConfig(corpus.tokenizer.vocab_size, *sizes)
        with seeded(seed):
            decoder = Decoder(config)
        if base is not None:
            decoder.load_state_dict(base.state_dict())
        settings = {
            "files": corpus.names, "tokens": [len(s) for s in corpus.train], "sha256": corpus.sha256, "steps": steps,
            "batch_size": batch_size, "lr": lr, "warmup": warmup, "weight_decay": weight_decay,
            "repeat_share": str(repeat_share), "seed": seed, "precision": precision, "init": made,
        }  # fmt: skip
        decay, plain = ([p for p in decoder.parameters() if (p.ndim > 1) is matrix] for matrix in (True, False))
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
        run = Run(Path(out), corpus, decoder, optimizer, settings)
        if not resume:  # next to a model of this run, the state of an earlier one would look like a finished run
            (run.folder / TRAINING_FILE).unlink(missing_ok=True)
        elif (since := run.restore()) is not None and resumed is not None:
            resumed(Resumed(run.step, steps, since))
        windows = corpus.heldout_windows(context, most=24)
        watcher = None
        if watch_heads:
            watcher = HeadWatcher(run.folder, decoder, corpus, windows, settings, run.step if resume else None)
            if run.step == 0:
                watcher.record(0)
        with _interruptible() as stopped:
            while run.step < steps:
                begun = time.perf_counter()
                share = share_at(run.step, shares)
                batch = corpus.batch(batch_size, context, seed=seed, step=run.step, repeat_share=share)
                loss = _step(run, batch, lr * learning_rate_factor(run.step, steps, warmup, 0.05), seed, precision)
                run.step += 1
                evaluated = run.step % eval_every == 0 or run.step == steps
                if evaluated:
                    run.evaluated(loss, heldout_loss(decoder, windows, precision))
                    if watcher is not None:
                        watcher.record(run.step)
                if evaluated or time.monotonic() - run.saved >= save_seconds:
                    run.save()
                if watch is not None:
                    rate = batch_size * context / (time.perf_counter() - begun)
                    heldout = run.log[-1]["heldout_loss"] if run.log else None
                    watch(TrainingStep(run.step, steps, loss, heldout, rate))
                if stopped:  # checked once, after `watch`, so that the step is saved whenever Ctrl-C was pressed
                    run.save()
                    break
        return Outcome(run.step, run.step >= steps, run.best, run.log)


def heldout_loss(decoder: Decoder, windows: Sequence[Tensor], precision: str = "float32") -> list[float]:
    """Mean loss in nats per token of each tensor of windows [w, context + 1]."""
    training = decoder.training
    decoder.eval()
    losses = []
    with torch.no_grad():
        for group in windows:
            parts = [mean_loss(decoder, batch, precision).item() * len(batch) for batch in group.split(16)]
            losses.append(sum(parts) / len(group))
    decoder.train(training)
    return losses


def _step(run: Run, batch: Tensor, lr: float, seed: int, precision: str) -> float:
    decoder, optimizer = run.decoder, run.optimizer
    for group in optimizer.param_groups:
        group["lr"] = lr
    decoder.train()
    with seeded(step_seed(seed, run.step)):  # dropout depends only on the step, so that resuming repeats it
        loss = mean_loss(decoder, batch, precision)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
    nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
    optimizer.step()
    value = loss.item()
    if not math.isfinite(value):
        raise ConfigError(
            "the loss became {value} at step {step}; start again with a smaller --lr than {lr:g}",
            value=value,
            step=run.step,
            lr=lr,
        )
    return value


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Yield a list to which Ctrl-C adds an entry, so that a step is always completed; a second Ctrl-C stops at once."""
    stopped: list[int] = []

    def note(number: int, frame: Any) -> None:
        if stopped:
            raise KeyboardInterrupt
        stopped.append(number)

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not in the main thread, which does not receive Ctrl-C
        yield stopped
        return
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
