"""The help of the command line in Chinese: one entry for each English text, found by that text."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.columns import Columns
from rich.table import Table
from rich.text import Text

from headwise.wording import breaks

HELP: dict[str, str] = {
    # Commands.
    "Multi-head attention you can inspect.": "看得见的多头注意力。",
    "Show what every head attends to in a text, as a table and an HTML report.":
        "查看一段文本上每个注意力头的关注，输出表格和 HTML 报告。",
    "Open a page in the browser that shows all heads on a long text and zooms into each map.\n\n"
    "Without --lang, the page is in the language of the browser.":
        "在浏览器中打开一个页面，查看长文本上的全部注意力头，可逐级放大每张注意力图。\n\n"
        "未给出 --lang 时，页面使用浏览器的语言。",
    "Train a small character model. The same command resumes an interrupted run.":
        "训练一个小型字符模型。中断后再次运行同一命令即可继续。",
    "Generate text with a model, one character at a time.": "用模型逐字续写文本。",
    "Print every step of an attention design with shapes and numbers.": "逐步打印一种注意力设计的计算，含形状与数值。",
    "List all statistics with unit, range and source.": "列出全部统计量及其单位、取值范围与来源。",
    "Measure every head on a corpus of any size. Resumable; torchrun divides the work.":
        "在任意规模的语料上测量每个注意力头。可中断后继续；可用 torchrun 分担。",
    "Compute parameters, memory, FLOPs and minimum time of a model or a layer.":
        "计算一个模型或一层的参数量、内存、FLOP 数与最短时间。",
    "Compute parameters, memory, FLOPs and minimum time of a model.":
        "计算一个模型的参数量、内存、FLOP 数与最短时间。",
    "Compute parameters, memory, FLOPs and minimum time of one layer of a design.":
        "计算某种设计一层的参数量、内存、FLOP 数与最短时间。",
    "Remove attention heads: named ones or the least important. Shows the loss curve.":
        "移除注意力头：指定的，或最不重要的。显示损失曲线。",
    "Convert MHA to GQA or MQA by merging KV heads, for a smaller cache.":
        "合并键值头，把 MHA 转换为 GQA 或 MQA，以缩小缓存。",
    "Find the heads that can use a short KV cache; the result is a file for `headwise write --budget`.":
        "找出可以使用短键值缓存的头；结果是供 `headwise write --budget` 使用的文件。",
    "Test textbook claims by measurement. Exits with code 1 if a verdict is unexpected.":
        "用测量检验教科书中的论断。若有结论与预期不符，退出码为 1。",
    "Walk through a topic of multi-head attention: formula, code with its output, claims, exercises.":
        "讲解多头注意力的一个主题：公式、代码及其输出、论断、练习。",
    "Grade an exercise: run your function on random inputs, and show the smallest one with a wrong result.":
        "批改练习：在随机输入上运行你的函数，显示结果错误的最小输入。",
    "Train attention to rebuild its own embeddings, with and without a mask, as tutorials do.":
        "像教程那样训练注意力重建自身的嵌入，有掩码与无掩码各一次。",
    "Report which kernels run on this machine, the compiled library and versions.":
        "报告本机可用的计算内核、已编译的库与各版本号。",
    # Options of several commands.
    "Print the version and exit.": "打印版本号并退出。",
    "Language, en or zh; default: HEADWISE_LANG, then the locale.":
        "语言，en 或 zh；默认取 HEADWISE_LANG，其次取区域设置。",
    "Install completion for the current shell.": "为当前 shell 安装命令补全。",
    "Show completion for the current shell, to copy it or customize the installation.":
        "显示当前 shell 的补全脚本，可复制或自行安装。",
    "Show this message and exit.": "显示此帮助并退出。",
    "Checkpoint folder or file; default: the embedded model.": "检查点的文件夹或文件；默认为内置模型。",
    "A headwise checkpoint, a folder of a Hugging Face transformers model, its name in the local hub cache, or minilm; "
    "default: the embedded model.":
        "headwise 检查点、Hugging Face transformers 模型的文件夹、本地 hub 缓存中的模型名，或 minilm；默认为内置模型。",
    "Random seed.": "随机种子。",
    "Random seed; the same seed gives the same result.": "随机种子；种子相同则结果相同。",
    "Random seed; the same seed gives the same text.": "随机种子；种子相同则文本相同。",
    "Model width.": "模型宽度。",
    "Query heads.": "查询头数。",
    "Causal or full attention.": "因果注意力或完全注意力。",
    "KV heads.": "键值头数。",
    "Sequence length.": "序列长度。",
    "Length of the source of an encoder-decoder; default: --seq.": "编码器-解码器模型的源序列长度；默认同 --seq。",
    "Sequences.": "序列数。",
    "Print JSON with unrounded numbers.": "打印未舍入的数值（JSON）。",
    # see
    "The text, or - for standard input; default: a passage of Shakespeare.":
        "文本；- 表示标准输入；默认为《水浒传》中的一段。",
    "Read the text from a UTF-8 file; - is standard input.": "从 UTF-8 文件读取文本；- 表示标准输入。",
    "HTML report to write; - is standard output.": "要写出的 HTML 报告；- 表示标准输出。",
    "Also write PNG heat maps to this folder.": "同时把 PNG 热图写入此文件夹。",
    "Also write another view: --view NAME=PATH; repeatable.": "同时写出另一种视图：--view 名称=路径；可重复。",
    "Sort the table by this statistic.": "按此统计量排序表格。",
    "Longer texts are pooled to this many cells per axis.": "更长的文本池化为每轴这么多单元格。",
    "Tokens per window of a long text, 0 to read it whole; default: the length of the model's training.":
        "长文本每个窗口的词元数，0 表示整体读入；默认为模型的训练长度。",
    "A second text, or the file of one, to compare side by side; - is standard input.":
        "并排比较的第二段文本，或含有它的文件；- 表示标准输入。",
    "Open the report in the browser; default: on a desktop, from a terminal.":
        "在浏览器中打开报告；默认仅在桌面环境的终端中打开。",
    "Table of `headwise measure` of this model: show the strongest passages of each head.":
        "`headwise measure` 为此模型写出的表格：显示每个头在语料中最强的段落。",
    # view
    "Open this UTF-8 text file; - is standard input.": "打开此 UTF-8 文本文件；- 表示标准输入。",
    "Port; 0 selects a free one.": "端口；0 表示自动选取空闲端口。",
    "Print the address without opening a browser.": "只打印地址，不打开浏览器。",
    "Maximum length of a text, in tokens.": "文本的最大长度（词元数）。",
    # train
    "UTF-8 text files; - is standard input.": "UTF-8 文本文件；- 表示标准输入。",
    "Folder for the checkpoint and the log.": "存放检查点与日志的文件夹。",
    "Training steps.": "训练步数。",
    "Layers.": "层数。",
    "Query heads per layer.": "每层的查询头数。",
    "KV heads: fewer than heads is GQA, 1 is MQA.": "键值头数：少于查询头数为 GQA，1 为 MQA。",
    "Width of the feed-forward network.": "前馈网络的宽度。",
    "An attention design that supports causal masks, for example gqa.": "支持因果掩码的注意力设计，例如 gqa。",
    "An option of the design: --set latent_dim=64; repeatable.": "设计的选项：--set latent_dim=64；可重复。",
    "Norm placement: pre or post.": "归一化的位置：pre 或 post。",
    "Tokens per window.": "每个窗口的词元数。",
    "Dropout probability.": "dropout 概率。",
    "Windows per step.": "每步的窗口数。",
    "Peak learning rate.": "最高学习率。",
    "Warmup steps of the learning rate.": "学习率的预热步数。",
    "Weight decay of AdamW.": "AdamW 的权重衰减。",
    "Share of windows with repeated text; 0.1,0.4@500 changes it at step 500.":
        "含重复文本的窗口所占比例；0.1,0.4@500 表示从第 500 步起改变。",
    "Steps between evaluations and checkpoints.": "两次评估（并保存检查点）之间的步数。",
    "Also save whenever this many seconds have passed.": "每过这么多秒也保存一次。",
    "Precision of matrix products: bfloat16 or float32.": "矩阵乘法的精度：bfloat16 或 float32。",
    "Start from the weights and sizes of this model.": "以此模型的权重与尺寸为起点。",
    "Start from the beginning, even if --out contains a run.": "即使 --out 中已有一次训练，也从头开始。",
    "Record and plot the roles of all heads at each evaluation.": "每次评估时记录全部头的角色并作图。",
    # write
    "Start of the text; - reads it from standard input.": "文本的开头；- 表示从标准输入读取。",
    "Characters to generate.": "要生成的字符数。",
    "Sampling temperature; 0 always takes the most likely character.": "采样温度；0 表示总取概率最大的字符。",
    "Sample from the k most likely characters.": "只从概率最大的 k 个字符中采样。",
    "Sample from the smallest set with this total probability.": "只从总概率达到此值的最小集合中采样。",
    "Cache budget, as written by `headwise budget`.": "缓存预算，由 `headwise budget` 写出。",
    # measure
    "UTF-8 text, .jsonl, .parquet, a folder or a glob pattern; repeatable.":
        "UTF-8 文本、.jsonl、.parquet、文件夹或通配模式；可重复。",
    "Table to write: .parquet, .csv or .jsonl.": "要写出的表格：.parquet、.csv 或 .jsonl。",
    "Comma-separated names; `headwise measures` lists them.": "以逗号分隔的名称；`headwise measures` 列出全部。",
    "Tokens per window; default: the length that the model was trained on.": "每个窗口的词元数；默认为模型的训练长度。",
    "Tokens from one window to the next; default: the window, without overlap.":
        "相邻窗口起点之间的词元数；默认等于窗口长度，不重叠。",
    "Windows per batch.": "每批的窗口数。",
    "Also write an HTML page: heads by any two statistics, and their passages.":
        "同时写出 HTML 页面：按任意两个统计量排列各头，并显示各头的段落。",
    "Passages to keep of each head: the strongest, and as many sampled ones; 0 for none.":
        "每个头保留的段落数：最强的若干段，以及同样多的抽样段落；0 表示不保留。",
    "What makes a passage strong: weight, or a measure of queries such as induction_mass.":
        "以什么衡量段落的强弱：weight（权重），或某个按查询计算的统计量，例如 induction_mass。",
    "Stop after this many tokens.": "处理这么多词元后停止。",
    "all, or file for separate numbers per file.": "all，或 file（按文件分别统计）。",
    "Field of JSON lines, or column of Parquet, that contains the text.":
        "JSON 行中含文本的字段，或 Parquet 中含文本的列。",
    "Layers to include: 0,4-7.": "要包含的层：0,4-7。",
    "Heads of each layer to include: 0,4-7.": "每层要包含的头：0,4-7。",
    "cpu, cuda …; default: a GPU if there is one.": "cpu、cuda 等；默认有 GPU 则用 GPU。",
    "Dtype of the weights: float32, bfloat16 or float16; default: float32.":
        "权重的数据类型：float32、bfloat16 或 float16；默认 float32。",
    "Discard earlier results and start again.": "丢弃已有结果，重新开始。",
    "Sort the printed table by this measure, largest first.": "按此统计量从大到小排序打印的表格。",
    "Also plot every measure as layers × heads.": "同时把每个统计量画成“层 × 头”的图。",
    # plan
    "A published model (`headwise plan list`), a folder with config.json, or a checkpoint.":
        "已发表的模型（见 `headwise plan list`）、含有 config.json 的文件夹，或检查点。",
    "Model width, or a model that has it: 768, or gpt-2-small.": "模型宽度，或取其宽度的模型：768，或 gpt-2-small。",
    "An attention design; default: multi_head.": "注意力设计；默认 multi_head。",
    "Size of a head.": "每个头的维度。",
    "Another option of the design: --set latent_dim=512; repeatable.": "设计的其他选项：--set latent_dim=512；可重复。",
    "Sliding window of a design, in keys.": "设计的滑动窗口（键数）。",
    "First keys that are visible beside the window.": "窗口之外仍可见的开头若干个键。",
    "Assume that the n×n scores are stored.": "假定存储 n×n 的分数矩阵。",
    "Dtype of weights and activations.": "权重与激活的数据类型。",
    "Dtype of the KV cache, for example int8; default: --dtype.": "键值缓存的数据类型，例如 int8；默认同 --dtype。",
    "Peak FLOP/s of a machine, to compute times.": "机器的峰值 FLOP/s，用于计算时间。",
    "Memory bandwidth of the machine, in bytes/s.": "机器的内存带宽（字节/秒）。",
    "Measure peak and bandwidth of this machine.": "测量本机的峰值算力与带宽。",
    "Compare numbers of heads at a fixed d_model.": "在 d_model 固定时比较不同的头数。",
    "Write the trade-off as a PNG.": "把权衡曲线写成 PNG。",
    "Compare all designs at one width.": "在同一宽度下比较全部设计。",
    "Also plan the attention over this many devices.": "同时规划把注意力分布到这么多设备上。",
    "Bandwidth of each device's link, in bytes/s.": "每个设备的链路带宽（字节/秒）。",
    "List all models and designs.": "列出全部模型与设计。",
    "Print Markdown tables.": "打印 Markdown 表格。",
    # prune, convert, budget
    "UTF-8 text file, or -: one part is used to decide, another to evaluate.":
        "UTF-8 文本文件，或 -：一部分用于决策，另一部分用于评估。",
    "Folder for the new checkpoint.": "存放新检查点的文件夹。",
    "Heads to remove, as LAYER.HEAD from 0: 0.1,0.2,3.5.": "要移除的头，写作“层.头”，从 0 开始：0.1,0.2,3.5。",
    "Number of heads to remove, least important first.": "要移除的头数，最不重要的先移除。",
    "Share of all heads to remove: 0.25 or 25%.": "要移除的头占全部头的比例：0.25 或 25%。",
    "Remove as many heads as possible for at most this increase of the loss: 1%.":
        "在损失增加不超过此值的前提下移除尽可能多的头：1%。",
    "Importance measure: ablation, gradient, taylor or gates; default: ablation.":
        "重要性的度量：ablation、gradient、taylor 或 gates；默认 ablation。",
    "With --by gates: penalty per head, in nats per token.": "与 --by gates 同用：每个头的惩罚（奈特/词元）。",
    "With --by gates: training steps.": "与 --by gates 同用：训练步数。",
    "Random orders to compare the curve with.": "用于与曲线对照的随机顺序的个数。",
    "Training steps on the text after the change.": "修改后在该文本上的训练步数。",
    "Peak learning rate for --heal.": "--heal 的最高学习率。",
    "Also write a plot of the curve to this file.": "同时把曲线图写入此文件。",
    "Tokens per window; default: the context length of the model.": "每个窗口的词元数；默认为模型的上下文长度。",
    "Windows used to decide; four times as many are used to evaluate.": "用于决策的窗口数；评估使用其四倍。",
    "Overwrite --out. The source model is never overwritten.": "覆盖 --out。原模型绝不会被覆盖。",
    "Write without asking for confirmation.": "不经确认直接写入。",
    "Print the plan only; write nothing.": "只打印计划，不写入任何文件。",
    "Also write all numbers to this file.": "同时把全部数值写入此文件。",
    "Number of KV heads per layer after the conversion.": "转换后每层的键值头数。",
    "How KV heads are merged: svd (smallest loss), mean, first or cluster.":
        "键值头的合并方式：svd（损失最小）、mean、first 或 cluster。",
    "JSON file to write; default: budget.json next to the model, or in this folder.":
        "要写出的 JSON 文件；默认为模型旁或当前文件夹中的 budget.json。",
    "Most recent tokens that a short cache keeps.": "短缓存保留的最近词元数。",
    "First tokens that every cache keeps.": "每个缓存都保留的开头词元数。",
    "Minimum share of a head's attention on these tokens for a short cache.":
        "一个头落在这些词元上的注意力至少占此比例，才使用短缓存。",
    "Sequence lengths at which to report the cache size: 1024,4096.": "要报告缓存大小的序列长度：1024,4096。",
    # doctor
    "Also time each compiled target; a few seconds.": "同时为每个已编译的目标计时，需几秒。",
    "Print JSON, for a bug report.": "打印 JSON，便于报告问题。",
}  # fmt: skip
# Headings and marks of typer, where its version has them.
MARKS = {
    "ARGUMENTS_PANEL_TITLE": "参数", "OPTIONS_PANEL_TITLE": "选项", "COMMANDS_PANEL_TITLE": "命令",
    "ERRORS_PANEL_TITLE": "错误", "DEFAULT_STRING": "[默认：{}]", "REQUIRED_LONG_STRING": "[必填]",
}  # fmt: skip


@contextmanager
def lines_of_characters() -> Iterator[None]:
    """Within the block, rich breaks lines between any two Chinese characters, and before no closing mark; by itself it
    breaks lines at spaces only."""
    import rich.text as module

    before = getattr(module, "divide_line", None)  # private to rich: without it, lines stay as rich breaks them
    if before is None:
        yield
        return
    module.divide_line = breaks
    try:
        yield
    finally:
        module.divide_line = before


def translate(group: Any) -> Any:
    """A group of commands with its help in Chinese; what has no entry stays in English."""
    from typer import rich_utils

    for name, value in {**MARKS, "Table": _Folded, "Columns": _Columns}.items():
        if hasattr(rich_utils, name):
            setattr(rich_utils, name, value)
    for command in _every(group):
        translate_command(command, HELP)
    return group


def _every(command: Any) -> Iterator[Any]:
    """A command and all commands in it."""
    yield command
    for inner in getattr(command, "commands", {}).values():
        yield from _every(inner)


def translate_command(command: Any, table: Mapping[str, str]) -> None:
    """A command's help in Chinese, by a table and by that of headwise."""
    every = {**HELP, **table}
    command.help = every.get(command.help or "", command.help)
    command.short_help = every.get(command.short_help or "", command.short_help)
    params, usage = command.get_params, command.get_usage

    def translated(context: Any) -> Any:
        found = params(context)
        for param in found:
            if getattr(param, "help", None):
                param.help = every.get(param.help, param.help)
        return found

    command.get_params = translated
    command.get_usage = lambda context: _replaced(usage(context))


class _Folded(Table):
    """A table that breaks lines between any two characters: Chinese has no blanks to break at."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*cells, **options)
        for column in self.columns:
            column.overflow = "fold"


class _Columns(Columns):
    """The same for texts side by side."""

    def __init__(self, renderables: Any = None, *args: Any, **options: Any) -> None:
        shown = list(renderables or ())
        for one in shown:
            if isinstance(one, Text):
                one.overflow = "fold"
        super().__init__(shown, *args, **options)


def _replaced(usage: str) -> str:
    for english, chinese in (("Usage:", "用法："), ("[OPTIONS]", "[选项]"), ("COMMAND [ARGS]...", "命令 [参数]...")):
        usage = usage.replace(english, chinese, 1)
    return usage
