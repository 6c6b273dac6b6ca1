"""A trace: a layer of a design with random weights, followed through all its steps."""

from collections.abc import Mapping
from typing import Any

import torch

from headwise.errors import ConfigError
from headwise.masks import Causal
from headwise.nn.named import build
from headwise.nn.registry import CONTRACT, STANDARD
from headwise.nn.steps import Step, Steps


def trace(
    seq: int = 4,
    d_model: int = 8,
    num_heads: int = 2,
    *,
    design: str = STANDARD,
    num_kv_heads: int | None = None,
    options: Mapping[str, Any] | None = None,
    batch: int = 1,
    causal: bool = False,
    seed: int = 0,
    lang: str = "en",
) -> list[Step]:
    """Every step of a head design on a random input, self attention, computed by its definition.

    The last step is checked against the module itself; they agree to float32 rounding.

    Args:
        design: by name, as in `headwise.nn.named`; options: its own, such as {"top_k": 1}.
        lang: "en" or "zh".
    Raises:
        ConfigError: for options out of range, and for a design whose `steps` are not those of its call.
    """
    if lang not in ("en", "zh"):
        raise ConfigError(f"lang={lang!r}: expected 'en' or 'zh'")
    if min(seq, batch, d_model) < 1:
        raise ConfigError(f"seq={seq}, batch={batch}, d_model={d_model}: expected at least 1 each")
    given = dict(options or {})
    if given.get("context_dim") not in (None, d_model) or given.get("out_dim") not in (None, d_model):
        raise ConfigError(
            "options: trace supports self attention from d_model to d_model only; leave out the other widths"
        )
    if num_kv_heads is not None:
        given["num_kv_heads"] = num_kv_heads
    generator = torch.Generator().manual_seed(seed)
    layer = build(design, d_model, num_heads, given).eval()
    note = Steps(lang, causal)
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            if "norm" not in key and key not in ("centres", "sharpness"):  # those are what they are by design
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / d_model**0.5)
        x = torch.randn(batch, seq, d_model, generator=generator)
        expected = layer(x, mask=Causal() if causal else None)
        layer.steps(note("x", x, "b n d_model", "X", "the input: one vector a token", "输入：每个词元一个向量"), note)
    last = note.steps[-1]
    try:
        torch.testing.assert_close(last.tensor, expected, rtol=1e-4, atol=1e-5)
    except AssertionError as error:
        raise ConfigError(
            f"design={design!r}: the last step of {type(layer).__name__}.steps, {last.name!r}, is not y of the call: "
            f"{' '.join(str(error).split())} Expected {CONTRACT['steps']}, the last of which is y"
        ) from None
    return note.steps
