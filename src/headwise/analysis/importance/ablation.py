"""Importance by ablation: the loss without a head, or without attention between tokens, minus the whole model's."""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from headwise.analysis.checks import head_name
from headwise.analysis.importance.losses import (
    Head,
    HeadImportance,
    Losses,
    LossFunction,
    called,
    checked_inputs,
    from_samples,
    held_still,
    not_called,
    standard_error,
)
from headwise.base.run import Progress
from headwise.errors import ConfigError, ShapeError, check_choice, check_whole
from headwise.interventions import Arguments, Edit, Forbid, Tokens
from headwise.models.attaching import Attachment, intervene, model_of
from headwise.models.site import Change, HeadSite


def ablation_importance(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    *,
    by: str = "zero",
    reference: Iterable[Any] | None = None,
    draws: int = 1,
    seed: int = 0,
    sites: Sequence[HeadSite] | None = None,
    progress: Progress | None = None,
) -> HeadImportance:
    """L(without h) − L for every head, one ablated at a time; negative where the model is better without it.

    Args:
        model: any that `find_heads` supports, attention that is written by hand too; it runs in eval mode and is
            unchanged afterwards.
        batches: each runs once unchanged, and once for every head (and draw).
        loss_fn: (model, batch) → the batch's mean loss, a tensor of one number.
        by: the replacement of a head's output: "zero"; "mean", its mean over all tokens of the reference; "resample",
            its output at the same token of another sequence of the batch, of which a shorter one is repeated. Zeros can
            be outside the distribution that the layers above were trained on; the others are not. Padding is no token,
            as far as `hw.intervene(model, …)` knows it; in other models, rows of padding are like any others.
        reference: batches for the mean of "mean", `batches` by default.
        draws: of "resample": the number of pairings of the sequences of a batch that are averaged. Draw r of batch i
            pairs them along a random cycle, seeded with seed + 1,000,003 · r + i, so that none is its own donor.
        sites: of `find_heads(model)` to score; all by default.
        progress: called after each run of the model.
    Returns:
        `HeadImportance` in the unit of the loss. `samples` are the paired differences of each batch; the errors of the
        table are the standard errors of their means.
    Raises:
        ConfigError, ShapeError: naming the argument, or the layer and head whose loss is not finite.
    Source: zero: Michel et al. 2019, 1905.10650, §3; mean: Wang et al. 2022, 2211.00593, §2.1; resample: Chan et al.
        2022, causal scrubbing.
    """
    kept, places = checked_inputs(model, batches, loss_fn, sites)
    every = [(layer, head) for layer, site in enumerate(places) for head in range(site.num_heads)]
    removal = Removal(by, places, reference, draws, seed)
    found = removal.losses(model, loss_fn, kept, [[head] for head in every], progress)
    return from_samples(f"ablation, {by}", "loss", places, found[:, 1:] - found[:, :1], float(found[:, 0].mean()))


def losses_without(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    heads: Sequence[Head],
    *,
    by: str = "zero",
    reference: Iterable[Any] | None = None,
    draws: int = 1,
    seed: int = 0,
    sites: Sequence[HeadSite] | None = None,
    progress: Progress | None = None,
) -> np.ndarray:
    """The loss of each batch, [batches] float64, with all given heads (layer, head) ablated together.

    Args:
        heads: (layer, head) pairs.
        model, batches, loss_fn, by, reference, draws, seed, sites, progress: as in `ablation_importance`.
    Returns:
        [batches] float64. Layers are numbered as in `find_heads` (or `sites`).
    """
    kept, places = checked_inputs(model, batches, loss_fn, sites)
    gone = checked_heads(heads, places)
    removal = Removal(by, places, reference, draws, seed)
    return removal.losses(model, loss_fn, kept, [gone], progress)[:, 1]


WAYS = ("zero", "mean", "resample")


