"""Families of transformers models, tiny and random, and what is checked of each: the cells of docs/models.md.

A check takes a family and raises where what headwise computes is not what the model's own code ("eager") computes.
"""

import copy
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw

BATCH, LENGTH, VOCAB, WINDOW = 3, 13, 61, 5
PADDING = (0, 4, 7)  # padded tokens of each batch entry
TOLERANCE = 3e-5  # float32, of the largest output


@dataclass(frozen=True, eq=False)
class Family:
    """A family and how to make one of it.

    Attributes:
        name: as people call it. module: in transformers.models. config, model: its classes.
        options: of the configuration; dropout: the names of those that drop attention weights.
        kind: "decoder", "encoder", "both", "speech" or "image": what goes in, and what can be asked of it.
        refused: it computes attention by itself, so headwise says no.
        packed_by: how the model is told of packed sequences, "position_ids" or "cu_seq_lens" (of FlashAttention).
        cross: options and class of one that also attends to an encoder's states, if `model` does not.
    """

    name: str
    module: str
    config: str
    model: str
    options: dict[str, Any]
    kind: str
    dropout: tuple[str, ...] = ("attention_dropout",)
    cross: tuple[str, dict[str, Any]] | None = None
    notes: str = ""
    packed_by: str = "position_ids"
    refused: bool = False


LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
BERT = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
    "max_position_embeddings": 64, "pad_token_id": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
BART = {
    "vocab_size": VOCAB, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None, "decoder_start_token_id": 1, "dropout": 0.0,
}  # fmt: skip
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}

