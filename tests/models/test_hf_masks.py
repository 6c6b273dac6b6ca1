"""Masks of transformers as ours: the same cells, and no n×m where there is a shorter name; to a model, eager's own."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.functional import pad
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils as theirs

import headwise as hw
from headwise.masks import And, Causal, Dense, Mask, Or
from headwise.models.adapters.huggingface import install, masks
from headwise.models.adapters.huggingface.masks import MaskTensor, Place, Unknown, make_mask, read

B = 2


def cells(made: MaskTensor) -> torch.Tensor:
    """What the headwise mask allows, boolean [b, 1, n, m]; without a look at the tensor that models see."""
    (b, _, n, m), keys = made.shape, made.position.keys
    allowed = torch.ones(b, 1, n, keys).bool() if made.mask is None else made.mask.to_dense(n, keys, batch=b)
    return pad(allowed, (0, m - keys)).expand(b, 1, n, m)


def holds_dense(mask: Mask | None) -> bool:
    return isinstance(mask, Dense) or (
        isinstance(mask, And | Or) and (holds_dense(mask.left) or holds_dense(mask.right))
    )


@st.composite
def calls(draw):
    """What transformers' makers of masks can make of a call, and where its queries and keys stand."""
    n, past = draw(st.integers(1, 7)), draw(st.integers(0, 5))
    kind = draw(st.sampled_from(["causal", "window", "window of a cache", "both ways", "cross", "packed", "fixed"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    window = draw(st.integers(1, 6))
    call = {"batch_size": B, "q_length": n, "kv_length": n + past, "q_offset": past, "kv_offset": 0}
    function = theirs.causal_mask_function
    if kind in ("window", "window of a cache"):
        function = theirs.sliding_window_causal_mask_function(window)
        if kind == "window of a cache" and past >= window:
            call |= {"kv_offset": past - window + 1, "kv_length": window - 1 + n}
    elif kind == "both ways":
        function = theirs.sliding_window_bidirectional_mask_function(window)
    elif kind == "cross":
        function = theirs.bidirectional_mask_function
        call |= {"kv_length": draw(st.integers(1, 9)), "q_offset": 0}
    elif kind == "packed":
        call |= {"kv_length": n, "q_offset": 0}
        opens = torch.rand(B, n, generator=generator) < 0.4
        opens[:, 0] = True
        index = torch.arange(n).expand(B, -1)
        positions = index - torch.where(opens, index, 0).cummax(-1).values
        if draw(st.booleans()):
            function = theirs.sliding_window_causal_mask_function(window)
        found = theirs.find_packed_sequence_indices(positions)
        if found is not None:
            function = theirs.packed_sequence_compatibility_function(function, positions, found)
    elif kind == "fixed":
        call |= {"kv_length": n + past + draw(st.integers(0, 4))}
        call["q_offset"] = torch.tensor(past)
    seen = call["kv_offset"] + call["kv_length"] if kind in ("cross", "packed") else past + n
    padding = draw(st.sampled_from(["none", "left", "right", "both", "holes"]))
    if padding != "none":
        place = torch.arange(seen)
        first, last = (torch.randint(0, seen, (B, 1), generator=generator) for _ in range(2))
        real = {"left": place >= first, "right": place < last, "both": (place >= first) & (place < last),
                "holes": torch.rand(B, seen, generator=generator) < 0.6}[padding]  # fmt: skip
        call["attention_mask"] = real
    return padding, function, call


@pytest.mark.thorough
@settings(deadline=None, max_examples=300)
@given(calls())
def test_the_same_cells_without_a_boolean_of_all_of_them(case):
    padding, function, call = case
    expected = theirs.sdpa_mask(mask_function=function, allow_is_causal_skip=False, **call)
    ours = make_mask(mask_function=function, **call)
    assert ours.shape == (B, 1, call["q_length"], call["kv_length"])
    assert torch.equal(cells(ours), expected.expand(ours.shape))
    assert torch.equal(ours + 0, theirs.eager_mask(mask_function=function, **call))
    if padding != "holes":
        assert not holds_dense(ours.mask)


def test_holes_in_padding_are_one_row_of_memory():
    real = torch.tensor([[1, 0, 1, 1, 0, 1]]).bool()
    mask = make_mask(1, 6, 6, mask_function=theirs.bidirectional_mask_function, attention_mask=real).mask
    assert isinstance(mask, Dense)
    assert mask.mask.untyped_storage().nbytes() == 6


def test_blocks_that_see_both_ways_are_documents():
    blocks = torch.tensor([[-1, 0, 0, -1, 1, 1, 1], [0, 0, 0, 0, -1, -1, -1]])
    function = theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(blocks))
    ours = make_mask(B, 7, 7, mask_function=function)
    assert torch.equal(cells(ours), theirs.sdpa_mask(B, 7, 7, mask_function=function, allow_is_causal_skip=False))
    assert not holds_dense(ours.mask)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_function_of_the_user_is_evaluated(one_by_one):
    def checked(b, h, q, k):
        return (q + k + b) % 2 == 0

    function = theirs.and_masks(theirs.causal_mask_function, checked)
    real = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]).bool()
    call = {"batch_size": B, "q_length": 5, "kv_length": 5, "mask_function": function, "attention_mask": real}
    expected = theirs.sdpa_mask(**call, allow_is_causal_skip=False, use_vmap=one_by_one)
    assert torch.equal(cells(make_mask(**call, use_vmap=one_by_one)), expected)


