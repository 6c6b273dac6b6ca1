"""Every kernel computes the same thing: the float64 reference, and PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from samples import MASKS, dense_truth, kernels_here, qkv
from torch import Tensor

from headwise.errors import ConfigError, DeviceError, DTypeError, KernelError, ShapeError
from headwise.kernels import use_kernel
from headwise.kernels.cpu.library import library
from headwise.map.attention import attend
from headwise.masks import Causal, Dense, Lengths, Window
from headwise.rule import KEY_BLOCK
from headwise.scores import SoftCap

LIMITS = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}


def error(got: Tensor, expected: Tensor) -> float:
    """Relative, Frobenius."""
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def able(kernel: str, *args: Tensor, **options: object) -> Tensor:
    """The kernel's output, or skip if it refuses the call."""
    try:
        return attend(*args, kernel=kernel, **options)  # type: ignore[call-overload, no-any-return]
    except KernelError as refusal:
        pytest.skip(str(refusal))


@pytest.mark.parametrize("kernel", kernels_here())
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", LIMITS)
def test_outputs_follow_the_formula(kernel: str, name: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(e=8, dtype=dtype)
    mask = MASKS[name](2, 37, 53)
    weights, _, _ = dense_truth(q, k, mask)
    out = able(kernel, q, k, v, mask=mask)
    assert out.dtype == dtype
    assert error(out, weights @ v.double().repeat_interleave(2, 1)) <= LIMITS[dtype]


@pytest.mark.thorough
@pytest.mark.parametrize("kernel", kernels_here())
@settings(deadline=None, derandomize=True, max_examples=40)
@given(data=st.data())
def test_random_shapes_equal_pytorch(kernel: str, data: st.DataObject) -> None:
    group, h_kv = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    n, d = data.draw(st.integers(1, 33)), data.draw(st.integers(1, 19))
    m = data.draw(st.integers(n, 40))
    q, k, v = qkv(data.draw(st.integers(1, 3)), group * h_kv, h_kv, n, m, d, d, seed=data.draw(st.integers(0, 99)))
    causal = data.draw(st.booleans())
    mask = Causal() if causal else None
    if kernel == "torch_fused" and causal and n != m and n > 1:
        with pytest.raises(KernelError, match="aligns causal queries"):
            attend(q, k, v, mask=mask, kernel=kernel)
        return
    bias = torch.ones(n, m).tril(m - n).bool() if causal else None
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=bias, enable_gqa=True)
    assert error(attend(q, k, v, mask=mask, kernel=kernel), expected) <= 2e-6


@pytest.mark.thorough_except("False-cpu", "True-torch_fused", "False-torch_blocks")
@pytest.mark.parametrize("kernel", kernels_here())
@pytest.mark.parametrize("causal", [False, True])
def test_many_blocks(kernel: str, causal: bool) -> None:
    q, k, v = qkv(1, 4, 2, 1301, 1301, 16, 16)
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal, enable_gqa=True)
    assert error(attend(q, k, v, mask=Causal() if causal else None, kernel=kernel), expected) <= 2e-6


@pytest.mark.parametrize("kernel", kernels_here())
@pytest.mark.parametrize("factor", [30.0, 1e4])
def test_big_logits_stay_exact_to_their_rounding(kernel: str, factor: float) -> None:
    q, k, v = qkv(e=8, n=53)
    q = q * factor
    weights, allowed, scores = dense_truth(q, k, Causal())
    out = able(kernel, q, k, v, mask=Causal())
    assert torch.isfinite(out).all()
    # A logit of size s is known to s · 2⁻²⁴ · √d in float32, and its weight so much.
    limit = 2e-6 + float(scores[allowed].abs().max()) * 2**-24 * 4
    if limit < 0.1:
        assert error(out, weights @ v.double().repeat_interleave(2, 1)) <= limit


