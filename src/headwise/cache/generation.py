"""KV caches for `generate` of models of transformers whose attention headwise computes.

    model = AutoModelForCausalLM.from_pretrained(folder)
    cache = hw.cache.for_transformers(model, hw.edit.read_budget("budget.json"), stored="int8")
    with hw.attach(model):
        model.generate(**inputs, past_key_values=cache)

transformers makes one mask for all layers and heads, over all tokens so far. The caches therefore say that they hold
all tokens, and give the attention `Kept` keys and values: their sizes, and the cache, of which headwise's attention
reads what each head holds, quantized keys as they are. Rotary positions are in the keys before they are stored.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from headwise.cache.base import StoredCache
from headwise.cache.kinds import BudgetCache, KVCache, SlidingCache
from headwise.errors import ConfigError, not_installed

LAYERS = "DynamicLayer", "DynamicSlidingWindowLayer"  # of transformers' own caches: all tokens, or a window of them
_SIZES = {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")} | {
    Tensor.size, Tensor.dim, Tensor.numel
}  # fmt: skip


class Kept(Tensor):
    """The keys, or the values, of all tokens of a cache and new ones, [b, h_kv, m, d]. It has sizes and no numbers:
    headwise's attention calls `taken`, and everything else raises."""

    given: tuple[Any, Tensor, Tensor]  # the cache, and the keys and values to append
    at: int  # tokens of the cache before them

    @staticmethod
    def of(cache: StoredCache, like: Tensor, given: tuple[Any, Tensor, Tensor]) -> "Kept":
        """One of the sizes of `like` after those of the cache."""
        b, h, n, d = like.shape
        shape = b, h, cache.seen + n, d
        found: Any = Tensor._make_wrapper_subclass(Kept, shape, dtype=like.dtype, device=like.device)
        found.given, found.at = given, cache.seen
        kept: Kept = found
        return kept

    def taken(self) -> tuple[Any, Tensor, Tensor]:
        """The cache, and keys and values [b, h_kv, n, d] to append to it."""
        if self.given[0].seen != self.at:
            raise ConfigError("past_key_values: the keys of a layer are read twice; it supports layers with their own")
        return self.given

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SIZES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise ConfigError(
            "past_key_values: a cache of hw.cache.for_transformers holds keys that only headwise's attention can read, "
            "and this attention is not headwise's; call hw.attach(model) first, or leave out past_key_values"
        )

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Kept({list(self.shape)}, {self.dtype}, of {self.given[0]!r})"


