"""Train every head design for the same number of steps with the same number of weights, and write the results.

    python -m benchmarks.designs FILE... --out runs/designs

All models are trained on the same batches. The width of the feed-forward network is chosen so that all models have as
many weights as the one with multi-head attention; --same-width keeps the width instead. Existing runs are not repeated,
so that a stopped comparison can be resumed. After training, the speeds of training, reading and writing are measured in
alternating runs. Writes docs/comparison.md and its picture (--pages FOLDER for another place); designs that read the
whole text at once cannot be decoders and are not included.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import examine
from benchmarks.timing import interleaved
from headwise.base.files import atomic_path
from headwise.cache import KVCache
from headwise.lm.checkpoint import load_checkpoint
from headwise.lm.model import Decoder, DecoderConfig, mean_loss
from headwise.lm.texts import Corpus
from headwise.lm.train import heldout_loss, train
from headwise.nn.registry import DESIGNS, STANDARD, design_of, names
from headwise.reports.figure import INK, LINE, MUTED, figure_class, font, quiet

ROOT = Path(__file__).parent.parent
WRITTEN = 48  # tokens, to measure the speed of writing
KINDS = ("training", "reading", "writing")  # what is timed
OURS, OTHER, CHANCE = "#D55E00", "#30506b", "#f6d9c4"


@dataclass(frozen=True)
class Entry:
    """A design as it is trained."""

    label: str
    design: str
    num_kv_heads: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


# What the comparison sets of a name: what it adds to the label, key heads, and options; the others are as they are.
SETTINGS: dict[str, tuple[str, int | None, dict[str, Any]]] = {
    "gqa": ("2 key heads", 2, {}),
    "sparse_mixture": ("2 of 8", None, {"top_k": 2}),
}


def comparable() -> tuple[Entry, ...]:
    """Every name of a design that can be a decoder and has a function of its own, the standard layer first."""
    found = []
    for name in names():
        if design_of(name).takes_mask and design_of(name).notes.form_of is None:
            label, num_kv_heads, options = SETTINGS.get(name, ("", None, {}))
            found.append(Entry(f"{name}, {label}" if label else name, name, num_kv_heads, options))
    return tuple(sorted(found, key=lambda entry: entry.design != STANDARD))


ENTRIES = comparable()


@dataclass(frozen=True)
class Outcome:
    """The results of a trained design."""

    label: str
    d_ff: int
    parameters: int
    attention: int  # of the parameters, those of the attention layers
    losses: list[dict[str, float]]  # of each seed, by text; nats a token, all held-out tokens
    cache: int  # bytes a token, all layers, float32
    speeds: dict[str, float]  # tokens a second, by what is done

    @property
    def loss(self) -> float:
        """Of the first seed, the mean over the texts."""
        return statistics.fmean(self.losses[0].values())


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pages", type=Path, default=ROOT / "docs")
    parser.add_argument("--only", nargs="+", help="labels, multi_head is always there")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3, help="runs of multi_head, to know what chance does")
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--num-layers", type=int, default=3)
    parser.add_argument("--num-heads", type=int, default=8)
    parser.add_argument("--d-ff", type=int, default=320)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--same-width", action="store_true", help="the same d_ff for all, whatever weights that makes")
    parser.add_argument("--train-only", action="store_true")
    args = parser.parse_args()
    entries = [e for i, e in enumerate(ENTRIES) if i == 0 or args.only is None or e.label in args.only]
    runs = [(entry, 0) for entry in entries] + [(entries[0], seed) for seed in range(1, args.seeds)]
    for i, (entry, seed) in enumerate(runs):
        print(f"[{i + 1}/{len(runs)}] {entry.label}, seed {seed}", flush=True)
        _train(entry, seed, args)
    if args.train_only:
        return
    outcomes = sorted(_outcomes(entries, args), key=lambda outcome: outcome.loss)
    picture = args.pages / "pictures" / "designs_trained.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw(outcomes, picture)
    with atomic_path(args.pages / "comparison.md") as temporary:
        Path(temporary).write_text(page(outcomes, args), encoding="utf-8")


def config_of(entry: Entry, vocabulary: int, args: argparse.Namespace) -> DecoderConfig:
    """Its sizes; without --same-width the d_ff with which its number of weights is closest to that of multi_head."""

    def sized(which: Entry, d_ff: int) -> DecoderConfig:
        return DecoderConfig(
            vocabulary, args.d_model, args.num_layers, args.num_heads, which.num_kv_heads, d_ff, args.context, 0.0,
            which.design, which.options,
        )  # fmt: skip

    if args.same_width:
        return sized(entry, args.d_ff)
    wanted, least = (_parameters(sized(which, d_ff)) for which, d_ff in ((ENTRIES[0], args.d_ff), (entry, 1)))
    step = _parameters(sized(entry, 2)) - least
    return sized(entry, max(1, 1 + round((wanted - least) / step)))


def _parameters(config: DecoderConfig) -> int:
    return Decoder(config).num_parameters


def _folder(entry: Entry, seed: int, args: argparse.Namespace) -> Path:
    return args.out / f"{entry.label.replace(', ', '-').replace(' ', '_')}-{seed}"


def _corpus(args: argparse.Namespace) -> Corpus:
    return Corpus.read(args.files, context=args.context)


def _train(entry: Entry, seed: int, args: argparse.Namespace) -> None:
    config = config_of(entry, _corpus(args).tokenizer.vocab_size, args)
    outcome = train(
        args.files, _folder(entry, seed, args), d_model=config.d_model, num_layers=config.num_layers,
        num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, d_ff=config.d_ff, design=config.design,
        options=config.options, context=config.context, batch_size=args.batch_size, steps=args.steps,
        warmup=args.steps // 10, eval_every=max(1, args.steps // 20), dropout=0.0, precision="float32", seed=seed,
    )  # fmt: skip
    if not outcome.finished:
        raise SystemExit("stopped; run the same command to resume")


def _outcomes(entries: list[Entry], args: argparse.Namespace) -> list[Outcome]:
    corpus = _corpus(args)
    windows = corpus.heldout_windows(args.context)
    decoders = {e.label: load_checkpoint(_folder(e, 0, args))[0] for e in entries}
    speeds = _speeds(decoders, corpus, args)
    found = []
    for entry in entries:
        decoder = decoders[entry.label]
        seeds = range(args.seeds if entry is ENTRIES[0] else 1)
        models = [load_checkpoint(_folder(entry, seed, args))[0] for seed in seeds]
        losses = [dict(zip(corpus.names, heldout_loss(model, windows), strict=True)) for model in models]
        attention = sum(p.numel() for block in decoder.blocks for p in block.attention.parameters())
        found.append(
            Outcome(
                entry.label,
                decoder.config.d_ff,
                decoder.num_parameters,
                attention,
                losses,
                _cache(decoder, windows[0]),
                speeds[entry.label],
            )
        )
    return found


@torch.no_grad()
def _cache(decoder: Decoder, windows: Tensor) -> int:
    """Bytes per token in the caches after one window."""
    caches = [KVCache() for _ in decoder.blocks]
    decoder.hidden(windows[:1], caches=caches)
    return sum(cache.nbytes for cache in caches) // windows.shape[1]


def _speeds(decoders: dict[str, Decoder], corpus: Corpus, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Tokens per second: of a training step on one batch, of reading it, and of writing token by token."""
    batch = corpus.batch(args.batch_size, args.context, seed=0, step=0)
    found: dict[str, dict[str, float]] = {label: {} for label in decoders}
    acts: tuple[Callable[[Decoder, Tensor], None], ...] = (_training_step, _read, _write)
    many = args.batch_size * args.context
    for kind, act, tokens in zip(KINDS, acts, (many, many, WRITTEN), strict=True):
        calls = {label: (lambda act=act, decoder=decoder: act(decoder, batch),) for label, decoder in decoders.items()}
        for call in calls.values():
            call[0]()  # warm
        times, _ = interleaved(calls, estimates=dict.fromkeys(calls, 1.0), rounds=9, seconds=60.0)
        for label in decoders:
            found[label][kind] = tokens / times[label].median
    return found