@pytest.mark.parametrize("kernel", kernels_here())
def test_rows_that_see_nothing_are_zero_and_so_are_their_gradients(kernel: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(e=8))
    mask = Lengths([0, 53], [37, 11])
    out, amap = attend(
        q, k, v, mask=mask, kernel="torch_blocks" if kernel == "torch_fused" else kernel, return_map=True
    )
    assert (out[0] == 0).all()
    assert (out[1, :, 11:] == 0).all()
    assert (amap.lse[0] == -torch.inf).all()
    assert torch.isfinite(amap.lse[1, :, :11]).all()
    out.sum().backward()
    assert (q.grad[0] == 0).all()
    assert (q.grad[1, :, 11:] == 0).all()
    assert (v.grad[0] == 0).all()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))


@pytest.mark.parametrize("kernel", ["reference", "torch_blocks", "auto"])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_where_it_is_seen(kernel: str, where: str, bad: float) -> None:
    q, k, v = qkv(1, 4, 2, 41, 41, 8, 8)
    clean = attend(q, k, v, mask=Causal(), kernel="reference")
    (k if where == "k" else v)[0, 1, 29, 3] = bad
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = attend(q, k, v, mask=Causal(), kernel=kernel)
    torch.testing.assert_close(out[:, :, :29], clean[:, :, :29], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out[:, :2], clean[:, :2], rtol=1e-5, atol=1e-6)
    assert not torch.isfinite(out[:, 2:, 29:]).all()
    if kernel != "reference":  # its backward is autograd's own matmul, where 0 · NaN is NaN
        out[:, :, :29].sum().backward()
        assert torch.isfinite(q.grad[:, :, :29]).all()


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("h_kv", [1, 2, 4])
def test_gradients_of_blocks_by_finite_differences(name: str, h_kv: int) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(2, 4, h_kv, 7, 11, 3, 2, dtype=torch.float64))
    mask = MASKS[name](2, 7, 11)
    assert torch.autograd.gradcheck(lambda *x: attend(*x, mask=mask, kernel="torch_blocks"), (q, k, v), fast_mode=True)


@pytest.mark.thorough
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["torch_fused", "torch_blocks"])
def test_gradients_over_many_blocks_equal_the_reference(kernel: str, causal: bool) -> None:
    found = []
    for name in (kernel, "reference"):
        q, k, v = (x.requires_grad_() for x in qkv(1, 4, 2, 700, 700, 16, 16))
        out = attend(q, k, v, mask=Causal() if causal else None, kernel=name)
        (out * torch.linspace(-1, 1, 16)).sum().backward()
        found.append((q.grad, k.grad, v.grad))
    for got, expected in zip(*found, strict=True):
        assert error(got, expected) <= 5e-6


def test_training_memory_does_not_grow_with_the_square() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 2, 1500, 1500, 8, 8))
    for mask, kernel in ((Causal(), "torch_fused"), (Causal() & Window(100), "torch_blocks")):
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, s=saved: s.append(x.numel()) or x, lambda x: x):
            attend(q, k, v, mask=mask, kernel=kernel)
        assert 0 < sum(saved) <= 8 * q.numel()


@pytest.mark.thorough
def test_dropout_repeats_with_the_seed_and_keeps_the_mean() -> None:
    q, k, v = qkv(1, 2, 1, 23, 600, 8, 4)
    plain = attend(q, k, v)
    torch.manual_seed(1)
    one = attend(q, k, v, dropout_p=0.4)
    torch.manual_seed(1)
    assert torch.equal(one, attend(q, k, v, dropout_p=0.4))
    assert error(one, plain) > 0.05
    many = torch.stack([attend(q, k, v, dropout_p=0.4) for _ in range(400)]).mean(0)
    assert error(many, plain) < 0.1
    assert torch.equal(attend(q, k, v, dropout_p=0.0), plain)


@pytest.mark.thorough
def test_dropout_gradients_by_finite_differences() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, 4, 2, 5, 7, 3, 2, dtype=torch.float64))

    def call(*x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return attend(*x, dropout_p=0.3, mask=Causal())

    assert torch.autograd.gradcheck(call, (q, k, v))


def test_dropout_share_is_the_one_asked_for() -> None:
    n = 700
    weights = attend(torch.zeros(1, 1, 300, 4), torch.zeros(1, 1, n, 4), torch.eye(n)[None, None], dropout_p=0.25)
    kept = weights[weights > 0]
    assert kept.numel() / weights.numel() == pytest.approx(0.75, abs=0.01)
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / n / 0.75))


