"""The fuzzer passes on the library as it is, and fails on libraries that are wrong in ways that users have met."""

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise
from headwise.cache import SlidingCache
from headwise.cache.base import Mark
from headwise.cache.storage import Room

from . import oracle
from .__main__ import main
from .case import Case, draw
from .check import Runner
from .compare import Mismatch
from .sequences import Sequence
from .shrink import shrunk
from .source import source

HERE = Path(__file__).parent
APART = ("oracle", "bounds", "dense", "case", "source", "compare", "shrink")


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.thorough
def test_the_first_cases_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "1", "--cases", "150", "--no-shrink"]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "no failures" in said
    assert "passed" in said


@pytest.mark.thorough_except("SlidingCache-limits-<lambda>", "Mark-restore-<lambda>")
@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (Room, "writable", lambda room, at: True),
        (SlidingCache, "limits", lambda cache, n, heads: None),
        (Mark, "restore", lambda mark: None),
    ],
)
def test_sequences_show_what_is_wrong_with_caches(
    owner: type, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, wrong)

    def some() -> None:
        for number in range(40):
            Sequence(0, number).run()

    with pytest.raises((Mismatch, RuntimeError)):
        some()


@pytest.mark.parametrize("name", APART)
def test_the_oracle_shares_no_code_with_the_library(name: str) -> None:
    tree = ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))
    above = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    above |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    beside = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level}
    known = {"torch", "math", "random", "functools", "collections.abc", "dataclasses", "typing"}
    assert above <= known
    assert beside <= set(APART)


@pytest.mark.parametrize(
    "scores",
    [
        (),
        (("cap", 0.8),),
        (("alibi", "a"), ("sinks", "c"), ("bias", "x")),
        (("t5", "t", True, 11), ("relative", "r", -2)),
    ],
)
def test_the_oracles_gradients_are_those_of_its_output(scores: tuple[Any, ...]) -> None:
    sizes = {"q": (2, 4, 5, 3), "k": (2, 2, 7, 3), "v": (2, 2, 7, 3), "d": (2, 4, 5, 3)}
    sizes |= {"a": (4,), "c": (4,), "x": (1, 4, 5, 1), "t": (10, 4), "r": (1, 5)}
    generator = torch.Generator().manual_seed(0)
    held = {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}

    def truth() -> oracle.Truth:
        return oracle.truth(held["q"], held["k"], held["v"], ("or", ("causal",), ("sinks", 2)), scores, 0.7, held)

    def after(name: str, step: Tensor) -> float:
        """The output, weighted by d, where `step` is added to what is looked at."""
        held[name] += step
        value = float((truth().out * held["d"]).sum())
        held[name] -= step
        return value

    t = truth()
    found = oracle.gradients(t, oracle.slopes_of(t, held["d"]), held["d"], scores, held)
    assert found.keys() == {"q", "k", "v", *(score[1] for score in scores if score[1] in held)}
    for name, gradient in found.items():
        step = torch.randn(gradient.shape, generator=generator, dtype=torch.float64) * 1e-6
        expected = float((gradient * step).sum())
        assert after(name, step) - after(name, -step) == pytest.approx(2 * expected, rel=1e-4, abs=1e-12)


def _wrong(change: Callable[..., dict[str, Any]]) -> Any:
    """The library with an `attend` whose arguments are changed on the way."""

    def attend(q: Tensor, k: Any, v: Any, **options: Any) -> Any:
        given = {"q": q, "k": k, "v": v, **options}
        return headwise.attend(**{**given, **change(given)})

    library = ModuleType("headwise")
    library.__dict__.update(attend=attend, __getattr__=lambda name: getattr(headwise, name))
    return library


def _without_scale(given: dict[str, Any]) -> dict[str, Any]:
    return {"scale": 1.0}


def _heads_swapped(given: dict[str, Any]) -> dict[str, Any]:
    return {"q": given["q"].flip(1)}


def _kv_heads_interleaved(given: dict[str, Any]) -> dict[str, Any]:
    """Query head i reads KV head i mod h_kv."""
    q, k, v = given["q"], given["k"], given["v"]
    if not isinstance(k, Tensor) or not isinstance(v, Tensor):
        return {}
    group = q.shape[1] // k.shape[1]
    return {"k": k.repeat(1, group, 1, 1), "v": v.repeat(1, group, 1, 1)} if group else {}


def _one_key_too_many(given: dict[str, Any]) -> dict[str, Any]:
    causal = isinstance(given.get("mask"), headwise.Causal)
    return {"mask": headwise.Window(1 << 20, 1)} if causal and given["q"].shape[2] <= given["k"].shape[2] else {}


