"""The registry of kinds of attention modules, and the search of a model for them."""

from torch import nn

from headwise.errors import ConfigError
from headwise.models.bert import BertKind
from headwise.models.four_maps import BartKind, DistilBertKind, T5Kind, ViTKind
from headwise.models.gpt2 import Gpt2Kind
from headwise.models.headwise_designs import HeadwiseKind
from headwise.models.llama import LlamaKind
from headwise.models.site import HeadSite, Kind
from headwise.models.torch_attention import TorchKind

KINDS: list[Kind] = [
    HeadwiseKind(), TorchKind(), BertKind(), Gpt2Kind(), LlamaKind(), BartKind(), ViTKind(),
    DistilBertKind(), T5Kind(),
]  # fmt: skip


def register(kind: Kind) -> Kind:
    """Register a kind of attention modules, to be tried after the others. Returns it.

    Raises:
        ConfigError: if it is no `Kind`, or another one has its name.
    """
    if not isinstance(kind, Kind):
        raise ConfigError(f"register({kind!r}): expected a headwise.models.Kind")
    if any(other.name == kind.name and type(other) is not type(kind) for other in KINDS):
        raise ConfigError(f"register({type(kind).__name__}): there is another kind {kind.name!r}; give it another name")
    KINDS[:] = [*(other for other in KINDS if other.name != kind.name), kind]
    return kind


def find_heads(model: nn.Module) -> list[HeadSite]:
    """Every attention module of a model whose kind is registered, in the order of registration in the model.

    >>> import headwise as hw
    >>> [site.name for site in find_heads(hw.TransformerBlock(hw.MultiHeadAttention(16, 4), d_ff=32))]
    ['attention']

    They are recognised by class or by structure; transformers is not imported. A module that occurs twice is listed
    once.

    Raises:
        ConfigError: naming the known kinds, if there is none.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={type(model).__name__}: expected an nn.Module")
    found = [
        site
        for name, module in model.named_modules()
        for site in (kind.site(name, module) for kind in KINDS)
        if site is not None
    ]
    if not found:
        known = "; ".join(f"{kind.name}: {kind.about}" for kind in KINDS)
        raise ConfigError(f"model={type(model).__name__}: no attention heads of a known kind in it. Known: {known}")
    return found
