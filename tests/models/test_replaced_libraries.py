"""Functions of other packages that compute a whole attention, computed by `attach` instead: the same results and
gradients, and nothing that is not understood."""

import contextlib
import sys
from typing import Any

import fused_libraries as fused
import pytest
import torch
from fused_libraries import Model
from torch import Tensor
from ways import B, D, E, H, N

import headwise as hw

STARTS = torch.tensor([0, 3, 4, 10], dtype=torch.int32)
SLOPES = torch.tensor([0.5, 0.25, 0.125])


def results(model: Model, x: Tensor) -> list[Tensor]:
    """The output and the gradients of the input and of the parameters."""
    x = x.clone().requires_grad_()
    out = model(x)
    return [out.detach(), *torch.autograd.grad((out**3).sum(), [x, *model.parameters()])]


def counted(function: Any, calls: list[int]) -> Any:
    """The function, which counts how often its body runs."""

    def inner(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    return inner


def replaced(function: Any, body: tuple[Any, str], monkeypatch: Any, *, reference: Any = None, **options: Any) -> None:
    """Attach a model of this function, and compare another batch with what the function itself computes.

    Args:
        body: module and name of a function that the function of the package calls.
        reference: the same function with gradients, where it has none itself on a CPU.
    """
    torch.manual_seed(1)
    model, calls = Model(function, **options).double(), []
    first, second = torch.randn(2, B, N, E, dtype=torch.float64)
    if reference is None:
        expected = results(model, second)
    else:
        with torch.no_grad():
            expected = [model(second)]
        model.function = reference
        torch.testing.assert_close(model(second), expected[0], rtol=1e-10, atol=1e-12)
        expected = results(model, second)
        model.function = function
    monkeypatch.setattr(*body, counted(getattr(*body), calls))
    with hw.attach(model) as handle:
        with torch.no_grad():
            model(first)
        assert handle.attached == ("",)
        assert calls
        calls.clear()
        found = results(model, second)
        assert not calls, "the function was called"
        assert handle.skipped == {}
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "softmax_scale": 0.3},
        {"causal": True, "window_size": (1, 0), "softcap": 5.0},
        {"causal": True, "alibi_slopes": SLOPES},
    ],
    ids=["plain", "causal", "window, cap", "alibi"],
)
def test_flash_attention(options, flash, monkeypatch):
    replaced(lambda q, k, v: flash.flash_attn_func(q, k, v, **options), (fused, "dense"), monkeypatch)


def test_flash_attention_with_groups(flash, monkeypatch):
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash.flash_attn_kvpacked_func(q[:, -2:], torch.stack((k, v), 2), causal=True)

    replaced(function, (fused, "dense"), monkeypatch, grouped=True)


def test_flash_attention_of_packed_sequences(flash, monkeypatch):
    def same(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (y.flatten(0, 1) for y in (q, k, v))
        return flash.flash_attn_varlen_func(q, k, v, STARTS, STARTS, 6, 6, causal=True)

    def others(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (y.flatten(0, 1) for y in (q, k, v))
        starts = torch.tensor([0, 2, 3]), torch.tensor([0, 5, 8])
        return flash.flash_attn_varlen_func(q[:3], k[:8], v[:8], *starts, 2, 5, causal=True, window_size=(3, 0))

    replaced(same, (fused, "dense"), monkeypatch)
    replaced(others, (fused, "dense"), monkeypatch, grouped=True)


def test_a_cache_of_flash_attention_that_is_only_read(flash, monkeypatch):
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash.flash_attn_with_kvcache(q[:, -2:], k, v, cache_seqlens=torch.tensor([5, 3]), causal=True)

    replaced(function, (fused, "dense"), monkeypatch)


@pytest.mark.parametrize(
    "bias",
    [None, fused.LowerTriangularMask(), fused.LocalAttentionFromBottomRightMask(2, 1),
     fused.BlockDiagonalCausalMask([0, 2, 5], [0, 2, 5]), torch.randn(B, H, N, N, dtype=torch.float64)],
    ids=["none", "lower", "local", "causal blocks", "tensor"],
)  # fmt: skip
def test_xformers(bias, xformers, monkeypatch):
    function = xformers.memory_efficient_attention
    replaced(lambda q, k, v: function(q, k, v, attn_bias=bias), (torch, "einsum"), monkeypatch)


def test_xformers_with_groups(xformers, monkeypatch):
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (y[:, :, :, None].expand(-1, -1, -1, 2, -1) for y in (k, v))
        return xformers.memory_efficient_attention(q.unflatten(2, (2, 2)), k, v, scale=0.7)

    replaced(function, (torch, "einsum"), monkeypatch, grouped=True)


def test_varlen_of_pytorch(varlen, monkeypatch):
    from torch.nn.attention import varlen as module

    starts = torch.tensor([0, 4, 10], dtype=torch.int32)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (y.flatten(0, 1) for y in (q, k, v))
        return varlen(q, k, v, starts, starts, 6, 6, window_size=(-1, 0), enable_gqa=True, scale=0.3)

    torch.manual_seed(1)
    model, calls = Model(function, grouped=True).double(), []
    first, second = torch.randn(2, B, N, E, dtype=torch.float64)
    with torch.no_grad():
        expected = model(second)
        monkeypatch.setattr(module, "_varlen_attn", counted(module._varlen_attn, calls))
        with hw.attach(model):
            model(first)
            calls.clear()
            torch.testing.assert_close(model(second), expected, rtol=1e-10, atol=1e-12)
    assert not calls


# --- what must not be replaced


def kept(function: Any, reason: str) -> None:
    """The function is called in each pass, and the reason is given with the name and the line."""
    torch.manual_seed(1)

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Model(function), Model(plain)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), self.two(x)

    model, x = Both().double(), torch.randn(B, N, E, dtype=torch.float64)
    with torch.no_grad():
        expected = model(x)
        with hw.attach(model) as handle:
            with pytest.warns(UserWarning, match=rf"not attached: one: .*{reason}.*\(test_replaced_libraries.py:\d+\)"):
                model(x)
            found = model(x)
            assert [*handle.skipped] == ["one"]
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-10, atol=1e-12)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)))


