"""Caches of `generate` for a model of transformers: bytes, tokens per second and loss beside the full cache.

    python -m benchmarks.generation_caches FOLDER --text TEXT               # a Markdown table
    python -m benchmarks.generation_caches FOLDER --text TEXT --train 20    # trains the model before, for 20 minutes

`--train` makes a small Llama-like model of characters: most of the time with a context of 256, then with `--context`,
2,048. The budget is chosen on the text that the model was trained on: of several windows the one with the smallest loss
there, with as many heads shortened as the share of the bytes needs. The loss is that of the last 5 % of the text, all
tokens of each window of `--context`, and of those of its second half, which attend to shortened caches. Tokens per
second are medians of alternating rounds of `generate`, after the prompt, by all entries of a batch together.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from benchmarks.machine import _cpu_name
from headwise.edit.budgets import Budget

SHARE = 0.3
WINDOWS = (64, 128, 256, 384, 512)
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 4, "head_dim": 32}  # fmt: skip
HELD_OUT = 0.05
CACHES = ("full cache of transformers", "full", "int8", f"budget {SHARE}", f"budget {SHARE}, int8")


def text_of(path: Path) -> tuple[Any, Tensor, Tensor]:
    """A tokenizer of the characters of a text, and its tokens: to train on, and held out."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    text = path.read_text(encoding="utf-8")
    vocabulary = {character: i for i, character in enumerate(sorted({*text}))}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    plain.decoder = decoders.Fuse()
    ids = torch.tensor([vocabulary[character] for character in text])
    cut = len(ids) - int(len(ids) * HELD_OUT)
    return PreTrainedTokenizerFast(tokenizer_object=plain, unk_token=" "), ids[:cut], ids[cut:]


