"""Attention as an operator of PyTorch's graphs: the same bits as outside of them, from the same kernels."""

import copy
import io
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from design_samples import design, given
from functorch.compile import make_boxed_func
from hypothesis import given as drawn, settings, strategies as st
from samples import GAPS, MASKS, SCORES, kernels_here, qkv
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

from headwise.errors import KernelError, ShapeError
from headwise.fields import inside
from headwise.kernels import KERNELS, use_kernel
from headwise.kernels.cpu import passes
from headwise.kernels.graph import can_record, read, write
from headwise.kernels.operators import attend as forward_operator, attend_backward
from headwise.lm.model import Decoder, DecoderConfig
from headwise.map.attention import attend
from headwise.masks import Causal, Documents, Everything, Grid, HeadWindows, Lengths, Mask, Sinks, State, Window
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.registry import DESIGNS
from headwise.rule import Rule, compute
from headwise.scores import ALiBi, Bias, Relative, SinkLogits, t5_bias
from headwise.telemetry import watch

OPERATOR = torch.ops.headwise.attend.default
BACKWARD = torch.ops.headwise.attend_backward.default
compiled_here = pytest.mark.skipif("cpu" not in kernels_here(), reason="the compiled kernel is not here")
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # of the compiler's own looking around
    pytest.mark.filterwarnings("ignore:Dynamo"),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Graphs:
    """A backend that keeps what it is given to compile: the graphs of forward and backward passes."""

    def __init__(self) -> None:
        self.seen: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def keep(part: torch.fx.GraphModule, _: Any) -> Any:
            self.seen.append(part)
            return make_boxed_func(part.forward)

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(graph, inputs)

    def count(self, operator: Any) -> int:
        return sum(node.target == operator for graph in self.seen for node in graph.graph.nodes)


