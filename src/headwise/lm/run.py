"""The state of a training run, and the files that it is kept in."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.errors import CheckpointError
from headwise.files import atomic_path
from headwise.lm.checkpoint import MODEL_FILE, header_of, read, save_model, unpack, write
from headwise.lm.corpus import Corpus
from headwise.lm.model import Decoder
from headwise.lm.training_state import training_state

TRAINING_FILE = "training.safetensors"
LOG_FILE = "log.jsonl"


@dataclass(frozen=True)
class Resumed:
    """Where a run continues: `step` of `steps` are done; they were saved `seconds` ago."""

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
        self._saved = time.monotonic()

    @property
    def last_heldout(self) -> float | None:
        return self.log[-1]["heldout_loss"] if self.log else None

    def evaluated(self, loss: float, parts: list[float]) -> None:
        """Held-out loss of each text into the log; the best model so far into its file."""
        losses = {**dict(zip(self.corpus.names, parts, strict=True)), "all": sum(parts) / len(parts)}
        entry = {"step": self.step, "train_loss": loss, "heldout_loss": losses["all"], "heldout": losses}
        self.log.append({**entry, "seconds": round(self._clock(), 1)})
        if not self.best or losses["all"] < self.best["all"]:
            self.best = losses
            info = {"settings": self.settings, "step": self.step, "heldout": losses}
            save_model(self.folder / MODEL_FILE, self.decoder, self.corpus.tokenizer, info)
        with atomic_path(self.folder / LOG_FILE) as temporary:
            temporary.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self.log))

    def unsaved(self) -> float:
        """Seconds of work that a kill would lose now."""
        return time.monotonic() - self._saved

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
        self._saved = time.monotonic()

    def restore(self) -> float | None:
        """Continue from training.safetensors, if it is there: the seconds since it was saved.

        Raises:
            CheckpointError: if the folder holds a run with other settings, or a model that is not of this run.
        """
        path = self.folder / TRAINING_FILE
        if not path.exists():
            if (self.folder / MODEL_FILE).exists():  # as after a kill between the first evaluation and the first save
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

    def forget(self) -> None:
        """Remove what another run could be continued from: with a model of this one it would be taken for finished."""
        (self.folder / TRAINING_FILE).unlink(missing_ok=True)

    def _same(self, path: Path, header: dict[str, str]) -> dict[str, Any]:
        """The info of a checkpoint of this run; CheckpointError for that of another."""
        config, tokenizer, info = unpack(header, path)
        same = config == self.decoder.config and tokenizer.characters == self.corpus.tokenizer.characters
        then = info.get("settings")
        settings = then if isinstance(then, dict) else {}
        differ = [key for key, value in self.settings.items() if settings.get(key) != value]
        if not same or differ:
            what = ", ".join(differ) or "the model's sizes or its vocabulary"
            raise CheckpointError(
                f"{str(path)!r} contains a run with different settings ({what}); use the same settings, "
                f"another --out, or --fresh to overwrite it"
            )
        return info

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _clock(self) -> float:
        return self.seconds + time.perf_counter() - self.since