def test_every_tile_drops_weights_of_its_own() -> None:
    keys = 2 * KEY_BLOCK
    q, k, v = torch.zeros(1, 1, 37, 4), torch.zeros(1, 1, keys, 4), torch.eye(keys)[None, None]
    one, other = (attend(q, k, v, dropout_p=0.5, kernel="torch_blocks") > 0).chunk(2, -1)
    assert (one == other).float().mean() == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize("mask", [None, Causal(), Causal() & Window(9)])
def test_asking_for_the_map_changes_no_bit_and_neither_does_time(mask: object) -> None:
    q, k, v = qkv(n=53, e=8)
    out, amap = attend(q, k, v, mask=mask, return_map=True, measures=("entropy",))  # type: ignore[call-overload]
    with use_kernel(amap.kernel):  # "auto" may pick another one where nothing is measured
        plain = attend(q, k, v, mask=mask)  # type: ignore[call-overload]
        assert torch.equal(plain, out)
        assert torch.equal(plain, attend(q, k, v, mask=mask))  # type: ignore[call-overload]


@pytest.mark.parametrize("kernel", kernels_here())
def test_any_strides(kernel: str) -> None:
    q, k, v = qkv(n=53, e=8)
    plain = attend(q, k, v, mask=Causal(), kernel=kernel)
    strange = [x.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for x in (q, k, v)]
    assert not strange[0].is_contiguous()
    torch.testing.assert_close(attend(*strange, mask=Causal(), kernel=kernel), plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", ["torch_blocks", "reference"])
def test_no_queries_or_no_keys(kernel: str) -> None:
    q, k, v = qkv()
    assert attend(q[:, :, :0], k, v, kernel=kernel).shape == (2, 6, 0, 5)
    assert (attend(q, k[:, :, :0], v[:, :, :0], kernel=kernel) == 0).all()
    assert attend(q[:, :, :0], k, v).shape == (2, 6, 0, 5)
    assert (attend(q, k[:, :, :0], v[:, :, :0]) == 0).all()


@pytest.mark.parametrize("kernel", ["torch_blocks", "cpu", "auto"])
@pytest.mark.parametrize("where", ["q", "out"])
def test_nan_of_a_fully_masked_query_reaches_no_gradient(kernel: str, where: str) -> None:
    found = []
    for number in (0.0, torch.nan):
        q, k, v = qkv(1, 4, 2, 37, 53)
        d_out = torch.randn(1, 4, 37, 5, generator=torch.Generator().manual_seed(1))
        (q if where == "q" else d_out)[:, :, 29:] = number
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = able(kernel, *inputs, mask=Lengths([47], [29]))
        found.append(torch.autograd.grad(out, inputs, d_out))
    for clean, dirty in zip(*found, strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("kernel", ["torch_blocks", "auto"])
def test_a_masked_key_that_is_not_finite_passes_nothing_on_below_a_cap(kernel: str) -> None:
    q, k, v = qkv(1, 4, 2, 41, 41, 8, 8)
    found = []
    for number in (0.0, torch.nan):
        k[0, :, 29, 3] = number
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*inputs, mask=Causal(), score=SoftCap(2.0), kernel=kernel)
        found.append(torch.autograd.grad(out[:, :, :29].sum(), inputs[0])[0][:, :, :29])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kernel", [*kernels_here(), "auto"])
@pytest.mark.parametrize(("b", "h"), [(0, 6), (2, 0)])
def test_gradients_without_a_batch_or_without_heads_are_zero(kernel: str, b: int, h: int) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(b, h, 3, 41, 41, 8, 8))
    able(kernel, q, k, v, mask=Causal()).sum().backward()
    for x in (q, k, v):
        assert torch.equal(x.grad, torch.zeros_like(x))


