"""Comparison of models: loss on held-out text, speed in alternating rounds, parameters, bytes of the cache."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.importance.losses import standard_error
from headwise.base.run import Progress
from headwise.cache import for_transformers
from headwise.compress.source import Texts
from headwise.edit import budget_effect
from headwise.edit.budgets import Budget, nats
from headwise.lm.train import heldout_loss
from headwise.plan.tables import Column, Plan, Table, Value
from headwise.wording import tr

ROUNDS = 5
WRITTEN = 32  # tokens generated per round
STEP = 512  # tokens of a model of transformers at a time
NAMES = {
    "before": tr("before"), "pruned": tr("pruned"), "merged": tr("merged"), "healed": tr("healed"),
    "all tokens": tr("all tokens"), "budget": tr("budget", sense="plan"),
}  # fmt: skip
COLUMNS = (
    Column(tr("model")),
    Column(tr("loss"), "number"),
    Column(tr("rise"), "share"),
    Column("±", "share", "error"),
    Column(tr("reads tok/s"), "count", "reading"),
    Column(tr("writes tok/s"), "count", "writing"),
    Column(tr("parameters"), "count"),
    Column(tr("KV B/token"), "count", "cache_bytes"),
)


@dataclass(frozen=True)
class Candidate:
    """A model to evaluate, and the budget of its caches, if any."""

    name: str
    decoder: Any
    budget: Budget | None = None

    @property
    def parameters(self) -> int:
        """Their number."""
        return sum(parameter.numel() for parameter in self.decoder.parameters())

    def begun(self) -> tuple[Callable[[Tensor], Tensor], Sequence[Any]]:
        """A function from the next tokens of a text to the likeliest one after them, and its caches."""
        caches = self.decoder.new_caches() if self.budget is None else self.budget.caches()

        def next_token(ids: Tensor) -> Tensor:
            hidden, _ = self.decoder.hidden(ids, caches=caches)
            return torch.nn.functional.linear(hidden[:, -1], self.decoder.embedding.weight).argmax(-1, keepdim=True)

        return next_token, caches

    def losses(self, batches: Sequence[Tensor]) -> list[float]:
        """Mean loss of each batch, in nats per token; with a budget, using its caches, half a window at a time."""
        if self.budget is None:
            return heldout_loss(self.decoder, batches)
        half = (batches[0].shape[1] + 1) // 2
        return [budget_effect(self.decoder, [batch], self.budget, step=half).short for batch in batches]


class Served(Candidate):
    """A model of transformers, with caches of `for_transformers`."""

    def begun(self) -> tuple[Callable[[Tensor], Tensor], Sequence[Any]]:
        cache = for_transformers(self.decoder, self.budget)

        def next_token(ids: Tensor) -> Tensor:
            found: Tensor = self.decoder(ids, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
            return found

        return next_token, cache.caches

    @torch.no_grad()
    def losses(self, batches: Sequence[Tensor]) -> list[float]:
        new = partial(for_transformers, self.decoder, self.budget)
        return [nats(self.decoder, batch, STEP, {"past_key_values": new()}) / batch[:, 1:].numel() for batch in batches]


@dataclass(frozen=True)
class Judged:
    """The measurements of one model: `losses` of each batch [batches]; tokens per second; parameters and bytes."""

    name: str
    losses: np.ndarray
    reading: float
    writing: float
    parameters: int
    cache_bytes: float

    @property
    def loss(self) -> float:
        """Mean over batches, which all have the same size except the last."""
        return float(self.losses.mean())


@dataclass(frozen=True)
class Verdict:
    """Models compared with the first of them."""

    models: tuple[Judged, ...]
    note: str

    def rise(self, i: int) -> tuple[float, float]:
        """The relative increase of the loss of model i over that of the first, and its standard error."""
        first, other = self.models[0], self.models[i]
        return other.loss / first.loss - 1, float(standard_error(other.losses - first.losses)) / first.loss

    def shown(self) -> Plan:
        """The comparison as a table."""
        rows: list[tuple[Value, ...]] = []
        for i, model in enumerate(self.models):
            rise, error = self.rise(i)
            more = ("", "") if not i else (f"{100 * rise:+.2f} %", "" if np.isnan(error) else f"{100 * error:.2f} %")
            rows.append((
                NAMES[model.name], f"{model.loss:.4f}", *more, model.reading, model.writing, model.parameters,
                model.cache_bytes,
            ))  # fmt: skip
        if len(rows) > 1:
            numbers: Any = zip(rows[0][4:], rows[-1][4:], strict=True)
            changes = [f"{100 * (after / before - 1):+.1f} %" if before else "—" for before, after in numbers]
            rows.append((tr("change"), "", "", "", *changes))
        title = tr("Evaluation: the written model is loaded and compared with the original")
        return Plan(title, (), (Table("judged", tr("Before and after"), COLUMNS, tuple(rows), note=self.note),))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            model.name: {
                "loss": model.loss, "rise": self.rise(i)[0], "losses": model.losses.tolist(), "reading": model.reading,
                "writing": model.writing, "parameters": model.parameters, "cache_bytes": model.cache_bytes,
            }
            for i, model in enumerate(self.models)
        }  # fmt: skip


def judge(candidates: Sequence[Candidate], texts: Texts, progress: Progress) -> Verdict:
    """Losses on the part of the text for evaluation; speeds in alternating rounds, so that other load affects all."""
    losses = []
    for i, one in enumerate(candidates):
        progress(f"judging {one.name}", i, len(candidates) + ROUNDS)
        losses.append(np.array(one.losses(texts.judge)))
    written = max(1, min(WRITTEN, texts.context // 2))
    prompt = texts.judge[0][:1, : texts.context - written]
    seconds: list[list[tuple[float, float, float]]] = [[] for _ in candidates]
    for turn in range(ROUNDS):
        progress("measuring speed", len(candidates) + turn, len(candidates) + ROUNDS)
        for i, one in enumerate(candidates):
            seconds[i].append(_timed(one, prompt, written))
    found = []
    for one, loss, times in zip(candidates, losses, seconds, strict=True):
        reading, writing = (median(each[k] for each in times) for k in (0, 1))
        speeds = prompt.shape[1] / reading, written / writing
        found.append(Judged(one.name, loss, *speeds, one.parameters, times[0][2]))
    note = tr(
        "Loss in nats per token on text that was not used to choose; ± is the standard error of the rise over batches "
        "of the text. Speeds are medians of {rounds} alternating rounds, threads: {threads}: {read} tokens read at "
        "once, {written} generated one by one. Bytes of keys and values in float32.",
        rounds=ROUNDS, threads=torch.get_num_threads(), read=prompt.shape[1], written=written,
    )  # fmt: skip
    return Verdict(tuple(found), note)


@torch.no_grad()
def _timed(one: Candidate, prompt: Tensor, written: int) -> tuple[float, float, float]:
    """Seconds to read the prompt, seconds to generate, and bytes of the cache per token."""
    next_token, caches = one.begun()
    begun = time.perf_counter()
    token = next_token(prompt)
    read = time.perf_counter()
    for _ in range(written):
        token = next_token(token)
    done = time.perf_counter()
    return read - begun, done - read, sum(cache.nbytes for cache in caches) / caches[0].seen
