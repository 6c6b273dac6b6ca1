"""Token ids of a text, and the text of token ids, by the tokenizer of any library.

Supported are tokenizers of transformers and headwise, of the packages tokenizers, sentencepiece and tiktoken, and any
object with encode(text) and decode(ids), such as that of a character model.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ConfigError
from headwise.lm.loading.characters import Pieces, pieces_of

EXPECTED = (
    "expected a tokenizer of transformers or headwise, or an object with encode(text) and decode(ids), such as "
    "types.SimpleNamespace(encode=…, decode=…)"
)
NAMES = ("convert_ids_to_tokens", "id_to_token", "id_to_piece", "decode")  # methods that tokens are decoded by


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


def decoded(tokenizer: Any, ids: Sequence[int]) -> Pieces:
    """The text of each token.

    Raises:
        ConfigError: for an object that is no tokenizer, or one that raises.
    """
    if not any(hasattr(tokenizer, name) for name in NAMES):
        raise ConfigError(
            f"tokenizer: {type(tokenizer).__name__} has no convert_ids_to_tokens and no decode; {EXPECTED}, or give "
            f"pieces=…, the text of each token"
        )
    return _called(tokenizer, "decode", lambda: pieces_of(tokenizer, ids))


def _called(tokenizer: Any, name: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"tokenizer: {name} of {type(tokenizer).__name__} raised {what}") from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