def test_a_call_that_returns_more_or_changes_its_cache_is_kept(flash):
    kept(lambda q, k, v: flash.flash_attn_func(q, k, v, return_attn_probs=True)[0],
         "flash_attn_func: it returns more than its output")  # fmt: skip

    def cache(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        room = [torch.zeros(B, 7, H, D, dtype=q.dtype) for _ in range(2)]
        return flash.flash_attn_with_kvcache(q, *room, k=k, v=v, cache_seqlens=torch.tensor([2, 0]), causal=True)

    kept(cache, "flash_attn_with_kvcache: it writes new keys to its cache")


def test_a_call_that_is_not_followed_is_kept(flash):
    def pages(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash.flash_attn_with_kvcache(q, k, v, cache_seqlens=torch.tensor([5, 5]), block_table=torch.zeros(2, 3))

    kept(pages, r"flash_attn_with_kvcache: keys in pages \(block_table\)")


def test_another_call_of_the_same_line_is_compared_first(flash):
    """A line that returns more in its second pass: the function itself is called."""
    more = {}

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = flash.flash_attn_func(q, k, v, causal=True, **more)
        return found[0] if more else found

    model, x = Model(function).double(), torch.randn(B, N, E, dtype=torch.float64)
    expected = model(x)
    with hw.attach(model) as handle:
        model(x)
        assert handle.attached == ("",)
        more["return_attn_probs"] = True
        assert torch.equal(model(x), expected)
        assert "it returns more than its output" in handle.skipped[""]
        more.clear()
        model(x)
        assert handle.skipped == {}


@pytest.mark.parametrize("attached_first", [True, False])
def test_a_call_that_is_replaced_is_watched(attached_first, flash, monkeypatch):
    model, x = (
        Model(lambda q, k, v: flash.flash_attn_func(q, k, v, causal=True)).double(),
        torch.randn(B, N, E).double(),
    )
    calls: list[int] = []
    expected = model(x)
    monkeypatch.setattr(fused, "dense", counted(fused.dense, calls))
    with contextlib.ExitStack() as stack, torch.no_grad():
        opened = [lambda: hw.attach(model), lambda: hw.watch(model, maps="lazy")]
        found = [stack.enter_context(one()) for one in (opened if attached_first else opened[::-1])]
        record = found[1 if attached_first else 0]
        model(x)
        assert record.maps[""].shape == (B, H, N, N)
        calls.clear()
        torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-12)
        assert not calls
        assert repr(record.maps[""].mask) == "Causal()"
    assert record.totals["entropy"].shape == (1, H)


def test_certify_says_which_functions_attach_keeps(flash):
    model = Model(lambda q, k, v: flash.flash_attn_func(q, k, v, return_attn_probs=True)[0]).double()
    (verdict,) = hw.models.certify(model, torch.randn(B, N, E).double())
    assert verdict.same
    assert verdict.remarks == ("attach keeps flash_attn_func: it returns more than its output",)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
class TestFlex:
    """PyTorch's flex_attention itself, whose first call imports PyTorch's compiler."""

    ids = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
    KNOWN = {
        "plain": (None, None),
        "causal": (None, lambda b, h, i, j: i >= j),
        "window": (None, lambda b, h, i, j: (i >= j) & (i - j < 3)),
        "documents": (None, lambda b, h, i, j: (TestFlex.ids[b, i] == TestFlex.ids[b, j]) & (i >= j)),
        "padding": (None, lambda b, h, i, j: j < 4 - b),
        "scale": (lambda s, b, h, i, j: s * 3, None),
        "cap": (lambda s, b, h, i, j: 5 * torch.tanh(s / 5), lambda b, h, i, j: i >= j),
        "ALiBi": (lambda s, b, h, i, j: s + SLOPES[h] * (j - i), lambda b, h, i, j: i >= j),
        "mask in score_mod": (lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")), None),
    }  # fmt: skip

    @staticmethod
    def function(score_mod: Any, mask_mod: Any) -> Any:
        from torch.nn.attention import flex_attention as flex

        mask = None if mask_mod is None else flex.create_block_mask(mask_mod, B, None, N, N, device="cpu")

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            return flex.flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=True)

        return function

    @pytest.mark.thorough_except("plain", "window", "padding", "scale", "cap", "mask in score_mod")
    @pytest.mark.parametrize("name", KNOWN)
    def test_what_is_understood(self, name, request, monkeypatch):
        if name not in ("causal", "ALiBi"):
            request.getfixturevalue("untraced_flex")
        flex = sys.modules.get("torch.nn.attention.flex_attention") or __import__(
            "torch.nn.attention.flex_attention", fromlist=["flex_attention"]
        )
        function = self.function(*self.KNOWN[name])
        replaced(function, (flex, "flex_attention_hop"), monkeypatch, reference=self.dense(*self.KNOWN[name]),
                 grouped=name == "causal")  # fmt: skip

    @staticmethod
    def dense(score_mod: Any, mask_mod: Any) -> Any:
        """The definition of flex_attention, with gradients."""

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], 1) for y in (k, v))
            places = torch.meshgrid(*map(torch.arange, (*q.shape[:2], N, N)), indexing="ij")
            scores = q @ k.mT / D**0.5
            scores = scores if score_mod is None else score_mod(scores, *places)
            scores = scores if mask_mod is None else scores.masked_fill(~mask_mod(*places), -torch.inf)
            return scores.softmax(-1) @ v

        return function

    bias = torch.randn(N, N, dtype=torch.float64)
    weight = torch.randn(2 * N - 1, dtype=torch.float64, requires_grad=True)
    OTHERS = {
        "prefix": (None, lambda b, h, i, j: (i >= j) | (j < 2), "its mask has no short form"),
        "bias": (lambda s, b, h, i, j: s + TestFlex.bias[i, j], None, "more than the distance"),
        "gradients": (lambda s, b, h, i, j: s + TestFlex.weight[i - j + N - 1], None, "tensors that need gradients"),
        "another function": (lambda s, b, h, i, j: s + s.sin(), None, "not a scale, a soft cap, a bias or a mask"),
        "clamped": (lambda s, b, h, i, j: s.clamp(-50, 50), None, "not a scale, a soft cap, a bias or a mask"),
    }  # fmt: skip

    @pytest.mark.thorough_except("prefix", "another function", "clamped")
    @pytest.mark.usefixtures("untraced_flex")
    @pytest.mark.parametrize("name", OTHERS)
    def test_what_is_not(self, name):
        *mods, reason = self.OTHERS[name]
        kept(self.function(*mods), f"flex_attention: .*{reason}")

    @pytest.mark.thorough
    def test_blocks_that_are_not_those_of_the_mask(self):
        from torch.nn.attention import flex_attention as flex

        left_out = flex.BlockMask.from_kv_blocks(
            torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32), seq_lengths=(N, N)
        )

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            return flex.flex_attention(q, k, v, block_mask=left_out)

        kept(function, "flex_attention: a block_mask whose blocks are not those of its mask_mod")

    @pytest.mark.thorough
    @pytest.mark.usefixtures("untraced_flex")
    def test_a_tensor_that_a_mask_reads_may_change(self):
        from torch.nn.attention import flex_attention as flex

        ids = torch.zeros(N, dtype=torch.long)
        mask = flex.create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, N, N, device="cpu")

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flex.flex_attention(*(y.transpose(1, 2) for y in (q, k, v)), block_mask=mask)

        model, x = Model(function).double(), torch.randn(B, N, E, dtype=torch.float64)
        with torch.no_grad():
            with hw.attach(model):
                model(x)
                model(x)
                ids[3:] = 1
                changed = model(x)
            torch.testing.assert_close(changed, model(x), rtol=1e-10, atol=1e-12)

    @pytest.mark.thorough
    @pytest.mark.usefixtures("untraced_flex")
    def test_a_mask_is_evaluated_again_if_what_it_reads_may_have_changed(self, monkeypatch):
        from headwise.models.recognise import functions as flex

        evaluated: list[int] = []
        monkeypatch.setattr(flex, "_Evaluated", counted(flex._Evaluated, evaluated))
        width, listed = 3, [3]
        x = torch.randn(B, N, E, dtype=torch.float64)
        for mask_mod, times in (
            (lambda b, h, i, j: (i >= j) & (i - j < width), 1),
            (lambda b, h, i, j: (i >= j) & (i - j < listed[0]), 1),
            (lambda b, h, i, j: (i >= j) & (i - j < self.width), 4),
            (lambda b, h, i, j: (i >= j) & (i - j < TestFlex.width), 4),
            (lambda b, h, i, j: (i >= j) & (i - j < fused.WIDTH), 4),
            (lambda b, h, i, j: torch.where(i >= j, i - j < int(width), False), 1),
        ):
            evaluated.clear()
            model = Model(self.function(None, mask_mod)).double()
            with hw.attach(model), torch.no_grad():
                for _ in range(4):
                    model(x)
            assert len(evaluated) == times

    width = 3