def whole(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compiled into one graph, or an error."""
    return torch.compile(f, fullgraph=True, backend="aot_eager", **options)


def leaves(score: tuple[Any, ...]) -> list[Tensor]:
    found = [x for part in score for x in vars(part).values() if isinstance(x, Tensor)]
    return [x for x in found if x.requires_grad]


def same_both_ways(
    f: Callable[..., Tensor], g: Callable[..., Tensor], *inputs: Tensor, more: Sequence[Tensor] = ()
) -> None:
    """Output and gradients of f and g are the same bits, from the same random numbers."""
    found = []
    for call in (f, g):
        torch.manual_seed(5)
        out = call(*inputs)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64).to(out.dtype)
        found.append([out, *torch.autograd.grad(out, [*inputs, *more], grad, allow_unused=True)])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def leaf_qkv(*sizes: int, **options: Any) -> list[Tensor]:
    return [x.requires_grad_() for x in qkv(*sizes, **options)]


@pytest.mark.thorough
@pytest.mark.parametrize("name", MASKS)
def test_one_graph_gives_the_same_bits_under_every_mask(name: str) -> None:
    mask = MASKS[name](2, 37, 53)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask=mask)

    same_both_ways(whole(call), call, *leaf_qkv())


@pytest.mark.thorough
@pytest.mark.parametrize("name", SCORES)
def test_one_graph_gives_the_same_bits_with_every_score(name: str) -> None:
    score = SCORES[name](2, 6, 37, 53)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask=Causal(), score=score)

    same_both_ways(whole(call), call, *leaf_qkv(), more=leaves(score))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_one_graph_gives_the_same_bits_in_every_dtype_and_with_dropout(dtype: torch.dtype, dropout: float) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask=Causal() & Window(9), dropout_p=dropout)

    same_both_ways(whole(call), call, *leaf_qkv(dtype=dtype))


@pytest.mark.thorough
@pytest.mark.parametrize("learned", [False, True])
def test_dropout_beside_biases(learned: bool) -> None:
    bias = torch.randn(1, 6, 1, 53, generator=torch.Generator().manual_seed(2)).requires_grad_(learned)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, score=Bias(bias), dropout_p=0.3)

    same_both_ways(whole(call), call, *leaf_qkv(), more=[bias] if learned else [])


@pytest.mark.thorough
@pytest.mark.parametrize("kernel", [name for name in KERNELS if name in kernels_here()])
@pytest.mark.parametrize("mask", [Everything(), Causal()])
def test_a_named_kernel_has_its_own_backward_pass_in_a_graph(kernel: str, mask: Mask) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask=mask, kernel=kernel)

    inputs = leaf_qkv(n=53, e=8)
    one, two = whole(call)(*inputs), call(*inputs)
    assert torch.equal(one, two)
    grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(3))
    for ours, theirs in zip(*(torch.autograd.grad(x, inputs, grad) for x in (one, two)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)


@pytest.mark.thorough
@compiled_here
def test_the_passes_runs_and_its_operators_are_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    for name in ("forward", "backward"):
        real = getattr(passes, name)
        monkeypatch.setattr(passes, name, lambda *a, _n=name, _f=real: (ran.append(_n), _f(*a))[1])
    graphs = Graphs()
    inputs = leaf_qkv()
    torch.compile(lambda q, k, v: attend(q, k, v, mask=Causal()), fullgraph=True, backend=graphs)(
        *inputs
    ).sum().backward()
    assert ran == ["forward", "backward"]
    assert (graphs.count(OPERATOR), graphs.count(BACKWARD)) == (1, 1)


@pytest.mark.thorough
@settings(max_examples=1, deadline=None)
@drawn(data=st.data())
def test_one_graph_serves_any_size(data: st.DataObject) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return attend(q, k, v, mask=Causal() & (Window(9) | Sinks(2)), score=ALiBi(slopes))

    torch.compiler.reset()
    graphs = Graphs()
    free = torch.compile(call, fullgraph=True, backend=graphs, dynamic=True)
    for _ in range(6):
        m = data.draw(st.integers(2, 90))
        n, b, group = data.draw(st.integers(2, m)), data.draw(st.integers(2, 3)), data.draw(st.integers(2, 3))
        inputs = qkv(b, 2 * group, 2, n, m, 8, 7, seed=m)
        slopes = torch.linspace(0.1, 0.5, 2 * group)
        assert torch.equal(free(*inputs, slopes), call(*inputs, slopes))
    assert 1 <= len(graphs.seen) <= 3


@pytest.mark.thorough
def test_a_mask_may_have_a_size_of_the_graph() -> None:
    graph = torch.compile(
        lambda q: attend(q, q, q, mask=Causal() & Window(q.shape[2] // 4) | Sinks(2)),
        backend="aot_eager", fullgraph=True, dynamic=True,
    )  # fmt: skip
    for n in (40, 24):
        q = torch.randn(1, 2, n, 8)
        assert torch.equal(graph(q), attend(q, q, q, mask=Causal() & Window(n // 4) | Sinks(2)))


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(0, 53), (37, 0), (1, 1), (1, 40)])
def test_one_graph_of_no_queries_no_keys_and_few(shape: tuple[int, int]) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, score=(ALiBi.standard(6), SinkLogits([0.1] * 6)))

    same_both_ways(whole(call), call, *leaf_qkv(n=shape[0], m=shape[1]))


@pytest.mark.thorough
def test_what_only_the_data_show_is_seen_when_the_graph_runs() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask=Causal())

    one = whole(call)
    q, k, v = qkv()
    assert torch.equal(one(q, k, v), call(q, k, v))
    v[0, 0, 40] = torch.nan  # which the first queries may not see
    k[1, 2, 50, 1] = torch.inf
    ours, theirs = one(q, k, v), call(q, k, v)
    assert ours.isnan().any()
    assert torch.isfinite(ours[0, :2, :20]).all()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.thorough
@compiled_here
def test_a_named_kernel_runs_or_raises_in_a_graph_too() -> None:
    q, k, v = qkv(e=8)
    v[0, 0, 40] = torch.nan
    with pytest.raises(KernelError, match=r"kernel='cpu'.*not finite"):
        whole(lambda q, k, v: attend(q, k, v, mask=Causal(), kernel="cpu"))(q, k, v)
    with pytest.raises(KernelError, match=r"kernel='torch_fused'.*no mask but"):
        whole(lambda q, k, v: attend(q, k, v, mask=Window(3), kernel="torch_fused"))(q, k, v)


@pytest.mark.thorough
def test_use_kernel_reaches_a_graph_that_is_compiled_already() -> None:
    one = whole(lambda q, k, v: attend(q, k, v, mask=Window(3)))
    inputs = qkv(e=8)
    for name in ("torch_blocks", "reference"):
        with use_kernel(name):
            assert torch.equal(one(*inputs), attend(*inputs, mask=Window(3)))
    with use_kernel("torch_fused"), pytest.raises(KernelError, match="no mask but"):
        one(*inputs)


@pytest.mark.thorough
def test_lengths_that_change_need_no_new_graph_and_are_checked() -> None:
    graphs = Graphs()
    one = torch.compile(lambda q, k, v, mask: attend(q, k, v, mask=mask), fullgraph=True, backend=graphs)
    inputs = qkv()
    for lengths in ([53, 7], [0, 53], [20, 20]):
        assert torch.equal(one(*inputs, Lengths(lengths)), attend(*inputs, mask=Lengths(lengths)))
    assert len(graphs.seen) == 1
    with pytest.raises(ShapeError, match="length 99 exceeds the 53 keys"):
        one(*inputs, Lengths([53, 99]))
    with pytest.raises(ShapeError, match=r"k: shape \(2, 3, 53, 5\)"):
        torch.compile(lambda q, k, v: attend(q, v, v), backend="aot_eager")(*inputs)


@pytest.mark.thorough
def test_lengths_may_be_made_within_a_graph_which_checks_them_when_it_runs() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return attend(q, k, v, mask=Causal() & Lengths(lengths))

    one, inputs = whole(call), qkv()
    for lengths in (torch.tensor([53, 7]), torch.tensor([0, 20])):
        assert torch.equal(one(*inputs, lengths), call(*inputs, lengths))
    for lengths, said in ((torch.tensor([3, -2]), "lengths >= 0"), (torch.tensor([54, 2]), "exceeds the 53 keys")):
        with pytest.raises(ShapeError, match=said):
            one(*inputs, lengths)


class EveryOther(Mask):
    """A mask of somebody's own."""

    holds = {}

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return (cols % 2 == 0).expand(len(rows), -1)[None, None]

    def state(self, rows: Any, cols: Any, grid: Grid) -> State:
        return State.MIXED


class Near(Relative):
    """A score of somebody's own."""

    holds = {}

    def at(self, offset: Tensor, dtype: torch.dtype) -> Tensor:
        return (-offset.abs().to(dtype) / 9)[None]


@pytest.mark.thorough
def test_masks_and_scores_of_somebodys_own() -> None:
    q, k, v = leaf_qkv()

    def score(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, score=Near())

    def mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q * 1.0, k, v, mask=EveryOther() & Causal()) * 2.0

    same_both_ways(whole(score), score, q, k, v)
    same_both_ways(torch.compile(mask, backend="aot_eager"), mask, q, k, v)  # between two graphs
    assert not can_record(Rule(EveryOther() & Causal(), 1.0, Grid(1, 1, 1, 1)))


