"""Models of transformers that compute with their masks, use them in attention of their own, or rely on the layout."""

from importlib import import_module

import pytest
import torch
from family_checks import same
from model_families import BATCH, LENGTH, LLAMA, VOCAB, WINDOW, attention_mask, tokens
from torch import nn
from transformers import masking_utils as theirs

import headwise as hw
from headwise.errors import ConfigError
from headwise.models.adapters.huggingface import install
from headwise.models.adapters.huggingface.attention import attention_forward
from headwise.models.adapters.huggingface.masks import MaskTensor, make_mask

LOWEST = torch.finfo(torch.float32).min
IMAGES = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
          "image_size": 12, "patch_size": 4}  # fmt: skip
SAM = {"hidden_size": 24, "output_channels": 7, "num_hidden_layers": 1, "num_attention_heads": 3, "image_size": 16,
       "patch_size": 4, "window_size": 2, "global_attn_indexes": [0], "num_pos_feats": 5}  # fmt: skip
EXPERTS = {**LLAMA, "num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
OPTIONS = {
    # Puts what its compressed keys hide beside the mask: torch.cat([attention_mask, bias.to(attention_mask.dtype)]).
    "deepseek_v4.DeepseekV4ForCausalLM": {
        **EXPERTS, "num_key_value_heads": 1, "head_dim": 16, "partial_rotary_factor": 0.5, "q_lora_rank": 8,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"], "n_routed_experts": 2,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3}, "o_groups": 2,
        "mlp_layer_types": ["moe", "moe"], "sliding_window": WINDOW, "o_lora_rank": 8, "index_n_heads": 2,
        "index_head_dim": 16, "index_topk": 2, "hc_mult": 2,
    },
    # Adds the mask to the scores of its own attention to text, and takes that to images from outside.
    "git.GitModel": {
        "vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "hidden_dropout_prob":
        0.0, "intermediate_size": 40, "max_position_embeddings": 64, "vision_config": IMAGES, "bos_token_id": 1,
        "eos_token_id": 2,
    },
    # Reads finfo(attention_mask.dtype).
    "gemma4.Gemma4AudioModel": {
        "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "subsampling_conv_channels": [128, 3],
        "attention_chunk_size": 4, "attention_context_left": 5, "output_proj_dims": 19,
    },
    # Its encoder halves the sequence between layers, but not the mask, which eager attention goes without.
    "informer.InformerModel": {
        "prediction_length": 3, "context_length": 12, "lags_sequence": [1], "num_time_features": 1, "d_model": 16,
        "dropout": 0.0,
    },
    # Call .view on what attention returns.
    "afmoe.AfmoeForCausalLM": {
        **EXPERTS, "num_shared_experts": 1, "global_attn_every_n_layers": 2, "sliding_window": WINDOW,
    },
    "jetmoe.JetMoeForCausalLM": {**EXPERTS, "kv_channels": 8},
    "granite_swa.GraniteSWAForCausalLM": {**LLAMA, "sliding_window": WINDOW},
    "granitemoe_swa.GraniteMoeSWAForCausalLM": {**EXPERTS, "sliding_window": WINDOW},
    "sam.SamVisionModel": SAM,
    "sam_hq.SamHQVisionModel": SAM,
}  # fmt: skip


def make(name):
    """A random model with its own attention, in eval mode."""
    module, model = name.split(".")
    library = import_module(f"transformers.models.{module}")
    torch.manual_seed(5)
    kind = getattr(library, model)
    made = kind(kind.config_class(**OPTIONS[name], attn_implementation="eager")).eval()
    for parameter_name, parameter in made.named_parameters():
        if (parameter.ndim > 1 or parameter_name.endswith("sinks")) and module not in ("gemma4", "informer"):
            nn.init.normal_(parameter, std=0.25)
    return made


def given(name):
    """What it is called with."""
    random = torch.Generator().manual_seed(1)
    text = {"input_ids": tokens(), "attention_mask": attention_mask("right")}
    match name.partition(".")[0]:
        case "sam" | "sam_hq":
            return {"pixel_values": torch.randn(2, 3, 16, 16, generator=random)}
        case "git":
            return {**text, "pixel_values": torch.randn(BATCH, 3, 12, 12, generator=random)}
        case "gemma4":
            real = torch.arange(44) < torch.tensor([[44], [31]])
            return {"input_features": torch.randn(2, 44, 128, generator=random), "attention_mask": real}
        case "informer":
            past, future = torch.randn(2, 13, 3, generator=random), torch.randn(2, 3, 2, generator=random)
            return {"past_values": past[..., 0], "past_time_features": past[..., 1:2], "future_values": future[..., 0],
                    "past_observed_mask": torch.ones(2, 13), "future_time_features": future[..., 1:]}  # fmt: skip
    return text


def output(model, name):
    torch.manual_seed(2)  # Informer samples its keys
    with torch.no_grad():
        return model(**given(name))[0]


def real_places(name, out):
    """Padding is left out: a fully masked query gives 0 here, and the mean of all values there."""
    return attention_mask("right").bool() if out.shape[:2] == (BATCH, LENGTH) else ...


@pytest.mark.thorough_except("git.GitModel", "afmoe.AfmoeForCausalLM", "jetmoe.JetMoeForCausalLM")
@pytest.mark.parametrize("name", [name for name in OPTIONS if not name.startswith(("sam", "granite"))])
@pytest.mark.filterwarnings("ignore:attach.model.:UserWarning")
def test_models_that_compute_with_their_mask_or_the_layout_give_the_same(name):
    model = make(name)
    eager = output(model, name)
    install()
    model.set_attn_implementation("headwise")  # also where `attach` says that there is nothing to attach
    ours, real = output(model, name), real_places(name, eager)
    same(ours[real], eager[real])


@pytest.mark.parametrize("name", ["sam.SamVisionModel", "sam_hq.SamHQVisionModel", "gemma4.Gemma4AudioModel"])
def test_a_model_of_attention_of_its_own_is_refused(name):
    model = make(name)
    with pytest.raises(ConfigError, match=rf"{type(model).__name__} computes its attention by itself: \w+Attention"):
        hw.attach(model)
    assert model.config._attn_implementation == "eager"
    with hw.watch(model) as record:  # which recognises it while it runs
        if name.startswith("gemma4"):
            with pytest.raises(ConfigError, match=r"layers.0.self_attn: scores are biased before a soft cap"):
                output(model, name)
        else:
            output(model, name)
            assert record.layers == ("vision_encoder.layers.0.attn",)


@pytest.mark.thorough
def test_parts_of_attention_of_their_own_are_listed():
    model = make("git.GitModel")
    with pytest.warns(UserWarning, match=r"encoder.layer.0.attention: GitAttention computes its attention by itself"):
        handle = hw.attach(model)
    assert list(handle.skipped) == ["encoder.layer.0.attention", "encoder.layer.1.attention"]
    assert handle.attached == tuple(f"image_encoder.vision_model.encoder.layers.{i}.self_attn" for i in (0, 1))
    handle.detach()
    with hw.watch(model) as record:  # which recognises them
        output(model, "git.GitModel")
    assert set(record.layers) == {
        *(f"image_encoder.vision_model.encoder.layers.{i}.self_attn" for i in (0, 1)),
        *(f"encoder.layer.{i}.attention.self" for i in (0, 1)),
    }  # fmt: skip
    assert not [name for name in record.unwatched if name.startswith("encoder.")]


def test_a_model_without_attention_is_refused():
    from transformers import ResNetConfig, ResNetModel

    model = ResNetModel(ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1]))
    with pytest.raises(ConfigError, match="ResNetModel has no attention"):
        hw.attach(model)


