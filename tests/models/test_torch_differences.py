"""What differs from `nn.MultiheadAttention`: the lines of the table in docs/models.md, on both sides of each."""

import warnings
from pathlib import Path

import pytest
import torch
from test_torch_adapter import pair
from torch import nn

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.models.adapters.torch import MultiheadAttention

X = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))
DOC = Path(__file__).parents[2] / "docs" / "models.md"
# The first cell of each line, and the tests of it, here or in test_torch_adapter.py.
LINES = {
    "fully masked query": ["test_query_that_may_see_nothing_gives_zeros_and_no_nan"],
    "`need_weights=True`, its default": ["test_untouched_weights_never_exist"],
    "weights with dropout": ["test_dropout_is_random_repeatable_unbiased_and_not_in_the_weights"],
    "`is_causal` hint that contradicts the mask": ["test_wrong_hint_does_no_harm"],
    "`is_causal=True` without a mask": ["test_causal_needs_no_mask"],
    "floating mask of another dtype than the inputs": ["test_floating_masks_of_any_dtype_are_added"],
    "boolean and floating masks in one call": ["test_masks_of_two_kinds_are_no_warning"],
    "hooks on `out_proj`": ["test_hooks_on_the_output_projection_are_called"],
    "inference": ["test_attached_transformer_computes_the_same_and_is_never_passed_by"],
    "errors in a call": ["test_errors_are_of_one_family"],
    "`dropout` outside [0, 1)": ["test_dropout_is_checked_when_the_module_is_made"],
    "`torch.jit.script`": ["test_torchscript_is_refused"],
    "`torch.jit.trace`": ["test_a_traced_module_follows_every_mask", "test_traced_weights_are_refused"],
}


def test_the_table_has_these_lines():
    text = DOC.read_text(encoding="utf-8")
    _, _, table = text.partition("| | `nn.MultiheadAttention` | with headwise |\n| --- | --- | --- |\n")
    found = [line.split(" | ")[0].removeprefix("| ") for line in table.partition("\n\n")[0].splitlines()]
    assert found == list(LINES)
    here = Path(__file__).read_text(encoding="utf-8")
    there = Path(__file__).with_name("test_torch_adapter.py").read_text(encoding="utf-8")
    assert all(f"def {name}(" in here + there for names in LINES.values() for name in names)


def both(**options):
    return pair(12, 3, batch_first=True, **options)


@pytest.mark.parametrize("need_weights", [True, False])
def test_causal_needs_no_mask(need_weights):
    ours, theirs = both(dtype=torch.float32)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        theirs(X, X, X, is_causal=True, need_weights=need_weights)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    expected, _ = theirs(X, X, X, attn_mask=mask, is_causal=True, need_weights=need_weights)
    torch.testing.assert_close(ours(X, X, X, is_causal=True, need_weights=need_weights)[0], expected)


@pytest.mark.parametrize("of", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("module", [torch.float32, torch.float64])
@pytest.mark.parametrize("need_weights", [True, False])
def test_floating_masks_of_any_dtype_are_added(of, module, need_weights):
    ours, theirs = both(dtype=module)
    x = X.to(module)
    random = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
    mask = random.masked_fill(torch.eye(5) == 1, -torch.inf).to(of)
    expected, _ = theirs(x, x, x, attn_mask=mask.to(module), need_weights=need_weights)
    torch.testing.assert_close(ours(x, x, x, attn_mask=mask, need_weights=need_weights)[0], expected)
    if of != module and (need_weights or of != torch.float32):
        with pytest.raises(RuntimeError, match=r"[Dd]type"):
            theirs(x, x, x, attn_mask=mask, need_weights=need_weights)


def test_masks_of_two_kinds_are_no_warning():
    ours, theirs = both(dtype=torch.float32)
    masks = {"attn_mask": torch.randn(5, 5), "key_padding_mask": torch.arange(5) > torch.tensor([[4], [2]])}
    with pytest.warns(UserWarning, match="mismatched"):
        expected, _ = theirs(X, X, X, **masks)
    torch.testing.assert_close(ours(X, X, X, **masks)[0], expected)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"key": X[..., :11]}, AssertionError), ({"value": X[:, :4]}, AssertionError),
        ({"key": X[:1], "value": X[:1]}, RuntimeError),
        ({"attn_mask": torch.zeros(4, 5)}, RuntimeError), ({"key_padding_mask": torch.zeros(2, 4)}, AssertionError),
        ({"attn_mask": torch.zeros(5, 5).long()}, AssertionError),
    ],
)  # fmt: skip
def test_errors_are_of_one_family(options, error):
    ours, theirs = both(dtype=torch.float32)
    call = {"query": X, "key": X, "value": X, **options}
    with pytest.raises(error):
        theirs(**call)
    with pytest.raises(HeadwiseError) as raised:
        ours(**call)
    assert isinstance(raised.value, ValueError)
    assert not isinstance(raised.value, AssertionError | RuntimeError)


