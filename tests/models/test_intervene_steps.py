"""Edits of a prompt and the steps after it: the same as those of the whole text, wherever the keys of a step begin."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.cache import KVCache, SlidingCache
from headwise.interventions import Forbid, Scale, Uniform
from headwise.masks import Causal, Sinks, Window
from headwise.models.adapters.huggingface.library import cache_argument

N, PROMPT, WINDOW = 11, 5, 4
EDITS = {
    "a key": Scale(0.0, keys=6),
    "a key that a window drops": Scale(0.0, keys=slice(1, 3)),
    "a pair": Forbid(slice(7, 9), 5, heads=[1]),
    "queries": Uniform(queries=[3, 8]),
}
Run = Callable[[Tensor, Any], Tensor]  # some tokens and a cache, to [1, n, …]


class ByHand(nn.Module):
    """A decoder's attention with a KV cache, as tutorials write it: a step of one query has no mask."""

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.window = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), window

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        if cache is not None:
            cache[:] = [k, v]
        n, m = q.shape[2], k.shape[2]
        scores = q @ k.mT / 2
        if n > 1:
            scores = scores.masked_fill(torch.ones(n, m).triu(m - n + 1).bool(), -math.inf)
        return x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class ByHandModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(29, 16), nn.ModuleList([ByHand(), ByHand()])

    def forward(self, ids: Tensor, caches: list[list[Tensor]] | None = None) -> Tensor:
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x, None if caches is None else caches[i])
        return x


class Own(nn.Module):
    """headwise's layers; the window of a cache that drops tokens is in the mask of the whole text."""

    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.embed, self.mask = nn.Embedding(29, 16), mask
        self.layers = nn.ModuleList([hw.MultiHeadAttention(16, 4), hw.MultiHeadAttention(16, 4)])

    def forward(self, ids: Tensor, caches: Any = (None, None)) -> Tensor:
        x = self.embed(ids)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = x + layer(x, mask=self.mask, cache=cache)
        return x


class Encoder(nn.Module):
    """`nn.TransformerEncoder`, which has no cache: a step repeats the text so far."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.embed, self.body = nn.Embedding(29, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor, so_far: list[Tensor] | None = None) -> Tensor:
        n = ids.shape[1]
        if so_far is not None:
            so_far.append(ids)
            ids = torch.cat(so_far, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=torch.float64)
        return self.body(self.embed(ids), mask, is_causal=True)[:, -n:]


def of_transformers(name: str, cache: str) -> tuple[nn.Module, Run, Callable[[], Any]]:
    import transformers

    sizes = {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "pad_token_id": 0,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
             "max_position_embeddings": 32, "initializer_range": 0.5}  # fmt: skip
    if name != "Llama":
        sizes["sliding_window"] = WINDOW
    if name == "GPT2":
        sizes = {"vocab_size": 29, "n_embd": 16, "n_layer": 2, "n_head": 4, "initializer_range": 0.5}
    config = getattr(transformers, f"{name}Config")(**sizes)
    kind = f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model = getattr(transformers, kind)(config)
    made = {
        "dynamic": lambda: transformers.DynamicCache(config=config),
        "static": lambda: transformers.StaticCache(config=config, max_cache_len=16),
    }[cache]
    argument = cache_argument(model)
    return model, lambda ids, cache: model(ids, **{argument: cache}, use_cache=cache is not None).logits, made


def by_hand() -> tuple[nn.Module, Run, Callable[[], Any]]:
    model = ByHandModel()
    return model, model, lambda: [[], []]


def own(mask: Any, cache: Callable[[], Any]) -> tuple[nn.Module, Run, Callable[[], Any]]:
    model = Own(mask)
    return model, lambda ids, caches: model(ids, caches or (None, None)), lambda: (cache(), cache())


def encoder() -> tuple[nn.Module, Run, Callable[[], Any]]:
    model = Encoder()
    return model, model, list


MODELS = {
    "by hand": by_hand,
    "headwise": lambda: own(Causal(), KVCache),
    "headwise, sinks": lambda: own(Causal() & (Window(3) | Sinks(1)), lambda: SlidingCache(3, 1)),
    "torch": encoder,
    **{
        f"{name}, {cache}": partial(of_transformers, name, cache)
        for name in ("GPT2", "Llama", "Mistral", "Gemma2") for cache in ("dynamic", "static")
    },
}  # fmt: skip


def in_steps(run: Run, cache: Any, ids: Tensor, count: int = 1) -> Tensor:
    parts = [ids[:, :PROMPT], *ids[:, PROMPT:].split(count, 1)]
    return torch.cat([run(part, cache) for part in parts], 1)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_and_steps_are_the_whole_text(name: str):
    torch.manual_seed(0)
    model, run, cache = MODELS[name]()
    model = model.double().eval()
    ids = torch.randint(1, 29, (1, N))
    handle = hw.attach(model, batch=ids) if name == "by hand" else model
    with torch.no_grad():
        plain = run(ids, None)
        for edit in EDITS.values():
            with hw.intervene(handle, edit, unused="raise"):
                whole = run(ids, None)
            assert not torch.allclose(whole, plain, rtol=1e-3, atol=1e-3)
            for count in (1, 2):
                with hw.intervene(handle, edit, unused="raise"):
                    steps = in_steps(run, cache(), ids, count)
                torch.testing.assert_close(steps, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in MODELS if name != "torch"])
def test_statistics_of_steps_are_those_of_the_whole_text(name: str):
    measures = ["sink_mass", "mean_distance", "distance_variance", "previous_mass", "self_mass", "local_mass"]
    torch.manual_seed(0)
    model, run, cache = MODELS[name]()
    model = model.double().eval()
    ids = torch.randint(1, 29, (1, N))
    found = []
    for compute in (lambda: run(ids, None), lambda: in_steps(run, cache(), ids)):
        with torch.no_grad(), hw.watch(model, measures=measures, steps="manual") as record:
            compute()
            record.step()
        found.append(record.latest)
    for measure in measures:
        torch.testing.assert_close(found[1][measure], found[0][measure], rtol=1e-5, atol=1e-6)


def test_maps_of_steps_have_the_tokens_that_a_window_has_dropped():
    model, run, cache = MODELS["Mistral, dynamic"]()
    model.eval()
    seen: list[hw.AttentionMap] = []
    ids = torch.randint(1, 29, (1, N))
    with torch.no_grad(), hw.models.observe(lambda call: seen.append(call.map), model=model), hw.attach(model):
        in_steps(run, cache(), ids)
    last = seen[-1].rule.grid
    assert (last.gap, last.first_token, last.key_tokens().tolist()) == ((0, N - WINDOW), N - 1, [7, 8, 9, 10])


def masked(ids: Tensor, past: int, window: int | None = None) -> Tensor:
    """A causal mask of the user's own, [1, 1, n, m]; 0 = may attend, over the keys that the cache returns."""
    n = ids.shape[1]
    first = 0 if window is None else max(0, past - window + 1)
    distance = torch.arange(past, past + n)[:, None] - torch.arange(first, past + n)
    hidden = (distance < 0) | (distance >= (window or 10**6))
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -torch.inf)[None, None]


