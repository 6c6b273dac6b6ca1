"""The checkpoint to change and the new one: its text in three parts, its sizes, its words, what it was made of.

>>> term("of_heads", count=3, of=32, share=0.09375).zh
'32 个头中的 3 个（9.4%）'
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.base.files import contents, folder_of, sha256_of
from headwise.costs import Counts
from headwise.errors import CheckpointError, ConfigError, TextError
from headwise.lm.checkpoint import MODEL_FILE, load_checkpoint, read, save_model, unpack
from headwise.lm.model import SIZES, Decoder
from headwise.lm.texts import HELD_OUT, CharTokenizer, Corpus
from headwise.models import find_heads
from headwise.nn.registry import counts_of, sizes_of
from headwise.plan.tables import Column, Table, Value
from headwise.wording import Bilingual, Message, in_language

TERMS: dict[str, tuple[str, str]] = {
    # Facts.
    "model": ("model", "模型"),
    "text": ("text", "文本"),
    "why": ("selected", "依据"),
    "go": ("remove", "移除"),
    "method": ("method", "方法"),
    "short if": ("short if", "短缓存的条件"),
    "short are": ("short", "使用短缓存"),
    "expected": ("expected", "预期"),
    "sizes": ("{layers} layers × {heads} heads ({design})", "{layers} 层 × {heads} 头（{design}）"),
    "named_sizes": ("{name}, {sizes}", "{name}，{sizes}"),
    "texts": (
        "{name}: {decide} windows of {context} tokens to choose heads; of the last {share:.0%}, {foretell} to estimate "
        "the loss and {judge} for the evaluation",
        "{name}：{decide} 个窗口（各 {context} 个词元）用于决策；最后 {share:.0%} 中，{foretell} 个用于预估，"
        "{judge} 个用于评估",
    ),
    "held_texts": (
        "{name}: of the last {share:.0%}, {foretell} windows of {context} tokens to estimate the loss and {judge} for "
        "the evaluation",
        "{name}：最后 {share:.0%} 中，{foretell} 个窗口（各 {context} 个词元）用于预估，{judge} 个用于评估",
    ),
    "by": ("by {by}: {what}, lowest first", "按 {by}：{what}，从小到大"),
    "named": ("by name", "由用户指定"),
    "of_heads": ("{count} of {of} heads ({share:.1%})", "{of} 个头中的 {count} 个（{share:.1%}）"),
    "of_key_heads": ("{count} of {of} KV heads", "{of} 个键值头中的 {count} 个"),
    "how": ("{method}: {what}", "{method}：{what}"),
    "short_condition": (
        "the first {sinks} and the last {window} tokens hold {share:.1%} of the attention of every query head that "
        "reads the keys",
        "读取这些键的每个查询头，其注意力的 {share:.1%} 落在最前 {sinks} 个与最近 {window} 个词元上",
    ),
    "loss_change": (
        "loss {before:.4f} → {after:.4f} ({change:+.2f} %)",
        "损失 {before:.4f} → {after:.4f}（{change:+.2f} %）",
    ),
    # Methods.
    "ablation": ("increase of the loss without it, one head at a time", "逐一去掉每个头时损失的增加"),
    "gradient": ("|dL/dξ| of a factor ξ on its output", "对该头输出上的系数 ξ 的 |dL/dξ|"),
    "taylor": ("Σ|o · dL/do| over tokens", "对词元求和的 Σ|o · dL/do|"),
    "gates": ("log α of a learned gate with a penalty on open gates", "学习该头是否值得保留的门控的 log α"),
    "mean": ("the mean of adjacent heads", "相邻头的平均"),
    "first": ("the first of adjacent heads", "相邻头中的第一个"),
    "cluster": (
        "the mean of heads with similar W_K and W_V (cosine)",
        "W_K 与 W_V 相近（余弦）的头的平均",
    ),
    "svd": (
        "the smallest error of W_Q W_Kᵀ and W_V W_O, for groups of heads with similar subspaces",
        "在张成相近空间的头之间，使 W_Q W_Kᵀ 与 W_V W_O 误差最小的合并",
    ),
    # Titles and columns.
    "plan_prune": ("Plan: heads to remove", "计划：要移除的头"),
    "plan_convert": ("Plan: KV heads to merge", "计划：要共享的键值头"),
    "plan_budget": ("Plan: short caches", "计划：短缓存"),
    "judged": (
        "Evaluation: the written model is loaded and compared with the original",
        "评估：重新读入写出的模型，与原模型对照",
    ),
    "before_after": ("Before and after", "修改前后"),
    "expected_curve": (
        "Expected: loss from the curve, other numbers by formula",
        "预期：损失取自曲线，其余按公式计算",
    ),
    "expected_measured": (
        "Expected before healing: measured loss, other numbers by formula",
        "恢复训练前的预期：损失为实测，其余按公式计算",
    ),
    "heads_named": ("Heads, as LAYER.HEAD", "头（层.头）"),
    "heads_important": (
        "Heads, as LAYER.HEAD, with their importance ({unit})",
        "头（层.头）及其重要性（{unit}）",
    ),
    "curve": ("Loss against heads kept", "损失与保留头数的关系"),
    "key_heads": ("KV heads", "键值头"),
    "bytes_title": ("Keys and values of all layers, by formula, in float32", "全部层的键与值，按公式计算，float32"),
    "loss": ("loss", "损失"),
    "rise": ("rise", "增幅"),
    "reads tok/s": ("reads tok/s", "读入 词元/秒"),
    "writes tok/s": ("writes tok/s", "生成 词元/秒"),
    "parameters": ("parameters", "参数量"),
    "KV B/token": ("KV B/token", "键值缓存 字节/词元"),
    "layer": ("layer", "层"),
    "heads": ("heads", "头数"),
    "that go": ("removed", "移除的头"),
    "kept": ("kept", "保留"),
    "random": ("random", "随机平均"),
    "least": ("lowest", "随机最小"),
    "most": ("highest", "随机最大"),
    "better": ("better", "优于随机"),
    "key heads": ("KV heads", "键值头"),
    "error of W_Q W_Kᵀ": ("error of W_Q W_Kᵀ", "W_Q W_Kᵀ 的误差"),
    "error of W_V W_O": ("error of W_V W_O", "W_V W_O 的误差"),
    "shared by": ("shared by", "共享者"),
    "short": ("short", "短缓存"),
    "least kept": ("lowest kept", "最小保留"),
    "mean kept": ("mean kept", "平均保留"),
    "last tokens of each key head": ("last tokens kept by each KV head", "各键值头保留的最近词元数"),
    "tokens": ("tokens", "词元数"),
    "all kept": ("all kept", "全部保留"),
    "with the budget": ("with the budget", "按预算"),
    "saved": ("saved", "节省"),
    # Rows.
    "now": ("now", "现在"),
    "before": ("before", "修改前"),
    "pruned": ("pruned", "剪枝后"),
    "merged": ("merged", "合并后"),
    "healed": ("healed", "恢复训练后"),
    "all tokens": ("all tokens", "全部词元"),
    "budget": ("budget", "按预算"),
    "change": ("change", "变化"),
    "keys_too": ("{before} → {after}, KV heads {kv} → {kv_after}", "{before} → {after}，键值头 {kv} → {kv_after}"),
    "of": ("{count} of {of}", "{of} 中的 {count}"),
    "all": ("all", "全部"),
    "no": ("no", "否"),
    "than mean": ("than mean", "优于平均"),
    "than all": ("than all", "优于全部"),
    # Notes.
    "judged_note": (
        "Loss in nats per token on text that was not used to choose; ± is the standard error of the rise over batches "
        "of the text. Speeds are medians of {rounds} alternating rounds, threads: {threads}: {read} tokens read at "
        "once, {written} generated one by one. Bytes of keys and values in float32.",
        "损失单位为奈特/词元，取自未用于决策的文本；± 为增幅在各批文本上的标准误。"
        "速度为 {rounds} 轮的中位数，各模型轮流测量，使用 {threads} 个线程：一次读入 {read} 个词元，"
        "逐个生成 {written} 个。键与值的字节数按 float32 计。",
    ),
    "merges_note": (
        "Error: relative error of the matrices W_Q W_Kᵀ and W_V W_O, the expected error for isotropic inputs.",
        "误差：矩阵 W_Q W_Kᵀ 与 W_V W_O 的相对误差，假定输入没有特定方向。",
    ),
    "kept_note": (
        "Kept: the share of a query head's attention on the window and the first tokens, minimum and mean over the "
        "heads of a layer.",
        "保留：查询头的注意力落在窗口与开头词元上的比例，取一层各头的最小值与平均值。",
    ),
    "skipped_note": (
        "A layer keeps at least one head (or group that shares keys): {names} are kept, each as the last one of its "
        "layer; the next heads in the order are removed instead.",
        "每层至少保留一个头（或一组共享键的头）：{names} 本应移除，但各为其层的最后一个，故保留，"
        "改为移除顺序中的下一个。",
    ),
    "chance_note": (
        "The same number of random heads, {count} times: loss {least:.4f} to {most:.4f}.",
        "随机移除同样数目的头 {count} 次：损失 {least:.4f} 至 {most:.4f}。",
    ),
    "random_note": (
        "Random: mean, minimum and maximum of {count} random orders of single heads, which may empty a layer. Better "
        "than their mean at {mean} of {points} points, than each at {every}; {removable} of {total} heads can be "
        "removed for at most 1 %.",
        "随机：{count} 种逐头移除的随机顺序的平均、最小与最大，可能清空某一层。"
        "在 {points} 个点中，有 {mean} 个点优于其平均，{every} 个点优于其全部；"
        "损失增加不超过 1 % 时可移除 {total} 个头中的 {removable} 个。",
    ),
}


def term(code: str, /, **values: int | float | str) -> Message:
    """One of TERMS with its values."""
    return Message(code, *TERMS[code], **values)


@dataclass(frozen=True)
class Source:
    """A model as read from its checkpoint."""

    name: str  # as shown
    file: Path  # the checkpoint
    decoder: Decoder
    tokenizer: CharTokenizer
    info: dict[str, Any]  # the metadata of the checkpoint
    dtype: torch.dtype  # of its weights, and of the result's
    sha256: str  # of the file

    @property
    def sizes(self) -> str:
        """Layers and heads in words."""
        heads = [site.num_heads for site in find_heads(self.decoder)]
        alike = str(heads[0]) if len(set(heads)) == 1 else " ".join(map(str, heads))
        return term("sizes", layers=len(heads), heads=alike, design=self.decoder.config.design)

    @property
    def described(self) -> str:
        """Name and sizes."""
        return term("named_sizes", name=self.name, sizes=self.sizes)


def open_source(model: str | os.PathLike[str] | None) -> Source:
    """The model of a folder or file, or the embedded one. CheckpointError if it cannot be read."""
    if model is None:
        with as_file(files("headwise.lm") / "pretrained" / MODEL_FILE) as path:
            return _opened(Bilingual("the embedded model", "内置模型"), path)
    path = folder_of(model)
    if path.is_dir() and (path / "config.json").is_file():
        raise CheckpointError(
            f"--model {str(path)!r}: is a model of transformers; expected a checkpoint of headwise. In Python, "
            "hw.edit.prune, hw.edit.merge_kv and hw.edit.save_pruned change models of transformers",
            f"--model {str(path)!r}：是 transformers 的模型；应为 headwise 的检查点。在 Python 中，hw.edit.prune、"
            "hw.edit.merge_kv 与 hw.edit.save_pruned 可以修改 transformers 的模型",
        )
    return _opened(str(path), path / MODEL_FILE if path.is_dir() else path)


def check_target(source: Source, out: str | os.PathLike[str], *, force: bool = False) -> None:
    """CheckpointError if the folder `out` is the source's, no folder, or not empty beside temporary files of runs."""
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(
            f"--out {str(folder)!r}: is a file; expected a new folder", f"--out {str(folder)!r}：是文件；应为新文件夹"
        )
    if folder.resolve() in (source.file.resolve().parent, source.file.parent.resolve()):  # of a link, both folders
        raise CheckpointError(
            f"--out {str(folder)!r}: contains {source.name}, and the source is never overwritten; expected "
            f"another folder",
            f"--out {str(folder)!r}：其中有 {in_language(source.name, 'zh')}，原模型绝不会被覆盖；应为另一个文件夹",
        )
    if not force and folder.is_dir() and contents(folder):
        raise CheckpointError(
            f"--out {str(folder)!r}: is not empty; expected a new folder, or give --force",
            f"--out {str(folder)!r}：不是空的；应为新文件夹，或加 --force",
        )


