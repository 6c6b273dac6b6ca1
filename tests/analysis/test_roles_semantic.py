"""Similar meaning: the dense float64 formula, heads that must score 0, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from planted import MEANINGS, embeddings, planted
from test_roles_dense import built, cases, same

import headwise as hw
from headwise.analysis.head_roles import tally
from headwise.analysis.head_roles.collect import NEAR
from headwise.errors import ConfigError, DTypeError, ShapeError
from headwise.lm.model import Decoder, DecoderConfig


def dense(weights, allowed, ids, table):
    """Score, baseline and coverage of each head [h], pair by pair in float64; and the heads of which rounding decides
    nothing: the largest excess of each row, and the scale of each text, are off the limits."""
    b, h, n, m = allowed.shape
    found, close = torch.zeros(3, h, dtype=torch.float64), torch.zeros(h, dtype=torch.bool)
    at = (torch.arange(m) - torch.arange(n)[:, None] - (m - n)).clamp(-NEAR - 1, NEAR + 1)
    for i in range(b):
        text = ids.expand(b, m)[i]
        members = allowed[i].any(0).any(0)
        vectors = table.double()[text]
        units = torch.nn.functional.normalize(vectors - vectors[members].mean(0), dim=-1) if members.any() else vectors
        cosines = units[m - n :] @ units.T
        for head in range(h):
            pairs = allowed[i, head] & (text[m - n :, None] != text) & members[m - n :, None] & members
            excess = cosines - torch.nan_to_num((cosines * pairs).sum(0) / pairs.sum(0))
            for distance in at.unique():
                here = pairs & (at == distance)
                if here.any():
                    excess = torch.where(at == distance, excess - excess[here].mean(), excess)
            excess = excess * pairs
            largest = excess.amax(-1).clamp_min(0)
            eligible = (pairs.sum(-1) >= 2) & (largest > 0)
            scale = largest[eligible].mean() if eligible.any() else torch.tensor(0.0)
            nearest = excess.masked_fill(~pairs, -torch.inf).amax(-1).abs()
            close[head] |= bool(((pairs.sum(-1) >= 2) & (nearest < 1e-5)).any()) or abs(scale - 1e-4) < 1e-5
            if scale > 1e-4:
                uniform = excess.sum(-1) / allowed[i, head].sum(-1)
                score = (weights[i, head] * excess).sum(-1)
                sums = (score[eligible] / scale).sum(), (uniform[eligible] / scale).sum(), eligible.sum()
                found[:, head] += torch.stack(sums)
    rows = allowed.any(-1).sum((0, 2))
    return found[0] / found[2], found[1] / found[2], found[2] / rows, ~close


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(cases())
def test_scores_are_those_of_the_dense_weights(c):
    amap, weights, allowed, ids = built(c)
    table = embeddings(c["vocabulary"], d=5, seed=c["seed"])
    score = hw.analysis.roles(amap, tokens=ids, embeddings=table)["semantic"]
    mass, uniform, coverage, sure = dense(weights, allowed, ids, table)
    for found, expected, name in ((score.mass, mass, "score"), (score.uniform, uniform, "uniform")):
        same(found[:, sure.numpy()], expected[sure], name, atol=2e-4)
    same(score.coverage[:, sure.numpy()], coverage[sure], "coverage")


def topics(n, seed=0):
    """Tokens in runs of one meaning, so that neighbours are similar; a fifth of them repeat the first token."""
    g = torch.Generator().manual_seed(seed)
    meaning = torch.randint(0, MEANINGS, (-(-n // 4),), generator=g).repeat_interleave(4)[:n]
    ids = meaning + MEANINGS * torch.randint(0, 9, (n,), generator=g)
    ids[torch.rand(n, generator=g) < 0.2] = int(ids[0])
    return ids


@pytest.mark.thorough
@pytest.mark.parametrize("causal", [True, False])
def test_heads_that_are_blind_to_meaning_score_nothing(causal):
    """By position, by key, by both, by equal tokens, or not at all; though their keys are similar to the query."""
    n, ids = 331, topics(331)
    q, k = planted(["previous", "offset", "local", "first", "duplicate", "semantic", "semantic"], ids[None], n)
    q[:, 5] = 0  # uniform
    q[0, 6] = torch.maximum(q[0, 0], q[0, 3])  # half on the key before, half on the first
    _, amap = hw.attend(q, k, k[..., :1], mask=hw.Causal() if causal else None, scale=1.0, return_map=True)
    table = embeddings(9 * MEANINGS)
    score = hw.analysis.roles(amap, tokens=ids, embeddings=table)["semantic"]
    np.testing.assert_allclose(score.mass[0], 0.0, atol=0.02)
    np.testing.assert_allclose(score.uniform[0], 0.0, atol=0.005)
    assert np.isnan(score.lift).all()
    units = torch.nn.functional.normalize(table[ids] - table[ids].mean(0), dim=-1)
    raw = (amap.to_dense()[0] * (units @ units.T)).sum(-1).mean(-1)
    assert float(raw[0]) > 0.4  # that of the previous head, without matched pairs


@pytest.mark.thorough
def test_the_common_part_and_the_length_of_embeddings_do_not_matter():
    n, ids = 97, topics(97, 1)
    q, k = torch.randn(2, 1, 3, n, 8, generator=torch.Generator().manual_seed(2))
    _, amap = hw.attend(q, k, k, mask=hw.Causal(), return_map=True)
    table = embeddings(9 * MEANINGS)
    plain, moved = (hw.analysis.roles(amap, tokens=ids, embeddings=x)["semantic"] for x in (table, 3.0 * table - 40.0))
    np.testing.assert_allclose(moved.mass, plain.mass, atol=1e-4)
    assert np.abs(plain.mass).max() > 0.01
    halved = hw.analysis.roles(amap, tokens=ids, embeddings=table.bfloat16())["semantic"]
    np.testing.assert_allclose(halved.mass, plain.mass, atol=0.02)


def test_punctuation_and_white_space_have_no_meaning():
    """A head that attends from each sign to the sign before it, all of which are alike."""
    n = 120
    ids = torch.arange(n) % 59
    signs = torch.arange(n) % 4 == 3
    ids[signs] = 60 + torch.arange(int(signs.sum())) % 5
    table = torch.randn(65, 16, generator=torch.Generator().manual_seed(0))
    table[60:] = 2.0 + 0.1 * table[60:]
    key = torch.where(signs, torch.arange(n) - 4, torch.zeros(n).long()).clamp_min(0)
    q = 40.0 * torch.eye(n)[key][None, None]
    k = torch.eye(n)[None, None]
    _, amap = hw.attend(q, k, k[..., :1], scale=1.0, return_map=True)
    without = hw.analysis.roles(amap, tokens=ids, embeddings=table)["semantic"]
    known = hw.analysis.roles(
        amap, tokens=ids, embeddings=table, pieces=[";" if sign else "word" for sign in signs.tolist()]
    )["semantic"]
    assert without.mass[0, 0] > 0.2
    assert abs(known.mass[0, 0]) < 0.01
    assert known.coverage[0, 0] == pytest.approx(0.75)


def test_a_text_of_few_rows_gets_no_label():
    for n, label in ((40, False), (80, True)):
        ids = topics(n, 3)
        q, k = planted(["semantic"], ids[None], n)
        _, amap = hw.attend(q, k, k[..., :1], scale=1.0, return_map=True)
        found = hw.analysis.roles(amap, tokens=ids, embeddings=embeddings(9 * MEANINGS))
        assert found["semantic"].mass[0, 0] > 0.5
        assert ("semantic" in [x.role for x in found.labels(0, 0)]) is label
    assert found.labels(0, 0)[0].text.zh == "语义相近"


def test_embeddings_that_are_all_the_same_or_of_one_token_are_not_scored():
    q = torch.randn(1, 2, 60, 4)
    _, amap = hw.attend(q, q, q, return_map=True)
    for ids, table in ((torch.arange(60), torch.ones(60, 7)), (torch.zeros(60).long(), torch.randn(60, 7))):
        score = hw.analysis.roles(amap, tokens=ids, embeddings=table)["semantic"]
        assert np.isnan(score.mass).all()
        assert not score.holds.any()


@pytest.mark.thorough
def test_no_number_depends_on_the_size_of_blocks_or_the_kernel(monkeypatch):
    ids = topics(130, 4)
    q, k = torch.randn(2, 2, 3, 130, 8, generator=torch.Generator().manual_seed(5))
    mask, table = hw.Lengths([130, 101], [130, 101]) & hw.Window(40), embeddings(9 * MEANINGS)
    _, amap = hw.attend(q, k, k, mask=mask, return_map=True)
    whole = hw.analysis.roles(amap, tokens=ids, embeddings=table)["semantic"]
    monkeypatch.setattr(tally, "TILE_ELEMENTS", 7 * 2 * 3 * 130)
    with hw.use_kernel("torch_blocks"):
        _, amap = hw.attend(q, k, k, mask=mask, return_map=True)
        parts = hw.analysis.roles(amap, tokens=ids, embeddings=table)["semantic"]
    np.testing.assert_allclose(parts.mass, whole.mass, atol=1e-5)
    assert parts.coverage == pytest.approx(whole.coverage)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tokens": None}, ConfigError, "embeddings: requires tokens="),
        ({"embeddings": torch.zeros(30)}, ShapeError, r"embeddings: shape \(30,\), expected \[vocabulary, d\]"),
        ({"embeddings": torch.zeros(12, 4)}, ShapeError, "embeddings: 12 rows, but tokens holds 0 to 19"),
        ({"embeddings": torch.zeros(30, 4).long()}, DTypeError, "int64"),
        ({"embeddings": [[0.0]] * 30}, DTypeError, "got list"),
        ({"embeddings": torch.full((30, 4), torch.nan)}, ConfigError, "embeddings: row 0 has non-finite"),
        ({"tokens": torch.arange(20) - 1}, ShapeError, "tokens holds -1 to 18"),
    ],
)
def test_what_does_not_fit_is_named(options, error, message):
    q = torch.randn(1, 2, 20, 4)
    _, amap = hw.attend(q, q, q, return_map=True)
    with pytest.raises(error, match=message):
        hw.analysis.roles(amap, **{"tokens": torch.arange(20), "embeddings": torch.randn(30, 4), **options})


def test_the_input_embedding_of_a_model():
    model = Decoder(DecoderConfig(vocab_size=13, d_model=6, num_layers=1, num_heads=1))
    assert hw.models.input_embedding(model).data_ptr() == model.embedding.weight.data_ptr()
    assert hw.models.input_embedding(torch.nn.Linear(3, 5)) is None