def with_own_masks(model: Any, cache: Any, ids: Tensor, window: int | None, wide: int = 0) -> Tensor:
    found, past = [], 0
    for part in (ids[:, :PROMPT], *ids[:, PROMPT:].split(2, 1)):
        mask = masked(part, past, window)
        mask = torch.nn.functional.pad(mask, (0, max(0, wide - mask.shape[-1])), value=-torch.inf)
        found.append(model(part, attention_mask=mask, **{cache_argument(model): cache}, use_cache=True).logits)
        past += part.shape[1]
    return torch.cat(found, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_mask_of_the_users_own_shows_where_queries_are(kind: str):
    torch.manual_seed(0)
    model, run, cache = MODELS[f"Llama, {kind}"]()
    model, ids = model.double().eval(), torch.randint(1, 29, (1, N))
    with torch.no_grad(), hw.intervene(model, *EDITS.values(), unused="raise"):
        found = with_own_masks(model, cache(), ids, None, 16 if kind == "static" else 0)
        torch.testing.assert_close(found, run(ids, None), rtol=1e-9, atol=1e-9)


@pytest.mark.thorough
def test_tokens_of_keys_that_no_mask_shows_are_not_guessed():
    torch.manual_seed(0)
    model, run, cache = MODELS["Mistral, dynamic"]()
    model, ids = model.double().eval(), torch.randint(1, 29, (1, N))
    with torch.no_grad():
        with hw.attach(model):
            torch.testing.assert_close(with_own_masks(model, cache(), ids, WINDOW), run(ids, None))
        with hw.watch(model, measures=["entropy", "sink_mass"]) as record:
            with_own_masks(model, cache(), ids, WINDOW)
        with pytest.raises(hw.ConfigError, match="no mask shows which tokens its keys are"), \
                hw.intervene(model, hw.interventions.Scale(0.0, keys=[0])):  # fmt: skip
            with_own_masks(model, cache(), ids, WINDOW)
    assert bool(record.latest["sink_mass"].isnan().all())
    assert bool(record.latest["entropy"].isfinite().all())
    assert "which tokens its 5 keys are is not known" in record.remarks["model.layers.0.self_attn"]


def test_queries_among_the_keys_of_an_unknown_mask():
    """Each sees all keys but one, so that nothing shows where they are."""
    torch.manual_seed(0)
    model, _, cache = MODELS["Llama, dynamic"]()
    model, ids = model.double().eval(), torch.randint(1, 29, (1, N))
    mask = torch.zeros(1, 1, 3, PROMPT + 3, dtype=torch.float64)
    mask[..., [0, 1, 2], [7, 7, 3]] = -torch.inf

    def prompt() -> dict[str, Any]:
        kept = cache()
        model(ids[:, :PROMPT], **{cache_argument(model): kept}, use_cache=True)
        return {"attention_mask": mask, cache_argument(model): kept, "use_cache": True}

    with torch.no_grad():
        call = prompt()
        with pytest.raises(hw.ConfigError, match=r"where the 3 queries of .* are among its 8 keys is not known"), \
                hw.intervene(model, Forbid(6, 2)):  # fmt: skip
            model(ids[:, :3], **call)
        call = prompt()
        with hw.watch(model, measures=["mean_distance", "sink_mass"]) as record:
            model(ids[:, :3], **call)
        assert record.latest["mean_distance"].isnan().all()
        assert not record.latest["sink_mass"].isnan().any()
        assert "is not known" in record.remarks["model.layers.0.self_attn"]


def test_one_mask_function_of_the_users_own_in_a_cache_of_fixed_size():
    """It is no mask that is recognised; its keys beyond the text are left out."""
    from transformers.masking_utils import causal_mask_function

    from headwise.models.adapters.huggingface.masks import make_mask

    def function(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return causal_mask_function(batch, head, query, key) & ((query - key) % 3 != 1)

    made = make_mask(1, 2, 16, q_offset=5, mask_function=function, use_vmap=False)
    assert made is not None
    assert made.position == (True, 7, 0)
    made = make_mask(1, 2, 16, q_offset=5, mask_function=lambda b, h, q, k: (q - k) % 3 != 1, use_vmap=False)
    assert made is not None
    assert made.position == (False, 16, 0)
