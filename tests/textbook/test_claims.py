"""`headwise claims`: verdicts follow from measurements, and a measurement that is broken gives another verdict."""

import contextlib
import io
import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from rich.console import Console

from commands import Command
from headwise.cache import KVCache
from headwise.errors import ConfigError
from headwise.map.attention import attend
from headwise.nn.block_diagonal import BlockDiagonalAttention
from headwise.nn.convolution import from_conv1d
from headwise.nn.forms import PerHeadAttention
from headwise.nn.gated_output import Gates
from headwise.nn.head_mixing import HeadMixingAttention
from headwise.nn.mixture import SparseHeadMixture
from headwise.nn.multi_head import MultiHeadAttention
from headwise.wording import Bilingual
from headwise_textbook.claims import (
    Claim,
    Finding,
    Verdict,
    capacity,
    choose,
    demonstration,
    designs,
    formulas,
    located,
    memory,
    model,
    print_findings,
    published,
    run,
    sizes,
    to_json,
    to_markdown,
    training,
)
from headwise_textbook.claims.claim import (
    GROUPS,
    Check,
    Role,
    at_least,
    at_most,
    both,
    claim as claimed,
    difference,
    entries,
    equal,
    judge,
    number,
    same,
)
from headwise_textbook.claims.model import layer, normal
from headwise_textbook.claims.show import summary
from headwise_textbook.texts import TEXTS, Place, everything

ALL = choose(slow=True)
PAGES = {
    lang: Path(__file__).parents[2] / "docs" / name for lang, name in (("en", "claims.md"), ("zh", "claims.zh.md"))
}


def finding(name: str) -> Finding:
    return run(choose([name]))[0]


# A second and more, for they train or draw many; a claim that trains for minutes says itself that it is slow.
SECONDS = {
    "more-heads-learn-more", "low-rank-bottleneck", "equal-heads-stay-equal", "scaling-keeps-variance",
    "splitting-lowers-cost", "d-k-bounds-information", "head-output-is-limited", "many-heads-beat-one",
    "approximates-everything", "small-heads-specialise", "heads-have-subspaces", "demo-learns-attention",
    "phrases-attend", "demo-heads-have-kinds", "bright-is-important", "brighter-is-stronger", "cache-saves-space",
    "heads-learn-language",
}  # fmt: skip


def marks(name: str, slow: bool = False) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] * slow + [pytest.mark.thorough] * (name in SECONDS)


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("claim", [pytest.param(c, id=c.id, marks=marks(c.id, c.slow)) for c in ALL])
def test_measurement_gives_the_expected_verdict(claim: Claim) -> None:
    found = run([claim])[0]
    assert found.verdict is claim.expected, [check.text for check in found.checks]
    assert found.shown
    assert found.controls
    for control in found.controls:  # forced the other way: the control's case gives what the claim's own case gave
        checks = [forced(control) if check is control else check for check in found.checks]
        assert not forced(control).held, f"{control.text} does not reject {control.instead}"
        assert judge(checks) is Verdict.UNDECIDED


def forced(control: Check) -> Check:
    assert control.instead is not None
    return replace(control, value=control.instead)


def test_every_claim_says_what_it_is() -> None:
    assert len({claim.id for claim in ALL}) == len(ALL)
    root = Path(__file__).parents[2]
    for claim in ALL:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", claim.id)
        assert len(claim.id) <= 24, "the column of a terminal with 80 columns has room for so many"
        assert claim.statement.endswith(".")
        assert claim.source
        assert claim.formula
        assert re.search(rf"^def {claim.function}\(", (root / claim.code).read_text(encoding="utf-8"), re.M)
        assert claim.note.endswith(".")
        assert claim.control
        assert claim.places or claim.also
        assert claim.expected is not Verdict.UNDECIDED
        assert (root / claim.code).is_file()


def is_chinese(text: str) -> bool:
    return re.search(r"[\u4e00-\u9fff]", text) is not None


