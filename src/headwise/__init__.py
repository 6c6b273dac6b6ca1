"""headwise: multi-head attention that is fast and visible. The matrix is never stored, yet used as one.

>>> import torch, headwise as hw
>>> q, k, v = torch.randn(3, 1, 4, 256, 32)                     # [batch, heads, seq, head_dim]
>>> out, amap = hw.attend(q, k, v, mask=hw.Causal(), return_map=True)
>>> amap[0, 3, 100:102, 0:102].shape                             # exact weights of any tile
torch.Size([2, 102])
>>> sorted(amap.measure("entropy", "max_logit"))                 # statistics of each head, in one pass
['entropy', 'max_logit']
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Namespaces, and where each name on top lives. All are imported when first used, so that `import headwise` is quick.
_NAMESPACES = (
    "analysis",
    "base",
    "cache",
    "commands",
    "corpus",
    "costs",
    "edit",
    "errors",
    "interventions",
    "kernels",
    "lm",
    "losses",
    "masks",
    "models",
    "nn",
    "parallel",
    "reports",
    "scores",
    "stats",
    "table",
    "telemetry",
    "testing",
    "wording",
)
_HOMES = {
    "map.attention": ["attend"],
    "cache": ["KVCache"],
    "errors": [
        "CheckpointError",
        "ConfigError",
        "DTypeError",
        "DeviceError",
        "HeadwiseError",
        "KernelError",
        "ShapeError",
        "TextError",
    ],
    "kernels": ["use_kernel"],
    "lm.loading": ["load_model"],
    "map": ["AttentionMap"],
    "masks": ["Causal", "Dense", "Documents", "Lengths", "Sinks", "Window"],
    "models": ["attach", "find_heads", "intervene"],
    "nn": ["MultiHeadAttention", "TransformerBlock"],
    "reports.see": ["report", "see", "show"],
    "scores": ["ALiBi", "Bias", "RelativeBias", "SinkLogits", "SoftCap"],
    "table": ["HeadTable"],
    "telemetry": ["watch"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted([*_HOME_OF, *_NAMESPACES])

if TYPE_CHECKING:
    from headwise import (
        analysis as analysis,
        base as base,
        cache as cache,
        commands as commands,
        corpus as corpus,
        costs as costs,
        edit as edit,
        errors as errors,
        interventions as interventions,
        kernels as kernels,
        lm as lm,
        losses as losses,
        masks as masks,
        models as models,
        nn as nn,
        parallel as parallel,
        reports as reports,
        scores as scores,
        stats as stats,
        table as table,
        telemetry as telemetry,
        testing as testing,
        wording as wording,
    )
    from headwise.cache import KVCache as KVCache
    from headwise.errors import (
        CheckpointError as CheckpointError,
        ConfigError as ConfigError,
        DeviceError as DeviceError,
        DTypeError as DTypeError,
        HeadwiseError as HeadwiseError,
        KernelError as KernelError,
        ShapeError as ShapeError,
        TextError as TextError,
    )
    from headwise.kernels import use_kernel as use_kernel
    from headwise.lm.loading import load_model as load_model
    from headwise.map import AttentionMap as AttentionMap
    from headwise.map.attention import attend as attend
    from headwise.masks import (
        Causal as Causal,
        Dense as Dense,
        Documents as Documents,
        Lengths as Lengths,
        Sinks as Sinks,
        Window as Window,
    )
    from headwise.models import attach as attach, find_heads as find_heads, intervene as intervene
    from headwise.nn import MultiHeadAttention as MultiHeadAttention, TransformerBlock as TransformerBlock
    from headwise.reports.see import report as report, see as see, show as show
    from headwise.scores import (
        ALiBi as ALiBi,
        Bias as Bias,
        RelativeBias as RelativeBias,
        SinkLogits as SinkLogits,
        SoftCap as SoftCap,
    )
    from headwise.table import HeadTable as HeadTable
    from headwise.telemetry import watch as watch


def __getattr__(name: str) -> Any:
    if name in _NAMESPACES:
        return import_module(f"headwise.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}{_elsewhere(name)}")
    value = getattr(import_module(f"headwise.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def _elsewhere(name: str) -> str:
    """Where a name lies that is not on top."""
    if name.startswith("_") or find_spec(f"headwise.{name}") is not None:
        return ""  # a module, which `from headwise import name` looks up here before it is imported
    homes = [space for space in _NAMESPACES if name in import_module(f"headwise.{space}").__all__]
    return f"; it is headwise.{homes[0]}.{name}" if homes else ""


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