class Removal:
    """One way to ablate heads, with its state."""

    def __init__(
        self, by: str, sites: Sequence[HeadSite], reference: Iterable[Any] | None, draws: int, seed: int
    ) -> None:
        check_choice("by", by, WAYS)
        if reference is not None and by != "mean":
            raise ConfigError(f"reference: is for by='mean', got by={by!r}")
        if draws < 1 or (draws > 1 and by != "resample"):
            raise ConfigError(f"draws={draws}: expected 1, or more with by='resample'")
        self.by, self.sites, self.draws, self.seed = by, list(sites), draws, seed
        self.reference = None if reference is None else list(reference)
        if self.reference == []:
            raise ConfigError("reference: got no batches; expected at least one")
        self._means: list[Tensor] = []
        # Outputs of each call of each site in `_whole`, and which of them are of tokens.
        self._clean: list[list[tuple[Tensor, Tensor | None]]] = []

    def losses(
        self, model: nn.Module, loss_fn: LossFunction, batches: Sequence[Any], sets: Sequence[Sequence[Head]],
        progress: Progress | None,
    ) -> np.ndarray:  # fmt: skip
        """As `measured`, of a model and its loss."""
        learning = len(self.reference or batches) if self.by == "mean" else 0
        runs = learning + len(batches) * (1 + len(sets) * self.draws)
        return self.measured(Losses(model, loss_fn, self.sites, runs, progress), batches, sets)

    def measured(self, losses: Losses, batches: Sequence[Any], sets: Sequence[Sequence[Head]]) -> np.ndarray:
        """The loss of each batch with all heads, and without each set of them, [batches, 1 + sets]."""
        found = np.empty((len(batches), 1 + len(sets)))
        with held_still(losses.model):
            if self.by == "mean":
                self._learn(losses, batches)
            for number, batch in enumerate(batches):
                found[number, 0] = self._whole(losses, batch, number)
                for i, heads in enumerate(sets, 1):
                    found[number, i] = self._without(losses, batch, number, heads)
        return found

    def _learn(self, losses: Losses, batches: Sequence[Any]) -> None:
        """Compute the mean output of every head over all tokens of the reference."""
        sums = [torch.zeros(site.num_heads * site.value_dim, dtype=torch.float64) for site in self.sites]
        tokens = [0] * len(self.sites)

        def add(layer: int, concat: Tensor) -> Tensor:
            real = tokens_of(self.sites[layer], concat)
            rows = concat.flatten(0, -2) if real is None else concat[real]
            sums[layer] += rows.sum(0, dtype=torch.float64).cpu()
            tokens[layer] += len(rows)
            return concat

        with _tokens(losses.model, self.sites) as tokens_of:
            for number, batch in enumerate(self.reference or batches):
                losses.value(batch, number, self._each(add), " of the reference" if self.reference else "")
        self._check_called(tokens)
        self._means = [total / count for total, count in zip(sums, tokens, strict=True)]

    def _whole(self, losses: Losses, batch: Any, number: int) -> float:
        """The loss with all heads."""
        self._clean = [[] for _ in self.sites]

        def keep(layer: int, concat: Tensor) -> Tensor:
            kept = (concat, tokens_of(self.sites[layer], concat)) if self.by == "resample" else (concat[:0], None)
            self._clean[layer].append(kept)
            return concat

        with _tokens(losses.model, self.sites if self.by == "resample" else ()) as tokens_of:
            loss = losses.value(batch, number, self._each(keep))
        self._check_called(self._clean)
        return loss

    def _each(self, see: Callable[[int, Tensor], Tensor]) -> dict[int, Change]:
        return {layer: partial(see, layer) for layer in range(len(self.sites))}

    def _check_called(self, calls: Sequence[object]) -> None:
        for site, found in zip(self.sites, calls, strict=True):
            if not found:
                raise not_called(site)

    def _without(self, losses: Losses, batch: Any, number: int, heads: Sequence[Head]) -> float:
        """The loss without these heads, averaged over the draws."""
        removed: dict[int, list[int]] = {}
        for layer, head in heads:
            removed.setdefault(layer, []).append(head)
        few = [called(self.sites, *head) for head in heads[:1]] + [f"{len(heads) - 1} more"] * (len(heads) > 1)
        what = f" without {' and '.join(few)} (by={self.by!r})" if heads else ""
        total = 0.0
        for draw in range(self.draws):
            seed = self.seed + 1_000_003 * draw + number
            changes = {layer: self._change(layer, which, seed) for layer, which in removed.items()}
            total += losses.value(batch, number, changes, what)
        return total / self.draws

    def _change(self, layer: int, heads: list[int], seed: int) -> Change:
        site = self.sites[layer]
        away = torch.zeros(site.num_heads, dtype=torch.bool)
        away[heads] = True
        mask = away.repeat_interleave(site.value_dim)
        instead = self._instead(layer, seed)

        def change(concat: Tensor) -> Tensor:
            return torch.where(mask.to(concat.device), instead(concat), concat)

        return change

    def _instead(self, layer: int, seed: int) -> Callable[[Tensor], Tensor]:
        """A function for one run that returns the replacement, broadcastable to the heads [..., n, h·d_v]."""
        if self.by == "zero":
            return lambda concat: concat.new_zeros(())
        if self.by == "mean":
            return lambda concat: self._means[layer].to(concat)
        calls = iter(self._clean[layer])

        def donated(concat: Tensor) -> Tensor:
            clean, real = next(calls, (None, None))
            if clean is None or clean.shape != concat.shape:
                raise ShapeError(
                    f"by='resample': {self.sites[layer].name!r} was called differently the second time; loss_fn must "
                    f"be deterministic"
                )
            if clean.ndim < 3 or len(clean) < 2:
                raise ConfigError(
                    f"batches: by='resample' swaps the sequences of a batch, but the heads of "
                    f"{self.sites[layer].name!r} are {list(clean.shape)}, expected [sequences, tokens, h·d_v] with at "
                    f"least 2 sequences"
                )
            which = donors(len(clean), seed).to(clean.device)
            return clean[which] if real is None else clean[which[:, None], same_tokens(real, which)]

        return donated