def test_every_claim_has_its_words_in_chinese() -> None:
    for claim in ALL:
        for words in (claim.statement, claim.note, claim.control, *(place.says for place in claim.places)):
            assert is_chinese(words.zh), (claim.id, words)
            assert not is_chinese(re.sub("[天子鳳閣宋]", "", words)), (claim.id, words)
        assert all(is_chinese(plot["title"]["zh"]) for plot in claim.plots), claim.id
        assert claim.statement.zh.endswith("。")
        assert claim.note.zh.endswith("。")
    assert all(is_chinese(title.zh) for title in GROUPS.values())
    assert all(is_chinese(verdict.words.zh) for verdict in Verdict)


def test_every_entry_has_its_function() -> None:
    assert [*entries()] == [claim.id for claim in ALL]


def idle() -> list[Check]:
    return [YES]


def test_a_claim_without_an_entry_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"claim 'idle': no TOML file of a group has an entry of it"):
        claimed(idle)


def test_a_claim_without_a_control_is_refused() -> None:
    def declared(control: str = "with another scale", also: str = "", places: tuple[Place, ...] = ()) -> Claim:
        words = Bilingual("It is so.", "如此。")
        both = (Bilingual(also, also), Bilingual(control, control))
        return Claim(words, words, places, *both, words, Verdict.HOLDS, idle)

    with pytest.raises(ConfigError, match=r"claim 'idle': declares no control"):
        declared("", also="a paper")
    with pytest.raises(ConfigError, match=r"claim 'idle': has no source"):
        declared()
    with pytest.raises(ConfigError, match=r"claim 'idle': its measurement returns no control"):
        run([declared(also="a paper")])
    with pytest.raises(ConfigError, match=r"paragraph=12: section 5.3.11 of the treatment has 10"):
        Place("treatment", "5.3.11", Bilingual("so", "如此"), paragraph=12)


def test_a_control_rejects_the_number_of_the_claims_own_case() -> None:
    control = at_least(Bilingual("error of another formula", "另一公式的误差"), 0.3, 0.01).control(1e-16)
    assert control.held
    assert not forced(control).held
    vain = at_least(Bilingual("error of another formula", "另一公式的误差"), 0.3, 0.01).control(0.2)
    assert not vain.held
    assert vain.text == "error of another formula: 0.3 ≥ 0.01, but so is 0.2"
    assert judge([YES, vain]) is Verdict.UNDECIDED
    assert judge([YES, control]) is Verdict.HOLDS


def test_a_control_rejects_the_number_of_the_first_check_if_none_is_named() -> None:
    found = finding("kv-cache")
    assert [control.instead for control in found.controls] == [found.checks[0].value]
    assert at_least("x", 1.0, 0.5).control().instead is None


def test_every_group_has_claims_and_is_registered() -> None:
    folder = Path(sizes.__file__).parent
    marked = sum(len(re.findall(r"^@claim$", path.read_text("utf-8"), re.M)) for path in folder.glob("*.py"))
    assert marked == len(ALL)
    assert {path.stem for path in folder.glob("*.toml")} == {claim.group for claim in ALL} == set(GROUPS)


def test_every_equation_of_the_treatment_is_there() -> None:
    covered = {number for place, _ in located() if place.text == "treatment" for number in place.equations}
    assert covered == {f"5.3.{i}" for i in range(1, 17)}


# How a verdict follows from checks.

YES, NO = at_most("x", 1.0, 2.0), at_most("x", 3.0, 2.0)  # a control of either rejects 3 and takes 1


