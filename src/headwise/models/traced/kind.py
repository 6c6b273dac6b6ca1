"""The kind of modules that were traced."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from headwise.errors import ConfigError
from headwise.models.site import Change, HeadSite, Kind
from headwise.models.traced.known import TRACED, Traced, traced, value_of
from headwise.models.traced.shared import with_shared_maps
from headwise.models.traced.widths import WIDTH, narrow
from headwise.nn.layout import Layout, Resizing


class TracedKind(Kind):
    """Modules whose attention was recognised and traced by `find_heads(model, batch)`."""

    name = "traced"
    about = "attention written by hand, if find_heads is given a batch: find_heads(model, batch)"
    by_class = True  # `sizes` compares a module without a head with one whose head is masked
    merged = "modules found by find_heads(model, batch) whose maps are `nn.Linear`s"

    def site(self, name: str, module: nn.Module) -> HeadSite | None:
        """As in `Kind`."""
        found = traced(module)
        if found is None:
            return None
        return HeadSite(
            name, module, self.name, found.num_heads, found.num_kv_heads, found.head_dim, found.value_dim, found.output,
            self,
        )  # fmt: skip

    def layout(self, site: HeadSite) -> Layout:
        """As in `Kind`."""
        found = _of(site)
        return Layout(found.parts(), found.output, rotary=False, missing=found.missing)

    def resizing(self, site: HeadSite) -> Resizing:
        """As in `Kind`."""
        found = _of(site)
        unknown = "" if found.plain else (
            f"{type(site.module).__name__} changes its queries and keys before they are multiplied, by positions or "
            f"norms"
        )  # fmt: skip
        return Resizing(found.missing or found.fixed, found.merges, unknown)

    def resize(self, site: HeadSite, num_heads: int, num_kv_heads: int) -> None:
        """As in `Kind`."""
        found = _of(site).resized(num_heads, num_kv_heads)
        for module, attribute, role in found.sizes:
            setattr(module, attribute, value_of(role, found))
            if attribute == WIDTH:
                narrow(module, found.inputs(), found.width_of_inputs())
        vars(site.module)[TRACED] = found

    def share(self, site: HeadSite) -> None:
        """As in `Kind`."""
        found = _of(site)
        if found.shares:
            vars(site.module)[TRACED] = with_shared_maps(found, site.module)

    def weights(self, site: HeadSite) -> dict[str, Tensor]:
        """As in `Kind`."""
        found = _of(site)
        super().weights(site)  # raises for what has no plain matrices
        matrices: dict[str, Tensor] = {}
        for one in found.slices:
            x = getattr(one.owner, one.name).detach()
            if x.ndim == 2:
                heads = [x.narrow(one.axis, one.start + i * one.step, one.width) for i in range(found.count(one.heads))]
                transposed = (one.axis == 0) == (one.letter != "o")
                matrices[one.letter] = _stacked([head.mT if transposed else head for head in heads])
        return matrices

    @contextmanager
    def tapped(self, site: HeadSite, change: Change) -> Iterator[None]:
        """As in `Kind`."""
        found = _of(site)
        if found.output is None:
            raise ConfigError(f"{site.name or type(site.module).__name__}: {found.unheard}")

        def turned(concat: Tensor) -> Tensor:
            if found.batch_first or concat.ndim != 3:
                return change(concat)
            return change(concat.transpose(0, 1)).transpose(0, 1)

        with super().tapped(site, turned):
            yield


def _of(site: HeadSite) -> Traced:
    found = traced(site.module)
    assert found is not None
    return found


def _stacked(heads: list[Tensor]) -> Tensor:
    """A view where all heads follow each other at one distance, as they do."""
    first = heads[0]
    if len(heads) == 1:
        return first[None]
    step = heads[1].storage_offset() - first.storage_offset()
    return first.as_strided((len(heads), *first.shape), (step, *first.stride()), first.storage_offset())
