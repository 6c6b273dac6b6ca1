"""Every measure is its formula, however the matrix is cut into tiles and the data into batches."""

from collections.abc import Callable, Iterator

import pytest
import torch
from samples import MASKS, dense_truth, qkv
from torch import Tensor

from headwise.errors import ConfigError, ShapeError
from headwise.kernels import KERNELS
from headwise.map.attention import attend
from headwise.masks import Causal, Mask, Window
from headwise.rule.tiles import Tile
from headwise.scores import ALiBi, SinkLogits
from headwise.stats import (
    GIVEN,
    MEASURES,
    ClassMass,
    DuplicateMass,
    InductionMass,
    LocalMass,
    Measure,
    PunctuationMass,
    RowMeasure,
    SeparatorMass,
    SinkMass,
    SpecialMass,
    Tokens,
    TopKMass,
    measure,
    resolve,
    row_measure,
    statistics_for,
)

Dense = tuple[Tensor, Tensor, Tensor]  # weights, allowed, scores: [b, h, n, m] float64
IDS = torch.randint(7, (2, 1400), generator=torch.Generator().manual_seed(2))


def mean(rows: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, rows, 0.0).sum(-1) / counted.sum(-1).clamp_min(1)


def lit(dense: Dense) -> Tensor:
    return dense[1].any(-1)


def distance(dense: Dense) -> Tensor:
    n, m = dense[0].shape[2:]
    return (torch.arange(n)[:, None] + m - n - torch.arange(m)).abs().double()


def diagonal(offset: int) -> Callable[[Dense], Tensor]:
    def formula(dense: Dense) -> Tensor:
        n, m = dense[0].shape[2:]
        on = torch.arange(m) == torch.arange(n)[:, None] + m - n + offset
        return mean((dense[0] * on).sum(-1), (dense[1] & on).any(-1))

    return formula


def entropy(dense: Dense) -> Tensor:
    return torch.special.entr(dense[0]).sum(-1)


def variance(dense: Dense) -> Tensor:
    d = distance(dense)
    centre = (dense[0] * d).sum(-1, keepdim=True)
    return mean((dense[0] * (d - centre) ** 2).sum(-1), lit(dense))


def received(dense: Dense) -> Tensor:
    return (dense[0].sum(2) / dense[1].sum(2).clamp_min(1)).amax(-1)


def matches(shift: int) -> Callable[[Dense], Tensor]:
    def formula(dense: Dense) -> Tensor:
        size, _, n, m = dense[0].shape
        on = torch.zeros(size, 1, n, m, dtype=torch.bool)
        for b in range(size):
            for i in range(n):
                for j in range(shift, m):
                    on[b, 0, i, j] = j - shift < i + m - n and bool(IDS[b, j - shift] == IDS[b, i + m - n])
        return mean((dense[0] * on).sum(-1), (dense[1] & on).any(-1))

    return formula


def ids_of(x: Dense) -> Tensor:
    return IDS[: len(x[0]), None, None, : x[0].shape[-1]]


def first_token(dense: Dense) -> Tensor:
    """Mean weight on keys that no query has in sight together with an earlier one: of masks in which a query that
    sees a key of a sequence sees its first one too."""
    allowed = dense[1].expand(dense[0].shape).any(1)
    total = torch.zeros(dense[0].shape[:3], dtype=torch.float64)
    for b, rows in enumerate(allowed.tolist()):
        firsts = {row.index(True) for row in rows if any(row)}
        within = {j for j in firsts if not any(row[j] and any(row[:j]) for row in rows)}
        total[b] = dense[0][b][..., sorted(within)].sum(-1)
    return mean(total, lit(dense))


# Masks that hide the first key from later queries by its position: the sequences start there all the same.
BY_POSITION = ("window", "causal window", "forbidden")

