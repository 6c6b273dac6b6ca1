"""Attention step by step on real tensors: a layer with random weights, traced through all its steps."""

from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from headwise.errors import ConfigError
from headwise.masks import Causal
from headwise.nn import CONTRACT, STANDARD, Step, Steps, build
from headwise.wording import language_of

MOST_ROWS, MOST_COLS = 6, 8  # printed of each matrix


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
    """Compute self attention of a design on a random input by its definition, and return every step.

    The last step is checked against the module's own output; they agree to float32 rounding.

    Args:
        seq, d_model, num_heads, num_kv_heads, batch: sizes of the layer and its input.
        design: the name of a design, as in `headwise.nn.registry`. options: its own options, such as {"top_k": 1}.
        causal: whether to apply a causal mask.
        seed: of the weights and the input.
        lang: the language of the explanations, "en" or "zh"; None for that of the locale.
    Returns:
        One `Step` for each step: its formula, tensor and explanation.
    Raises:
        ConfigError: naming an argument or option that is unknown or out of range; and for a design whose `steps`
            do not compute what its call computes.
    """
    lang = language_of(lang)
    if min(seq, batch, d_model) < 1:
        raise ConfigError(
            f"seq={seq}, batch={batch}, d_model={d_model}: expected at least 1 each",
            f"seq={seq}、batch={batch}、d_model={d_model}：都应不小于 1",
        )
    chosen = dict(options or {})
    if chosen.get("context_dim") not in (None, d_model) or chosen.get("out_dim") not in (None, d_model):
        raise ConfigError(
            "options: trace supports self attention from d_model to d_model only; leave out the other widths",
            "options：trace 只支持从 d_model 到 d_model 的自注意力；请去掉其他宽度",
        )
    if num_kv_heads is not None:
        chosen["num_kv_heads"] = num_kv_heads
    generator = torch.Generator().manual_seed(seed)
    layer = build(design, d_model, num_heads, chosen).eval()
    note = Steps(lang, causal)
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            if "norm" not in key and key not in ("centres", "sharpness"):  # these have fixed values by design
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / d_model**0.5)
        x = torch.randn(batch, seq, d_model, generator=generator)
        expected = layer(x, mask=Causal() if causal else None)
        layer.steps(note("x", x, "b n d_model", "X", "the input: one vector per token", "输入：每个词元一个向量"), note)
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
        line = Text(f"{i:2}  ", style="dim") + Text(f"{step.formula:<20}", style="bold")
        console.print(line + Text(f" [{shape}]", style="cyan") + Text(f"  ({step.axes})", style="dim"))
        console.print(Text("    " + step.words, style="italic"))
        for row in _numbers(step.tensor):
            console.print(Text("      " + row), no_wrap=True, crop=True)
        console.print()


def _numbers(tensor: Tensor) -> list[str]:
    while tensor.ndim > 2:
        tensor = tensor[0]
    rows = [" ".join(f"{x:7.3f}" for x in row[:MOST_COLS].tolist()) for row in tensor[:MOST_ROWS]]
    if tensor.shape[1] > MOST_COLS:
        rows = [row + " …" for row in rows]
    return rows + ["…"] * (tensor.shape[0] > MOST_ROWS)
