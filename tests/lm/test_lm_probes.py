"""The probes score a head that is built to copy as such, and one that is not as chance."""

import numpy as np
import pytest
import torch

from headwise.errors import ConfigError
from headwise.lm.model import Decoder, DecoderConfig
from headwise.lm.texts import CharTokenizer
from headwise.lm.watch_heads import frequent_characters, offset_mass, probe_repeats
from headwise.map.attention import attend
from headwise.masks import Causal

TOKENIZER = CharTokenizer("".join(map(chr, range(0x4E00, 0x4E00 + 40))))


def made(context: int = 64) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig(TOKENIZER.vocab_size, d_model=28, num_layers=2, num_heads=7, d_ff=33, context=context)
    return Decoder(config).eval()


@pytest.mark.parametrize("offset", [0, -1, -70])
def test_offset_mass_reads_the_exact_weights(offset: int) -> None:
    q, k, v = torch.randn(3, 2, 3, 150, 5, generator=torch.Generator().manual_seed(1))
    _, amap = attend(q, k, v, mask=Causal(), return_map=True)
    queries = range(-offset, 150)
    found = offset_mass(amap, queries, offset)
    assert found.shape == (2, 3, 150 + offset)
    assert torch.allclose(found, amap.to_dense().diagonal(offset, -2, -1), atol=1e-6)


def test_heads_that_look_everywhere_alike_score_the_baseline() -> None:
    decoder = made()
    for block in decoder.blocks:
        torch.nn.init.zeros_(block.attention.q_proj.weight)
    probe = probe_repeats(decoder, TOKENIZER, TOKENIZER.characters, length=17, sequences=3)
    for scores in (probe.induction, probe.previous):
        assert scores.mass.shape == (2, 7)
        assert np.allclose(scores.lift, 1, atol=1e-4)
        assert np.allclose(scores.spread, 0, atol=1e-6)
    assert probe.induction.coverage == pytest.approx(17 / 34)
    assert probe.previous.coverage == pytest.approx(33 / 34)


def test_scores_are_means_over_the_eligible_cells_of_the_dense_weights() -> None:
    decoder, length = made(), 11
    probe = probe_repeats(decoder, TOKENIZER, TOKENIZER.characters, length=length, sequences=5, seed=2)
    order = [torch.randperm(40, generator=torch.Generator().manual_seed(2 + s))[:length] for s in range(5)]
    ids = torch.from_numpy(TOKENIZER.encode(TOKENIZER.characters))[torch.stack(order)].repeat(1, 2)
    with torch.no_grad():
        logits, maps = decoder(ids, return_maps=True)
    for layer, amap in enumerate(maps):
        w = amap.to_dense()
        induction = torch.stack([w[:, :, length + i, i + 1] for i in range(length)]).mean(0)
        previous = torch.stack([w[:, :, i, i - 1] for i in range(1, 2 * length)]).mean(0)
        assert np.allclose(probe.induction.mass[layer], induction.mean(0), atol=1e-6)
        assert np.allclose(probe.previous.mass[layer], previous.mean(0), atol=1e-6)
        assert np.allclose(probe.induction.spread[layer], induction.std(0, unbiased=False), atol=1e-6)
    losses = -logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    assert np.allclose(probe.first_loss, losses[:, : length - 1].mean(1), atol=1e-5)
    assert np.allclose(probe.second_loss, losses[:, length:].mean(1), atol=1e-5)


@pytest.mark.thorough
def test_a_model_trained_to_repeat_is_found_to_copy_and_look_back() -> None:
    """Two layers learn to copy in a few hundred steps; the probe must see it in the loss and in a head."""
    decoder, context = made(context=24), 24
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    before = probe_repeats(decoder, TOKENIZER, TOKENIZER.characters, length=12)
    decoder.train()
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        copy = torch.rand(16, 40, generator=generator).argsort(1)[:, : context // 2] + 256
        ids = copy.repeat(1, 2)
        logits = decoder(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits[:, context // 2 :].mT, ids[:, context // 2 + 1 :])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = probe_repeats(decoder.eval(), TOKENIZER, TOKENIZER.characters, length=12)
    assert before.second_loss.mean() > 5
    assert after.second_loss.mean() < 0.5 < after.first_loss.mean()
    assert before.induction.lift.max() < 3 < 5 < after.induction.lift.max()


def test_the_same_seed_gives_the_same_numbers_and_another_others() -> None:
    one, same, other = (
        probe_repeats(made(), TOKENIZER, TOKENIZER.characters, length=9, seed=s).induction.mass for s in (1, 1, 2)
    )
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_frequent_characters_are_letters_of_the_vocabulary_by_count() -> None:
    a, b, c = TOKENIZER.characters[:3]
    text = f"{b * 5}{a * 3}{c * 3}，，，，，，，，\n\n龘龘龘龘龘龘"  # the last is not in the vocabulary
    assert frequent_characters(text, TOKENIZER) == b + a + c
    assert frequent_characters(text, TOKENIZER, 2) == b + a


@pytest.mark.parametrize(
    ("characters", "options", "message"),
    [
        (TOKENIZER.characters, {"length": 1}, "length=1"),
        (TOKENIZER.characters, {"length": 33}, r"length=33.*context of 64"),
        (TOKENIZER.characters[:8], {"length": 9}, "8 of them cannot fill length=9"),
        (TOKENIZER.characters, {"length": 9, "sequences": 0}, "sequences=0"),
        ("龘" + TOKENIZER.characters, {"length": 9}, "'龘' is not in the vocabulary"),
        (TOKENIZER.characters[0] + TOKENIZER.characters, {"length": 9}, "twice"),
    ],
)
def test_what_cannot_be_probed_is_named(characters: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        probe_repeats(made(), TOKENIZER, characters, **options)


def test_a_model_in_training_is_refused() -> None:
    with pytest.raises(ConfigError, match="training"):
        probe_repeats(made().train(), TOKENIZER, TOKENIZER.characters, length=9)
