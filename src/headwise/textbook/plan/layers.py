"""The attention layers of a model whose layers differ."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, pairwise

from headwise.costs import Attentions, Counts
from headwise.costs.configs import ModelConfig
from headwise.textbook.plan.tables import Column, Table, Value
from headwise.textbook.plan.words import term
from headwise.wording import joined

COLUMNS = (
    Column(term("layers_column")), Column("h", "count", "num_heads"), Column("h_kv", "count", "num_kv_heads"),
    Column("d_k", "count", "head_dim"), Column(term("parameters"), "count"),
    Column(term("cache"), "count", "cached_numbers_a_token"),
)  # fmt: skip
WINDOWS = (Column(term("window_column"), "count", "window"), Column(term("count_column"), "count", "layers_alike"))
SHOWN = 4  # runs of layers in a row


def layers_table(config: ModelConfig, attentions: Attentions) -> Table:
    """Return a table with a row for each run of equal layers, or, if their windows differ, for all equal layers:
    parameters and cache are those of one layer."""
    count = config.self_attentions
    first, second = config.attention_sizes[:count], config.attention_sizes[count:]
    stacks = [("encoder" if second else "stack", first, attentions.layers)]
    if second:
        stacks += [("decoder", second[::2], attentions.decoder), ("cross", second[1::2], attentions.cross)]
    rows: list[tuple[Value, ...]] = []
    windowed = bool(config.layer_windows)
    for name, sizes, layers in stacks:
        decodes = name != "encoder" and (config.causal or bool(second))
        windows = config.windows if windowed and layers is attentions.layers else (None,) * len(layers)
        for numbers in _alike(layers, windows) if windowed else _runs(layers):
            i = numbers[0]
            given, counts = dict(sizes[i]), layers[i]
            d_k = given.get("head_dim", config.d_model // counts.heads)
            cache = counts.cache if decodes and counts.cached else None
            places = [config.attended[i] for i in numbers] if config.attended else numbers
            row: list[Value] = [term(name, numbers=_written(places)), counts.heads, kv_heads(given, counts), d_k]
            row += [counts.parameters, cache]
            rows.append((*row, windows[i], len(numbers)) if windowed else tuple(row))
    notes = [term("layers_note"), *([term("cross_note")] if second else [])]
    if any(counts.shared for counts in attentions.layers):
        notes.append(term("shared_note"))
    if windowed:
        kind = "chunk_note" if config.chunked else "window_note" if config.causal else "near_note"
        notes.append(term(kind))
    columns = COLUMNS + WINDOWS if windowed else COLUMNS
    return Table("layers", term("layers_title"), columns, tuple(rows), note=joined(notes, " ", ""))


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


def _runs(layers: tuple[Counts, ...]) -> Iterator[list[int]]:
    """The numbers of each run of layers with the same counts."""
    for _, run in groupby(range(len(layers)), key=lambda i: layers[i]):
        yield list(run)


def _alike(layers: tuple[Counts, ...], windows: tuple[int | None, ...]) -> Iterable[list[int]]:
    """The numbers of all layers with the same counts and window."""
    found: dict[tuple[Counts, int | None], list[int]] = {}
    for i, kind in enumerate(zip(layers, windows, strict=True)):
        found.setdefault(kind, []).append(i)
    return found.values()


def _written(numbers: list[int]) -> str:
    """Ascending numbers, such as "0–4, 6–10", the last after "…" if there are many."""
    cuts = [0, *(i + 1 for i, (one, other) in enumerate(pairwise(numbers)) if other > one + 1), len(numbers)]
    runs = [numbers[start:stop] for start, stop in pairwise(cuts)]
    texts = [f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return ", ".join(texts if len(texts) <= SHOWN else [*texts[: SHOWN - 1], "…", texts[-1]])
