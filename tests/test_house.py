"""The rules of the house, read from the code: who imports whom, what is exported, what is never used."""

import ast
import contextlib
import doctest
import graphlib
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from operator import gt
from pathlib import Path

import pytest

import headwise
from parameters import thorough

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "headwise"
FILES = {".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): path for path in SOURCE.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): path for name, path in sorted(FILES.items())}
INSIDE = [name for name in MODULES if name != "headwise"]
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}
TEXTBOOK_SOURCE = ROOT / "textbook" / "src" / "headwise_textbook"
TEXTBOOK = {
    ".".join(path.relative_to(TEXTBOOK_SOURCE.parent).with_suffix("").parts): path.read_text(encoding="utf-8")
    for path in sorted(TEXTBOOK_SOURCE.rglob("*.py"))
}
PAGES = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in (ROOT / "docs/guide").rglob("*.md")}


@cache
def nodes(source: str) -> list[ast.AST]:
    """All of a module's syntax; each module is parsed once for all rules."""
    return list(ast.walk(ast.parse(source)))


@pytest.fixture(scope="module", autouse=True)
def _syntax_is_let_go() -> Iterator[None]:
    """It is more than a million objects."""
    yield
    nodes.cache_clear()


@cache
def rows() -> list[list[str]]:
    """The rooms in the picture that opens docs/architecture.md, row by row."""
    picture = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[1]
    cells = [line.split("│")[2] for line in picture.splitlines() if line.startswith("│")]
    return [cell.replace("·", " ").split() for cell in cells]