@pytest.mark.parametrize("name", ["granite_swa.GraniteSWAForCausalLM", "granitemoe_swa.GraniteMoeSWAForCausalLM"])
def test_attentions_of_a_learned_sink_are_those_that_make_the_output(name):
    """Granite's own code gives them without the sink, and scales its output by the rest."""
    model = make(name)
    with torch.no_grad():
        eager = model(tokens(), output_attentions=True)
        hw.attach(model)
        with hw.watch(model, maps="lazy") as record:
            ours = model(tokens(), output_attentions=True)
    same(ours.logits, eager.logits)
    for mine, theirs_, amap in zip(ours.attentions, eager.attentions, record.maps.values(), strict=True):
        assert float(theirs_.sum(-1).min()) > 0.999
        assert float(mine.sum(-1).min()) < 0.95
        assert torch.equal(mine + 0, amap.to_dense())
        same(mine / mine.sum(-1, keepdim=True), theirs_)


# --- the mask that a model sees


def masks(n=5, padded=True, function=None, dtype=torch.float32, **more):
    """Ours and eager's, of a batch of 2."""
    call = {
        "batch_size": 2, "q_length": n, "kv_length": 7, "q_offset": 7 - n, "dtype": dtype,
        "mask_function": function or theirs.causal_mask_function, **more,
    }  # fmt: skip
    call["attention_mask"] = torch.arange(7) < torch.tensor([[7], [4]]) if padded else None
    return make_mask(**call), theirs.eager_mask(**call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("window", [None, 3])
def test_a_model_sees_the_mask_of_its_own_attention(dtype, window):
    function = theirs.sliding_window_causal_mask_function(window) if window else None
    ours, eager = masks(dtype=dtype, function=function)
    assert (ours.dtype, ours.shape, ours.device) == (dtype, eager.shape, eager.device)
    assert not ours.made
    assert torch.equal(ours + 0, eager)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("local", [None, 3, 9])
@pytest.mark.parametrize("skip", [False, True])
def test_there_is_no_mask_where_eager_attention_has_none(padded, local, skip):
    both_ways = theirs.bidirectional_mask_function
    ours, eager = masks(padded=padded, function=both_ways, allow_is_bidirectional_skip=skip, local_size=local)
    assert (ours is None) == (eager is None) == (skip and not padded and local != 3)


def qkv(b=2, h=6, h_kv=3, n=5, m=7, d=4):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(b, heads, size, d, generator=generator) for heads, size in ((h, n), (h_kv, m), (h_kv, m))]


