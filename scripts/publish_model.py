"""Put a trained run into the package, and write down what it can do.

    python scripts/publish_model.py --run runs/first --run runs/embedded FILE...

Each run but the first started from the best weights of the one before. Rounds the last run's best weights to float16
(src/headwise/lm/pretrained), then judges what will be shipped, not what was trained: held-out loss beside unigram and
bigram models on the same tokens, previous-token and induction scores on repeated random characters, and text that it
writes. Writes docs/model.md and its picture.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from baselines import baseline_losses

from headwise.base.read import write_tensors
from headwise.lm.checkpoint import header_of, load_checkpoint
from headwise.lm.model import Decoder, write
from headwise.lm.texts import CharTokenizer, Corpus, read_text
from headwise.lm.train import heldout_loss
from headwise.lm.watch_heads import HeadScores, RepeatProbe, frequent_characters, probe_repeats
from headwise.reports.pictures import loss_curve

ROOT = Path(__file__).parent.parent
PACKAGED = ROOT / "src/headwise/lm/pretrained/model.safetensors"
MOST_BYTES = 8_000_000
PROMPTS = ("话说", "武松", "話說宋江", "ROMEO:\n")


def main() -> None:
    """Publish."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, action="append", required=True)
    parser.add_argument("files", nargs="+")
    args = parser.parse_args()
    runs, files = args.run, args.files
    decoder, tokenizer, info = load_checkpoint(runs[-1])
    # As `headwise.lm.checkpoint.read` puts them together: the low bytes [..., 0], then the high ones.
    halves = {name: x.half().view(torch.uint8).unflatten(-1, (-1, 2)) for name, x in decoder.state_dict().items()}
    weights = {name: x.movedim(-1, 0) for name, x in halves.items()}
    write_tensors(PACKAGED, weights, header_of(decoder.config, tokenizer, info))
    size = PACKAGED.stat().st_size
    if size > MOST_BYTES:
        raise SystemExit(f"{PACKAGED} has {size:,} bytes, more than {MOST_BYTES:,}")
    decoder, tokenizer, info = load_checkpoint(PACKAGED)
    corpus = Corpus.read(files, context=decoder.config.context, tokenizer=tokenizer)
    windows = corpus.heldout_windows(decoder.config.context)
    ours = heldout_loss(decoder, windows)
    baselines = baseline_losses(corpus.train, windows, tokenizer.vocab_size)
    log = _joined(runs)
    # On the windows that the log was made with, so that curve and lines are of the same tokens.
    same = baseline_losses(corpus.train, corpus.heldout_windows(decoder.config.context, most=24), tokenizer.vocab_size)
    lines = {f"bigram, {name}": loss for name, loss in zip(corpus.names, same["bigram"], strict=True)}
    loss_curve(log, ROOT / "docs/pictures/loss.png", lines)
    parts = [
        _facts(info, size, decoder, log, runs),
        _losses(corpus, ours, baselines),
        _heads(decoder, tokenizer, files, runs),
    ]
    parts += [_samples(decoder, tokenizer)]
    (ROOT / "docs/model.md").write_text("\n".join(parts), encoding="utf-8")


def _joined(runs: list[Path]) -> list[dict]:
    """The logs of the runs as one, each up to the step whose weights the next one took."""
    log: list[dict] = []
    for k, run in enumerate(runs):
        steps, seconds = (log[-1]["step"], log[-1]["seconds"]) if log else (0, 0)
        last = load_checkpoint(runs[k + 1])[2]["settings"]["init"]["step"] if k + 1 < len(runs) else math.inf
        lines = [line for line in _log(run) if line["step"] <= last]
        log += [line | {"step": line["step"] + steps, "seconds": line["seconds"] + seconds} for line in lines]
    return log


