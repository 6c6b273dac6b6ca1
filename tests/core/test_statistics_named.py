"""No file outside `stats/` names a concrete statistic: what is known about one is in its own file."""

import ast
from functools import cache
from pathlib import Path

import pytest

import headwise
from headwise import stats
from headwise.stats import GIVEN, MEASURES, Measure, OfPieces, OfWeights, RowMeasure, Statistic

SOURCE = Path(headwise.__file__).parent
BASES = {Measure, RowMeasure, OfPieces, Statistic, OfWeights}
CONCRETE = {
    name for name, value in vars(stats).items()
    if isinstance(value, Statistic)
    or (isinstance(value, type) and issubclass(value, Measure | Statistic) and value not in BASES)
}  # fmt: skip
NAMES = {*MEASURES, *GIVEN}
ROOMS = sorted(
    str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "stats"
)

# Files that name a class or a constant, and why. The list only gets shorter.
KINDS_NAMED = {
    "analysis/head_roles/collect.py": "roles are defined by the weight on classes of tokens",
    "analysis/head_roles/score.py": "separators and punctuation are found by the rule of the measures of them",
    "analysis/head_roles/tally.py": "the roles of duplicate tokens and induction are defined by these two measures",
    "corpus/tally.py": "the largest weight on other keys is this statistic under a mask that hides the rest",
    "kernels/cpu/kernel.py": "the largest weights and the sums of columns of a map are these statistics",
    "kernels/triton_gpu/check.py": "each statistic of a device is compared with its formula",
    "kernels/triton_gpu/__init__.py": "the sums of columns of a map are this statistic",
    "losses.py": "a loss on the weight of classes of tokens is on these measures",
    "models/adapters/huggingface/attention.py": "what a learned sink takes does not follow from the scores",
}
# Files that name a measure as a string, and why. The list only gets shorter.
STRINGS_NAMED = {
    "analysis/history.py": "the head of a column: the entropy of the rows, as the role of broad heads has it",
    "analysis/information.py": "a column of that result, made of the measure",
    "analysis/head_roles/collect.py": "the roles of broad and of positional heads are defined by these measures",
    "analysis/linear.py": "the squared norm of a matrix is the sum of this measure's rows",
    "losses.py": "the losses on the entropy of rows are on this measure",
    "map/pairs.py": "the divergence from a map is its cross-entropy less its entropy",
    "models/recognise/chains.py": "torch.logsumexp, which a model may call",
    "models/replace/deferred.py": "torch.logsumexp, which a model may call",
    "reports/findings.py": "a finding is about the number of keys that a head attends to",
    "reports/views.py": "the two columns beside the patterns of heads in a terminal",
    "telemetry/alarms.py": "each alarm is about one measure",
    "testing/parts.py": "a measure whose formula is known is read of each kernel's map",
    "testing/layers.py": "a map with a measure is the same map",
    "testing/views.py": "a column of the made-up report",
    "telemetry/clip.py": "QK-clip acts on the largest logit",
}


@cache
def nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def kinds(source: str) -> set[str]:
    """Concrete classes and constants that a source imports from `headwise.stats` or reads as an attribute of it."""
    found: set[str] = set()
    if "stats" not in source:
        return found
    for node in nodes(source):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headwise.stats"):
            found |= {alias.name for alias in node.names} & CONCRETE
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] == "stats":
            found |= {node.attr} & CONCRETE
    return found


def strings(source: str) -> set[str]:
    """Names of measures among the strings of a source, docstrings apart."""
    if not any(name in source for name in NAMES):
        return set()
    return {node.value for node in nodes(source) if isinstance(node, ast.Constant)} & NAMES


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("room", sorted({path.partition("/")[0] for path in ROOMS}))
def test_a_room_names_no_concrete_statistic(room: str) -> None:
    sources = {path: (SOURCE / path).read_text(encoding="utf-8") for path in ROOMS if path.partition("/")[0] == room}
    for find, named in ((kinds, KINDS_NAMED), (strings, STRINGS_NAMED)):
        found = {path: names for path, source in sources.items() if (names := find(source))}
        assert found.keys() == {path for path in named if path in sources}, found


@pytest.mark.thorough
def test_a_name_is_found() -> None:
    assert {"ENTROPY", "RangeMass", "Entropy", "ReceivedMass"} <= CONCRETE
    assert kinds("def f():\n    from headwise.stats import Entropy, Measure") == {"Entropy"}
    assert kinds("from headwise.stats.weights import ENTROPY") == {"ENTROPY"}
    assert kinds("import headwise as hw\nhw.stats.SinkMass(3)") == {"SinkMass"}
    assert strings('"""entropy"""\nshown = ["entropy", "other"]\nf"entropy {3}"') == {"entropy"}
