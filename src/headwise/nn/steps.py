"""The steps of a design as its `steps` notes them, rotary positions, and what documentation says of it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import ConfigError, ShapeError
from headwise.masks import Causal
from headwise.wording import in_language, tr


@dataclass(frozen=True)
class Step:
    """One step of a design.

    name: of the step. formula: in plain characters. words: its explanation. tensor: its result. axes: of the tensor,
    separated by blanks.
    """

    name: str
    formula: str
    words: str
    tensor: Tensor
    axes: str


class Steps:
    """A list of steps; calling it adds a step and returns its tensor.

    Args:
        lang: "en" or "zh", the language of the explanations. causal: whether to apply a causal mask.
    """

    def __init__(self, lang: str, causal: bool) -> None:
        self.steps: list[Step] = []
        self.lang, self.causal = lang, causal

    def __call__(self, name: str, tensor: Tensor, axes: str, formula: str, words: str) -> Tensor:
        """Add a step: its name, tensor, axes and formula, and an explanation; words are texts of `tr`.

        ConfigError if the axes, separated by blanks, are not as many as the tensor's.
        """
        if len(axes.split()) != tensor.ndim:
            raise ConfigError(f"steps: note({name!r}): axes={axes!r} for a tensor of shape {tuple(tensor.shape)}")
        self.steps.append(Step(name, in_language(formula, self.lang), in_language(words, self.lang), tensor, axes))
        return tensor

    def projected(self, layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Note and return queries, keys and values of a `ProjectedLayer`: q [b, h, n, d_k], k and v [b, h_kv, n, …]."""
        b, n, _ = x.shape
        h, h_kv, d, d_v = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim
        q = layer.q_proj(x)
        self("q", q, "b n h·d_k", "Q = X W_Q", tr("queries of all heads side by side"))
        k = self("k", layer.k_proj(x), "b n h_kv·d_k", "K = X W_K", tr("keys of all KV heads"))
        v = self("v", layer.v_proj(x), "b n h_kv·d_v", "V = X W_V", tr("values of all KV heads"))
        q = q.view(b, n, h, d)
        self("q_split", q, "b n h d_k", tr("split Q"), tr("the last axis is split into heads"))
        q = self(
            "q_heads", q.transpose(1, 2), "b h n d_k", tr("transpose"),
            tr("heads before tokens: each head is a matrix of its own"))  # fmt: skip
        k = self(
            "k_heads", k.view(b, n, h_kv, d).transpose(1, 2), "b h_kv n d_k", tr("split, transpose K"),
            tr("the same for the keys"))  # fmt: skip
        v = self(
            "v_heads", v.view(b, n, h_kv, d_v).transpose(1, 2), "b h_kv n d_v", tr("split, transpose V"),
            tr("the same for the values"))  # fmt: skip
        if layer.q_norm is not None:
            q, k = layer.q_norm(q), layer.k_norm(k)
            self("q_normed", q, "b h n d_k", "RMSNorm(Q)", tr("queries get the same norm"))
            self("k_normed", k, "b h_kv n d_k", "RMSNorm(K)", tr("keys get the same norm"))
        return *self.apply_rope(layer, q, k), v

    def apply_rope(self, layer: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Note and return queries and keys with rotary positions, if the layer has them."""
        if layer.rotary is None:
            return q, k
        q, k = layer.rotary(q), layer.rotary(k)
        self("q_rotated", q, "b h n d_k", "rope(Q)", tr("each query is rotated by its position"))
        self("k_rotated", k, "b h_kv n d_k", "rope(K)", tr("each key likewise: products depend on distances only"))
        return q, k

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """H = softmax(Q Kᵀ / √d_k) V, [b, h, n, d_v]."""
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        return self.heads(self.weights(self.scores(q, k)), v)

    def scores(self, q: Tensor, k: Tensor, formula: str = "S = Q Kᵀ / √d_k") -> Tensor:
        """Note and return q kᵀ / √d_k, [b, h, n, m]."""
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return self("scores", scores, "b h n m", formula, tr("how well each query matches each key"))

    def weights(self, scores: Tensor, *, scores_as: str = "S", weights_as: str = "P") -> Tensor:
        """Note and return the softmax of the scores [b, h, n, m] under the mask; letters as in the formula."""
        if self.causal:
            allowed = Causal().to_dense(*scores.shape[-2:])
            scores = self(
                "masked", scores.masked_fill(~allowed, -torch.inf), "b h n m", f"{scores_as} ← {scores_as} + mask",
                tr("later keys are masked with −∞"))  # fmt: skip
        return self(
            "weights", scores.softmax(-1), "b h n m" if scores.ndim == 4 else "h n m",
            f"{weights_as} = softmax({scores_as})", tr("each row becomes weights with sum 1"))  # fmt: skip

    def heads(self, weights: Tensor, v: Tensor) -> Tensor:
        """Note and return the weighted sums of the values, [b, h, n, d_v]."""
        return self("heads", weights @ v, "b h n d_v", "H = P V",
                    tr("each head: the weighted sum of the values"))  # fmt: skip

    def back(self, heads: Tensor) -> Tensor:
        """[b, h, n, d_v] to [b, n, h, d_v]."""
        heads = heads.transpose(1, 2)
        return self("back", heads, "b n h d_v", tr("transpose"), tr("tokens before heads again"))

    def side_by_side(self, heads: Tensor) -> Tensor:
        """[b, n, h, d_v] to [b, n, h·d_v]."""
        return self("concat", heads.flatten(2), "b n h·d_v", "A = Concat(H)", tr("the heads side by side"))

    def output(self, layer: Any, heads: Tensor, axes: str = "b n d_model") -> Tensor:
        """Concat(head_1 … head_h) W_O of the heads [b, h, n, d_v]."""
        return self.projected_out(layer, self.side_by_side(self.back(heads)), axes)

    def projected_out(self, layer: Any, concat: Tensor, axes: str = "b n d_model") -> Tensor:
        """Note and return W_O of the concatenated heads."""
        return self("output", layer.o_proj(concat), axes, "Y = A W_O",
                    tr("the output projection mixes the heads"))  # fmt: skip


class Rotary(nn.Module):
    """Rotary position embedding (Su et al. 2021, RoFormer, 2104.09864, eq. 15): q·k depends on i − j only.

    Pairs (x_t, x_{t + d/2}) are rotated by the angle position · base^(−2t/d), the half-split layout of Llama. Angles
    are float32, and float64 for float64 inputs, whatever the dtype of the module, as half precision does not resolve
    large positions.

    Args:
        head_dim: even size d of the heads.
        base: 10,000 in the paper.
    Attributes:
        frequency: float32 [d/2], base^(−2t/d). Not in the state dict: it follows from the arguments, so it is computed
            again where a change of the module would round it (`half`) or leave it without its numbers (`to_empty`).
    """

    def __init__(self, head_dim: int, base: float = 10_000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ShapeError(
                f"Rotary(head_dim={head_dim}): rotary positions rotate pairs of channels; expected an even head_dim"
            )
        if not isinstance(base, (int, float)) or not 0.0 < base < math.inf:
            raise ConfigError(f"Rotary(base={base!r}): expected a finite number above 0")
        self.head_dim, self.base = head_dim, float(base)
        self.register_buffer("frequency", torch.empty(0), persistent=False)  # on the default device
        self.frequency: Tensor
        self.reset_parameters()

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """Rotate x [b, h, n, d], whose first token has position `start`; shape and dtype are unchanged."""
        return rotated(x, *self.table(x, x.shape[-2], start))

    def table(self, x: Tensor, n: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [n, d/2] of the angles at n positions from `start` on, for `rotated(x, …)`: on the
        device of x, and float32 or wider."""
        wide = torch.promote_types(x.dtype, torch.float32)
        position = torch.arange(start, start + n, device=x.device, dtype=wide)
        frequency = self.frequency
        # Not the buffer for float64 inputs, nor where it was left on another device or cast other than by `_apply`.
        if frequency.dtype != wide or frequency.device != x.device:
            frequency = self._computed(x.device, wide)
        angle = position[:, None] * frequency
        return angle.cos(), angle.sin()

    def reset_parameters(self) -> None:
        """Compute `frequency` again on its device, as modules do after `to_empty`."""
        # On the CPU, so that the numbers are the same bits on every device, and for devices without float64.
        self.frequency = self._computed(torch.device("cpu"), torch.float32).to(self.frequency.device)

    def _computed(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device)
        return (self.base ** (-pairs / self.head_dim)).to(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        """What `to`, `half`, `to_empty` and the like call. A buffer that they return unchanged stays the same tensor,
        which a CUDA graph may read."""
        before = self.frequency
        super()._apply(fn, recurse)
        if self.frequency is not before:
            self.reset_parameters()
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any) -> None:
        """`load_state_dict(assign=True)` gives data to a module on the meta device without `_apply`."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        if self.frequency.is_meta and local_metadata.get("assign_to_params_buffers"):
            self.frequency = self._computed(torch.device("cpu"), torch.float32)

    def extra_repr(self) -> str:
        """The sizes, for print(module)."""
        return f"head_dim={self.head_dim}, base={self.base:g}"


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_t, x_{t + d/2}) of x […, d] by angles […, d/2] given by cosine and sine, as `Rotary.table`
    returns them; shape and dtype are unchanged."""
    one, two = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class Notes:
    """The description of a design. Every field is required.

    Letters in formulas: d = d_model, h heads, h_kv KV heads, d_k and d_v sizes of a key and a value; "MHA" is the
    standard layer with the same sizes.

    summary: what it is, in one line. use: when to use it. source: the paper.
    parameters: their number, without biases and norms. work: multiply-adds compared with MHA. cache: numbers per token.
    limits: what it does not support besides `takes_none_as`, and why.
    map: what its attention map does not show; None if only the weights of the map act on the values.
    compared: how `headwise plan designs` counts it, if that needs a remark; else None.
    form_of: the design that computes the same function, if it is another form of one; else None.
    """

    summary: str
    use: str
    source: str
    parameters: str
    work: str
    cache: str
    limits: Mapping[str, str]
    map: str | None
    compared: str | None
    form_of: str | None

    def __post_init__(self) -> None:
        """ConfigError for a field that is empty or of another type."""
        for name, (kind, expected) in _REQUIRED.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or (kind is not Mapping and not (value and all(value))):
                raise ConfigError(f"Notes: {name}={value!r}: expected {expected}")


_REQUIRED: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("summary", "use"), (str, "a sentence, tr(…)")),
    **dict.fromkeys(("source", "parameters", "work", "cache"), (str, "a few words")),
    "limits": (Mapping, "a mapping, {} where there are none"),
}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Another name of a design, with values of some of its options.

    summary: what it is, in one line, with its source. given: the values of options. instead: the name to use for other
    values of these options. needs: options that it requires, each with its meaning.
    """

    name: str
    summary: str
    given: Mapping[str, Any] = field(default_factory=dict)
    instead: str = ""
    needs: Mapping[str, str] = field(default_factory=dict)
