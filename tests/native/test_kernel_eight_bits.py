"""Decoding from keys and values of eight bits: what floats give, from bytes that are never made floats."""

import ctypes
import math
import mmap

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from kernel_formula import LIMITS, error, truth
from samples import MASKS, SCORES as ALL_SCORES, qkv
from test_kernel_conduct import at_the_end, forks, guarded, in_child, wanted, write_wanted
from torch import Tensor

from headwise.cache import KVCache, SlidingCache
from headwise.kernels import KERNELS
from headwise.kernels.call import Call, Declined, Result
from headwise.kernels.cpu import binding
from headwise.kernels.cpu.library import library
from headwise.kernels.gradients import run_kernel
from headwise.kernels.quantized import QuantizedKV
from headwise.map.attention import attend
from headwise.masks import Causal, Everything, Grid, Lengths, Mask, Window
from headwise.nn.head_mixing import TalkingHeadsAttention
from headwise.nn.multi_head import MultiHeadAttention
from headwise.rule import Rule
from headwise.rule.lowering import Lowered, lower
from headwise.scores import Score
from headwise.stats import (
    CONCENTRATION,
    DISTANCE,
    DISTANCE_VARIANCE,
    ENTROPY,
    LARGEST,
    SQUARES,
    KeyWeights,
    RangeMass,
    Statistic,
)

SCORES = {name: score for name, score in ALL_SCORES.items() if name != "two biases"}
ROWS = (
    LARGEST,
    ENTROPY,
    SQUARES,
    CONCENTRATION,
    DISTANCE,
    DISTANCE_VARIANCE,
    RangeMass(-3, 1, relative=True),
    RangeMass(0, 4, relative=False),
)
pytestmark = pytest.mark.usefixtures("target")


def eight(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, score: tuple[Score, ...] = (), *,
    statistics: tuple[Statistic, ...] = (), dropout: float = 0.0,
) -> tuple[Result, Tensor, Tensor]:  # fmt: skip
    """What the kernel gives from eight bits, and the numbers in float64 that they stand for. No floats are made."""
    keys, values = QuantizedKV.of(k), QuantizedKV.of(v)
    rule = Rule(mask or Everything(), q.shape[-1] ** -0.5, Grid(*q.shape[:3], k.shape[2]), score)
    call = Call(q, keys, values, rule, dropout, 5, statistics)
    assert KERNELS["cpu"].refuse(call) is None
    with torch.no_grad():
        found = run_kernel(KERNELS["cpu"], call)
    assert not {"k", "v"} & vars(call).keys()
    return found, keys.to(torch.float64).decoded(), values.to(torch.float64).decoded()


def check(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, score: tuple[Score, ...] = ()) -> None:
    m = k.shape[2]
    wanted = (*ROWS, KeyWeights(torch.linspace(-1, 2, m)[None]))
    found, keys, values = eight(q, k, v, mask, score, statistics=wanted)
    expected = truth(q, keys, mask, score)
    assert found.out.dtype == q.dtype
    assert torch.equal(found.lse == -torch.inf, expected.lse == -torch.inf)
    assert (found.out[expected.lse == -torch.inf] == 0).all()
    assert error(found.out, expected.out(values)) <= LIMITS[q.dtype]
    torch.testing.assert_close(found.lse.double(), expected.lse.detach(), rtol=2e-6, atol=1e-5)
    for statistic in wanted:
        torch.testing.assert_close(
            found.statistics[statistic].double(), expected.of(statistic).detach(), rtol=1e-4, atol=3e-4
        )


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", LIMITS)
def test_masks(name: str, dtype: torch.dtype) -> None:
    for n in (1, 5):
        check(*qkv(n=n, dtype=dtype), MASKS[name](2, n, 53))


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    for mask in ("everything", "window and sinks", "nothing for some", "dense"):
        check(*qkv(n=3), MASKS[mask](2, 3, 53), SCORES[name](2, 6, 3, 53))


@pytest.mark.thorough
@pytest.mark.every_target
@settings(deadline=None, derandomize=True, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_shapes(data: st.DataObject) -> None:
    draw = data.draw
    b, h_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 12))
    n = draw(st.integers(1, 48 // group))
    m = draw(st.one_of(st.integers(max(n, 8), n + 200), st.integers(510, 1100)))
    d, e = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    dtype = draw(st.sampled_from([*LIMITS]))
    inputs = qkv(b, h_kv * group, h_kv, n, m, d, e, dtype=dtype, seed=draw(st.integers(0, 99)))
    mask = MASKS[draw(st.sampled_from([*MASKS]))](b, n, m)
    score = SCORES[draw(st.sampled_from([*SCORES]))](b, h_kv * group, n, m) if draw(st.booleans()) else ()
    check(*inputs, mask, score)


def test_logits_that_are_large_and_vectors_of_very_different_length() -> None:
    q, k, v = qkv(n=2, m=700)
    sizes = 10.0 ** torch.randint(-6, 3, (2, 3, 700, 1), generator=torch.Generator().manual_seed(1))
    check(q * 3, k * sizes.clamp_max(10.0), v * sizes, Causal())
    check(q, k * 0, v, Causal())  # scales of 0
    # Logits of thousands: float32 keeps them to some 10⁻⁴.
    found, keys, values = eight(q * 1e3, k, v)
    assert error(found.out, truth(q * 1e3, keys).out(values)) <= 2e-3


@pytest.mark.thorough
def test_the_same_bits_for_any_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        for dtype in LIMITS:
            q, k, v = qkv(1, 8, 2, 3, 3001, 40, 24, dtype=dtype)
            found = []
            for threads in (1, 2, 3, 7):
                torch.set_num_threads(threads)
                result, *_ = eight(q, k, v, Causal() & Window(2000), statistics=ROWS, dropout=0.2)
                found.append([result.out, result.lse, *result.statistics.values()])
            assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))
    finally:
        torch.set_num_threads(before)


