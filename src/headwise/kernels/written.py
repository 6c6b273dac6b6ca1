"""Serialization of a mask to integers and tensors, the arguments that an operator in a PyTorch graph supports.

The integers encode the plain values of `headwise.fields.write`, each preceded by a code for its type. A class is
written by name, so that an exported graph runs in any process that has registered it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise import fields
from headwise.masks import Mask

NOTHING, WHOLE, NUMBER, WORD, LIST, OBJECT = range(6)


def write(mask: Mask) -> tuple[list[int], list[Tensor]] | None:
    """Return the mask's numbers and tensors, or None if a class in it is not registered."""
    if fields.unregistered(mask) is not None:
        return None
    numbers: list[int] = []
    tensors: list[Tensor] = []

    def put(x: Tensor) -> int:
        tensors.append(x)
        return len(tensors) - 1

    _write(fields.write(mask, put), numbers)
    return numbers, tensors


def read(numbers: Sequence[int], tensors: Sequence[Tensor]) -> Mask:
    """Return the mask that `write` serialized."""
    found: Mask = fields.read(Mask, _read(iter(numbers)), "mask", lambda code, _: tensors[code])
    return found


def _write(code: Any, numbers: list[int]) -> None:
    if code is None:
        numbers.append(NOTHING)
    elif isinstance(code, dict):
        numbers.extend((OBJECT, len(code)))
        for name, value in code.items():
            _write(name, numbers)
            _write(value, numbers)
    elif isinstance(code, list):
        numbers.extend((LIST, len(code)))
        for value in code:
            _write(value, numbers)
    elif isinstance(code, (int, torch.SymInt)):
        numbers.extend((WHOLE, code))  # type: ignore[arg-type]
    else:
        text = code if isinstance(code, str) else repr(code)
        numbers.extend((WORD if isinstance(code, str) else NUMBER, len(text)))
        numbers.extend([ord(letter) for letter in text])


def _read(numbers: Iterator[int]) -> Any:
    kind = next(numbers)
    if kind == NOTHING:
        return None
    value = next(numbers)
    if kind == WHOLE:
        return value
    if kind == LIST:
        return [_read(numbers) for _ in range(value)]
    if kind == OBJECT:
        return {_read(numbers): _read(numbers) for _ in range(value)}
    text = "".join(chr(next(numbers)) for _ in range(value))
    return text if kind == WORD else float(text)
