"""The size of a page that shows every head of a small GPT-2, beside BertViz's; and what each loads from the network.

    pip install bertviz ipython
    python scripts/bertviz_sizes.py

The model has 6 layers of 6 heads and random weights; sizes depend on the number of tokens and heads only, and a little
on the weights. BertViz's head view is a notebook's output, written with html_action="return".
"""

import re
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import headwise as hw

TOKENS = (250, 500)
LAYERS = HEADS = 6


def bertviz_page(model: GPT2LMHeadModel, ids: torch.Tensor, words: list[str]) -> str:
    """The head view of the weights that the model returns."""
    from bertviz import head_view

    return str(head_view(model(ids, output_attentions=True).attentions, words, html_action="return").data)


def headwise_page(model: GPT2LMHeadModel, ids: torch.Tensor, words: list[str]) -> str:
    """The report, with statistics, roles and comparisons of the heads besides the weights."""
    with tempfile.TemporaryDirectory() as folder, hw.watch(model, maps="lazy") as record:
        model(ids)
        hw.report(record, Path(folder) / "report.html", pieces=words, cells=len(words))  # every weight
        return (Path(folder) / "report.html").read_text(encoding="utf-8")


def main() -> None:
    """Print a table."""
    torch.manual_seed(0)
    sizes = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": 96, "vocab_size": 97, "n_positions": max(TOKENS)}
    model = GPT2LMHeadModel(GPT2Config(**sizes, attn_implementation="eager")).eval()
    sys.stdout.write("| page | tokens | MB | scripts from the network | seconds |\n| --- | --- | --- | --- | --- |\n")
    for tokens in TOKENS:
        ids = torch.randint(97, (1, tokens))
        words = [f"w{i}" for i in ids[0].tolist()]
        for name, write in (("BertViz head view", bertviz_page), ("headwise report", headwise_page)):
            since = time.perf_counter()
            with torch.no_grad():
                page = write(model, ids, words)
            seconds = time.perf_counter() - since
            loaded = len(set(re.findall(r"https?://[^\s'\"]+\.(?:js|css|min)\b|https?://cdnjs[^\s'\"]+", page)))
            megabytes = len(page.encode()) / 1e6
            sys.stdout.write(f"| {name} | {tokens} | {megabytes:.1f} | {loaded} | {seconds:.1f} |\n")


if __name__ == "__main__":
    main()