def imports(module: str, source: str) -> set[str]:
    """The modules of headwise that a module's source imports, wherever in the file."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in nodes(source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names}
    return {name for name in found if name.partition(".")[0] == "headwise"}


def wrong_imports(module: str, source: str) -> list[str]:
    """What a module imports against the picture."""
    row_of = {room: i for i, row in enumerate(rows()) for room in row}
    here = module.split(".")[1]
    wrong = []
    for name in imports(module, source):
        room = name.partition(".")[2].partition(".")[0]
        if room != here and row_of.get(room, len(row_of)) >= row_of[here]:
            wrong.append(f"{module} imports {name}")
    return wrong


def test_picture_shows_every_room_once():
    drawn = sorted(room for row in rows() for room in row)
    assert drawn == sorted({name.split(".")[1] for name in INSIDE})


@pytest.mark.thorough
def test_imports_go_one_way():
    assert [wrong for module in INSIDE for wrong in wrong_imports(module, TEXTS[module])] == []


@pytest.mark.parametrize(
    "line",
    [
        "from headwise.map import AttentionMap",
        "from headwise import map",
        "from . import nn",
        "import headwise.nn.multi_head",
        "from headwise.kernels import call",
        "def f():\n    from headwise.cli import main",
        "import headwise",
        "from headwise import attend",
    ],
)
def test_import_against_the_picture_is_found(line):
    assert wrong_imports("headwise.fields", "from headwise.errors import ConfigError\n" + line) != []


def test_no_module_reaches_itself():
    graph = {name: imports(name, TEXTS[name]) - {name} for name in INSIDE}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


def private_names(source: str) -> list[str]:
    """What a source takes of headwise that is not public: neither on top nor in the `__all__` of a namespace."""
    spaces = {f"headwise.{space}": getattr(headwise, space).__all__ for space in headwise._NAMESPACES}
    spaces["headwise"] = headwise.__all__
    found, aliases = [], {"headwise"}
    for node in nodes(source):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname for alias in node.names if alias.name == "headwise" and alias.asname}
            found += [a.name for a in node.names if a.name.startswith("headwise.") and a.name not in spaces]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "headwise":
            found += [f"{node.module}.{a.name}" for a in node.names if a.name not in spaces.get(node.module or "", [])]
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and (name := ast.unparse(node)).partition(".")[0] in aliases:
            home, _, last = f"headwise.{name.partition('.')[2]}".rpartition(".")
            if home in spaces and last not in spaces[home] and not last.startswith("__"):
                found.append(f"{home}.{last}")
    return found


def test_the_textbook_takes_public_names_only():
    assert {name: found for name, text in TEXTBOOK.items() if (found := private_names(text))} == {}
    blocks = [
        (name, block)
        for name, text in PAGES.items()
        for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    ]
    assert len(blocks) > 40
    assert [(name, found) for name, block in blocks if (found := private_names(block))] == []


@pytest.mark.parametrize(
    "line",
    [
        "from headwise.map import AttentionMap",
        "from headwise.nn.registry import DESIGNS",
        "from headwise.nn import base",
        "from headwise import map",
        "import headwise.map",
        "import headwise as hw\nhw.rule.Rule",
        "import headwise as hw\nhw.nn.base.AttentionLayer",
        "def f():\n    from headwise.nn import copy_into",
    ],
)
def test_a_private_name_is_found(line):
    assert private_names(line)
    assert private_names("import headwise as hw\nfrom headwise.nn import DESIGNS\nhw.nn.DESIGNS['gqa'].build") == []


def test_headwise_does_not_import_the_textbook():
    assert [name for name, text in TEXTS.items() if "headwise_textbook" in text] == []


def explained(where: str, value: object) -> None:
    assert not inspect.ismodule(value), where
    if callable(value):
        assert (value.__doc__ or "").strip(), f"{where} has no docstring of its own"


def test_front_door_is_short_and_explained():
    names = [name for name in headwise.__all__ if name not in headwise._NAMESPACES]
    assert len(names) <= 35
    for name in names:
        explained(f"headwise.{name}", getattr(headwise, name))


@pytest.mark.parametrize("space", headwise._NAMESPACES)
def test_names_of_namespaces_are_there_and_explained(space):
    namespace = getattr(headwise, space)
    assert inspect.ismodule(namespace)
    assert (namespace.__doc__ or "").strip()
    assert len(set(namespace.__all__)) == len(namespace.__all__)
    for name in namespace.__all__:
        explained(f"headwise.{space}.{name}", getattr(namespace, name))


def test_names_on_top_are_those_of_a_namespace():
    """So that each has a home where a user who guesses finds it; the rest is what everything is about."""
    spaces = [set(getattr(headwise, space).__all__) for space in headwise._NAMESPACES]
    alone = {name for name in headwise._HOME_OF if not any(name in names for names in spaces)}
    assert alone == {"AttentionMap", "attend", "see"}


@pytest.mark.parametrize(
    ("name", "home"),
    [("prune", "edit"), ("roles", "analysis"), ("LatentAttention", "nn"), ("measure_corpus", "corpus")],
)
def test_a_name_of_a_namespace_is_told_where_it_is_missed(name, home):
    with pytest.raises(AttributeError, match=rf"'headwise' has no attribute '{name}'; it is headwise\.{home}\.{name}$"):
        getattr(headwise, name)


def test_front_door_names_nothing_twice_and_nothing_else():
    shown = [name for name in dir(headwise) if name != "__version__"]
    assert len(shown) == len(set(shown))
    assert set(shown) == set(headwise.__all__)
    with pytest.raises(AttributeError, match=r"no attribute 'nothing_of_that_name'$"):
        headwise.nothing_of_that_name  # noqa: B018


def public_calls() -> dict[str, inspect.Signature]:
    """The signatures of all public functions, classes and methods of the namespaces."""
    found = {}
    for space in headwise._NAMESPACES:
        namespace = getattr(headwise, space)
        for name in namespace.__all__:
            value = getattr(namespace, name)
            methods = inspect.getmembers(value, inspect.isroutine) if inspect.isclass(value) else []
            public = [(f"{space}.{name}.{method}", call) for method, call in methods if not method.startswith("_")]
            for where, call in [(f"{space}.{name}", value), *public]:
                if callable(call):
                    with contextlib.suppress(TypeError, ValueError):  # no signature, as of some built-in types
                        found[where] = inspect.signature(call)
    return found


def test_model_batches_and_loss_are_the_first_arguments_in_that_order():
    wanted = ["model", "batches", "loss_fn"]
    calls = {where: list(call.parameters) for where, call in public_calls().items()}
    for where, names in calls.items():
        given = [name for name in names if name in wanted]
        if len(given) > 1:
            assert names[: len(given)] == [name for name in wanted if name in given], where
    assert sum(names[:3] == wanted for names in calls.values()) > 5


def test_words_are_in_the_language_of_the_locale_by_default():
    lang = {where: call.parameters["lang"] for where, call in public_calls().items() if "lang" in call.parameters}
    assert len(lang) > 5
    assert not {where for where, one in lang.items() if one.default not in (None, one.empty)}


def test_progress_callbacks_have_one_type_and_one_name():
    found = {
        f"{where}({name})": str(parameter.annotation)
        for where, call in public_calls().items()
        for name, parameter in call.parameters.items()
        if name == "progress" or "[str, int, int]" in str(parameter.annotation)
    }
    assert len(found) > 5
    assert all(where.endswith("(progress)") and "[[str, int, int], None]" in kind for where, kind in found.items()), (
        found
    )


def test_type_checkers_see_the_same_front_door():
    """The imports that type checkers read and the table that Python reads say the same."""
    tree = ast.parse(MODULES["headwise"].read_text(encoding="utf-8"))
    seen = {alias.asname: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
            for alias in node.names if alias.asname and (node.module or "").startswith("headwise")}  # fmt: skip
    spaces = dict.fromkeys(headwise._NAMESPACES, "headwise")
    assert seen == {name: f"headwise.{home}" for name, home in headwise._HOME_OF.items()} | spaces


@pytest.mark.thorough_except("lines0")
@pytest.mark.parametrize(
    "lines",
    [
        {
            "headwise": {"torch", "numpy", "scipy", "matplotlib", "typer", "rich"},
            "headwise.cli": {"torch", "numpy", "scipy", "matplotlib", "typer", "rich"},
            "headwise.cli.program": {"torch", "numpy", "scipy", "matplotlib"},
        },
        {
            "headwise.map.attention": {"scipy", "matplotlib", "typer", "rich", "fontTools", "torch._dynamo"},
            "headwise.lm.model, headwise.parallel, headwise.telemetry": {
                "scipy",
                "matplotlib",
                "torch._dynamo",
                "torch.distributed.tensor",
            },
            "headwise.plan": {"scipy", "matplotlib", "torch.distributed.tensor", "headwise.reports"},
        },
    ],
)
def test_import_is_light(lines):
    """What is imported one after the other in one process, with what no module has imported by then."""
    script = "import sys\n" + "".join(f"import {line}\nprint(*sys.modules)\n" for line in lines)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert [heavy & set(loaded.split()) for loaded, heavy in zip(
        done.stdout.splitlines(), lines.values(), strict=True)] == [set()] * len(lines)  # fmt: skip


@pytest.mark.thorough
def test_seeing_a_text_loads_no_compiler(tmp_path):
    """PyTorch's compiler and sympy take as long to import as all the rest."""
    code = "import atexit, sys; atexit.register(lambda: print(*sys.modules)); from headwise.cli import main; main()"
    command = [sys.executable, "-c", code, "see", "To be", "--out", str(tmp_path / "page.html")]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "headwise.reports.page" in loaded
    assert not {"torch._dynamo", "sympy"} & set(loaded)


UNPICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
NEVER_CALLED = {"print", "input", "eval", "exec", "__import__", "breakpoint"}
NEVER_FROM_TORCH = {"torch.save", "torch.load"}


def forbidden(source: str) -> list[str]:
    """Uses of what the library never uses, as line: name."""
    found = []
    for node in nodes(source):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.partition(".")[0] in UNPICKLES]
        elif isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{a.name}" for a in node.names]
            names = [n for n in whole if n.partition(".")[0] in UNPICKLES or n in NEVER_FROM_TORCH]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = [node.func.id] if node.func.id in NEVER_CALLED else []
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [name] if (name := f"{node.value.id}.{node.attr}") in NEVER_FROM_TORCH else []
        found += [f"{node.lineno}: {name}" for name in names]
    return found


# The code of a reader's exercise, in a process with limits, and the code that pages of the guide show.
MAY_RUN_CODE = {
    "headwise_textbook.exercises.child", "headwise_textbook.exercises.inside", "headwise_textbook.topics",
}  # fmt: skip


def test_library_neither_prints_nor_unpickles():
    used = [(name, found) for name, text in {**TEXTS, **TEXTBOOK}.items() for found in forbidden(text)]
    assert [one for one in used if not (one[0] in MAY_RUN_CODE and one[1].endswith(": exec"))] == []


@pytest.mark.parametrize(
    "line",
    ["print(1)", "import pickle", "from pickle import load", "torch.load(f)", "from torch import save", "eval('1')"],
)
def test_forbidden_use_is_found(line):
    assert len(forbidden(f"import torch\n{line}")) == 1
    assert forbidden("import torch\nconsole.print(1)\nmodel.eval()") == []