@pytest.mark.thorough
@pytest.mark.parametrize("name", MASKS)
def test_a_map_from_a_graph_is_the_map(name: str) -> None:
    mask = MASKS[name](2, 37, 53)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attend(q, k, v, mask=mask, score=ALiBi.standard(6), return_map=True)

    inputs = leaf_qkv()
    (ours, one), (theirs, two) = whole(call)(*inputs), call(*inputs)
    assert torch.equal(ours, theirs)
    assert torch.equal(one.lse, two.lse)
    assert torch.equal(one[:], two[:])
    assert not one.lse.requires_grad
    assert torch.equal(one.measure("entropy")["entropy"], two.measure("entropy")["entropy"])
    assert one.kernel == "auto"  # which it is is chosen when the graph runs
    assert (one.nonfinite_values == 0).all()


@pytest.mark.thorough
def test_a_map_from_a_graph_keeps_a_bias_that_is_learned() -> None:
    weight = torch.randn(32, 6, generator=torch.Generator().manual_seed(2)).requires_grad_()

    def call(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Any:
        return attend(q, k, v, mask=Causal(), score=t5_bias(weight, bidirectional=False), return_map=True)

    inputs = *leaf_qkv(), weight
    (ours, one), (theirs, two) = whole(call)(*inputs), call(*inputs)
    assert torch.equal(ours, theirs)
    weights = two[:]
    with torch.no_grad():
        weight.mul_(-2.0)  # a step of training
    assert torch.equal(one[:], weights)


@pytest.mark.thorough
def test_a_map_from_a_graph_counts_bad_values_and_names_a_named_kernel() -> None:
    q, k, v = qkv()
    v[1, 2, 3, :2] = torch.nan
    one = whole(lambda q, k, v: attend(q, k, v, return_map=True, kernel="torch_blocks"))(q, k, v)[1]
    two = attend(q, k, v, return_map=True, kernel="torch_blocks")[1]
    assert torch.equal(one.nonfinite_values, two.nonfinite_values)
    assert one.kernel == two.kernel == "torch_blocks"


@pytest.mark.thorough
@pytest.mark.parametrize("names", [("entropy", "max_logit"), ("entropy", "topk_mass")])
def test_measures_come_between_two_graphs(names: tuple[str, ...]) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, amap = attend(q * 2.0, k, v, mask=Causal(), return_map=True, measures=names)
        return out + 1.0, amap.measured, amap.kernel

    inputs = leaf_qkv()
    (ours, one, kernel), (theirs, two, expected) = torch.compile(call, backend="aot_eager")(*inputs), call(*inputs)
    assert torch.equal(ours, theirs)
    assert kernel == expected
    assert list(one) == list(names)
    assert all(torch.equal(one[name], two[name]) for name in names)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"return_map": True, "measures": ["entropy"]}, {"mask": EveryOther()}])