def test_a_maker_that_means_something_else_is_not_believed(monkeypatch):
    """As another version of transformers might have it."""

    def sliding_window_overlay(sliding_window):
        def inner_mask(b, h, q, k):
            return k >= q - sliding_window

        return inner_mask

    monkeypatch.setattr(theirs, "sliding_window_overlay", sliding_window_overlay)
    masks._makers.cache_clear()
    try:
        function = theirs.and_masks(theirs.causal_mask_function, sliding_window_overlay(2))
        with pytest.raises(Unknown):
            read(function, Place(0, 6))
        ours = make_mask(1, 6, 6, mask_function=function)
        assert torch.equal(cells(ours), theirs.sdpa_mask(1, 6, 6, mask_function=function, allow_is_causal_skip=False))
    finally:
        masks._makers.cache_clear()


def test_causal_is_causal():
    assert make_mask(1, 5, 5).mask == Causal()
    assert make_mask(1, 1, 5, q_offset=4).mask == Causal()


def test_transformers_before_5_4_passes_positions_instead_of_sizes(monkeypatch):
    def older(*, batch_size, cache_position, kv_length, kv_offset=0, **options):
        return theirs_now(batch_size, len(cache_position), kv_length, int(cache_position[0]), kv_offset, **options)

    theirs_now = theirs.eager_mask
    real = torch.tensor([[True] * 9, [False] * 2 + [True] * 7])
    expected = make_mask(2, 4, 9, q_offset=5, attention_mask=real)
    monkeypatch.setattr(theirs, "eager_mask", older)
    found = make_mask(batch_size=2, cache_position=torch.arange(5, 9), kv_length=9, attention_mask=real)
    assert torch.equal(cells(found), cells(expected))
    torch.testing.assert_close(found + 0, expected + 0)


def test_installing_again_keeps_a_wrapper_of_another_library(monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    install()
    wrapper = object()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "headwise", wrapper)
    install()
    assert ALL_ATTENTION_FUNCTIONS["headwise"] is wrapper


def test_decoding_steps_ask_the_mask_nothing_that_costs_a_torch_function(monkeypatch):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=7, hidden_size=24, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model, asked = LlamaForCausalLM(config).eval(), []
    own = MaskTensor.__torch_function__.__func__

    def counted(cls, func, *rest):
        asked.append(func)
        return own(cls, func, *rest)

    hw.attach(model)
    cache = model(torch.tensor([[1, 2, 3]])).past_key_values
    monkeypatch.setattr(MaskTensor, "__torch_function__", classmethod(counted))
    model(torch.tensor([[4]]), past_key_values=cache)
    assert not asked