def test_autos_choice_and_every_refusal_is_told() -> None:
    q, k, v = qkv(n=53, e=8)
    if "cpu" in kernels_here():
        first = "torch_fused" if library().target() == "portable" else "cpu"  # it has no wide vectors
        assert attend(q, k, v, mask=Causal(), return_map=True)[1].kernel == first
    exact = q.double(), k.double(), v.double()  # which the compiled kernel refuses
    assert attend(*exact, mask=Causal(), return_map=True)[1].kernel == "torch_fused"
    amap = attend(*exact, mask=Causal() & Window(9), return_map=True)[1]
    assert amap.kernel == "torch_blocks"
    assert "no mask but Causal()" in amap.refusals["torch_fused"]
    with pytest.raises(KernelError, match="value size 5 differs from the key size 8"):
        attend(q, k, v[..., :5], kernel="torch_fused")
    with pytest.raises(KernelError, match="not support dropout"):
        attend(q, k, v, dropout_p=0.5, kernel="reference")
    with pytest.raises(ConfigError, match=r"'fast'.*torch_blocks"):
        attend(q, k, v, kernel="fast")


Q, K, V = qkv()


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: attend(Q[0], K, V), ShapeError, ["q:", "(6, 37, 8)"]),
        (lambda: attend(Q, K[..., :7], V), ShapeError, ["k:", "(2, 3, 53, 7)", "8"]),
        (lambda: attend(Q, K, V[:, :, :50]), ShapeError, ["v:", "(2, 3, 50, 5)", "53"]),
        (lambda: attend(Q[:, :5], K, V), ShapeError, ["5 heads", "3 heads"]),
        (lambda: attend(Q, K[:1], V), ShapeError, ["k:", "(1, 3, 53, 8)"]),
        (lambda: attend(Q, K.double(), V), DTypeError, ["k is torch.float64", "q is torch.float32"]),
        (lambda: attend(Q.int(), K, V), DTypeError, ["q:", "torch.int32"]),
        (lambda: attend(Q, K, V.to("meta")), DeviceError, ["v is on meta", "q is on cpu"]),
        (lambda: attend(Q, K, [1]), DTypeError, ["v:", "list"]),
        (lambda: attend(Q, K, V, mask=[[True] * 53] * 37), DTypeError, ["mask:", "list"]),
        (lambda: attend(Q, K, V, mask=Dense(torch.ones(37, 52).bool())), ShapeError, ["Dense", "52", "53"]),
        (lambda: attend(Q, K, V, scale=torch.nan), ConfigError, ["scale=nan"]),
        (lambda: attend(Q, K, V, dropout_p=1.0), ConfigError, ["dropout_p=1.0"]),
        (lambda: attend(Q, K, V, measures=("entropy",)), ConfigError, ["return_map=True"]),
        (lambda: attend(K[:, :, :, :], K[:, :, :9], K[:, :, :9], mask=Causal()), ShapeError, ["53 queries", "9 keys"]),
    ],
)
def test_bad_input_is_named(call: object, kind: type[Exception], words: list[str]) -> None:
    with pytest.raises(kind) as caught:
        call()  # type: ignore[operator]
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.skipif("cpu" not in kernels_here(), reason="the compiled kernel is not here")
def test_without_wide_vectors_pytorchs_kernel_comes_first() -> None:
    used = library().target()
    assert used is not None
    q, k, v = qkv(n=53, e=8)
    with library().using("portable"):
        assert attend(q, k, v, return_map=True)[1].kernel == "torch_fused"
        assert attend(q, k, v, mask=Window(5), return_map=True)[1].kernel == "cpu"
        assert attend(q, k, v, return_map=True, measures=["entropy"])[1].kernel == "cpu"
    assert library().target() == used


