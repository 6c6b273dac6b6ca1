"""A plan as tables of plain numbers, how their cells are written, and its words in English and in Chinese."""

from collections.abc import Callable
from dataclasses import dataclass

from headwise.costs import Work
from headwise.wording import Bilingual, Message, joined, scaled, three_figures, tr

Value = int | float | str | None


@dataclass(frozen=True)
class Column:
    """name: the heading. unit: how `written` formats the values. key: the name in JSON, if different."""

    name: str
    unit: str = ""
    key: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of unformatted numbers. total: whether the last row is the sum of the others. note: printed below."""

    key: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    total: bool = False
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """The input as (name, value) facts, and tables of results. notes: apply to all tables."""

    title: str
    facts: tuple[tuple[str, str], ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()

    def table(self, key: str) -> Table:
        """The table with this key."""
        return next(table for table in self.tables if table.key == key)


def masked(work: Work) -> Bilingual:
    """The mask of a plan's input in words, such as "causal, window of 128 after 4 sinks"."""
    words = [term("causal" if work.causal else "full")]
    if work.window is not None:
        code = "window_after" if work.sinks else "window_of"
        words.append(term(code, size=work.window, sinks=work.sinks))
    return joined(words)


def written(value: Value, unit: str) -> str:
    """Format a value: 1,234 counts, 1.5 GB (10⁹ bytes), 2.0 TFLOP, 3.1 ms, 12.5 %; "—" for None."""
    if value is None:
        return "—"
    return value if isinstance(value, str) else _WRITE[unit](value)


def _seconds(value: float) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= size * 0.9995:
            return f"{three_figures(value / size)} {unit}" if value < 999.5 or size < 1 else f"{value:,.0f} s"
    return f"{three_figures(value * 1e9)} ns"


_WRITE: dict[str, Callable[[float], str]] = {
    "": str,
    "count": lambda x: f"{x:,.0f}",
    "number": lambda x: f"{x:,.0f}" if x >= 9.995 else f"{x:.2f}",
    "bytes": lambda x: scaled(x, "B"),
    "flops": lambda x: scaled(x, "FLOP"),
    "figure": scaled,
    "seconds": _seconds,
    "share": lambda x: f"{100 * x:.1f} %",
}


