"""A plan as tables of plain numbers, how their cells are written, and its words in English and in Chinese."""

from collections.abc import Callable
from dataclasses import dataclass

from headwise.costs import Work
from headwise.wording import Bilingual, Message, joined, scaled, three_figures

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


TERMS: dict[str, tuple[str, str]] = {
    # Titles.
    "model_title": ("{name}: {total:,} parameters", "{name}：{total:,} 个参数"),
    "layer_title": ("{name}: {total:,} parameters per layer", "{name}：每层 {total:,} 个参数"),
    "list_title": ("Models and designs", "模型与设计"),
    "configs_title": ("Published models: headwise plan model NAME", "已发表的模型：headwise plan model 名称"),
    "designs_title": (
        "Designs: headwise plan layer NAME --d-model … --num-heads … --set SIZE=…",
        "设计：headwise plan layer 名称 --d-model … --num-heads … --set 尺寸=…",
    ),
    "parameters_title": ("Parameters", "参数"),
    "layers_title": ("Attention layers", "注意力层"),
    "memory_title": ("Memory", "内存"),
    "layer_memory_title": ("Memory of one layer", "一层的内存"),
    "pass_title": ("One forward pass over {tokens}", "对 {tokens}的一次前向计算"),
    "prefill_title": ("One forward pass over {tokens} (prefill)", "对 {tokens}的一次前向计算（预填充）"),
    "step_title": ("One decoding step at token {n:,}", "在第 {n:,} 个词元处的一步解码"),
    "compare_title": ("Head designs at d_model {d_model:,} and h {h:,}", "d_model {d_model:,}、h {h:,} 时的各种头设计"),
    "comparison_title": ("One layer of each design", "每种设计各一层"),
    "vary_title": (
        "Number of heads h and head size d_k at d_model {d_model:,}",
        "d_model {d_model:,} 时的头数 h 与每头维度 d_k",
    ),
    "vary_table_title": ("One layer, h·d_k = d_model", "一层，h·d_k = d_model"),
    "layer_devices_title": ("One layer over {devices:,} devices", "一层分布到 {devices:,} 个设备上"),
    "devices_title": (
        "The attention of {layers} layers over {devices:,} devices",
        "{layers} 层的注意力分布到 {devices:,} 个设备上",
    ),
    # Names of facts.
    "source": ("source", "来源"),
    "sizes": ("sizes", "尺寸"),
    "input": ("input", "输入"),
    "warning": ("warning", "警告"),
    "design": ("design", "设计"),
    "machine": ("machine", "机器"),
    # Values of facts.
    "tokens": ("{n:,} tokens", "{n:,} 个词元"),
    "tokens_of_both": (
        "{source:,} source and {target:,} target tokens",
        "{source:,} 个源词元与 {target:,} 个目标词元",
    ),
    "input_of": ("{batch} × {tokens}, {rest}", "{batch} × {tokens}，{rest}"),
    "cached_as": ("{dtype} cache", "{dtype} 缓存"),
    "beyond_context": (
        "the model was trained on at most {context:,} tokens",
        "该模型训练时至多使用 {context:,} 个词元",
    ),
    "quantized": (
        "the weights are quantized ({method}); here all of them are counted in {dtype}",
        "权重经过量化（{method}）；此处均按 {dtype} 计算",
    ),
    "layers": ("{count} layers", "{count} 层"),
    "attended": ("{count} with attention, {states} recurrent", "其中 {count} 层有注意力，{states} 层有循环状态"),
    "layers_of_both": ("{encoder} + {decoder} layers", "{encoder} + {decoder} 层"),
    "gated": ("d_ff {size} (gated)", "d_ff {size}（门控）"),
    "from_to": ("{name} {least} to {most}", "{name} {least} 至 {most}"),
    "experts": ("{active} of {all} experts, {parameters} active", "{all} 个专家取 {active} 个，激活参数 {parameters}"),
    "shared_experts": (
        "{active} of {all} and {shared} shared experts, {parameters} active",
        "{all} 个专家取 {active} 个，另有 {shared} 个共享专家，激活参数 {parameters}",
    ),
    "vocabulary_of": ("vocabulary {size:,}", "词表 {size:,}"),
    "tied_vocabulary": ("vocabulary {size:,} (tied)", "词表 {size:,}（与输出共享）"),
    "window": ("window {size:,}", "窗口 {size:,}"),
    "some_windows": ("window {size:,} in {some} of {all} layers", "{all} 层中有 {some} 层的窗口为 {size:,}"),
    "chunks": ("chunks of {size:,}", "每 {size:,} 个词元一块"),
    "some_chunks": ("chunks of {size:,} in {some} of {all} layers", "{all} 层中有 {some} 层每 {size:,} 个词元一块"),
    "prefix": ("tokens of the input attend to both sides", "输入的词元双向关注"),
    "causal": ("causal", "因果"),
    "full": ("full", "无掩码"),
    "window_of": ("window of {size:,}", "窗口 {size:,}"),
    "window_after": ("window of {size:,} after {sinks:,} sinks", "窗口 {size:,}，外加开头 {sinks:,} 个键"),
    "materialised": ("materialised", "存储分数矩阵"),
    "blockwise": ("blockwise", "分块"),
    "machine_of": (
        "{peak} and {bandwidth}, {by}: memory-bound below {ridge:.3g} FLOP per byte",
        "{peak}，{bandwidth}，{by}：每字节不足 {ridge:.3g} FLOP 时受内存限制",
    ),
    "as given": ("as given", "由用户给出"),
    "by_kernels": ("measured with {threads} by the compiled kernels", "用编译内核以 {threads}测得"),
    "by_torch": (
        "measured with {threads} by torch.mm and Tensor.copy_",
        "用 torch.mm 与 Tensor.copy_ 以 {threads}测得",
    ),
    "one_thread": ("1 thread", "1 个线程"),
    "threads": ("{count} threads", "{count} 个线程"),
    # Columns.
    "parameters": ("parameters", "参数量"),
    "config": ("config", "模型"),
    "layers_column": ("layers", "层数"),
    "window_column": ("window", "窗口"),
    "count_column": ("count", "同类层数"),
    "vocab": ("vocab", "词表"),
    "stack": ("{numbers}", "第 {numbers} 层"),
    "encoder": ("encoder {numbers}", "编码器第 {numbers} 层"),
    "decoder": ("decoder {numbers}", "解码器第 {numbers} 层"),
    "cross": ("decoder {numbers}, cross", "解码器第 {numbers} 层，交叉"),
    "cache": ("cache", "缓存"),
    "part": ("part", "部分"),
    "share": ("share", "占比"),
    "what": ("what", "项目"),
    "bytes": ("bytes", "字节"),
    "step": ("step", "步骤"),
    "exps": ("exps", "指数"),
    "FLOP/B": ("FLOP/B", "FLOP/字节"),
    "time": ("time ≥", "时间 ≥"),
    "limit": ("limit", "受限于"),
    "met": ("met", "所用参数"),
    "one_step": ("step", "一步解码"),
    "MHA cache": ("MHA cache", "MHA 缓存"),
    "MQA cache": ("MQA cache", "MQA 缓存"),
    "way": ("way", "方式"),
    "forward": ("forward", "前向"),
    "backward": ("backward", "反向传播"),
    "weight gradients": ("weight gradients", "权重梯度"),
    "weights": ("weights", "权重"),
    "kept": ("kept", "保留"),
    "sending": ("sending", "发送"),
    "waits": ("waits", "等待"),
    # Cells: parts of a model, steps, limits and ways, as `headwise.costs` names them.
    "embedding": ("embedding", "词嵌入"),
    "positions, segments": ("positions, segments", "位置与段嵌入"),
    "convolutions": ("convolutions", "卷积"),
    "attention": ("attention", "注意力"),
    "recurrent layers": ("recurrent layers", "循环层"),
    "states": ("states", "状态更新"),
    "feed-forward": ("feed-forward", "前馈网络"),
    "norms": ("norms", "归一化"),
    "output": ("output", "输出投影"),
    "output_part": ("output", "输出层"),
    "pooler": ("pooler", "池化层"),
    "other parts": ("other parts", "其他部分"),
    "not for text": ("not for text", "不用于文本的部分"),
    "all": ("all", "合计"),
    "projections": ("projections", "输入投影"),
    "scores": ("scores", "分数"),
    "softmax": ("softmax", "softmax 运算"),
    "head mixing": ("head mixing", "头间混合"),
    "weighted sum": ("weighted sum", "加权和"),
    "vocabulary": ("vocabulary", "词表"),
    "arithmetic": ("arithmetic", "运算"),
    "memory": ("memory", "内存"),
    "ring": ("ring", "环形"),
    "head-parallel": ("head-parallel", "按头并行"),
    "hybrid": ("hybrid {rest}", "混合 {rest}"),
    "heads": ("heads {rest}", "头 {rest}"),
    "nothing": ("nothing", "无"),
    "cache_of_one": ("cache, one token", "缓存，一个词元"),
    "cache_of_later": (
        "cache, each token after {size:,}", "缓存，第 {size:,} 个词元之后每个词元"
    ),
    "cache_of_all": ("cache, all tokens", "缓存，全部词元"),
    "states_of_all": ("states of {count} recurrent layers", "{count} 个循环层的状态"),
    "cache_of_target": ("cache, one target token", "缓存，一个目标词元"),
    "cache_of_source": ("cache, one source token", "缓存，一个源词元"),
    "cache_of_one_in": ("cache, one token, {dtype}", "缓存，一个词元，{dtype}"),
    "cache_of_all_in": ("cache, all tokens, {dtype}", "缓存，全部词元，{dtype}"),
    "scores_of": ("scores, {stored}, one layer", "分数，{stored}，一层"),
    "scores_of_largest": ("scores, {stored}, largest layer", "分数，{stored}，最大的一层"),
    "kept_of": ("kept for backward, {stored}", "为反向传播保留，{stored}"),
    "kept_of_layers": ("kept for backward, {stored}, {layers} layers", "为反向传播保留，{stored}，{layers} 层"),
    # Notes.
    "stated_note": ("The source states {count:,}.", "来源给出的数目为 {count:,}。"),
    "built_note": ("A model that is built from the source has {count:,}.", "由来源构建的模型有 {count:,} 个参数。"),
    "stated_about_note": ("The source states about {count}.", "来源给出的数目约为 {count}。"),
    "memory_note": (
        "An int8 cache has one float32 scale per vector. Kept for backward: attention only, without other layers.",
        "int8 缓存中每个向量另有一个 float32 缩放因子。为反向传播保留的内存只计注意力，不含其他层。",
    ),
    "layers_note": (
        "Of one layer each; cache: numbers per token.",
        "均为一层的数目；缓存：每个词元的数值个数。",
    ),
    "shared_note": (
        "cache 0: the layer attends to the keys and values of an earlier one.",
        "缓存为 0：该层使用前面某层的键和值。",
    ),
    "window_note": (
        "A query in a window of w tokens attends to the last w tokens, its own included, and the cache keeps w − 1.",
        "窗口为 w 个词元时，查询只关注包括自身在内的最近 w 个词元，缓存保留 w − 1 个词元。",
    ),
    "chunk_note": (
        "A window of w tokens is a chunk of the text: a query attends within its own, and the cache keeps w − 1.",
        "窗口为 w 个词元时，文本按 w 个词元分块，查询只关注本块之内的词元，缓存保留 w − 1 个词元。",
    ),
    "near_note": (
        "A query in a window of w tokens attends to tokens at a distance below w, to both sides.",
        "窗口为 w 个词元时，查询关注前后两侧距离小于 w 的词元。",
    ),
    "cross_note": (
        "cross: attention to the encoder's output, whose keys and values are cached once per source token.",
        "交叉：对编码器输出的注意力，其键和值按每个源词元缓存一次。",
    ),
    "training_note": (
        "Training (all logits, forward and backward): {flops}.",
        "训练（全部 logits，前向与反向传播）：{flops}。",
    ),
    "backward_note": ("Backward: {flops}.", "反向传播：{flops}。"),
    "plan_note": (
        "A multiply-add is two FLOPs; exps are the softmax's exponentials. Bytes and times are lower bounds: each "
        "step reads its inputs and writes its results once; the steps run one after another, each at the roofline.",
        "一次乘加计为两个 FLOP；“指数”指 softmax 中指数运算的次数。字节数与时间均为下界："
        "每个步骤只读一次输入、写一次结果；各步骤依次执行，且都达到屋顶线模型的上限。",
    ),
    "chosen_note": (
        "Of weights that tokens choose from, experts or heads, bytes count the mean number that all tokens read, if "
        "each is chosen equally often and independently.",
        "对于由词元选择的权重（专家或头），字节数按多个词元平均读取的数目计算，假定各词元独立选择且每个被选中的机会均等。",
    ),
    "list_note": (
        "cache: numbers per token in all layers, source and target in an encoder-decoder; — for encoders. Layers with "
        "a window keep no more tokens than it. h_kv c: all heads share one latent vector c.",
        "缓存：每个词元在全部层中的数值个数，编码器-解码器模型计源文本与目标文本；编码器为 —。"
        "带窗口的层至多保留窗口之内的词元。h_kv 为 c：所有头共享一个潜向量 c。",
    ),
    "folder_note": (
        "`headwise plan model` also takes a folder with the config.json of a model of transformers, of one of these "
        "types: {types}.",
        "`headwise plan model` 也接受含有 transformers 模型 config.json 的文件夹，支持的类型为：{types}。",
    ),
    "compare_note": (
        "met: parameters used per token. FLOPs and exps: one forward pass. cache: numbers per token. step: one "
        "decoding step at token {n:,}. {grouped} has {shared} KV heads; all other options are at their defaults. "
        "—: does not support decoding.",
        "所用参数：每个词元用到的参数量。FLOPs 与指数：一次前向计算。缓存：每个词元的数值个数。"
        "一步解码：在第 {n:,} 个词元处。{grouped} 有 {shared} 个键值头；其余选项均为默认值。—：不支持逐词元解码。",
    ),
    "remark": ("{name}: {remarks}.", "{name}：{remarks}。"),
    "no_masks": ("full, as it does not support masks", "不支持掩码，按无掩码计算"),
    "compare_meaning": (
        "A multiply-add is two FLOPs; only matrix products are counted, and exps are the softmax's.",
        "一次乘加计为两个 FLOP；FLOPs 只计矩阵乘法，“指数”指 softmax 中的指数运算。",
    ),
    "vary_note": (
        "Parameters, FLOPs and MHA's cache do not depend on h; exponentials and scores grow with it. A head's n×n "
        "scores have rank d_k at most: with d_k ≥ n one head can reach every positive weight matrix (Bhojanapalli et "
        "al. 2020, 2002.07028), with d_k < n − 1 it cannot.",
        "参数量、FLOPs 与 MHA 的缓存不随 h 变化；指数运算与分数随 h 增长。一个头的 n×n 分数矩阵的秩至多为 d_k："
        "d_k ≥ n 时，一个头能得到任意的正权重矩阵（Bhojanapalli 等 2020，2002.07028），d_k < n − 1 时则不能。",
    ),
    "vary_meaning": (
        "n×n: the scores, if stored; lse: what blockwise attention stores instead, a float32 log-sum-exp per query "
        "and head. FLOPs are those of matrix products, exps the softmax's exponentials.",
        "n×n：存储分数矩阵时的大小；lse：分块计算改为存储的内容，即每个查询、每个头一个 float32 的 log-sum-exp。"
        "FLOPs 只计矩阵乘法，“指数”指 softmax 中的指数运算。",
    ),
    "devices_note": (
        "Bytes per device: sent in a training step, weights, and memory kept for the backward pass. Weight gradients "
        "are summed where the sequence is partitioned; FSDP can partition those weights.",
        "均为每个设备的字节数：一个训练步中发送的数据、权重，以及为反向传播保留的内存。"
        "切分序列时需对权重梯度求和；这些权重可用 FSDP 切分。",
    ),
    "ring_note": (
        "A ring hides its forward transfers from {tokens:,.0f} tokens per device on; here each has {here:,.0f}. "
        "waits: the time of a forward pass that computation does not hide.",
        "每个设备不少于 {tokens:,.0f} 个词元时，环形方式的前向传输可被计算完全掩盖；此处每个设备有 {here:,.0f} 个。"
        "等待：一次前向计算中未被计算掩盖的时间。",
    ),
}  # fmt: skip


def term(code: str, /, **values: int | float | str) -> Message:
    """One of TERMS with its values."""
    return Message(code, *TERMS[code], **values)


def named(name: str) -> str:
    """A name of `headwise.costs` in both languages; as it is if it has no Chinese one.

    >>> named("hybrid 2 × 3").zh, named("Ulysses")
    ('混合 2 × 3', 'Ulysses')
    """
    first, _, rest = name.partition(" ")
    if name in TERMS:
        return term(name)
    return term(first, rest=rest) if first in TERMS and rest[:1].isdigit() else name
