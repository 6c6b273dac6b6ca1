"""CoNLL-U is read or refused by line; heads that follow arcs are told from a fixed offset; mentions likewise."""

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.head_roles.relations import Placed, parse_conllu
from headwise.analysis.head_roles.result import choices
from headwise.analysis.head_roles.score import Choice
from headwise.errors import ConfigError, ShapeError, TextError

SENTENCE = """# sent_id = 1
# text = Don't feed the café's cats!
1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\t_
1\tDo\tdo\tAUX\t_\t_\t3\taux\t_\t_
2\tn't\tnot\tPART\t_\t_\t3\tadvmod\t_\t_
3\tfeed\tfeed\tVERB\t_\t_\t0\troot\t_\t_
4\tthe\tthe\tDET\t_\t_\t5\tdet\t_\t_
5\tcafé\tcafé\tNOUN\t_\t_\t7\tnmod:poss\t_\t_
6\t's\t's\tPART\t_\t_\t5\tcase\t_\t_
6.1\tlost\tlose\tVERB\t_\t_\t_\t_\t7:acl\t_
7\tcats\tcat\tNOUN\t_\t_\t3\tobj\t_\tSpaceAfter=No
8\t!\t!\tPUNCT\t_\t_\t3\tpunct\t_\t_
"""


def columns(number, head, form="w", relation="dep"):
    return "\t".join([str(number), form, "_", "_", "_", "_", str(head), relation, "_", "_"])


def test_a_sentence_is_read(tmp_path):
    path = tmp_path / "a.conllu"
    path.write_text(SENTENCE + "\n\n" + columns(1, 0, "Yes", "root"), encoding="utf-8")  # and no line end at the end
    one, two = hw.analysis.read_conllu(path)
    assert one.words == ("Do", "n't", "feed", "the", "café", "'s", "cats", "!")
    assert one.heads == (2, 2, -1, 4, 6, 4, 2, 2)
    assert one.relations[4] == "nmod:poss"
    assert (one.line, two.line) == (4, 15)
    assert two.words == ("Yes",)


def test_windows_lines_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "a.conllu"
    path.write_bytes(b"\xef\xbb\xbf" + SENTENCE.replace("\n", "\r\n").encode())
    assert hw.analysis.read_conllu(path)[0].words[-1] == "!"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([columns(1, 0), columns(2, 1).replace("\t", " ")], "line 2: 1 columns.*tabs"),
        (["1\tw\t_"], "line 1: 3 columns, expected 10"),
        (["# c", columns("x", 0)], "line 2: ID 'x'"),
        ([columns(1, 0), columns(3, 1)], "line 2: ID 3, expected 2"),
        ([columns(1, 0), columns(2, 9)], "line 2: HEAD '9'.*to 2"),
        ([columns(1, "_")], "line 1: HEAD '_'"),
        ([columns(1, 0, form="")], "line 1: FORM ''"),
        ([columns(1, 0, relation="_")], "line 1: DEPREL '_'"),
        ([columns(1, 0), columns(2, 0)], "line 1: 2 words have HEAD 0"),
        (["", columns(1, 1)], "line 2: 0 words have HEAD 0"),
        ([columns(1, 0), columns(2, 3), columns(3, 2)], "line 2: following HEAD"),
    ],
)
def test_what_is_not_conllu_is_told_with_its_line(lines, message):
    with pytest.raises(TextError, match=message):
        parse_conllu(lines, "file")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(TextError, match=r"no\.conllu.*No such file"):
        hw.analysis.read_conllu(tmp_path / "no.conllu")
    (tmp_path / "latin").write_bytes("1\tcaf\xe9".encode("latin-1"))
    with pytest.raises(TextError, match="not UTF-8 at byte 5"):
        hw.analysis.read_conllu(tmp_path / "latin")


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (
            ["[CLS]", "do", "n", "'", "t", "feed", "the", "cafe", "'", "s", "cats", "!", "[SEP]"],
            ((1, 2), (2, 5), (5, 6), (6, 7), (7, 8), (8, 10), (10, 11), (11, 12)),
        ),
        (
            ["<s>", " Do", "n't", " fe", "ed", " the", " ca", "fé", "'s", " cat", "s", "!"],
            ((1, 2), (2, 3), (3, 5), (5, 6), (6, 8), (8, 9), (9, 11), (11, 12)),
        ),
        (
            ["Do", "n", "'t", " feed", " ", "the", "[UNK]", "'s", "cat", "s", "\n", "!"],
            ((0, 1), (1, 3), (3, 4), (5, 6), (6, 7), (7, 8), (8, 10), (11, 12)),
        ),
    ],
)
def test_words_are_found_in_the_pieces_of_tokenizers(pieces, words):
    sentence = parse_conllu(SENTENCE.split("\n"))[0]
    placed = hw.analysis.place_words(sentence, pieces, batch=3)
    assert placed.words == words
    assert placed.batch == 3
    assert (4, 6, "nmod:poss") in placed.arcs
    assert len(placed.arcs) == 7  # all words but the root
    shifted = hw.analysis.place_words(sentence, ["Hi", *pieces], start=1)
    assert shifted.words == tuple((a + 1, b + 1) for a, b in words)


