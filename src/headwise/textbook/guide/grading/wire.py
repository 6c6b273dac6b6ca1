"""Values between two processes as JSON: numbers, texts, lists, dictionaries and tensors. Nothing is unpickled.

>>> import torch
>>> decoded(encoded((1, torch.ones(2))))
(1, tensor([1., 1.]))
"""

import base64
from typing import Any

import numpy as np
import torch
from torch import Tensor

_DTYPES = {
    "float32": np.float32, "float64": np.float64, "int64": np.int64, "int32": np.int32, "bool": np.bool_,
    "complex64": np.complex64, "complex128": np.complex128,
}  # fmt: skip


class UnknownValue(TypeError):
    """A value that cannot be passed on."""


def encoded(value: Any) -> Any:
    """A value as JSON. UnknownValue for other types."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return {"int": str(value)}
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, np.ndarray | np.generic):
        value = torch.from_numpy(np.array(value))
    if isinstance(value, Tensor):
        array = _plain(value).numpy()
        return {
            "tensor": base64.b64encode(array.tobytes()).decode("ascii"), "dtype": str(array.dtype),
            "shape": list(array.shape),
        }  # fmt: skip
    if isinstance(value, tuple | list | range):
        return {"tuple" if isinstance(value, tuple) else "list": [encoded(x) for x in value]}
    if isinstance(value, dict):
        return {"dict": [[encoded(key), encoded(x)] for key, x in value.items()]}
    raise UnknownValue(type(value).__name__)


def decoded(value: Any) -> Any:
    """The value of such JSON. ValueError if it is not of that form."""
    if value is None or isinstance(value, bool | str):
        return value
    match value:
        case {"int": str(digits)}:
            return int(digits)
        case {"float": str(digits)}:
            return float.fromhex(digits)
        case {"tensor": str(code), "dtype": str(dtype), "shape": list(shape)} if dtype in _DTYPES:
            flat: np.ndarray = np.frombuffer(base64.b64decode(code), _DTYPES[dtype])
            return torch.from_numpy(flat.reshape([int(x) for x in shape]).copy())
        case {"tuple": list(parts)}:
            return tuple(decoded(x) for x in parts)
        case {"list": list(parts)}:
            return [decoded(x) for x in parts]
        case {"dict": list(pairs)}:
            return {decoded(key): decoded(x) for key, x in pairs}
    raise ValueError(f"{str(value)[:60]!r} is not an encoded value")


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().to_dense().cpu() if tensor.layout is not torch.strided else tensor.detach().cpu()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    if name in _DTYPES:
        return tensor
    return tensor.float() if tensor.is_floating_point() else tensor.long()
