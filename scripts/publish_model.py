"""Put a trained run into the package, and write down what it can do.

    python scripts/publish_model.py --run runs/first --run runs/embedded FILE...

Each run but the first started from the best weights of the one before. Rounds the last run's best weights to float16
(src/headwise/lm/pretrained), then judges what will be shipped, not what was trained: held-out loss beside unigram and
bigram models on the same tokens, previous-token and induction scores on repeated random characters, and text that it
writes. Writes docs/model.md and its picture.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from headwise.lm.baselines import baseline_losses
from headwise.lm.checkpoint import load_model, save_model
from headwise.lm.corpus import Corpus, read_text
from headwise.lm.generate import write
from headwise.lm.model import Decoder
from headwise.lm.probes import HeadScores, RepeatProbe, frequent_characters, probe_repeats
from headwise.lm.tokenizer import CharTokenizer
from headwise.lm.train import heldout_loss
from headwise.views.png import loss_curve

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
    decoder, tokenizer, info = load_model(runs[-1])
    save_model(PACKAGED, decoder, tokenizer, info, dtype=torch.float16)
    size = PACKAGED.stat().st_size
    if size > MOST_BYTES:
        raise SystemExit(f"{PACKAGED} has {size:,} bytes, more than {MOST_BYTES:,}")
    decoder, tokenizer, info = load_model(PACKAGED)
    corpus = Corpus.read(files, context=decoder.config.context, tokenizer=tokenizer)
    windows = corpus.heldout_windows(decoder.config.context)
    ours = heldout_loss(decoder, windows)
    baselines = baseline_losses(corpus.train, windows, tokenizer.vocab_size)
    log = _joined(runs)
    means = {name: float(np.mean(losses)) for name, losses in baselines.items()}
    loss_curve(log, ROOT / "docs/pictures/loss.png", means)
    parts = [
        _facts(info, size, decoder, log),
        _losses(corpus, ours, baselines),
        _heads(decoder, tokenizer, files, runs),
    ]
    parts += [_samples(decoder, tokenizer)]
    (ROOT / "docs/model.md").write_text("\n".join(parts), encoding="utf-8")


def _joined(runs: list[Path]) -> list[dict]:
    """The logs of the runs as one, each from the step whose weights the next one took."""
    log: list[dict] = []
    for run in runs:
        lines = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        made = load_model(run)[2]["settings"].get("init")
        taken = [line for line in log if made and line["step"] <= made["step"]]
        steps, seconds = (taken[-1]["step"], taken[-1]["seconds"]) if taken else (0, 0)
        log = taken + [line | {"step": line["step"] + steps, "seconds": line["seconds"] + seconds} for line in lines]
    return log


def _command(settings: dict, dropout: float, out: str, init: str | None) -> str:
    parts = [
        "headwise train water_margin_simplified.txt water_margin_traditional.txt tinyshakespeare.txt",
        f"--out {out}" + (f" --init {init}" if init else ""),
        f"--steps {settings['steps']} --batch-size {settings['batch_size']} --lr {settings['lr']} "
        f"--warmup {settings['warmup']} --weight-decay {settings['weight_decay']}",
        f"--dropout {dropout} --repeat-share {settings['repeat_share']} --eval-every 200 --seed {settings['seed']}",
    ]
    return " \\\n    ".join(parts)


def _facts(info: dict, size: int, decoder: Decoder, log: list[dict]) -> str:
    c, s = decoder.config, info["settings"]
    minutes = log[-1]["seconds"] / 60
    first = s["init"]
    commands = [_command(first["settings"], c.dropout, "runs/first", None)] if first else []
    commands.append(_command(s, c.dropout, "runs/embedded", "runs/first" if first else None))
    command = "\n".join(commands)
    stopped = (
        f"The first command was stopped with Ctrl-C after step {first['step']}; the second starts from its weights."
        if first
        else ""
    )
    return f"""# The embedded model

A decoder of {c.num_layers} layers × {c.num_heads} heads (d_model {c.d_model}, d_ff {c.d_ff}, rotary positions,
RMSNorm, tied embedding; {decoder.num_parameters:,} weights) over single characters, trained on *Water Margin* in
simplified and in traditional characters and on tiny Shakespeare. It ships in float16, {size:,} bytes with its
vocabulary of {c.vocab_size - 256:,} characters and 256 bytes. It is small on purpose: it is there to be looked at.

```console
{command}
```

{stopped} Together they took {minutes:.0f} minutes on a 2-core machine that was doing other things as well. The shipped
weights are those of step {info["step"]} of the last command, where the held-out loss was lowest. The same commands give
the same batches; sums in another order (other threads, another machine) give other roundings, and in the end other
weights of the same quality. `--repeat-share` is the share of training windows in which the text repeats its own
beginning over and over, which gives the model a reason to look back; the rest is plain text. The characters that the
probes below use are random; no window of the training was.

The last 5 % of each file is held out, the same passages of the novel in both scripts.

![training and held-out loss](pictures/loss.png)
"""


def _losses(corpus: Corpus, ours: list[float], baselines: dict[str, list[float]]) -> str:
    lines = ["## Held-out loss", "", "Nats a token, all held-out tokens; lower is better.", ""]
    lines += ["| text | this model | bigram (interpolated) | unigram |", "| --- | --- | --- | --- |"]
    for i, name in enumerate(corpus.names):
        lines.append(f"| {name} | {ours[i]:.3f} | {baselines['bigram'][i]:.3f} | {baselines['unigram'][i]:.3f} |")
    return "\n".join(lines) + "\n"


def _heads(decoder: Decoder, tokenizer: CharTokenizer, files: list[str], runs: list[Path]) -> str:
    lines = [
        "## What its heads do on text they cannot know", "",
        "Random characters, said twice: weight on the previous character, and (induction) on the character that",
        "followed the first time; per eligible query, beside the weight of a head that looks everywhere alike.", "",
        "| characters | pattern | strongest heads (layer.head: weight ± over sequences) | uniform | lift | coverage |",
        "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    copied = []
    for name, file, length in (("Chinese", files[0], 64), ("English", files[-1], 40)):
        probe = _probe(decoder, tokenizer, file, length)
        lines += [f"| {name}, T = {length} | {_row(scores)}" for scores in (probe.previous, probe.induction)]
        first, second = probe.first_loss.mean(), probe.second_loss.mean()
        copied.append(f"{name}: {first:.2f} nats a token the first time, {second:.2f} the second.")
    lines += ["", "What copying gains, on the same sequences. " + " ".join(copied)]
    if len(runs) > 1:
        before = _probe(load_model(runs[0])[0], tokenizer, files[0], 64).induction
        lines += ["", f"Where the first command stopped, the strongest head for induction on Chinese had "
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
    lines = ["## What it writes", "", "`headwise write --prompt … --length 200 --seed 1`, uncorrected."]
    texts = [prompt + "".join(write(decoder, tokenizer, prompt, 200, seed=1)) for prompt in PROMPTS]
    lines += ["".join(("\n```text\n", text, "\n```")) for text in texts]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
