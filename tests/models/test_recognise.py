"""Attention recognised in any model: what is known of each call, and that its map equals the code's own weights."""

import math

import library_ways
import near_misses
import pytest
import torch
import ways
from torch import nn
from ways import B, D, E, H, N

import headwise as hw
from headwise.errors import ConfigError
from headwise.models.recognise import scores

HALF = D**-0.5
CAUSAL, NONE = "Causal()", "None"
# way: query heads, KV heads, scale, mask, scores
WAYS = {
    "SplitAfterProjection": (H, H, HALF, CAUSAL, ""),
    "DividedByTensor": (H, H, HALF, NONE, ""),
    "DroppedByFunction": (H, H, HALF, NONE, ""),
    "AnnotatedTransformer": (H, H, HALF, CAUSAL, ""),
    "SmallGPT": (H, H, HALF, CAUSAL, ""),
    "SequenceToSequence": (1, 1, 1.0, NONE, ""),
    "VisionTransformer": (H, H, HALF, NONE, ""),
    "AdditiveMask": (H, H, HALF, "Lengths([5, 3], side='left')", ""),
    "PositionBias": (H, H, 1.0, NONE, "Bias"),
    "EinsumHeads": (H, H, HALF, CAUSAL, ""),
    "FoldedHeads": (H, H, HALF, "Lengths([3, 5], side='left')", ""),
    "FoldedRotary": (H, H, None, NONE, ""),
    "GroupedKeys": (6, 2, HALF, CAUSAL, ""),
    "CrossAttention": (H, H, HALF, "Lengths([4, 7], side='left')", ""),
    "LinearBiases": (H, H, HALF, CAUSAL, "RelativeBias"),
    "SlidingWindow": (H, H, HALF, "(Causal() & Window(left=3, right=0))", ""),
    "SoftCapped": (H, H, 3.0, CAUSAL, "SoftCap(cap=5.0)"),
    "Sinks": (H, H, HALF, NONE, "SinkLogits"),
    "SinksInFront": (H, H, HALF, NONE, "SinkLogits"),
    "ZeroForNaN": (H, H, HALF, "Dense", ""),
    "OverImages": (1, 1, 1.0, NONE, ""),
    "HeadsOverImages": (H, H, HALF, NONE, ""),
    "AddedProduct": (H, H, HALF, NONE, ""),
    "WrittenSoftmax": (H, H, HALF, NONE, ""),
    "LogSoftmax": (H, H, 0.5, NONE, ""),
    "KeysFirst": (H, H, HALF, NONE, ""),
    "LearnedQuery": (1, 1, E**-0.5, NONE, ""),
    "Windows": (H, H, HALF, "Dense", "Bias"),
    "OneKeyHead": (H, 1, HALF, NONE, ""),
    "GroupsByEinsum": (6, 2, HALF, NONE, ""),
    "HeadsInWeights": (H, H, HALF, NONE, ""),
    "InPlace": (H, H, HALF, CAUSAL, ""),
    "MultipliedMask": (H, H, HALF, CAUSAL, ""),
    "Cosine": (H, H, 1.0, NONE, ""),
    "SumOfProducts": (H, H, HALF, NONE, "Bias"),
    "Disentangled": (H, H, 1 / math.sqrt(2 * D), NONE, "Bias"),
    "Unbatched": (H, H, 0.5, NONE, ""),
    "MaskedAfterwards": (H, H, 0.5, CAUSAL, ""),
    "TwoPackages": (H, H, 0.3, CAUSAL, ""),
    "Grouped": (H, 1, 0.5, "Lengths([4, 5], side='left')", ""),
}
LIBRARY_WAYS = {
    "SoftmaxOne": (H, H, HALF, NONE, "SinkLogits"),
    "SafeSoftmaxOne": (H, H, HALF, CAUSAL, "SinkLogits"),
    "LogSumExp": (H, H, HALF, NONE, ""),
    "SummedProducts": (H, H, HALF, NONE, ""),
    "DotOfState": (1, 1, 1.0, NONE, ""),
    "AssignedMask": (H, H, HALF, CAUSAL, ""),
    "ChosenFromFull": (H, H, HALF, CAUSAL, ""),
    "Rearranged": (H, H, HALF, "Lengths([5, 3], side='left')", ""),
    "RepeatedGroups": (H, 1, HALF, NONE, ""),
    "ThreeOperands": (H, H, 1.0, NONE, ""),
    "Bilinear": (H, 1, E**-0.5, CAUSAL, ""),
    "Sublists": (H, H, 0.5, NONE, ""),
    "OneKey": (H, H, HALF, NONE, ""),
    "OneKeyOfSeveral": (H, H, HALF, NONE, ""),
    "Packed": (H, H, HALF, "(Documents(<2×5 ids>) & Causal())", ""),
    "Blocks": (H, H, HALF, "Documents(<1×5 ids>)", ""),
    "LowPrecisionBmm": (H, H, HALF, "Lengths([5, 3], side='left')", ""),
    "SpatialTokens": (1, 1, E**-0.5, NONE, ""),
    "NormalizedQueries": (H, H, 10.0, NONE, "SoftCap(cap=50.0)"),
    "LargestScores": (H, H, HALF, "Dense", ""),
    "CachedKeys": (H, H, HALF, CAUSAL, ""),
    "MultipliedScale": (H, H, HALF, "Lengths([5, 4], side='left')", "RelativeBias"),
    "Latents": (H, H, HALF, NONE, ""),
}


