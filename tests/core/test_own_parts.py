"""A mask and a score of one's own, a class and a registration each: what the library does with its own, it does with
them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import kernels_here, qkv
from torch import Tensor

import headwise as hw
from headwise.errors import CheckpointError, ConfigError, KernelError, ShapeError
from headwise.fields import Array, Number, Section, Whole
from headwise.kernels.graph import can_record
from headwise.masks import Causal, Grid, Mask, Span, State, register, spans
from headwise.parallel.layout import Rows, Way
from headwise.rule import Rule
from headwise.scores import Score, Terms

B, H, H_KV, N, M, D, E = 2, 6, 3, 17, 29, 5, 3
GRID = Grid(B, H, N, M)
KERNELS_HERE = [name for name in kernels_here() if name != "torch_fused"]


@register
class Chunks(Mask):
    """A query sees the keys of its own chunk, of those that begin every `size` positions from `first[batch]` on."""

    holds = {"size": Whole(), "first": Array("b")}

    def __init__(self, size: int, first: Tensor) -> None:
        if size < 1:
            raise ConfigError(f"Chunks(size={size}): expected size >= 1")
        self.size, self.first = size, first

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        first = self.first.to(rows.device)[:, None]
        query, key = ((at - first).div(self.size, rounding_mode="floor") for at in (rows + grid.shift, cols))
        return (query[:, :, None] == key[:, None])[:, None]

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        far = cols.start - (rows.stop - 1 + grid.shift), rows.start + grid.shift - (cols.stop - 1)
        return State.EMPTY if max(far) >= self.size else State.MIXED

    def spans(self, grid: Grid) -> Tensor:
        first = self.first.cpu()[:, None]
        start = (grid.positions() - first).div(self.size, rounding_mode="floor") * self.size + first
        return spans.one(start, start + self.size, grid.m)

    def check(self, grid: Grid) -> None:
        if len(self.first) != grid.b:
            raise ShapeError(f"mask=Chunks: {len(self.first)} starts for a batch of {grid.b}")


@register
class Fading(Score):
    """−rate[head] · ln(1 + distance / scale), and a bias for each key."""

    holds = {"rates": Array("h"), "keys": Array("bm"), "scale": Number()}
    placed = True

    def __init__(self, rates: Tensor, keys: Tensor, scale: float) -> None:
        self.rates, self.keys, self.scale = rates, keys, scale

    def terms(self, grid: Grid, like: Tensor) -> Terms:
        first = 1 - grid.n - grid.shift
        distance = torch.arange(first, first + grid.n + grid.m - 1, device=like.device).abs()
        faded = -self.rates.to(like)[:, None] * (distance / self.scale).to(like).log1p()
        return Terms(grid.n, relative=faded, biases=(self.keys[:, None, None],))


@pytest.fixture(autouse=True, scope="module")
def _known_here_alone() -> Iterator[None]:
    yield
    del Mask.known["Chunks"], Score.known["Fading"]


def mask() -> Chunks:
    return Chunks(7, torch.tensor([2, 5]))


def score(learned: bool = False) -> Fading:
    generator = torch.Generator().manual_seed(2)
    rates, keys = torch.rand(H, generator=generator), torch.randn(B, M, generator=generator)
    return Fading(rates.requires_grad_(learned), keys.requires_grad_(learned), 3.0)


def truth(q: Tensor, k: Tensor, fading: Fading) -> tuple[Tensor, Tensor]:
    """Weights and log-sum-exp in float64, cell by cell from the two docstrings."""
    s = torch.einsum("bhnd,bhmd->bhnm", q.double(), k.double().repeat_interleave(H // H_KV, 1)) / D**0.5
    position, key = torch.arange(N)[:, None] + M - N, torch.arange(M)
    faded = (1 + (position - key).abs() / 3.0).double().log()
    s = s - fading.rates.double()[:, None, None] * faded + fading.keys.double()[:, None, None]
    same = [[[(i - f) // 7 == (j - f) // 7 for j in range(M)] for i in range(M - N, M)] for f in (2, 5)]
    s = s.masked_fill(~torch.tensor(same)[:, None], -torch.inf)
    return s.softmax(-1), s.logsumexp(-1)


def close(got: Tensor, expected: Tensor, limit: float = 2e-6) -> None:
    torch.testing.assert_close(got.detach().double(), expected.detach().double(), rtol=limit, atol=limit)


@pytest.mark.parametrize("kernel", KERNELS_HERE)
def test_kernels_compute_them_and_their_gradients(kernel: str) -> None:
    (q, k, v), fading = (x.requires_grad_() for x in qkv(B, H, H_KV, N, M, D, E)), score(True)
    p, lse = truth(q, k, fading)
    expected = p @ v.double().repeat_interleave(H // H_KV, 1)
    out, amap = hw.attend(q, k, v, mask=mask(), score=fading, return_map=True, kernel=kernel)
    assert amap.kernel == kernel
    close(out, expected)
    close(amap.lse, lse)
    tensors = (q, k, v, fading.rates, fading.keys)
    toward = torch.randn(B, H, N, E, generator=torch.Generator().manual_seed(6))
    for got, want in zip(*(torch.autograd.grad((x * toward).sum(), tensors) for x in (out, expected)), strict=True):
        close(got, want, 1e-5)


def test_compiled_kernels_do_not_refuse_them() -> None:
    if "cpu" not in kernels_here():
        pytest.skip("not compiled")
    _, amap = hw.attend(*qkv(B, H, H_KV, N, M, D, E), mask=mask(), score=score(), return_map=True)
    assert amap.kernel == "cpu"


def test_tiles_heads_and_measures_are_theirs() -> None:
    q, k, v = qkv(B, H, H_KV, N, M, D, E)
    _, amap = hw.attend(q, k, v, mask=mask(), score=score(), return_map=True)
    p, _ = truth(q, k, score())
    close(amap[:], p)
    close(amap[:, :, 3:11, 5:23], p[:, :, 3:11, 5:23])
    close(amap.head(1, 4)[0, 0], p[1, 4])
    close(amap.measure("entropy")["entropy"], torch.special.entr(p).sum(-1).mean(-1), 1e-5)
    close(amap @ v, p @ v.double().repeat_interleave(2, 1))


def test_a_map_with_them_is_saved_and_loaded(tmp_path: Path) -> None:
    q, k, v = qkv(B, H, H_KV, N, M, D, E)
    _, amap = hw.attend(q, k, v, mask=mask() & Causal(), score=score(), return_map=True)
    amap.save(tmp_path / "map")
    again = hw.AttentionMap.load(tmp_path / "map")
    assert torch.equal(again[:], amap[:])
    assert type(again.rule.scores[0]) is Fading
    del Mask.known["Chunks"]
    try:
        with pytest.raises(CheckpointError, match="unknown mask 'Chunks'; if another package"):
            hw.AttentionMap.load(tmp_path / "map")
        with pytest.raises(CheckpointError, match=r"a mask of type Chunks cannot be saved; .*masks.register"):
            amap.save(tmp_path / "again")
    finally:
        register(Chunks)


@pytest.mark.thorough
def test_they_are_part_of_a_graph() -> None:
    assert can_record(Rule(mask() & Causal(), 1.0, GRID))
    one, fading = mask(), score(True)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hw.attend(q, k, v, mask=one & Causal(), score=fading)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    inputs = qkv(B, H, H_KV, N, M, D, E)
    assert torch.equal(compiled(*inputs), call(*inputs))
    learned = (fading.rates, fading.keys)
    ours, theirs = (torch.autograd.grad(each(*inputs).sum(), learned) for each in (compiled, call))
    for got, want in zip(ours, theirs, strict=True):
        close(got, want, 1e-5)


@pytest.mark.parametrize("kernel", KERNELS_HERE)
def test_blocks_of_a_ring_have_their_part(kernel: str) -> None:
    q, k, v = qkv(B, H, H_KV, N, M, D, E)
    p, lse = truth(q, k, score())
    way = Way(Rule(mask(), D**-0.5, GRID, (score(),)), kernel)
    for rows in (Span(0, 5), Span(5, 17)):
        here = slice(*rows)
        found = Rows(q[:, :, here], rows, way, E)
        for cols in (Span(19, 29), Span(0, 3), Span(3, 19)):
            found.meet(k[:, :, slice(*cols)], v[:, :, slice(*cols)], cols)
        found.finish(None)
        close(found.out, (p @ v.double().repeat_interleave(2, 1))[:, :, here])
        close(found.lse, lse[:, :, here])


def test_ranks_that_hold_some_heads_have_their_part_and_put_it_together() -> None:
    q, k, v = qkv(B, H, H_KV, N, M, D, E)
    whole = Rule(mask(), D**-0.5, GRID, (score(),))
    out = hw.attend(q, k, v, mask=mask(), score=score())
    held = [whole.cut({"h": Section(start, start + 2, H)}) for start in (0, 2, 4)]
    for i, rule in enumerate(held):
        here, kv = slice(2 * i, 2 * i + 2), slice(i, i + 1)
        close(hw.attend(q[:, here], k[:, kv], v[:, kv], mask=rule.mask, score=rule.scores), out[:, here])
    parts = [rule.scores[0] for rule in held]

    def join(x: Tensor, dim: int) -> Tensor:
        return torch.cat([part.rates for part in parts], dim)  # type: ignore[attr-defined]

    again = parts[1].joined("h", 2, join)
    assert torch.equal(again.rates, score().rates)
    assert torch.equal(again.keys, score().keys)
    with pytest.raises(ShapeError, match=r"Fading\(rates\): got shape \(6,\), expected size 8 in dimension 0"):
        score().cut({"h": Section(0, 2, 8)})


def test_the_mask_says_of_tiles_ranges_and_entries_what_it_says_of_cells() -> None:
    dense = mask().to_dense(N, M, batch=B)
    assert torch.equal(spans.to_dense(mask().spans(GRID), M)[:, None], dense)
    assert torch.equal(mask().only(1, 2, GRID).to_dense(N, M)[0, 0], dense[1, 0])
    for i in range(N):
        for j in range(M):
            state = mask().state(Span(i, i + 1), Span(j, j + 1), GRID)
            assert state is not State.EMPTY or not dense[:, 0, i, j].any()


@pytest.mark.parametrize("make", [
    lambda: register(type("Chunks", (Chunks,), {})), lambda: register(type("Causal", (Causal,), {})),
    lambda: register(type("Loose", (Chunks,), {"holds": None})),
])  # fmt: skip
def test_names_are_given_once_and_to_what_can_be_written(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"already registers this name|holds is None, so it cannot be saved"):
        make()
    assert Mask.known["Chunks"] is Chunks
    assert Mask.known["Causal"] is Causal


def test_a_kernel_that_knows_two_masks_refuses_theirs() -> None:
    with pytest.raises(KernelError, match="supports no mask but Causal"):
        hw.attend(*qkv(B, H, H, N, N, D, D), mask=mask(), kernel="torch_fused")