def _training_step(decoder: Decoder, batch: Tensor) -> None:
    decoder.train()
    mean_loss(decoder, batch).backward()
    decoder.zero_grad()


@torch.no_grad()
def _read(decoder: Decoder, batch: Tensor) -> None:
    decoder.eval().hidden(batch[:, :-1])


@torch.no_grad()
def _write(decoder: Decoder, batch: Tensor) -> None:
    caches = [KVCache() for _ in decoder.blocks]
    decoder.eval()
    for at in range(WRITTEN):
        decoder(batch[:1, at : at + 1], caches=caches)


def page(outcomes: list[Outcome], args: argparse.Namespace) -> str:
    """docs/comparison.md."""
    base = next(o for o in outcomes if o.label == ENTRIES[0].label)
    names = list(base.losses[0])
    titles = [name.removesuffix(".txt").replace("_", " ") for name in names]
    matched = "the same feed-forward network" if args.same_width else "equal numbers of weights by the choice of d_ff"
    command = f"python -m benchmarks.designs {' '.join(path.name for path in args.files)} --out runs/designs"
    command += f" --steps {args.steps}" + (" --same-width" if args.same_width else "")
    lines = [
        "# Head designs trained under the same conditions", "",
        f"Decoders of {args.num_layers} layers, d_model {args.d_model} and {args.num_heads} heads (if the design has",
        f"several), with {matched}. All were trained on the same {args.steps:,} batches of",
        f"{args.batch_size} × {args.context} characters of {' and '.join(titles)} with the same learning",
        "rate and evaluated on the same held-out text. The models are small and were trained briefly; the results",
        "apply to such models only.", "",
        "```console", command, "```", "",
        "![held-out loss, cache and speed of each design](pictures/designs_trained.png)", "",
        f"| design | {' | '.join(titles)} | mean | weights | in attention | d_ff | cache | {' | '.join(KINDS)} |",
        "| --- |" + " ---: |" * (len(names) + 5 + len(KINDS)),
    ]  # fmt: skip
    for o in outcomes:
        losses = [f"{o.losses[0][name]:.3f}" for name in names] + [f"{o.loss:.3f}"]
        sizes = [f"{o.parameters:,}", f"{o.attention:,}", str(o.d_ff), f"{o.cache:,}"]
        speeds = [f"{o.speeds[kind] / base.speeds[kind]:.2f}" for kind in KINDS]
        lines.append(f"| {' | '.join([o.label, *losses, *sizes, *speeds])} |")
    each = [statistics.fmean(losses.values()) for losses in base.losses]
    rates = ", ".join(f"{base.speeds[kind]:,.0f} {kind}" for kind in KINDS)
    machine = examine()
    lines += [
        "", "Losses in nats per token. cache: bytes per token of all layers in float32, measured on the caches. Speeds",
        f"are relative to multi_head, which processed, in tokens per second, {rates}",
        f"({machine.cpu}, {machine.threads} threads, torch {machine.torch}; medians of alternating runs; writing",
        "is one text, token by token).", "",
        f"**Variation between seeds.** multi_head with {len(each)} seeds: {', '.join(f'{loss:.3f}' for loss in each)}.",
        "Differences of that size are not significant; the others were trained once. Not included are designs that",
        f"compute the same function as another one ({_listed(d.notes.form_of is not None for d in DESIGNS.values())})",
        f"and designs without causal masks ({_listed(not d.takes_mask for d in DESIGNS.values())}).", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _listed(chosen: Iterable[bool]) -> str:
    """The designs that are chosen, one for each of the registry."""
    return ", ".join(f"`{name}`" for name, yes in zip(DESIGNS, chosen, strict=True) if yes)


def draw(outcomes: list[Outcome], path: Path) -> None:
    """A row for each design: loss, cache and training speed."""
    figure = figure_class()(figsize=(11.5, 4.6), layout="constrained", facecolor="white")
    panels = figure.subplots(1, 3, sharey=True, width_ratios=(1.5, 1, 1))
    base = next(o for o in outcomes if o.label == ENTRIES[0].label)
    chance = [statistics.fmean(losses.values()) for losses in base.losses]
    shown = outcomes[::-1]
    colours = [OURS if o is base else OTHER for o in shown]
    rows = range(len(shown))
    loss, cache, speed = panels
    loss.axvspan(min(chance), max(chance), color=CHANCE, linewidth=0)
    loss.scatter([o.loss for o in shown], rows, color=colours, s=42, zorder=3)
    loss.set_yticks(rows, [o.label for o in shown])
    _titled(loss, "Held-out loss, nats per token", f"shaded: multi_head with {len(chance)} seeds")
    cache.barh(rows, [o.cache for o in shown], color=colours, height=0.55)
    _titled(cache, "Cache, bytes per token", "all layers, float32")
    speed.barh(rows, [o.speeds["training"] / base.speeds["training"] for o in shown], color=colours, height=0.55)
    _titled(speed, "Speed of training", "multi_head = 1")
    for axes in panels:
        quiet(axes)
        axes.grid(visible=False, axis="y")
        axes.grid(axis="x", color=LINE, linewidth=0.7)
    for label in loss.get_yticklabels():
        label.set(color=INK, fontproperties=font(10))
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)


def _titled(axes: Any, title: str, below: str) -> None:
    axes.set_title(title, loc="left", color=INK, fontproperties=font(11))
    axes.set_xlabel(below, color=MUTED, fontproperties=font(9.5))


if __name__ == "__main__":
    main()