def donors(count: int, seed: int) -> Tensor:
    """For each of `count` sequences another one, along a random cycle: each is a donor once, and none is its own."""
    circle = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    found = torch.empty_like(circle)
    found[circle] = circle.roll(-1)
    return found


def same_tokens(real: Tensor, which: Tensor) -> Tensor:
    """For each column [b, n], that of the same token of sequence which[i], of which a shorter one is repeated."""
    columns = (~real).byte().argsort(dim=-1, stable=True)  # those of tokens first
    position = (real.cumsum(-1) - 1).clamp_min(0) % real[which].sum(-1, keepdim=True).clamp_min(1)
    return columns[which].gather(1, position)


class _Tokens(Edit):
    """Changes nothing, and keeps which queries of the last call of each module are tokens, boolean [b or 1, n]."""

    by_row = True

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, Tensor] = {}

    def changed(self, call: Arguments) -> Arguments:
        if call.at_end and call.real is not None:
            self.of[call.name] = call.real[:, call.grid.first_token :]
        else:
            self.of.pop(call.name, None)
        return call


@contextmanager
def _tokens(model: nn.Module, sites: Sequence[HeadSite]) -> Iterator[Callable[[HeadSite, Tensor], Tensor | None]]:
    """Context with a function: which outputs [b, n, …] of a site are of tokens, [b, n]; None if all, or unknown."""
    keep = _Tokens()

    def found(site: HeadSite, concat: Tensor) -> Tensor | None:
        real = keep.of.get(site.name)
        fits = (
            real is not None and concat.ndim == 3 and len(real) in (1, len(concat)) and real.shape[1] == concat.shape[1]
        )
        return real.expand(concat.shape[:2]).to(concat.device) if real is not None and fits else None

    with ExitStack() as stack:
        if sites:
            with suppress(ConfigError):  # what cannot be edited shows no tokens
                stack.enter_context(intervene(model, keep, layers=[site.name for site in sites], unused="ignore"))
        yield found


def checked_heads(heads: Iterable[Head], sites: Sequence[HeadSite], name: str = "heads") -> list[Head]:
    """The heads, checked to exist and to be given once."""
    try:
        found = [(operator.index(layer), operator.index(head)) for layer, head in heads]
    except (TypeError, ValueError):
        raise ConfigError(f"{name}={heads!r}: expected pairs of whole numbers (layer, head)") from None
    for at in found:
        if not 0 <= at[0] < len(sites):
            raise ConfigError(f"{name}: {head_name(*at)} does not exist; there are {len(sites)} layers, counted from 0")
        count = sites[at[0]].num_heads
        if not 0 <= at[1] < count:
            raise ConfigError(
                f"{name}: {head_name(*at)} does not exist; layer {at[0]} has {count} heads, counted from 0"
            )
    if len(set(found)) < len(found):
        twice = next(head for i, head in enumerate(found) if head in found[:i])
        raise ConfigError(f"{name}: {head_name(*twice)} is given twice")
    return found


