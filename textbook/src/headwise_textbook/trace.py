"""Attention step by step on real tensors: a layer with random weights, traced through all its steps."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from headwise.errors import ConfigError
from headwise.masks import Causal
from headwise.nn import CONTRACT, STANDARD, Step, Steps, build
from headwise.wording import language_of, tr

MOST_ROWS, MOST_COLS = 6, 8  # printed of each matrix


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed PyTorch's generator of the CPU in the block, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def trace(
    seq: int = 4,
    d_model: int = 8,
    num_heads: int = 2,
    *,
    design: str = STANDARD,
    num_kv_heads: int | None = None,
    options: Mapping[str, Any] | None = None,
    batch: int = 1,
    causal: bool = False,
    seed: int = 0,
    lang: str | None = None,
) -> list[Step]:
    """Every step of self attention of a design, computed by its definition on a random input.

    ConfigError for an argument or option that is unknown or out of range, and for a design whose `steps` do not compute
    what its call computes, to float32 rounding. options: of the design, such as {"top_k": 1}.
    """
    lang = language_of(lang)
    if min(seq, batch, d_model) < 1:
        raise ConfigError(
            "seq={seq}, batch={batch}, d_model={d_model}: expected at least 1 each",
            seq=seq,
            batch=batch,
            d_model=d_model,
        )
    chosen = dict(options or {})
    if chosen.get("context_dim") not in (None, d_model) or chosen.get("out_dim") not in (None, d_model):
        raise ConfigError(
            tr("options: trace supports self attention from d_model to d_model only; leave out the other widths")
        )
    if num_kv_heads is not None:
        chosen["num_kv_heads"] = num_kv_heads
    layer = build(design, d_model, num_heads, chosen).eval()
    note = Steps(lang, causal)
    with seeded(seed), torch.no_grad():
        for key, parameter in layer.named_parameters():
            if "norm" not in key and key not in ("centres", "sharpness"):  # these have fixed values by design
                parameter.copy_(torch.randn(parameter.shape) / d_model**0.5)
        x = torch.randn(batch, seq, d_model)
        expected = layer(x, mask=Causal() if causal else None)
        layer.steps(note("x", x, "b n d_model", "X", tr("the input: one vector per token")), note)
    last = note.steps[-1]
    try:
        torch.testing.assert_close(last.tensor, expected, rtol=1e-4, atol=1e-5)
    except AssertionError as error:
        raise ConfigError(
            f"design={design!r}: the last step of {type(layer).__name__}.steps, {last.name!r}, is not y of the call: "
            f"{' '.join(str(error).split())} Expected {CONTRACT['steps']}, the last of which is y"
        ) from None
    return note.steps


def print_trace(steps: list[Step], console: Console) -> None:
    """Print each step with its shape, and the numbers of the first batch entry and head."""
    for i, step in enumerate(steps, 1):
        shape = " × ".join(map(str, step.tensor.shape))
        line = Text(f"{i:2}  ", style="dim") + Text(step.formula + " " * (20 - cell_len(step.formula)), style="bold")
        console.print(line + Text(f" [{shape}]", style="cyan") + Text(f"  ({step.axes})", style="dim"))
        console.print(Text("    " + step.words, style="italic"))
        matrix = step.tensor.reshape(-1, *step.tensor.shape[-2:])[0]
        more = " …" if matrix.shape[1] > MOST_COLS else ""
        rows = [" ".join(f"{x:7.3f}" for x in row[:MOST_COLS].tolist()) + more for row in matrix[:MOST_ROWS]]
        for row in rows + ["…"] * (len(matrix) > MOST_ROWS):
            console.print(Text(f"      {row}"), no_wrap=True, crop=True)
        console.print()
