"""Checks of a transformers folder before anything is loaded from it, and their messages."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from headwise.contents import Entry, parsed, reading, text_of, theirs, word
from headwise.errors import CheckpointError
from headwise.files import check_regular
from headwise.models.adapters.huggingface.library import library
from headwise.models.configuration.config import QUANTIZATION, num_layers, two_stacks
from headwise.trust import WEIGHTS, check_built, check_config, check_folder
from headwise.wording import Bilingual

PICKLED = "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack"
INDEX = WEIGHTS[1]
UNEXPRESSED = Bilingual(
    "models with heads removed are saved by headwise.edit.save_pruned",
    "移除过头的模型须用 headwise.edit.save_pruned 保存",
)
TOKENIZER = ("*token*", "vocab*", "merges.txt", "*.model")  # files of a tokenizer


@contextmanager
def quiet() -> Iterator[None]:
    """Let transformers show no progress bars and log only errors while the block runs."""
    logging = library("utils.logging")
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def check_weights(folder: Path, config: Any) -> list[int]:
    """The numbers in each tensor of the weights. CheckpointError if there are no safetensors, if a file of them is
    missing, damaged or outside the folder, or if they have fewer tensors than the model has layers."""
    sizes = [size for name in _files(folder) for size in _sizes(folder / name)]
    layers = num_layers(config) or 0
    if layers > len(sizes):
        raise CheckpointError(
            f"{str(folder)!r}: {layers} layers in config.json, but {len(sizes)} weights",
            f"{str(folder)!r}：config.json 中有 {layers} 层，权重却有 {len(sizes)} 个",
        )
    return sizes


def check_shapes(folder: Path, model: Any) -> None:
    """Raise CheckpointError if weights in the folder have other shapes than the parameters of the same name in a model
    that was built from its configuration. Quantized weights are skipped, and files that cannot be read, such as
    pointers of Git LFS."""
    inner = f"{model.base_model_prefix}."  # of names in a model with an output layer
    built = {name.removeprefix(inner): list(x.shape) for name, x in model.named_parameters()}
    wrong = []
    for path in sorted(filter(Path.is_file, folder.glob("model*.safetensors"))):
        with suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                weight = file.get_slice(name)
                shape, floating = weight.get_shape(), weight.get_dtype().startswith(("F", "BF"))
                if floating and built.get(name.removeprefix(inner), shape) != shape:
                    wrong.append((name, shape))
    if wrong:
        name, shape = wrong[0]
        expected = built[name.removeprefix(inner)]
        raise CheckpointError(
            f"{str(folder)!r}: {len(wrong)} weights have another shape than config.json gives, for example {name} "
            f"{shape} instead of {expected}; {UNEXPRESSED}",
            f"{str(folder)!r}：{len(wrong)} 个权重的形状与 config.json 不符，例如 {name} 为 {shape}，应为 {expected}；"
            f"{UNEXPRESSED.zh}",
        )


def _files(folder: Path) -> list[str]:
    if (folder / WEIGHTS[0]).is_file():
        return [WEIGHTS[0]]
    index = folder / INDEX
    if index.is_file():
        names = sorted(_parts(index))
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise CheckpointError(
                    f"{str(index)!r} refers to {name!r}, which is not a safetensors file in this folder",
                    f"{str(index)!r} 指向 {name!r}，它不是此文件夹中的 safetensors 文件",
                )
            if not (folder / name).is_file():
                raise CheckpointError(
                    f"{str(folder)!r}: {name}, listed in {INDEX}, is missing",
                    f"{str(folder)!r}：{INDEX} 中列出的 {name} 不存在",
                )
        return names
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{str(folder)!r} has its weights in {pickled[0]} only, and headwise does not read pickled "
            f"files because they can run code. If you trust the file, load it elsewhere and write "
            f"model.safetensors with model.save_pretrained(…)",
            f"{str(folder)!r} 的权重只有 {pickled[0]}，而 pickle 文件可能运行代码，headwise 不读取。"
            "若信任该文件，请在别处加载，再用 model.save_pretrained(…) 写出 model.safetensors",
        )
    raise CheckpointError(
        f"{str(folder)!r} has no weights: expected model.safetensors, or {INDEX} and its parts",
        f"{str(folder)!r} 没有权重：应有 model.safetensors，或 {INDEX} 及其各部分",
    )


def _sizes(path: Path) -> list[int]:
    """Numbers in each tensor of a file."""
    with reading(path, "weights"):
        try:
            with safe_open(path, framework="pt") as file:
                return [prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118  # no mapping
        except SafetensorError as error:
            raise CheckpointError(
                f"truncated or damaged, so the model cannot be loaded: {error}",
                f"被截断或已损坏，无法加载模型：{error}",
            ) from None


def _parts(index: Path) -> set[str]:
    with reading(index, "index"):
        parts = Entry(parsed(text_of(index))).named("weight_map", word)
        if not parts:
            raise CheckpointError("weight_map lists no files", "weight_map 中没有列出文件")
        return set(parts.values())


def read_config(folder: Path, *, weights: bool = True) -> Any:
    """Read the configuration. CheckpointError if it is unreadable, or the model is unknown. weights: whether the caller
    loads them; otherwise a configuration of quantized weights is read as well, and `without_quantization` has to be
    called before a model is built."""
    auto = library("models.auto")
    check_folder(folder)
    path = folder / "config.json"
    with reading(path, "configuration"):
        own = Entry(parsed(text_of(path))).plain()
    with theirs(folder, "its config.json cannot be read"), quiet():
        # The configuration may refer to another file for this version of transformers.
        kind = library("configuration_utils").PreTrainedConfig
        followed, _ = kind.get_config_dict(str(folder), local_files_only=True)
    unused = () if weights else (QUANTIZATION,)
    for values in (own, followed):
        check_config(values, path, unused=unused)
        if "auto_map" in values and str(values.get("model_type")) not in auto.CONFIG_MAPPING:
            raise CheckpointError(
                f"{str(path)!r}: auto_map={values['auto_map']!r} refers to custom code for a model that "
                f"this version of transformers does not support; headwise does not run code from model folders",
                f"{str(path)!r}：auto_map={values['auto_map']!r} 指向自定义代码，此版本的 transformers "
                "不支持该模型；headwise 不运行模型文件夹中的代码",
            )
    unknown = "its config.json cannot be read, or its model is unknown to this version of transformers"
    with theirs(folder, unknown), quiet():
        config = auto.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    check_built(config, path, unused=unused)
    return config


def check_one_text(folder: Path, config: Any) -> None:
    """Raise CheckpointError for an encoder-decoder, which takes two texts."""
    if two_stacks(config):
        raise CheckpointError(
            f"{str(folder)!r} is an encoder-decoder model ({config.model_type}), which takes two texts; use "
            f"headwise.watch for such models",
            f"{str(folder)!r} 是编码器-解码器模型（{config.model_type}），需要两段文本；此类模型请用 headwise.watch",
        )


def read_tokenizer(folder: Path) -> Any:
    """Load the tokenizer. CheckpointError if there is none."""
    auto = library("models.auto")
    missing = CheckpointError(
        f"{str(folder)!r}: no tokenizer found, such as tokenizer.json or vocab.txt; save one with "
        f"tokenizer.save_pretrained(…). In Python, hw.show(model, text=ids) requires none",
        f"{str(folder)!r}：没有分词器，例如 tokenizer.json 或 vocab.txt；可用 tokenizer.save_pretrained(…) "
        "保存一个。在 Python 中，hw.show(model, text=ids) 不需要分词器",
    )
    path = folder / "tokenizer_config.json"
    if path.is_file():
        with reading(path, "tokenizer configuration"):
            for name, value in Entry(parsed(text_of(path))).plain().items():
                if name.endswith("_file") and isinstance(value, str) and os.path.exists(value):
                    check_regular(value)
    try:
        with theirs(folder, "it has no tokenizer that can be read"), quiet():
            tokenizer = auto.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
            empty = not len(tokenizer) > len(tokenizer.added_tokens_decoder)
    except CheckpointError:
        # Some tokenizers have no files. Where others lack theirs, the error of transformers is about packages.
        if any(path for pattern in TOKENIZER for path in folder.glob(pattern)):
            raise
        raise missing from None
    if empty:
        raise missing
    return tokenizer