TokensOf: TypeAlias = Tokens | Callable[[Any], Tokens]
BY = ("head", "layer")


def attention_knockout(
    model: nn.Module | Attachment,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    queries: TokensOf,
    keys: TokensOf,
    *,
    by: str = "head",
    window: int = 1,
    sites: Sequence[HeadSite] | None = None,
    progress: Progress | None = None,
) -> HeadImportance:
    """L(queries may not attend to keys) − L, for one head or a window of layers at a time: where information flows from
    the keys to the queries. Negative where the model is better without it.

        >>> import torch, headwise as hw
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, 32)
        >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        >>> batches = [torch.randn(7, 2, 16) for _ in range(4)]
        >>> loss_fn = lambda model, x: model(x)[-1].square().mean()        # any number, such as −log p of an answer
        >>> flow = hw.analysis.attention_knockout(model, batches, loss_fn, queries=-1, keys=[0, 1], by="layer")
        >>> flow.table.column("attention knockout, windows of 1").shape
        torch.Size([3])

    Args:
        model: any that `hw.intervene` and `find_heads` support, or for attention that is written by hand the handle of
            `hw.attach(model, batch=…)`. It runs in eval mode and is unchanged afterwards.
        batches: each runs once unchanged, and once for every head or layer.
        loss_fn: (model, batch) → the batch's mean loss, a tensor of one number.
        queries, keys: the two sets of tokens (`headwise.interventions`), or functions batch → set.
        by: "head": each head alone. "layer": all heads of `window` layers around each layer.
        window: of by="layer": an odd number of layers; at the ends it has fewer.
        sites: of `find_heads(model)`, in the order of the model; all by default.
        progress: called after each run of the model.
    Returns:
        `HeadImportance` in the unit of the loss; with by="layer" it has one entry for each layer. `samples` are the
        paired differences of each batch; the errors of the table are the standard errors of their means.
    Raises:
        ConfigError, ShapeError: naming the argument; also if a batch has none of the tokens.
    Source: Geva et al. 2023, 2304.14767, §4 (their figures use windows of 9 layers).
    """
    subject = model_of(model)
    kept, places = checked_inputs(subject, batches, loss_fn, sites)
    check_choice("by", by, BY)
    check_whole("attention_knockout", "window", window, 1)
    if window % 2 == 0 or (by == "head" and window > 1):
        raise ConfigError(f"window={window}: expected an odd number of layers, with by='layer'")
    names = [site.name for site in places]
    sets: list[tuple[list[str], list[int] | None]]
    if by == "head":
        sets = [([name], [head]) for name, site in zip(names, places, strict=True) for head in range(site.num_heads)]
        counts = [site.num_heads for site in places]
    else:
        sets = [(names[max(0, i - window // 2) : i + window // 2 + 1], None) for i in range(len(names))]
        counts = [1] * len(names)
    losses = Losses(subject, loss_fn, places, len(kept) * (1 + len(sets)), progress)
    samples, whole = np.empty((len(kept), len(sets))), np.empty(len(kept))
    with held_still(subject), torch.no_grad():
        for number, batch in enumerate(kept):
            pair = [tokens(batch) if callable(tokens) else tokens for tokens in (queries, keys)]
            whole[number] = float(losses.of(batch, number))
            for i, (layers, heads) in enumerate(sets):
                edit = Forbid(*pair, heads=heads)
                with intervene(model, edit, layers=layers, unused="raise"):
                    samples[number, i] = float(losses.of(batch, number, f" with {edit!r} in {', '.join(layers)}"))
    samples -= whole[:, None]
    method = "attention knockout" if by == "head" else f"attention knockout, windows of {window}"
    ends = np.cumsum(counts)[:-1]
    values, errors = (np.split(x, ends) for x in (samples.mean(0), standard_error(samples)))
    return HeadImportance.of(method, "loss", names, values, errors, samples=samples, loss=float(whole.mean()))
