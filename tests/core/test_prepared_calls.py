"""Small plain calls that come again: from their arguments straight to compiled code, and nothing else is different."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from samples import MASKS, qkv
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from headwise import kernels
from headwise.errors import ConfigError, DTypeError, KernelError, ShapeError
from headwise.kernels import KERNELS, QuantizedKV, prepare, register, use_kernel
from headwise.kernels.quantized import Vectors, decoded
from headwise.map.attention import attend
from headwise.masks import Causal, Dense, Everything, Grid, Mask, Span, State, Window, shows_whole_past
from headwise.scores import SoftCap


def _picked() -> str:
    """The kernel that "auto" has for a plain call on this machine."""
    return attend(*qkv(e=8), return_map=True)[1].kernel


pytestmark = pytest.mark.skipif(
    '_picked() != "cpu"', reason='only calls of the compiled kernel are kept, and "auto" picks another one here'
)

SIZES = ((2, 6, 3, 17, 23, 20, 12), (1, 2, 2, 1, 41, 8, 8), (3, 4, 1, 5, 5, 7, 3))
Form = Callable[[Tensor], QuantizedKV] | None
WAYS = {"None": None, "causal": Causal(), "window": Causal() & Window(3)}


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    prepare._prepared.clear()


def came_again(
    q: Tensor, k: Vectors, v: Vectors, mask: Mask | None = None, scale: float | None = None
) -> Tensor | None:
    found = prepare.again(q, k, v, mask, scale, "auto")
    return None if found is None else found[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [None, -0.3])
def test_the_same_bits_as_the_first_time(
    dtype: torch.dtype, mask: Mask | None, size: tuple[int, ...], scale: float | None
) -> None:
    first, second = (qkv(*size, dtype=dtype, seed=seed) for seed in (1, 2))
    whole_way, _ = attend(*second, mask=mask, scale=scale, return_map=True)
    assert came_again(*second, mask, scale) is None
    attend(*first, mask=mask, scale=scale)
    found = came_again(*second, mask, scale)
    assert found is not None
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert torch.equal(found, whole_way)
    assert torch.equal(attend(*second, mask=mask, scale=scale), whole_way)


def test_strides_are_part_of_what_a_call_is() -> None:
    q, k, v = qkv(2, 6, 3, 17, 23, 8, 8)
    plain = attend(q, k, v)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    every_other = [torch.stack([x, x + 9], -1).flatten(-2)[..., ::2] for x in (q, k, v)]
    for strange in (turned, every_other):
        assert came_again(*strange) is None
        assert all(torch.equal(attend(*strange), plain) for _ in range(2))
    assert came_again(*turned) is not None
    assert came_again(*every_other) is None  # the kernel reads copies of these


def test_bad_input_is_named_as_ever() -> None:
    q, k, v = qkv(2, 6, 3, 17, 23, 8, 8)
    attend(q, k, v)
    for bad in ((q, k[:, :, :9], v), (q, k, v[:1]), (q[:, :5], k, v)):
        with pytest.raises(ShapeError):
            attend(*bad)
    with pytest.raises(ConfigError, match="scale=nan"):
        attend(q, k, v, scale=torch.nan)
    with pytest.raises(ConfigError, match="dropout_p=1"):
        attend(q, k, v, dropout_p=1.0)
    with pytest.raises(ConfigError, match="return_map=True"):
        attend(q, k, v, measures=("entropy",))
    with pytest.raises(ConfigError, match="expected 'auto'"):
        attend(q, k, v, kernel=["auto"])  # type: ignore[arg-type]


def test_what_is_asked_besides_is_not_forgotten() -> None:
    q, k, v = qkv(2, 6, 3, 17, 23, 8, 8)
    plain = attend(q, k, v)
    assert not torch.allclose(attend(q, k, v, score=SoftCap(0.5)), plain)
    assert not torch.allclose(attend(q, k, v, dropout_p=0.5), plain)
    assert not torch.allclose(attend(q, k, v, scale=0.01), plain)
    assert not torch.allclose(attend(q, k, v, mask=Causal()), plain)
    assert torch.equal(attend(q, k, v, return_map=True)[0], plain)
    tensor = torch.tensor(0.5)
    before = attend(q, k, v, scale=tensor)  # type: ignore[arg-type]
    assert not torch.allclose(attend(q, k, v, scale=tensor.mul_(9)), before)


def test_masks_that_hold_tensors_go_the_whole_way() -> None:
    q, k, v = qkv(2, 6, 3, 17, 23, 8, 8)
    seen = torch.ones(17, 23, dtype=torch.bool)
    mask = Dense(seen)
    attend(q, k, v, mask=mask)
    assert came_again(q, k, v, mask) is None
    for name in ("documents", "lengths"):
        given = MASKS[name](2, 17, 23)
        attend(q, k, v, mask=given)
        assert came_again(q, k, v, given) is None


def test_gradients_go_the_whole_way() -> None:
    q, k, v = qkv(2, 6, 3, 17, 23, 8, 8)
    attend(q, k, v)
    for at in range(3):
        given = [x.clone().requires_grad_(i == at) for i, x in enumerate((q, k, v))]
        out = attend(*given)
        out.sum().backward()
        assert given[at].grad is not None
        with torch.no_grad():
            assert torch.equal(attend(*given), out)


def test_a_kernel_that_is_named_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(2, 6, 3, 17, 23, 8, 8)
    attend(q, k, v, mask=Window(3))
    with use_kernel("torch_fused"), pytest.raises(KernelError, match="supports no mask"):
        attend(q, k, v, mask=Window(3))
    with pytest.raises(KernelError, match="supports no mask"):
        attend(q, k, v, mask=Window(3), kernel="torch_fused")
    monkeypatch.setenv("HEADWISE_KERNEL", "torch_fused")
    with pytest.raises(KernelError, match="supports no mask"):
        attend(q, k, v, mask=Window(3))


def test_a_kernel_that_is_registered_later_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Preferred(type(KERNELS["torch_blocks"])):  # type: ignore[misc]
        name = "preferred"

    q, k, v = qkv(2, 6, 3, 17, 23, 8, 8)
    attend(q, k, v)
    assert attend(q, k, v, return_map=True)[1].kernel == "cpu"
    monkeypatch.setattr(kernels, "AUTOMATIC", list(kernels.AUTOMATIC))
    monkeypatch.setitem(KERNELS, "preferred", Preferred())
    register(KERNELS["preferred"], before="cpu")
    assert came_again(q, k, v) is None
    assert attend(q, k, v, return_map=True)[1].kernel == "preferred"


def test_what_the_data_show_goes_to_the_next_kernel() -> None:
    q, k, v = qkv(2, 6, 3, 17, 17, 8, 8)
    wanted = attend(q, k, v, mask=Causal())
    v[0, 0, 12] = torch.nan  # which the first queries may not see
    assert came_again(q, k, v, Causal()) is None
    out = attend(q, k, v, mask=Causal())
    assert torch.allclose(out[0, :2, :12], wanted[0, :2, :12], atol=1e-6)
    assert out[0, :2, 12:].isnan().all()
    with pytest.raises(KernelError, match="not finite"):
        attend(q, k, v, mask=Causal(), kernel="cpu")


def test_torch_func_and_graphs_go_their_own_way() -> None:
    q, k, v = qkv(2, 6, 3, 17, 23, 8, 8)
    plain = attend(q, k, v)
    assert torch.allclose(torch.func.vmap(attend)(*(x[:, None] for x in (q, k, v)))[:, 0], plain, atol=1e-6)
    traced = make_fx(lambda q, k, v: attend(q, k, v))(q, k, v)
    assert "headwise.attend" in traced.code
    assert torch.equal(traced(q, k, v), plain)


def test_memory_of_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "KEPT", 5)
    for m in range(1, 20):
        q, k, v = qkv(1, 1, 1, 1, m, 4, 4)
        attend(q, k, v)
        assert came_again(q, k, v) is not None
        assert len(prepare._prepared) <= 5


def test_large_calls_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "PAIRS", 2 * 17 * 23)
    for heads, kept in ((2, True), (3, False)):
        q, k, v = qkv(1, heads, 1, 17, 23, 4, 4)
        attend(q, k, v)
        assert (came_again(q, k, v) is not None) is kept
    step, any_number = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4)
    attend(step, any_number.expand(-1, -1, 5, -1), any_number.expand(-1, -1, 5, -1))
    for m, kept in ((2 * 17 * 23, True), (2 * 17 * 23 + 1, False)):
        some = any_number.expand(-1, -1, m, -1)
        assert (came_again(step, some, some) is not None) is kept


@pytest.mark.thorough
def test_callers_at_once_do_not_meet() -> None:
    calls = [qkv(2, 6, 3, 17, 23, 8, 8, seed=seed) for seed in range(6)]
    wanted = [attend(*call) for call in calls]

    def work(at: int) -> bool:
        return all(torch.equal(attend(*calls[at]), wanted[at]) for _ in range(200))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, range(6)))


def test_the_same_bits_for_any_number_of_threads() -> None:
    before = torch.get_num_threads()
    q, k, v = qkv(4, 4, 4, 16, 16, 128, 128)
    found = []
    try:
        for threads in (1, 1, 2, 3, 8):
            torch.set_num_threads(threads)
            found.append(attend(q, k, v))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(out, found[0]) for out in found)


def test_defaults_for_new_tensors_do_not_matter() -> None:
    q, k, v = qkv(2, 6, 3, 17, 23, 8, 8)
    wanted = attend(q, k, v)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            assert torch.equal(attend(q, k, v), wanted)
    finally:
        torch.set_default_dtype(before)


def test_signs_that_pytorch_keeps_in_a_bit_are_read() -> None:
    q, k, v = torch.randn(3, 2, 3, 7, 5)
    signs = (q, k, v), (torch._neg_view(q), k, v), (q, torch._neg_view(k), v), (q, k, torch._neg_view(v))
    for x, y, z in (*signs, *signs):
        assert torch.equal(attend(x, y, z), attend(x.clone(), y.clone(), z.clone()))


def _whole_way(*given: Any, **options: Any) -> Tensor:
    """`attend`, of which nothing is kept before or after."""
    kept = dict(prepare._prepared)
    prepare._prepared.clear()
    out = attend(*given, **options)
    prepare._prepared.clear()
    prepare._prepared.update(kept)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [None, QuantizedKV.of], ids=["floats", "int8"])
@pytest.mark.parametrize("mask", [*WAYS.values(), Everything()], ids=repr)
@pytest.mark.parametrize("n", [1, 2])
def test_decoding_steps_with_another_number_of_keys(mask: Mask | None, form: Form, dtype: torch.dtype, n: int) -> None:
    """One entry for all steps if one query attends to every key, else one for each: no step has the keys of another."""
    q, k, v = qkv(2, 6, 3, n, 40, 20, 12, dtype=dtype)
    keys, values = (x if form is None else form(x) for x in (k, v))
    several = n > 1 or not shows_whole_past(mask)
    for step, m in enumerate((9, 10, 40, 11, n, 9)):
        some_k, some_v = _first(keys, m), _first(values, m)
        out = attend(q, some_k, some_v, mask=mask)
        assert torch.equal(out, _whole_way(q, some_k, some_v, mask=mask))
        again = came_again(q + step, some_k, some_v, mask)
        assert again is not None
        assert torch.equal(again, _whole_way(q + step, some_k, some_v, mask=mask))
        assert len(prepare._prepared) == (min(step + 1, 5) if several else 1)


def _first(x: Vectors, m: int) -> Vectors:
    """The first m vectors, as a cache returns them: a view with the strides of its memory."""
    if isinstance(x, QuantizedKV):
        return replace(x, steps=x.steps[:, :, :m], scales=x.scales[:, :, :m])
    return x[:, :, :m]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_with_keys_that_were_joined(dtype: torch.dtype) -> None:
    """The steps over batch and heads change with each key; one decision serves all, in whatever memory they are."""
    q, k, v = qkv(2, 6, 3, 1, 40, 20, 12, dtype=dtype)
    attend(q, k[:, :, :9].contiguous(), v[:, :, :9].contiguous(), mask=Causal())
    for m in (10, 11, 9, 40):
        for keys, values in (
            (torch.cat((k[:, :, : m - 1], k[:, :, m - 1 : m]), 2), v[:, :, :m].contiguous()),
            (k[:, :, :m], v[:, :, :m]),
            (k[:1, :1, :m].expand(2, 3, m, 20), v[:, :, :m]),
        ):
            out = came_again(q, keys, values, Causal())
            expected = attend(q, keys, values, mask=Causal(), return_map=True)[0]
            assert out is not None
            assert torch.equal(out, expected)
    assert sum(len(key[1]) == 4 and key[-2:] == (None, False) for key in prepare._prepared) == 1


def test_quantized_vectors_that_differ_are_another_call() -> None:
    """In numbers, scales, layout, width, dtype or gradients; `decoded` by another way gives what is expected."""
    q, k, v = qkv(2, 6, 3, 2, 23, 8, 8)
    keys, values = QuantizedKV.of(k), QuantizedKV.of(v)
    attend(q, keys, values)
    assert came_again(q, keys, values) is not None
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys.scales, values.scales, keys.steps)]
    others = (
        (QuantizedKV.of(-3 * v), QuantizedKV.of(2 * k), True),
        (replace(keys, scales=keys.scales * 2), replace(values, scales=values.scales / 3), True),
        (replace(keys, scales=apart[0]), values, False),
        (keys, replace(values, scales=apart[1]), False),
        (replace(keys, steps=apart[2]), values, False),
        (replace(keys, scales=keys.scales[:, :1].expand(-1, 3, -1, -1)), values, False),
        (QuantizedKV.of(k, [3, 5]), values, False),
        (keys, v, False),
        (k, values, False),
        (k, v, False),
        (replace(keys, scales=keys.scales.clone().requires_grad_()), values, False),
    )
    for other_k, other_v, known in others:
        assert (came_again(q, other_k, other_v) is not None) is known
        out = attend(q, other_k, other_v)
        assert torch.equal(out, _whole_way(q, other_k, other_v))
        torch.testing.assert_close(out, attend(q, decoded(other_k), decoded(other_v), kernel="reference"))
    for wrong in (keys.to(torch.bfloat16), QuantizedKV.of(k[:, :, :9]), QuantizedKV.of(k[..., :7])):
        with pytest.raises((ShapeError, DTypeError), match="k"):
            attend(q, wrong, values)
    learned = q.clone().requires_grad_()
    attend(learned, keys, values).sum().backward()
    assert learned.grad is not None
    one = q[:, :, :1]
    attend(one, keys, values)
    for given in ((keys, _first(values, 22)), (keys, _first(values, 0)), (_first(keys, 0), values)):
        with pytest.raises(ShapeError, match="v"):
            attend(one, *given)
    assert not attend(one, _first(keys, 0), _first(values, 0)).any()
    many = torch.randn(2, 6, 60, 8)  # more queries than the library reads quantized keys for
    before = len(prepare._prepared)
    attend(many, keys, values)
    assert len(prepare._prepared) == before


def test_a_mask_is_known_to_show_the_past_only_where_it_does() -> None:
    class Even(Causal):
        """Of the keys up to the query's own, every other one."""

        def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
            return super().allowed(rows, cols, grid) & (cols % 2 == 0)

        def state(self, rows: Span, cols: Span, grid: Grid) -> State:
            return State.MIXED

        def spans(self, grid: Grid) -> None:
            return None

    far = Window(3)
    shown, hidden = (Causal(), Everything(), Causal() & Everything()), (far, Causal() & far, Even(), Causal() & Even())
    assert [shows_whole_past(mask) for mask in (*shown, *hidden)] == [True] * 3 + [False] * 4
    for mask in shown:
        assert all(bool(mask.to_dense(1, m).all()) for m in (1, 2, 9))
