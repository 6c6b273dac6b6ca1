"""One head against several in training: small decoders, trained on text that the embedded model writes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor, nn

from headwise.cache import KVCache
from headwise.lm import Decoder, DecoderConfig
from headwise.wording import Bilingual
from headwise_textbook.claims.claim import claim
from headwise_textbook.claims.evidence import Check, at_least, at_most
from headwise_textbook.claims.model import losses_of, losses_without, trained
from headwise_textbook.claims.samples import adam
from headwise_textbook.curves import Curve
from headwise_textbook.seeds import seeded

SEEDS, HEADS = (0, 1, 2), (1, 4)
STEPS, LENGTH, ROWS, HELD_OUT = 300, 96, 320, 40
# BLEU on newstest2013 for one and eight heads at equal cost: Vaswani et al. 2017, table 3, rows (A) and base.
PUBLISHED_BLEU = {1: 24.9, 8: 25.8}


@claim
def multi_head_is_better() -> list[Check]:
    one, four = (pupils(h) for h in HEADS)
    gain = [a.held_out - b.held_out for a, b in zip(one, four, strict=True)]
    better = [b.held_out < a.held_out for a, b in product(one, four)]
    without = float(losses_of(four[0].decoder, held_out(), scale=0.0).mean()) - four[0].held_out
    return [
        at_least(("BLEU of 8 heads minus one, as published",
                  "公布的 BLEU，8 个头减单头"), PUBLISHED_BLEU[8] - PUBLISHED_BLEU[1], 0.5),
        at_least(("held-out loss of one head minus four heads, mean of 3 seeds",
                  "未见文本上的损失，1 个头减 4 个头，3 个种子平均"),
                 sum(gain) / len(gain), 0.02).beyond(),
        at_least(("share of 9 pairs of trainings in which four heads are better", "9 对训练中 4 个头较好的比例"),
                 sum(better) / len(better), 0.5).beyond(),
        at_least(("loss without any head minus that with all",
                  "去掉所有头的损失减去保留时的"), without, 0.1).control(sum(gain) / len(gain)),
    ]  # fmt: skip


@claim
def easier_to_train() -> list[Check | Curve]:
    one, four = (pupils(h) for h in HEADS)
    half, end = ([a.near(at) - b.near(at) for a, b in zip(one, four, strict=True)] for at in (STEPS // 2, STEPS))
    ends = [pupil.near(STEPS) for pupil in one]
    at = range(20, STEPS + 1, 20)
    lines = {
        Bilingual(f"{h} head{'s' * (h > 1)}, mean of 3", f"{h} 个头，3 次平均"): {
            t: sum(pupil.near(t) for pupil in pupils(h)) / len(SEEDS) for t in at
        }
        for h in HEADS
    }
    return [
        at_least(("training loss of one head minus four heads, halfway, mean of 3",
                  "训练损失，1 个头减 4 个头，中途，3 次平均"),
                 sum(half) / len(half), 0.02),
        at_least(("at the end, smallest of 3", "结束时，3 次中最小"), min(end), 0.02),
        at_most(("largest difference between single-head trainings",
                 "单头训练之间的最大差别"), max(ends) - min(ends), 0.02).control(min(end)),
        Curve.of(Bilingual("Training loss, d_model = 64", "训练损失，d_model = 64"), Bilingual("step", "步"),
                 Bilingual("nats per character", "奈特每字符"), lines),
    ]  # fmt: skip


@claim
def heads_as_ensemble() -> list[Check]:
    model = trained()
    size = range(model.decoder.config.num_heads)
    every = [(layer, head) for layer in range(len(model.heads)) for head in size]
    none, whole = float(losses_without(model, every).mean()), float(model.losses.mean())
    alone = [
        (none - float(losses_without(model, [x for x in every if x[1] != kept]).mean())) / (none - whole)
        for kept in size
    ]
    member = _share_of_member()
    return [
        at_least(("share of the gain with one head per layer, mean of 8",
                  "每层只留一个头所得收益的比例，8 种平均"), sum(alone) / len(alone), 0.5),
        at_least(("the best of 8", "8 种中最好的"), max(alone), 0.5),
        at_least(("share of the gain of an ensemble of three models with one of them",
                  "三个模型的集成中，单个成员所得收益的比例"),
                 member, 0.5).control(sum(alone) / len(alone)),
    ]  # fmt: skip


@claim
def more_heads_more_robust() -> list[Check]:
    model = trained()
    every = [(i, head) for i in range(len(model.heads)) for head in range(model.decoder.config.num_heads)]
    least = sorted(every, key=lambda head: float((losses_without(model, [head]) - model.losses).mean()))[:8]
    whole, without = (_rise(partial(_losses_without, removed), model.ids) for removed in ([], least))
    twice = _rise(partial(losses_of, model.decoder), model.ids, share=0.2)
    one, four = (
        sum(_rise(partial(losses_of, pupil.decoder), held_out()) for pupil in pupils(h)) / len(SEEDS) for h in HEADS
    )
    return [
        at_least(("increase of the loss without 8 of 32 heads relative to all",
                  "去掉 32 个头中的 8 个，损失增加量与保留全部之比"),
                 without / whole, 1.2),
        at_least(("increase with one head relative to four heads, mean of 3 trainings",
                  "1 个头与 4 个头的损失增加量之比，3 次训练平均"),
                 one / four, 1.2),
        at_least(("increase with a fifth instead of a tenth replaced",
                  "替换五分之一与十分之一的损失增加量之比"), twice / whole, 1.2)
        .control(max(without / whole, one / four)),
    ]  # fmt: skip


@dataclass(frozen=True)
class Pupil:
    """A small decoder after training. losses: of each step. held_out: nats per character of text that it has not "
    "seen."""

    decoder: Decoder
    losses: tuple[float, ...]
    held_out: float

    def near(self, step: int) -> float:
        """The mean training loss of the 20 steps before."""
        return sum(self.losses[step - 20 : step]) / 20


