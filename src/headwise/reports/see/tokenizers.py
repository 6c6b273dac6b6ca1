"""Token ids of a text, and the text of token ids, by the tokenizer of any library.

Supported are tokenizers of transformers and headwise, of the packages tokenizers, sentencepiece and tiktoken, and any
object with encode(text) and decode(ids), such as that of a character model.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ConfigError

EXPECTED = (
    "expected a tokenizer of transformers or headwise, or an object with encode(text) and decode(ids), such as "
    "types.SimpleNamespace(encode=…, decode=…)"
)
# What one token is called in its vocabulary: transformers has its own method for a list.
ONE = ("id_to_token", "id_to_piece")
LONGEST = 4  # bytes of a character in UTF-8, and so tokens that may share one


def inputs_of(text: str, tokenizer: Any) -> Tensor | dict[str, Any]:
    """The arguments of a model for a text: the tokenizer's for transformers, else the token ids [1, n].

    Raises:
        ConfigError: for an object that is no tokenizer, or one that raises or returns no token ids.
    """
    if hasattr(tokenizer, "convert_ids_to_tokens") and callable(tokenizer):
        return dict(_called(tokenizer, "call", lambda: tokenizer(text, return_tensors="pt")))
    if not hasattr(tokenizer, "encode"):
        raise ConfigError(f"tokenizer: {type(tokenizer).__name__} has no encode; {EXPECTED}")
    found = _called(tokenizer, "encode", lambda: tokenizer.encode(text))
    found = getattr(found, "ids", found)  # tokenizers returns an Encoding
    try:
        ids = torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.empty(0)
    if not ids.numel() or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ConfigError(f"tokenizer: encode(text) of {len(text)} characters returned {_short(found)}, no token ids")
    return torch.atleast_2d(ids)


def decoded(tokenizer: Any, ids: Sequence[int]) -> tuple[list[str], bool]:
    """The text of each token, and whether it is written as in a vocabulary (Ġworld, ##ing) instead of decoded.

    A decoded character of several tokens is assigned to the last of them.

    Raises:
        ConfigError: for an object that is no tokenizer, or one that raises.
    """
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        found = _called(tokenizer, "convert_ids_to_tokens", lambda: tokenizer.convert_ids_to_tokens(list(ids)))
        return _named(found, ids), True
    for name in ONE:
        if hasattr(tokenizer, name):
            return _named(_called(tokenizer, name, partial(_each, getattr(tokenizer, name), ids)), ids), True
    if not hasattr(tokenizer, "decode"):
        raise ConfigError(
            f"tokenizer: {type(tokenizer).__name__} has no convert_ids_to_tokens and no decode; {EXPECTED}, or give "
            f"pieces=…, the text of each token"
        )
    return _called(tokenizer, "decode", lambda: _one_by_one(tokenizer.decode, ids)), False


def _each(one: Callable[[int], Any], ids: Sequence[int]) -> list[Any]:
    return [one(i) for i in ids]


def _one_by_one(decode: Callable[[list[int]], str], ids: Sequence[int]) -> list[str]:
    pieces: list[str] = []
    waiting: list[int] = []
    for i in ids:
        waiting.append(i)
        piece = str(decode(waiting))
        if piece.endswith("�") and len(waiting) < LONGEST:
            piece = ""  # the beginning of a character
        else:
            waiting = []
        pieces.append(piece)
    if waiting:
        pieces[-1] = str(decode(waiting))
    return pieces


def _named(found: Sequence[Any], ids: Sequence[int]) -> list[str]:
    """The names of tokens; ids outside of the vocabulary are shown as numbers."""
    return [str(i) if one is None else str(one) for one, i in zip(found, ids, strict=True)]


def _called(tokenizer: Any, name: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"tokenizer: {name} of {type(tokenizer).__name__} raised {what}") from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
