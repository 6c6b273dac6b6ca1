"""A convolution as multi-head attention over relative positions: one head per position of the kernel."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headwise.cache import Cache
from headwise.costs.work import Counts, positive
from headwise.errors import ConfigError, ShapeError
from headwise.kernels.graph import has_no_numbers
from headwise.map.attention import attend_to
from headwise.masks import Mask
from headwise.nn.base import AttentionLayer, copy_into
from headwise.nn.layout import INDEPENDENT, Layout, Part, Resizing, check_input, flag, size
from headwise.nn.owned import check_copied
from headwise.nn.steps import Notes, Steps
from headwise.scores import Score
from headwise.wording import tr

Pad = tuple[int, int]  # zeros before and after the input, along one axis


class ConvolutionAttention(AttentionLayer):
    """y_t = Σ_i Σ_s softmax_s(α_i R(s − t − Δ_i)) x_s W_i^O + b,  R(δ) = Σ_axes Σ_f cos(π δ / 2^f).

    Head i attends to position t + Δ_i regardless of content, and W_i^O is the kernel's matrix for that position. R is
    largest at δ = 0 and smaller by more than 3 elsewhere, so with α = 16 the weights of all other positions together
    are below 1e-20: the layer equals a convolution to rounding. α and Δ are parameters and can be trained.

    The channels are last: x is [b, n, d_model], or [b, n_1, n_2, d_model] with two axes. The zeros of the padding are
    keys too, and edits (`hw.intervene`) count them: query t is output t, and key s is the padded input s. Masks
    (each head attends to one position; set inputs to zero instead), scores, caches and contexts (a position is
    meaningful in its own sequence only) are not supported.

    Args:
        d_model: input channels. num_heads: positions of the kernel.
        offsets: [h, axes] offsets Δ_i, whole numbers; by default 0 … h − 1, centred as in padding="same".
        padding: zeros before and after along each axis; by default as many as preserve the length.
        out_dim: output channels, d_model by default.
        bias: b.
        sharpness: α.
        dropout: as in `MultiHeadAttention`.

    Parameters: h·d_model·out_dim (+ out_dim), the convolution's own, and h·(axes + 1) for Δ and α.
    Cost: n·m·h·(4·axes·log₂ n + 2·d_model) operations; a convolution needs none for the attention. It shows what heads
        can express, and is not a faster convolution.
    Source: Cordonnier et al. 2020, 1911.03584, theorem 1. The paper's R is −‖δ‖²; the logits of a sum of
        cosines do not grow with the length, while float32 cannot resolve n² beyond some thousand positions.
    """

    takes_context, takes_cache, takes_mask, takes_score = False, False, False, False
    at_end = False  # its keys are padded
    takes_none_as: ClassVar[Mapping[str, str]] = {
        "mask": "each head attends to one position; set inputs to zero instead",
        "score": "each head attends to one position",
        "cache": "its queries are the positions of the whole output, some of them before their keys",
        "context": "a position is meaningful in its own sequence only",
    }
    notes = Notes(
        summary=tr("a convolution as attention: one head per position of the kernel"),
        use=tr("you want to show that heads can express a convolution; not to compute one"),
        source="Cordonnier et al. 2020, 1911.03584",
        parameters="h·d·d_out + h·(axes + 1)",
        work="a pair: h·(2·axes·log₂ n + d), about",
        cache="none",
        limits={},
        map=None,
        compared=tr("a kernel of h positions"),
        form_of=None,
    )

    coupling = INDEPENDENT
    resizing = Resizing()
    outside_attend = "its queries and keys encode positions along the whole sequence"

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        offsets: Tensor | None = None,
        padding: Sequence[Pad] | None = None,
        out_dim: int | None = None,
        bias: bool = False,
        sharpness: float = 16.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(d_model, num_heads, num_kv_heads=1, head_dim=1, value_dim=d_model, dropout=dropout)
        bias = flag("bias", bias)
        if offsets is None:
            start = -((num_heads - 1) // 2)
            first, last = [start], [start + num_heads - 1]
            offsets = torch.arange(start, start + num_heads)[:, None]
        else:
            if offsets.ndim != 2 or len(offsets) != num_heads:
                raise ShapeError(f"offsets: expected [num_heads={num_heads}, axes], got shape {tuple(offsets.shape)}")
            if has_no_numbers(offsets):
                raise ConfigError(f"offsets: on {offsets.device} without data, but padding and sizes follow from it")
            first, last = offsets.amin(0).tolist(), offsets.amax(0).tolist()
        padding = [(int(-a), int(z)) for a, z in zip(first, last, strict=True)] if padding is None else list(padding)
        if len(padding) != len(first):
            raise ShapeError(f"padding: expected {len(first)} pairs, one for each axis, got {len(padding)}")
        # Offsets count from the first position of the kernel, which is aligned to the first padded key.
        self.padding = padding
        self.reach = [int(z - a) for a, z in zip(first, last, strict=True)]
        centres = torch.empty(offsets.shape, dtype=torch.float32)  # on the device of the other parameters
        self.centres = nn.Parameter(centres.copy_(offsets - offsets.amin(0)))
        self.sharpness = nn.Parameter(torch.full((num_heads,), float(sharpness)))
        out_dim = d_model if out_dim is None else size("out_dim", out_dim)
        self.o_proj = nn.Linear(num_heads * d_model, out_dim, bias=bias)

    def compute(
        self, x: Tensor, source: Tensor, cache: Cache | None, options: dict[str, Any], return_concat: bool
    ) -> tuple[Tensor, Any, Any]:
        """As in `AttentionLayer`. Queries are the positions of the output, keys those of the padded input; with two
        axes the map numbers both row by row, and y is [b, n_1, n_2, out_dim]."""
        pads = [size for pair in reversed(self.padding) for size in pair]
        padded = nn.functional.pad(x, (0, 0, *pads))
        places = padded.shape[1:-1]
        sizes = [size - reach for size, reach in zip(places, self.reach, strict=True)]
        if min(sizes) < 1:
            raise ShapeError(f"x: shape {tuple(x.shape)} with padding {self.padding} is smaller than the kernel")
        frequencies = math.ceil(math.log2(max(2, *places))) + 2
        keys = _code(_grid(list(places), x), frequencies)  # [m, code]
        queries = _code(_grid(sizes, x)[None] + self.centres[:, None].double(), frequencies)  # [h, n, code]
        v = padded.flatten(1, -2)[:, None]  # [b, 1, m, d_model]: every head reads the input itself
        q = (self.sharpness[:, None, None] * queries).to(v.dtype).expand(x.shape[0], -1, -1, -1)
        heads, amap = attend_to(q, keys.to(v.dtype).expand(x.shape[0], 1, -1, -1), v, scale=1.0, **options)
        concat = self.merge(heads, x).unflatten(1, sizes)
        return self.output(concat), amap, concat

    def layout(self) -> Layout:
        """Entries of Δ and α, and columns of W^O."""
        parts = tuple(Part(name, self, name, 0, "query", 1) for name in ("centres", "sharpness"))
        missing = "queries and keys encode positions, and the values are the input itself"
        return Layout(parts, missing=missing).into(self.o_proj, self.value_dim)

    @staticmethod
    def costs(
        d_model: int, num_heads: int, *, axes: int = 1, places: int = 1024, out_dim: int | None = None,
        bias: bool = False,
    ) -> Counts:  # fmt: skip
        """One head per position of a kernel: h·d·out weights as in the convolution, and h·(axes + 1) for Δ and α; keys
        encode up to `places` positions, and the values are the input itself (Cordonnier et al. 2020,
        1911.03584)."""
        d, h = d_model, num_heads
        out = d if out_dim is None else out_dim
        positive(d_model=d, num_heads=h, axes=axes, places=places, out_dim=out)
        code = 2 * axes * (math.ceil(math.log2(max(2, places))) + 2)
        return Counts(
            parameters=h * d * out + (out if bias else 0) + h * (axes + 1), width=d, heads=h, per_query=0, per_key=0,
            scores=h * code, weighted_sum=h * d, output=h * d * out, query=h * code, keys=code, values=d, concat=h * d,
            key_vectors=1, value_vectors=1, cached=False, masked=False,
        )  # fmt: skip

    def steps(self, x: Tensor, note: Steps) -> None:
        """As in `AttentionLayer`, along one axis: logits from distances, without the position codes of the call."""
        (before, after), (reach,) = self.padding[0], self.reach
        padded = nn.functional.pad(x, (0, 0, before, after))
        note("padded", padded, "b m d_model", "X̃ = pad X",
             tr("zeros around the input, as in a convolution"))  # fmt: skip
        m = padded.shape[1]
        places = torch.arange(m)
        delta = places[None, None, :] - places[None, : m - reach, None] - self.centres[:, :1, None]
        note("distances", delta, "h n m", "δ = s − t − Δ_i",
             tr("the distance of each key from the position of the head"))  # fmt: skip
        frequencies = math.ceil(math.log2(max(2, m))) + 2
        r = torch.stack([torch.cos(math.pi * delta / 2**f) for f in range(frequencies)]).sum(0)
        scores = self.sharpness[:, None, None] * r
        note("scores_place", scores, "h n m", "S = α_i Σ_f cos(π δ / 2^f)",
             tr("largest where the distance is 0"))  # fmt: skip
        heads = note.weights(scores) @ padded[:, None]
        note("heads_place", heads, "b h n d_model", "H = P X̃", tr("each head: the input at its position"))
        note.output(self, heads, "b n out")

    def check(
        self, x: Tensor, context: Tensor | None, cache: Cache | None, mask: Mask | None, scores: tuple[Score, ...] = ()
    ) -> None:
        """As in `AttentionLayer`, for as many axes as the kernel has."""
        axes = len(self.padding)
        check_input(self, "x", x)
        if x.ndim != axes + 2 or x.shape[-1] != self.d_model:
            raise ShapeError(
                f"x: expected [batch, {axes} axes, d_model={self.d_model}] ({axes + 2} dimensions), channels last, got "
                f"shape {tuple(x.shape)}"
            )
        super().check(x.flatten(1, -2), context, cache, mask, scores)

    def extra_repr(self) -> str:
        """The sizes, for print(module)."""
        return f"d_model={self.d_model}, num_heads={self.num_heads}, padding={self.padding}"


def from_conv1d(conv: nn.Conv1d, *, sharpness: float = 16.0) -> ConvolutionAttention:
    """Return the attention layer that equals a convolution [b, c, n], weights copied; its channels are last, [b, n, c].

    Supports any kernel size, dilation, groups, bias and zero padding, with stride 1. ConfigError for others, and for a
    module of another class, such as nn.ConvTranspose1d.
    """
    return _from_conv(conv, nn.Conv1d, sharpness)


def from_conv2d(conv: nn.Conv2d, *, sharpness: float = 16.0) -> ConvolutionAttention:
    """As `from_conv1d`, for images [b, c, n_1, n_2], here [b, n_1, n_2, c]; one head per position of the kernel."""
    return _from_conv(conv, nn.Conv2d, sharpness)


def _from_conv(
    conv: nn.Conv1d | nn.Conv2d, kind: type[nn.Conv1d] | type[nn.Conv2d], sharpness: float
) -> ConvolutionAttention:
    if not isinstance(conv, kind):
        raise ConfigError(f"conv: expected an nn.{kind.__name__}, got {type(conv).__name__}")
    check_copied(kind.__name__, conv, [Part("conv", conv, "weight", 0, "query", 1)])
    if any(step != 1 for step in conv.stride):
        raise ConfigError(f"stride={conv.stride}: expected 1; attention has one query per position")
    if conv.padding_mode != "zeros":
        raise ConfigError(f"padding_mode={conv.padding_mode!r}: expected 'zeros'")
    places = list(product(*(range(0, d * k, d) for d, k in zip(conv.dilation, conv.kernel_size, strict=True))))
    reach = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    padding = [(size, size) for size in conv.padding if not isinstance(size, str)]
    if isinstance(conv.padding, str):
        padding = [(r // 2, r - r // 2) if conv.padding == "same" else (0, 0) for r in reach]
    module = ConvolutionAttention(
        conv.in_channels, len(places), offsets=torch.tensor(places), padding=padding, bias=conv.bias is not None,
        out_dim=conv.out_channels, sharpness=sharpness,
    ).to(conv.weight)  # fmt: skip
    kernel = conv.weight.detach().flatten(2)  # [out, in / groups, h]
    dense = kernel.new_zeros(conv.out_channels, conv.in_channels, len(places))
    rows, columns = conv.out_channels // conv.groups, conv.in_channels // conv.groups
    for g in range(conv.groups):
        dense[g * rows : (g + 1) * rows, g * columns : (g + 1) * columns] = kernel[g * rows : (g + 1) * rows]
    pairs = [(module.o_proj.weight, dense.transpose(1, 2).flatten(1))]  # [out, h·in]
    copy_into(pairs if conv.bias is None else [*pairs, (module.o_proj.bias, conv.bias)])
    return module.train(conv.training)


def _grid(sizes: list[int], like: Tensor) -> Tensor:
    """Return every position of a grid, row by row: float64 [product of sizes, axes]."""
    axes = (torch.arange(size, dtype=torch.float64, device=like.device) for size in sizes)
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)


def _code(places: Tensor, frequencies: int) -> Tensor:
    """cos and sin of π·position / 2^f, so that the product of two codes is R of their difference: [..., 2·axes·f]."""
    angle = places[..., None] * (math.pi * 0.5 ** torch.arange(frequencies, dtype=torch.float64, device=places.device))
    return torch.cat((angle.cos(), angle.sin()), -1).flatten(-2)
