"""Functions of PyTorch and of other packages that compute a whole attention: read, and equal to what they return."""

import fused_libraries as fused
import pytest
import torch
from fused_libraries import Model
from ways import B, D, E, H, N

import headwise as hw
from headwise.errors import ConfigError

HALF = D**-0.5


def only(function, x, **options):
    """The one call in a model of this function."""
    torch.manual_seed(1)
    model = Model(function, **options).double()
    found = hw.models.recognise(model, x)
    (call,) = found
    assert call.traced
    assert call.error < 1e-11
    assert call.name == ""
    with torch.no_grad():
        assert torch.equal(found.output, model(x))
    return call


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(B, N, E, dtype=torch.float64)


@pytest.mark.parametrize(
    ("options", "scale", "mask", "scores"),
    [
        ({}, HALF, "None", ""),
        ({"causal": True, "softmax_scale": 0.3}, 0.3, "Causal()", ""),
        ({"window_size": (2, 1)}, HALF, "Window(left=3, right=1)", ""),
        ({"causal": True, "window_size": (1, 0), "softcap": 5.0}, HALF,
         "(Causal() & Window(left=2, right=0))", "SoftCap(cap=5.0)"),
        ({"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125])}, HALF, "Causal()", "ALiBi(<3 slopes>)"),
        ({"return_attn_probs": True}, HALF, "None", ""),
    ],
    ids=["plain", "causal", "window", "cap", "alibi", "probs"],
)  # fmt: skip
def test_flash_attention(options, scale, mask, scores, x, flash):
    def function(q, k, v):
        found = flash.flash_attn_func(q, k, v, **options)
        return found[0] if isinstance(found, tuple) else found

    call = only(function, x)
    assert (call.map.shape, call.num_kv_heads, repr(call.mask)) == ((B, H, N, N), H, mask)
    assert call.scale == pytest.approx(scale)
    assert ", ".join(map(repr, call.scores)) == scores


def test_flash_attention_with_groups_and_fewer_queries(x, flash):
    function = flash.flash_attn_func  # imported before it is intercepted
    call = only(lambda q, k, v: function(q[:, -2:], k, v, causal=True), x, grouped=True)
    assert (call.map.shape, call.num_kv_heads, repr(call.mask)) == ((B, 4, 2, N), 2, "Causal()")


def test_flash_attention_of_packed_tensors(x, flash):
    call = only(lambda q, k, v: flash.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), causal=True), x)
    assert repr(call.mask) == "Causal()"
    call = only(lambda q, k, v: flash.flash_attn_kvpacked_func(q, torch.stack((k, v), 2)), x, grouped=True)
    assert call.mask is None


def test_flash_attention_of_packed_sequences(x, flash):
    starts = torch.tensor([0, 3, 4, 10], dtype=torch.int32)

    def function(q, k, v):
        q, k, v = (y.flatten(0, 1) for y in (q, k, v))
        return flash.flash_attn_varlen_func(q, k, v, starts, starts, 6, 6, causal=True)

    call = only(function, x)
    assert call.map.shape == (1, H, B * N, B * N)
    assert repr(call.mask) == "(Documents(<1×10 ids>) & Causal())"


def test_flash_attention_of_packed_sequences_that_differ(x, flash):
    """Two and one queries of sequences of five and three keys: a batch, padded on the left."""

    def function(q, k, v):
        q, k, v = (y.flatten(0, 1) for y in (q, k, v))
        starts_q, starts_k = torch.tensor([0, 2, 3]), torch.tensor([0, 5, 8])
        return flash.flash_attn_varlen_func(
            q[:3], k[:8], v[:8], starts_q, starts_k, 2, 5, causal=True, window_size=(3, 0)
        )

    call = only(function, x, grouped=True)
    assert (call.map.shape, call.num_kv_heads) == ((2, 4, 2, 5), 2)
    assert repr(call.mask).startswith("(Lengths([5, 3], queries=[2, 1], side='right') & ")


def test_flash_attention_with_a_cache(x, flash):
    past = torch.tensor([3, 1])

    def function(q, k, v):
        cache = [torch.zeros(B, 7, H, D, dtype=x.dtype) for _ in range(2)]
        return flash.flash_attn_with_kvcache(q, *cache, k=k, v=v, cache_seqlens=past - 1, causal=True)

    call = only(function, x)
    assert call.map.shape == (B, H, N, N + 2)
    assert repr(call.mask) == "(Lengths([7, 5], queries=[5, 5], side='right') & Causal())"


