"""Scores of heads on text that no model can know: repeated random tokens.

    tokens    a b c d e │ a b c d e
                  ▲         │              induction: from the second b to the c that followed the first b
                  └─────────┘              (Olsson et al. 2022, 2209.11895, prefix matching)

Random tokens cannot be predicted from each other, so correct predictions from the second copy on were copied.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.analysis.head_roles.score import DEFINITIONS, of_tally
from headwise.analysis.head_roles.tally import Sight, Tally, match_counts, match_masses, offset_mass
from headwise.errors import ConfigError, DTypeError, ShapeError
from headwise.map import AttentionMap
from headwise.table import HeadColumn, HeadTable
from headwise.table.heads import Tabled

AGAINST = 1000  # tokens whose logits are compared with the token's own
VERSION = "repeat-1"  # of the definitions below; scores of different versions do not compare


@dataclass(frozen=True)
class HeadScores:
    """Attention mass on certain keys per eligible query, that is, with such a key in sight."""

    name: str
    mass: np.ndarray  # [layers, heads], mean over eligible queries and sequences; 0 to 1
    spread: np.ndarray  # [layers, heads], standard deviation over the sequences (0 for one sequence)
    coverage: float  # share of all queries that are eligible
    uniform: float  # the score of a head with equal weights on all keys in sight
    holds: np.ndarray  # [layers, heads], whether the head has the role; the bootstrap draws sequences

    @property
    def lift(self) -> np.ndarray:
        """mass / uniform, [layers, heads]: 1 is no preference."""
        return self.mass / self.uniform


@dataclass(frozen=True, repr=False)
class RepeatProbe(Tabled):
    """Scores of every head on repeated random tokens, and the losses of the model. Prints itself as a table.

    Attributes:
        induction: on the tokens that followed earlier occurrences of the query's token; previous: on the key before
            the query's; duplicate: on earlier occurrences of the query's token.
        olsson: mean over all pairs that match for induction, [layers, heads]; a perfect head has 0.5 on a start token
            and 25 tokens repeated four times. tl_mul: weight on these pairs over all weight, as TransformerLens
            computes with "mul"; a perfect head has the coverage.
        copying: [layers, heads], chance is 0.5 and perfect 1: the share of the vocabulary whose logits are raised less
            than that of the token whose value the head reads; None unless requested from `probe_induction`.
        losses: nats a token within each copy [copies, sequences], without the first token of each copy, which cannot
            be predicted.
        length: tokens of one copy. version: of the definitions.
    """

    induction: HeadScores
    previous: HeadScores
    duplicate: HeadScores
    olsson: np.ndarray
    tl_mul: np.ndarray
    copying: np.ndarray | None
    losses: np.ndarray
    length: int
    version: str = VERSION

    @property
    def first_loss(self) -> np.ndarray:
        """Nats a token within the first copy, [sequences]."""
        return self.losses[0]

    @property
    def second_loss(self) -> np.ndarray:
        """Nats a token within the second copy, [sequences]."""
        return self.losses[1]

    @property
    def table(self) -> HeadTable:
        """The scores of all heads; errors are standard errors over the sequences, NaN for one sequence."""
        sequences = self.losses.shape[1]
        columns: dict[str, Any] = {
            score.name: HeadColumn(
                score.mass, unit="mass",
                error=score.spread / np.sqrt(sequences - 1) if sequences > 1 else np.full(score.mass.shape, np.nan),
            )
            for score in (self.induction, self.previous, self.duplicate)
        }  # fmt: skip
        columns |= {"olsson": self.olsson, "tl_mul": self.tl_mul}
        if self.copying is not None:
            columns["copying"] = self.copying
        copies = ", ".join(f"{loss:.2f}" for loss in self.losses.mean(1))
        title = (
            f"Random tokens, {self.length} of them repeated {len(self.losses)} times; a uniform head has "
            f"{self.induction.uniform:.3f} for induction; nats a token, copy by copy: {copies}"
        )
        return HeadTable(columns, title=title, about={"version": self.version, "length": self.length})


@torch.no_grad()
def probe_induction(
    model: Callable[[Tensor], Sequence[Any]],
    vocabulary: int | Sequence[int] | Tensor,
    *,
    length: int = 25,
    copies: int = 4,
    sequences: int = 8,
    start: int | None = None,
    seed: int = 0,
    unembedding: Tensor | None = None,
    outputs: Sequence[Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> RepeatProbe:
    """Induction, previous-token and duplicate-token scores of every head on repeated random tokens, and copying.

    Args:
        model: token ids [s, n] to (logits [s, n, V], maps), a causal map for each layer; or to (logits, maps, values)
            with the values of each layer [s, h_kv, n, d_v], which copying requires.
        vocabulary: tokens to draw from, as a number or a list; better without the rarest and the most frequent ones.
        length: of one copy, which has no token twice; copies: at least 2.
        start: a token put before each sequence, as Olsson et al. do; None for none.
        sequences: number of sequences. seed: sequence s is drawn with seed + s. device: of the tokens.
        unembedding: [V, d_model], the matrix that makes logits; outputs: of each layer [h, d_v, d_model], each head's
            part of W_O (`HeadSite.weights()["o"]`). Together they request copying: whether a head that attends to a
            token raises that token's logit through its values and W_O alone.
    Returns:
        A `RepeatProbe` of all layers and heads.
    Raises:
        ConfigError, ShapeError, DTypeError: naming the argument.
    """
    kinds = _vocabulary(vocabulary)
    for name, value, least in (("length", length, 2), ("copies", copies, 2), ("sequences", sequences, 1)):
        if value < least:
            raise ConfigError(f"{name}={value}: expected at least {least}")
    if len(kinds) < length:
        raise ConfigError(f"vocabulary: {len(kinds)} tokens cannot fill length={length} without repetition; give more")
    if start is not None and start in kinds.tolist():
        raise ConfigError(f"start={start}: is in the vocabulary; remove it there")
    if (unembedding is None) != (outputs is None):
        raise ConfigError("unembedding, outputs: give both for copying, or neither")
    orders = [torch.randperm(len(kinds), generator=torch.Generator().manual_seed(seed + s)) for s in range(sequences)]
    ids = kinds[torch.stack([order[:length] for order in orders])].repeat(1, copies)
    before = 0 if start is None else 1
    ids = torch.cat((torch.full((sequences, before), start or 0), ids), 1).to(device)
    found = model(ids)
    logits, maps = found[0], list(found[1])
    _check(logits, maps, ids)
    copied = None
    if unembedding is not None and outputs is not None:
        if len(found) < 3:
            raise ConfigError("model: returned (logits, maps); copying requires (logits, maps, values)")
        span = slice(before, before + length)
        copied = copying(found[2], outputs, unembedding, ids, span, kinds, maps[0].shape[1])
    losses = nn.functional.cross_entropy(logits[:, :-1].float().mT, ids[:, 1:], reduction="none")
    within = losses[:, before + torch.arange(copies)[:, None] * length + torch.arange(length - 1)]  # [s, copies, T − 1]
    sight, tokens = Sight(maps[0].rule), ids.cpu()
    counts, masses = {}, {}
    of_layers = [match_masses(amap, tokens, sight) for amap in maps]
    for shift, name in enumerate(("duplicate", "induction")):
        counts[name] = match_counts(tokens, sight, shift)[:, 0]
        masses[name] = torch.stack([found[shift] for found in of_layers], 1)  # [s, layers, h, n]
    n = ids.shape[1]
    back = torch.stack([offset_mass(amap, range(n), -1) for amap in maps], 1)
    keys = sight.keys[:, 0]
    seen = torch.ones(1, n, dtype=torch.long)
    seen[:, 0] = 0  # the first query has no key before it
    total = masses["induction"].double().sum((0, 3))
    entries = counts["induction"].expand(sequences, -1).sum()
    return RepeatProbe(
        induction=_scores("induction", masses["induction"], counts["induction"], keys),
        previous=_scores("previous", back, seen, keys),
        duplicate=_scores("duplicate", masses["duplicate"], counts["duplicate"], keys),
        olsson=(total / entries).cpu().numpy(),
        tl_mul=(total / (sequences * n)).cpu().numpy(),
        copying=copied,
        losses=within.mean(2).T.cpu().numpy(),
        length=length,
    )


def _scores(name: str, mass: Tensor, count: Tensor, keys: Tensor) -> HeadScores:
    """The scores from the mass [s, layers, h, n] on `count` keys [s or 1, n] of all in sight of each query."""
    eligible = count > 0
    of_each = eligible.sum(1).double()
    each = (mass.double() * eligible[:, None, None].to(mass.device)).sum(-1) / of_each[:, None, None].to(mass.device)
    uniform = ((count / keys) * eligible).sum(1) / of_each
    total = (each * of_each[:, None, None].to(each.device)).transpose(0, 1).cpu().numpy()  # [layers, s, h]
    counts, even = (
        np.broadcast_to(x[:, None].cpu().numpy(), total.shape) for x in (of_each, uniform * of_each)
    )  # fmt: skip
    tally = Tally(total, counts, even)
    return HeadScores(
        name, each.mean(0).cpu().numpy(), each.std(0, unbiased=False).cpu().numpy(), float(eligible.double().mean()),
        float(uniform.mean()), of_tally(DEFINITIONS[name], tally, tally).holds,
    )  # fmt: skip


def _vocabulary(vocabulary: int | Sequence[int] | Tensor) -> Tensor:
    kinds = torch.arange(vocabulary) if isinstance(vocabulary, int) else torch.as_tensor(vocabulary).cpu()
    if kinds.ndim != 1 or kinds.is_floating_point() or kinds.dtype == torch.bool:
        raise DTypeError(f"vocabulary: expected a number of tokens or a list of them, got {kinds.dtype} {kinds.ndim}-d")
    if len(kinds.unique()) < len(kinds):
        raise ConfigError("vocabulary: contains a token twice")
    return kinds.long()


def _check(logits: Tensor, maps: list[AttentionMap], ids: Tensor) -> None:
    s, n = ids.shape
    if logits.ndim != 3 or logits.shape[:2] != (s, n):
        raise ShapeError(
            f"model: returned logits {tuple(logits.shape)} for ids {(s, n)}, expected ({s}, {n}, vocabulary)"
        )
    if not maps:
        raise ConfigError("model: returned no maps; expected one for each layer")
    for index, amap in enumerate(maps):
        if not isinstance(amap, AttentionMap):
            raise DTypeError(f"model: maps[{index}] is a {type(amap).__name__}, expected an AttentionMap")
        if amap.shape != (s, maps[0].shape[1], n, n):
            raise ShapeError(f"model: maps[{index}] is {amap.shape}, expected {(s, maps[0].shape[1], n, n)}")


def copying(
    values: Sequence[Tensor],
    outputs: Sequence[Tensor],
    unembedding: Tensor,
    ids: Tensor,
    span: slice,
    kinds: Tensor,
    heads: int,
) -> np.ndarray:
    """The mean share of other tokens whose logits v_j W_O W_U raises less than that of token j (ties: half): 0.5 is
    chance. Only the direct path [layers, heads]. Elhage et al. 2021 (OV); Olsson et al. 2022, 2209.11895 (copying)."""
    _check_copying(values, outputs, unembedding, ids, heads)
    against = kinds[torch.linspace(0, len(kinds) - 1, min(AGAINST, len(kinds))).round().long()].to(unembedding.device)
    tokens = ids[:, span].flatten()  # [places]
    other = against[None] != tokens[:, None]  # [places, against]
    rows = unembedding.float()
    found = np.empty((len(values), heads))
    for layer, (value, output) in enumerate(zip(values, outputs, strict=True)):
        group = heads // value.shape[1]
        for head in range(heads):
            read = value[:, head // group, span].flatten(0, 1).float() @ output[head].float()  # [places, d_model]
            own = (read * rows[tokens]).sum(-1, keepdim=True)
            logits = read @ rows[against].T
            below = (logits < own).double() + 0.5 * (logits == own).double()
            found[layer, head] = float((below * other).sum() / other.sum())
    return found


def _check_copying(
    values: Sequence[Tensor], outputs: Sequence[Tensor], unembedding: Tensor, ids: Tensor, heads: int
) -> None:
    if len(values) != len(outputs):
        raise ShapeError(f"outputs: got {len(outputs)} for {len(values)} layers of values; expected one for each")
    if unembedding.ndim != 2:
        raise ShapeError(f"unembedding: shape {tuple(unembedding.shape)}, expected [vocabulary, d_model]")
    for layer, (value, output) in enumerate(zip(values, outputs, strict=True)):
        if value.ndim != 4 or (value.shape[0], value.shape[2]) != tuple(ids.shape) or heads % value.shape[1]:
            raise ShapeError(
                f"values[{layer}]: shape {tuple(value.shape)}, expected [{ids.shape[0]}, KV heads, {ids.shape[1]}, "
                f"d_v] for {heads} heads"
            )
        wanted = heads, value.shape[3], unembedding.shape[1]
        if tuple(output.shape) != wanted:
            raise ShapeError(f"outputs[{layer}]: shape {tuple(output.shape)}, expected {wanted}, heads × d_v × d_model")