def test_files_are_small_and_have_a_purpose():
    both = [*SOURCE.rglob("*"), *TEXTBOOK_SOURCE.rglob("*")]
    paths = [path for path in both if path.suffix in {".py", ".js", ".css", ".html"}]
    lines = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert {path: n for path, n in lines.items() if n > 500} == {}, "split them by what they are for"
    assert [path for path in paths if re.fullmatch(r"(utils?|helpers?|common|misc)", path.stem)] == []


# Lines and files of Python in each room, "headwise" for the files beside the rooms, "textbook/" for that package. They
# only fall.
CEILINGS = {
    "analysis": (6468, 22), "base": (908, 4), "cache": (1413, 5), "cli": (2619, 10),
    "compress": (1211, 5), "corpus": (3238, 11), "costs": (1497, 5), "edit": (1493, 6),
    "headwise": (1533, 9), "interventions": (573, 3), "kernels": (6727, 32), "lm": (2799, 10),
    "map": (2503, 9), "masks": (1530, 7), "models": (10349, 36), "nn": (4478, 17),
    "parallel": (2284, 10), "plan": (1017, 4), "publishing": (599, 2), "reports": (6655, 24),
    "rule": (941, 5), "scores": (553, 3), "stats": (2378, 8), "table": (1008, 5),
    "telemetry": (2963, 11), "testing": (926, 5), "textbook/": (8919, 37),
}  # fmt: skip


def test_rooms_do_not_grow():
    rooms: dict[str, tuple[int, int]] = {}
    for path, text in zip(MODULES.values(), TEXTS.values(), strict=True):
        room = path.relative_to(SOURCE).parts[0] if path.parent != SOURCE else "headwise"
        lines, files = rooms.get(room, (0, 0))
        rooms[room] = lines + len(text.splitlines()), files + 1
    rooms["textbook/"] = sum(len(text.splitlines()) for text in TEXTBOOK.values()), len(TEXTBOOK)
    assert rooms.keys() == CEILINGS.keys()
    grown = {room: (now, CEILINGS[room]) for room, now in rooms.items() if any(map(gt, now, CEILINGS[room]))}
    assert grown == {}, "what is new replaces something"


EXAMPLES = [name.removesuffix(".__init__") for name, text in {**TEXTS, **TEXTBOOK}.items() if ">>>" in text]
SLOW_EXAMPLES = {
    "headwise", "headwise.corpus", "headwise.corpus.passages", "headwise.models.replace.certifying",
    "headwise.reports.images", "headwise.testing.parts",
}  # fmt: skip


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("module", thorough(EXAMPLES, SLOW_EXAMPLES))
def test_examples_in_docstrings_run(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted
    assert not result.failed


def test_python_m_headwise_is_the_command_line():
    done = subprocess.run([sys.executable, "-m", "headwise", "--help"], capture_output=True, text=True, check=True)
    assert "see" in done.stdout


NAMED = re.findall(r"`(_?[A-Z][A-Z_]+)`,? (?:in|of) `([\w/]+\.py)`", (ROOT / "CONTRIBUTING.md").read_text("utf-8"))


def test_contributing_names_what_is_there():
    for name, path in NAMED:
        (found,) = {file for file in (ROOT / path, SOURCE / path, SOURCE.parent / path) if file.exists()}
        assert re.search(rf"^{name}\b.*=", found.read_text(encoding="utf-8"), re.MULTILINE), f"{name} in {path}"


def test_contributing_names_registries():
    assert {"KERNELS", "MEASURES", "DESIGNS"} <= {name for name, _ in NAMED}


def test_no_message_advises_an_extra_of_a_package_that_no_index_has():
    assert [name for name, text in TEXTS.items() if re.search(r"pip install .?headwise\b", text)] == []


def classes_of_designs() -> set[str]:
    """The names of the classes that `DESIGNS` holds."""
    return {design.__name__ for design in headwise.nn.DESIGNS.values()}


def designs_named(source: str) -> set[str]:
    """Head designs that a module's source names: imported, called, compared with. Texts may mention them."""
    found: set[str] = set()
    for node in nodes(source):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
    return found & classes_of_designs()


def test_only_nn_names_a_head_design():
    """Everything else finds designs through `headwise.nn.registry.DESIGNS`; the front door says where names are."""
    named = {name: designs_named(TEXTS[name]) for name in INSIDE if not f"{name}.".startswith("headwise.nn.")}
    assert {name: found for name, found in named.items() if found} == {}, "ask the design"


@pytest.mark.parametrize(
    "line",
    [
        "from headwise.nn.latent import LatentAttention",
        "def f(layer):\n    return isinstance(layer, nn.multi_head.MultiHeadAttention)",
        "from headwise.nn.latent import LatentAttention as Small",
    ],
)
def test_a_head_design_that_is_named_is_found(line):
    assert len(designs_named(line)) == 1
    assert designs_named("from headwise.nn.registry import DESIGNS\n'LatentAttention'") == set()


def switches(source: str, room: str, known: set[str]) -> list[str]:
    """Uses of a class of `known`, imported from that room, that are more than making one: line: name. To name one in an
    annotation, or to call what it has, is none."""
    here = {
        alias.asname or alias.name
        for node in nodes(source)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"headwise.{room}")
        for alias in node.names
        if alias.name in known
    }
    if not here and f"{room}." not in source:
        return []
    fine: set[int] = set()
    for node in nodes(source):
        if isinstance(node, ast.Call | ast.Attribute):
            fine.add(id(node.func if isinstance(node, ast.Call) else node.value))
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            fine |= {id(inner) for inner in ast.walk(annotation)} if annotation is not None else set()
    matched = [node.cls for node in nodes(source) if isinstance(node, ast.MatchClass)]
    fine -= {id(node) for node in matched}
    named = [
        (node, node.attr if isinstance(node, ast.Attribute) else node.id)
        for node in nodes(source)
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in fine
    ]
    through = {f"{room}.{name}" for name in known}
    return [
        f"{node.lineno}: {name}"
        for node, name in named
        if name in here or (isinstance(node, ast.Attribute) and ast.unparse(node) in through)
    ]


