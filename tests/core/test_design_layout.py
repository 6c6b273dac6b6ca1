"""What a design says of its heads is so: the slices of head i are those that change head i, and nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from design_samples import ONCE, design, given
from torch import Tensor, nn

import headwise as hw
from headwise.costs.work import Counts
from headwise.errors import ConfigError
from headwise.models import find_heads, scale_heads
from headwise.nn.base import AttentionLayer
from headwise.nn.layout import INDEPENDENT, Layout, Part, Resizing
from headwise.nn.registry import DESIGNS
from headwise.nn.steps import Steps
from headwise.testing import check_design

# At its default sharpness a head of a convolution reads one place to rounding, whatever moves it by less than half.
MOVABLE = [case for case in ONCE if getattr(case, "values", case) != ("convolution", {})]
every_design = pytest.mark.parametrize(("name", "options"), ONCE, ids=lambda value: str(value))


def heads_of(module: AttentionLayer, x: Tensor) -> Tensor:
    """Concat(head_1 … head_h) as [b, n, h, d_v]."""
    concat: Tensor = module(x, return_concat=True)[1]
    return concat.unflatten(-1, (module.num_heads, module.value_dim))


def changed(before: Tensor, after: Tensor) -> set[int]:
    """The heads of [b, n, h, d_v] that differ beyond rounding."""
    far = (after - before).abs().amax((0, 1, 3)) > 1e-9
    return set(far.nonzero().flatten().tolist())


@contextmanager
def moved(x: Tensor) -> Iterator[None]:
    """While open, other numbers in the place of these."""
    kept = x.detach().clone()
    with torch.no_grad():
        x.add_(0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64))
        yield
        x.copy_(kept)


def piece(part: Part, head: int) -> Tensor:
    """The numbers of one head."""
    x = part.tensor
    if isinstance(x, nn.ParameterList):
        return x[head].detach()
    entries = part.entries(head)
    return x.detach().narrow(part.axis, entries.start, part.width)


def count(module: AttentionLayer, part: Part) -> int:
    """How many heads the part has a piece for."""
    return module.num_heads if part.heads == "query" else module.num_kv_heads


def read_by(module: AttentionLayer, part: Part, head: int) -> set[int]:
    """The query heads that the piece belongs to."""
    group = module.num_heads // count(module, part)
    return set(range(head * group, (head + 1) * group))


@pytest.mark.thorough_beyond(4)
@every_design
def test_the_slices_of_an_output_map_take_that_head_and_no_other(name: str, options: dict[str, Any]) -> None:
    module, x = design(name, options), given()
    outputs = [part for part in module.layout().parts if part.letter == "o"]
    assert bool(outputs) == (module.coupling.at != "output")
    sites, h = find_heads(module), module.num_heads
    used = heads_of(module, x).abs().amax((0, 1, 3)) > 0
    for part in outputs:
        for head in range(h):
            alone = torch.zeros(h).double().index_fill(0, torch.tensor([head]), 1.0)
            for gate, reads in ((alone, bool(used[head])), (1 - alone, False)):
                with scale_heads(sites, [gate]):
                    plain = module(x)
                    with moved(piece(part, head)):
                        assert torch.allclose(module(x), plain, atol=1e-9) != reads, (part.name, head)


@pytest.mark.parametrize("name", [name for name in DESIGNS if DESIGNS[name].coupling.at])
def test_one_sentence_says_why_heads_depend_on_each_other(name: str) -> None:
    kind, module = DESIGNS[name], design(name, {})
    with pytest.raises(ConfigError, match="cannot lose a head") as cut:
        hw.edit.prune(module, [0])
    with pytest.raises(ConfigError, match="cannot be spread over ranks") as spread:
        hw.parallel.head_parallel_plan(module)
    assert kind.coupling.why
    assert kind.coupling.why in str(cut.value)
    assert kind.coupling.why in str(spread.value)
    if kind.coupling.at != "output":
        with pytest.raises(ConfigError) as silent:
            hw.telemetry.gate_gradients(module)
        assert kind.coupling.why in str(silent.value)


def test_one_sentence_says_why_no_head_can_go() -> None:
    module = design("block_diagonal", {})
    with pytest.raises(ConfigError, match="BlockDiagonalAttention cannot lose a head: head i reads") as cut:
        hw.edit.prune(module, [0])
    with pytest.raises(ConfigError, match="BlockDiagonalAttention cannot be spread over ranks") as spread:
        hw.parallel.head_parallel_plan(module)
    assert module.resizing.fixed in str(cut.value)
    assert module.resizing.fixed in str(spread.value)


class Packed(AttentionLayer):
    """Queries, keys and values by one map, and a temperature a head: a design of somebody's own."""

    coupling = INDEPENDENT
    resizing = Resizing()
    outside_attend = ""
    notes = hw.MultiHeadAttention.notes

    def __init__(self, d_model: int, num_heads: int, **options: Any) -> None:
        super().__init__(d_model, num_heads, **options)
        h, h_kv, d, e = self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim
        self.qkv = nn.Linear(d_model, h * d + h_kv * (d + e), bias=False)
        self.temperature = nn.Parameter(torch.ones(h))
        self.out = nn.Linear(h * e, d_model)

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As in `AttentionLayer`."""
        h, h_kv, d, e = self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim
        packed = self.qkv(x).split((h * d, h_kv * d, h_kv * e), -1)
        q, k, v = (y.unflatten(-1, (-1, size)).transpose(1, 2) for y, size in zip(packed, (d, d, e), strict=True))
        return q * self.temperature[:, None, None], k, v

    def output(self, concat: Tensor) -> Tensor:
        """As in `AttentionLayer`."""
        y: Tensor = self.out(concat)
        return y

    @staticmethod
    def costs(d_model: int, num_heads: int, **options: Any) -> Counts:
        """As in `AttentionLayer`: the temperatures and a bias more than the standard layer."""
        full = hw.MultiHeadAttention.costs(d_model, num_heads, **options)
        return replace(full, parameters=full.parameters + num_heads + d_model)

    def steps(self, x: Tensor, note: Steps) -> None:
        """As in `AttentionLayer`."""
        concat = note.side_by_side(note.back(note.attended(*self.project(x, x))))
        note("y", self.out(concat), "b n d_model", "Y = A W_O", "the output")

    def layout(self) -> Layout:
        """As in `AttentionLayer`."""
        h, h_kv, d, e = self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim
        places = [("q", "query", d, 0), ("k", "key", d, h * d), ("v", "key", e, (h + h_kv) * d)]
        parts = [Part(letter, self.qkv, "weight", 0, heads, width, start) for letter, heads, width, start in places]
        own = Part("temperature", self, "temperature", 0, "query", 1)
        return Layout((*parts, own)).into(self.out, e)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> AttentionLayer:
    monkeypatch.setitem(DESIGNS, "packed", Packed)
    return design("packed", {"num_kv_heads": 3, "head_dim": 3, "value_dim": 5})


@pytest.mark.thorough
def test_a_design_of_ones_own_holds_the_contract_too(packed: AttentionLayer) -> None:
    check_design("packed", num_kv_heads=3, head_dim=3, value_dim=5)


def test_a_design_of_ones_own_is_found_read_and_pruned(packed: AttentionLayer) -> None:
    model = nn.Sequential(packed)
    (site,) = find_heads(model)
    assert (site.num_heads, site.num_kv_heads, site.output) == (6, 3, packed.get_submodule("out"))
    assert {letter: tuple(x.shape) for letter, x in site.weights().items()} == {
        "q": (6, 12, 3), "k": (3, 12, 3), "v": (3, 12, 5), "o": (6, 5, 12)
    }  # fmt: skip
    gone, x = [0, 1, 4, 5], given()
    with scale_heads([site], [torch.tensor([0.0, 0, 1, 1, 0, 0]).double()]):
        masked = model(x)
    result = hw.edit.prune(model, gone, copy=True)
    torch.testing.assert_close(result.model(x), masked)
    assert result.cuts["0"].kept_kv == (1,)
    assert result.parameters_after == (2 * 3 + 3 + 5) * 12 + 2 + (2 * 5 + 1) * 12
    assert "Packed" in _refusal(type("Unknown", (Packed,), {})(12, 6))


def test_a_design_of_ones_own_is_clipped_and_listened_to(packed: AttentionLayer) -> None:
    x = given()
    with hw.watch(packed, measures=["max_logit"]) as record, hw.telemetry.gate_gradients(packed) as gates:
        packed(x).square().sum().backward()
        before = record.latest["max_logit"][0].double()
        tau = float(before.max() / 2)
        assert hw.telemetry.qk_clip(packed, record, tau=tau)
        packed(x)
        after = record.latest["max_logit"][0].double()
    assert gates.passes == {"": 1}
    torch.testing.assert_close(after, before.clamp_max(tau), rtol=2e-5, atol=1e-5)


def test_heads_packed_in_one_map_are_not_spread(packed: AttentionLayer) -> None:
    with pytest.raises(ConfigError, match=r"Packed cannot be spread over ranks by its heads: .*'weight' of its 'qkv'"):
        hw.parallel.head_parallel_plan(packed)


def test_a_plan_for_many_ranks_is_made_of_the_layout() -> None:
    plan = hw.parallel.head_parallel_plan(hw.nn.GatedAttention(12, 6, num_kv_heads=2, qk_norm=True, bias=True))
    assert {name: type(style).__name__ for name, style in plan.items()} == {
        "": "Heads", "q_proj": "ColwiseParallel", "k_proj": "KeyHeads", "v_proj": "KeyHeads",
        "gate_proj": "ColwiseParallel", "o_proj": "RowwiseParallel", "q_norm": "HeadNorm", "k_norm": "HeadNorm",
    }  # fmt: skip


def test_weights_that_all_heads_share_are_on_no_rank_alone() -> None:
    class Squeezed(hw.MultiHeadAttention):
        """Reads x through a narrow map."""

        coupling = INDEPENDENT
        resizing = Resizing()
        outside_attend = ""

        def __init__(self, d_model: int, num_heads: int) -> None:
            super().__init__(d_model, num_heads)
            self.squeeze = nn.Linear(d_model, d_model)

    with pytest.raises(
        ConfigError, match="Squeezed cannot be spread over ranks by its heads: all its heads share 'squ"
    ):
        hw.parallel.head_parallel_plan(Squeezed(12, 6))
    with pytest.raises(ConfigError, match=r"PerHeadAttention cannot .* to_multi_head"):
        hw.parallel.head_parallel_plan(hw.nn.PerHeadAttention(12, 6))
    with pytest.raises(ConfigError, match=r"LatentAttention cannot .* k_up are no rows or columns of a linear map$"):
        hw.parallel.head_parallel_plan(hw.nn.LatentAttention(12, 6))


def _refusal(module: nn.Module) -> str:
    with pytest.raises(ConfigError, match="not known to keep its heads apart") as told:
        hw.edit.prune(module, [0])
    return str(told.value)


def test_a_subclass_that_declares_half_is_neither_registered_nor_pruned() -> None:
    class Half(hw.MultiHeadAttention):
        coupling = INDEPENDENT

    with pytest.raises(ConfigError, match="Half does not define costs in its own class"):
        DESIGNS.update(half=Half)
    assert "half" not in DESIGNS
    assert "not known to keep its heads apart" in _refusal(Half(12, 6))


def test_a_subclass_that_declares_for_itself_is_pruned() -> None:
    class Own(hw.MultiHeadAttention):
        coupling = INDEPENDENT
        resizing = Resizing()
        outside_attend = ""

    assert hw.edit.prune(Own(12, 6), [0]).model.num_heads == 5