def write_changed(
    source: Source, decoder: Decoder, out: str | os.PathLike[str], change: Mapping[str, Any], more: Mapping[str, Any]
) -> Decoder:  # fmt: skip
    """Write a changed model into the folder `out`, and read it again, so that the model on disk is evaluated. Info:
    `change` is appended to "changes", `more` is added."""
    file = Path(out) / MODEL_FILE
    info = {**source.info, "changes": [*source.info.get("changes", []), dict(change)], **more}
    save_model(file, decoder, source.tokenizer, info, dtype=source.dtype)
    return load_checkpoint(file)[0]


def _opened(name: str, file: Path) -> Source:
    decoder, tokenizer, info = load_checkpoint(file)
    dtypes = {x.dtype for x in read(file)[0].values() if x.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return Source(name, file, decoder, tokenizer, info, dtype, sha256_of(file))


KEY = "made_by"  # in the info of a checkpoint, and in a budget and the JSON of a plan
Made = Mapping[str, Any]


def made_by(command: str, source: Source, text: str | os.PathLike[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that the result of a command depends on, except the machine: plain values, as JSON returns them."""
    found: dict[str, Any] = json.loads(
        json.dumps({
            "command": command, "model": source.sha256, "text": sha256_of(text), "options": dict(options),
            "versions": {name: metadata.version(name) for name in ("headwise", "torch")},
        })
    )  # fmt: skip
    return found


def is_made(out: Path, made: Made) -> bool:
    """Whether a file, or the checkpoint in a folder, is the result of these inputs."""
    return _made_checkpoint(out / MODEL_FILE, made) if out.is_dir() else made_json(out, made)


def made_json(file: Path, made: Made) -> bool:
    """Whether a JSON file belongs to that result."""
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get(KEY) == made


def _made_checkpoint(file: Path, made: Made) -> bool:
    try:
        return file.is_file() and bool(unpack(read(file)[1], file)[2].get(KEY) == made)
    except CheckpointError:  # not a checkpoint
        return False


TOGETHER = 2  # windows in a batch: the unit of standard errors of differences
HEAL_BATCH = 8


@dataclass(frozen=True)
class Texts:
    """Batches [up to 2, context + 1] of token ids."""

    name: str
    context: int
    decide: tuple[Tensor, ...]  # of the first 95 % of the text, drawn at random
    foretell: tuple[Tensor, ...]  # alternating windows of the last 5 %, which `headwise train` holds out too
    judge: tuple[Tensor, ...]  # the others of these
    corpus: Corpus

    def described(self, *, decided: bool) -> str:
        """A description of the parts; decided: whether the first one is used."""
        decide, foretell, judge = (sum(map(len, part)) for part in (self.decide, self.foretell, self.judge))
        held: dict[str, int | float | str] = {"name": self.name, "context": self.context, "share": HELD_OUT}
        held |= {"foretell": foretell, "judge": judge}
        return term("texts", decide=decide, **held) if decided else term("held_texts", **held)

    def healing(self, steps: int, seed: int = 0) -> Iterator[Tensor]:
        """Batches [8, context + 1] to train on, of the first 95 %."""
        return (self.corpus.batch(HEAL_BATCH, self.context, seed=seed + 1, step=step) for step in range(steps))


def check_windows(context: int | None, windows: int) -> None:
    """Raise ConfigError for sizes that are out of range. context: None for that of the model."""
    for name, value, least in (("--context", context, 2), ("--windows", windows, 1)):
        if value is not None and value < least:
            raise ConfigError(f"{name} {value}: expected at least {least}", f"{name} {value}：应不小于 {least}")


def split_text(
    file: str | os.PathLike[str], tokenizer: CharTokenizer, *, context: int, windows: int = 16
) -> Texts:  # fmt: skip
    """The parts of a UTF-8 file: `windows` for planning, at most as many for prediction, and four times for evaluation;
    TextError if it is too short. The same file gives the same parts."""
    check_windows(context, windows)
    corpus = Corpus.read([file], context=context, tokenizer=tokenizer, byte_rate=0.0)
    held = corpus.heldout_windows(context)[0]
    if len(held) < 2:
        raise TextError(
            f"{os.fspath(file)!r}: its last {HELD_OUT:.0%} hold {len(held)} window of {context} tokens; "
            f"expected at least 2, one to predict and one to evaluate: give a longer text, or a smaller --context",
            f"{os.fspath(file)!r}：末尾 {HELD_OUT:.0%} 只有 {len(held)} 个 {context} 词元的窗口；至少需要 2 个，"
            "分别用于预测与评估：请给更长的文本，或减小 --context",
        )
    decide = corpus.batch(windows, context, seed=0, step=0)
    parts = [decide, _evenly(held[0::2], windows), _evenly(held[1::2], 4 * windows)]
    batches = [tuple(part.split(TOGETHER)) for part in parts]
    return Texts(Path(file).name, context, batches[0], batches[1], batches[2], corpus)


def _evenly(windows: Tensor, most: int) -> Tensor:
    if len(windows) <= most:
        return windows
    return windows[torch.linspace(0, len(windows) - 1, most).long()]


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