@pytest.mark.parametrize(
    ("checks", "verdict"),
    [
        ([YES], Verdict.HOLDS),
        ([YES, YES], Verdict.HOLDS),
        ([NO], Verdict.FAILS),
        ([NO, NO.beyond()], Verdict.FAILS),
        ([YES, NO], Verdict.UNDECIDED),
        ([YES, NO.beyond()], Verdict.CONDITIONS),
        ([YES, YES.beyond()], Verdict.HOLDS),
        ([YES, YES.beyond(), NO.beyond()], Verdict.UNDECIDED),
        ([NO, YES.beyond()], Verdict.UNDECIDED),
        ([YES, NO.suggested()], Verdict.MISLEADING),
        ([YES, YES.suggested()], Verdict.HOLDS),
        ([YES, YES.suggested(), NO.suggested()], Verdict.UNDECIDED),
        ([YES, NO.beyond(), NO.suggested()], Verdict.UNDECIDED),
        ([YES, YES.control(3.0)], Verdict.HOLDS),
        ([YES, NO.of_machine()], Verdict.MACHINE),
        ([YES, YES.of_machine()], Verdict.MACHINE),
        ([NO, YES.of_machine()], Verdict.FAILS),
        ([YES, NO.of_machine(), NO.beyond()], Verdict.CONDITIONS),
        ([NO.of_machine()], Verdict.UNDECIDED),
        ([YES, NO.control(1.0)], Verdict.UNDECIDED),
        ([NO, NO.control(1.0)], Verdict.UNDECIDED),
        ([YES.control(3.0)], Verdict.UNDECIDED),
        ([], Verdict.UNDECIDED),
    ],
)
def test_verdict_of_checks(checks: list[Check], verdict: Verdict) -> None:
    assert judge(checks) is verdict


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("relation", ["=", "≤", "≥"])
def test_what_is_not_finite_is_no_verdict(value: float, role: Role, relation: str) -> None:
    for rest in ([], [YES], [NO], [YES, NO.beyond()]):
        assert judge([*rest, Check(both("x"), value, relation, 1.0, role=role)]) is Verdict.UNDECIDED


JUDGED = [role for role in Role if role is not Role.MACHINE]


@pytest.mark.thorough
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(JUDGED)), min_size=1, max_size=6), st.data())
def test_no_check_is_idle(plan: list[tuple[bool, Role]], data: st.DataObject) -> None:
    """Wherever there is a verdict, turning any one check around takes it away (of two, only with both turned).

    Not so one that depends on the machine: it is shown only.
    """
    checks = [replace(YES if held else NO, role=role) for held, role in plan]
    verdict = judge(checks)
    if verdict is Verdict.UNDECIDED:
        return
    i = data.draw(st.integers(0, len(checks) - 1))
    turned = [*checks]
    turned[i] = replace(NO if plan[i][0] else YES, role=plan[i][1])
    assert judge(turned) is not verdict


def test_checks_hold_on_the_right_side_only() -> None:
    assert equal("x", 2.0, 2.0).held
    assert not equal("x", 2.0 + 1e-9, 2.0).held
    assert equal("x", 2.1, 2.0, 0.06).held
    assert not equal("x", 1.8, 2.0, 0.06).held
    assert at_most("x", 2.0, 2.0).held
    assert not at_most("x", 2.1, 2.0).held
    assert at_least("x", 2.0, 2.0).held
    assert not at_least("x", 1.9, 2.0).held
    assert not at_least("x", math.nan, 2.0).held
    one = torch.tensor([1.0, -4.0])
    assert same("x", one + 1e-9, one.double(), 1e-6).held
    assert not same("x", one + 1e-3, one, 1e-6).held
    assert difference(torch.tensor([1.0, -2.0]), one) == 0.5
    assert math.isnan(difference(torch.ones(2, 1), torch.ones(2)))  # broadcasting would compare something else


def test_checks_say_what_came_and_what_was_expected() -> None:
    assert equal("heads", 3, 3).text == "heads: 3"
    assert equal("heads", 3, 4).text == "heads: 3, not 4"
    assert at_most("error", 1e-15, 1e-12).text == "error: 1e-15 ≤ 1e-12"
    assert at_most("error", 1e-3, 1e-12).text == "error: 0.001 > 1e-12"
    assert at_least("weight", 0.25, 0.5).text == "weight: 0.25 < 0.5"
    assert [number(x) for x in (4096, 6.87e10, 1022.4, 0.12345)] == ["4,096", "6.87e+10", "1,022", "0.123"]


# A claim cannot pass by accident: what it rests on is broken, and the verdict goes.


