"""Each way to score induction gives a perfect head what it is known to give; copying is found and told apart."""

import numpy as np
import pytest
import torch
from planted import Copier

import headwise as hw
from headwise.analysis.head_roles.repeats import probe_induction
from headwise.errors import ConfigError, DTypeError, ShapeError

START = 60


@pytest.mark.parametrize(
    ("length", "copies", "olsson", "tl_mul"),
    [
        (25, 4, 0.50, 75 / 101),  # 150 pairs match, and 75 of 101 rows have one
        (50, 2, 1.0, 50 / 101),
        (7, 3, 14 / 21, 14 / 22),
    ],
)
def test_a_perfect_head_gets_what_each_definition_gives(length, copies, olsson, tl_mul):
    model = Copier(START + 1, 110)
    probe = probe_induction(model, START, length=length, copies=copies, sequences=3, start=START)
    assert probe.induction.mass[1, 0] == pytest.approx(1.0, abs=1e-5)
    assert probe.olsson[1, 0] == pytest.approx(olsson, abs=1e-5)
    assert probe.tl_mul[1, 0] == pytest.approx(tl_mul, abs=1e-5)
    assert probe.induction.coverage == pytest.approx((copies - 1) * length / (copies * length + 1))
    assert probe.previous.mass[0, 0] == pytest.approx(1.0, abs=1e-5)
    assert probe.induction.mass[0, 0] < 0.1
    assert probe.losses.shape == (copies, 3)
    assert (probe.losses[0] > 3).all()
    assert (probe.losses[1:] < 0.5).all()
    assert list(probe.table) == ["induction", "previous", "duplicate", "olsson", "tl_mul"]
    assert probe.table[1, 0]["induction"] == probe.induction.mass[1, 0]
    error = probe.induction.spread[0, 0] / 2**0.5  # of the mean over three sequences
    assert float(probe.table["induction"].error[0][0]) == pytest.approx(error)
    assert f"repeated {copies} times" in repr(probe)


