"""How many positions a model of transformers has, which is the length of the longest text that it can read."""

from typing import Any

from torch import Tensor

from headwise.errors import ConfigError, whole_number
from headwise.models.configuration.config import text_part, trained_context
from headwise.wording import in_language

BUFFERS = "embed_positions", "pos_encoding"  # tables [positions, width] that are not learned: of GPT-J, CodeGen; CTRL


def positions_of(model: Any) -> int | None:
    """Number of positions of a model, or None if they are not limited: from tables such as `position_embeddings` and
    `wpe` of the part that reads text, without the entries that some reserve for padding. It may be on the meta device.
    """
    text = model if text_part(model.config) is model.config else model.get_decoder()
    own = type(text.config)
    others = {  # such as an image encoder beside the text's layers (GIT)
        id(inner)
        for module in text.modules()
        if type(getattr(module, "config", text.config)) is not own
        for inner in module.modules()
    }
    parts = [(name, module) for name, module in text.named_modules() if id(module) not in others]
    found = [number for name, module in parts if (number := _entries(name, module)) is not None]
    for _, module in parts:
        found += [table.shape[-2] for name, table in module.named_buffers(recurse=False) if name in BUFFERS]
    # Some tables are longer than the indices that the model makes (Nyströmformer).
    longest = trained_context(model.config)
    return min(found if longest is None else (*found, longest)) if found else None


def whole_window(window: object) -> int | None:
    """The tokens of a window as an integer of Python, or None; raises ConfigError for anything else."""
    number = None if window is None else whole_number(window)
    if number is None and window is not None:
        raise ConfigError(f"window={window!r}: expected a whole number of tokens", f"window={window!r}：应为整数个词元")
    return number


def check_window(window: int, limit: int | None, name: str) -> None:
    """Raise ConfigError if windows have more tokens than a model has positions."""
    if limit is not None and window > limit:
        raise ConfigError(
            f"window={window}: {name} has {limit:,} positions; expected at most as many",
            f"window={window}：{in_language(name, 'zh')} 有 {limit:,} 个位置；应不超过此数",
        )


def _entries(name: str, module: Any) -> int | None:
    """Positions in a table of positions, None for any other module."""
    last, weight = name.rpartition(".")[2], getattr(module, "weight", None)
    if not (last == "wpe" or "position" in last) or not isinstance(weight, Tensor) or weight.ndim != 2:
        return None
    if not hasattr(module, "padding_idx"):  # not an embedding, nor the quantized one of I-BERT
        return None
    kept = getattr(module, "offset", None)  # OPT
    if not isinstance(kept, int):
        kept = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa
    return int(weight.shape[0]) - kept