@cache
def pupils(h: int) -> tuple[Pupil, ...]:
    """Decoders of h heads with 3 seeds, each trained on the same batches."""
    return tuple(_taught(h, seed) for seed in SEEDS)


def held_out() -> Tensor:
    """The sequences that were not trained on, [rows, length]."""
    return _text()[0][-HELD_OUT:]


@cache
@torch.no_grad()
def _text() -> tuple[Tensor, int]:
    """Text that the embedded model continues from "ROMEO:", numbered anew, [rows, length]; and its number of "
    "symbols."""
    model, draw = trained(), torch.Generator().manual_seed(0)
    new = torch.from_numpy(model.tokenizer.encode("ROMEO:\n"))[None].expand(ROWS, -1)
    caches, written = [KVCache() for _ in model.decoder.blocks], []
    for _ in range(LENGTH):
        logits = model.decoder(new, caches=caches)[:, -1].float()
        new = torch.multinomial(logits.softmax(-1), 1, generator=draw)
        written.append(new)
    symbols, ids = torch.cat(written, 1).unique(return_inverse=True)
    return ids, len(symbols)


def _taught(h: int, seed: int) -> Pupil:
    ids, symbols = _text()
    ids, draw = ids[:-HELD_OUT], torch.Generator().manual_seed(100 + seed)
    config = DecoderConfig(symbols, d_model=64, num_layers=2, num_heads=h, d_ff=160, context=LENGTH)
    with seeded(seed):
        decoder = Decoder(config)

        def loss() -> Tensor:
            batch = ids[torch.randint(0, len(ids), (16,), generator=draw)]
            return nn.functional.cross_entropy(decoder(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

        losses = tuple(adam(decoder.parameters(), loss, STEPS, 3e-3, last=0.1))
    return Pupil(decoder.eval(), losses, float(losses_of(decoder, held_out()).mean()))


@torch.no_grad()
def _share_of_member() -> float:
    """The gain of one of three models over character frequencies relative to that of their mean probabilities."""
    ids, symbols = _text()
    seen = held_out()[:, 1:]
    frequent = torch.bincount(ids[:-HELD_OUT].flatten(), minlength=symbols).float() + 1
    base = -float((frequent / frequent.sum()).log()[seen].mean())
    chances = torch.stack([pupil.decoder(held_out())[:, :-1].softmax(-1) for pupil in pupils(HEADS[-1])]).mean(0)
    together = -float(chances.gather(-1, seen[..., None]).log().mean())
    alone = sum(pupil.held_out for pupil in pupils(HEADS[-1])) / len(SEEDS)
    return (base - alone) / (base - together)


def _losses_without(removed: list[tuple[int, int]], ids: Tensor) -> Tensor:
    """Nats per token of a text [1, n] without some heads of the embedded model, [1, n − 1]."""
    return losses_without(trained(), removed, ids)[None]


def _rise(losses: Callable[[Tensor], Tensor], ids: Tensor, share: float = 0.1) -> float:
    """How much the mean loss of the other characters increases if a share of them is replaced by others of the text.

    Args:
        losses: of texts [b, n], as [b, n − 1]. Those of replaced characters and of their successors do not count.
    """
    draw, before, rises = torch.Generator().manual_seed(0), losses(ids), []
    for _ in range(8):
        hit = torch.rand(ids.shape, generator=draw) < share
        others = ids.flatten()[torch.randint(0, ids.numel(), ids.shape, generator=draw)]
        same = ~(hit[:, 1:] | hit[:, :-1])
        rises.append(float((losses(torch.where(hit, others, ids)) - before)[same].mean()))
    return sum(rises) / len(rises)