def _causal_from_the_start(given: dict[str, Any]) -> dict[str, Any]:
    n, m = given["q"].shape[2], given["k"].shape[2]
    causal = isinstance(given.get("mask"), headwise.Causal) and n <= m
    return {"mask": headwise.Dense(torch.ones(n, m).tril().bool())} if causal else {}


def _without(kind: type) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(given: dict[str, Any]) -> dict[str, Any]:
        return {"score": tuple(score for score in given.get("score", ()) if not isinstance(score, kind))}

    return change


def _windows_in_another_order(given: dict[str, Any]) -> dict[str, Any]:
    def changed(mask: Any) -> Any:
        match mask:
            case headwise.masks.HeadWindows():
                return headwise.masks.HeadWindows(mask.windows[::-1], mask.sinks)
            case headwise.masks.And() | headwise.masks.Or():
                return type(mask)(changed(mask.left), changed(mask.right))
        return mask

    return {"mask": changed(given.get("mask"))}


def _padding_is_seen(given: dict[str, Any]) -> dict[str, Any]:
    return {"mask": None} if isinstance(given.get("mask"), headwise.Lengths) else {}


def _biased_a_little(given: dict[str, Any]) -> dict[str, Any]:
    """What a kernel loses that rounds float32 logits to bfloat16."""
    q = given["q"]
    return {"q": q.bfloat16().float()} if q.dtype == torch.float32 and not q.requires_grad else {}


def _nan_is_hidden(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name].nan_to_num() for name in "qkv" if isinstance(given[name], Tensor)}


def _gradient_is_doubled(given: dict[str, Any]) -> dict[str, Any]:
    k = given["k"]
    return {"k": 2 * k - k.detach()} if isinstance(k, Tensor) and k.requires_grad else {}


@pytest.mark.thorough_except(
    "without_scale", "heads_swapped", "causal_from_the_start", "biased_a_little", "windows_in_another_order"
)
@pytest.mark.parametrize(
    "change",
    [
        _without_scale, _heads_swapped, _kv_heads_interleaved, _one_key_too_many, _causal_from_the_start,
        _without(headwise.SinkLogits), _without(headwise.ALiBi), _without(headwise.SoftCap), _padding_is_seen,
        _biased_a_little, _nan_is_hidden, _gradient_is_doubled, _windows_in_another_order,
    ],
    ids=lambda change: change.__qualname__.strip("_"),
)  # fmt: skip
def test_a_wrong_library_is_caught(change: Callable[..., dict[str, Any]]) -> None:
    runner = Runner(_wrong(change))
    right = Runner(headwise)
    for number in range(250):
        case = draw(1, number)
        if runner.run(case).failed and not right.run(case).failed:
            return
    pytest.fail("250 cases passed")


@pytest.mark.parametrize(
    "case",
    [
        Case(
            seed=2, kv=4, group=2, n=3, m=7, data="whole", loud=1e9, kernel="cpu",
            scores=(("relative", False, 4, -6, "float32", 694138),), reads=(("diagonals", (0.5,) * 4),),
        ),
        Case(seed=1, b=2, kv=4, m=7, d=34, e=7, dtype="float16", scale=-1.0, dropout=0.5, kernel="cpu", grad=True),
    ],
    ids=["a weight of 1 where 0 is near", "a weight that half precision cannot show"],
)  # fmt: skip
def test_what_rounding_alone_changes_passes(case: Case) -> None:
    outcome = Runner(headwise).run(case)
    assert not outcome.failed, outcome.told


@pytest.mark.thorough
def test_a_failing_case_becomes_the_smallest() -> None:
    runner = Runner(_wrong(_padding_is_seen))
    big = Case(
        seed=7, b=2, kv=2, group=2, n=9, m=33, d=8, e=5, mask=("lengths", 5, False, "left"), measures=True,
        layouts=("bnhd", "", "step"), reads=(("dense", (0.1, 0.2, 0.3, 0.4)), ("topk", (0.1, 0.2, 0.3, 0.4))),
    )  # fmt: skip
    kind = runner.run(big).kind
    small = shrunk(big, lambda case: runner.run(case).kind == kind)
    assert small == Case(seed=small.seed, b=small.b, m=small.m, mask=big.mask)
    assert small.b * small.m <= 6


def test_the_program_of_a_case_runs_as_it_is_printed() -> None:
    case = replace(draw(1, 0), seed=3, kernel="auto", context="", n=5, m=7, reads=(("dense", (0.5,) * 4),), way="map")
    held: dict[str, Any] = {}
    exec(source(case).text().replace("\nprint", "\nshown ="), held)
    assert held["out"].shape == (case.b, case.h, 5, case.e)