def test_roles_of_the_same_input_say_the_same():
    model, ids = Copier(START + 1, 110), torch.arange(25).repeat(4)
    ids = torch.cat((torch.tensor([START]), ids))
    _, maps, _ = model(ids[None])
    found = hw.analysis.roles(maps, tokens=ids)
    assert found["induction"].mass[1, 0] == pytest.approx(1.0)
    assert found.olsson[1, 0] == pytest.approx(0.5)
    assert found.tl_mul[1, 0] == pytest.approx(75 / 101)
    assert found["induction"].coverage[1, 0] == pytest.approx(75 / 101)
    # A uniform head at position i has the matches of its copy among i + 1 keys.
    uniform = np.mean([(i - 1) // 25 / (i + 1) for i in range(26, 101)])
    assert found["induction"].uniform[1, 0] == pytest.approx(uniform)
    assert [label.role for label in found.labels(1, 0)] == ["induction"]
    assert [label.role for label in found.labels(0, 0)] == ["previous"]


@pytest.mark.thorough
def test_copying_is_that_of_the_values_and_the_output_matrix():
    model = Copier(START + 1, 110)
    asked = {"unembedding": model.unembedding, "outputs": model.outputs()}
    probe = probe_induction(model, START, start=START, **asked)
    assert probe.copying is not None
    assert probe.copying[1, 0] == pytest.approx(1.0)
    assert probe.copying[0, 0] == pytest.approx(0.5)  # it writes where nothing is read out
    assert "copying" in repr(probe)
    upside_down = {"unembedding": model.unembedding, "outputs": [-x for x in model.outputs()]}
    against = probe_induction(model, START, start=START, **upside_down)
    assert against.copying is not None
    assert against.copying[1, 0] == pytest.approx(0.0)


def test_copying_of_random_heads_is_that_of_the_dense_formula_and_near_chance():
    g = torch.Generator().manual_seed(0)
    s, h, h_kv, d_v, d_model, v = 4, 6, 3, 5, 16, 200
    embedding = torch.randn(v, d_model, generator=g)
    values, outputs = torch.randn(s, h_kv, 24, d_v, generator=g), torch.randn(h, d_v, d_model, generator=g)
    seen = []

    def model(ids):
        seen.append(ids)
        q = torch.randn(s, h, 24, 8, generator=g)
        _, amap = hw.attend(q, q, q, mask=hw.Causal(), return_map=True)
        return embedding[ids] @ embedding.T, [amap], [values]

    probe = probe_induction(
        model, v, length=12, copies=2, sequences=s, unembedding=embedding, outputs=[outputs], seed=3
    )  # fmt: skip
    ids = seen[0]
    for head in range(h):
        logits = values[:, head // 2, :12] @ outputs[head] @ embedding.T  # [s, 12, V]
        own = logits.gather(-1, ids[:, :12, None])
        share = (logits < own).double().sum(-1) / (v - 1)
        assert probe.copying[0, head] == pytest.approx(float(share.mean()), abs=1e-6)
    assert abs(probe.copying.mean() - 0.5) < 0.15


@pytest.mark.thorough
def test_copying_compares_with_a_thousand_tokens_of_a_large_vocabulary():
    model = Copier(1500, 110)
    probe = probe_induction(
        model, 1499, length=30, copies=2, sequences=1, start=1499, unembedding=model.unembedding,
        outputs=model.outputs(),
    )  # fmt: skip
    assert probe.copying[1, 0] == pytest.approx(1.0)


def test_uniform_heads_score_the_baseline_and_the_seed_decides():
    def model(ids):
        q = torch.zeros(*ids.shape, 4)[:, None].expand(-1, 3, -1, -1)
        _, amap = hw.attend(q, q, q, mask=hw.Causal(), return_map=True)
        drawn.append(ids)
        return torch.zeros(*ids.shape, 50), [amap, amap]

    drawn: list[torch.Tensor] = []
    probe = probe_induction(model, torch.arange(10, 50), length=9, copies=3, sequences=2, seed=4)
    for scores in (probe.induction, probe.previous, probe.duplicate):
        assert scores.mass.shape == (2, 3)
        np.testing.assert_allclose(scores.lift, 1, rtol=1e-5)
    assert probe.copying is None
    probe_induction(model, torch.arange(10, 50), length=9, copies=3, sequences=2, seed=4)
    probe_induction(model, torch.arange(10, 50), length=9, copies=3, sequences=2, seed=5)
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0][1], drawn[2][0])  # sequence s is that of seed + s
    assert not torch.equal(drawn[0][0], drawn[2][0])
    assert drawn[0].min() >= 10


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"length": 1}, ConfigError, "length=1"),
        ({"copies": 1}, ConfigError, "copies=1"),
        ({"sequences": 0}, ConfigError, "sequences=0"),
        ({"length": 61}, ConfigError, "60 tokens cannot fill length=61"),
        ({"start": 3}, ConfigError, "start=3"),
        ({"vocabulary": [1, 1, 2]}, ConfigError, "twice"),
        ({"vocabulary": [0.5]}, DTypeError, "vocabulary"),
        ({"unembedding": torch.zeros(61, 3)}, ConfigError, "give both"),
        ({"unembedding": torch.zeros(61), "outputs": [torch.zeros(1, 61, 3)] * 2}, ShapeError, "unembedding"),
        ({"unembedding": torch.zeros(61, 3), "outputs": [torch.zeros(1, 61, 3)]}, ShapeError, "2 layers"),
        ({"unembedding": torch.zeros(61, 3), "outputs": [torch.zeros(1, 61, 4)] * 2}, ShapeError, r"outputs\[0\]"),
        ({"model": lambda ids: (torch.zeros(1, 1), [])}, ShapeError, "logits"),
        ({"model": lambda ids: (torch.zeros(*ids.shape, 2), [])}, ConfigError, "no maps"),
        ({"model": lambda ids: (torch.zeros(*ids.shape, 2), [None])}, DTypeError, r"maps\[0\] is a NoneType"),
    ],
)
def test_what_cannot_be_probed_is_named(options, error, message):
    options = {"model": Copier(START + 1, 110), "vocabulary": START, "start": START, **options}
    with pytest.raises(error, match=message):
        probe_induction(options.pop("model"), options.pop("vocabulary"), **options)


def test_copying_needs_values():
    model = Copier(START + 1, 110)
    with pytest.raises(ConfigError, match="values"):
        probe_induction(
            lambda ids: model(ids)[:2], START, unembedding=model.unembedding, outputs=model.outputs(), start=START
        )  # fmt: skip
