"""Printing a trace in the terminal."""

from rich.console import Console
from rich.text import Text
from torch import Tensor

from headwise.nn.steps import Step

MOST_ROWS, MOST_COLS = 6, 8  # printed of each matrix


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