def test_dropout_is_checked_when_the_module_is_made():
    theirs = nn.MultiheadAttention(12, 3, dropout=1.5, batch_first=True)
    with pytest.raises(ValueError, match="dropout probability"):
        theirs(X, X, X)
    with pytest.raises(HeadwiseError, match=r"dropout=1\.5"):
        MultiheadAttention(12, 3, dropout=1.5)


# --- TorchScript


class Module(nn.Module):
    """Attention with both masks."""

    def __init__(self, attention, need_weights=False):
        super().__init__()
        self.attention, self.need_weights = attention, need_weights

    def forward(self, x, padding, mask):
        given = {"key_padding_mask": padding, "attn_mask": mask, "need_weights": self.need_weights}
        both = self.attention(x, x, x, **given)
        return both if self.need_weights else both[0]


@pytest.fixture
def _deprecated():
    """TorchScript itself is, and says so; and each branch that a trace takes is a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        yield


def hidden(first=0, last=0):
    """Padding of the second entry, True = ignore, [2, 5]."""
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[1, :first] = True
    mask[1, 5 - last :] = True
    return mask


PADDING = [hidden(), hidden(first=1), hidden(last=2), hidden(first=1, last=1)]
MASKS = [torch.zeros(5, 5).bool(), torch.ones(5, 5).triu(1).bool(), torch.eye(5).bool().roll(1, 1)]


@pytest.mark.thorough
@pytest.mark.usefixtures("_deprecated")
@pytest.mark.parametrize("floating", [False, True])
@pytest.mark.parametrize("made_with", [(0, 0), (2, 0), (0, 1)])
def test_a_traced_module_follows_every_mask(made_with, floating):
    ours, _ = both(dtype=torch.float32)
    module = Module(ours.eval())

    def mask(boolean):
        return torch.zeros(boolean.shape).masked_fill(boolean, -torch.inf) if floating else boolean

    padding, attn = PADDING[made_with[0]], MASKS[made_with[1]]
    traced = torch.jit.trace(module, (X, mask(padding), mask(attn)), check_trace=False)
    for padding in PADDING:
        for attn in MASKS:
            given = -X, mask(padding), mask(attn)
            torch.testing.assert_close(traced(*given), module(*given))


@pytest.mark.usefixtures("_deprecated")
def test_traced_weights_are_refused():
    ours, theirs = (Module(one.eval(), need_weights=True) for one in both(dtype=torch.float32))
    given = X, PADDING[0], MASKS[1]
    assert len(torch.jit.trace(theirs, given, check_trace=False)(*given)) == 2
    with pytest.raises(RuntimeError):
        torch.jit.trace(ours, given, check_trace=False)


@pytest.mark.usefixtures("_deprecated")
def test_torchscript_is_refused():
    ours, theirs = both(dtype=torch.float32)
    assert torch.jit.script(theirs)(X, X, X)[0].shape == X.shape
    with pytest.raises(RuntimeError):
        torch.jit.script(ours)
    assert hw.attach(nn.Sequential(theirs)).attached == ("0",)
    with pytest.raises(RuntimeError):
        torch.jit.script(theirs)