def known(room: str) -> set[str]:
    """The concrete masks or scores, by name."""
    return set(getattr(importlib.import_module(f"headwise.{room}"), room.upper()))


@pytest.mark.parametrize("room", ["masks", "scores"])
def test_no_room_switches_on_a_concrete_mask_or_score(room):
    names = known(room)
    elsewhere = [name for name in INSIDE if name.split(".")[1] not in ("masks", "scores")]
    found = {name: switches(TEXTS[name], room, names) for name in elsewhere}
    assert {name: uses for name, uses in found.items() if uses} == {}


@pytest.mark.parametrize(
    "line",
    [
        "isinstance(x, Causal)",
        "isinstance(x, int | Causal)",
        "type(x) is Causal",
        "type(x) in (int, Causal)",
        "KINDS = {Causal: 3}",
        "match x:\n    case Causal(): pass",
        "isinstance(x, masks.Causal)",
        "match x:\n    case masks.Causal(): pass",
    ],
)
def test_a_switch_is_found(line):
    assert (
        len(switches(f"from headwise import masks\nfrom headwise.masks import Causal\n{line}", "masks", {"Causal"}))
        == 1
    )


@pytest.mark.parametrize(
    "line",
    [
        "x == Causal()",
        "def f(x: Causal) -> list[Causal]: return Causal.all()",
        "masks.Causal()",
        "x: Causal = Causal()",
    ],
)
def test_making_one_is_no_switch(line):
    assert switches(f"from headwise import masks\nfrom headwise.masks import Causal\n{line}", "masks", {"Causal"}) == []


# Hooks for other ends than to capture attention, which is published: where a forward begins and ends, heads that are
# scaled, PyTorch's fused path that is kept away, collectives, readings that are given up, the residual stream, the
# width of an input, outputs of linear maps, with which published queries are compared, where other threads of a model
# begin and end, and warnings that are held back.
HOOKS = {
    "headwise.models.site", "headwise.models.hooks", "headwise.models.adapters.torch",
    "headwise.models.adapters.places", "headwise.models.replace", "headwise.models.traced", "headwise.parallel.heads",
    "headwise.reports.viewer.session", "headwise.analysis.direct_effects", "headwise.telemetry.lens", "headwise.errors",
}  # fmt: skip


def captures(source: str) -> bool:
    """Whether a source registers hooks of modules, or has a state of its own for each thread."""
    return bool(
        re.search(r"\.register_(module_)?(full_)?(forward|backward)\w*hook\(|threading\.local|ContextVar\(", source)
    )