@pytest.mark.parametrize("pieces", [["Do", "n't", "see"], ["Do", "n't"], ["Do", "n't", "fe"], []])
def test_words_that_are_not_there_are_named(pieces):
    sentence = parse_conllu(SENTENCE.split("\n"))[0]
    with pytest.raises(TextError, match="word"):
        hw.analysis.place_words(sentence, pieces)


def corpus(count: int, seed: int = 0) -> tuple[list[Placed], int]:
    """Random trees over words of one to three tokens, each in its own batch entry, and the tokens of the longest."""
    g = np.random.default_rng(seed)
    placed, longest = [], 0
    for batch in range(count):
        words, at = [], 1  # a marker stands first
        for _ in range(int(g.integers(4, 12))):
            size = int(g.integers(1, 4))
            words.append((at, at + size))
            at += size
        order = g.permutation(len(words))
        arcs = tuple(
            (int(order[i]), int(order[g.integers(0, i)]), ("obj", "det")[int(g.integers(0, 2))])
            for i in range(1, len(words))
        )
        placed.append(Placed(tuple(words), arcs, batch))
        longest = max(longest, at)
    return placed, longest


def follow(placed: list[Placed], m: int, relation: str, up: bool) -> torch.Tensor:
    """Queries of a head that looks along the arcs of one relation (for keys that are one-hot positions)."""
    q = torch.zeros(len(placed), 1, m, m)
    for sentence in placed:
        for dependent, head, name in sentence.arcs:
            if name == relation:
                source, target = (dependent, head) if up else (head, dependent)
                for i in range(*sentence.words[source]):
                    q[sentence.batch, 0, i, slice(*sentence.words[target])] = 40.0
    return q


@pytest.mark.thorough
def test_heads_that_follow_arcs_are_found_and_beside_them_none():
    placed, m = corpus(60)
    random = torch.randn(60, 2, m, m, generator=torch.Generator().manual_seed(1))
    q = torch.cat((follow(placed, m, "obj", True), follow(placed, m, "det", False), random), 1)
    k = torch.eye(m).expand(60, 4, m, m)
    _, amap = hw.attend(q, k, k[..., :1], scale=1.0, return_map=True)
    found = hw.analysis.roles([amap, amap], arcs=placed)
    up, down = found.syntax["obj, dependent → head"], found.syntax["det, head → dependent"]
    assert set(found.syntax) == {f"{r}, {w}" for r in ("obj", "det") for w in ("dependent → head", "head → dependent")}
    assert up.accuracy[1, 0] == pytest.approx(1.0)
    assert up.coverage == 1.0
    assert up.count == sum(name == "obj" for s in placed for *_, name in s.arcs)
    assert up.accuracy[0, 1] < 0.6
    # A word may have several dependents; one of them is looked at most.
    assert 0.5 < down.accuracy[0, 1] <= 1.0
    offsets = [head - dependent for s in placed for dependent, head, name in s.arcs if name == "obj"]
    best = max(set(offsets), key=offsets.count)
    assert up.baseline == pytest.approx(offsets.count(best) / len(offsets))
    assert up.rule in {f"offset {o:+d}".replace("-", "−") for o in offsets if offsets.count(o) == offsets.count(best)}
    assert "obj, dependent → head" in [label.text for label in found.labels(1, 0)]
    for head in (2, 3):
        assert not [label for label in found.labels(0, head) if label.role == "syntax"]
    assert "obj, dependent → head: L0H0 and L1H0 tie, right in 100% of " in repr(found)
    double = found.merge(found)
    assert double.syntax["obj, dependent → head"].count == 2 * up.count
    assert double.syntax["obj, dependent → head"].baseline == pytest.approx(up.baseline)


@pytest.mark.parametrize("causal", [False, True])
def test_accuracies_are_those_of_the_dense_words(causal):
    placed, m = corpus(7, seed=5)
    n = m - 6
    q, k = torch.randn(7, 4, n, 8), torch.randn(7, 2, m, 8)
    _, amap = hw.attend(q, k, k, mask=hw.Causal() if causal else None, return_map=True)
    weights = amap.to_dense().double()
    found = hw.analysis.roles(amap, arcs=placed)
    right, cases = dict.fromkeys(found.syntax, 0), dict.fromkeys(found.syntax, 0)
    for s in placed:
        for dependent, head, name in s.arcs:
            for way, a, b in (("dependent → head", dependent, head), ("head → dependent", head, dependent)):
                rows = [i - (m - n) for i in range(*s.words[a])]
                if min(rows) < 0 or (causal and s.words[b][0] > s.words[a][1] - 1):
                    continue
                from_a = weights[s.batch][:, rows].mean(1)
                to = torch.stack([from_a[:, slice(*word)].sum(-1) for word in s.words], -1)
                to[:, a] = -1
                cases[f"{name}, {way}"] += 1
                right[f"{name}, {way}"] += (to.argmax(-1) == b).numpy()
    for key, choice in found.syntax.items():
        assert choice.count == cases[key] > 0
        np.testing.assert_allclose(choice.accuracy[0], right[key] / cases[key])


