"""Hooks that copies of a module do not keep, and small questions about models and batches."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class Hook:
    """A hook of whoever follows a model. A copy of the model, by `deepcopy` or `pickle`, is not followed: its hooks do
    nothing and hold nothing of the original."""

    __name__ = "hook"

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        """Call it with the arguments of the module's hook."""
        return self._call(*args)

    @property
    def __globals__(self) -> Any:
        raise RuntimeError(
            "torch.jit.script does not support a module that is attached or watched: detach or stop first"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_nothing,)


def _nothing(*args: Any) -> None:
    pass


def around(module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> list[RemovableHandle]:
    """Hooks around the calls of a module: of several, the last one to begin is the first to end, also by a failure."""
    return [
        module.register_forward_pre_hook(Hook(before)),
        module.register_forward_hook(Hook(after), prepend=True, always_call=True),
    ]


@contextmanager
def called(modules: Mapping[nn.Module, str]) -> Iterator[set[str]]:
    """Within it, the names of the modules that were called so far."""
    names: set[str] = set()
    with ExitStack() as stack:
        for module, name in modules.items():
            hook = Hook(lambda *args, name=name: names.add(name))
            stack.callback(module.register_forward_pre_hook(hook).remove)
        yield names


def call_of(module: nn.Module, run: Callable[[], Any]) -> Any:
    """The arguments of the first call of a module while `run` runs, as a batch for `arguments`; None if none."""
    calls: list[tuple[Any, Any]] = []
    handle = module.register_forward_pre_hook(Hook(lambda _, *given: calls.append(given)), with_kwargs=True)
    try:
        run()
    finally:
        handle.remove()
    args, kwargs = calls[0] if calls else ((), None)
    return signature(module.forward).bind(*args, **kwargs).arguments if args and kwargs else args or kwargs


_OF_MODEL = "its code takes the width of its input for that of all heads together"
_OF_CONFIG = "its code reads the number of heads from the configuration, which is one for all layers"
_MADE_AGAIN = "its model makes it again from the configuration, for texts of another length"
_TOGETHER = "all its heads attend with the delays at which their mean autocorrelation is largest"

# By the family, a folder in transformers.models, and the class: several families have an `Attention`.
_WHY = {
    ("autoformer", "AutoformerAttention"): _TOGETHER,
    ("big_bird", "BigBirdBlockSparseAttention"): _MADE_AGAIN,
    ("big_bird", "BigBirdSelfAttention"): _MADE_AGAIN,
    ("dab_detr", "DetrAttention"): _OF_MODEL,
    ("fsmt", "Attention"): _OF_MODEL,
    ("granite_speech5", "GraniteSpeech5EncoderAttention"): _OF_CONFIG,
    ("groupvit", "GroupViTAttention"): _OF_MODEL,
    ("led", "LEDDecoderAttention"): _OF_MODEL,
    ("mask2former", "Mask2FormerAttention"): _OF_MODEL,
    ("moonshine", "MoonshineAttention"): _OF_CONFIG,
    ("moonshine_streaming", "MoonshineStreamingAttention"): _OF_CONFIG,
    ("oneformer", "OneFormerAttention"): _OF_MODEL,
    ("pegasus_x", "PegasusXGlobalLocalAttention"): _OF_MODEL,
    ("table_transformer", "TableTransformerAttention"): _OF_MODEL,
    ("trocr", "TrOCRAttention"): _OF_MODEL,
}


def fixed_code(module: nn.Module) -> str:
    """Why the number of heads of a module cannot change, in one sentence; "" if nothing is known against it."""
    for kind in type(module).__mro__:
        family = kind.__module__.split(".")[-2:-1]
        if family and (why := _WHY.get((family[0], kind.__name__))):
            return (
                f"{type(module).__name__} keeps its number of heads, as {why}. Mask heads instead: "
                f"headwise.models.scale_heads(find_heads(model), gates), with 0 for a head"
            )
    return ""


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments: those of a mapping by name, those of a tuple or list in order, else one."""
    if isinstance(batch, Mapping):
        return (), {str(name): value for name, value in batch.items()}
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def input_embedding(model: nn.Module) -> Tensor | None:
    """The embedding of each token id, [vocabulary, d], of a model with the method `get_input_embeddings`, such as those
    of transformers and headwise's decoder; None for other models, and for inputs that are not tokens."""
    find = getattr(model, "get_input_embeddings", None)
    if find is None:
        return None
    try:
        weight = getattr(find(), "weight", None)
    except NotImplementedError:  # transformers, of a model without tokens
        return None
    return weight.detach() if isinstance(weight, Tensor) and weight.ndim == 2 else None