def _shifted(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose result is a little off."""

    def wrong(*args: Any, **options: Any) -> Any:
        result = method(*args, **options)
        return (result[0] * 1.001, *result[1:]) if isinstance(result, tuple) else result * 1.001

    return wrong


def _louder(q: Any, k: Any, v: Any, *, scale: float | None = None, **options: Any) -> Any:
    """Attention with a scale that is a little off."""
    return attend(q, k, v, scale=1.01 * (q.shape[-1] ** -0.5 if scale is None else scale), **options)


def _forgetful(cache: KVCache, k: Any, v: Any) -> Any:
    """A cache that keeps the new keys only."""
    cache._seen += k.shape[2]
    return k, v


def _overweighted(route: Callable[..., Gates]) -> Callable[..., Gates]:
    """A gate whose weights are a little too large."""

    def wrong(*args: Any) -> Gates:
        gates = route(*args)
        return replace(gates, weights=1.001 * gates.weights)

    return wrong


def _sliced(design: str, *sizes: int, **options: Any) -> Any:
    """The block-diagonal layer as a multi-head module, in its place."""
    module = layer("block_diagonal", *sizes, **options)
    assert isinstance(module, BlockDiagonalAttention)
    return module.to_multi_head() if design == "multi_head" else module


class _Clock:
    """A clock by which everything takes equally long."""

    def __init__(self) -> None:
        self.readings = itertools.count()

    def perf_counter(self) -> float:
        return float(next(self.readings))


ALTERNATING = itertools.cycle((1.0, 2.0))  # another factor at each call
BROKEN: list[tuple[str, Any, str, Any]] = [
    ("attention-formula", formulas, "attend", _louder),
    ("multi-head-formula", MultiHeadAttention, "output", _shifted(MultiHeadAttention.output)),
    ("per-head-projection", PerHeadAttention, "output", _shifted(PerHeadAttention.output)),
    ("per-head-projection", PerHeadAttention, "project", _shifted(PerHeadAttention.project)),
    ("output-mixes-heads", MultiHeadAttention, "output", lambda self, concat: concat),
    ("output-sums-heads", MultiHeadAttention, "output", lambda self, c: self.o_proj(c) ** 2),
    ("one-step-path", formulas, "Causal", lambda: None),
    ("scaling-keeps-gradients", formulas, "normal", lambda *shape, seed: 0.01 * normal(*shape, seed=seed)),
    ("four-d-squared", sizes, "size_of", lambda module: 4 * 48**2),
    ("gpt-2-small-layer", sizes, "standard", lambda d, h, bias=False: torch.nn.Linear(d, 3 * d)),
    ("head-size-table", published, "PUBLISHED", {"one": (768, 12, 64)}),
    ("width-divides-by-heads", sizes, "_accepts", lambda width, heads: True),
    ("multi-head-has-more", sizes, "standard", lambda d, h: MultiHeadAttention(d, h, head_dim=d)),
    ("llama-2-uses-gqa", published, "_sharing", lambda name: 8.0),
    ("same-cost-for-any-h", sizes, "_attention_flops", lambda n, d, h: 4 * n * n * d // h),
    ("cost-grows-with-heads", sizes, "_attention_flops", lambda n, d, h: 4 * n * n * d * h),
    ("n-squared-at-n-near-d", sizes, "_attention_flops", lambda n, d, h: 9 * n * n * d),
    ("splitting-lowers-cost", sizes, "_attention_flops", lambda n, d, h: 4 * n * n * d // h),
    ("complexity", MultiHeadAttention, "output", lambda self, c: self.o_proj(self.o_proj(c))),
    ("score-memory", memory, "_kept", lambda run: 8 * 2 * 128 * 32 + 8 * 128 * 128),
    ("memory-n-squared", memory, "formula_of", lambda q, k, v: attend(q, k, v, kernel="torch_blocks")),
    ("blockwise-is-exact", memory, "attend", lambda q, k, v, *, kernel="auto", **o: attend(
        q * (1.0 + 1e-3 * (kernel == "torch_blocks")), k, v, kernel=kernel, **o)),
    ("mixed-precision", memory, "attend", lambda q, k, v, **o: attend(q, k, v, **o) + 0.1 * (q.dtype.itemsize < 4)),
    ("kv-cache", KVCache, "take", _forgetful),
    ("shared-keys-cache", KVCache, "nbytes", 1000),
    ("mqa-parameters", sizes, "size_of", lambda module: sum(p.numel() for p in module.parameters()) + 1),
    ("normalised-tokens", designs.nn.LayerNorm, "forward", lambda self, x: x),
    ("residual-norm", designs, "_gradient_left", lambda depth, residual, norm: 0.9**depth),
    ("block-diagonal", designs, "layer", _sliced),
    ("sparse-heads", SparseHeadMixture, "route", _overweighted(SparseHeadMixture.route)),
    ("sparse-heads", designs, "_heads_required", lambda: 0.25),
    ("group-maps-fold", designs, "_mlp", lambda module, z: z),
    ("heads-as-experts", SparseHeadMixture, "route", _overweighted(SparseHeadMixture.route)),
    ("head-mixing", HeadMixingAttention, "mix", _shifted(HeadMixingAttention.mix)),
    ("d-k-bounds-rank", capacity, "rank", lambda matrix: 61),
    ("d-k-bounds-information", capacity, "attend", lambda q, k, v, *, scale, **o: attend(
        q, k, v, scale=1e-6 * scale, **o)),
    ("one-head-every-pattern", capacity, "attend", _louder),
    ("many-heads-beat-one", capacity, "_one_head_misses", lambda x, target: 1e-9),
    ("many-heads-beat-one", capacity, "_attended", lambda p, x: x),
    ("low-rank-bottleneck", capacity, "_copying_missed", lambda d: 0.9),
    ("more-heads-learn-more", capacity, "_trained_missed", lambda h, patterns=2: [0.01] * 301),
    ("more-heads-learn-more", capacity, "standard", lambda d, h: MultiHeadAttention(d, 1)),
    ("head-output-is-limited", capacity, "_distinguished", lambda n: 2),
    ("head-output-is-limited", capacity, "_sharpness", lambda n: 1e-3),
    ("head-output-is-limited", capacity, "_rank_of_sum", lambda model: 32),
    ("basis-functions", MultiHeadAttention, "output", lambda self, c: self.o_proj(c).tanh()),
    ("attention-is-convolution", designs, "from_conv1d", lambda conv, sharpness=1.0: _conv(conv, 1.0)),
    ("convolution-is-a-limit", designs, "attend", lambda q, k, v, *, scale: attend(q, k, v, scale=0.5 * scale)),
    ("equal-heads-stay-equal", training, "_apart_in_training", lambda noise, **more: [noise] * 301),
    ("outputs-are-dissimilar", training, "_turned", lambda heads, w: (heads, w)),
    ("heads-have-subspaces", training, "_subspaces", lambda decoder: (32, 64, 0.125)),
    ("heads-learn-language", training, "_previous", lambda amap: 0.9),
    ("output-replaces", designs, "difference", lambda one, other: 0.0),
    ("row-stacking", designs, "difference", lambda one, other: 0.0),
    ("projects-twice", designs, "difference", lambda one, other: 0.0),
    ("listing-transposes", designs, "_tokens_read", lambda x, w, transposed: 100),
    ("head-is-a-kernel", capacity, "normal", lambda *shape, seed=0: normal(*shape)),
    ("one-product-is-faster", sizes, "time", _Clock()),
    ("eight-heads-are-usual", published, "PUBLISHED", dict.fromkeys(published.PUBLISHED, (512, 8, 64))),
    ("usual-numbers-of-heads", published, "PUBLISHED", {"a": (512, 8, 64), "b": (4096, 8, 512)}),
    ("heads-raise-width", published, "_sorted", lambda of, name: [(512, 8, 64), (1024, 8, 128), (2048, 8, 256)]),
    ("bert-is-similar", published, "PUBLISHED", {"GPT-3 175B (2005.14165, table 2.1)": (12288, 192, 64)}),
    ("gqa-keeps-most", published, "rank", lambda matrix: 6),
    ("output-in-full-precision", torch, "autocast", lambda device, dtype, enabled: contextlib.nullcontext()),
    ("head-per-multiprocessor", memory, "_busy", lambda tasks, multiprocessors: 1.0),
    ("cache-saves-space", memory, "_held", lambda n, layers, way: layers),
    ("heads-own-their-weights", formulas, "_heads_changed", lambda module, name: 3),
    ("heads-share-parameters", formulas, "_heads_changed", lambda module, name: 3),
    ("correlated-inputs-couple", designs, "_correlation_of_heads", lambda module, x: 0.9),
    ("simple-uses-fewer-heads", designs, "normal", lambda *shape, seed: 0.0 * normal(*shape, seed=seed)),
    ("one-head-is-asymmetric", capacity, "_pattern_error", lambda p, d: 0.5),
    ("independent-heads-add", capacity, "_bits_shared", lambda module, x, copied=False: 0.0),
    ("small-heads-specialise", training, "_patterns_apart", lambda size, seed: (0.1, 0.1)),
    ("demo-learns-attention", demonstration, "_moved", lambda embedding: 0.0),
    ("demo-heads-have-kinds", demonstration, "_kinds", lambda weights: {
        "neighbours": 2, "starts": 2, "ends": 2}),
    ("bright-is-important", demonstration, "_harmful", lambda seed: (0.5, 0.5)),
    ("brighter-is-stronger", demonstration, "_darker_steps", lambda colours: 2),
    ("degrees-of-freedom", capacity, "_freedom", lambda weights, at: 7),
    ("approximates-everything", capacity, "_missed", lambda module, n, target: 0.01),
    ("easier-to-train", training,
     "pupils", lambda h: [training.Pupil(model.trained().decoder, (1.0,) * 300, 1.0)] * 3),
    ("phrases-attend", demonstration, "_to_first", lambda weights, pair: 9.0),
    ("entropy-without-weights", formulas, "attend", _louder),
    ("effective-keys-from-lse", formulas, "attend", _louder),
    ("received-mass-gradient", formulas, "attend", _louder),
    ("importance-from-gradient", MultiHeadAttention, "output", lambda self, c, factor=ALTERNATING: (
        self.o_proj(c) * next(factor))),
    ("weights-are-an-operator", formulas, "attend", _louder),
    ("key-bias-does-nothing", MultiHeadAttention, "output", lambda self, c: self.o_proj(c) + self.k_proj.bias),
    ("entropy-has-a-floor", formulas, "_floor", lambda t, sigma: 0.0),
    ("entropy-has-a-floor", formulas, "_floor", lambda t, sigma: math.log(t)),
    ("torch-tells-lse", formulas, "_weights", lambda q, k: torch.softmax(q @ k.mT, -1)),
]  # fmt: skip


def _conv(conv: Any, sharpness: float) -> Any:
    return from_conv1d(conv, sharpness=sharpness)


@pytest.mark.thorough_except(
    "n-squared-at-n-near-d: _attention_flops",
    "memory-n-squared: formula_of",
    "blockwise-is-exact: attend",
    "sparse-heads: route",
    "heads-have-subspaces: _subspaces",
)
@pytest.mark.parametrize(
    ("name", "owner", "attribute", "wrong"),
    [pytest.param(*one, id=f"{one[0]}: {one[2]}", marks=marks(one[0])) for one in BROKEN],
)
def test_a_broken_formula_changes_the_verdict(
    name: str, owner: ModuleType | type, attribute: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, attribute, wrong)
    assert not finding(name).agrees


def test_silenced_heads_are_really_gone() -> None:
    """The ablation on the trained model against weights of zero."""
    trained = model.trained()
    gone = [(1, 1), (1, 4), (3, 0)]
    losses = model.losses_without(trained, gone)
    assert difference(model.losses_without(trained, []), trained.losses) == 0.0
    kept = [trained.attention(layer).o_proj.weight.detach().clone() for layer in range(4)]
    size = trained.decoder.config.d_model // trained.decoder.config.num_heads
    try:
        with torch.no_grad():
            for layer, head in gone:
                trained.attention(layer).o_proj.weight[:, size * head : size * (head + 1)] = 0.0
        assert difference(model.losses_without(trained, []), losses) < 1e-5
    finally:
        with torch.no_grad():
            for layer, weight in enumerate(kept):
                trained.attention(layer).o_proj.weight.copy_(weight)
    assert difference(losses, trained.losses) > 1e-3


@pytest.mark.thorough
def test_claims_leave_the_random_numbers_alone() -> None:
    torch.manual_seed(7)
    first = torch.rand(3)
    torch.manual_seed(7)
    run(choose(["attention-is-convolution", "per-head-projection", "equal-heads-stay-equal"]))
    assert torch.equal(torch.rand(3), first)


# What is shown.


@pytest.fixture(scope="module")
def some() -> list[Finding]:
    return run(
        choose(["splitting", "splitting-lowers-cost", "four-d-squared", "block-diagonal", "entropy-has-a-floor"])
    )


@pytest.mark.thorough_except("120")
@pytest.mark.parametrize("width", [80, 120])
def test_table_fits_and_shows_claim_numbers_and_verdicts(some: list[Finding], width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    print_findings(some, console, skipped=3)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, shown.splitlines())) <= width
    words = " ".join(shown.split())
    for one in some:
        assert one.claim.id in words
        assert all(place.where.split(",")[0] in words for place in one.claim.places)
    assert words.count("✗") == sum(not check.held for one in some for check in one.shown) == 10
    assert words.count("control:") == len(some)
    assert words.count("⇄") == sum(1 + len(one.controls) for one in some)
    assert "5 claims" in words
    assert "2 hold, 1 holds under conditions, 2 do not hold." in words
    assert "3 more take longer" in words
    assert "Not as expected" not in words


def test_a_contradiction_is_told(some: list[Finding]) -> None:
    wrong = replace(some[0], claim=replace(some[0].claim, expected=Verdict.FAILS))
    assert not wrong.agrees
    assert "Not as expected: splitting." in summary([wrong, *some[1:]])
    broken = replace(some[0], checks=(*some[0].checks, NO.control(1.0)))
    assert broken.verdict is Verdict.UNDECIDED
    assert NO.control(1.0) in broken.controls


def test_json_holds_the_checks_unrounded(some: list[Finding]) -> None:
    told = json.loads(to_json(some))
    assert [one["id"] for one in told] == [one.claim.id for one in some]
    for one, found in zip(told, some, strict=True):
        assert one["verdict"] == found.verdict.value == one["expected"]
        assert [check["value"] for check in one["checks"]] == [check.value for check in found.checks]
        assert [check["held"] for check in one["checks"]] == [check.held for check in found.checks]


def _rows(page: str) -> list[list[str]]:
    """Claim and verdict of every row of the tables, without the numbers."""
    rows = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in page.splitlines() if line.startswith("| **")]
    return [row[:2] for row in rows]


def test_markdown_has_three_cells_in_each_row(some: list[Finding]) -> None:
    page = to_markdown(some)
    lines = [line for line in page.splitlines() if line.startswith(("| **", "| claim"))]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 4 for line in lines)
    assert len(_rows(page)) == len(some)


def test_curves_are_told_with_their_numbers(some: list[Finding]) -> None:
    curves = [(found, curve) for found in some for curve in found.curves]
    assert len(curves) == 4
    told = {one["id"]: one for one in json.loads(to_json(some))}
    page = to_markdown(some)
    for found, curve in curves:
        assert curve.title in page
        kept = next(one for one in told[found.claim.id]["curves"] if one["title"] == curve.title)
        assert [line["y"] for line in kept["lines"]] == [list(line.y) for line in curve.lines]
    row = next(line for line in page.splitlines() if line.startswith("| parameters, no bias"))
    assert row.split(" | ")[1:] == ["9.22e+03"] * 5 + ["9.22e+03 |"]


@pytest.mark.parametrize("lang", PAGES)
def test_the_page_in_the_documentation_has_the_claims_and_verdicts_of_today(lang: str) -> None:
    def as_expected(claim: Claim) -> Finding:
        one = {Verdict.HOLDS: [YES], Verdict.CONDITIONS: [YES, NO.beyond()], Verdict.FAILS: [NO]}
        one[Verdict.MACHINE] = [YES, NO.of_machine()]
        return Finding(claim, tuple(one.get(claim.expected, [YES, NO.suggested()])), 0.0)

    fresh = to_markdown([as_expected(claim) for claim in ALL], lang)
    page = PAGES[lang].read_text(encoding="utf-8")
    assert _rows(page) == _rows(fresh)
    assert [line for line in page.splitlines() if line.startswith("#")] == [
        line for line in fresh.splitlines() if line.startswith("#")
    ]


# The command.


@pytest.mark.thorough
def test_command_runs_the_claims_it_is_given(headwise: Command) -> None:
    code, out, _ = headwise("claims", "--only", "mqa-parameters,splitting", "--only", "gpt-2-small-layer", "--json")
    assert code == 0
    assert [one["id"] for one in json.loads(out)] == ["mqa-parameters", "splitting", "gpt-2-small-layer"]
    code, out, _ = headwise("claims", "--only", "splitting", "--markdown")
    assert code == 0
    assert _rows(out) == _rows(to_markdown(run(choose(["splitting"]))))
    assert _rows(out)


@pytest.mark.parametrize("form", [[], ["--json"], ["--markdown"]])
def test_command_fails_if_a_verdict_is_not_the_expected_one(
    headwise: Command, form: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "size_of", lambda module: 1)
    code, out, _ = headwise("claims", "--only", "mqa-parameters,splitting", *form)
    assert code == 1
    assert form == ["--json"] or "Not as expected: mqa-parameters." in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--only", "split"], "claim='split': did you mean 'splitting'"),
        (["--only", "qqqq"], "docs/claims.md lists all"),
        (["--json", "--markdown"], "not both"),
        (["--only", "splitting", "--all"], "not both"),
    ],
)
def test_bad_options_are_one_line(headwise: Command, args: list[str], words: str) -> None:
    code, out, err = headwise("claims", *args)
    assert code == 2
    assert words in err
    assert out == ""
    assert len(err.strip().splitlines()) == 1


def test_quick_claims_are_those_that_are_not_marked() -> None:
    assert {c.id for c in ALL} - {c.id for c in choose()} == {c.id for c in ALL if c.slow} != set()
    assert [c.id for c in choose(["splitting", "kv-cache", "splitting"])] == ["splitting", "kv-cache"]
    with pytest.raises(ConfigError, match="unknown"):
        choose(["nothing-of-that-name"])


def test_sources_name_the_section_that_makes_the_claim() -> None:
    found = {claim.id: {(place.text, place.section) for place in claim.places} for claim in ALL}
    assert found["splitting-lowers-cost"] == {("tutorial", "5")}
    assert ("treatment", "5.3.11") in found["same-cost-for-any-h"]
    assert ("chapter", "11.9.1") in found["same-cost-for-any-h"]
    equations = {claim.id: {n for place in claim.places for n in place.equations} for claim in ALL}
    assert {"5.3.1", "5.3.2"} <= equations["multi-head-formula"]
    assert "5.3.1" not in equations["attention-formula"]
    for name in ("score-memory", "memory-n-squared", "kv-cache"):
        assert found[name] == {("treatment", "5.3.11")}
    for name in ("blockwise-is-exact", "mixed-precision"):
        assert found[name] == {("treatment", "5.3.12")}


def test_claims_cite_all_five_texts() -> None:
    assert {place.text for place, _ in located()} == set(TEXTS)


def test_every_equation_and_table_can_be_pointed_at() -> None:
    parts = list(everything())
    assert len({(text.id, section.number, kind, number) for text, section, kind, number in parts}) == len(parts)
    assert sum(kind == "equation" and text.id == "treatment" for text, _, kind, _ in parts) == 16
    with pytest.raises(ConfigError, match=r"section='5.3.20': not in the mathematical section; expected one of 5.3, "):
        Place("treatment", "5.3.20", Bilingual("x", "x"))
    with pytest.raises(ConfigError, match=r"equation 5.3.9: section 5.3.4 of the treatment has 5.3.3, 5.3.4"):
        Place("treatment", "5.3.4", Bilingual("x", "x"), equations=("5.3.9",))


@pytest.mark.thorough
def test_everything_is_shown_in_chinese(some: list[Finding], headwise: Command) -> None:
    console = Console(file=io.StringIO(), width=100)
    print_findings(some, console, lang="zh")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "结论" in shown
    told = json.loads(to_json(some, "zh"))
    for one, found in zip(told, some, strict=True):
        assert one["statement"] == found.claim.statement.zh
        assert one["verdict"] == found.verdict.words.zh
        assert [place["says"] for place in one["places"]] == [place.says.zh for place in found.claim.places]
        assert [check["what"] for check in one["checks"]] == [check.what.zh for check in found.checks]
    words = [check.what for one in some for check in one.checks]
    assert all(is_chinese(what.zh) or what == what.zh for what in words)
    page = to_markdown(some, "zh")
    assert "有条件成立" in page
    assert "holds" not in page
    code, out, _ = headwise("claims", "--only", "splitting", "--lang", "zh")
    assert code == 0
    assert "1 条成立" in out
    assert headwise("claims", "--only", "splitting", "--lang", "fr").code == 2