def test_dropout_of_flash_attention_is_compared_without_it(x, flash):
    starts = torch.tensor([0, 10])
    for function in (
        lambda q, k, v: flash.flash_attn_func(q, k, v, dropout_p=0.5),
        lambda q, k, v: flash.flash_attn_varlen_func(
            *(y.flatten(0, 1) for y in (q, k, v)), starts, starts, 10, 10, 0.5
        ),
    ):
        (call,) = hw.models.recognise(Model(function).double(), x)
        assert call.dropout_p == 0.5
        assert call.error < 1e-11


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("starts", [([0, 2, 3], [0, 5, 8]), ([0, 3, 10], [0, 3, 10])])
def test_gradients_of_gates_of_packed_sequences(starts, p, x, flash):
    starts_q, starts_k = map(torch.tensor, starts)
    heads = []

    def function(q, k, v):
        q, k, v = (y.flatten(0, 1) for y in (q, k, v))
        given = q[: starts_q[-1]], k[: starts_k[-1]], v[: starts_k[-1]], starts_q, starts_k, 7, 7, p
        heads.append(flash.flash_attn_varlen_func(*given))
        return heads[0]

    model = Model(function).double()
    with hw.telemetry.gate_gradients(model) as gates:
        y = model(x)
        heads[0].retain_grad()
        y.square().sum().backward()
    table = gates.importance().table
    expected = (heads[0] * heads[0].grad).sum((0, 2)).abs().detach()
    torch.testing.assert_close(table.column(next(iter(table))).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"block_table": torch.zeros(2, 3)}, r"flash_attn_with_kvcache: keys in pages \(block_table\)"),
        ({"rotary_cos": torch.ones(7, 2)}, r"rotary positions applied by flash-attn \(rotary_cos\)"),
        ({"cache_leftpad": torch.tensor([1, 0])}, r"a cache with other places"),
    ],
)
def test_a_call_of_flash_attention_that_is_not_followed_is_named(options, reason, x, flash):
    def function(q, k, v):
        return flash.flash_attn_with_kvcache(q, k, v, cache_seqlens=torch.tensor([5, 5]), **options)

    with pytest.raises(ConfigError, match=rf"{reason}.*\(test_recognise_libraries.py:"):
        hw.models.recognise(Model(function).double(), x)


@pytest.mark.parametrize(
    ("bias", "mask"),
    [
        (None, "None"),
        (fused.LowerTriangularMask(), "Causal()"),
        (fused.LowerTriangularFromBottomRightMask(), "Causal()"),
        (fused.LocalAttentionFromBottomRightMask(2, 1), "Window(left=3, right=1)"),
        (fused.BlockDiagonalMask([0, 2, 5], [0, 2, 5]), "Documents(<1×5 ids>)"),
        (fused.BlockDiagonalCausalMask([0, 2, 5], [0, 2, 5]), "(Documents(<1×5 ids>) & Causal())"),
        (torch.randn(B, H, N, N, dtype=torch.float64), "None"),
    ],
    ids=["none", "lower", "bottom right", "local", "blocks", "causal blocks", "tensor"],
)
def test_xformers(bias, mask, x, xformers):
    call = only(lambda q, k, v: xformers.memory_efficient_attention(q, k, v, attn_bias=bias), x)
    assert (call.map.shape, repr(call.mask)) == ((B, H, N, N), mask)
    assert len(call.scores) == isinstance(bias, torch.Tensor)


def test_xformers_with_other_alignments_and_layouts(x, xformers):
    attention = xformers.memory_efficient_attention
    call = only(lambda q, k, v: attention(q, k, v, fused.LowerTriangularMask()), x, context=3)
    assert call.map.shape == (B, H, N, 3)
    assert repr(call.mask).startswith("Dense")

    def groups(q, k, v):
        k, v = (y[:, :, :, None].expand(-1, -1, -1, 2, -1) for y in (k, v))
        return attention(q.unflatten(2, (2, 2)), k, v, scale=0.7)

    call = only(groups, x, grouped=True)
    assert (call.num_heads, call.num_kv_heads, call.scale) == (4, 2, pytest.approx(0.7))

    def folded(q, k, v):
        q, k, v = (y.transpose(1, 2).reshape(B * H, N, D) for y in (q, k, v))
        return attention(q, k, v).view(B, H, N, D)

    assert only(folded, x).map.shape == (B, H, N, N)


@pytest.mark.thorough
def test_varlen_of_pytorch(x, varlen):
    starts = torch.tensor([0, 4, 10], dtype=torch.int32)

    def function(q, k, v, **options):
        q, k, v = (y.flatten(0, 1) for y in (q, k, v))
        return varlen(q, k, v, starts, starts, 6, 6, **options)

    assert repr(only(function, x).mask) == "Documents(<1×10 ids>)"
    call = only(lambda *qkv: function(*qkv, window_size=(-1, 0), enable_gqa=True, scale=0.3), x, grouped=True)
    assert (call.num_kv_heads, call.scale, repr(call.mask)) == (2, 0.3, "(Documents(<1×10 ids>) & Causal())")
    call = only(lambda *qkv: function(*qkv, seqused_k=torch.tensor([3, 5])), x)
    assert repr(call.mask) == "Lengths([3, 5], queries=[4, 6], side='right')"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