def test_what_ends_a_graph_is_said_where_there_must_be_one(options: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="omit fullgraph=True"):  # in an error of the compiler's own
        whole(lambda q, k, v: attend(q, k, v, **options))(*qkv())


def arguments(mask: str, score: str, dropout: float) -> tuple[Any, ...]:
    """What the operator is given for such a call."""
    q, k, v = leaf_qkv()
    grid = Grid(2, 6, 37, 53)
    terms = Rule(Causal(), 1.0, grid, {**SCORES, **GAPS}[score](*grid)).terms(compute(q[..., :0, :]))
    written = write(MASKS[mask](2, 37, 53))
    assert written is not None

    def leaf(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.detach().requires_grad_()

    numbers, held = written
    seed = torch.tensor(7) if dropout else None
    tensors = [q, k, v, *map(leaf, terms.biases), *held]
    return (
        tensors, len(terms.biases), leaf(terms.relative), leaf(terms.sinks), seed, numbers, 0.3, terms.soft_cap,
        dropout, True, terms.split, "auto",
    )  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mask", "score", "dropout"),
    [
        ("causal", "soft cap", 0.0), ("documents", "all", 0.0), ("dense", "two biases", 0.0), ("lengths", "sinks", 0.3),
        ("window and sinks", "bias of keys", 0.3), ("causal", "all with a gap", 0.0),
    ],
)  # fmt: skip
def test_pytorchs_own_checks_of_operators(mask: str, score: str, dropout: float) -> None:
    given_ = arguments(mask, score, dropout)
    opcheck(forward_operator, given_)
    out, lse, ran = forward_operator(*given_)
    wanted = [given_[2] is not None, given_[3] is not None, *[True] * given_[1]]
    plain = [x.detach() if isinstance(x, Tensor) else x for x in given_[1:-1]]
    back = ([x.detach() for x in given_[0]], *plain, out.detach(), lse, ran, torch.randn_like(out), wanted)
    opcheck(attend_backward, back, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_read_as_it_was_written(name: str) -> None:
    mask = MASKS[name](2, 37, 53) | (Sinks(3) & Window(4, 1))
    written = write(mask)
    assert written is not None
    again = read(*written)
    assert repr(again) == repr(mask)
    assert torch.equal(again.to_dense(37, 53, batch=2), mask.to_dense(37, 53, batch=2))


def test_every_registered_mask_has_a_sample() -> None:
    found = {type(one).__name__ for make in MASKS.values() for one in inside(make(2, 37, 53))}
    known = {name for name, kind in Mask.known.items() if kind.__module__.startswith("headwise.")}
    assert found | {"HeadWindows"} == known  # which is of some number of heads


@pytest.mark.thorough
def test_windows_of_heads_are_part_of_a_graph() -> None:
    mask = Causal() & HeadWindows([2, None, 3, 1, None, 50], sinks=1)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask=mask)

    assert can_record(Rule(mask, 1.0, Grid(1, 6, 37, 53)))
    same_both_ways(whole(call), call, *leaf_qkv())


@pytest.mark.parametrize("name", ["causal window", "lengths", "documents"])
def test_traced_graphs_hold_the_operator_and_not_one_result(name: str) -> None:
    mask = MASKS[name](2, 37, 53)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask=mask)

    other = qkv(seed=9)
    graph = make_fx(call)(*qkv())
    assert any(node.target == OPERATOR for node in graph.graph.nodes)
    assert torch.equal(graph(*other), call(*other))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace")