def test_one_kernel_for_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(e=8)
    with use_kernel("torch_blocks"):
        assert attend(q, k, v, return_map=True)[1].kernel == "torch_blocks"
        assert attend(q, k, v, return_map=True, kernel="reference")[1].kernel == "reference"
        with use_kernel("torch_fused"), pytest.raises(KernelError, match="supports no mask but"):
            attend(q, k, v, mask=Window(3))
    monkeypatch.setenv("HEADWISE_KERNEL", "reference")
    assert attend(q, k, v, return_map=True)[1].kernel == "reference"
    monkeypatch.setenv("HEADWISE_KERNEL", "fastest")
    with pytest.raises(ConfigError, match="fastest"):
        attend(q, k, v)
    with pytest.raises(ConfigError, match="slowest"), use_kernel("slowest"):
        pass


def test_what_the_data_show_goes_to_the_next_kernel() -> None:
    q, k, v = qkv(n=53, e=8)
    v[0, 0, 40] = torch.nan  # which the first queries may not see
    amap = attend(q, k, v, mask=Causal(), return_map=True)[1]
    assert amap.kernel == "torch_blocks"
    if "cpu" in kernels_here():
        assert "not finite" in amap.refusals["cpu"]
        with pytest.raises(KernelError, match="not finite"):
            attend(q, k, v, mask=Causal(), kernel="cpu")


@pytest.mark.parametrize("kernel", ["auto", *kernels_here()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.0, -0.7, 1e-42, 1e-320])
def test_a_scale_of_zero_or_below_hides_what_the_mask_hides(
    kernel: str, dtype: torch.dtype, causal: bool, scale: float
) -> None:  # fmt: skip
    mask = Causal() if causal else None
    found = []
    for name in (kernel, "reference"):
        leaves = [x.requires_grad_() for x in qkv(2, 4, 2, 13, 13, 8, 8, dtype=dtype)]
        out = able(name, *leaves, mask=mask, scale=scale)
        found.append([out, *torch.autograd.grad(out, leaves, torch.linspace(-1, 1, 8).to(dtype).expand_as(out))])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_pytorchs_operator_refuses_a_causal_scale_of_zero_or_below() -> None:
    q, k, v = qkv(2, 4, 2, 13, 13, 8, 8)
    for scale in (0.0, -0.5, 1e-42):
        with pytest.raises(KernelError, match="masks before it scales"):
            attend(q, k, v, mask=Causal(), scale=scale, kernel="torch_fused")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["auto", "torch_fused", "torch_blocks"])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 8, 13, 17, 37])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("causal", [False, True])
def test_queries_that_are_no_numbers_are_never_taken_for_masked_ones(
    dtype: torch.dtype, kernel: str, n: int, bad: float, causal: bool
) -> None:  # fmt: skip
    """With so few keys PyTorch's operator makes output 0 and log-sum-exp 0 of them."""
    q, k, v = qkv(1, 2, 1, n, n, 4, 4, dtype=dtype)
    q[0, 1, n // 2] = bad
    mask = Causal() if causal else None
    expected, exact = attend(q, k, v, mask=mask, kernel="reference", return_map=True)
    try:
        out, amap = attend(q, k, v, mask=mask, kernel=kernel, return_map=True)
    except KernelError:
        assert kernel == "torch_fused"
        return
    assert torch.equal(out.isfinite(), expected.isfinite())
    assert torch.equal(amap.lse.isfinite(), exact.lse.isfinite())


def test_bad_queries_on_pytorchs_operator_are_counted() -> None:
    q, k, v = qkv(1, 2, 1, 3, 3, 4, 4, dtype=torch.float64)
    q[:] = torch.nan
    out, amap = attend(q, k, v, return_map=True)
    assert out.isnan().all()
    assert amap.measure("entropy").nonfinite.tolist() == [[3, 3]]
    assert "finite outputs" in amap.refusals["torch_fused"]


def test_queries_of_zeros_are_no_bad_ones() -> None:
    q, k, v = qkv(1, 2, 1, 1, 1, 4, 4, dtype=torch.float64)
    out, amap = attend(q * 0.0, k, v, kernel="torch_fused", return_map=True)
    assert torch.equal(out, v.expand(-1, 2, -1, -1))
    assert (amap.lse == 0).all()
