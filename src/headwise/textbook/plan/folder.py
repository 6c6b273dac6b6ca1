"""The sizes of a model of transformers, by the config.json of its folder. Weights are not read.

A family is a model type whose parameters `headwise.costs.model` counts; the model is built without memory (on the meta
device) to compare its number of parameters with that count, so that a variant that is not understood is refused.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.costs.configs import ModelConfig
from headwise.costs.model import parameter_parts
from headwise.edit.folder import is_pruned, pruned_heads
from headwise.errors import ConfigError
from headwise.lm.loading.files import read_config
from headwise.models.adapters.huggingface.library import library
from headwise.nn.counts import attention_of


def config_of(folder: Path) -> ModelConfig:
    """The sizes of the model in a folder with config.json.

    Raises:
        CheckpointError: if there is no config.json, or it cannot be read.
        ConfigError: for a model type that is not in `FAMILIES`, and for a model with other parameters than its family.
    """
    c = read_config(folder)
    options = FAMILIES.get(c.model_type)
    if options is None:
        raise ConfigError(
            f"--config {str(folder)!r}: model_type={c.model_type!r}: expected one of {', '.join(FAMILIES)}; a layer of "
            f"any sizes is planned by --design, --d-model and --num-heads",
            f"--config {str(folder)!r}：model_type={c.model_type!r}：应为 {'、'.join(FAMILIES)} 之一；"
            "任意大小的一层可用 --design、--d-model 与 --num-heads 规划",
        )
    found = options(c)
    if "sliding_attention" in (getattr(c, "layer_types", None) or ()) and not found.get("window"):
        raise ConfigError(
            f"--config {str(folder)!r}: attends in windows in some layers, which is not supported; a layer is planned "
            f"by --design with --window",
            f"--config {str(folder)!r}：部分层使用滑动窗口，尚不支持；单独一层可用 --design 与 --window 规划",
        )
    kind, heads = found.pop("class", "AutoModelForCausalLM"), found.pop("heads", {})
    sizes = {"num_heads": c.num_attention_heads, **heads}
    config = ModelConfig(
        folder.resolve().name, c.hidden_size, c.num_hidden_layers, found.pop("d_ff"), c.vocab_size,
        tuple((name, size) for name, size in sizes.items() if size), 0, str(folder / "config.json"),
        context=c.max_position_embeddings, **found,
    )  # fmt: skip
    _check_heads(folder, c)
    with torch.device("meta"):
        model = getattr(library("models.auto"), kind).from_config(c)
    return checked(config, folder, model)


def checked(config: ModelConfig, path: Path, model: nn.Module) -> ModelConfig:
    """The configuration, with the number of parameters of the model; ConfigError if its sizes give another one."""
    config = replace(config, published=sum(p.numel() for p in model.parameters()), stated=False)
    counted = sum(parameter_parts(config, attention_of(config)).values())
    if counted != config.published:
        raise ConfigError(
            f"--config {str(path)!r}: the model has {config.published:,} parameters, and one of these sizes "
            f"{counted:,}: it has parts that are not understood; a layer is planned by --design",
            f"--config {str(path)!r}：模型有 {config.published:,} 个参数，而按这些大小应有 {counted:,} 个："
            "其中有尚不支持的部分；单独一层可用 --design 规划",
        )
    return config


def _check_heads(folder: Path, c: Any) -> None:
    """Raise ConfigError for a pruned model with other numbers of heads than config.json has."""
    whole = c.num_attention_heads, getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    if is_pruned(folder) and (other := [name for name, heads in pruned_heads(folder).items() if heads != whole]):
        raise ConfigError(
            f"--config {str(folder)!r}: was pruned: {other[0]} has other numbers of heads than config.json, which is "
            f"not supported; a layer is planned by --design with --num-heads and --head-dim",
            f"--config {str(folder)!r}：模型经过剪枝：{other[0]} 的头数与 config.json 不同，尚不支持；"
            "单独一层可用 --design、--num-heads 与 --head-dim 规划",
        )


def _llama(c: Any, **heads: Any) -> dict[str, Any]:
    bias = "qkvo" if getattr(c, "attention_bias", False) else None
    own = {"num_kv_heads": c.num_key_value_heads, "head_dim": getattr(c, "head_dim", None), "bias": bias, **heads}
    if own["num_kv_heads"] == c.num_attention_heads:
        del own["num_kv_heads"]
    if own["head_dim"] and own["head_dim"] * c.num_attention_heads == c.hidden_size:
        del own["head_dim"]
    return {"heads": own, "d_ff": c.intermediate_size, "gated": True, "output": _output(c)}


def _windowed(c: Any, **heads: Any) -> dict[str, Any]:
    return {**_llama(c, **heads), "window": c.sliding_window}


def _mixtral(c: Any) -> dict[str, Any]:
    return {**_windowed(c), "experts": c.num_local_experts, "active_experts": c.num_experts_per_tok}


def _gpt2(c: Any) -> dict[str, Any]:
    return {
        "heads": {"bias": "qkvo"}, "d_ff": c.n_inner or 4 * c.n_embd, "ff_bias": True, "norm": "layer",
        "positions": c.n_positions, "output": _output(c),
    }  # fmt: skip


def _bert(c: Any) -> dict[str, Any]:
    return {
        "class": "AutoModel", "heads": {"bias": "qkvo"}, "d_ff": c.intermediate_size, "ff_bias": True, "norm": "layer",
        "causal": False, "final_norm": False, "embedding_norm": True, "positions": c.max_position_embeddings,
        "segments": c.type_vocab_size, "pooler": True, "output": "none",
    }  # fmt: skip


def _output(c: Any) -> str:
    return "tied" if c.tie_word_embeddings else "own"


FAMILIES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "llama": _llama, "gemma": _llama, "mistral": _windowed, "mixtral": _mixtral,
    "qwen2": lambda c: _llama(c, bias="qkv"), "qwen3": lambda c: _llama(c, qk_norm=1), "gpt2": _gpt2, "bert": _bert,
}  # fmt: skip
