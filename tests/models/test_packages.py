"""Models of other packages, tiny and random: recognised and attached without an adapter. Skipped where a package is
not installed; timm needs torchvision."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import headwise as hw

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def unet() -> Made:
    from diffusers import UNet2DConditionModel

    blocks = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
              "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}  # fmt: skip
    model = UNet2DConditionModel(
        sample_size=12, layers_per_block=1, block_out_channels=(16, 24), cross_attention_dim=20, attention_head_dim=3,
        norm_num_groups=4, **blocks,
    )  # fmt: skip
    inputs = {"sample": torch.randn(1, 4, 12, 12), "timestep": torch.tensor(3), "return_dict": False}
    return model, (), {**inputs, "encoder_hidden_states": torch.randn(1, 7, 20)}


def dit() -> Made:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, num_layers=2, sample_size=6, norm_num_groups=4
    )  # fmt: skip
    inputs = {"timestep": torch.tensor([3]), "class_labels": torch.tensor([1]), "return_dict": False}
    return model, (torch.randn(1, 4, 6, 6),), inputs


def x_decoder(**options: Any) -> Callable[[], Made]:
    def make() -> Made:
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(dim=24, depth=2, heads=3, attn_dim_head=8, **options)
        return TransformerWrapper(num_tokens=31, max_seq_len=64, attn_layers=layers), (torch.arange(14).view(2, 7),), {}

    return make


def vit() -> Made:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    return model, (torch.randn(2, 3, 32, 32),), {}


# package → model, how many calls its forward makes, (heads, KV heads)
MODELS = {
    "diffusers: UNet, self and cross attention": ("diffusers", unet, 8, None),
    "diffusers: DiT": ("diffusers", dit, 2, (2, 2)),
    "x-transformers": ("x_transformers", x_decoder(), 2, (3, 3)),
    "x-transformers: rotary": ("x_transformers", x_decoder(rotary_pos_emb=True), 2, (3, 3)),
    "x-transformers: ALiBi": ("x_transformers", x_decoder(alibi_pos_bias=True), 2, (3, 3)),
    "x-transformers: relative bias": ("x_transformers", x_decoder(rel_pos_bias=True), 2, (3, 3)),
    "x-transformers: one KV head": ("x_transformers", x_decoder(attn_kv_heads=1), 2, (3, 1)),
    "x-transformers: QK norm": ("x_transformers", x_decoder(attn_qk_norm=True), 2, (3, 3)),
    "timm: ViT": ("timm", vit, 2, (3, 3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_another_package_is_recognised_and_attached(name: str) -> None:
    package, make, calls, heads = MODELS[name]
    pytest.importorskip(package)
    torch.manual_seed(0)
    model, args, options = make()
    model.eval()
    found = hw.models.recognise(model, *args, **options)
    assert len(found) == calls
    assert found.not_followed == ()
    assert heads is None or {(one.num_heads, one.num_kv_heads) for one in found} == {heads}
    with torch.no_grad():
        with hw.attach(model) as handle:
            model(*args, **options)  # the first pass compares, the second one replaces
            ours = model(*args, **options)
            assert len(handle.attached) == len(set(found.maps()))
        theirs = model(*args, **options)
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_scores_in_a_torchscript_function_are_opaque() -> None:
    pytest.importorskip("x_transformers")
    model, args, _ = x_decoder(attn_softclamp_logits=True)()
    with pytest.raises(hw.ConfigError, match=r"no attention in TransformerWrapper.*attend\.py:\d+"):
        hw.models.recognise(model, *args)


def lens(kind: str, tmp_path: Any) -> Any:
    """TransformerLens's bridge of a tiny model."""
    import json

    from tokenizers import Tokenizer, models
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    sizes = {"hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 2, "num_key_value_heads": 3}
    made = {
        "GPT-2": lambda: GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=3, n_embd=24, vocab_size=97, n_positions=64)),
        "Llama": lambda: LlamaForCausalLM(LlamaConfig(vocab_size=97, num_attention_heads=6, **sizes)),
    }[kind]()
    made.save_pretrained(tmp_path)
    vocab = {str(i): i for i in range(96)} | {"<s>": 96}
    named = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab, [])), bos_token="<s>",
                                    eos_token="<s>", pad_token="<s>")  # fmt: skip
    named.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())
    return TransformerBridge.boot_transformers(str(tmp_path), device="cpu")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["GPT-2", "Llama"])
def test_a_record_has_what_transformer_lens_has(kind: str, tmp_path: Any) -> None:
    pytest.importorskip("transformer_lens")
    torch.manual_seed(0)
    bridge, ids = lens(kind, tmp_path), torch.randint(96, (2, 11))
    hw.find_heads(bridge, ids)  # for the output projection of GPT-2, which is one of the bridge's own modules
    bridge.set_use_attn_result(True)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(ids)
        with hw.watch(bridge, maps="lazy", values=True) as record:
            bridge(ids)
    names = ["pattern", "attn_scores", "v", "z", "result", *(("q", "k") if kind == "GPT-2" else ("rot_q", "rot_k"))]
    for layer in range(2):
        for name in names:
            hook = f"blocks.{layer}.attn.hook_{name}"
            ours, theirs = record.maps[hook], cache[hook]
            ours = ours if isinstance(ours, torch.Tensor) else ours[:]
            theirs = theirs.masked_fill(theirs < -1e30, -torch.inf)  # masked scores
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    if kind == "Llama":
        with pytest.raises(KeyError, match="the queries are changed after their projection"):
            record.maps["blocks.0.attn.hook_q"]
