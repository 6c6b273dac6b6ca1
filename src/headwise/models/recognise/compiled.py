"""Modules that torch.compile has compiled."""

import sys
from collections.abc import Iterable

import torch
from torch import nn


def compiled_parts(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """The names of those of these modules that torch.compile has compiled."""
    if "torch._dynamo" not in sys.modules:
        return []
    kind = torch._dynamo.OptimizedModule
    return [
        ".".join(part for part in name.split(".") if part != "_orig_mod") for name, module in modules
        if isinstance(module, kind) or getattr(module, "_compiled_call_impl", None) is not None
    ]  # fmt: skip
