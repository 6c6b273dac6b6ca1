"""Docstrings of public functions and classes name their parameters, what is returned, and the errors they raise."""

import ast
import inspect
import linecache
import re
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache
from typing import Any

import pytest

import headwise
from headwise.errors import HeadwiseError

SHORT = 2  # functions of at most so many parameters may be explained by a sentence
ERRORS = {kind.__name__ for kind in (HeadwiseError, *HeadwiseError.__subclasses__())}


@cache
def public() -> dict[str, Any]:
    """Every function and class of the namespaces and on top, by the name that a user writes."""
    spaces = {"": headwise, **{f"{space}.": getattr(headwise, space) for space in headwise._NAMESPACES}}
    names = {f"{at}{name}": getattr(space, name) for at, space in spaces.items() for name in space.__all__}
    home = {id(thing): name for name, thing in reversed(names.items())}  # a thing of two names is checked once
    return {name: thing for name, thing in names.items() if callable(thing) and home[id(thing)] == name}


def explained_in(thing: Any) -> str:
    """Where a reader looks for a class's parameters: its own docstring, and that of its constructor."""
    own = inspect.getdoc(thing) or ""
    return own + "\n" + (inspect.getdoc(thing.__init__) or "") if inspect.isclass(thing) else own


def parameters(thing: Any) -> list[str]:
    """Names of the parameters that a caller gives."""
    try:
        signature = inspect.signature(thing)
    except ValueError:  # of a class written in C
        return []
    fixed = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [name for name, x in signature.parameters.items() if x.kind not in fixed and not name.startswith("_")]


def raised(function: Callable[..., Any]) -> set[str]:
    """The classes of headwise's errors that the body of a function raises by name."""
    code = function.__code__  # inspect.getsource looks through all modules that are imported
    lines = inspect.getblock(linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :])
    tree = ast.parse(textwrap.dedent("".join(lines)))
    made = [node.exc.func for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    return {ast.unparse(kind).rpartition(".")[2] for kind in made} & ERRORS


def missing(thing: Any) -> Iterator[str]:
    """What the docstring of a function or a class does not say."""
    words, given = explained_in(thing), parameters(thing)
    if inspect.isclass(thing) and issubclass(thing, Exception | Enum):
        return
    if len(given) > SHORT:
        yield from (name for name in given if not re.search(rf"\b{re.escape(name)}\b", words))
    if not inspect.isfunction(inspect.unwrap(thing)):
        return
    returned = inspect.signature(thing).return_annotation
    if len(given) > SHORT and returned is not None and not re.search(r"\b(Return|Yield)", words):
        yield "Returns"
    for error in raised(inspect.unwrap(thing)):
        if not re.search(rf"\b({error}|HeadwiseError)\b", words):
            yield f"Raises {error}"


# What functions of headwise return: nobody else constructs them, so that their constructors need no explanation.
RESULTS = {
    "analysis.RoleScore": {"tally"},
    "analysis.Roles": {"collected"},
    "analysis.Rollout": {"head_weights", "maps", "residual"},
    "models.Attachment": {"targets"},
    "models.HeadSite": {"anatomy"},
    "parallel.RingMap": {"named", "plan", "v", "who"},
    "parallel.SequenceParallel": {"who"},
    "parallel.UlyssesMap": {"v", "who"},
    "stats.Measurements": {"measures"},
    "telemetry.GateGradients": {"model", "what"},
    "telemetry.Record": {"how", "what"},
}  # fmt: skip
# Still to be explained: this list only gets shorter.
KNOWN: dict[str, set[str]] = {
    "cache.remembered": {"Returns", "k", "v"},
    "analysis.attention_flow": {"Returns", "batch"},
    "analysis.composition": {"Raises ShapeError"},
    "analysis.map_divergence": {"Raises ConfigError"},
    "analysis.output_similarities": {"kinds"},
    "edit.budget_effect": {"Raises ConfigError", "Raises ShapeError", "Returns", "found"},
    "edit.group_heads": {"Raises ConfigError", "Returns"},
    "masks.Grid": {"b", "h", "m", "n"},
    "masks.Part": {"cols", "grid", "rows", "whole"},
    "models.observe": {"Returns"},
    "reports.Comparison": {"description", "name", "unit"},
    "reports.Passage": {"title"},
    "reports.Report": {"passages"},
    "reports.write_dynamics": {"title"},
    "reports.write_matrix": {"similarity", "title"},
    "reports.write_pngs": {"lang", "progress", "report"},
    "scores.cell": {"Returns", "cols", "rows"},
    "scores.check_scores": {"Raises ConfigError", "Raises DTypeError", "Returns", "device", "scores"},
    "scores.t5_bias": {"Raises ConfigError"},
    "stats.Words": {"range", "unit"},
    "stats.resolve": {"Raises ConfigError"},
    "telemetry.DeadHeadAlarm": {"margin", "then"},
    "telemetry.EntropyAlarm": {"then"},
    "telemetry.MaxLogitAlarm": {"then"},
    "telemetry.SinkAlarm": {"margin", "then"},
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", public())
def test_a_public_name_is_explained(name: str) -> None:
    assert set(missing(public()[name])) - {**RESULTS, **KNOWN}.get(name, set()) == set()


def test_what_is_missing_is_found() -> None:
    def bare(one: int, two: int, three: int) -> int:
        """Add one and two."""
        raise headwise.ConfigError("three: unknown")

    def whole(one: int, two: int, three: int) -> int:
        """Return one, two or three; ConfigError if none is 0."""
        raise headwise.ConfigError("three: unknown")

    assert set(missing(bare)) == {"three", "Returns", "Raises ConfigError"}
    assert list(missing(whole)) == []
