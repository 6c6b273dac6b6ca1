"""`mask=<tensor>` and `is_causal=True`, as in `F.scaled_dot_product_attention`."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from core.samples import qkv
from headwise import KVCache, MultiHeadAttention, TransformerBlock
from headwise.errors import DTypeError, ShapeError
from headwise.map.attention import attend
from headwise.masks import Causal, Dense, Lengths, Window
from headwise.scores import ALiBi, Bias

B, H, N, M = 2, 6, 5, 7
SHAPES = [(M,), (1,), (N, M), (N, 1), (H, N, M), (1, N, M), (B, 1, 1, M), (1, 1, 1, M), (B, 1, N, M), (1, H, N, M),
          (B, H, N, M), (B, H, 1, M), (B, 1, N, 1)]  # fmt: skip


def boolean(*shape: int, seed: int = 5) -> Tensor:
    """A mask in which every query may attend to something."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4
    mask[..., 0] = True
    return mask


def floating(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64).to(dtype)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    return qkv(B, H, 3, N, M, 11, 13, dtype=dtype)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    q, k, v = (x.double() for x in (q, k, v))
    mask = mask if mask is None else mask.expand(B, H, N, M)  # PyTorch's own needs two axes
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [boolean, floating])
def test_tensor_broadcasts_as_in_pytorch(make, shape):
    q, k, v = inputs()
    mask = make(*shape)
    torch.testing.assert_close(attend(q, k, v, mask=mask), sdpa(q, k, v, mask), rtol=1e-12, atol=1e-12)
    narrow = attend(q.float(), k.float(), v.float(), mask=mask, scale=0.37)
    torch.testing.assert_close(narrow.double(), sdpa(q, k, v, mask, 0.37), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kernel", ["reference", "torch_blocks", "auto"])
def test_fully_masked_query_gives_zeros(kernel):
    q, k, v = inputs(torch.float32)
    mask = boolean(B, 1, N, M)
    mask[1, 0, 3] = False
    additive = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    for given in (mask, additive):
        q.grad = None
        out, amap = attend(q.requires_grad_(), k, v, mask=given, return_map=True, measures=["entropy"], kernel=kernel)
        out.sum().backward()
        assert torch.equal(out[1, :, 3], torch.zeros(H, 13))
        assert torch.equal(q.grad[1, :, 3], torch.zeros(H, 11))
        assert amap.lse[1, :, 3].eq(-torch.inf).all()
        assert not out.isnan().any()
        mine, theirs = out.detach().double()[0], sdpa(q.detach(), k, v, mask)[0]
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("shape", [(M,), (N, M), (H, N, M), (B, 1, 1, M), (B, H, N, M)])
def test_additive_mask_has_gradients(shape):
    q, k, v = inputs()
    mine, theirs = (floating(*shape).requires_grad_() for _ in range(2))
    weights = floating(B, H, N, 13)
    (attend(q, k, v, mask=mine) * weights).sum().backward()
    (sdpa(q, k, v, theirs) * weights).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def test_additive_mask_joins_other_scores():
    q, k, v = inputs()
    mask, alibi = floating(N, M), ALiBi.standard(H)
    both = attend(q, k, v, mask=mask, score=alibi)
    assert torch.equal(both, attend(q, k, v, score=(alibi, Bias(mask[None, None]))))


@pytest.mark.parametrize("other", [None, Window(3), boolean(N, M), floating(N, M), boolean(B, 1, 1, M)])
def test_is_causal_is_aligned_to_the_end_of_the_keys(other):
    q, k, v = inputs()
    causal = torch.ones(N, M, dtype=torch.bool).tril(M - N)
    expected = torch.zeros(N, M, dtype=torch.float64).masked_fill(~causal, -torch.inf)
    if isinstance(other, Window):
        expected = expected.masked_fill(~other.to_dense(N, M)[0, 0], -torch.inf)
    elif other is not None and other.dtype == torch.bool:
        expected = expected.masked_fill(~other, -torch.inf)
    elif other is not None:
        expected = expected + other
    out = attend(q, k, v, mask=other, is_causal=True)
    torch.testing.assert_close(out, sdpa(q, k, v, expected), rtol=1e-12, atol=1e-12)


def test_is_causal_is_causal_and_not_what_an_equal_call_without_it_had():
    q, k, v = inputs(torch.float32)
    for mask in (None, Window(3)):
        full = attend(q, k, v, mask=mask)
        causal = attend(q, k, v, mask=Causal() if mask is None else mask & Causal())
        for _ in range(3):  # the second such call takes the short way
            assert torch.equal(attend(q, k, v, mask=mask, is_causal=True), causal)
            assert torch.equal(attend(q, k, v, mask=mask), full)


def test_padding_and_causal_tensors_become_masks_that_hold_no_matrix():
    q, k, v = inputs()
    padding = torch.tensor([[True] * 5 + [False] * 2, [True] * M])[:, None, None]
    assert isinstance(attend(q, k, v, mask=padding, return_map=True)[1].mask, Lengths)
    causal = torch.ones(N, M, dtype=torch.bool).tril(M - N)
    assert attend(q, k, v, mask=causal, return_map=True)[1].mask == Causal()


@pytest.mark.thorough
@pytest.mark.parametrize("make", [boolean, floating])
def test_compiled_call_reads_the_tensor_when_it_runs(make):
    @torch.compile(backend="eager", fullgraph=True)
    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attend(q, k, v, mask=mask, is_causal=True)

    q, k, v = inputs()
    for mask in (make(N, M), make(N, M).flip(-1)):
        torch.testing.assert_close(call(q, k, v, mask), attend(q, k, v, mask=mask, is_causal=True))


def test_call_without_numbers():
    q, k, v = (x.to("meta") for x in inputs())
    for mask in (boolean(B, 1, 1, M), floating(N, M)):
        assert attend(q, k, v, mask=mask.to("meta"), is_causal=True).shape == (B, H, N, 13)


@pytest.mark.parametrize(
    ("mask", "kind", "words"),
    [
        (torch.ones(N, M, dtype=torch.int64), DTypeError, ["mask", "int64", "True = may attend"]),
        (boolean(N, M - 1), ShapeError, ["mask", "(5, 6)", "[2, 6, 5, 7]"]),
        (boolean(B, N, M), ShapeError, ["mask", "(2, 5, 7)", "[b, 1, n, m]"]),
        (boolean(1, 1, 1, N, M), ShapeError, ["mask", "(1, 1, 1, 5, 7)"]),
        ("causal", DTypeError, ["mask", "str"]),
    ],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_wrong_mask_is_named(mask, kind, words, is_causal):
    with pytest.raises(kind) as raised:
        attend(*inputs(), mask=mask, is_causal=is_causal)
    assert all(word in str(raised.value) for word in words)


def test_more_queries_than_keys_have_no_causal_order():
    q, k, v = qkv(1, 2, 1, 5, 3)
    with pytest.raises(ShapeError, match="5 queries"):
        attend(q, k, v, is_causal=True)


def test_layers_take_tensors():
    torch.manual_seed(0)
    layer, x = MultiHeadAttention(12, 3), torch.randn(2, N, 12)
    mask = boolean(2, 1, N, N)
    assert torch.equal(layer(x, mask=mask), layer(x, mask=Dense(mask)))
    assert torch.equal(layer(x, mask=torch.ones(N, N).tril().bool()), layer(x, mask=Causal()))
    bias = torch.randn(3, N, N)
    assert torch.equal(layer(x, mask=bias), layer(x, score=Bias(bias[None])))
    block = TransformerBlock(layer, d_ff=7)
    assert torch.equal(block(x, mask=mask), block(x, mask=Dense(mask)))
    with pytest.raises(ShapeError, match=r"\[2, 3, 5, 5\]"):
        layer(x, mask=boolean(N, M))


def test_layers_take_tensors_over_the_keys_of_a_cache():
    torch.manual_seed(0)
    layer, x = MultiHeadAttention(12, 3), torch.randn(2, N, 12)
    mask = boolean(N, N) & torch.ones(N, N).tril().bool()
    whole, cache = layer(x, mask=mask), KVCache()
    steps = [layer(x[:, i : i + 1], mask=mask[i, : i + 1], cache=cache) for i in range(N)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)
