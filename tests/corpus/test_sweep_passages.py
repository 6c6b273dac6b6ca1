"""The strongest passages of each head: those of every window computed by itself, from the stored matrix."""

import json

import numpy as np
import pytest
import torch
from sweep_samples import WINDOW, said, write_jsonl
from test_sweep_resume import begun

import headwise as hw
from headwise.corpus import Passages, measure_corpus
from headwise.corpus.passages import passages_path
from headwise.corpus.tally import KEYS, largest_keys, strength_of, strengths, strongest
from headwise.errors import CheckpointError, ConfigError
from headwise.lm.loading import load_model
from headwise.map import AttentionMap
from headwise.stats import Tokens

OPTIONS = {"measures": ["entropy", "max_logit"], "window": WINDOW, "device": "cpu", "batch": 3, "passages": 5}
HEADS = [(layer, head) for layer in range(2) for head in range(3)]


def windows(subject, texts):
    """(text, first token, ids, weights [layers, heads, n, n]) of every window."""
    for number, text in enumerate(texts):
        ids = subject.read(text).ids
        for first in range(0, len(ids), WINDOW):
            maps = subject.maps(ids[first : first + WINDOW]).values()
            yield number, first, ids, np.stack([amap.to_dense()[0].numpy() for amap in maps])


def strongest_by_hand(subject, texts):
    """(layer, head) → the strongest (strength, text, first token, query) of each text, sorted."""
    found = {place: {} for place in HEADS}
    for number, first, _, weights in windows(subject, texts):
        n = weights.shape[-1]
        kept = weights * np.tril(np.ones((n, n)), -1)  # not the query itself
        kept[..., 0] = -1  # nor the first token
        kept[:, :, : KEYS - 1] = -1  # nor a query with few keys
        for layer, head in HEADS:
            one = kept[layer, head].max(-1)
            if n >= KEYS and (best := one.max()) > found[layer, head].get(number, (0,))[0]:
                found[layer, head][number] = best, number, first, int(one.argmax())
    return {place: sorted(best.values(), reverse=True) for place, best in found.items()}


@pytest.fixture(scope="module")
def lines():
    return [said(n, n) for n in (40, 7, 9, 60, 26, 0, 31, 14, 55, 22)]


@pytest.fixture
def swept(model_folder, tmp_path, lines):
    """Texts of many lengths in batches with padding."""
    write_jsonl(tmp_path / "a.jsonl", lines)
    return measure_corpus(model_folder, tmp_path / "a.jsonl", tmp_path / "out.csv", **OPTIONS)


@pytest.mark.thorough
def test_they_are_the_strongest_queries_of_different_texts(model_folder, swept, lines):
    subject, texts = load_model(model_folder), [line for line in lines if line]
    wanted = strongest_by_hand(subject, texts)
    for place in HEADS:
        found = swept.passages[place].strongest
        assert len(found) == 5
        assert len({one.where for one in found}) == 5
        np.testing.assert_allclose([one.strength for one in found], [one[0] for one in wanted[place][:5]], rtol=1e-5)
        clear = [i for i in range(5) if wanted[place][i][0] > 1.0001 * wanted[place][i + 1][0]]
        for one, (_, _, first, query) in zip(found, wanted[place], strict=False):
            if len(clear) == 5:
                assert (one.first, one.query) == (first, query)


@pytest.mark.thorough
def test_a_passage_has_the_exact_weights_and_the_text(model_folder, swept, lines):
    subject = load_model(model_folder)
    at = {}
    for number, first, ids, weights in windows(subject, [line for line in lines if line]):
        at.setdefault(tuple(ids.tolist()), {})[first] = number, weights
    byte = {one.where for found in swept.passages.values() for one in (*found.strongest, *found.sampled)}
    assert all(place.startswith("byte ") for place in byte)
    starts, start = {}, 0
    for i, text in enumerate(lines):
        starts[f"byte {start:,}"] = text
        start += len(json.dumps({"text": text, "n": i}).encode()) + 1
    for (layer, head), found in swept.passages.items():
        for one in (*found.strongest, *found.sampled):
            text = starts[one.where]
            weights = at[tuple(subject.read(text).ids.tolist())][one.first][1][layer, head, one.query]
            known = sorted(np.flatnonzero(weights), key=lambda key: -weights[key])[:KEYS]
            assert sorted(key.position for key in one.keys) == sorted(map(int, known))
            np.testing.assert_allclose([key.weight for key in one.keys], weights[known], rtol=1e-5)
            assert list(one.tokens) == [text[one.first + i] for i in one.positions]
            assert one.token == text[one.first + one.query]
            others = [key.weight for key in one.keys if key.position not in (0, one.query)]
            assert one.strength == pytest.approx(max(others), rel=1e-5)