def attended(mask, n=5):
    return attention_forward(nn.Module(), *qkv(n=n), mask)[0]


WRITTEN = {
    "whole": lambda mask: mask.add_(1.0),
    "cell": lambda mask: mask.__setitem__((0, 0, 4, 2), LOWEST),
    "view": lambda mask: mask[:, 0].masked_fill_(torch.arange(7) == 1, LOWEST),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", WRITTEN)
def test_what_a_model_writes_into_its_mask_counts(how, mode):
    with mode():
        ours, eager = masks(padded=False)
        before = attended(ours)
        for mask in (ours, eager):
            WRITTEN[how](mask)
        assert isinstance(ours, MaskTensor)
        torch.testing.assert_close(attended(ours), attended(eager))
        assert torch.allclose(attended(ours), before) == (how == "whole")  # a number for all is nothing to a softmax


@pytest.mark.parametrize("change", [
    lambda mask: torch.cat([mask, torch.zeros_like(mask)[..., :0]], -1), lambda mask: mask * 1.0,
    lambda mask: mask.to(torch.float64).to(torch.float32), lambda mask: mask.clone(),
], ids=["cat", "times", "to", "clone"])  # fmt: skip
def test_what_a_model_makes_of_its_mask_is_read_as_it_is(change):
    ours, _ = masks()
    changed = change(ours)
    assert not isinstance(changed, MaskTensor)
    torch.testing.assert_close(attended(changed), attended(ours))


def test_a_mask_that_is_only_read_or_moved_stays_one():
    ours, _ = masks()
    assert ours.to("cpu") is ours.to(torch.float32) is ours.to(ours.device, torch.float32, non_blocking=True) is ours
    assert not ours.made
    assert float(ours.min()) == LOWEST
    assert ours.made
    assert not ours.changed


@pytest.mark.thorough
def test_lightglue_makes_its_mask_for_one_query_and_gives_it_to_all():
    from transformers import LightGlueConfig, LightGlueForKeypointMatching, SuperPointConfig

    points = SuperPointConfig(
        encoder_hidden_sizes=[8] * 4, decoder_hidden_size=8, descriptor_decoder_dim=16, keypoint_threshold=0.0,
        max_keypoints=11, border_removal_distance=0, nms_radius=1,
    )  # fmt: skip
    torch.manual_seed(5)
    model = LightGlueForKeypointMatching(LightGlueConfig(
        keypoint_detector_config=points, descriptor_dim=16, num_hidden_layers=2, num_attention_heads=4,
        depth_confidence=-1.0, width_confidence=-1.0, attn_implementation="eager",
    )).eval()  # fmt: skip
    images = torch.rand(2, 2, 3, 16, 24, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        eager = model(images, output_attentions=True, output_hidden_states=True)
        hw.attach(model)
        ours = model(images, output_attentions=True, output_hidden_states=True)
    assert len(ours.attentions) == 4
    for name in ("hidden_states", "attentions"):
        for mine, theirs_ in zip(getattr(ours, name), getattr(eager, name), strict=True):
            same(mine + 0, theirs_)


def test_one_row_of_a_mask_is_for_every_query():
    row, _ = masks(n=1, function=theirs.bidirectional_mask_function)
    whole, _ = masks(n=5, function=theirs.bidirectional_mask_function)
    torch.testing.assert_close(attended(row), attended(whole))


def test_the_result_is_contiguous_as_transformers_own():
    assert attended(masks()[0]).is_contiguous()