FORMULAS: dict[str, Callable[[Dense], Tensor]] = {
    "max_logit": lambda x: x[2].masked_fill(~x[1], -torch.inf).flatten(2).amax(-1).nan_to_num(neginf=0.0),
    "logsumexp": lambda x: mean(x[2].masked_fill(~x[1], -torch.inf).logsumexp(-1), lit(x)),
    "entropy": lambda x: mean(entropy(x), lit(x)),
    "normalized_entropy": lambda x: mean(entropy(x) / x[1].sum(-1).clamp_min(2).log(), x[1].sum(-1) >= 2),
    "effective_keys": lambda x: mean(1 / x[0].square().sum(-1), lit(x)),
    "top1_mass": lambda x: mean(x[0].amax(-1), lit(x)),
    "topk_mass": lambda x: mean(x[0].topk(8).values.sum(-1), lit(x)),
    "learned_sink_mass": lambda x: mean(1 - x[0].sum(-1), lit(x)),
    "mean_distance": lambda x: mean((x[0] * distance(x)).sum(-1), lit(x)),
    "distance_variance": variance,
    "local_mass": lambda x: mean((x[0] * (distance(x) <= 8)).sum(-1), lit(x)),
    "sink_mass": first_token,
    "previous_mass": diagonal(-1),
    "self_mass": diagonal(0),
    "next_mass": diagonal(1),
    "received_mass": received,
    "squared_weights": lambda x: mean(x[0].square().sum(-1), lit(x)),
    "punctuation_mass": lambda x: mean((x[0] * marked(x, ",")).sum(-1), lit(x)),
    "separator_mass": lambda x: mean((x[0] * marked(x, " ")).sum(-1), lit(x)),
    "special_mass": lambda x: mean((x[0] * (ids_of(x) == 2)).sum(-1), lit(x)),
    "class_mass": lambda x: mean((x[0] * (ids_of(x) == 3)).sum(-1), lit(x)),
    "duplicate_mass": matches(0),
    "induction_mass": matches(1),
}


# Measures of the weights among the keys alone, whose rows sum to 1 beside a learned sink too.
AMONG_KEYS = {"effective_keys", "distance_variance"}


def pieces(m: int, b: int = 2) -> list[list[str]]:
    """Text for the tokens: commas are special where the token is 2."""
    return [[(",", " ", ",", "a")[i % 4] for i in row] for row in IDS[:b, :m].tolist()]


def marked(x: Dense, piece: str) -> Tensor:
    """The keys with that text, [2, 1, 1, m]; no special one is punctuation."""
    size, _, _, m = x[0].shape
    found = torch.tensor([[one == piece for one in row] for row in pieces(m, size)])[:, None, None]
    return found & (ids_of(x) != 2) if piece == "," else found


def ready(name: str, m: int, b: int = 2) -> str | Measure:
    ids = IDS[:b, :m]
    made = {
        "class_mass": lambda: ClassMass(ids == 3),
        "punctuation_mass": lambda: PunctuationMass.of(Tokens(pieces=pieces(m, b), special=ids == 2)),
        "separator_mass": lambda: SeparatorMass.of(Tokens(pieces=pieces(m, b))),
        "special_mass": lambda: SpecialMass.of(Tokens(special=ids == 2)),
        "duplicate_mass": lambda: DuplicateMass(ids),
        "induction_mass": lambda: InductionMass(ids),
    }
    found = made[name]() if name in made else name
    assert found is not None
    return found


def test_every_measure_has_a_formula_here_and_says_what_it_is() -> None:
    assert set(FORMULAS) == set(MEASURES) | set(GIVEN)
    for kind in [*MEASURES.values(), *GIVEN.values()]:
        assert kind.__doc__
        assert all(isinstance(getattr(kind, field), str) for field in ("name", "unit", "range", "source"))


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("mask", MASKS)
def test_measures_are_their_formulas(name: str, mask: str) -> None:
    q, k, v = qkv()
    which = MASKS[mask](2, 37, 53)
    _, amap = attend(q, k, v, mask=which, return_map=True)
    dense = dense_truth(q, k, which)
    by_position = name == "sink_mass" and mask in BY_POSITION
    expected = mean(dense[0][..., 0], lit(dense)) if by_position else FORMULAS[name](dense)
    got = amap.measure(ready(name, 53))[name]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("kernel", ["auto", "torch_blocks"])  # torch_blocks gives tiles, and no statistics