def _log(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def _command(settings: dict, dropout: float, eval_every: int, out: str, init: str | None) -> str:
    parts = [
        "headwise train water_margin_simplified.txt water_margin_traditional.txt tinyshakespeare.txt",
        f"--out {out}" + (f" --init {init}" if init else ""),
        f"--steps {settings['steps']} --batch-size {settings['batch_size']} --lr {settings['lr']} "
        f"--warmup {settings['warmup']} --weight-decay {settings['weight_decay']}",
        f"--dropout {dropout} --repeat-share {settings['repeat_share']} --eval-every {eval_every} "
        f"--seed {settings['seed']}",
    ]
    return " \\\n    ".join(parts)


def _facts(info: dict, size: int, decoder: Decoder, log: list[dict], runs: list[Path]) -> str:
    c = decoder.config
    minutes = log[-1]["seconds"] / 60
    stages = [info]
    while stages[0]["settings"].get("init"):
        stages.insert(0, stages[0]["settings"]["init"])
    command = "\n".join(
        _command(stage["settings"], c.dropout, _log(runs[k])[0]["step"], f"runs/{k + 1}", f"runs/{k}" if k else None)
        for k, stage in enumerate(stages)
    )
    steps = ", ".join(str(stage["step"]) for stage in stages)
    return f"""# The embedded model

A decoder of {c.num_layers} layers × {c.num_heads} heads (d_model {c.d_model}, d_ff {c.d_ff}, rotary positions,
RMSNorm, tied embedding; {decoder.num_parameters:,} weights) over single characters, trained on *Water Margin* in
simplified and in traditional characters and on tiny Shakespeare. It ships in float16, {size:,} bytes with its
vocabulary of {c.vocab_size - 256:,} characters and 256 bytes. It is small on purpose, as an example for inspection.

<!-- not run: takes an hour -->

```console
{command}
```

Each command starts from the best weights of the one before, at the steps {steps}; the first was stopped there with
Ctrl-C. Together they took {minutes:.0f} minutes on a busy machine with 2 cores. The same commands use the
same batches, but another number of threads or another machine rounds differently, and gives different weights of the
same quality. `--repeat-share` is the share of training windows that repeat their own beginning, so that attending to
earlier text is useful; the others are plain text. The probes below use random characters; no window of the
training was random.

The last 5 % of each file is held out, the same passages of the novel in both scripts.

![training and held-out loss](pictures/loss.png)
"""


def _losses(corpus: Corpus, ours: list[float], baselines: dict[str, list[float]]) -> str:
    lines = ["## Held-out loss", "", "Nats per token over all held-out tokens; lower is better.", ""]
    lines += ["| text | this model | bigram (interpolated) | unigram |", "| --- | --- | --- | --- |"]
    for i, name in enumerate(corpus.names):
        lines.append(f"| {name} | {ours[i]:.3f} | {baselines['bigram'][i]:.3f} | {baselines['unigram'][i]:.3f} |")
    return "\n".join(lines) + "\n"


def _heads(decoder: Decoder, tokenizer: CharTokenizer, files: list[str], runs: list[Path]) -> str:
    lines = [
        "## Its heads on random text", "",
        "Repeated random characters: weight on the previous character, and (induction) on the character that followed",
        "the first occurrence; per eligible query, compared with the weight of a uniform head.", "",
        "| characters | pattern | strongest heads (layer.head: weight ± over sequences) | uniform | lift | coverage |",
        "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    copied = []
    for name, file, length in (("Chinese", files[0], 64), ("English", files[-1], 40)):
        probe = _probe(decoder, tokenizer, file, length)
        lines += [f"| {name}, T = {length} | {_row(scores)}" for scores in (probe.previous, probe.induction)]
        first, second = probe.first_loss.mean(), probe.second_loss.mean()
        copied.append(f"{name}: {first:.2f} nats per token in the first copy, {second:.2f} in the second.")
    lines += ["", "Losses on the same sequences. " + " ".join(copied)]
    if len(runs) > 1:
        before = _probe(load_checkpoint(runs[0])[0], tokenizer, files[0], 64).induction
        lines += ["", f"After the first command, the strongest induction head on Chinese had "
                  f"{before.mass.max():.2f} (uniform {before.uniform:.3f})."]  # fmt: skip
    return "\n".join([*lines, ""])


def _probe(decoder: Decoder, tokenizer: CharTokenizer, file: str, length: int) -> RepeatProbe:
    characters = frequent_characters(read_text(file), tokenizer)
    return probe_repeats(decoder, tokenizer, characters, length=length, sequences=16)


def _row(scores: HeadScores) -> str:
    order = np.argsort(-scores.mass, axis=None)[:3]
    best = [np.unravel_index(k, scores.mass.shape) for k in order]
    heads = ", ".join(f"{a}.{b}: {scores.mass[a, b]:.2f} ± {scores.spread[a, b]:.2f}" for a, b in best)
    return f"{scores.name} | {heads} | {scores.uniform:.3f} | {scores.lift[best[0]]:.0f} × | {scores.coverage:.2f} |"


def _samples(decoder: Decoder, tokenizer: CharTokenizer) -> str:
    lines = ["## Samples", "", "`headwise write --prompt … --length 200 --seed 1`, uncorrected."]
    texts = [prompt + "".join(write(decoder, tokenizer, prompt, 200, seed=1)) for prompt in PROMPTS]
    lines += ["".join(("\n```text\n", text, "\n```")) for text in texts]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