def train(folder: Path, text: Path, minutes: float, context: int) -> None:
    """Train a model for so long and save it with its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer, ids, _ = text_of(text)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(**SIZES, vocab_size=len(tokenizer), max_position_embeddings=context, tie_word_embeddings=True,
                    bos_token_id=None, eos_token_id=None)
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95))
    begun, step, seen = time.monotonic(), 0, 0
    with hw.attach(model):
        while (done := (time.monotonic() - begun) / (60 * minutes)) < 1:
            n = 256 if done < 0.65 else context
            starts = torch.randint(len(ids) - n - 1, (4096 // n,))
            batch = torch.stack([ids[at : at + n + 1] for at in starts.tolist()])
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * min(1, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
            logits = model(batch[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step, seen = step + 1, seen + batch[:, 1:].numel()
            if step % 25 == 0:
                print(f"step {step}, {seen:,} tokens of windows of {n}, {done:.0%}: loss {loss:.4f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def losses(model: Any, windows: Tensor, budget: Budget | None, stored: str | None) -> tuple[float, float]:
    """Nats per token of windows [count, context + 1], all tokens and those of the second half."""
    found = []
    for window in windows.split(1):
        cache, nats = hw.cache.for_transformers(model, budget, stored=stored), []
        for part, targets in zip(window[:, :-1].split(512, 1), window[:, 1:].split(512, 1), strict=True):
            logits = model(part, past_key_values=cache).logits
            nats.append(torch.nn.functional.cross_entropy(logits[0].double(), targets[0], reduction="none"))
        found.append(torch.cat(nats))
    every = torch.stack(found)
    return float(every.mean()), float(every[:, every.shape[1] // 2 :].mean())


@torch.no_grad()
def chosen(model: Any, ids: Tensor, context: int) -> Budget:
    """The budget of at most `SHARE` of the bytes with the smallest loss on windows of these tokens."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(len(ids) - context - 1, (12,), generator=generator)
    windows = torch.stack([ids[at : at + context + 1] for at in starts.tolist()])
    maps: list[list[Any]] = []
    for window in windows[:4, :-1].split(1):
        seen: list[Any] = []
        with hw.models.observe(lambda call, seen=seen: seen.append(call.map), model=model):
            model(window, use_cache=False)
        maps.append(seen)
    tried = []
    for size in (one for one in WINDOWS if one < context // 2):
        kept = hw.edit.budget(maps, size, sinks=4, threshold=1.0).kept
        heads = torch.cat([layer.view(model.config.num_key_value_heads, -1).amin(-1) for layer in kept])
        short = math.ceil(
            (1 - SHARE) / (1 - (size + 3) / context) * len(heads)
        )  # of the heads, sinks + window − 1 each
        if short > len(heads):
            continue
        threshold = min(1.0, float(heads.sort(descending=True).values[short - 1]))
        found = hw.edit.budget(maps, size, sinks=4, threshold=threshold)
        tried.append((losses(model, windows[4:], found, None)[0], size, found))
        print(f"window {size}, {short} of {len(heads)} heads: loss {tried[-1][0]:.4f} where chosen", flush=True)
    return min(tried, key=lambda one: one[:2])[2]


def speed(model: Any, prompt: Tensor, cache: Any, count: int) -> float:
    """Seconds to generate `count` tokens, without the prompt and the first token."""
    options = {"do_sample": False, "past_key_values": cache}
    given = torch.ones(len(prompt), prompt.shape[1] + 1, dtype=torch.long)  # else a token is taken for padding
    first = model.generate(prompt, attention_mask=given[:, 1:], max_new_tokens=1, **options)
    begun = time.perf_counter()
    model.generate(first, attention_mask=given, max_new_tokens=count, **options)
    return time.perf_counter() - begun


def main() -> None:
    """Print the table."""
    from transformers import AutoModelForCausalLM, DynamicCache

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--train", type=float, help="minutes")
    parser.add_argument("--budget", type=Path, help="a file, instead of one that is chosen and saved in the folder")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192], help="tokens before generation")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--windows", type=int, default=24, help="held out windows")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if given.train is not None:
        train(given.folder, given.text, given.train, given.context)
    model = AutoModelForCausalLM.from_pretrained(given.folder).eval()
    _, ids, held = text_of(given.text)
    ends = range(0, len(held) - given.context - 1, given.context)
    windows = torch.stack([held[at : at + given.context + 1] for at in ends])[: given.windows]
    with hw.attach(model):
        budget = chosen(model, ids, given.context) if given.budget is None else hw.edit.read_budget(given.budget)
        if given.budget is None:
            hw.edit.save_budget(budget, given.folder / "budget.json")
        print(budget)
        kinds = [(None, None), (None, "int8"), (budget, None), (budget, "int8")]
        found = [losses(model, windows, *kind) for kind in kinds]
        makers = [lambda: DynamicCache(config=model.config)]
        makers += [lambda kind=kind: hw.cache.for_transformers(model, kind[0], stored=kind[1]) for kind in kinds]
        seconds: dict[tuple[int, int], list[float]] = {}
        held_bytes: dict[tuple[int, int], int] = {}
        prompts = {n: ids[: n * given.batch].view(given.batch, n) for n in given.lengths}
        for _ in range(given.rounds):
            for (n, prompt), (i, maker) in ((p, m) for p in prompts.items() for m in enumerate(makers)):
                cache = maker()
                seconds.setdefault((n, i), []).append(speed(model, prompt, cache, 32))
                own = getattr(cache, "nbytes", None)
                held_bytes[n, i] = own or sum(x.nbytes for one in cache.layers for x in (one.keys, one.values))
    tokens = 32 * given.batch
    print(f"\n{_cpu_name()}, threads: {torch.get_num_threads()}, torch {torch.__version__}; "
          f"{len(windows)} windows of {given.context} tokens held out, batch {given.batch}\n")  # fmt: skip
    for_each = " | ".join(f"bytes at {n:,} | tokens/s at {n:,}" for n in given.lengths)
    print(f"| cache | loss | rise | loss of the second half | rise | {for_each} |")
    print("| --- |" + " ---: |" * (4 + 2 * len(given.lengths)))
    for i, name in enumerate(CACHES):
        loss, base = found[max(0, i - 1)], found[0]
        cells = [f"{x:.4f} | {100 * (x / y - 1):+.2f} %" for x, y in zip(loss, base, strict=True)]
        for n in given.lengths:
            share = held_bytes[n, i] / held_bytes[n, 0]
            rate = tokens / sorted(seconds[n, i])[len(seconds[n, i]) // 2]
            cells.append(f"{held_bytes[n, i]:,} ({share:.3f}) | {rate:,.0f}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
