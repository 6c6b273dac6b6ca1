"""Parameters and cache of a decoder by formulas, at present and with other numbers of heads."""

from collections.abc import Mapping
from typing import Any

from headwise.compress.words import term
from headwise.costs import Counts
from headwise.lm.model import SIZES, Decoder
from headwise.nn.registry import counts_of, sizes_of
from headwise.textbook.plan.tables import Column, Table, Value

Heads = tuple[int, int]  # query heads, and key and value heads
COST = (
    Column(term("model")),
    Column(term("loss"), "number"),
    Column(term("rise"), "share"),
    Column(term("parameters"), "count"),
    Column(term("KV B/token"), "count"),
)


def expected_parameters(decoder: Decoder, heads: Mapping[int, Heads]) -> int:
    """Of the whole model, with these numbers of heads in these layers."""
    found = decoder.num_parameters
    for layer, count in heads.items():
        found += counts_in(decoder, layer, count).parameters - counts_in(decoder, layer).parameters
    return found


def expected_cache_bytes(decoder: Decoder, heads: Mapping[int, Heads], size: int = 4) -> int:
    """Bytes of keys and values per token in all layers, at `size` bytes per number."""
    return size * sum(counts_in(decoder, layer, heads.get(layer)).cache for layer in range(len(decoder.blocks)))


def expected(decoder: Decoder, heads: Mapping[int, Heads]) -> dict[str, int]:
    """Parameters, and bytes per token in float32 caches, of the model with these numbers of heads in these layers."""
    return {
        "parameters": expected_parameters(decoder, heads),
        "cache_bytes": expected_cache_bytes(decoder, heads),
    }


def cost_table(
    title: str, decoder: Decoder, name: str, heads: Mapping[int, Heads], losses: tuple[float, float]
) -> Table:
    """The present model and, under `name`, the changed one: predicted losses, the rest by formula."""
    now, then = losses
    rows: tuple[tuple[Value, ...], ...] = (
        (term("now"), f"{now:.4f}", "", decoder.num_parameters, expected_cache_bytes(decoder, {})),
        (
            term(name), f"{then:.4f}", f"{100 * (then / now - 1):+.2f} %", expected_parameters(decoder, heads),
            expected_cache_bytes(decoder, heads),
        ),
    )  # fmt: skip
    return Table("expected", title, COST, rows)


def counts_in(decoder: Decoder, layer: int, heads: Heads | None = None) -> Counts:
    """The attention of a layer, with its own number of heads or another."""
    config = decoder.config
    attention: Any = decoder.blocks[layer].attention
    taken = sizes_of(config.design)
    sizes = {name: value for name, value in config.options.items() if name in taken}
    sizes |= {name: getattr(attention, name) for name in SIZES if name in taken and hasattr(attention, name)}
    if heads is not None:
        sizes |= {name: n for name, n in zip(("num_heads", "num_kv_heads"), heads, strict=True) if name in taken}
    return counts_of(config.design, {**sizes, "d_model": config.d_model})
