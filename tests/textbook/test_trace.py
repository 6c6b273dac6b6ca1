"""The trace is the head design, step by step."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import headwise.nn
from headwise.errors import ConfigError, HeadwiseError, ShapeError
from headwise.nn.registry import DESIGNS
from headwise.nn.steps import Step
from headwise.wording import tr
from headwise_textbook.trace import print_trace, trace

# Every design, plain and with what adds steps.
CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in DESIGNS] + [
    ("multi_head", {"num_kv_heads": 2, "qk_norm": True, "rotary": True, "bias": True, "value_dim": 5}),
    ("per_head", {"num_kv_heads": 2, "value_dim": 5, "bias": True, "rotary": True}),
    ("contraction", {"num_kv_heads": 2, "value_dim": 5, "bias": True, "rotary": True}),
    ("block_diagonal", {"head_dim": 4, "value_dim": 5, "rotary": True}),
    ("sparse_mixture", {"top_k": 2, "shared_heads": 1, "num_kv_heads": 3, "rotary": True, "renormalise": True}),
    ("sparse_mixture", {"top_k": 2, "per": "sequence"}),
    ("sparse_mixture", {"top_k": 2, "keys": "chosen", "rotary": True}),
    ("sparse_mixture", {"top_p": 0.5, "keys": "chosen"}),
    ("mixture_of_heads", {"top_k": 2, "shared_heads": 2, "scaled": True}),
    ("grouped_mlp", {"num_groups": 3, "hidden": 7, "value_dim": 5}),
    ("head_mixing", {"num_kv_heads": 2, "value_dim": 5}),
    ("talking_heads", {"num_kv_heads": 2, "value_dim": 5}),
    ("latent", {"latent_dim": 7, "query_latent_dim": 9, "latent_norm": True, "value_dim": 5}),
    ("latent", {"rope_dim": 0, "latent_dim": 7}),
    ("gated_output", {"gate": "channel", "value_dim": 5}),
    ("convolution", {"bias": True, "sharpness": 2.0}),
    ("mqa", {}),
]
every = pytest.mark.parametrize(("design", "options"), CASES, ids=lambda value: str(value))


def traced(design: str, options: dict[str, Any], **more: Any) -> dict[str, Step]:
    steps = trace(5, 12, 6, design=design, options=options, batch=2, **more)
    assert len({step.name for step in steps}) == len(steps)
    return {step.name: step for step in steps}


@pytest.mark.thorough_beyond(6)
@every
def test_axes_say_what_the_shapes_are(design: str, options: dict[str, Any]) -> None:
    """One letter is one size in all steps, and the sizes are those that were asked for."""
    sizes: dict[str, int] = {"b": 2, "n": 5, "d_model": 12, "1": 1, "2": 2}
    for step in traced(design, options).values():
        axes = step.axes.split()
        assert len(axes) == step.tensor.ndim, step
        for axis, size in zip(axes, step.tensor.shape, strict=True):
            assert sizes.setdefault(axis, size) == size, f"{axis} of {step.name}"
    assert sizes["h"] == (1 if design == "single_head" else 6)


@pytest.mark.thorough_beyond(6)
@every
@pytest.mark.parametrize("causal", [False, True])
def test_weights_are_shares_of_what_may_be_seen(design: str, options: dict[str, Any], causal: bool) -> None:
    if causal and design == "convolution":
        with pytest.raises(ConfigError, match="ConvolutionAttention does not support `mask`"):
            traced(design, options, causal=True)
        return
    steps = traced(design, options, causal=causal)
    weights = steps["weights"].tensor
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    assert ("masked" in steps) == causal
    assert (weights.triu(1) == 0).all() == causal


def written() -> set[tuple[str, str, str]]:
    """Name, English and Chinese of every step in the source of the designs, whether any case reaches it or not."""
    files = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(*headwise.nn.__path__).glob("*.py")]
    calls = [node for tree in files for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) == 5]
    notes = [call.args for call in calls if getattr(call.func, "id", "") in {"note", "self"}]
    found = set()
    for args in notes:
        made = args[4]
        sense = {one.arg: ast.literal_eval(one.value) for one in made.keywords if one.arg == "sense"}
        words = tr(ast.literal_eval(made.args[0]), **sense)
        found.add((ast.literal_eval(args[0]), words, words.zh))
    return found


@pytest.mark.thorough
def test_every_step_is_reached_in_both_languages() -> None:
    reached = set()
    cases = [(design, options, {}) for design, options in CASES]
    for design, options, more in [
        *cases,
        ("multi_head", {}, {"causal": True}),
        ("talking_heads", {}, {"causal": True}),
    ]:
        english, chinese = (traced(design, options, lang=lang, **more).values() for lang in ("en", "zh"))
        for one, other in zip(english, chinese, strict=True):
            assert (one.name, one.axes) == (other.name, other.axes)
            worded = one.formula.startswith(("split", "transpose"))
            assert worded or one.formula == other.formula
            assert not worded or re.match("切分|转置", other.formula)
            reached.add((one.name, one.words, other.words))
    assert {step for step in reached if step[0] != "x"} == written()  # x is noted before the design begins
    assert len(reached) > 60


@pytest.mark.parametrize("name", DESIGNS)
def test_a_trace_that_is_not_the_module_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = DESIGNS[name].steps

    def wrong(layer: Any, x: torch.Tensor, note: Any) -> None:
        steps(layer, x + 0.1, note)

    monkeypatch.setattr(DESIGNS[name], "steps", wrong)
    with pytest.raises(ConfigError, match=r"is not y of the call: .*not close"):
        trace(5, 12, 6, design=name)


def test_the_absorbed_scores_are_the_plain_ones() -> None:
    for options in ({"latent_dim": 7, "query_latent_dim": 9}, {"rope_dim": 0}):
        steps = traced("latent", options)
        torch.testing.assert_close(steps["absorbed"].tensor, steps["scores_latent"].tensor)


@pytest.mark.parametrize(("design", "k", "shared"), [("sparse_mixture", 2, 1), ("mixture_of_heads", 3, 2)])
def test_a_token_uses_the_heads_with_the_largest_probabilities(design: str, k: int, shared: int) -> None:
    steps = traced(design, {"top_k": k, "shared_heads": shared})
    chosen, gates = steps["chosen"].tensor, steps["gates"].tensor
    assert (chosen.sum(-1) == k + shared).all()
    assert ((gates != 0) == (chosen == 1)).all()
    probabilities = steps["probabilities"].tensor
    taken = chosen[..., shared:] == 1
    assert (torch.where(taken, probabilities, 9).amin(-1) > torch.where(taken, 0, probabilities).amax(-1)).all()
    torch.testing.assert_close(steps["weighted"].tensor, steps["heads"].tensor * gates.mT[..., None])


def test_talking_heads_talk_before_and_after_the_softmax() -> None:
    steps = {name: step.tensor for name, step in traced("talking_heads", {}).items()}
    assert not torch.allclose(steps["talk_logits"], steps["scores"])
    torch.testing.assert_close(steps["weights"], steps["talk_logits"].softmax(-1))
    torch.testing.assert_close(steps["heads"], steps["talk_weights"] @ steps["v_heads"])


def test_the_formulas_of_talking_heads_follow_from_one_another() -> None:
    """A letter stands for one thing: each is made where it is named, and used as that afterwards."""
    formulas = {name: step.formula for name, step in traced("talking_heads", {}, causal=True).items()}
    told = ("scores", "talk_logits", "masked", "weights", "talk_weights", "heads")
    assert [formulas[name] for name in told] == [
        "S = Q Kᵀ / √d_k", "L_j = Σ_l S_l P_lj", "L ← L + mask", "W = softmax(L)", "U_i = Σ_j W_j R_ji", "H = U V",
    ]  # fmt: skip
    plain = {name: step.formula for name, step in traced("multi_head", {}, causal=True).items()}
    assert [plain[name] for name in ("scores", "masked", "weights", "heads")] == [
        "S = Q Kᵀ / √d_k", "S ← S + mask", "P = softmax(S)", "H = P V",
    ]  # fmt: skip


def test_a_head_of_a_convolution_sees_one_place() -> None:
    steps = trace(5, 4, 3, design="convolution")
    named = {step.name: step.tensor for step in steps}
    x, heads = named["x"], named["heads_place"]
    torch.testing.assert_close(heads[0, 1], x[0])  # the middle one sees the token itself
    torch.testing.assert_close(heads[0, 0, 1:], x[0, :-1])
    torch.testing.assert_close(heads[0, 2, :-1], x[0, 1:])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "causal"), [(1, None, False), (3, None, True), (6, 2, True), (6, 1, False)]
)
def test_steps_follow_from_one_another(heads: int, kv_heads: int | None, causal: bool) -> None:
    steps = {step.name: step.tensor for step in trace(5, 12, heads, num_kv_heads=kv_heads, batch=2, causal=causal)}
    kv, d = kv_heads or heads, 12 // heads
    assert steps["q_split"].shape == (2, 5, heads, d)
    assert steps["q_heads"].shape == (2, heads, 5, d)
    assert steps["k_heads"].shape == (2, kv, 5, d)
    assert steps["scores"].shape == (2, heads, 5, 5)
    assert torch.equal(steps["q_heads"][1, heads - 1, 3], steps["q"][1, 3, -d:])
    torch.testing.assert_close(steps["weights"].sum(-1), torch.ones(2, heads, 5))
    assert ("masked" in steps) == causal
    if causal:
        assert (steps["weights"].triu(1) == 0).all()
    group = heads // kv
    values = steps["v_heads"][:, torch.arange(heads) // group]
    torch.testing.assert_close(steps["heads"], steps["weights"] @ values)
    assert torch.equal(steps["concat"][0, 2], steps["back"][0, 2].flatten())
    assert steps["output"].shape == (2, 5, 12)


def test_print_shows_shapes_and_numbers_in_both_languages() -> None:
    for lang, word in (("en", "queries of all heads"), ("zh", "所有头的查询")):
        console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
        steps = trace(4, 8, 2, lang=lang)
        print_trace(steps, console)
        console.file.close()
        text = console.export_text()
        assert word in text
        assert "[1 × 2 × 4 × 4]" in text
        assert f"{steps[0].tensor[0, 0, 0]:7.3f}" in text


def test_bad_sizes_are_named() -> None:
    with pytest.raises(ShapeError, match="d_model=10 is not divisible by num_heads=4"):
        trace(4, 10, 4)
    with pytest.raises(ConfigError, match="lang='fr'"):
        trace(lang="fr")
    with pytest.raises(ConfigError, match="seq=0"):
        trace(0)
    with pytest.raises(ConfigError, match="did you mean 'latent'"):
        trace(design="latnt")
    with pytest.raises(ConfigError, match=r"top_k=2: .*multi_head supports"):
        trace(options={"top_k": 2})
    with pytest.raises(ConfigError, match="self attention"):
        trace(options={"context_dim": 5})
    with pytest.raises(HeadwiseError, match="num_kv_heads: gqa requires it"):
        trace(design="gqa")