@pytest.mark.parametrize("name", FORMULAS)
def test_measures_beside_a_learned_sink_are_their_formulas(name: str, kernel: str) -> None:
    """Weights include the sink, so rows sum to less than 1, except in measures of the weights among the keys."""
    q, k, v = qkv()
    mask, sinks = MASKS["causal"](2, 37, 53), torch.linspace(-2.0, 3.0, 6)
    _, amap = attend(q, k, v, mask=mask, score=SinkLogits(sinks), return_map=True, kernel=kernel)
    weights, allowed, scores = dense_truth(q, k, mask)
    sink = sinks.double().view(1, 6, 1, 1).expand(*scores.shape[:3], 1)
    beside = torch.cat((scores.masked_fill(~allowed, -torch.inf), sink), -1)
    if name == "logsumexp":  # the sink's logit is one more term
        allowed, scores = torch.cat((allowed, torch.ones_like(sink, dtype=torch.bool)), -1), beside
    elif name not in AMONG_KEYS:
        weights = beside.softmax(-1)[..., :-1]
    expected = FORMULAS[name]((weights, allowed, scores))
    torch.testing.assert_close(amap.measure(ready(name, 53))[name].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("kernel", ["auto", "torch_blocks"])  # torch_blocks gives tiles, and no statistics
@pytest.mark.parametrize("mask", ["everything", "causal", "window and sinks"])
def test_measures_over_many_tiles(mask: str, kernel: str) -> None:
    names = [name for name in FORMULAS if name not in ("duplicate_mass", "induction_mass")]
    n, m = 800, 900
    q, k, v = qkv(2, 2, 1, n, m, 4, 2)
    which = MASKS[mask](2, n, m)
    measures = [ready(name, m) for name in names]
    _, amap = attend(q, k, v, mask=which, return_map=True, measures=measures, kernel=kernel)
    dense = dense_truth(q, k, which)
    assert amap.measured is not None
    for name in names:
        torch.testing.assert_close(amap.measured[name].double(), FORMULAS[name](dense), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("name", FORMULAS)
def test_merging_equals_measuring_together(name: str) -> None:
    parts = [ready(name, 53)] * 3
    maps = []
    for seed in range(3):
        q, k, v = qkv(b=2, seed=seed)
        maps.append(attend(q * (seed + 1), k, v, mask=MASKS["nothing for some"](2, 37, 53), return_map=True)[1])
    results = [amap.measure(part) for amap, part in zip(maps, parts, strict=True)]
    left = results[0].merge(results[1]).merge(results[2])[name]
    right = results[2].merge(results[0].merge(results[1]))[name]
    assert left.shape == (1, 6)
    torch.testing.assert_close(left, right, rtol=1e-6, atol=0)
    # All six batch entries in one dense matrix, their rows in one line.
    dense = [dense_truth(amap.q, amap.k, amap.mask) for amap in maps]
    if name == "received_mass":
        expected = torch.cat([received(d) for d in dense]).amax(0)
    elif name == "max_logit":
        expected = torch.cat([FORMULAS[name](d) for d in dense]).amax(0)
    else:
        rows = torch.cat([amap.measure(part, rows=True).rows[name] for amap, part in zip(maps, parts, strict=True)])
        counts = _counted(name, dense)
        expected = (rows.double() * counts).sum((0, 2)) / counts.sum((0, 2))
    torch.testing.assert_close(left[0].double(), expected.double(), rtol=1e-5, atol=1e-6)


def _counted(name: str, dense: list[Dense]) -> Tensor:
    weights, allowed = (torch.cat([d[i] for d in dense]) for i in (0, 1))
    if name == "normalized_entropy":
        return (allowed.sum(-1) >= 2).double()
    offsets = {"previous_mass": -1, "self_mass": 0, "next_mass": 1}
    n, m = weights.shape[2:]
    if name in offsets:
        on = torch.arange(m) == torch.arange(n)[:, None] + m - n + offsets[name]
        return (allowed & on).any(-1).double()
    if name in ("duplicate_mass", "induction_mass"):
        shift = int(name == "induction_mass")
        at, j = torch.arange(n) + m - n, torch.arange(m)
        ids = IDS[:, :m].repeat(len(dense), 1)
        same = ids[:, at][:, :, None] == ids[:, (j - shift).clamp_min(0)][:, None, :]
        on = same & (j - shift >= 0) & (j - shift < at[:, None])
        return (allowed & on[:, None]).any(-1).double()
    return allowed.any(-1).double()


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("broken", [False, True])
def test_together_is_one_after_the_other(mask: str, broken: bool) -> None:
    """Measures of rows are taken at once where a kernel told all of them: the same bits as each by itself."""
    q, k, v = qkv()
    if broken:
        q[0, 1, 4, 0] = torch.nan
    names = [name for name in FORMULAS if name != "topk_mass"]
    _, amap = attend(q, k, v, mask=MASKS[mask](2, 37, 53), return_map=True)
    wanted = resolve([ready(name, 53) for name in names])
    found = amap._read("statistics", statistics_for(wanted, amap.rule))
    result = measure(lambda: amap._read("tiles", None), amap.lse, amap.rule, wanted, found=found)
    for one in wanted:
        state = one.start(amap.rule.grid, amap.lse)
        needed = one.needs(amap.rule)
        if needed is None or not found.keys() >= set(needed):
            continue
        one.take(state, found, amap.lse, amap.rule)
        torch.testing.assert_close(result[one.name], one.finish(state), rtol=0.0, atol=0.0, equal_nan=True)
        if isinstance(one, RowMeasure):
            together = result.states[one.name]
            torch.testing.assert_close(together.total, state.total, rtol=0.0, atol=0.0, equal_nan=True)
            assert torch.equal(together.count, state.count)


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("broken", [False, True])
def test_a_kernels_reduction_is_that_of_tensor_operations(mask: str, broken: bool) -> None:
    reduce = KERNELS["cpu"].reads.reduced
    q, k, v = qkv()
    if broken:
        q[0, 1, 4, 0] = torch.nan
    names = [name for name in FORMULAS if name != "topk_mass"]
    _, amap = attend(q, k, v, mask=MASKS[mask](2, 37, 53), return_map=True)
    wanted = resolve([ready(name, 53) for name in names])
    found = amap._read("statistics", statistics_for(wanted, amap.rule))

    def tiles() -> Iterator[Tile]:
        return amap._read("tiles", None)

    one, other = (measure(tiles, amap.lse, amap.rule, wanted, found=found, reduce=by) for by in (reduce, None))
    assert torch.equal(one.nonfinite, other.nonfinite)
    for known in wanted:
        torch.testing.assert_close(one[known.name], other[known.name], rtol=2e-6, atol=1e-7, equal_nan=True)
        if isinstance(known, RowMeasure):
            ours, theirs = one.states[known.name], other.states[known.name]
            torch.testing.assert_close(ours.total, theirs.total, rtol=2e-6, atol=1e-5, equal_nan=True)
            assert torch.equal(ours.count, theirs.count)
            assert ours.total.dtype == ours.count.dtype == torch.float64


@pytest.mark.thorough
def test_rows_are_each_querys_own_value() -> None:
    q, k, v = qkv(n=700, m=700, h=2, h_kv=2, d=4, e=2)
    _, amap = attend(q, k, v, mask=MASKS["causal"](2, 700, 700), return_map=True)
    result = amap.measure("entropy", "max_logit", rows=True)
    weights, allowed, scores = dense_truth(q, k, amap.mask)
    torch.testing.assert_close(
        result.rows["entropy"].double(), torch.special.entr(weights).sum(-1), rtol=1e-5, atol=1e-6
    )
    top = scores.masked_fill(~allowed, -torch.inf).amax(-1)
    torch.testing.assert_close(result.rows["max_logit"].double(), top, rtol=1e-5, atol=1e-6)


def test_parameters_of_measures() -> None:
    q, k, v = qkv()
    _, amap = attend(q, k, v, return_map=True)
    weights = dense_truth(q, k, amap.mask)[0]
    torch.testing.assert_close(amap.measure(SinkMass(3))["sink_mass"].double(), weights[..., :3].sum(-1).mean(-1))
    torch.testing.assert_close(amap.measure(TopKMass(500))["topk_mass"], torch.ones(2, 6))
    torch.testing.assert_close(amap.measure(LocalMass(500))["local_mass"], torch.ones(2, 6))
    for bad in (lambda: SinkMass(0), lambda: TopKMass(0), lambda: LocalMass(-1)):
        with pytest.raises(ConfigError):
            bad()


def test_classes_from_the_tokens_themselves() -> None:
    tokens = ["武", "，", " ", "\n", "“", "a", "!?", "", " ,", ".\n", " ,a", "\u3000"]
    marks = ClassMass.of_tokens(tokens).members[0].tolist()
    assert [token for token, mark in zip(tokens, marks, strict=True) if mark] == ["，", "“", "!?", " ,", ".\n"]
    separators = ClassMass.of_tokens(tokens, "separator")
    blanks = separators.members[0].tolist()
    assert [token for token, blank in zip(tokens, blanks, strict=True) if blank] == [" ", "\n", "\u3000"]
    assert separators.name == "separator_mass"


def test_a_uniform_head_scores_the_baseline() -> None:
    _, k, v = qkv(d=8)
    _, amap = attend(torch.zeros(2, 6, 37, 8), k, v, mask=MASKS["causal"](2, 37, 53), return_map=True)
    ids = IDS[:, :53]
    for kind in (DuplicateMass, InductionMass):
        both = amap.measure(kind(ids), kind(ids, uniform=True))
        torch.testing.assert_close(both[kind.name], both[f"{kind.name}_uniform"])


@pytest.mark.thorough
@pytest.mark.parametrize("mask", [Window(1), Causal()])
def test_a_small_distance_is_as_exact_as_a_large_one(mask: Mask) -> None:
    q, k, v = qkv(n=391, m=391, d=61)
    score = ALiBi([9.0, 11.0, 13.0, 15.0, 17.0, 19.0])  # next to no weight on any key but the query's own
    _, amap = attend(q, k, v, mask=mask, score=score, scale=0.01, kernel="torch_blocks", return_map=True)
    rows = (amap.to_dense().double() * (torch.arange(391)[:, None] - torch.arange(391)).abs()).sum(-1)
    got = amap.measure("mean_distance")["mean_distance"].double()
    torch.testing.assert_close(got, rows.mean(-1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["duplicate_mass", "induction_mass"])
def test_queries_before_the_first_key_match_no_token(name: str) -> None:
    q, k, v = qkv(n=41, m=17)
    _, amap = attend(q, k, v, return_map=True)
    got = amap.measure(ready(name, 17))[name]
    torch.testing.assert_close(got.double(), FORMULAS[name](dense_truth(q, k, amap.mask)), rtol=1e-5, atol=1e-6)


def test_a_measure_of_ones_own_beside_names() -> None:
    class Variety(RowMeasure):
        name, unit, range, source = "variety", "keys", "≥ 0", "keys with at least 1 % of the weight"

        def partial(self, tile: Tile) -> Tensor:
            return (tile.weights >= 0.01).sum(-1).float()

    even = row_measure("even_keys", lambda tile: (tile.weights * (tile.keys % 2 == 0)).sum(-1))
    q, k, v = qkv()
    _, amap = attend(q, k, v, return_map=True, measures=("entropy", Variety(), even))
    weights = dense_truth(q, k, amap.mask)[0]
    assert amap.measured is not None
    assert list(amap.measured) == ["entropy", "variety", "even_keys"]
    torch.testing.assert_close(amap.measured["variety"].double(), (weights >= 0.01).sum(-1).double().mean(-1))
    torch.testing.assert_close(amap.measured["even_keys"].double(), weights[..., ::2].sum(-1).mean(-1))


def test_what_cannot_be_measured_is_named() -> None:
    q, k, v = qkv()
    _, amap = attend(q, k, v, return_map=True)
    for wanted, words in (
        (("entropi",), "measure='entropi': did you mean 'entropy'"),
        (("entropy", "entropy"), "'entropy' is requested twice"),
        (("class_mass",), "ClassMass"),
        (("induction_mass",), "InductionMass"),
    ):
        with pytest.raises(ConfigError, match=words):
            amap.measure(*wanted)
    with pytest.raises(ShapeError, match=r"\(1, 5\).*53 keys"):
        amap.measure(ClassMass(torch.ones(5).bool()))
    with pytest.raises(ConfigError, match="differ"):
        amap.measure("entropy").merge(amap.measure("max_logit"))


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_what_is_not_finite_is_reported(where: str) -> None:
    q, k, v = qkv()
    {"q": q, "k": k, "v": v}[where][1, 2, 5, 0] = torch.nan
    _, amap = attend(q, k, v, mask=MASKS["causal"](2, 37, 53), return_map=True)
    result = amap.measure("entropy", "max_logit")
    if where == "v":
        assert result.nonfinite_values is not None
        assert result.nonfinite_values.tolist() == [[0, 0, 0], [0, 0, 1]]
        assert "nonfinite_values" in repr(result)
        return
    touched = [2] if where == "q" else [4, 5]
    assert result.nonfinite[1].nonzero().flatten().tolist() == touched
    assert result.nonfinite[0].sum() == 0
    assert all(result[name][1, h].isnan() for name in result for h in touched)
    assert torch.isfinite(result["entropy"][0]).all()
    assert "nonfinite_rows" in repr(result)


def test_results_print_as_tables() -> None:
    q, k, v = qkv(b=1)
    _, amap = attend(q, k, v, return_map=True)
    result = amap.measure("entropy", "sink_mass")
    lines = repr(result).splitlines()
    assert lines[0].split() == ["batch", "head", "entropy", "(nats)", "sink_mass", "(mass)"]
    assert len(lines) == 7
    assert result._repr_html_().count("<tr>") == 7


@pytest.mark.thorough
def test_a_table_of_the_batch_is_what_merging_its_entries_gives() -> None:
    q, k, v = qkv(b=3)
    k[1, 0, 2] = torch.nan
    v[2, 1, 5, 0] = torch.inf
    mask = MASKS["causal"](3, 37, 53)
    names = list(MEASURES)
    result = attend(q, k, v, mask=mask, return_map=True)[1].measure(*names)
    parts = [attend(q[i : i + 1], k[i : i + 1], v[i : i + 1], mask=mask, return_map=True)[1] for i in range(3)]
    merged = parts[0].measure(*names).merge(parts[1].measure(*names)).merge(parts[2].measure(*names))
    table = result.table()
    assert (table.heads, table["entropy"].unit, table["entropy"].range) == ((tuple(range(6)),), "nats", "0 to ln(keys)")
    for name in names:
        torch.testing.assert_close(table[name][0], merged[name][0].double(), rtol=1e-6, atol=1e-7, equal_nan=True)
        assert torch.equal(result.table(entry=-1)[name][0], result[name][2].double())
    assert table["nonfinite_rows"][0].tolist() == result.nonfinite.sum(0).tolist()
    assert table["nonfinite_values"][0].sum() == 2  # both query heads of the KV head
    with pytest.raises(ConfigError, match=r"table\(entry=3\): the batch has 3 entries"):
        result.table(entry=3)


def test_progress_reaches_its_end() -> None:
    q, k, v = qkv(n=900, m=900, h=12, h_kv=1)
    _, amap = attend(q, k, v, return_map=True)
    told: list[tuple[int, int]] = []
    amap.measure("entropy", progress=lambda _, done, of: told.append((done, of)))
    assert told[-1] == (900, 900)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len(told) > 1


@pytest.mark.parametrize("heads", [0, 2, 6])
@pytest.mark.parametrize(("n", "m"), [(0, 53), (37, 0), (5, 7)])
def test_no_queries_no_keys_and_no_heads_can_be_asked(n: int, m: int, heads: int) -> None:
    q, k, v = torch.randn(3, heads, n, 8), torch.randn(3, 2, m, 8), torch.randn(3, 2, m, 5)
    out, amap = attend(q, k, v, return_map=True)
    found = amap.measure(*MEASURES)
    for name in MEASURES:
        assert found[name].shape == (3, heads)
        assert n or (found[name] == 0).all()  # as where no query counts
    assert m or (found["received_mass"] == 0).all()
    assert (amap.T @ out).shape == (3, heads, m, 5)
    assert (amap @ v).shape == (3, heads, n, 5)


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_a_measure_of_no_queries_is_0(reduce: str) -> None:
    kind = type("Own", (LocalMass,), {"reduce": reduce, "needs": lambda self, rule: (), "name": "own"})
    kind.told = lambda self, found, lse, rule: (lse, None)  # type: ignore[attr-defined]
    q, k, v = qkv()
    _, amap = attend(q[:, :, :0], k, v, return_map=True)
    assert (amap.measure(kind())["own"] == 0).all()
    assert amap.measure(kind(), rows=True).rows["own"].shape == (2, 6, 0)


@pytest.mark.parametrize(("b", "h"), [(0, 6), (3, 0), (0, 0)])
def test_progress_of_no_batch_and_no_heads(b: int, h: int) -> None:
    q, k, v = torch.randn(b, h, 37, 8), torch.randn(b, 2, 53, 8), torch.randn(b, 2, 53, 5)
    _, amap = attend(q, k, v, return_map=True)
    told: list[tuple[int, int]] = []

    def progress(what: str, done: int, of: int) -> None:
        told.append((done, of))

    assert all(x.shape == (b, h) for x in amap.measure(*MEASURES, progress=progress).values())
    assert amap.pool(7, progress=progress).shape == (b, h, 5, 7)
    assert amap.pooled(range(3, 9), slice(None), 2, progress=progress).allowed.shape == (b, h, 3, 27)
    assert [x.shape for x in amap.topk(3, progress=progress)] == [(b, h, 37, 3)] * 2
    assert told[0] == told[-1] == (37, 37)
    assert (6, 6) in told


@pytest.mark.parametrize("kernel", ["torch_blocks", "reference"])
def test_a_score_of_minus_infinity_has_no_entropy(kernel: str) -> None:
    q, k, v = torch.ones(1, 1, 3, 2), torch.ones(1, 1, 5, 2), torch.ones(1, 1, 5, 2)
    k[0, 0, 4] = -torch.inf
    amap = attend(q, k, v, kernel=kernel, return_map=True)[1]
    torch.testing.assert_close(amap.measure("entropy")["entropy"], torch.full((1, 1), 4.0).log())


@pytest.mark.parametrize("kernel", ["auto", "torch_blocks", "reference"])
def test_a_query_that_may_see_one_key_has_no_normalized_entropy(kernel: str) -> None:
    q, k, v = torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    _, amap = attend(q, k, v, mask=Causal(), kernel=kernel, return_map=True)
    torch.testing.assert_close(amap.measure("normalized_entropy")["normalized_entropy"], torch.ones(1, 2))


def test_the_largest_weights_are_those_of_all_tiles() -> None:
    q, k, v = qkv(1, 2, 1, 5, 700)
    _, amap = attend(q, k, v, kernel="torch_blocks", return_map=True)
    expected = amap[:].topk(8).values.sum(-1).mean(-1)
    torch.testing.assert_close(amap.measure("topk_mass")["topk_mass"], expected)