@pytest.mark.parametrize("options", [{"measures": ["entropy", "max_logit"]}, {"mask": EveryOther()}])
def test_what_no_operator_holds_is_traced_as_its_operations(options: dict[str, Any]) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, amap = attend(q, k, v, return_map=True, **options)
        return out, (amap.measured or amap.measure("entropy"))["entropy"]

    other = qkv(seed=9)
    graph = torch.jit.trace(call, qkv(), check_trace=False)  # compiled code would leave memory that nothing writes
    for ours, expected in zip(graph(*other), call(*other), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="tracing tensor"):  # an error of PyTorch's own: it looks at the numbers
        make_fx(call)(*qkv())


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace")
def test_a_watched_layer_is_traced() -> None:
    module, x = MultiHeadAttention(24, 6, num_kv_heads=2), torch.randn(2, 13, 24)
    with watch(module, measures=["entropy"], on_error="raise") as record:
        with torch.no_grad():
            graph = torch.jit.trace(module, x, check_trace=False)
        with pytest.raises(KernelError, match=r"torch.jit.trace cannot record this call with gradients.*no_grad\(\)"):
            torch.jit.trace(module, x, check_trace=False)
    assert record.ledger.steps == 1
    torch.testing.assert_close(graph(2.0 * x), module(2.0 * x), rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_export_and_its_file() -> None:
    module = MultiHeadAttention(24, 6, num_kv_heads=2, rotary=True).eval()

    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, mask=Causal() & Window(7))

    x = torch.randn(2, 13, 24)
    seq = torch.export.Dim("seq", min=2, max=512)
    program = torch.export.export(Masked(), (x,), dynamic_shapes=({1: seq},))
    assert any(node.target == OPERATOR for node in program.graph.nodes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again = torch.export.load(file).module()
    for n in (13, 2, 77):
        y = torch.randn(2, n, 24)
        torch.testing.assert_close(again(y), Masked()(y))


@pytest.mark.thorough
@pytest.mark.parametrize("name", DESIGNS)
def test_every_design_is_one_graph(name: str) -> None:
    if name in ("sparse_mixture", "mixture_of_heads"):
        pytest.skip("how many tokens choose a head shows in the data alone, and ends a graph")
    module, x = design(name, {}, dtype=torch.float32), given(dtype=torch.float32).requires_grad_()
    mask = {"mask": Causal()} if module.takes_mask else {}
    same_both_ways(whole(lambda x: module(x, **mask)), lambda x: module(x, **mask), x, more=[*module.parameters()])


@pytest.mark.thorough
def test_autocast_and_a_copy_of_a_compiled_module() -> None:
    module = MultiHeadAttention(24, 6, rotary=True)
    one, x = torch.compile(module, fullgraph=True, backend="aot_eager"), torch.randn(2, 13, 24)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(one(x, mask=Causal()), module(x, mask=Causal()))
    assert torch.equal(copy.deepcopy(one)(x, mask=Causal()), module(x, mask=Causal()))


@pytest.mark.thorough
@compiled_here
def test_a_decoder_trains_in_one_graph_on_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    decoder = Decoder(DecoderConfig(vocab_size=31, d_model=24, num_layers=2, num_heads=4))
    ids = torch.randint(31, (2, 17))
    graphs = Graphs()
    with monkeypatch.context() as patch, use_kernel("cpu"):
        ran = []
        real = passes.backward
        patch.setattr(passes, "backward", lambda *a: (ran.append(1), real(*a))[1])
        torch.compile(decoder, fullgraph=True, backend=graphs)(ids).square().sum().backward()
        assert len(ran) == 2
    found = [p.grad.clone() for p in decoder.parameters()]
    decoder.zero_grad()
    with use_kernel("cpu"):
        decoder(ids).square().sum().backward()
    assert (graphs.count(OPERATOR), graphs.count(BACKWARD)) == (2, 2)
    for ours, p in zip(found, decoder.parameters(), strict=True):
        torch.testing.assert_close(ours, p.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile's own backend needs a C++ compiler")
def test_the_default_backend_trains_a_layer() -> None:
    torch.manual_seed(5)
    module = MultiHeadAttention(24, 6, num_kv_heads=2, rotary=True)
    x = torch.randn(2, 13, 24, requires_grad=True)
    mask = Documents(torch.arange(13) // 5) & Causal()
    found = []
    for call in (torch.compile(module, fullgraph=True), module):
        out = call(x, mask=mask)
        found.append([out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=5e-5)  # its loops add up in another order
