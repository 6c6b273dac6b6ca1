"""What each head does on text it cannot know: random tokens, said again and again.

    tokens    a b c d e │ a b c d e
                  ▲         │              induction: from the second b to the c that followed the first b
                  └─────────┘              (Olsson et al. 2022, 2209.11895, prefix matching)

There is nothing to learn from the tokens themselves, so what is foretold from the second copy on was copied.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.analysis.head_roles.copying import copying
from headwise.analysis.head_roles.matches import match_counts, match_masses
from headwise.analysis.head_roles.pairs import offset_mass
from headwise.analysis.head_roles.sight import Sight
from headwise.errors import ConfigError, DTypeError, ShapeError
from headwise.map import AttentionMap

VERSION = "repeat-1"  # of the definitions below; scores of different versions do not compare


@dataclass(frozen=True)
class HeadScores:
    """Attention mass on some keys per eligible query.

    Attributes:
        mass: [layers, heads], mean over eligible queries and sequences; 0 to 1.
        spread: [layers, heads], standard deviation over the sequences (0 for one sequence).
        coverage: share of all queries that are eligible, that is, have such a key.
        uniform: what a head would score that looks at all it may see alike.
    """

    name: str
    mass: np.ndarray
    spread: np.ndarray
    coverage: float
    uniform: float

    @property
    def lift(self) -> np.ndarray:
        """mass / uniform, [layers, heads]: 1 is no preference."""
        return self.mass / self.uniform


@dataclass(frozen=True)
class RepeatProbe:
    """Scores of every head on repeated random tokens, and how well the model copied.

    Attributes:
        induction: on the tokens that followed the query's token before; previous: on the key before the query's;
            duplicate: on earlier places of the query's token.
        olsson: mean over all pairs that match for induction, [layers, heads]; a perfect head gets 0.5 on a start token
            and 25 tokens said four times. tl_mul: weight on these pairs over all weight, as TransformerLens gives with
            "mul"; a perfect head gets the coverage.
        copying: [layers, heads], chance is 0.5 and perfect 1: the share of the tokens drawn from whose logits the value
            that a head reads at a token raises less than that token's own; None unless `probe_induction` is asked.
        losses: nats a token within each copy [copies, sequences]. The first token of each copy is left out: nothing
            foretells it.
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

    def __repr__(self) -> str:
        head = "layer  head  induction  previous   same  olsson  tl_mul"
        lines = [head + ("" if self.copying is None else "  copying")]
        for at in np.ndindex(*self.induction.mass.shape):
            line = f"{at[0]:>5}  {at[1]:>4}  {self.induction.mass[at]:>9.2f}  {self.previous.mass[at]:>8.2f}  "
            line += f"{self.duplicate.mass[at]:>5.2f}  {self.olsson[at]:>6.2f}  {self.tl_mul[at]:>6.2f}"
            lines.append(line + ("" if self.copying is None else f"  {self.copying[at]:>7.2f}"))
        copies = ", ".join(f"{loss:.2f}" for loss in self.losses.mean(1))
        lines.append(
            f"On random tokens, {self.length} of them said {len(self.losses)} times; a uniform head has "
            f"{self.induction.uniform:.3f} for induction. Nats a token, copy by copy: {copies}."
        )
        return "\n".join(lines)


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
            with the values of each layer [s, h_kv, n, d_v], which copying needs.
        vocabulary: tokens to draw from: how many, or which; better without the rarest and the most frequent.
        length: of one copy, which holds no token twice; copies: how often it is said, at least 2.
        start: a token put before each sequence, as Olsson et al. do; None for none.
        seed: sequence s is drawn with seed + s.
        unembedding: [V, d_model], the matrix that makes logits; outputs: of each layer [h, d_v, d_model], each head's
            part of W_O (`HeadSite.weights()["o"]`). Both together ask for copying: whether a head that looks at a token
            raises that token's logit, through its values and W_O alone.
    Raises:
        ConfigError, ShapeError, DTypeError: naming the argument.
    """
    kinds = _vocabulary(vocabulary)
    for name, value, least in (("length", length, 2), ("copies", copies, 2), ("sequences", sequences, 1)):
        if value < least:
            raise ConfigError(f"{name}={value}: expected at least {least}")
    if len(kinds) < length:
        raise ConfigError(f"vocabulary: {len(kinds)} tokens cannot fill length={length} without repeating; give more")
    if start is not None and start in kinds.tolist():
        raise ConfigError(f"start={start}: is one of the vocabulary drawn from; leave it out there")
    if (unembedding is None) != (outputs is None):
        raise ConfigError("unembedding and outputs: copying needs both, and without it neither")
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
            raise ConfigError("model: gave (logits, maps); copying needs (logits, maps, values)")
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
    seen[:, 0] = 0  # nothing stands before the first
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
    """Of the mass [s, layers, h, n] on so many keys [s or 1, n] out of all that each query may see."""
    eligible = count > 0
    of_each = eligible.sum(1).double()
    each = (mass.double() * eligible[:, None, None].to(mass.device)).sum(-1) / of_each[:, None, None].to(mass.device)
    uniform = ((count / keys) * eligible).sum(1) / of_each
    return HeadScores(
        name, each.mean(0).cpu().numpy(), each.std(0, unbiased=False).cpu().numpy(), float(eligible.double().mean()),
        float(uniform.mean()),
    )  # fmt: skip


def _vocabulary(vocabulary: int | Sequence[int] | Tensor) -> Tensor:
    kinds = torch.arange(vocabulary) if isinstance(vocabulary, int) else torch.as_tensor(vocabulary).cpu()
    if kinds.ndim != 1 or kinds.is_floating_point() or kinds.dtype == torch.bool:
        raise DTypeError(f"vocabulary: expected a number of tokens or a list of them, got {kinds.dtype} {kinds.ndim}-d")
    if len(kinds.unique()) < len(kinds):
        raise ConfigError("vocabulary: one token stands there twice")
    return kinds.long()


def _check(logits: Tensor, maps: list[AttentionMap], ids: Tensor) -> None:
    s, n = ids.shape
    if logits.ndim != 3 or logits.shape[:2] != (s, n):
        raise ShapeError(f"model: gave logits {tuple(logits.shape)} for ids {(s, n)}, expected ({s}, {n}, vocabulary)")
    if not maps:
        raise ConfigError("model: gave no maps; expected one for each layer")
    for index, amap in enumerate(maps):
        if not isinstance(amap, AttentionMap):
            raise DTypeError(f"model: maps[{index}] is a {type(amap).__name__}, expected an AttentionMap")
        if amap.shape != (s, maps[0].shape[1], n, n):
            raise ShapeError(f"model: maps[{index}] is {amap.shape}, expected {(s, maps[0].shape[1], n, n)}")
