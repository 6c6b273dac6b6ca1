"""`nn.MultiheadAttention`, computed by headwise: the same constructor, call and parameters, and weights that are
computed on first use.

    >>> import torch, headwise as hw
    >>> model = torch.nn.Transformer(16, 4, 1, 1, 32, batch_first=True)
    >>> handle = hw.attach(model)                             # every attention of any model, in place
    >>> handle.attached
    ('encoder.layers.0.self_attn', 'decoder.layers.0.self_attn', 'decoder.layers.0.multihead_attn')
    >>> attention = model.encoder.layers[0].self_attn
    >>> x = torch.randn(1, 3, 16)
    >>> with torch.no_grad():
    ...     y, weights = attention(x, x, x)                   # weights are a tensor
    >>> weights.made, weights[0, 2].shape, weights.made
    (False, torch.Size([3]), False)
    >>> weights.map.shape                                     # with an AttentionMap
    (1, 4, 3, 3)
    >>> handle.detach()

Differences from PyTorch: a fully masked query gives zeros (before the output projection), not NaN; returned weights are
those before dropout (`headwise.models.adapters.weights.AttentionWeights`); hooks on `out_proj` are called; an
`is_causal` hint that contradicts `attn_mask` is ignored; `is_causal=True` requires no mask; floating masks may have any
dtype; there is no second path for inference, so `headwise.models.observe` receives every call; errors are
`HeadwiseError`s; `torch.jit.script` is not supported. docs/models.md has the full table.
"""

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from headwise.errors import ConfigError, DTypeError, ShapeError
from headwise.kernels import events
from headwise.map.arguments import of_additive, of_boolean, of_padding
from headwise.masks import Causal, Lengths, Mask, Sinks, is_causal
from headwise.masks.given import both
from headwise.models.adapters.weights import AttentionWeights
from headwise.nn.layout import check_share
from headwise.publishing import attended
from headwise.rule import Rule
from headwise.scores import Score

_CONVERTED = "_headwise_converted"


class MultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` computed by headwise: constructor, call, masks (True = ignore), defaults and state dict
    are PyTorch's, `add_bias_kv`, `add_zero_attn`, kdim, vdim and nested inputs included.

    The module's docstring lists the differences. `headwise.attach` converts those of a model to this class.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ShapeError(f"embed_dim={embed_dim} is not a positive multiple of num_heads={num_heads}")
        check_share("dropout", dropout)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.register_forward_hook(_nothing)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from query [L, N, E] to key [S, N, kdim] and value [S, N, vdim]; batch first if `batch_first`, and
        without N if unbatched.

        Args:
            key_padding_mask: [N, S] (unbatched: [S]), boolean with True = ignore, or floating, added to the scores.
            need_weights: also return the weights, as `AttentionWeights`.
            attn_mask: [L, S] or [N·h, L, S], boolean with True = ignore, or floating, added to the scores.
            average_attn_weights: weights [N, L, S], the mean over heads, instead of [N, h, L, S].
            is_causal: the mask is causal; without a mask, make it so.
        Returns:
            The output, shaped as the query, and the weights or None.
        Raises:
            ShapeError, DTypeError, ConfigError: naming the argument, what came and what fits.
        """
        if events.own_code and events.here().own_code and was_converted(self):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if query.is_nested:
            masked = is_causal or key_padding_mask is not None or attn_mask is not None
            return self._of_nested(query, key, value, masked, need_weights, average_attn_weights)
        batched = self._check(query, key, value)
        if not batched:
            same, kv = query is key, key is value
            query = query[None] if self.batch_first else query[:, None]
            key = query if same else key[None] if self.batch_first else key[:, None]
            value = key if kv else value[None] if self.batch_first else value[:, None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        q, k, v = self._heads(query, key, value)
        n, m = q.shape[2], key.shape[1 if self.batch_first else 0]
        before = k.shape[2] - m  # keys of the module's own
        mask, score = self._masks(attn_mask, key_padding_mask, is_causal, q, m, before)
        out, weights = self._attend(
            q, k, v, mask, score, need_weights, average_attn_weights, batched, before, to_itself=query is key
        )
        if self.batch_first:
            y = self.out_proj(out.transpose(1, 2).flatten(2))
        else:
            y = self.out_proj(out.permute(2, 0, 1, 3).reshape(n, -1, self.embed_dim))
        return (y if batched else y.squeeze(0 if self.batch_first else 1)), weights

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, score: tuple[Score, ...], need_weights: bool,
        averaged: bool, batched: bool, appended: int, *, to_itself: bool = True,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Every head's result [b, h, n, d], and the weights."""
        dropout_p = self.dropout if self.training else 0.0
        out, amap = attended(
            self, q, k, v, return_map=need_weights, to_itself=to_itself, at_end=to_itself or is_causal(mask),
            extra=appended, mask=mask, score=score, dropout_p=dropout_p,
        )  # fmt: skip
        if not need_weights or amap is None:
            return out, None
        tensors = (q, k, *(getattr(one, "values", None) for one in score))
        graph = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        rule = Rule(amap.rule.mask, amap.rule.scale, amap.rule.grid, score)
        weights = AttentionWeights(
            amap, q.dtype, averaged=averaged, batched=batched, appended=appended,
            graph=(q, k, rule) if graph else None, beside=True,
        )  # fmt: skip
        return out, weights

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Raise if the inputs do not fit this module or each other; returns whether they are batched."""
        widths = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        for (name, width), x in zip(widths.items(), (query, key, value), strict=True):
            if x.ndim not in (2, 3) or x.ndim != query.ndim or x.shape[-1] != width:
                batch = "batch, seq" if self.batch_first else "seq, batch"
                raise ShapeError(
                    f"{name}: expected [{batch}, {width}] or unbatched [seq, {width}], as many axes as query has, got "
                    f"shape {tuple(x.shape)}"
                )
        if key.shape[:-1] != value.shape[:-1]:
            raise ShapeError(f"value: shape {tuple(value.shape)} does not fit key {tuple(key.shape)}")
        at = 0 if self.batch_first else 1
        if query.ndim == 3 and query.shape[at] != key.shape[at]:
            raise ShapeError(f"key: a batch of {key.shape[at]}, and query has one of {query.shape[at]}")
        return query.ndim == 3

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [b, h, n, d], k and v [b, h, m, d]; the module's own keys come before the given ones."""
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if self.in_proj_weight is None:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        else:
            weights = self.in_proj_weight.chunk(3)
        if self.in_proj_weight is not None and query is key and key is value:
            q, k, v = linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            q, k, v = map(linear, (query, key, value), weights, biases)
        seq, batch = (1, 0) if self.batch_first else (0, 1)
        k, v = self._with_own_keys(k, self.bias_k, seq), self._with_own_keys(v, self.bias_v, seq)
        order = (batch, 2, seq, 3)
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).permute(order) for x in (q, k, v))
        return q, k, v

    def _with_own_keys(self, x: Tensor, bias: Tensor | None, seq: int) -> Tensor:
        """Prepend the keys or values of add_bias_kv and add_zero_attn: their order does not matter to attention, and
        queries remain aligned to the end of the keys."""
        shape = list(x.shape)
        shape[seq] = 1
        own = [] if bias is None else [bias.to(x.dtype).expand(shape)]
        own += [x.new_zeros(shape)] if self.add_zero_attn else []
        return torch.cat((*own, x), seq) if own else x

    def _masks(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool, q: Tensor, m: int, before: int
    ) -> tuple[Mask | None, tuple[Score, ...]]:
        """The mask, and the terms added to the scores."""
        b, h, n, _ = q.shape
        found: list[Mask | None] = []
        scores: tuple[Score, ...] = ()
        if key_padding_mask is not None:
            _expect("key_padding_mask", key_padding_mask, ((b, m),))
            if key_padding_mask.is_floating_point():
                mask, score = of_additive(key_padding_mask[:, None, None, :], n, before)
                scores += score
            else:
                mask = of_padding(~key_padding_mask, n, before)
            found.append(mask)
        if attn_mask is not None:
            _expect("attn_mask", attn_mask, ((n, m), (b * h, n, m)))
            cells = attn_mask[None, None] if attn_mask.ndim == 2 else attn_mask.view(b, h, n, m)
            if attn_mask.is_floating_point():
                mask, score = of_additive(cells, n, before)
                scores += score
            else:
                mask = of_boolean(~cells, before)
            found.append(mask)
        elif is_causal:
            if n != m:
                raise ConfigError(
                    f"is_causal=True without attn_mask: the alignment of {n} queries and {m} keys is "
                    f"ambiguous; give attn_mask"
                )
            found.append(Causal() | Sinks(before) if before else Causal())
        return both(*found), scores

    def _of_nested(
        self, query: Tensor, key: Tensor, value: Tensor, masked: bool, need_weights: bool, averaged: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attend in a nested tensor [N, *, E]: pad it, compute, and nest the result."""
        if query is not key or key is not value or masked:
            raise ConfigError(
                "nested inputs: only self attention without attn_mask, key_padding_mask and is_causal is defined for "
                "them; pad them (to_padded_tensor) and give key_padding_mask"
            )
        if not self.batch_first:
            raise ConfigError("nested inputs are [N, *, E] and need batch_first=True")
        lengths = [len(x) for x in query.unbind()]
        x = query.to_padded_tensor(0.0)
        q, k, v = self._heads(x, x, x)
        before = k.shape[2] - x.shape[1]
        mask = Lengths([length + before for length in lengths], lengths)
        out, weights = self._attend(q, k, v, mask, (), need_weights, averaged, True, before)
        y = self.out_proj(out.transpose(1, 2).flatten(2))
        rows = [row[:length] for row, length in zip(y, lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=query.layout), weights


def convert(module: nn.MultiheadAttention) -> None:
    """Convert a plain `nn.MultiheadAttention` to headwise, in place."""
    _change_class(module, MultiheadAttention)
    module.__dict__[_CONVERTED] = True
    module.register_forward_hook(_nothing)


def restore(module: nn.MultiheadAttention) -> None:
    """Undo `convert`."""
    _change_class(module, nn.MultiheadAttention)
    del module.__dict__[_CONVERTED]
    for key, hook in list(module._forward_hooks.items()):
        if hook is _nothing:
            del module._forward_hooks[key]


def _change_class(module: nn.MultiheadAttention, kind: type[nn.MultiheadAttention]) -> None:
    """Give a module a class, and to those who keep its bound `forward` on it, as wrappers of other libraries do, the
    one of that class."""
    before, module.__class__ = type(module), kind

    def rebound(x: Any) -> Any:
        if isinstance(x, MethodType) and x.__self__ is module and x.__func__ is before.forward:
            return kind.forward.__get__(module)
        if isinstance(x, partial) and (new := rebound(x.func)) is not x.func:
            return partial(new, *x.args, **x.keywords)
        return x

    for name, x in vars(module).items():
        if (new := rebound(x)) is not x:
            vars(module)[name] = new


def was_converted(module: nn.MultiheadAttention) -> bool:
    """Whether `convert` was called on it or on the module that it is a copy of."""
    return _CONVERTED in module.__dict__


def _nothing(module: nn.Module, inputs: Any, output: Any) -> None:
    """A hook without effect: `nn.TransformerEncoderLayer` uses its fused path unless a module in it has a hook."""


def _expect(name: str, mask: Tensor, shapes: tuple[tuple[int, ...], ...]) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise DTypeError(f"{name}: expected a boolean (True = ignore) or floating tensor, got {mask.dtype}")
    if mask.shape not in shapes:
        fits = " or ".join(str(shape) for shape in shapes)
        raise ShapeError(f"{name}: expected shape {fits}, got {tuple(mask.shape)}")