class GenerationLayer:
    """A layer of `GenerationCache`: transformers' `CacheLayerMixin` around a cache of headwise."""

    keys = values = None
    is_compileable = is_sliding = supports_early_init = record_past = False

    def __init__(self, cache: StoredCache) -> None:
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first keys say what is stored."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of all tokens, for headwise's attention, which appends the new ones."""
        k, v = key_states.to(value_states.dtype), value_states  # under autocast norms widen keys
        kind = self.cache._kind_of(k, v)
        windows = getattr(self.cache, "windows", None)
        if windows is not None and len(windows) != kind.heads:
            raise ConfigError(f"budget: was made for layers of {len(windows)} KV heads; this model has {kind.heads}")
        given = self.cache, k, v
        return Kept.of(self.cache, k, given), Kept.of(self.cache, v, given)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Those of all tokens: heads that hold fewer leave out the columns of the others."""
        return self.cache.seen + query_length, 0

    def get_seq_length(self) -> int:
        """All tokens so far, whichever are held: the position of the next one."""
        return self.cache.seen

    def get_max_length(self) -> int:
        """−1: any number of tokens."""
        return -1

    @property
    def is_initialized(self) -> bool:
        """Whether there are tokens."""
        return self.cache.seen > 0

    @property
    def batch_size(self) -> int:
        """The number of entries of the batch; −1 if it is not known yet."""
        found = self.cache._batch
        return -1 if found is None else found

    @property
    def is_croppable(self) -> bool:
        """Whether any number of tokens can be taken back."""
        return self.cache.only_appends

    def activate_past_recording(self) -> None:
        """Raise ConfigError if tokens cannot be taken back, as assisted decoding does."""
        if not self.is_croppable:
            raise ConfigError(
                f"past_key_values: {type(self.cache).__name__} drops tokens for good, and assisted decoding takes "
                f"rejected ones back; use hw.cache.for_transformers without budget for a model without sliding windows"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove −tokens_to_remove tokens at the end."""
        if tokens_to_remove > 0:  # a length in older versions of transformers
            raise ConfigError(f"crop({tokens_to_remove}): expected the negative number of tokens to remove")
        self.cache.crop(self.cache.seen + tokens_to_remove)

    def reset(self) -> None:
        """Hold no tokens."""
        self.cache.crop(0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these entries of the batch, in this order."""
        self.cache.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each entry of the batch."""
        if self.cache._batch is not None:
            self.cache.select(torch.arange(self.cache._batch, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these entries of the batch."""
        self.cache.select(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)


class GenerationCache:
    """A `transformers.Cache`, made by `for_transformers`, whose layers store their keys in caches of headwise.

    Only attention that headwise computes (`hw.attach(model)`) can read it. Beam search, chunked prefill, continued
    generation and `copy.deepcopy` work as with other caches.
    """

    layers: list[Any]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """The keys and values of a layer's tokens so far and of the new ones, for headwise's attention."""
        caches = self.caches
        if layer_idx >= len(caches):
            raise ConfigError(
                f"past_key_values: made for a model of {len(caches)} layers, and this one has a layer {layer_idx}; "
                f"make one by hw.cache.for_transformers(model)"
            )
        before = caches[layer_idx - 1].seen - (key_states.shape[2] if layer_idx else 0)
        if caches[layer_idx].seen != before:
            raise ConfigError(
                f"past_key_values: layer {layer_idx} has {caches[layer_idx].seen} tokens and should have {before}: in "
                f"each forward pass every layer appends its keys once, in order. After a pass that failed, make a new "
                f"cache; encoder-decoder models and layers that share keys are not supported"
            )
        return self.layers[layer_idx].update(key_states, value_states)

    @property
    def caches(self) -> list[StoredCache]:
        """headwise's cache of each layer."""
        return [layer.cache for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values in use, of all layers."""
        return sum(cache.nbytes for cache in self.caches)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        seen = self.caches[0].seen
        return f"GenerationCache({len(self.layers)} layers): {seen:,} tokens seen, {self.nbytes:,} bytes held"


def for_transformers(model: Any, budget: Any = None, *, stored: str | None = None) -> Any:
    """A new KV cache for `model.generate(…, past_key_values=cache)`, of a model whose attention headwise computes.

    Every KV head keeps the tokens that the budget gives it, and its attention is over these alone, the same as in a
    full pass with the budget's masks. Layers with sliding windows keep at most their window. Positions are those of
    the tokens, whatever is dropped.

    Args:
        model: a decoder of transformers whose layers are all full or sliding-window attention with keys of their own,
            such as Llama, Qwen, Mistral and Gemma; or its configuration.
        budget: a `Budget` of `hw.edit.budget`, or of a file of `headwise budget`, read by `hw.edit.read_budget`; None
            keeps all tokens. With `sinks`, prompts of a batch must have one length: the first tokens of padded ones
            are padding.
        stored: as in `KVCache`: None, or "int8", which decoding reads without restoring it, "bfloat16", "float16" and
            "float32".
    Returns:
        `GenerationCache`, a `transformers.Cache`. Its `nbytes` are those in use.
    Raises:
        ConfigError: for a budget of another model, and for models whose layers keep something else than keys and
            values of their own; in `generate`, if the model is not attached, or has an encoder.
        DTypeError, DeviceError: in `generate`, if the model was moved since the cache has tokens.
    """
    try:
        theirs = import_module("transformers.cache_utils")
    except ImportError:
        raise not_installed("hw.cache.for_transformers", "transformers") from None
    config = getattr(model, "config", model)
    if not hasattr(config, "model_type"):
        raise ConfigError(
            f"for_transformers(model): expected a model of transformers or its configuration, got "
            f"{type(model).__name__}"
        )
    plain = theirs.DynamicCache(config=config).layers
    if other := sorted({type(one).__name__ for one in plain} - {*LAYERS}):
        raise ConfigError(
            f"for_transformers(model): {config.model_type} has layers whose caches are {', '.join(other)}; supported "
            f"are layers of full or sliding-window attention. Leave out past_key_values, so that it makes its own cache"
        )
    if budget is not None:
        _check_budget(model, budget, len(plain))
    caches = [
        _cache(vars(one).get("sliding_window"), None if budget is None else budget.windows[i],
               getattr(budget, "sinks", 0), stored)
        for i, one in enumerate(plain)
    ]  # fmt: skip
    layer, whole = _classes(theirs)
    return whole(layers=[layer(cache) for cache in caches])


def described_model(model: Any) -> str:
    """What a budget file says of the model that it was made for."""
    return f"{type(model).__name__} with {model.num_parameters():,} parameters"


def _check_budget(model: Any, budget: Any, layers: int) -> None:
    if not hasattr(budget, "windows") or not hasattr(budget, "sinks"):
        raise ConfigError(
            f"for_transformers(budget={budget!r}): expected a budget, of hw.edit.budget(…) or "
            f"hw.edit.read_budget('budget.json')"
        )
    made = getattr(budget, "model", "")
    if made and hasattr(model, "num_parameters") and made != (here := described_model(model)):
        raise ConfigError(
            f"budget: was made for a {made}, and this is a {here}; to use it all the same, give model.config as model"
        )
    if len(budget.windows) != layers:
        raise ConfigError(f"budget: was made for a model of {len(budget.windows)} layers; this one has {layers}")


def _cache(window: int | None, windows: Any, sinks: int, stored: str | None) -> StoredCache:
    """The cache of a layer with a sliding window, or without."""
    if windows is not None and window is not None:
        windows = [window if one is None else min(one, window) for one in windows]
    if windows is None or all(one == window for one in windows):
        return KVCache(stored=stored) if window is None else SlidingCache(window, stored=stored)
    return BudgetCache(windows, sinks, stored=stored)


@lru_cache(maxsize=1)
def _classes(theirs: Any) -> tuple[Any, Any]:
    """The classes as those of transformers, which is imported when a cache is made."""
    pairs = (GenerationLayer, theirs.CacheLayerMixin), (GenerationCache, theirs.Cache)
    layer, whole = (type(bases[0].__name__, bases, {"__module__": __name__}) for bases in pairs)
    return layer, whole
