"""Whether PyTorch records operations, which hold no calls of compiled code."""

import torch

_PROXY = torch._C._TorchDispatchModeKey.PROXY


def traced() -> bool:
    """Whether torch.jit.trace or make_fx records the operations of this thread."""
    return torch._C._is_tracing() or torch._C._get_dispatch_mode(_PROXY) is not None