class TestFlex:
    """flex_attention, whose first call imports PyTorch's compiler."""

    @staticmethod
    def call(x, score_mod=None, mask_mod=None, compiled=False, **options):
        from torch.nn.attention import flex_attention as flex

        mask = None if mask_mod is None else flex.create_block_mask(mask_mod, B, None, N, N, device="cpu")
        attention = torch.compile(flex.flex_attention, backend="eager") if compiled else flex.flex_attention

        def function(q, k, v):
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            grouped = q.shape[1] != k.shape[1]
            return attention(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=grouped)

        return only(function, x, **options)

    ids = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])

    @pytest.mark.thorough_except("causal", "window", "padding", "prefix")
    @pytest.mark.usefixtures("untraced_flex")
    @pytest.mark.parametrize(
        ("mask_mod", "expected"),
        [
            (lambda b, h, i, j: i >= j, "Causal()"),
            (lambda b, h, i, j: (i >= j) & (i - j < 3), "(Causal() & Window(left=3, right=0))"),
            (lambda b, h, i, j: TestFlex.ids[b, i] == TestFlex.ids[b, j], "Documents(<2×5 ids>)"),
            (lambda b, h, i, j: (TestFlex.ids[b, i] == TestFlex.ids[b, j]) & (i >= j),
             "(Documents(<2×5 ids>) & Causal())"),
            (lambda b, h, i, j: j < 4 - b, "Lengths([4, 3], side='left')"),
            (lambda b, h, i, j: (i >= j) | (j < 2), "Dense(<1×1×5×5>)"),
        ],
        ids=["causal", "window", "documents", "causal documents", "padding", "prefix"],
    )  # fmt: skip
    def test_masks(self, mask_mod, expected, x):
        assert repr(self.call(x, mask_mod=mask_mod).mask) == expected

    @pytest.mark.usefixtures("untraced_flex")
    @pytest.mark.parametrize(
        ("score_mod", "scale", "mask", "scores"),
        [
            (lambda s, b, h, i, j: s * 3, 3 * HALF, "None", ""),
            (lambda s, b, h, i, j: 5 * torch.tanh(s / 5), HALF, "None", "SoftCap(cap=5.0)"),
            (lambda s, b, h, i, j: s - (h + 1) * 0.3 * (i - j).abs(), HALF, "None", "RelativeBias(<3×9>, first=-4)"),
            (lambda s, b, h, i, j: torch.where(i >= j, s + 0.1 * i * j, -float("inf")), HALF, "Causal()", "Bias"),
        ],
        ids=["scale", "cap", "distance", "bias and mask"],
    )
    def test_scores(self, score_mod, scale, mask, scores, x):
        call = self.call(x, score_mod)
        assert (call.scale, repr(call.mask)) == (pytest.approx(scale), mask)
        assert ", ".join(map(repr, call.scores)).startswith(scores)
        assert len(call.scores) == bool(scores)

    @pytest.mark.thorough
    def test_groups_and_a_compiled_function(self, x):
        call = self.call(x, mask_mod=lambda b, h, i, j: i >= j, compiled=True, grouped=True)
        assert (call.num_heads, call.num_kv_heads, repr(call.mask)) == (4, 2, "Causal()")

    @pytest.mark.usefixtures("untraced_flex")
    def test_another_function_of_scores_is_not_followed(self, x):
        with pytest.raises(ConfigError, match=r"flex_attention: a score_mod that is not a scale, a soft cap"):
            self.call(x, lambda s, b, h, i, j: s + s.sin())

    @pytest.mark.usefixtures("untraced_flex")
    def test_a_mask_is_evaluated_once_for_all_layers(self, x):
        from torch.nn.attention import flex_attention as flex

        mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, N, N, device="cpu")

        def function(q, k, v):
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            return flex.flex_attention(flex.flex_attention(q, k, v, block_mask=mask), k, v, block_mask=mask)

        with torch.no_grad():
            one, two = hw.models.recognise(Model(function).double(), x)
        assert one.mask is two.mask


def test_functions_are_as_before_afterwards(x, flash):
    code = flash.flash_attn_func.__code__
    model = Model(lambda q, k, v: flash.flash_attn_func(q, k, v))
    with hw.watch(model.double()) as record:
        model(x)
        assert flash.flash_attn_func.__code__ is code
    assert record.layers == ("",)
    assert record.unwatched == {}


def test_another_thread_calls_the_function_itself_meanwhile(x, flash):
    from threading import Thread

    results = []

    def function(q, k, v):
        thread = Thread(target=lambda: results.append(flash.flash_attn_func(q, k, v)))
        thread.start()
        thread.join()
        return flash.flash_attn_func(q, k, v)

    call = only(function, x)
    assert call.map.shape == (B, H, N, N)
    assert len(results) == 2
