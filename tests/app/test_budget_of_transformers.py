"""headwise budget for a folder of transformers: what it writes is what `generate` uses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import headwise as hw
from headwise.errors import ConfigError

TEXT = "the cat sat on the mat; a dog ran far away. " * 150


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer of characters, and a text."""
    folder = tmp_path_factory.mktemp("llama")
    letters = sorted({*TEXT})
    plain = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token=" "))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    plain.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token=" ").save_pretrained(folder)
    torch.manual_seed(3)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
             "num_key_value_heads": 3, "max_position_embeddings": 32}  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(letters), initializer_range=0.3)).save_pretrained(folder)
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.mark.thorough
def test_the_budget_of_a_folder_is_planned_written_judged_and_used(headwise, llama, tmp_path):
    out, told = tmp_path / "short.json", tmp_path / "told.json"
    command = ("budget", "--model", llama, "--file", llama / "text.txt", "--window", 5, "--sinks", 2, "--windows", 2)
    assert headwise(*command, "--dry-run", "--json", told).code == 0
    kept = torch.tensor(json.loads(told.read_text())["plan"]["kept"]).view(2, 3, 2).amin(-1)
    command += ("--threshold", float(kept.median()), "--out", out, "--json", told, "--yes")
    done = headwise(*command)
    assert done.code == 0, done.err
    assert "hw.cache.for_transformers(model," in done.out.replace("\n", " ")
    found: Any = hw.edit.read_budget(out)
    windows = {window for layer in found.windows for window in layer}
    assert windows == {5, None}
    model: Any = LlamaForCausalLM.from_pretrained(llama)
    content = json.loads(told.read_text())
    judged = content["judged"]
    assert judged["budget"]["cache_bytes"] < judged["all tokens"]["cache_bytes"]
    assert judged["budget"]["loss"] != judged["all tokens"]["loss"]
    assert judged["budget"]["parameters"] == sum(x.numel() for x in model.parameters())
    with hw.attach(model):
        cache = hw.cache.for_transformers(model, found)
        model.generate(
            torch.arange(20)[None] % model.config.vocab_size, past_key_values=cache, max_new_tokens=4, do_sample=False
        )
    assert cache.nbytes == found.cache_bytes(23)
    other = LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "hidden_size": 48}))
    with pytest.raises(ConfigError, match=r"budget: was made for a LlamaForCausalLM with [\d,]+ parameters, and this"):
        hw.cache.for_transformers(other, found)
    again = headwise(*command)
    assert "already contains the finished result" in again.out.replace("\n", " ")


def test_the_effect_of_a_budget_on_a_model_of_transformers_is_that_of_its_masks(llama):
    model: Any = LlamaForCausalLM.from_pretrained(llama).eval()
    ids = torch.randint(0, model.config.vocab_size, (2, 31), generator=torch.Generator().manual_seed(1))
    seen: list[Any] = []
    with hw.attach(model), torch.no_grad():
        with hw.models.observe(lambda call: seen.append(call.map), model=model):
            full = model(ids, use_cache=False, labels=ids).loss
        found = hw.edit.budget(seen, 5, sinks=2, threshold=0.35)
        effects = [hw.edit.budget_effect(model, [ids], found, step=step) for step in (None, 7)]
    assert effects[0].full == pytest.approx(float(full), rel=1e-5)
    assert effects[0].short == pytest.approx(effects[1].short, rel=1e-5) != effects[0].full
    with pytest.raises(ConfigError, match=r"hw\.attach\(model\)"):
        hw.edit.budget_effect(model, [ids], found)