class Model(nn.Module):
    """Attention below a block."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"attn": attention})])

    def forward(self, x):
        return self.blocks[0]["attn"](x)


def model_of(attention: nn.Module) -> Model:
    return Model(attention).double().eval()


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(B, N, E, dtype=torch.float64)


def check(call, name, expected, weights):
    heads, kv_heads, scale, mask, scores = expected
    assert call.name == name
    assert call.traced
    assert (call.num_heads, call.num_kv_heads) == (heads, kv_heads)
    assert scale is None or call.scale == pytest.approx(scale)
    assert repr(call.mask).startswith(mask)
    assert [repr(score).split("(<")[0] for score in call.scores] == ([scores] if scores else [])
    assert call.map.shape == tuple(weights.shape)
    torch.testing.assert_close(call.map[:], weights, rtol=1e-9, atol=1e-11)


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("way", [*WAYS, *LIBRARY_WAYS])
def test_a_way_of_writing_attention_is_recognised(way, x):
    model = model_of(getattr(ways if way in WAYS else library_ways, way)())
    found = hw.models.recognise(model, x)
    (call,) = found
    check(call, "blocks.0.attn", {**WAYS, **LIBRARY_WAYS}[way], model.blocks[0]["attn"].weights)
    reference = {"TwoPackages", "Grouped", "Packed"}  # which compute their weights once more, for this comparison
    assert len(found.not_followed) == (way in reference)
    assert torch.equal(found.output, model(x))


def test_the_fused_branch_is_recognised(x):
    model = model_of(ways.SmallGPT(flash=True))
    found = hw.models.recognise(model, x)
    check(found[0], "blocks.0.attn", WAYS["SmallGPT"], model.blocks[0]["attn"].weights)


def test_heads_that_are_modules_are_calls_of_their_own(x):
    model = model_of(ways.HeadsInAList())
    calls = list(hw.models.recognise(model, x))
    assert len(calls) == H
    for i, call in enumerate(calls):
        name = f"blocks.0.attn.heads.{i}"
        check(call, name, (1, 1, HALF, CAUSAL, ""), model.get_submodule(name).weights)


@pytest.mark.parametrize("need_weights", [True, False])
def test_nn_multihead_attention_is_recognised(need_weights, x):
    model = model_of(ways.TorchLayer(need_weights))
    calls = list(hw.models.recognise(model, x))
    assert [call.name for call in calls] == ["blocks.0.attn.mha", "blocks.0.attn.mha#2"][: 2 - need_weights]
    for call in calls:
        expected = (H, H, HALF, "Lengths([4, 5], side='left')", "")
        check(call, call.name, expected, model.blocks[0]["attn"].weights)


def test_the_fast_path_of_an_encoder_is_visible(x):
    layer = nn.TransformerEncoderLayer(E, H, 7, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    found = hw.models.recognise(model, x)
    assert [call.name for call in found] == ["layers.0.self_attn", "layers.1.self_attn"]
    torch.testing.assert_close(found.output, model(x))


NEAR = {
    "LinearAttention": "two products without a softmax between them, as in linear attention",
    "CausalLinearAttention": "two products without a softmax between them, as in linear attention",
    "EfficientAttention": r"softmax of the output of a layer \(linear\)",
    "SigmoidAttention": "sigmoid attention: sigmoid takes the place of softmax",
    "SquaredReluAttention": "relu attention: relu takes the place of softmax",
    "OverQueries": "softmax over the queries, not over the keys",
    "OverHeads": "softmax along an axis that is not that of the keys, such as the heads",
    "SlotAttention": "softmax over the queries, not over the keys",
    "TiedClassifier": "its result is not multiplied by values, as in a classifier",
    "Classifier": r"softmax of the output of a layer \(linear\), as in a classifier, router or gate",
    "Mixture": "its keys are a parameter, as in a mixture of experts",
    "Memory": "its keys are a parameter, as in a mixture of experts or a layer with softmax",
    "ExpertsOfTheBatch": "the values differ from query to query, as in a mixture of experts or a gate",
    "Similarity": "1 product of two tensors without a softmax",
    "Gating": r"softmax of the output of a layer \(linear\), as in a classifier, router or gate",
    "Contrastive": "its result goes through diagonal at",
    "MixedHeads": "combined along another axis than the keys by einsum at .*near_misses.py:.*mixing of heads",
    "MaskedWeights": "the weights are changed after the softmax, by mul at .*near_misses.py:",
    "NormalizedWeights": "the weights are changed after the softmax, by square at",
    "LargestWeights": "its result goes through topk at",
    "AddedOne": "the number that is added to the sum of the exponentials, differs between queries",
    "KeptColumn": "the column that was joined to the scores is multiplied by values",
    "AdditiveAttention": "softmax of what is not a product of queries and keys, as in additive attention",
    "ClampedScores": "clamp of scores at .*near_misses.py:",
    "BiasInsideCap": "scores are biased before a soft cap; headwise adds biases after it, then masks",
    "WeakMask": "masked scores are set to -3, which does not mask them",
}


@pytest.mark.parametrize("miss", NEAR)
def test_a_near_miss_is_not_taken_for_attention(miss, x):
    with pytest.raises(ConfigError, match=rf"recognise\(model\): no attention in Model; .*nearest: .*{NEAR[miss]}"):
        hw.models.recognise(model_of(getattr(near_misses, miss)()), x)


def test_what_is_not_followed_is_listed_beside_what_is(x):
    model = nn.Sequential(ways.DividedByTensor(), near_misses.SigmoidAttention(), near_misses.Classifier()).double()
    found = hw.models.recognise(model, x)
    assert list(found.maps()) == ["0"]
    assert [one.name for one in found.not_followed] == ["2", "1"]
    assert "near_misses.py:" in found.not_followed[1].line
    lines = repr(found).splitlines()
    assert lines[0].split()[:4] == ["module", "heads", "KV", "heads"]
    assert lines[1].split()[:4] == ["0", "3", "3", "5"]
    assert lines[2].startswith("not followed: 2: softmax of the output of a layer")
    assert found._repr_html_().count("<tr>") == 2


def test_heads_are_a_guess_where_no_layer_made_them(x):
    class Free(nn.Module):
        def forward(self, x):
            x = x.clone().view(B, N, H, D).permute(0, 2, 1, 3)
            return (x @ x.mT).softmax(-1) @ x

    (call,) = found = hw.models.recognise(Free(), x)
    assert not call.traced
    assert call.num_heads == H
    assert repr(found).splitlines()[1].split()[2] == "3?"


def test_heads_folded_into_the_batch_are_found_by_the_keys_where_queries_are_selected(x):
    class Selected(ways.Way):
        def forward(self, x):
            q, k, v = (y.reshape(B * H, N, D) for y in self.heads(x))
            q = q[torch.arange(B * H)[:, None], torch.tensor([3, 1])]
            weights = torch.softmax(q @ k.mT / 2, -1)
            self.weights = weights.view(B, H, 2, N)
            return weights @ v

    model = model_of(Selected())
    (call,) = hw.models.recognise(model, x)
    check(call, "blocks.0.attn", (H, H, 0.5, NONE, ""), model.blocks[0]["attn"].weights)
    assert call.traced


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_not_followed_and_do_no_harm(x):
    class Nested(nn.Module):
        def forward(self, x):
            q = torch.nested.nested_tensor([x[0, :3], x[1]], layout=torch.jagged).view(2, -1, H, D).transpose(1, 2)
            return torch.nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2)

    found = hw.models.recognise(nn.Sequential(ways.DividedByTensor(), Nested()).double(), x)
    assert [(one.name, one.reason) for one in found.not_followed] == [("1", "nested tensors")]


def test_a_module_of_torchscript_is_named(x):
    scripted = torch.jit.trace(ways.VisionTransformer().eval(), torch.randn(B, N, E))
    found = hw.models.recognise(nn.Sequential(ways.DividedByTensor(), scripted), x.float())
    assert [one.name for one in found.not_followed] == ["1"]
    assert "compiled by TorchScript" in repr(found)


@torch.library.custom_op("headwise_tests::quick_attention", mutates_args=())
def quick_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of a compiled extension."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    "call", [quick_attention, torch.ops.headwise_tests.quick_attention], ids=["function", "packet"]
)
def test_an_operator_of_a_compiled_extension_is_named(call, x):
    class Quick(ways.Way):
        def forward(self, x):
            return self.merge(call(*self.heads(x)))

    found = hw.models.recognise(nn.Sequential(ways.DividedByTensor(), Quick()).double(), x)
    assert [one.name for one in found.not_followed] == ["1"]
    assert "computed by the operator headwise_tests.quick_attention" in found.not_followed[0].reason
    assert found.not_followed[0].line.rpartition(":")[0] == __file__


def test_a_fused_layer_of_pytorch_that_is_called_itself_is_named(x):
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = (3 * E, E), (3 * E,), (E, E), (E,)
            self.weights = [torch.randn(*size).double() for size in sizes]

        def forward(self, x):
            return torch._native_multi_head_attention(x, x, x, E, H, *self.weights)[0]

    with pytest.raises(ConfigError, match=r"computed by the operator torch._native_multi_head_attention in compiled"):
        hw.models.recognise(Fused(), x)


def test_an_attention_in_which_nothing_was_seen_is_named(x):
    class WindowAttention(ways.Way):
        def forward(self, x):
            return self.v_proj(x)

    found = hw.models.recognise(nn.Sequential(ways.DividedByTensor(), WindowAttention()).double(), x)
    assert [str(one) for one in found.not_followed] == [
        "1: nothing was recognised in this WindowAttention: it was not called, or compiled code computes its attention"
    ]


@pytest.mark.parametrize(
    ("mask", "n", "m"),
    [
        (hw.Causal(), 5, 7),
        (hw.Causal() & hw.masks.Window(3), 7, 7),
        (hw.masks.Window(2, 3), 5, 7),
        (hw.masks.Window(7, 2), 5, 7),
        (hw.Causal() & hw.Lengths([7, 3]), 5, 7),
        (hw.Lengths([4, 6], side="right"), 5, 7),
        (hw.Lengths([2, 5]), 7, 5),
    ],
    ids=repr,
)
def test_a_boolean_gets_the_name_of_its_mask(mask, n, m):
    def named(allowed: torch.Tensor) -> hw.masks.Mask | None:
        return scores.mask_of_rows(lambda rows: allowed[:, :, rows.start : rows.stop], (B, H, n, m))

    dense = mask.to_dense(n, m, batch=B)
    assert repr(named(dense)) == repr(mask)
    other = dense.clone()
    other[0, 0, 3, 1] ^= True
    assert named(other).boolean is not None


@pytest.mark.thorough_except("False")
@pytest.mark.parametrize("outside", [True, False])
def test_a_compiled_model_is_recognised_and_stays_compiled(outside, x):
    attention = ways.DividedByTensor()
    model = nn.Sequential(torch.compile(attention, backend="eager")).double()
    if outside:
        model = torch.compile(model[0]._orig_mod, backend="eager")
    expected = model(x)
    (call,) = hw.models.recognise(model, x)
    torch.testing.assert_close(call.map[:], attention.weights, rtol=1e-9, atol=1e-11)
    assert torch.equal(model(x), expected)


def test_attention_that_headwise_computes_is_not_looked_for(x):
    with pytest.raises(ConfigError, match="headwise computes the attention of this model; use watch or observe"):
        hw.models.recognise(hw.MultiHeadAttention(E, H), x.float())


def test_dropout_in_training_is_recognised_and_the_map_is_before_it(x):
    model = model_of(ways.DroppedByFunction()).train()
    (call,) = hw.models.recognise(model, x)
    assert call.dropout_p == 0.5
    torch.testing.assert_close(call.map[:], model.blocks[0]["attn"].weights, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("how", ["autocast", "bfloat16", "inference"])
def test_recognition_in_other_precisions_and_modes(how, x):
    model, x = model_of(ways.SmallGPT()), x
    if how == "autocast":
        model, x = model.float(), x.float()
        with torch.autocast("cpu", torch.bfloat16):
            (call,) = hw.models.recognise(model, x)
    elif how == "bfloat16":
        (call,) = hw.models.recognise(model.bfloat16(), x.bfloat16())
    else:
        with torch.inference_mode():
            (call,) = hw.models.recognise(model, x)
    assert call.q.dtype == (torch.float64 if how == "inference" else torch.bfloat16)
    assert call.scale == pytest.approx(HALF, rel=1e-2)
    weights = model.blocks[0]["attn"].weights.to(call.map.lse.dtype)
    torch.testing.assert_close(call.map[:], weights, rtol=0.02, atol=1e-3)


def test_a_model_without_products_is_an_error_that_says_what_was_looked_for(x):
    with pytest.raises(ConfigError, match=r"looked for F\.scaled_dot_product_attention, .*nearest: no softmax"):
        hw.models.recognise(model_of(nn.Linear(E, 7)), x)


def small(family: str, **options):
    """A tiny random model of transformers with its eager attention, and its arguments."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "GPT2": {"n_layer": 2, "n_head": H, "n_embd": E, "n_positions": 11, "bos_token_id": 1, "eos_token_id": 1},
        "Bert": {"num_hidden_layers": 2, "num_attention_heads": H, "hidden_size": E, "intermediate_size": 7},
        "T5": {"num_layers": 1, "num_heads": H, "d_model": E, "d_kv": D, "d_ff": 7},
        "DebertaV2": {
            "num_hidden_layers": 1, "num_attention_heads": H, "hidden_size": E, "intermediate_size": 7,
            "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4,
        },
        "Gemma2": {
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": E,
            "intermediate_size": 7, "head_dim": D, "sliding_window": 3, "query_pre_attn_scalar": 5,
        },
        "GptOss": {
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16,
            "head_dim": D, "intermediate_size": 16, "num_local_experts": 2, "num_experts_per_tok": 1,
            "sliding_window": 3,
        },
        "Bloom": {"n_layer": 2, "n_head": H, "hidden_size": E},
    }[family]  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(vocab_size=13, attn_implementation="eager", **sizes, **options)
    kind = "T5Model" if family == "T5" else f"{family}Model"
    model = getattr(transformers, kind)(config).eval()
    model = model if family == "GptOss" else model.double()  # whose experts have no kernel for float64
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    return model, {"input_ids": ids, "attention_mask": mask}


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize(
    ("family", "name", "scale"),
    [
        ("GPT2", "h.0.attn", HALF),
        ("Bert", "encoder.layer.0.attention.self", HALF),
        ("DebertaV2", "encoder.layer.0.attention.self", (3 * D) ** -0.5),
        ("Gemma2", "layers.0.self_attn", 5**-0.5),
        ("GptOss", "layers.0.self_attn", HALF),
        ("Bloom", "h.0.self_attention", HALF),
    ],
)
def test_eager_attention_of_transformers_is_recognised(family, name, scale):
    model, batch = small(family)
    found = hw.models.recognise(model, **batch, output_attentions=True)
    assert found[0].name == name
    assert found[0].scale == pytest.approx(scale)
    weights = found.output.attentions
    assert len(found) == len(weights)
    for call, theirs in zip(found, weights, strict=True):
        real = call.map.lse > -torch.inf  # transformers gives queries that are padding, and see nothing, a mean
        torch.testing.assert_close(call.map[:][real], theirs[real].to(call.map.lse), rtol=2e-6, atol=1e-7)