def test_coreference_beside_the_nearest_mention():
    m, g = 120, np.random.default_rng(0)
    mentions, heads = [], ["w"] * m
    for batch in range(3):
        tokens = sorted(g.choice(np.arange(2, m), 30, replace=False).tolist())
        mentions += [hw.analysis.Mention(token, int(g.integers(0, 4)), batch) for token in tokens]
    q = torch.zeros(3, 2, m, m)
    for x in mentions:
        earlier = [y for y in mentions if y.batch == x.batch and y.token < x.token]
        same = [y for y in earlier if y.entity == x.entity]
        if same:
            q[x.batch, 0, x.token, same[0].token] = 40.0  # the oldest of its entity
        if earlier:
            q[x.batch, 1, x.token, earlier[-1].token] = 40.0  # the nearest of any
    k = torch.eye(m).expand(3, 2, m, m)
    _, amap = hw.attend(q, k, k[..., :1], scale=1.0, mask=hw.Causal(), return_map=True)
    found = hw.analysis.roles(amap, mentions=mentions)
    choice = found.coreference
    assert choice is not None
    assert choice.accuracy[0, 0] == pytest.approx(1.0)
    assert choice.rule == "nearest mention"
    assert choice.accuracy[0, 1] == pytest.approx(choice.baseline)
    assert 0.1 < choice.baseline < 0.5
    assert found.labels(0, 0)[0].role == "coreference"
    assert "coreference" not in [x.role for x in found.labels(0, 1)]
    assert "coreference: L0H0 is right in 100%" in repr(found)
    assert found.merge(found).coreference.count == 2 * choice.count
    # With equal words for equal entities, the rule of equal heads is right always, and no head is better than that.
    words = [list(heads) for _ in range(3)]
    for x in mentions:
        words[x.batch][x.token] = f"name{x.entity}"
    told = hw.analysis.roles(amap, mentions=mentions, pieces=words)
    assert told.coreference.baseline == 1.0
    assert "same head" in told.coreference.rule
    assert "coreference" not in [x.role for x in told.labels(0, 0)]


def test_mentions_without_a_query_or_out_of_sight_do_not_count():
    q, k = torch.randn(1, 2, 10, 4), torch.randn(1, 2, 30, 4)
    _, amap = hw.attend(q, k, k, mask=hw.Causal() & hw.Window(6), return_map=True)
    mentions = [hw.analysis.Mention(t, e) for t, e in ((3, "a"), (8, "a"), (21, "a"), (24, "b"), (25, "a"), (29, "b"))]
    choice = hw.analysis.roles(amap, mentions=mentions).coreference
    assert choice.total == 4  # of the mentions at 8, 21, 25 and 29
    assert choice.count == 2  # 25 sees 21, 29 sees 24
    assert not choice.better.any()  # too few cases to say


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"arcs": [Placed(((0, 2),), (), 5)]}, ShapeError, "batch entry 5"),
        ({"arcs": [Placed(((0, 99),), ())]}, ShapeError, r"\(0, 99\)"),
        ({"arcs": [Placed(((0, 1), (1, 2)), ((0, 2, "obj"),))]}, ShapeError, r"\(0, 2, 'obj'\)"),
        ({"mentions": [hw.analysis.Mention(70, "a")]}, ShapeError, "mentions"),
        ({"mentions": [hw.analysis.Mention(7, "a"), hw.analysis.Mention(7, "b")]}, ConfigError, "same head token"),
    ],
)
def test_what_does_not_fit_is_named(options, error, message):
    q = torch.randn(1, 2, 20, 4)
    _, amap = hw.attend(q, q, q, return_map=True)
    with pytest.raises(error, match=message):
        hw.analysis.roles(amap, **options)


def test_ties_are_told_and_of_few_cases_no_head_is_named():
    def choice(right, cases):
        return Choice(np.array(right, dtype=float)[:, None], np.array([cases]), cases, {"offset −1": cases // 2})

    one, two = choice([[1, 9], [12, 3]], 12), choice([[12, 9], [12, 3]], 12)
    all_of_them, few = choice([[12, 12], [12, 12]], 12), choice([[1, 1], [1, 1]], 1)
    lines = choices({"a": one, "b": two, "c": all_of_them, "d": few, "e": choice([[9, 0], [0, 0]], 9)})
    assert lines == [
        "a: L1H0 is right in 100% of 12 cases on this input; offset −1 in 50%",
        "b: L0H0 and L1H0 tie, right in 100% of 12 cases on this input; offset −1 in 50%",
        "c: 4 heads tie, right in 100% of 12 cases on this input; offset −1 in 50%",
        "Fewer than 10 cases, too few to name a head: e (9); d (1)",
    ]
    assert choices({f"r{i}": few for i in range(9)})[0].endswith("r5 (1); and 3 more")
    assert choices({"none": choice([[0, 0], [0, 0]], 0)}) == []
