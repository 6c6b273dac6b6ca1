"""The attention layers of a model whose layers differ."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from headwise.costs import Attentions, Counts
from headwise.costs.configs import ModelConfig, Sizes
from headwise.textbook.plan.tables import Column, Table, Value
from headwise.textbook.plan.words import term
from headwise.wording import joined

COLUMNS = (
    Column(term("layers_column")), Column("h", "count", "num_heads"), Column("h_kv", "count", "num_kv_heads"),
    Column("d_k", "count", "head_dim"), Column(term("parameters"), "count"),
    Column(term("cache"), "count", "cached_numbers_a_token"),
)  # fmt: skip


def layers_table(config: ModelConfig, attentions: Attentions) -> Table:
    """Return a table with a row for each run of equal layers: parameters and cache are those of one layer."""
    first, second = config.attention_sizes[: config.layers], config.attention_sizes[config.layers :]
    stacks = [("encoder" if second else "stack", first, attentions.layers)]
    if second:
        stacks += [("decoder", second[::2], attentions.decoder), ("cross", second[1::2], attentions.cross)]
    rows: list[tuple[Value, ...]] = []
    for name, sizes, layers in stacks:
        decodes = name != "encoder" and (config.causal or bool(second))
        for numbers, own, counts in _runs(sizes, layers):
            given = dict(own)
            d_k = given.get("head_dim", config.d_model // counts.heads)
            cache = counts.cache if decodes and counts.cached else None
            rows.append(
                (term(name, numbers=numbers), counts.heads, kv_heads(given, counts), d_k, counts.parameters, cache)
            )
    note = joined([term("layers_note"), *([term("cross_note")] if second else [])], " ", "")
    return Table("layers", term("layers_title"), COLUMNS, tuple(rows), note=note)


def kv_heads(sizes: Mapping[str, int | str], counts: Counts) -> Value:
    """The KV heads of a layer, or "c" if all heads share one latent vector."""
    from_one = counts.cached and not counts.at_decoding.values  # values are computed from the cached keys
    return "c" if from_one else sizes.get("num_kv_heads") or sizes.get("num_heads")


def sizes_of_heads(config: ModelConfig) -> Iterable[str]:
    """The sizes that all attention layers have, as "num_heads 8"; with the least and most where they differ."""
    every = [dict(sizes) for sizes in config.attention_sizes]
    for name in every[0]:
        values = {sizes.get(name) for sizes in every}
        numbers = [value for value in values if isinstance(value, int)]
        if len(values) == 1:
            yield f"{name} {every[0][name]}"
        elif len(numbers) == len(values):
            yield term("from_to", name=name, least=min(numbers), most=max(numbers))


def _runs(every: tuple[Sizes, ...], layers: tuple[Counts, ...]) -> Iterator[tuple[str, Sizes, Counts]]:
    """Runs of layers with the same counts: their numbers, their sizes, and the counts."""
    for counts, run in groupby(range(len(layers)), key=lambda i: layers[i]):
        first, *rest = run
        yield f"{first}–{rest[-1]}" if rest else f"{first}", every[first], counts
