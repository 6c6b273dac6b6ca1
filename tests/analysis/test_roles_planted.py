"""Heads that were built to play a role are found to play it, and random ones are not."""

import pytest
import torch
from planted import PATTERNS, embeddings, planted

import headwise as hw
from headwise.analysis.head_roles.score import DEFINITIONS


def tokens(b: int, m: int, seed: int) -> torch.Tensor:
    """Random tokens, said twice, so that there are repeats to look at."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(0, 4 * m, (b, -(-m // 2)), generator=generator)
    return half.repeat(1, 2)[:, :m]


def found(roles: list[str], ids: torch.Tensor, n: int, mask: hw.masks.Mask | None, **options: int) -> hw.analysis.Roles:
    q, k = planted(roles, ids, n, **options)
    _, amap = hw.attend(q, k, k[..., :2], mask=mask, scale=1.0, return_map=True)
    return hw.analysis.roles(amap, tokens=ids, embeddings=embeddings(4 * ids.shape[1]))


@pytest.mark.thorough_except("True-1-64-64-0", "True-3-97-97-1", "False-2-31-131-0")
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("b", "n", "m"), [(1, 64, 64), (3, 97, 97), (2, 31, 131), (1, 500, 500)])
@pytest.mark.parametrize("causal", [True, False])
def test_planted_heads_get_their_label_and_no_other(b: int, n: int, m: int, causal: bool, seed: int) -> None:
    roles = [role for role in PATTERNS if role != ("next" if causal else "induction")]
    ids = tokens(b, m, seed)
    result = found(roles, ids, n, hw.Causal() if causal else None)
    for head, role in enumerate(roles):
        labels = result.labels(0, head)
        assert labels, (role, result)
        assert labels[0].role == role, (role, labels)
        # Of tokens with no other of the same meaning before them, one is a little more similar than the others.
        assert result[role].mass[0, head] > (0.75 if role == "semantic" else 0.9)
        assert labels[0].confidence >= 0.95
        # Where nothing matches, the last three look at the first key, and that is told too.
        also = {"first"} if role in ("duplicate", "induction", "semantic") else set()
        assert {label.role for label in labels[1:]} <= also, (role, labels)
    offset = result["offset"].offset
    assert offset is not None
    assert offset[0, roles.index("offset")] == -3


@pytest.mark.thorough
def test_planted_heads_share_keys_in_groups_and_in_padding() -> None:
    roles = ["previous", "self", "first", "offset", "duplicate", "induction"]
    ids = tokens(2, 80, 5)
    for mask in (hw.Causal() & hw.Lengths([80, 71], [80, 71]), hw.Lengths([80, 71], [80, 71])):
        for kv in (1, 2, 3):
            result = found(roles, ids, 80, mask, kv_heads=kv)
            last = "induction" if "induction" in result else "first"  # where nothing matches
            assert [result.labels(0, head)[0].role for head in range(6)] == [*roles[:5], last]
    assert last == "first"
    assert result.rows == 151


def test_padding_before_the_text_moves_the_first_key() -> None:
    b, m, lengths = 2, 60, [60, 47]
    q = torch.zeros(b, 1, m, m)
    for i, length in enumerate(lengths):
        q[i, 0, :, m - length] = 40.0
    k = torch.eye(m).expand(b, 1, m, m)
    mask = hw.Causal() & hw.Lengths(lengths, lengths, side="right")
    _, amap = hw.attend(q, k, k[..., :2], mask=mask, scale=1.0, return_map=True)
    result = hw.analysis.roles(amap)
    assert result["first"].mass[0, 0] == pytest.approx(1.0)
    assert [label.role for label in result.labels(0, 0)] == ["first"]


@pytest.mark.thorough
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n", [33, 128, 257])
def test_random_heads_play_none_of_these_roles(n: int, causal: bool) -> None:
    for seed, temperature in enumerate((0.1, 0.5, 1.0, 2.0, 4.0, 20.0)):
        generator = torch.Generator().manual_seed(100 * n + seed)
        q, k = torch.randn(2, 1, 40, n, 16, generator=generator)
        mask = hw.Causal() if causal else None
        _, amap = hw.attend(q, k, k[..., :1], mask=mask, scale=temperature, return_map=True)
        pieces = [",", *["a"] * (n - 2), " "]
        ids, counts, table = tokens(1, n, seed)[0], torch.ones(4 * n), embeddings(4 * n)
        result = hw.analysis.roles(amap, tokens=ids, pieces=pieces, frequencies=counts, embeddings=table)
        for head in range(40):
            labels = [label for label in result.labels(0, head) if label.role not in ("broad", "even")]
            assert not labels, (temperature, head, labels)


def test_a_uniform_head_is_even_and_broad_only_where_there_are_many_keys() -> None:
    for n, words in ((40, ["even"]), (400, ["broad"])):
        q = torch.zeros(1, 2, n, 4)
        _, amap = hw.attend(q, q, q, return_map=True)
        result = hw.analysis.roles(amap, tokens=torch.arange(n) % 7)
        assert [label.text for label in result.labels(0, 1)] == words
        for name, score in result.items():
            if name not in ("offset", "broad"):
                assert score.mass == pytest.approx(score.uniform, rel=1e-5), name
                assert score.lift == pytest.approx(1.0, rel=1e-5)
        # All keys are the largest: no row is said to look at one offset.
        assert result["offset"].mass == pytest.approx(0.0)


def test_separators_punctuation_and_rare_tokens() -> None:
    words = [["[CLS]", "the", "cat", ",", "sat", "ing", "."], [" ", " on", "the", " ;", "mat", "\n", "!"]]
    pieces = [row * 11 for row in words]
    ids = torch.tensor([list(range(7)) * 11, list(range(7, 14)) * 11])
    counts = dict.fromkeys(range(14), 100) | {4: 1, 11: 2}
    wanted = {"separator": ({0}, {0, 5}), "punctuation": ({3, 6}, {3, 6}), "rare": ({4}, {4})}
    m = 77
    q = torch.zeros(2, 3, m, m)
    for head, columns in enumerate(wanted.values()):
        for row, members in enumerate(columns):
            for j in range(m):
                q[row, head, :, j] = 40.0 * (j % 7 in members)
    k = torch.eye(m).expand(2, 3, m, m)
    _, amap = hw.attend(q, k, k[..., :1], scale=1.0, return_map=True)
    result = hw.analysis.roles(amap, pieces=pieces, tokens=ids, frequencies=counts)
    for head, name in enumerate(wanted):
        assert result[name].mass[0, head] == pytest.approx(1.0)
        assert name in [label.role for label in result.labels(0, head)]
        assert result[name].mass[0, (head + 1) % 3] == pytest.approx(0.0, abs=1e-6)


def test_every_definition_has_a_head_planted_for_it() -> None:
    """Or is tested by name above."""
    named = {"broad", "even", "separator", "punctuation", "rare"}
    assert set(DEFINITIONS) == set(PATTERNS) | named


def test_padding_is_never_a_rare_token():
    q = torch.zeros(2, 1, 9, 4)
    mask = hw.Lengths([9, 6], [9, 6])
    _, amap = hw.attend(q, q, q, mask=mask, return_map=True)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 0, 0, 0]])
    counts = torch.tensor([0, 9, 9, 9, 2, 9, 9, 9, 9, 9])
    found = hw.analysis.roles(amap, tokens=ids, frequencies=counts)["rare"]
    assert found.coverage[0, 0] == 1.0
    assert found.mass[0, 0] == pytest.approx((9 / 9 + 6 / 6) / 15)
