"""The state of a training run and its files."""

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
from headwise.lm.checkpoint import MODEL_FILE, header_of, read, save_model, unpack
from headwise.lm.corpus import Corpus
from headwise.lm.model import Decoder
from headwise.lm.training_state import training_state
from headwise.tensor_files import write_tensors

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
        self._saved = time.monotonic()

    @property
    def last_heldout(self) -> float | None:
        return self.log[-1]["heldout_loss"] if self.log else None

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

    def unsaved(self) -> float:
        """Seconds of work since the last save."""
        return time.monotonic() - self._saved

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
        self._saved = time.monotonic()

    def restore(self) -> float | None:
        """Continue from training.safetensors if it exists; returns the seconds since it was saved, or None.

        Raises:
            CheckpointError: if the folder contains a run with other settings, or a model of another run.
        """
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

    def forget(self) -> None:
        """Remove the state of an earlier run; next to a model of this run it would look like a finished run."""
        (self.folder / TRAINING_FILE).unlink(missing_ok=True)

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
                f"{str(path)!r} contains a run with different settings ({what}); use the same settings, "
                f"another --out, or --fresh to overwrite it",
                f"{str(path)!r} 中的训练设置不同（{what}）；请用相同的设置、另一个 --out，或加 --fresh 覆盖",
            )
        return info

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _clock(self) -> float:
        return self.seconds + time.perf_counter() - self.since