def test_dropout_drops_what_it_drops_of_floats() -> None:
    q, k, v = qkv(n=2, m=600)
    found, keys, values = eight(q, k, v, Causal(), dropout=0.4)
    rule = Rule(Causal(), q.shape[-1] ** -0.5, Grid(2, 6, 2, 600))
    floats = run_kernel(KERNELS["cpu"], Call(q, keys.float(), values.float(), rule, 0.4, 5))
    assert error(found.out, floats.out) < 1e-5


@pytest.mark.parametrize(("n", "h"), [(25, 4), (1, 98), (7, 14)])
def test_more_queries_than_fit_are_computed_from_floats(n: int, h: int) -> None:
    q, k, v = qkv(1, h, 2, n, 64, 8, 8)
    keys, values = QuantizedKV.of(k), QuantizedKV.of(v)
    call = Call(q, keys, values, Rule(Causal(), 0.3, Grid(1, h, n, 64)))
    found = run_kernel(KERNELS["cpu"], call)
    assert ("k" in vars(call)) == (n * h // 2 > 48)
    assert error(found.out, attend(q, keys.decoded(), values.decoded(), mask=Causal(), scale=0.3)) < 1e-6


def test_what_else_is_computed_from_floats() -> None:
    q, k, v = qkv(1, 4, 2, 1, 64, 8, 8)
    keys, values = QuantizedKV.of(k), QuantizedKV.of(v)
    plain = attend(q, keys.decoded(), values.decoded(), kernel="cpu")
    # Gradients, of the queries and through them.
    learning = q.clone().requires_grad_()
    attend(learning, keys, values, kernel="cpu").sum().backward()
    other = q.clone().requires_grad_()
    attend(other, keys.decoded(), values.decoded(), kernel="cpu").sum().backward()
    assert torch.equal(learning.grad, other.grad)
    # Several scales a vector, one of both as floats, other kernels, other dtypes, the mass of keys.
    parts = QuantizedKV.of(k, (5, 3))
    assert torch.equal(attend(q, parts, values), attend(q, parts.decoded(), values.decoded()))
    assert torch.equal(attend(q, keys, v), attend(q, keys.decoded(), v))
    for kernel in ("torch_fused", "torch_blocks", "reference"):
        expected = attend(q, keys.decoded(), values.decoded(), kernel=kernel)
        assert torch.equal(attend(q, keys, values, kernel=kernel), expected)
    double = attend(q.double(), QuantizedKV.of(k.double()), QuantizedKV.of(v.double()))
    assert double.dtype == torch.float64
    assert error(double, plain) < 1e-6
    _, amap = attend(q, keys, values, return_map=True, measures=["received_mass"])
    assert error(amap.received(), attend(q, keys.decoded(), v, return_map=True)[1].received()) < 1e-6


@pytest.mark.parametrize("dtype", LIMITS)
def test_the_map_holds_the_keys_that_were_computed_with(dtype: torch.dtype) -> None:
    q, k, v = qkv(1, 8, 2, 2, 700, 16, 16, dtype=dtype)
    keys, values = QuantizedKV.of(k), QuantizedKV.of(v)
    with torch.no_grad():
        out, amap = attend(q, keys, values, mask=Causal(), return_map=True, measures=["entropy", "mean_distance"])
        assert torch.equal(out, attend(q, keys, values, mask=Causal()))  # the map changes no bit
    assert amap.kernel == "cpu"
    assert not isinstance(amap._k, Tensor)  # nobody has read it yet
    expected = truth(q, keys.to(torch.float64).decoded(), Causal())
    torch.testing.assert_close(amap[...].double(), expected.p, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(amap[...].sum(-1), torch.ones(1, 8, 2), rtol=1e-5, atol=0)
    torch.testing.assert_close(amap.measured["entropy"].double(), expected.of(ENTROPY).mean(-1), rtol=1e-4, atol=1e-4)
    assert amap.k.dtype == amap.q.dtype == torch.float32


def test_a_scale_that_is_not_finite() -> None:
    q, k, v = qkv(1, 4, 2, 1, 70, 8, 8)
    keys, values = QuantizedKV.of(k), QuantizedKV.of(v)
    values.scales[0, 1, 3] = math.nan
    found = attend(q, keys, values)
    assert found[:, 2:].isnan().all()
    assert found[:, :2].isfinite().all()
    rule = Rule(Lengths([60]), 0.3, Grid(1, 4, 1, 70))
    with pytest.raises(Declined):
        run_kernel(KERNELS["cpu"], Call(q, keys, values, rule))
    keys.scales[0, 0, 65] = math.inf
    values.scales[0, 1, 3], values.scales[0, 0, 66] = 1.0, math.inf
    assert attend(q, keys, values, mask=Lengths([60])).isfinite().all()
    _, amap = attend(q, keys, values, mask=Lengths([60]), return_map=True)
    assert amap.nonfinite_values.tolist() == [[8, 0]]


@pytest.mark.parametrize("dtype", LIMITS)
def test_only_its_own_results_are_written(dtype: torch.dtype) -> None:
    for n, d, e, m in ((1, 5, 3, 131), (4, 16, 16, 70), (12, 65, 33, 600)):
        b, h, h_kv = 2, 8, 2
        q, k, v = qkv(b, h, h_kv, n, m, d, e, dtype=dtype)
        keys, values = QuantizedKV.of(k), QuantizedKV.of(v)
        rule = Rule(MASKS["nothing for some"](b, n, m), d**-0.5, Grid(b, h, n, m))
        lowered = lower(rule)
        assert isinstance(lowered, Lowered)
        out, *checks = guarded(b, h, n, e, dtype=dtype, gaps=True)
        views = map(binding.view, (q, keys.steps, values.steps, out))
        request = binding.ForwardCall(binding.CODES[dtype], 2, b, h, h_kv, n, m, d, e, *views)
        request.key_scales, request.value_scales = binding.view(keys.scales), binding.view(values.scales)
        held: list[object] = [binding.write_rule(request.rule, lowered, rule)]
        memory, clean = guarded(b, h, n)
        request.lse = memory.data_ptr()
        held.append(memory)
        checks.append(clean)
        entries = []
        for name in ("largest", "entropy", "squares", "distance", "variance"):
            memory, clean = guarded(b, h, n)
            entries.append(wanted(name, memory))
            held.append(memory)
            checks.append(clean)
        write_wanted(request, entries)
        handle = library().handle
        assert handle is not None
        assert handle.headwise_forward(ctypes.byref(request)) == binding.DONE
        assert all(clean() for clean in checks)
        columns, untouched = guarded(b, h, m)
        write_wanted(request, [*entries, wanted("column_mass", columns)])
        assert handle.headwise_forward(ctypes.byref(request)) == binding.TOO_MANY_QUERIES
        assert not any(clean() for clean in (*checks, untouched))


@pytest.mark.thorough
@forks
@pytest.mark.skipif(not hasattr(mmap, "PROT_READ"), reason="memory is protected as Linux does it")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_nothing_is_read_beyond_the_end() -> None:
    def work() -> bool:
        for n, m, d, e in ((1, 70, 5, 3), (3, 65, 33, 19), (2, 521, 8, 64)):
            q, k, v = qkv(2, 4, 2, n, m, d, e)
            keys, values = (
                QuantizedKV(at_the_end(x.steps), at_the_end(x.scales), x.parts) for x in map(QuantizedKV.of, (k, v))
            )
            attend(at_the_end(q), keys, values, mask=Causal())
        return True

    assert in_child(work) == 0


class OnlyFloats:
    """A cache that hands out floats, as one of a user's own may."""

    def __init__(self, cache: KVCache | SlidingCache) -> None:
        self.cache, self.limits, self.append = cache, cache.limits, cache.append

    @property
    def seen(self) -> int:
        return self.cache.seen

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_a_layer_decodes_from_its_cache(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(48, 6, num_kv_heads=2, rotary=True).to(dtype).eval()
    x = torch.randn(2, 30, 48, dtype=dtype)

    def steps(floats: bool) -> Tensor:
        own = KVCache(stored="int8") if kind == "full" else SlidingCache(9, 2, stored="int8")
        cache = OnlyFloats(own) if floats else own
        return torch.cat([layer(part, mask=Causal(), cache=cache) for part in x.split([20, 1, 1, 3, 1, 4], 1)], 1)

    with torch.no_grad():
        bits, floats = steps(False), steps(True)
    assert error(bits, floats) < (1e-5 if dtype == torch.float32 else 2e-2)
    assert not torch.equal(bits, floats)  # two ways of computing indeed


def test_a_layer_that_does_more_with_its_keys_gets_floats() -> None:
    layer = TalkingHeadsAttention(24, 4).eval()
    cache, x = KVCache(stored="int8"), torch.randn(1, 5, 24)
    with torch.no_grad():
        assert layer(x, mask=Causal(), cache=cache).isfinite().all()
        assert layer(x[:, :1], mask=Causal(), cache=cache).isfinite().all()
