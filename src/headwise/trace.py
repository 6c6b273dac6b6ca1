"""Multi-head attention step by step, on real tensors, with every shape: for learning and teaching."""

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from headwise.errors import ConfigError
from headwise.heads.multi_head import MultiHeadAttention
from headwise.masks import Causal

MOST_ROWS, MOST_COLS = 6, 8  # of a matrix, in the numeric example

# Each step: formula, what happens in English, what happens in Chinese.
WORDS = {
    "x": ("X", "the input: one vector a token", "输入：每个词元一个向量"),
    "q": ("Q = X W_Q", "queries of all heads side by side", "所有头的查询，并排放置"),
    "k": ("K = X W_K", "keys of all key heads", "所有键头的键"),
    "v": ("V = X W_V", "values of all key heads", "所有键头的值"),
    "q_split": ("split Q", "the last axis is cut into heads", "把最后一维切分成各个头"),
    "q_heads": (
        "transpose",
        "heads before tokens: each head is a matrix of its own",
        "转置：头在前，每个头自成一个矩阵",
    ),
    "k_heads": ("split, transpose K", "the same for the keys", "对键做同样的切分与转置"),
    "v_heads": ("split, transpose V", "the same for the values", "对值做同样的切分与转置"),
    "scores": ("S = Q Kᵀ / √d_k", "how well each query fits each key", "每个查询与每个键的匹配程度"),
    "masked": ("S + mask", "a query may not look ahead: −∞ there", "查询不能看后面的词元：该处为 −∞"),
    "weights": ("P = softmax(S)", "each row becomes weights that sum to one", "每一行变成和为一的权重"),
    "heads": ("H = P V", "each head: the weighted sum of the values", "每个头：值的加权和"),
    "back": ("transpose", "tokens before heads again", "转置：词元重新排在头之前"),
    "concat": ("A = Concat(H)", "the heads side by side", "把各个头并排拼接"),
    "output": ("Y = A W_O", "the output projection mixes the heads", "输出投影把各个头混合起来"),
}


@dataclass(frozen=True)
class Step:
    """One step: its formula, what it does, the tensor and the names of its axes."""

    name: str
    formula: str
    words: str
    tensor: Tensor
    axes: str


def trace(
    seq: int = 4,
    d_model: int = 8,
    num_heads: int = 2,
    *,
    num_kv_heads: int | None = None,
    batch: int = 1,
    causal: bool = False,
    seed: int = 0,
    lang: str = "en",
) -> list[Step]:
    """Every step of `MultiHeadAttention` on a random input, computed by its definition.

    The last step is checked against the module itself; they agree to float32 rounding. `lang` is "en" or "zh".
    """
    if lang not in ("en", "zh"):
        raise ConfigError(f"lang={lang!r}: expected 'en' or 'zh'")
    if min(seq, batch, d_model) < 1:
        raise ConfigError(f"seq={seq}, batch={batch}, d_model={d_model}: expected at least 1 each")
    generator = torch.Generator().manual_seed(seed)
    module = MultiHeadAttention(d_model, num_heads, num_kv_heads=num_kv_heads)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / d_model**0.5)
        x = torch.randn(batch, seq, d_model, generator=generator)
        steps = _steps(module, x, causal, 1 if lang == "zh" else 0)
        expected = module(x, mask=Causal() if causal else None)
    torch.testing.assert_close(steps[-1].tensor, expected, rtol=1e-4, atol=1e-5)
    return steps


def _steps(module: MultiHeadAttention, x: Tensor, causal: bool, lang: int) -> list[Step]:
    steps: list[Step] = []

    def note(name: str, tensor: Tensor, axes: str) -> Tensor:
        formula, *words = WORDS[name]
        steps.append(Step(name, formula, words[lang], tensor, axes))
        return tensor

    b, n, _ = x.shape
    h, h_kv, d = module.num_heads, module.num_kv_heads, module.head_dim
    note("x", x, "b n d_model")
    q = note("q", module.q_proj(x), "b n h·d_k")
    k = note("k", module.k_proj(x), "b n h_kv·d_k")
    v = note("v", module.v_proj(x), "b n h_kv·d_v")
    q = note("q_split", q.view(b, n, h, d), "b n h d_k")
    q = note("q_heads", q.transpose(1, 2), "b h n d_k")
    k = note("k_heads", k.view(b, n, h_kv, d).transpose(1, 2), "b h_kv n d_k")
    v = note("v_heads", v.view(b, n, h_kv, d).transpose(1, 2), "b h_kv n d_v")
    k, v = (t.repeat_interleave(h // h_kv, dim=1) for t in (k, v))  # spelled out here; the kernels never repeat
    scores = note("scores", q @ k.mT / d**0.5, "b h n m")
    if causal:
        scores = note("masked", scores.masked_fill(~Causal().to_dense(n, n), -torch.inf), "b h n m")
    weights = note("weights", scores.softmax(-1), "b h n m")
    heads = note("heads", weights @ v, "b h n d_v")
    heads = note("back", heads.transpose(1, 2), "b n h d_v")
    concat = note("concat", heads.flatten(2), "b n h·d_v")
    note("output", module.o_proj(concat), "b n d_model")
    return steps


def print_trace(steps: list[Step], console: Console) -> None:
    """Each step with its shape, and the numbers of the first batch entry and head."""
    for i, step in enumerate(steps, 1):
        shape = " × ".join(map(str, step.tensor.shape))
        line = Text(f"{i:2}  ", style="dim") + Text(f"{step.formula:<20}", style="bold")
        console.print(line + Text(f"[{shape}]", style="cyan") + Text(f"  ({step.axes})", style="dim"))
        console.print(Text("    " + step.words, style="italic"))
        for row in _numbers(step.tensor):
            console.print(Text("      " + row), no_wrap=True, crop=True)
        console.print()


def _numbers(tensor: Tensor) -> list[str]:
    while tensor.ndim > 2:
        tensor = tensor[0]
    rows = [" ".join(f"{x:7.3f}" for x in row[:MOST_COLS].tolist()) for row in tensor[:MOST_ROWS]]
    if tensor.shape[1] > MOST_COLS:
        rows = [row + " …" for row in rows]
    return rows + ["…"] * (tensor.shape[0] > MOST_ROWS)