TERMS = {
    # Titles.
    "model_title": tr("{name}: {total:,} parameters"),
    "layer_title": tr("{name}: {total:,} parameters per layer"),
    "list_title": tr("Models and designs"),
    "configs_title": tr("Published models: headwise plan model NAME"),
    "designs_title": tr("Designs: headwise plan layer NAME --d-model … --num-heads … --set SIZE=…"),
    "parameters_title": tr("Parameters"),
    "layers_title": tr("Attention layers"),
    "memory_title": tr("Memory"),
    "layer_memory_title": tr("Memory of one layer"),
    "pass_title": tr("One forward pass over {tokens}"),
    "prefill_title": tr("One forward pass over {tokens} (prefill)"),
    "step_title": tr("One decoding step at token {n:,}"),
    "compare_title": tr("Head designs at d_model {d_model:,} and h {h:,}"),
    "comparison_title": tr("One layer of each design"),
    "vary_title": tr("Number of heads h and head size d_k at d_model {d_model:,}"),
    "vary_table_title": tr("One layer, h·d_k = d_model"),
    "layer_devices_title": tr("One layer over {devices:,} devices"),
    "devices_title": tr("The attention of {layers} layers over {devices:,} devices"),
    # Names of facts.
    "source": tr("source"),
    "sizes": tr("sizes"),
    "input": tr("input"),
    "warning": tr("warning"),
    "design": tr("design"),
    "machine": tr("machine"),
    # Values of facts.
    "tokens": tr("{n:,} tokens"),
    "tokens_of_both": tr("{source:,} source and {target:,} target tokens"),
    "input_of": tr("{batch} × {tokens}, {rest}"),
    "cached_as": tr("{dtype} cache"),
    "beyond_context": tr("the model was trained on at most {context:,} tokens"),
    "quantized": tr("the weights are quantized ({method}); here all of them are counted in {dtype}"),
    "layers": tr("{count} layers"),
    "attended": tr("{count} with attention, {states} recurrent"),
    "layers_of_both": tr("{encoder} + {decoder} layers"),
    "gated": tr("d_ff {size} (gated)"),
    "from_to": tr("{name} {least} to {most}"),
    "experts": tr("{active} of {all} experts, {parameters} active"),
    "shared_experts": tr("{active} of {all} and {shared} shared experts, {parameters} active"),
    "vocabulary_of": tr("vocabulary {size:,}"),
    "tied_vocabulary": tr("vocabulary {size:,} (tied)"),
    "window": tr("window {size:,}"),
    "some_windows": tr("window {size:,} in {some} of {all} layers"),
    "chunks": tr("chunks of {size:,}"),
    "some_chunks": tr("chunks of {size:,} in {some} of {all} layers"),
    "prefix": tr("tokens of the input attend to both sides"),
    "causal": tr("causal"),
    "full": tr("full"),
    "window_of": tr("window of {size:,}"),
    "window_after": tr("window of {size:,} after {sinks:,} sinks"),
    "materialised": tr("materialised"),
    "blockwise": tr("blockwise"),
    "machine_of": tr("{peak} and {bandwidth}, {by}: memory-bound below {ridge:.3g} FLOP per byte"),
    "as given": tr("as given"),
    "by_kernels": tr("measured with {threads} by the compiled kernels"),
    "by_torch": tr("measured with {threads} by torch.mm and Tensor.copy_"),
    "one_thread": tr("1 thread"),
    "threads": tr("{count} threads"),
    # Columns.
    "parameters": tr("parameters"),
    "config": tr("config"),
    "layers_column": tr("layers"),
    "window_column": tr("window"),
    "count_column": tr("count"),
    "vocab": tr("vocab"),
    "stack": tr("{numbers}"),
    "encoder": tr("encoder {numbers}"),
    "decoder": tr("decoder {numbers}"),
    "cross": tr("decoder {numbers}, cross"),
    "cache": tr("cache"),
    "part": tr("part"),
    "share": tr("share"),
    "what": tr("what"),
    "bytes": tr("bytes"),
    "step": tr("step"),
    "exps": tr("exps"),
    "FLOP/B": tr("FLOP/B"),
    "time": tr("time ≥"),
    "limit": tr("limit"),
    "met": tr("met"),
    "one_step": tr("step", sense="decoding"),
    "MHA cache": tr("MHA cache"),
    "MQA cache": tr("MQA cache"),
    "way": tr("way"),
    "forward": tr("forward"),
    "backward": tr("backward"),
    "weight gradients": tr("weight gradients"),
    "weights": tr("weights"),
    "kept": tr("kept"),
    "sending": tr("sending"),
    "waits": tr("waits"),
    # Cells: parts of a model, steps, limits and ways, as `headwise.costs` names them.
    "embedding": tr("embedding"),
    "positions, segments": tr("positions, segments"),
    "convolutions": tr("convolutions"),
    "attention": tr("attention"),
    "recurrent layers": tr("recurrent layers"),
    "states": tr("states"),
    "feed-forward": tr("feed-forward"),
    "norms": tr("norms"),
    "output": tr("output"),
    "output_part": tr("output", sense="layer"),
    "pooler": tr("pooler"),
    "other parts": tr("other parts"),
    "not for text": tr("not for text"),
    "all": tr("all", sense="total"),
    "projections": tr("projections"),
    "scores": tr("scores"),
    "softmax": tr("softmax"),
    "head mixing": tr("head mixing"),
    "weighted sum": tr("weighted sum"),
    "vocabulary": tr("vocabulary"),
    "arithmetic": tr("arithmetic"),
    "memory": tr("memory"),
    "ring": tr("ring"),
    "head-parallel": tr("head-parallel"),
    "hybrid": tr("hybrid {rest}"),
    "heads": tr("heads {rest}"),
    "nothing": tr("nothing"),
    "cache_of_one": tr("cache, one token"),
    "cache_of_later": tr("cache, each token after {size:,}"),
    "cache_of_all": tr("cache, all tokens"),
    "states_of_all": tr("states of {count} recurrent layers"),
    "cache_of_target": tr("cache, one target token"),
    "cache_of_source": tr("cache, one source token"),
    "cache_of_one_in": tr("cache, one token, {dtype}"),
    "cache_of_all_in": tr("cache, all tokens, {dtype}"),
    "scores_of": tr("scores, {stored}, one layer"),
    "scores_of_largest": tr("scores, {stored}, largest layer"),
    "kept_of": tr("kept for backward, {stored}"),
    "kept_of_layers": tr("kept for backward, {stored}, {layers} layers"),
    # Notes.
    "stated_note": tr("The source states {count:,}."),
    "built_note": tr("A model that is built from the source has {count:,}."),
    "stated_about_note": tr("The source states about {count}."),
    "memory_note": tr(
        "An int8 cache has one float32 scale per vector. Kept for backward: attention only, without other layers."
    ),
    "layers_note": tr("Of one layer each; cache: numbers per token."),
    "shared_note": tr("cache 0: the layer attends to the keys and values of an earlier one."),
    "window_note": tr(
        "A query in a window of w tokens attends to the last w tokens, its own included, and the cache keeps w − 1."
    ),
    "chunk_note": tr(
        "A window of w tokens is a chunk of the text: a query attends within its own, and the cache keeps w − 1."
    ),
    "near_note": tr("A query in a window of w tokens attends to tokens at a distance below w, to both sides."),
    "cross_note": tr(
        "cross: attention to the encoder's output, whose keys and values are cached once per source token."
    ),
    "training_note": tr("Training (all logits, forward and backward): {flops}."),
    "backward_note": tr("Backward: {flops}."),
    "plan_note": tr(
        "A multiply-add is two FLOPs; exps are the softmax's exponentials. Bytes and times are lower bounds: each "
        "step reads its inputs and writes its results once; the steps run one after another, each at the roofline."
    ),
    "chosen_note": tr(
        "Of weights that tokens choose from, experts or heads, bytes count the mean number that all tokens read, if "
        "each is chosen equally often and independently."
    ),
    "list_note": tr(
        "cache: numbers per token in all layers, source and target in an encoder-decoder; — for encoders. Layers with "
        "a window keep no more tokens than it. h_kv c: all heads share one latent vector c."
    ),
    "folder_note": tr(
        "`headwise plan model` also takes a folder with the config.json of a model of transformers, of one of these "
        "types: {types}."
    ),
    "compare_note": tr(
        "met: parameters used per token. FLOPs and exps: one forward pass. cache: numbers per token. step: one "
        "decoding step at token {n:,}. {grouped} has {shared} KV heads; all other options are at their defaults. —: "
        "does not support decoding."
    ),
    "remark": tr("{name}: {remarks}."),
    "no_masks": tr("full, as it does not support masks"),
    "compare_meaning": tr("A multiply-add is two FLOPs; only matrix products are counted, and exps are the softmax's."),
    "vary_note": tr(
        "Parameters, FLOPs and MHA's cache do not depend on h; exponentials and scores grow with it. A head's n×n "
        "scores have rank d_k at most: with d_k ≥ n one head can reach every positive weight matrix (Bhojanapalli et "
        "al. 2020, 2002.07028), with d_k < n − 1 it cannot."
    ),
    "vary_meaning": tr(
        "n×n: the scores, if stored; lse: what blockwise attention stores instead, a float32 log-sum-exp per query "
        "and head. FLOPs are those of matrix products, exps the softmax's exponentials."
    ),
    "devices_note": tr(
        "Bytes per device: sent in a training step, weights, and memory kept for the backward pass. Weight gradients "
        "are summed where the sequence is partitioned; FSDP can partition those weights."
    ),
    "ring_note": tr(
        "A ring hides its forward transfers from {tokens:,.0f} tokens per device on; here each has {here:,.0f}. "
        "waits: the time of a forward pass that computation does not hide."
    ),
}


def term(code: str, /, **values: int | float | str) -> Message:
    """One of TERMS with its values."""
    return TERMS[code].filled(code, **values)


def named(name: str) -> str:
    """A name of `headwise.costs` in both languages; as it is if it has no Chinese one.

    >>> named("hybrid 2 × 3").zh, named("Ulysses")
    ('混合 2 × 3', 'Ulysses')
    """
    first, _, rest = name.partition(" ")
    if name in TERMS:
        return term(name)
    return term(first, rest=rest) if first in TERMS and rest[:1].isdigit() else name
