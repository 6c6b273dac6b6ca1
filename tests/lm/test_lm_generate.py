"""Writing goes on for as long as it is asked to, whole characters only."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.errors import ConfigError, TextError
from headwise.lm.model import Decoder, DecoderConfig, write
from headwise.lm.texts import CharTokenizer
from headwise.masks import Window

TOKENIZER = CharTokenizer("水浒武松林冲")
CONTEXT = 13
PLAIN: dict[str, Any] = {"temperature": 1.0, "top_k": None, "top_p": None}


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig(TOKENIZER.vocab_size, d_model=28, num_layers=2, num_heads=7, d_ff=33, context=CONTEXT)
    return Decoder(config).eval()


def characters_only(decoder: Decoder) -> Decoder:
    """The same model, never choosing a byte: what it writes can then be read back token for token."""
    config = DecoderConfig(**decoder.config.to_dict())
    other = Decoder(config).eval()
    other.load_state_dict(decoder.state_dict())
    with torch.no_grad():
        other.embedding.weight[:256] = 0  # logit 0, below the largest of the characters'
    return other


@pytest.mark.thorough
@pytest.mark.parametrize("prompt", ["水", "武松" * 20])
def test_greedy_writing_equals_full_passes_far_beyond_the_context(decoder: Decoder, prompt: str) -> None:
    decoder = characters_only(decoder)
    text = "".join(write(decoder, TOKENIZER, prompt, 4 * CONTEXT, temperature=0))
    assert len(text) == 4 * CONTEXT
    ids = torch.from_numpy(TOKENIZER.encode(prompt + text))[None]
    with torch.no_grad():
        logits = decoder(ids, mask=Window(CONTEXT))[0]
    start = len(prompt) - 1
    likeliest = logits.max(-1).values[start:-1]
    chosen = logits[:-1].gather(1, ids[0, 1:, None])[start:, 0]
    assert torch.allclose(likeliest, chosen, atol=1e-4)


@pytest.mark.thorough
def test_the_seed_gives_the_text(decoder: Decoder) -> None:
    texts = ["".join(write(decoder, TOKENIZER, "水浒", 40, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.thorough
def test_the_length_counts_characters_and_pieces_are_whole(decoder: Decoder) -> None:
    # Untrained, the model writes mostly random bytes: each piece must still be text that can be printed.
    pieces = list(write(decoder, TOKENIZER, "水", 97, temperature=5.0, seed=0))
    assert all(pieces)
    text = "".join(pieces)
    assert len(text) == 97
    assert text.encode().decode() == text
    assert "\ufffd" in text


class Scripted(Decoder):
    """A decoder that says what it is told: `says` maps a token to the logits of the next one."""

    def __init__(self, says: Callable[[int], Tensor]) -> None:
        # The embedding is the identity, so that the hidden state is the logits. 264 = 262 tokens + 2, for even heads.
        super().__init__(DecoderConfig(TOKENIZER.vocab_size, d_model=264, num_layers=1, num_heads=2, context=CONTEXT))
        self.says = says
        torch.nn.init.eye_(self.embedding.weight)
        self.eval()

    def hidden(self, ids: Tensor, **options: Any) -> tuple[Tensor, list[Any]]:
        logits = torch.stack([self.says(int(token)) for token in ids[0]])
        return torch.nn.functional.pad(logits, (0, 2))[None], []


def chanting(tokens: list[int]) -> Scripted:
    """Says the tokens over and over."""
    after = dict(zip(tokens, tokens[1:] + tokens[:1], strict=True))
    return Scripted(lambda token: torch.eye(TOKENIZER.vocab_size)[after.get(token, tokens[0])])


def test_bytes_are_put_together_to_one_character() -> None:
    tokens = [*"龘".encode(), *TOKENIZER.encode("水").tolist(), *"é".encode()]
    assert list(write(chanting(tokens), TOKENIZER, "武", 5, temperature=0)) == ["龘", "水", "é", "龘", "水"]


def test_a_character_left_unfinished_is_a_replacement_and_the_next_is_whole() -> None:
    tokens = [*"龘".encode()[:2], *TOKENIZER.encode("水").tolist()]
    assert "".join(write(chanting(tokens), TOKENIZER, "武", 5, temperature=0)) == "\ufffd水\ufffd水\ufffd"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_k": 3}, [50 / 95, 30 / 95, 15 / 95, 0]),
        ({"top_p": 0.85}, [50 / 95, 30 / 95, 15 / 95, 0]),
        ({"top_p": 0.75}, [5 / 8, 3 / 8, 0, 0]),
        ({"top_k": 3, "top_p": 0.51}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
    ],
)
def test_tokens_are_drawn_with_their_probabilities(options: dict[str, Any], shares: list[float]) -> None:
    logits = torch.full((TOKENIZER.vocab_size,), -100.0)
    logits[TOKENIZER.encode("水浒武松")] = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    draws = 1500
    text = "".join(write(Scripted(lambda token: logits), TOKENIZER, "水", draws, seed=0, **PLAIN | options))
    assert [text.count(c) / draws for c in "水浒武松"] == pytest.approx(shares, abs=0.04)
    assert all(c in text for c, share in zip("水浒武松", shares, strict=True) if share > 0)
    assert not any(c in text for c, share in zip("水浒武松", shares, strict=True) if share == 0)


@pytest.mark.thorough
def test_top_k_of_one_and_a_tiny_top_p_are_greedy(decoder: Decoder) -> None:
    greedy = "".join(write(decoder, TOKENIZER, "水浒", 30, temperature=0))
    for options in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-3}):
        assert "".join(write(decoder, TOKENIZER, "水浒", 30, seed=3, **PLAIN | options)) == greedy


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 1e-300])
def test_a_temperature_next_to_nothing_is_greedy_too(decoder: Decoder, temperature: float) -> None:
    greedy = "".join(write(decoder, TOKENIZER, "水浒", 30, temperature=0))
    options = PLAIN | {"temperature": temperature}
    assert "".join(write(decoder, TOKENIZER, "水浒", 30, seed=3, **options)) == greedy


def test_nothing_is_written_for_length_zero(decoder: Decoder) -> None:
    assert list(write(decoder, TOKENIZER, "水", 0)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": -1}, "length=-1"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0"),
        ({"top_p": 1.5}, "top_p=1.5"),
    ],
)
def test_options_that_cannot_be_are_named_at_the_call(decoder: Decoder, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write(decoder, TOKENIZER, "水", **{"length": 5} | options)


def test_an_empty_prompt_is_refused(decoder: Decoder) -> None:
    with pytest.raises(TextError, match="prompt"):
        write(decoder, TOKENIZER, "", 5)


def test_a_generator_left_halfway_leaves_gradients_on(decoder: Decoder) -> None:
    pieces = write(decoder, TOKENIZER, "水", 50)
    next(pieces)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
