"""The attention sink is the first token of the query's own sequence: behind padding, of each packed document, in
decoding steps, and of one head."""

import pytest
import torch
from samples import kernels_here, qkv
from torch import Tensor

import headwise as hw
from headwise.fields import Whole
from headwise.masks import Causal, Dense, Documents, Grid, Lengths, Mask, Sinks, Span, State, Window
from headwise.stats import SinkMass

N = 23
PADS = (0, 4, 11)
IDS = torch.tensor([[5] * 9 + [2] * 6 + [7] * 8, [-1] * 3 + [0] * 13 + [1] * 7, [3] * 20 + [-1] * 3])
STARTS = torch.tensor([[0] * 9 + [9] * 6 + [15] * 8, [23] * 3 + [3] * 13 + [16] * 7, [0] * 20 + [23] * 3])


def padded() -> Tensor:
    return torch.stack([torch.arange(N) >= pad for pad in PADS])


def holed() -> Tensor:
    """Keys of `padded` without those at which the second and the third of some documents begin."""
    return padded() & ~torch.isin(torch.arange(N), torch.tensor([5, 12, 13]))


def behind_padding() -> Tensor:
    return torch.tensor(PADS)[:, None].expand(-1, N)


MADE: dict[str, tuple[Mask, Tensor]] = {
    "lengths": (Lengths([N - pad for pad in PADS], side="right") & Causal(), behind_padding()),
    "lengths and a window": (Causal() & Window(4) & Lengths([N - pad for pad in PADS], side="right"), behind_padding()),
    "a boolean of keys": (Causal() & Dense(padded()[:, None, None].expand(-1, 1, N, -1)), behind_padding()),
    "a boolean n×m": (Dense(padded()[:, None, None] & torch.ones(N, N).tril().bool()), behind_padding()),
    "documents": (Documents(IDS) & Causal(), STARTS),
    "documents both ways": (Documents(IDS), STARTS),
    "documents behind padding": (
        Documents(torch.arange(N) // 8) & Lengths([N - pad for pad in PADS], side="right"),
        torch.maximum(torch.arange(N) // 8 * 8, behind_padding()),
    ),
    "a boolean or lengths": (
        Dense(torch.ones(N, N).tril(-6).bool()) & Dense((torch.arange(N) >= 4).expand(N, N))
        | Dense(torch.eye(N, dtype=torch.bool)) & Lengths([N - 4 for _ in PADS], side="right"),
        torch.where(torch.arange(N) < 4, N, 4)[None],
    ),
    "an id in two runs behind padding": (
        Causal() & Documents([4] * 5 + [6] * 7 + [4] * 11) & Lengths([N - pad for pad in PADS], side="right"),
        torch.tensor([[0] * 5 + [5] * 7 + [0] * 11, [4] * 5 + [5] * 7 + [4] * 11, [12] * 5 + [11] * 7 + [12] * 11]),
    ),
    "documents behind holes of padding": (
        Causal() & Documents([4] * 5 + [6] * 7 + [8] * 11) & Dense(holed()[:, None, None].expand(-1, 1, N, -1)),
        torch.tensor([[0] * 5 + [6] * 7 + [14] * 11, [4] * 5 + [6] * 7 + [14] * 11, [12] * 5 + [11] * 7 + [14] * 11]),
    ),
    "documents behind holes of a boolean n×m": (
        Documents([4] * 5 + [6] * 7 + [8] * 11) & Dense(holed()[:, None, None] & torch.ones(N, N).tril().bool()),
        torch.tensor([[0] * 5 + [6] * 7 + [14] * 11, [4] * 5 + [6] * 7 + [14] * 11, [12] * 5 + [11] * 7 + [14] * 11]),
    ),
    "an id in two runs": (Documents([4] * 5 + [6] * 7 + [4] * 11), torch.tensor([[0] * 5 + [5] * 7 + [0] * 11])),
}


def expected(amap: hw.AttentionMap, starts: Tensor, count: int) -> Tensor:
    """From the matrix: mean over the queries that see anything, [b, h]."""
    weights = amap.to_dense().double()
    place = torch.arange(N) - starts
    firsts = ((place >= 0) & (place < count)).expand(len(weights), -1)
    rows = (weights * firsts[:, None, None]).sum(-1)
    seen = amap.lse != -torch.inf
    return rows.sum(-1) / seen.sum(-1)


@pytest.mark.parametrize("kernel", ["auto", "torch_blocks", "reference"])
@pytest.mark.parametrize("name", MADE)
def test_of_the_own_sequence(name: str, kernel: str) -> None:
    mask, starts = MADE[name]
    q, k, v = qkv(3, 6, 3, N, N)
    _, amap = hw.attend(q, k, v, mask=mask, return_map=True, kernel=kernel, measures=["sink_mass"])
    torch.testing.assert_close(amap.measured["sink_mass"].double(), expected(amap, starts, 1), rtol=1e-5, atol=1e-6)
    for count in (1, 3):
        found = amap.measure(SinkMass(count))["sink_mass"]
        torch.testing.assert_close(found.double(), expected(amap, starts, count), rtol=1e-5, atol=1e-6)
        assert bool((found > 0).all())


@pytest.mark.skipif("cpu" not in kernels_here(), reason="the compiled kernel is not here")
@pytest.mark.parametrize("name", [name for name in MADE if "two runs" not in name])  # whose mask it refuses
def test_it_is_computed_in_the_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel, of the call and of the map: no tile is read."""
    q, k, v = qkv(3, 6, 3, N, N)
    monkeypatch.setattr(SinkMass, "partial", None)
    _, amap = hw.attend(q, k, v, mask=MADE[name][0], return_map=True, kernel="cpu", measures=["sink_mass"])
    torch.testing.assert_close(amap.measure("sink_mass")["sink_mass"], amap.measured["sink_mass"])


def test_of_one_entry_and_head() -> None:
    q, k, v = qkv(3, 6, 3, N, N)
    _, amap = hw.attend(q, k, v, mask=MADE["documents"][0], return_map=True)
    whole = amap.measure("sink_mass", rows=True)
    for batch, head in ((0, 0), (1, 4), (2, 2)):
        one = amap.head(batch, head).measure("sink_mass")["sink_mass"]
        torch.testing.assert_close(one[0, 0], whole["sink_mass"][batch, head])
    assert bool((whole["sink_mass"] > 0).all())


def test_a_step_beside_padding_and_a_window() -> None:
    """The last row of a full pass: the first token is still that behind the padding where a window hides it."""
    q, k, v = qkv(3, 6, 3, N, N)
    pads = Lengths([N - pad for pad in PADS], side="right")
    for positional in (Causal(), Causal() & Window(5), Causal() & (Window(5) | Sinks(1))):
        mask = positional & pads
        full = hw.attend(q, k, v, mask=mask, return_map=True)[1].measure("sink_mass", rows=True).rows["sink_mass"]
        step = hw.attend(q[:, :, -1:], k, v, mask=mask, return_map=True)[1].measure("sink_mass")["sink_mass"]
        torch.testing.assert_close(step, full[:, :, -1], rtol=1e-5, atol=1e-7)


def test_keys_that_a_cache_has_dropped() -> None:
    """A range behind the first tokens is dropped: the weight stays that of the same tokens."""
    whole = Causal() & Lengths([N - pad for pad in (0, 2, 3)], side="right")
    grid = hw.masks.Grid(3, 6, 4, N - 6, gap=hw.masks.Span(5, 11))
    starts = whole.with_gap(hw.masks.Span(5, 11), grid).starts(grid)
    assert starts is not None
    assert starts.tolist() == [[pad] * (N - 6) for pad in (0, 2, 3)]


class Hidden(Mask):
    """The keys at positions below `first`, hidden from all queries by a class that says no more than it must."""

    holds = {"first": Whole()}

    def __init__(self, first: int) -> None:
        self.first = first

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return (cols >= self.first).expand(len(rows), -1)[None, None]

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        return State.MIXED


class Blocks(Hidden):
    """Blocks of `first` tokens that do not see one another."""

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return ((rows + grid.shift)[:, None] // self.first == cols // self.first)[None, None]


class Near(Hidden):
    """A window of `first` keys, which says that it is one of positions."""

    placed = True

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        distance = (rows + grid.shift)[:, None] - cols
        return ((distance < self.first) & (distance >= 0))[None, None]


class NearBehind(Near):
    """The same window behind padding: the first `PADS` keys of each batch entry are hidden from all queries."""

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return super().allowed(rows, cols, grid) & (cols >= torch.tensor(PADS)[:, None])[:, None, None]


class Earlier(Near):
    """The window without the query's own token."""

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return super().allowed(rows, cols, grid) & ((rows + grid.shift)[:, None] != cols)


OWN: dict[str, Mask] = {
    "hidden": Hidden(4),
    "hidden and causal": Causal() & Hidden(4),
    "hidden and ranges": Hidden(4) & Lengths([N, N - 7, N - 1], side="right"),
    "hidden or hidden": Hidden(4) | Causal() & Hidden(6),
    "blocks": Causal() & Blocks(8),
    "a window": Near(5),
    "a part of a window": Near(5) & Hidden(3),
}


@pytest.mark.parametrize("kernel", ["auto", "torch_blocks", "reference"])
@pytest.mark.parametrize("name", OWN)
def test_a_class_of_the_user_is_as_the_boolean_tensor_of_its_pairs(name: str, kernel: str) -> None:
    q, k, v = qkv(3, 6, 3, N, N)
    given = Dense(OWN[name].to_dense(N, N, batch=3, heads=6))
    found, wanted = (
        hw.attend(q, k, v, mask=mask, return_map=True, kernel=kernel, measures=["sink_mass"])[1]
        for mask in (OWN[name], given)
    )
    for which in (lambda amap: amap.measured, lambda amap: amap.measure("sink_mass")):
        torch.testing.assert_close(which(found)["sink_mass"], which(wanted)["sink_mass"], rtol=1e-5, atol=1e-7)
    assert bool((found.measured["sink_mass"] > 0).all())


def test_a_step_of_a_class_of_the_user() -> None:
    """What it hides is behind the first token, unless it says that positions count: as that of a window of headwise."""
    q, k, v = qkv(3, 6, 3, N, N)
    for mask in (
        Hidden(4),
        Hidden(4) & Causal(),
        Near(5),
        Causal() & Near(5),
        NearBehind(70),
        NearBehind(5) & Causal(),
        NearBehind(5) | NearBehind(3),
        NearBehind(5) | Sinks(2),
    ):
        full = hw.attend(q, k, v, mask=mask, return_map=True)[1].measure("sink_mass", rows=True).rows["sink_mass"]
        step = hw.attend(q[:, :, -1:], k, v, mask=mask, return_map=True)[1].measure("sink_mass")["sink_mass"]
        torch.testing.assert_close(step, full[:, :, -1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("size", [1, 5])
def test_steps_of_a_mask_of_their_own_queries(size: int) -> None:
    """Queries that are not there cannot be asked."""
    q, k, v = qkv(2, 6, 3, size, N)
    given = torch.rand(size, N, generator=torch.Generator().manual_seed(1)) < 0.3
    for mask in (Dense(given) | Causal(), Dense(given) & Near(5) | Near(3)):
        wanted = Dense(mask.to_dense(size, N, batch=2, heads=6))
        found, expected = (
            hw.attend(q, k, v, mask=x, return_map=True)[1].measure("sink_mass")["sink_mass"] for x in (mask, wanted)
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_some_queries_of_documents_that_mix_and_padding() -> None:
    """What a mask holds of its keys says which belong together, wherever the queries are."""
    q, k, v = qkv(2, 6, 3, 2, 8)
    mask = Documents(torch.tensor([-1, 1, 0, 2, 1, -1, 2, 1])) | Lengths([0, 0])
    _, amap = hw.attend(q, k, v, mask=mask, return_map=True)
    first = amap[:, :, 0, 3] + amap[:, :, 1, 1]  # the first keys that the two queries see
    torch.testing.assert_close(amap.measure("sink_mass")["sink_mass"], first / 2, rtol=1e-5, atol=1e-7)


def test_a_step_of_a_class_that_hides_own_keys_or_all_keys() -> None:
    """Keys are padding only if the query at their position, which is not there, and those that are may not see them."""
    step = hw.masks.Grid(3, 6, 1, N)
    assert Earlier(5).starts(step) is None
    assert Near(5).starts(step) is None
    found = NearBehind(5).starts(hw.masks.Grid(3, 6, 1, 10))
    assert found is not None
    assert found.tolist() == [[0] * 10, [10] * 4 + [4] * 6, [10] * 10]


def test_a_class_of_the_user_is_asked_for_some_rows_at_a_time() -> None:
    asked = []

    class Recorded(Hidden):
        def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
            asked.append(len(rows))
            return super().allowed(rows, cols, grid)

    found = Recorded(4).starts(hw.masks.Grid(1, 1, 1000, 1000))
    assert found is not None
    assert found[0].tolist() == [1000] * 4 + [4] * 996
    assert max(asked) <= 256
    assert sum(asked) == 1000
