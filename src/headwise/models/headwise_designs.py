"""headwise's head designs, which describe their own layout."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from headwise.models.site import Change, HeadSite, Kind
from headwise.models.taps import ReplacedMethod
from headwise.nn.base import AttentionLayer
from headwise.nn.layout import Layout, Resizing
from headwise.nn.registry import DESIGNS


class HeadwiseKind(Kind):
    """`AttentionLayer`s, by class."""

    name = "headwise"
    about = "headwise's designs (AttentionLayer), alone or in TransformerBlock and Decoder"
    by_class = True

    @property
    def merged(self) -> str:  # type: ignore[override]
        """As in `Kind`."""
        names = [design.__name__ for design in DESIGNS.values() if design.resizing.merges]
        return f"{', '.join(names)}, alone or in TransformerBlock and Decoder"

    def site(self, name: str, module: nn.Module) -> HeadSite | None:
        """As in `Kind`."""
        if not isinstance(module, AttentionLayer):
            return None
        layout = module.layout()
        return HeadSite(
            name, module, self.name, module.num_heads, module.num_kv_heads, module.head_dim + layout.shared_key,
            module.value_dim, layout.output, self,
        )  # fmt: skip

    def layout(self, site: HeadSite) -> Layout:
        """As in `Kind`."""
        return _layer(site).layout()

    def resizing(self, site: HeadSite) -> Resizing:
        """As in `Kind`. A class that does not describe itself is refused: the description of its base may be wrong."""
        kind = type(_layer(site))
        if not kind.is_described():
            known = ", ".join(each.__name__ for each in DESIGNS.values() if _can_lose_heads(each))
            return Resizing(f"{kind.__name__} is not known to keep its heads apart; known: {known}")
        if _can_lose_heads(kind):
            return kind.resizing
        return Resizing(f"{kind.__name__} cannot lose a head: {kind.coupling.why or kind.resizing.fixed}")

    def resize(self, site: HeadSite, num_heads: int, num_kv_heads: int) -> None:
        """As in `Kind`."""
        _layer(site).resize(num_heads, num_kv_heads)

    def weights(self, site: HeadSite) -> dict[str, Tensor]:
        """As in `Kind`."""
        layer = _layer(site)
        own = None if layer.layout().missing else layer.head_matrices()
        return super().weights(site) if own is None else own

    @contextmanager
    def tapped(self, site: HeadSite, change: Change) -> Iterator[None]:
        """As in `Kind`; where no module is called with the concatenation, `compute` of the layer is replaced."""
        if site.output is not None:
            with super().tapped(site, change):
                yield
            return
        with _Compute.with_change(_layer(site), change):
            yield


class _Compute(ReplacedMethod):
    name = "compute"

    def changed(
        self, x: Tensor, source: Tensor, cache: Any, options: dict[str, Any], return_concat: bool
    ) -> tuple[Tensor, Any, Any]:
        layer: Any = self.module
        _, amap, concat = self.before(x, source, cache, options, True)
        for change in self.changes:
            concat = change(concat)
        return layer.output(concat), amap, concat if return_concat else None


def _layer(site: HeadSite) -> AttentionLayer:
    assert isinstance(site.module, AttentionLayer)
    return site.module


def _can_lose_heads(kind: type[AttentionLayer]) -> bool:
    return not kind.coupling.at and not kind.resizing.fixed
