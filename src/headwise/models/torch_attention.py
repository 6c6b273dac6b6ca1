"""`nn.MultiheadAttention`, also inside `nn.TransformerEncoderLayer` and similar modules."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from headwise.models.site import Change, HeadSite, Kind
from headwise.models.taps import ReplacedMethod
from headwise.nn.layout import Layout, Part, Resizing
from headwise.nn.owned import check_forward


class TorchKind(Kind):
    """`nn.MultiheadAttention`, by class."""

    name = "torch"
    about = "torch.nn.MultiheadAttention"

    def site(self, name: str, module: nn.Module) -> HeadSite | None:
        """As in `Kind`."""
        if not isinstance(module, nn.MultiheadAttention):
            return None
        h, d = module.num_heads, module.head_dim
        return HeadSite(name, module, self.name, h, h, d, d, module.out_proj, self)

    def layout(self, site: HeadSite) -> Layout:
        """As in `Kind`: q, k and v are in in_proj_weight, or have separate weights; the keys and values of
        add_bias_kv have a slice for each head."""
        module = site.module
        assert isinstance(module, nn.MultiheadAttention)
        d, width = module.head_dim, module.embed_dim
        packed = module._qkv_same_embed_dim
        names = {letter: "in_proj_weight" if packed else f"{letter}_proj_weight" for letter in "qkv"}
        starts = {letter: i * width for i, letter in enumerate("qkv")}
        parts = [Part(x, module, names[x], 0, "query", d, starts[x] if packed else 0) for x in "qkv"]
        if module.in_proj_bias is not None:
            parts += [Part(x, module, "in_proj_bias", 0, "query", d, starts[x]) for x in "qkv"]
        parts += [Part(x, module, f"bias_{x}", 2, "query", d) for x in "kv" if getattr(module, f"bias_{x}") is not None]
        return Layout(tuple(parts)).into(module.out_proj, d)

    def resizing(self, site: HeadSite) -> Resizing:
        """As in `Kind`."""
        return Resizing(
            "nn.MultiheadAttention requires num_heads · head_dim = embed_dim, so it cannot have fewer heads. Mask them "
            "instead: headwise.models.scale_heads(find_heads(model), gates), with 0 for a head. Where your own code "
            "calls the module, prune(headwise.MultiHeadAttention.from_torch(module), […]) is called layer(x, mask=…) "
            "in its place; nn.TransformerEncoderLayer and its like cannot call it"
        )

    def resize(self, site: HeadSite, num_heads: int, num_kv_heads: int) -> None:
        """Never called: its sizes are fixed."""
        raise TypeError("the number of heads of nn.MultiheadAttention is fixed")

    @contextmanager
    def tapped(self, site: HeadSite, change: Change) -> Iterator[None]:
        """As in `Kind`. The module does not call its output projection, and fused paths not even the module: these are
        off, and W_O is the identity while heads are computed. ConfigError for a forward replaced on the instance."""
        module = site.module
        assert isinstance(module, nn.MultiheadAttention)
        check_forward(site.place, module)
        _fused_paths.forbid()
        try:
            with _Forward.with_change(module, change):
                yield
        finally:
            _fused_paths.allow()


class _Forward(ReplacedMethod):
    name = "forward"

    def changed(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        module: Any = self.module
        with _identity(module) as project:
            concat, weights = self.before(*args, **kwargs)
        swapped = concat.ndim == 3 and not module.batch_first  # [n, b, h·d_v]
        concat = concat.transpose(0, 1) if swapped else concat
        for change in self.changes:
            concat = change(concat)
        y = project(concat)
        return y.transpose(0, 1) if swapped else y, weights


class _FusedPaths:
    """PyTorch's fused paths of whole layers, which are off as long as something forbids them."""

    def __init__(self) -> None:
        self._lock, self._users, self._before = Lock(), 0, True

    def forbid(self) -> None:
        with self._lock:
            if not self._users:
                self._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._users += 1

    def allow(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                torch.backends.mha.set_fastpath_enabled(self._before)


_fused_paths = _FusedPaths()


class _Identity(nn.Module):
    """Stands for an output projection, where h·d_v = d_model, and returns its input. The projection itself is left as
    it is: its weight may be computed from other parameters."""

    bias = None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        like = linear.weight
        self.register_buffer("weight", torch.eye(linear.in_features, dtype=like.dtype, device=like.device))
        self.called = False

    def forward(self, x: Tensor) -> Tensor:
        """As of headwise's adapter, which calls the projection."""
        self.called = True
        return x


@contextmanager
def _identity(module: nn.MultiheadAttention) -> Iterator[Callable[[Tensor], Tensor]]:
    """Replace the output projection by the identity; yields the projection, called as the module calls it."""
    linear = module.out_proj
    module._modules["out_proj"] = identity = _Identity(linear)

    def project(x: Tensor) -> Tensor:
        return linear(x) if identity.called else nn.functional.linear(x, linear.weight, linear.bias)

    try:
        yield project
    finally:
        module._modules["out_proj"] = linear
