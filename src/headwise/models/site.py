"""What is known of a place with heads: its sizes, its matrices, and where each head's numbers lie in them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from headwise.errors import ConfigError

Change = Callable[[Tensor], Tensor]  # of Concat(head_1 … head_h) [..., n, h·d_v], to the same shape


@dataclass(frozen=True)
class Part:
    """Where heads lie in one parameter: head i is `width` entries of the axis, from `start + i · width` on.

    Attributes:
        letter: "q", "k", "v" or "o" for the matrices and their biases; another for what else belongs to a head.
        owner, name: the module that holds the parameter, and its name there. An `nn.ParameterList` has one entry a
            head, and axis, width and start 0, 1 and 0.
        heads: "query" or "key": of which heads there is one piece each.
    """

    letter: str
    owner: nn.Module
    name: str
    axis: int
    heads: str
    width: int
    start: int = 0

    @property
    def tensor(self) -> Tensor | nn.ParameterList:
        """The parameter as it is now."""
        found: Tensor | nn.ParameterList = getattr(self.owner, self.name)
        return found


@dataclass(frozen=True)
class HeadSite:
    """An attention module of a model, and its heads.

    Attributes:
        name: the attention module's qualified name, such as "blocks.0.attention"; "" for the model itself.
        module: the attention module.
        kind: what made it, such as "headwise", "torch", "bert", "gpt2", "llama", "bart", "vit", "distilbert",
            "t5".
        num_heads, num_kv_heads: query heads, and key and value heads.
        head_dim, value_dim: size of a query and key, and of a value.
        output: the projection whose input is Concat(head_1 … head_h) [..., n, h·d_v]. None where no module is called
            with it (some of headwise's own designs); `scale_heads` and `record_heads` work there all the same.
            "torch": `nn.MultiheadAttention` reads the weight of its out_proj and never calls it, so hooks on it do
            nothing.
    """

    name: str
    module: nn.Module
    kind: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    output: nn.Module | None
    anatomy: "Kind" = field(repr=False, compare=False)

    def weights(self) -> dict[str, Tensor]:
        """The matrices of each head: "q" [h, d_model, d_k], "k" [h_kv, d_model, d_k], "v" [h_kv, d_model, d_v] and
        "o" [h, d_v, d_model] (d_model of keys and values is the context's width in cross attention).

        x @ q[i] is head i's query, without bias, norm and positions. Views where the layout allows it, copies
        otherwise. ConfigError, with the reason, where a head has no such matrices.
        """
        return self.anatomy.weights(self)

    def parts(self) -> list[Part]:
        """Where the heads lie in each parameter that is laid out by heads. ConfigError where there is no layout."""
        return self.anatomy.parts(self.module, self.output)


class Kind:
    """One kind of attention modules: how they are found, and where their heads lie. Registered in `find.KINDS`."""

    name: ClassVar[str]
    about: ClassVar[str]  # for the list of what is known

    def site(self, name: str, module: nn.Module) -> HeadSite | None:
        """The place, if this module is of this kind; known by its structure, so that no library is imported."""
        raise NotImplementedError

    def parts(self, module: nn.Module, output: nn.Module | None) -> list[Part]:
        """As in `HeadSite`."""
        raise NotImplementedError

    def weights(self, site: HeadSite) -> dict[str, Tensor]:
        """As in `HeadSite`, from the parts named q, k, v and o."""
        found: dict[str, Tensor] = {}
        for part in site.parts():
            x = part.tensor
            if not isinstance(x, Tensor | nn.ParameterList):
                what = f"{site.name}: {type(part.owner).__name__}.{part.name} is no tensor"
                raise no_layout(what, "a quantised module; load the model unquantised")
            if isinstance(x, Tensor) and not x.is_floating_point():
                raise no_layout(f"{site.name}: {part.name} is {x.dtype}", "quantised weights; load them unquantised")
            if isinstance(x, Tensor) and x.ndim == 2 and part.letter in "qkvo":
                count = site.num_heads if part.heads == "query" else site.num_kv_heads
                piece = x.detach().narrow(part.axis, part.start, count * part.width)
                heads = piece.unflatten(part.axis, (count, part.width)).movedim(part.axis, 0)
                # Heads first: [h, d, d_model] of a row layout, [h, d_model, d] of a column layout, "o" the other way.
                turned = (part.axis == 0) == (part.letter != "o")
                found[part.letter] = heads.mT if turned else heads
        return found

    @contextmanager
    def tapped(self, site: HeadSite, change: Change) -> Iterator[None]:
        """While open, `change` stands between Concat(head_1 … head_h) and the output projection."""
        assert site.output is not None

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (change(args[0]), *args[1:])

        handle = site.output.register_forward_pre_hook(before)
        try:
            yield
        finally:
            handle.remove()


def linear_parts(letter: str, owner: nn.Module, axis: int, heads: str, width: int, start: int = 0) -> list[Part]:
    """Weight and bias of a linear map whose inputs (axis 1) or outputs (axis 0) are the heads, in `nn.Linear`'s layout
    [out, in]. The bias of a map that the heads go into belongs to no head."""
    parts = [Part(letter, owner, "weight", axis, heads, width, start)]
    if axis == 0 and getattr(owner, "bias", None) is not None:
        parts.append(Part(letter, owner, "bias", 0, heads, width, start))
    return parts


def features(linear: object, axis: int) -> int | None:
    """Outputs (axis 0) or inputs (axis 1) of a linear map, None for what is none. Quantised maps say them too, though
    their weights are laid out otherwise."""
    size = getattr(linear, "out_features" if axis == 0 else "in_features", None)
    return size if isinstance(size, int) else None


def no_layout(what: str, why: str) -> ConfigError:
    """For parts and matrices that there are none of."""
    return ConfigError(f"{what}: its heads have no matrices of their own to be read or cut: {why}")