FAMILIES = (
    Family("GPT-2", "gpt2", "GPT2Config", "GPT2LMHeadModel", {
        "vocab_size": VOCAB, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    }, "decoder", ("attn_pdrop",), ("GPT2LMHeadModel", {"add_cross_attention": True})),
    Family("BERT", "bert", "BertConfig", "BertModel", BERT, "encoder", ("attention_probs_dropout_prob",),
           ("BertLMHeadModel", {"is_decoder": True, "add_cross_attention": True})),
    Family("RoBERTa", "roberta", "RobertaConfig", "RobertaModel", BERT, "encoder", ("attention_probs_dropout_prob",),
           ("RobertaForCausalLM", {"is_decoder": True, "add_cross_attention": True})),
    Family("Llama", "llama", "LlamaConfig", "LlamaForCausalLM", LLAMA, "decoder", notes="grouped keys"),
    Family("Mistral", "mistral", "MistralConfig", "MistralForCausalLM", {**LLAMA, "sliding_window": WINDOW}, "decoder",
           notes="sliding window"),
    Family("Qwen3", "qwen3", "Qwen3Config", "Qwen3ForCausalLM",
           {**LLAMA, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": WINDOW}, "decoder", notes="QK-norm"),
    Family("Gemma 2", "gemma2", "Gemma2Config", "Gemma2ForCausalLM",
           {**LLAMA, **ALTERNATING, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 2.0}, "decoder",
           notes="soft cap, alternating windows"),
    Family("Gemma 3", "gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM",
           {**LLAMA, **ALTERNATING, "query_pre_attn_scalar": 7}, "decoder", notes="QK-norm, alternating windows"),
    Family("gpt-oss", "gpt_oss", "GptOssConfig", "GptOssForCausalLM",
           {**LLAMA, **ALTERNATING, "num_local_experts": 2, "num_experts_per_tok": 1}, "decoder",
           notes="learned sinks, alternating windows", packed_by="cu_seq_lens"),
    Family("T5", "t5", "T5Config", "T5ForConditionalGeneration", {
        "vocab_size": VOCAB, "d_model": 24, "d_kv": 7, "d_ff": 40, "num_layers": 2, "num_heads": 3, "pad_token_id": 0,
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 11, "decoder_start_token_id": 1,
        "eos_token_id": None, "dropout_rate": 0.0,
    }, "both", ("dropout_rate",), notes="relative bias, scale 1"),
    Family("BART", "bart", "BartConfig", "BartForConditionalGeneration", BART, "both"),
    Family("Whisper", "whisper", "WhisperConfig", "WhisperForConditionalGeneration",
           {**BART, "num_mel_bins": 5, "max_source_positions": 17, "max_target_positions": 64,
            "suppress_tokens": None, "begin_suppress_tokens": None}, "speech"),
    Family("ViT", "vit", "ViTConfig", "ViTModel", {
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 12,
        "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }, "image", ("attention_probs_dropout_prob",)),
)  # fmt: skip


SMALL = {"vocab_size": VOCAB, "n_embd": 24, "hidden_size": 24, "n_layer": 2, "n_head": 3}
REFUSED = (
    Family("BLOOM", "bloom", "BloomConfig", "BloomForCausalLM", SMALL, "decoder", (), refused=True),
    Family("DeBERTa v2", "deberta_v2", "DebertaV2Config", "DebertaV2Model", BERT, "encoder", (), refused=True),
    Family("Falcon", "falcon", "FalconConfig", "FalconForCausalLM", BERT, "decoder", (), refused=True),
    Family("GPT-J", "gptj", "GPTJConfig", "GPTJForCausalLM", {**SMALL, "rotary_dim": 4}, "decoder", (), refused=True),
)

# Checked as those above are, for fewer features.
OTHERS = (
    Family("ALBERT", "albert", "AlbertConfig", "AlbertModel", {**BERT, "embedding_size": 24}, "encoder"),
    Family("Cohere 2", "cohere2", "Cohere2Config", "Cohere2ForCausalLM", {**LLAMA, "sliding_window": WINDOW}, "decoder"),
    Family("DeepSeek V3", "deepseek_v3", "DeepseekV3Config", "DeepseekV3ForCausalLM",
           {**LLAMA, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "head_dim": 4,
            "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            "moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_key_value_heads": 4}, "decoder"),
    Family("DistilBERT", "distilbert", "DistilBertConfig", "DistilBertModel",
           {"vocab_size": VOCAB, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 40}, "encoder"),
    Family("ELECTRA", "electra", "ElectraConfig", "ElectraModel", {**BERT, "embedding_size": 24}, "encoder"),
    Family("GLM 4", "glm4", "Glm4Config", "Glm4ForCausalLM", LLAMA, "decoder"),
    Family("GPT-NeoX", "gpt_neox", "GPTNeoXConfig", "GPTNeoXForCausalLM", BERT, "decoder"),
    Family("Granite", "granite", "GraniteConfig", "GraniteForCausalLM", LLAMA, "decoder"),
    Family("Llama 4", "llama4", "Llama4TextConfig", "Llama4ForCausalLM",
           {**LLAMA, "attention_chunk_size": 5, "num_local_experts": 2, "intermediate_size_mlp": 32}, "decoder"),
    Family("Marian", "marian", "MarianConfig", "MarianMTModel", BART, "both"),
    Family("Mixtral", "mixtral", "MixtralConfig", "MixtralForCausalLM", {**LLAMA, "num_local_experts": 2}, "decoder"),
    Family("ModernBERT", "modernbert", "ModernBertConfig", "ModernBertModel",
           {**BERT, "global_attn_every_n_layers": 2, "local_attention": 6}, "encoder"),
    Family("OLMo 2", "olmo2", "Olmo2Config", "Olmo2ForCausalLM", LLAMA, "decoder"),
    Family("OPT", "opt", "OPTConfig", "OPTForCausalLM",
           {"vocab_size": VOCAB, "hidden_size": 24, "ffn_dim": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
            "word_embed_proj_dim": 24, "pad_token_id": 0}, "decoder"),
    Family("Pegasus", "pegasus", "PegasusConfig", "PegasusForConditionalGeneration", BART, "both"),
    Family("Phi-3", "phi3", "Phi3Config", "Phi3ForCausalLM", LLAMA, "decoder"),
    Family("Qwen2", "qwen2", "Qwen2Config", "Qwen2ForCausalLM", LLAMA, "decoder"),
    Family("Qwen3 MoE", "qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
           {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, "decoder"),
    Family("SmolLM 3", "smollm3", "SmolLM3Config", "SmolLM3ForCausalLM", LLAMA, "decoder"),
    Family("StableLM", "stablelm", "StableLmConfig", "StableLmForCausalLM", LLAMA, "decoder"),
    Family("Starcoder 2", "starcoder2", "Starcoder2Config", "Starcoder2ForCausalLM",
           {**LLAMA, "sliding_window": WINDOW}, "decoder"),
)  # fmt: skip
FEATURES_OF_OTHERS = "forward", "padding left", "padding right", "generation with cache", "gradients", "weights"


# --- models and inputs


@lru_cache(maxsize=64)
def make(family: Family, *, dropout: float = 0.0, cross: bool = False) -> Any:
    """A random model with its own attention, in eval mode; weights large enough for heads to differ."""
    theirs = import_module(f"transformers.models.{family.module}")
    model, more = family.cross if cross and family.cross else (family.model, {})
    options = {**family.options, **more, **dict.fromkeys(family.dropout, dropout), "attn_implementation": "eager"}
    torch.manual_seed(5)
    made = getattr(theirs, model)(getattr(theirs, family.config)(**options)).eval()
    for name, parameter in made.named_parameters():
        if parameter.ndim > 1 or name.endswith("sinks"):
            nn.init.normal_(parameter, std=0.25)
    return made


def tokens(length: int = LENGTH, seed: int = 0) -> Tensor:
    """Random tokens [BATCH, length], none of them padding."""
    return torch.randint(2, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def attention_mask(side: str, length: int = LENGTH) -> Tensor:
    """1 where a token stands; PADDING tokens are missing on that side."""
    place = torch.arange(length).flip(0) if side == "right" else torch.arange(length)
    return (place >= torch.tensor(PADDING)[:, None]).long()


def inputs(family: Family, padded: str | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """What the model is called with, and the real places [BATCH, n] of its output."""
    mask = attention_mask(padded or "none") if padded else torch.ones(BATCH, LENGTH, dtype=torch.long)
    given: dict[str, Tensor] = {"attention_mask": mask} if padded else {}
    random = torch.Generator().manual_seed(1)
    match family.kind:
        case "decoder" | "encoder":
            return {"input_ids": tokens(), **given}, mask.bool()
        case "image":
            return {"pixel_values": torch.randn(BATCH, 3, 12, 12, generator=random)}, torch.ones(BATCH, 10).bool()
    short = LENGTH - 2
    targets = attention_mask(padded, short) if padded else torch.ones(BATCH, short, dtype=torch.long)
    decoder = {"decoder_input_ids": tokens(short, 2), **({"decoder_attention_mask": targets} if padded else {})}
    if family.kind == "speech":
        return {"input_features": 10 * torch.randn(BATCH, 5, 34, generator=random), **decoder}, targets.bool()
    return {"input_ids": tokens(), **given, **decoder}, targets.bool()


@contextmanager
def switched(model: Any):
    """The model with headwise's attention, and then with its own again."""
    hw.switch(model)
    try:
        yield model
    finally:
        hw.restore(model)


def output(model: Any, **given: Any) -> Tensor:
    """What the model computes, [BATCH, n, …]."""
    return model(**given)[0]


def same(ours: Tensor, theirs: Tensor, real: Tensor | None = None, tolerance: float = TOLERANCE) -> None:
    """Equal to the tolerance, relative to the largest number, in the real places."""
    if real is not None:
        ours, theirs = ours[real], theirs[real]
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    assert error <= tolerance, f"relative error {error:.1e}, more than {tolerance:.0e}"


# --- checks


def forward(family: Family, padded: str | None = None) -> None:
    model = make(family)
    given, real = inputs(family, padded)
    with torch.no_grad():
        theirs = output(model, **given)
        with switched(model):
            ours = output(model, **given)
        if padded and (padded == "left" or family.kind in ("encoder", "both")):  # else causality hides it
            free = {name: x for name, x in given.items() if "attention_mask" not in name}
            assert not torch.allclose(output(model, **free)[real], theirs[real], atol=1e-2), "padding had no say"
    same(ours, theirs, real)


def padding_left(family: Family) -> None:
    forward(family, "left")


def padding_right(family: Family) -> None:
    forward(family, "right")


def generation(family: Family) -> None:
    """The tokens of model.generate with a cache, batched, padded on the left; past any window."""
    model = make(family)
    given, _ = inputs(family, None if family.kind == "speech" else "left")
    given = {name: x for name, x in given.items() if not name.startswith("decoder")}
    options = {"max_new_tokens": 11, "min_new_tokens": 11, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        theirs = model.generate(**given, **options)
        with switched(model):
            ours = model.generate(**given, **options)
    assert torch.equal(ours, theirs)
    assert len(theirs.unique(dim=0)) > 1, "every sequence goes on in the same way"


def gradients(family: Family) -> None:
    model = make(family)
    given, real = inputs(family, None if family.kind in ("image", "speech") else "right")

    def gradient() -> dict[str, Tensor]:
        model.zero_grad()
        output(model, **given)[real].square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    theirs = gradient()
    with switched(model):
        ours = gradient()
    assert ours.keys() == theirs.keys()
    largest = max(float(x.abs().max()) for x in theirs.values())
    for name, mine in ours.items():
        error = float((mine - theirs[name]).abs().max()) / largest
        assert error <= TOLERANCE, f"gradient of {name}: relative error {error:.1e}"


def bf16(family: Family) -> None:
    """At most twice the error of the model's own code in bfloat16, both against float32 with the same weights."""
    narrow = copy.deepcopy(make(family)).bfloat16()
    given, real = inputs(family, None if family.kind in ("image", "speech") else "right")
    small = {name: x.bfloat16() if x.is_floating_point() else x for name, x in given.items()}
    wide = copy.deepcopy(narrow).float()
    with torch.no_grad():
        truth = output(wide, **{name: x.float() if x.is_floating_point() else x for name, x in small.items()})[real]
        theirs = output(narrow, **small)[real]
        with switched(narrow):
            ours = output(narrow, **small)[real]
    assert ours.dtype == torch.bfloat16

    def error(x: Tensor) -> float:
        return float((x.float() - truth).square().mean().sqrt())

    assert error(ours) <= 2.0 * error(theirs) + 1e-3 * float(truth.square().mean().sqrt())


def dropout(family: Family) -> None:
    """Attention alone in training: random, the same again from the same seed, and none of it in eval."""
    model = copy.deepcopy(make(family, dropout=0.4))
    given, real = inputs(family)
    seen: list[hw.Observation] = []

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return output(model, **given)[real]

    with torch.no_grad(), switched(model):
        with hw.observe(seen.append, model=model):
            still = run(1)
        assert torch.equal(still, run(2))
        for observation in seen:
            observation.module.train()
        one, again, other = run(1), run(1), run(2)
    assert seen
    assert torch.equal(one, again)
    assert not torch.allclose(one, other, atol=1e-3)
    assert not torch.allclose(one, still, atol=1e-3)
    assert torch.isfinite(one).all()


def packed(family: Family) -> None:
    """Several texts in one row: as if each had been alone."""
    model = make(family)
    ids, ends = tokens()[:2], ((0, 4, 9, LENGTH), (0, 6, LENGTH))
    positions = torch.stack([
        torch.cat([torch.arange(stop - start) for start, stop in pairwise(e)]) for e in ends
    ])  # fmt: skip
    given: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
    if family.packed_by == "cu_seq_lens":  # one row, and the model's own code does not know how
        given = {name: x[:1] for name, x in given.items()}
        given |= {"cu_seq_lens_q": torch.tensor(ends[0]), "cu_seq_lens_k": torch.tensor(ends[0])}
    with torch.no_grad():
        with switched(model):
            ours = output(model, **given, use_cache=False)
        if family.packed_by == "position_ids":
            same(ours, output(model, **given, use_cache=False))
        alone = output(model, input_ids=ids[:1, 4:9])
        assert not torch.allclose(output(model, input_ids=ids)[:1, 4:9], alone, atol=1e-2)
    same(ours[:1, 4:9], alone)


def cross_attention(family: Family) -> None:
    """Attention to an encoder's padded states of another length, with gradients to them."""
    model = make(family, cross=True)
    generator = torch.Generator().manual_seed(3)
    if family.cross:
        width = model.config.hidden_size
        states = torch.randn(BATCH, 7, width, generator=generator, requires_grad=True)
        mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [0] * 3 + [1] * 4])
        given = {"input_ids": tokens(), "encoder_hidden_states": states, "encoder_attention_mask": mask}
    else:
        width = model.config.d_model
        states = torch.randn(BATCH, 17, width, generator=generator, requires_grad=True)
        given = {"decoder_input_ids": tokens(), "encoder_outputs": (states,)}
        if family.kind != "speech":
            given["attention_mask"] = attention_mask("right", 17)

    def run() -> tuple[Tensor, Tensor]:
        out = output(model, **given)
        return out.detach(), torch.autograd.grad(out.square().sum(), states)[0]

    theirs, their_gradient = run()
    with switched(model):
        seen: list[hw.Observation] = []
        with hw.observe(seen.append, model=model):
            ours, gradient = run()
    same(ours, theirs)
    same(gradient, their_gradient)
    assert any(observation.map.shape[2:] == (LENGTH, states.shape[1]) for observation in seen)


def weights(family: Family) -> None:
    """output_attentions=True as an argument of the call: the attentions that the model's own code gives."""
    model = make(family)
    given, _ = inputs(family)
    with torch.no_grad():
        theirs = model(**given, output_attentions=True)
        with switched(model):
            ours = model(**given, output_attentions=True)
    names = [name for name in theirs if name.endswith("attentions") and theirs[name]]
    assert names
    assert names == [name for name in ours if name.endswith("attentions") and ours[name]]
    for name in names:
        assert len(ours[name]) == len(theirs[name]) == 2
        for mine, their in zip(ours[name], theirs[name], strict=True):
            assert not mine.made
            same(mine.dense(), their)


FEATURES: dict[str, Callable[[Family], None]] = {
    "forward": forward,
    "padding left": padding_left,
    "padding right": padding_right,
    "generation with cache": generation,
    "gradients": gradients,
    "bf16": bf16,
    "dropout": dropout,
    "packed": packed,
    "cross attention": cross_attention,
    "weights": weights,
}

_MISSING = {
    "decoder": {"cross attention"},
    "encoder": {"generation with cache", "packed"},
    "both": {"packed"},
    "speech": {"packed"},
    "image": {"padding left", "padding right", "generation with cache", "packed", "cross attention"},
}


def applies(family: Family, feature: str) -> bool:
    """Whether a family has that feature, here."""
    if family.refused:
        return False
    return feature not in _MISSING[family.kind] or (feature == "cross attention" and family.cross is not None)


def cell(family: Family, feature: str) -> str:
    """What the document says of it."""
    return "refused" if family.refused else "yes" if applies(family, feature) else "–"


def table(cell: Callable[[Family, str], str] = cell) -> str:
    """The table of docs/models.md, a row a family."""
    head, rows = ["family", *FEATURES], []
    for family in (*FAMILIES, *REFUSED):
        name = f"{family.name} ({family.notes})" if family.notes else family.name
        rows.append([name, *(cell(family, feature) for feature in FEATURES)])
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def refusal(family: Family) -> None:
    """`switch` names what it will not switch, and changes nothing."""
    model = make(family)
    try:
        hw.switch(model)
    except hw.ConfigError as error:
        assert type(model).__name__ in str(error)
        assert model.config._attn_implementation == "eager"
    else:
        raise AssertionError(f"{family.name} was not refused")