def test_attention_is_captured_in_one_way():
    held = {"headwise.kernels.events", "headwise.errors"}  # the latter holds warnings, not attention
    assert {name for name in INSIDE if captures(TEXTS[name])} == HOOKS | held
    publishers = {name for name in INSIDE if re.search(r"\bpublished\(", TEXTS[name])}
    assert publishers == {"headwise.publishing", "headwise.nn.base"}


@pytest.mark.parametrize(
    "line", ["layer.register_forward_pre_hook(f)", "m.register_full_backward_hook(f)", "here = threading.local()"]
)
def test_another_way_to_capture_is_found(line):
    assert captures(line)


def unions_asked(source: str) -> list[int]:
    """Lines of isinstance(x, A | B) and issubclass(x, A | B)."""
    return [
        node.lineno
        for node in nodes(source)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass")
        and any(isinstance(part, ast.BinOp) for part in ast.walk(node.args[1]))
    ]


def test_what_a_graph_is_made_of_asks_for_no_union():
    """torch.compile of PyTorch 2.9 follows isinstance(x, (A, B)), but not isinstance(x, A | B)."""
    rooms = {"attention", "cache", "kernels", "map", "masks", "nn", "rule", "scores", "stats", "tiles"}
    found = {name: unions_asked(TEXTS[name]) for name in INSIDE if name.split(".")[1] in rooms}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize("line", ["isinstance(x, int | str)", "issubclass(x, y if z else int | str)"])
def test_a_union_is_found(line):
    assert unions_asked(line) == [1]


KEYS = {
    "num_hidden_layers", "hidden_size", "is_encoder_decoder", "max_position_embeddings", "intermediate_size",
    "partial_rotary_factor", "rope_parameters", "get_text_config", "encoder_attention_heads",
    "num_key_value_heads", "sliding_window", "layer_types", "encoder_layers",
}  # fmt: skip


def keys_read(source: str) -> list[str]:
    """Keys of a configuration of transformers that a module reads, as attributes or by getattr."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute | ast.Call):
            found.append(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            found += [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
    return sorted(KEYS.intersection(map(str, found)))


@pytest.mark.thorough
def test_only_one_package_reads_configurations_of_transformers():
    home = "headwise.models.configuration"
    read = {name: keys for name in INSIDE if not name.startswith(home) and (keys := keys_read(TEXTS[name]))}
    assert read == {}, f"read it in {home}"


@pytest.mark.parametrize(
    "line",
    [
        "n = config.num_hidden_layers",
        "n = self.config.hidden_size",
        "x = getattr(c, 'is_encoder_decoder', 0)",
        "n = f(config).hidden_size",
    ],
)
def test_another_reader_of_configurations_is_found(line):
    assert keys_read(line)


DRAWING = {"matplotlib", "PIL"}
TAG = re.compile(
    r"</?(?:a|b|br|caption|details|div|dl|figure|h[1-6]|html|i|img|li|ol|p|path|span|style|svg|table|td|th|tr|ul)\b[^<]*>"
)
# Tables of results, which every `_repr_html_` goes through.
WRITES_HTML = {"headwise.table.show"}


def drawn(source: str) -> list[str]:
    """Imports of drawing libraries, and tags of HTML in texts that are not docstrings: line: what."""
    found = []
    notes = {id(node.value) for node in nodes(source) if isinstance(node, ast.Expr)}
    for node in nodes(source):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in notes:
            found += [f"{node.lineno}: {tag}" for tag in TAG.findall(node.value)]
            continue
        else:
            continue
        found += [f"{node.lineno}: {name}" for name in names if name.partition(".")[0] in DRAWING]
    return found


def test_only_reports_draw():
    """One place draws: no other room imports a drawing library or writes HTML."""
    others = [name for name in INSIDE if name.split(".")[1] != "reports" and name not in WRITES_HTML]
    named = {name: drawn(TEXTS[name]) for name in others}
    assert {name: found for name, found in named.items() if found} == {}, "draw it in reports/"


@pytest.mark.parametrize(
    "line",
    [
        "from matplotlib.figure import Figure",
        "def f():\n    import PIL.Image",
        "x = f'<td>{1}</td>'",
        "x = '<svg width=3>'",
    ],
)
def test_drawing_elsewhere_is_found(line):
    assert drawn(line) != []
    assert drawn('"""Writes <td> as {}."""\nimport numpy\n"a < b > c"') == []
