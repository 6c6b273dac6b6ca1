"""KV heads that hold other tokens attend apart: the outputs are those of all heads together, as a map needs them."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.cache import BudgetCache
from headwise.errors import HeadwiseError
from headwise.map.attention import attend
from headwise.masks import Causal, Grid, HeadWindows, Mask, Sinks, Window
from headwise.rule import Rule
from headwise.rule.lowering import lower

WINDOWS = [[4, None, 4, 1], [None, 3, 3, None], [7, 5, 7, 7], [6, 6, 6, 6]]
HEADS = 8


def tensor_of(kind: str, n: int, m: int) -> torch.Tensor:
    """The last n queries of a mask over m tokens, which is the same however they are split into calls."""
    whole = torch.rand(2, HEADS, 20, 20, generator=torch.Generator().manual_seed(1))
    whole = whole if kind == "heads" else whole[:, :1]
    part = whole[:, :, m - n : m, :m]
    return part.double() if kind == "floats" else (part > 0.3) | torch.eye(20, dtype=torch.bool)[m - n : m, :m]


OPTIONS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "causal": lambda n, m: {"mask": Causal()},
    "one query at a time": lambda n, m: {},
    "no mask": lambda n, m: {},
    "windows of query heads": lambda n, m: {"mask": Causal() & HeadWindows([2, 9, 3, 3, None, 5, 4, 4], 1)},
    "distances": lambda n, m: {"mask": Causal(), "score": hw.ALiBi.standard(HEADS)},
    "sinks of heads": lambda n, m: {"mask": Causal(), "score": (hw.SoftCap(3.0), hw.SinkLogits(torch.arange(8.0)))},
    "documents": lambda n, m: {"mask": Causal() & hw.Documents(torch.arange(m) // 6)},
    "a boolean tensor": lambda n, m: {"mask": tensor_of("all", n, m) & Causal().to_dense(n, m)},
    "a tensor of heads": lambda n, m: {"mask": tensor_of("heads", n, m) & Causal().to_dense(n, m)},
    "added numbers": lambda n, m: {"mask": tensor_of("floats", n, m).masked_fill(~Causal().to_dense(n, m), -torch.inf)},
}


@pytest.fixture
def layer() -> hw.MultiHeadAttention:
    torch.manual_seed(0)
    return hw.MultiHeadAttention(32, HEADS, num_kv_heads=4, rotary=True).double()


@pytest.mark.thorough
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_heads_apart_are_heads_together(layer: hw.MultiHeadAttention, windows: list[int | None], name: str) -> None:
    x = torch.randn(2, 20, 32).double()
    for stored in (None, "int8"):
        cache, seen = BudgetCache(windows, 2, stored=stored), 0
        for n in (1,) * 20 if name == "one query at a time" else (5, 1, 1, 6, 1, 1, 1, 4):
            part, seen = x[:, seen : seen + n], seen + n
            options, together = OPTIONS[name](n, seen), deepcopy(cache)
            expected, _ = layer(part, cache=together, return_map=True, **options)
            torch.testing.assert_close(layer(part, cache=cache, **options), expected, rtol=0, atol=1e-12)
            assert (cache.seen, cache.nbytes) == (together.seen, together.nbytes)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_gradients_are_those_of_a_full_pass(layer: hw.MultiHeadAttention, windows: list[int | None]) -> None:
    x, cache = torch.randn(2, 12, 32).double(), BudgetCache(windows, 1)
    parts = torch.cat([layer(part, mask=Causal(), cache=cache) for part in x.split([5, 1, 1, 5], 1)], 1)
    whole = layer(x, mask=Causal() & cache.mask(HEADS))
    found, expected = (torch.autograd.grad(y.square().sum(), list(layer.parameters())) for y in (parts, whole))
    for grad, other in zip(found, expected, strict=True):
        torch.testing.assert_close(grad, other)


def test_a_step_reads_no_more_than_is_held(layer: hw.MultiHeadAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []

    def counted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        read.append((k.shape[1], k.shape[2]))
        return attend(q, k, v, **options)

    cache, x = BudgetCache([4, None, 4, 1], 2), torch.randn(2, 20, 32).double()
    with torch.no_grad():
        layer(x[:, :19], mask=Causal(), cache=cache)
        monkeypatch.setattr("headwise.map.attention.attend", counted)
        layer(x[:, 19:], mask=Causal(), cache=cache)
    assert sorted(read) == [(1, 3), (1, 20), (2, 6)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"score": hw.SinkLogits(torch.zeros(3))}, "SinkLogits"),
        ({"score": hw.ALiBi(torch.ones(5))}, "ALiBi"),
        ({"mask": HeadWindows([2, 3])}, "2 windows for 8 query heads"),
        ({"mask": hw.Lengths([99, 1])}, "length 99"),
        ({"mask": torch.ones(2, 3, 1, 10, dtype=torch.bool)}, "does not broadcast"),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(
    layer: hw.MultiHeadAttention, options: dict[str, Any], words: str
) -> None:
    cache, x = BudgetCache([4, None, 4, 1], 2), torch.randn(2, 10, 32).double()
    layer(x[:, :9], mask=Causal(), cache=cache)
    held = cache.nbytes
    with pytest.raises(HeadwiseError, match=words):
        layer(x[:, 9:], cache=cache, **options)
    assert (cache.seen, cache.nbytes) == (9, held)


@pytest.mark.parametrize("n", [1, 5, 12])
def test_equal_windows_of_heads_are_ranges_of_keys(n: int) -> None:
    grid, mask = Grid(1, 2, n, 12), Causal() & HeadWindows([3, 3], 2)
    other: Mask = Causal() & (Window(3) | Sinks(2))
    found, expected = (lower(Rule(one, 1.0, grid)) for one in (mask, other))
    assert not isinstance(found, str)
    assert not isinstance(expected, str)
    assert found.dense is None
    assert torch.equal(found.spans, expected.spans)
    assert isinstance(lower(Rule(HeadWindows([3, 4]), 1.0, grid)), str)
    assert torch.equal(lower(Rule(HeadWindows([None, None]), 1.0, grid)).spans, torch.tensor([[[[0, 12]]] * n]).int())