@pytest.mark.thorough
def test_the_sample_is_of_the_same_windows_for_all_heads(swept):
    every = [{(one.where, one.first) for one in found.sampled} for found in swept.passages.values()]
    assert all(one == every[0] for one in every)
    assert 0 < len(every[0]) <= 5
    for found in swept.passages.values():
        strengths = [one.strength for one in found.sampled]
        assert strengths == sorted(strengths, reverse=True)
        assert found.contrast == pytest.approx(
            np.mean([one.strength for one in found.strongest]) - np.mean(strengths), abs=1e-12
        )
    first, *_, last = swept.passages.distinctive(6)
    assert swept.passages[first].contrast > swept.passages[last].contrast


@pytest.mark.thorough
def test_passages_of_a_resumed_sweep_are_those_of_one_that_was_not(model_folder, tmp_path, small_pieces):
    (tmp_path / "a.txt").write_text(said(3000, 1), encoding="utf-8")
    (tmp_path / "b.txt").write_text(said(1500, 2), encoding="utf-8")
    corpus = [tmp_path / "a.txt", tmp_path / "b.txt"]
    whole = measure_corpus(model_folder, corpus, tmp_path / "whole.csv", **OPTIONS)
    begun(model_folder, corpus, tmp_path / "parts.csv", **OPTIONS)
    parts = measure_corpus(model_folder, corpus, tmp_path / "parts.csv", **OPTIONS)
    assert parts.passages.found == whole.passages.found
    assert passages_path(parts.path).read_bytes() == passages_path(whole.path).read_bytes()
    places = [(one.file, one.where, one.first // WINDOW) for one in whole.passages[1, 2].strongest]
    assert len(set(places)) == 5  # of a text, each from other windows
    again = measure_corpus(model_folder, corpus, tmp_path / "parts.csv", **OPTIONS)
    assert not again.new
    assert again.passages.found == whole.passages.found


@pytest.mark.thorough
def test_the_file_is_read_back(swept, tmp_path):
    for path in (tmp_path / "out.csv", tmp_path / "out.csv.passages.json"):
        found = Passages.load(path)
        assert (found.found, found.by, found.unit) == (swept.passages.found, "weight", "mass")
        assert found.to_dict() == swept.passages.to_dict()
    assert found.model["sha256"] == swept.about["model"]["sha256"]
    assert repr(found) == "Passages(6 heads, 30 strongest passages by weight)"


@pytest.mark.parametrize("broken", [b"{", b"[]", b'{"format": "other"}', b'{"format": "headwise-passages-1"}', b"\xff"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, broken):
    with pytest.raises(CheckpointError, match=r"out\.csv\.passages\.json' does not exist; headwise measure writes it"):
        Passages.load(tmp_path / "out.csv")
    (tmp_path / "out.csv.passages.json").write_bytes(broken)
    with pytest.raises(CheckpointError, match=r"passages .*out\.csv\.passages\.json' cannot be read"):
        Passages.load(tmp_path / "out.csv")


def test_a_changed_file_is_not_taken_for_the_result(model_folder, swept, tmp_path):
    path = passages_path(swept.path)
    path.write_text(path.read_text("utf-8").replace("byte", "bite"), "utf-8")
    with pytest.raises(ConfigError, match="already exists; give another --out, or --restart"):
        measure_corpus(model_folder, tmp_path / "a.jsonl", tmp_path / "out.csv", **OPTIONS)
    none = measure_corpus(
        model_folder, tmp_path / "a.jsonl", tmp_path / "out.csv", **{**OPTIONS, "passages": 0}, restart=True
    )
    assert len(none.passages) == 0
    assert not path.exists()
    with pytest.raises(ConfigError, match=r"passages\[\(0, 0\)\]: expected \(layer, head\), one of no heads"):
        none.passages[0, 0]
    with pytest.raises(ConfigError, match="--passages: it was 0 and is 5"):
        measure_corpus(model_folder, tmp_path / "a.jsonl", tmp_path / "out.csv", **OPTIONS)


@pytest.mark.thorough
def test_strongest_by_a_measure_of_queries(model_folder, tmp_path, lines):
    write_jsonl(tmp_path / "a.jsonl", lines)
    found = measure_corpus(
        model_folder, tmp_path / "a.jsonl", tmp_path / "out.csv", **OPTIONS, strongest_by="entropy"
    ).passages
    assert (found.by, found.unit) == ("entropy", "nats")
    most = dict.fromkeys(HEADS, 0.0)
    for _, _, _, weights in windows(load_model(model_folder), [line for line in lines if line]):
        p = weights[:, :, KEYS - 1 :].astype(np.float64)
        entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)
        for layer, head in HEADS:
            most[layer, head] = max([most[layer, head], *entropy[layer, head].tolist()])
    for place in HEADS:
        assert found[place].strongest[0].strength == pytest.approx(most[place], rel=1e-4)


def test_wrong_options_are_named_before_anything_is_read(tmp_path):
    for options, says in (
        ({"passages": -1}, "passages=-1: expected a whole number of at least 0"),
        ({"strongest_by": "weigth"}, "strongest_by='weigth': did you mean 'weight'"),
        ({"strongest_by": "received_mass"}, "strongest_by='received_mass'.*expected one of 'weight'"),
    ):
        with pytest.raises(ConfigError, match=says):
            measure_corpus(tmp_path / "absent", tmp_path / "absent", tmp_path / "out.csv", **options)
    assert {"weight", "entropy", "induction_mass", "previous_mass"} <= set(strengths())


@pytest.mark.parametrize("way", ["reference", "torch_blocks", "cpu", "tiles"])
def test_special_tokens_and_padding_are_no_passages(way):
    """Both ways, with tokens that are not of the text before, within and after it."""
    torch.manual_seed(0)
    b, h, n = 2, 3, 17
    q, k, v = torch.randn(3, b, h, n, 5)
    special = torch.zeros(b, n, dtype=torch.bool)
    special[0, [0, 11, 16]] = special[1, [0, 9]] = True
    mask = torch.ones(b, n, dtype=torch.bool)
    mask[1, 13:] = False
    lengths = mask.sum(-1)
    kernel = "auto" if way == "tiles" else way
    _, amap = hw.attend(q, k, v, mask=hw.Lengths(lengths, lengths), kernel=kernel, return_map=True)
    if way == "tiles":
        amap.__class__ = type("OtherMap", (AttentionMap,), {})  # as that of a design whose weights are mixed
    tokens = Tokens(torch.zeros(b, n, dtype=torch.long), [[""] * n] * b, special)
    amap.measured = amap.measure(strength_of("weight", tokens, mask))
    strength, query = strongest(amap, tokens, mask)
    every_key, every_weight = largest_keys(amap, query)
    weights = amap.to_dense().numpy()
    for entry in range(b):
        for head in range(h):
            kept = weights[entry, head].copy()
            kept[:, 0] = kept[:, special[entry]] = kept[special[entry]] = 0
            np.fill_diagonal(kept, 0)
            row, key = np.unravel_index(kept.argmax(), kept.shape)
            assert int(query[entry, head]) == row
            assert float(strength[entry, head]) == pytest.approx(kept[row, key], rel=1e-5)
            keys, largest = (x[entry, head] for x in (every_key, every_weight))
            order = np.argsort(-weights[entry, head, row], kind="stable")[:KEYS]
            assert keys.tolist() == order.tolist()
            np.testing.assert_allclose(largest, weights[entry, head, row, order], rtol=1e-6)


def test_a_mask_that_is_no_ranges_has_the_same_strengths():
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 1, 2, 19, 5)
    tokens = Tokens(torch.zeros(1, 19, dtype=torch.long), [[""] * 19], torch.zeros(1, 19, dtype=torch.bool))
    dense, strength = hw.Dense(torch.ones(19, 19, dtype=torch.bool).tril()), [strength_of("weight", tokens, None)]
    (one, at), (other, there) = (
        strongest(hw.attend(q, k, v, mask=mask, return_map=True, measures=strength)[1], tokens, None)
        for mask in (hw.Causal(), dense)
    )
    torch.testing.assert_close(one, other)
    assert torch.equal(at, there)


def test_a_window_with_few_keys_has_no_strength(model_folder, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [said(n, n) for n in (1, 3, KEYS - 1)])
    found = measure_corpus(model_folder, tmp_path / "a.jsonl", tmp_path / "out.csv", **OPTIONS)
    assert all(one.strongest == one.sampled == () and one.contrast == 0 for one in found.passages.values())