def test_encoder_decoder_and_cross_attention_of_t5_are_recognised():
    model, batch = small("T5")
    found = hw.models.recognise(model, **batch, decoder_input_ids=batch["input_ids"][:, :3], output_attentions=True)
    block = "decoder.block.0.layer"
    names = ["encoder.block.0.layer.0.SelfAttention", f"{block}.0.SelfAttention", f"{block}.1.EncDecAttention"]
    assert [call.name for call in found] == names
    assert {call.scale for call in found} == {1.0}
    weights = [*found.output.encoder_attentions, *found.output.decoder_attentions, *found.output.cross_attentions]
    for call, theirs in zip(found, weights, strict=True):
        torch.testing.assert_close(call.map[:], theirs, rtol=2e-6, atol=1e-7)


def test_a_causal_mask_is_named_in_one_pass_of_small_blocks_which_ends_at_the_first_difference(monkeypatch):
    monkeypatch.setattr(scores, "CELLS", 26)  # of 13 keys: two rows
    allowed, read = torch.ones(13, 13, dtype=torch.bool).tril(), []

    def rows(span):
        read.append(tuple(span))
        return allowed[None, None, span.start : span.stop]

    assert repr(scores.mask_of_rows(rows, (1, 3, 13, 13))) == "Causal()"
    assert read == [(i, min(i + 2, 13)) for i in range(0, 13, 2)]
    allowed[3, 0] = False
    assert not scores.allows(hw.Causal(), rows, (1, 3, 13, 13))
    assert read[7:] == [(0, 2), (2, 4)]


def test_layers_share_a_mask_that_is_too_large_to_be_kept(monkeypatch, x):
    monkeypatch.setattr(scores, "KEPT", 0)
    found = hw.models.recognise(nn.Sequential(*(ways.SplitAfterProjection() for _ in range(3))).double(), x)
    assert [repr(call.mask) for call in found] == ["Causal()"] * 3
    assert found[0].mask is found[1].mask is found[2].mask


def test_masks_are_the_same_where_every_value_is_whatever_their_memory():
    """Rows of 8 and of 7 keys, at offsets of any number of bytes, and with strides."""
    memory = torch.rand(3, 4, 16, generator=torch.Generator().manual_seed(0)) > 0.5
    for mask in (memory, memory[..., :8], memory[1:], memory[..., 3:10], memory.mT, memory.flatten()[5:45]):
        assert scores.same(mask, mask.clone())
        for place in (0, mask.numel() // 2, mask.numel() - 1):
            other = mask.clone(memory_format=torch.contiguous_format)
            other.view(-1)[place] ^= True
            assert not scores.same(mask, other)
            assert not scores.same(other, mask)
    assert not scores.same(memory, memory[:1])
