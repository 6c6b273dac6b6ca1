"""A package that is no part of headwise: each of its parts is one file that registers it, and holds every contract."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headwise.errors import ConfigError
from headwise.kernels import register as register_kernel
from headwise.masks import register as register_mask
from headwise.models import register as register_kind
from headwise.nn.registry import DESIGNS
from headwise.reports import register as register_view
from headwise.stats.registry import register as register_measure

HERE = Path(__file__).parent
PACKAGE = HERE / "package"
CORE = HERE.parent / "core"
SUITES = [  # the tests over the registries that its parts are added to, and its own
    CORE / "test_designs.py", HERE.parent / "lm" / "test_lm_designs.py", CORE / "test_kernels.py",
    CORE / "test_map_kernels.py", HERE.parent / "testing" / "test_registered.py", HERE / "test_extras.py",
]  # fmt: skip


def run(*command: str, folders: tuple[Path, ...] = (PACKAGE,)) -> subprocess.CompletedProcess[str]:
    """A program in a process that sees the package as if it were installed."""
    path = os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "HEADWISE_TEST_PLUGINS": "1", "COLUMNS": "160"}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, encoding="utf-8", timeout=600,
        check=False,
    )  # fmt: skip


@pytest.mark.thorough
def test_the_tests_over_the_registries_hold_for_it():
    words = "cosine or einsum or test_extras"
    thorough = "not slow and not bench and not wheel"
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfp", "-m", thorough, "-k", words, *map(str, SUITES))
    assert done.returncode == 0, done.stdout[-3000:]
    passed = [line.partition("::")[0] for line in done.stdout.splitlines() if line.startswith("PASSED")]
    assert {Path(name).name for name in passed} == {path.name for path in SUITES}


COMMANDS = {
    "trace --design cosine --lang zh": "查询乘以温度",
    "plan layer cosine --d-model 12 --num-heads 3": "579 parameters per layer",
    "measures": "Rényi 1961",
    "see 武松打虎。 --out r.html --view arcs=r.svg": "Wrote arcs to r.svg.",
}
ONE_AFTER_THE_OTHER = """
import sys
from headwise.cli import main
for command in sys.argv[1:]:
    print("== " + command)
    sys.argv[1:] = command.split()
    try:
        main()
    except SystemExit as leaving:
        assert not leaving.code, command
"""


@pytest.mark.thorough
def test_commands_show_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("-c", ONE_AFTER_THE_OTHER, *COMMANDS)
    said = dict(zip(COMMANDS, done.stdout.split("== ")[1:], strict=True))
    assert [command for command, shown in COMMANDS.items() if shown not in said[command]] == [], done.stderr


@pytest.mark.thorough
def test_a_package_that_cannot_be_imported_is_named(tmp_path):
    meta = tmp_path / "broken-2.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 2.0\n", encoding="utf-8")
    (meta / "entry_points.txt").write_text("[headwise]\nthing = broken_thing\n", encoding="utf-8")
    (tmp_path / "broken_thing.py").write_text("1 / 0\n", encoding="utf-8")
    done = run("-m", "headwise", "measures", folders=(tmp_path,))
    assert (done.returncode, done.stdout) == (2, "")
    assert "broken_thing of broken cannot be imported (ZeroDivisionError: division by zero)" in done.stderr


class Half:
    """A kernel that leaves out what a kernel defines."""

    name = "half"
    gives_delta = by_autograd = False

    def refuse(self, call):
        return None


def test_what_breaks_its_contract_is_named_with_the_line():
    with pytest.raises(ConfigError, match=r"register\(Half\): a kernel must define reads \(the reads of maps"):
        register_kernel(Half())
    with pytest.raises(ConfigError, match=r"expected a headwise.models.Kind"):
        register_kind(Half())
    with pytest.raises(ConfigError, match=r"expected a headwise.reports.views.View"):
        register_view(Half())
    with pytest.raises(ConfigError, match=r"expected a class of Mask or Score"):
        register_mask(Half)
    with pytest.raises(ConfigError, match=r"expected a class of Measure"):
        register_measure(Half)
    with pytest.raises(ConfigError, match=r"expected a class of AttentionLayer, got .*Half"):
        DESIGNS["half"] = Half
    with pytest.raises(ConfigError, match=r"the name 'reference' is taken"):
        register_kernel(type("Named", (Half,), {"name": "reference", "reads": 1, "run": 1, "gradients": 1})())


ONE_COMMAND = '''
from headwise.commands import Lang
from headwise.wording import language
def say(word: str, lang: Lang = None) -> None:
    """Say a word."""
    sys.stdout.write(f"{word}, {language()}")
import sys
'''


@pytest.mark.thorough
def test_a_package_brings_commands_that_are_imported_when_they_are_called(tmp_path):
    meta = tmp_path / "says-1.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: says\nVersion: 1.0\n", encoding="utf-8")
    lines = "[headwise.commands]\nsay = says:say\nshout = absent:shout\nsee = absent:see\n"
    (meta / "entry_points.txt").write_text(lines, encoding="utf-8")
    (tmp_path / "says.py").write_text(ONE_COMMAND, encoding="utf-8")
    catalogue = tmp_path / "locale" / "zh" / "LC_MESSAGES" / "says.po"
    catalogue.parent.mkdir(parents=True)
    catalogue.write_text('msgid "Say a word."\nmsgstr "说一个词。"\n', encoding="utf-8")
    listed = run("-m", "headwise", "--help", folders=(tmp_path,))
    assert re.search(r"│ say +says +│", listed.stdout)
    assert re.search(r"│ shout +says +│", listed.stdout)  # nothing was imported
    assert run("-m", "headwise", "say", "four", "--lang", "zh", folders=(tmp_path,)).stdout == "four, zh"
    assert "说一个词。" in run("-m", "headwise", "say", "--help", "--lang", "zh", folders=(tmp_path,)).stdout
    refused = run("-m", "headwise", "shout", folders=(tmp_path,))
    assert refused.returncode == 2
    assert "absent:shout of says cannot be imported (ModuleNotFoundError" in refused.stderr
    assert "sweep" in run("-m", "headwise", "see", "--help", folders=(tmp_path,)).stdout  # ours
