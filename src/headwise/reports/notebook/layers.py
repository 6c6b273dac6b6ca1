"""Attention layers and blocks in a notebook: what they are, each step of the computation, and their parameters."""

from html import escape
from typing import Any

import torch
from torch import nn

from headwise.nn import AttentionLayer, TransformerBlock
from headwise.nn.steps import Steps
from headwise.reports.words import words
from headwise.shown import register
from headwise.table.show import as_html

TOKENS = 3  # of the input on which the steps are noted; their values are not shown


def _layer(layer: AttentionLayer, lang: str) -> str:
    table = words(lang, "notebook")
    parts = [f"<p><b>{escape(_title(layer))}</b></p>"]
    if (notes := getattr(layer, "notes", None)) is not None:
        summary = notes.summary.zh if lang == "zh" else notes.summary.en
        parts.append(f"<p>{escape(summary)} <small>{escape(notes.source)}</small></p>")
    if (steps := _steps(layer, lang)) is not None:
        head = [table[name] for name in ("step", "formula", "shape", "meaning")]
        parts.append(as_html(head, [[step.name, step.formula, step.axes, step.words] for step in steps.steps]))
    return f"<div>{''.join(parts)}{_parameters(layer, lang)}</div>"


def _block(block: TransformerBlock, lang: str) -> str:
    inside = _parameters(block, lang) + _layer(block.attention, lang)
    return f"<div><p><b>{escape(type(block).__name__)}</b></p>{inside}</div>"


def _title(layer: AttentionLayer) -> str:
    sizes = {name: getattr(layer, name) for name in ("d_model", "num_heads", "num_kv_heads", "head_dim", "value_dim")}
    return f"{type(layer).__name__}({', '.join(f'{name}={size}' for name, size in sizes.items())})"


def _steps(layer: AttentionLayer, lang: str) -> Steps | None:
    """The steps on a short input; None for a design that does not describe them, or cannot run here."""
    steps = Steps(lang, causal=False)
    parameter = next(layer.parameters(), torch.zeros(()))
    training = layer.training
    try:
        with torch.no_grad():
            layer.eval().steps(parameter.new_zeros(1, TOKENS, layer.d_model), steps)
    except (NotImplementedError, RuntimeError):
        return None
    finally:
        layer.train(training)
    return steps


def _parameters(module: nn.Module, lang: str) -> str:
    table = words(lang, "notebook")
    sizes: list[tuple[str, Any]] = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    rows = [[name, " × ".join(map(str, size)), f"{torch.Size(size).numel():,}"] for name, size in sizes]
    total = sum(p.numel() for p in module.parameters())
    rows.append([table["total"], "", f"{total:,}"])
    return as_html([table["parameter"], table["shape"], table["count"]], rows)


register(AttentionLayer, _layer)
register(TransformerBlock, _block)
