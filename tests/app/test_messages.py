"""The catalogues have each text of the code in Chinese, and the code has none."""

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
HAN = "[一-鿿]"
PACKAGES = {"headwise": ROOT / "src" / "headwise", "headwise_textbook": ROOT / "textbook" / "src" / "headwise_textbook"}
# Strings that are data: texts to read, names of a language, what is cut off a word.
DATA = {
    "headwise": {"wording.py", "cli/learn.py", "testing/views.py"},
    "headwise_textbook": {
        "audit.py", "claims/demonstration.py", "claims/show.py",
        "demonstration.py", "exercises/three.py", "places.py", "tour.py",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def messages() -> ModuleType:
    """The script that merges the catalogues."""
    spec = importlib.util.spec_from_file_location("messages", ROOT / "scripts" / "messages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("package", PACKAGES)
def test_the_catalogue_has_every_text_and_no_other(messages: ModuleType, package: str):
    wanted, known = messages.texts(package), messages.read(messages.catalogue(package))
    assert len(wanted) > 300
    assert messages.faults(wanted, known) == []
    assert messages.merged(wanted, known) == known  # `make messages` changes nothing


def in_chinese(source: str) -> list[str]:
    """The strings of a source with Chinese characters, without docstrings."""
    if not re.search(rf"{HAN}|\\[uUN]", source):
        return []
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return [node.value for node in strings if isinstance(node.value, str) and re.search(HAN, node.value)]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_code_has_no_chinese(package: str):
    found = {
        path.relative_to(PACKAGES[package]).as_posix(): words
        for path in sorted(PACKAGES[package].rglob("*.py"))
        if (words := in_chinese(path.read_text(encoding="utf-8")))
    }
    assert {file: words for file, words in found.items() if file not in DATA[package]} == {}
    assert DATA[package] == set(found)


def test_chinese_in_code_is_found():
    assert in_chinese('"""头"""\n"""头"""\nx = f"{3} 个头"  # 头') == [" 个头"]
    assert in_chinese(r'x = "\u5934"') == ["头"]


@pytest.mark.parametrize(
    ("wanted", "known", "fault"),
    [
        ('tr("a head")', "", "missing: 'a head'"),
        ('tr("a head")', 'msgid "a head"\nmsgstr ""', "missing: 'a head'"),
        ('tr("a head", sense="x")', 'msgid "a head"\nmsgstr "头"', "missing: 'a head'"),
        ("", 'msgid "a head"\nmsgstr "头"', "unused: 'a head'"),
        ('tr("a head")', '#, fuzzy\nmsgid "a head"\nmsgstr "头"', "fuzzy: 'a head'"),
        ('tr("{n} heads", n=n)', 'msgid "{n} heads"\nmsgstr "{m} 个头"', "values differ: '{n} heads', '{m} 个头'"),
        ('tr("{n} heads", n=n)', 'msgid "{n} heads"\nmsgstr "个头"', "values differ: '{n} heads', '个头'"),
    ],
)
def test_what_is_missing_or_wrong_is_named(messages: ModuleType, tmp_path: Path, wanted: str, known: str, fault: str):
    file = tmp_path / "x.po"
    file.write_text(known + "\n", encoding="utf-8")
    assert fault in messages.faults(list(messages.in_source(wanted, "x.py")), messages.read(file))


@pytest.mark.parametrize("source", ["tr(text)", 'tr(f"{n} heads")', 'tr("{n} heads", m=n)', 'trn("a head", count=n)'])
def test_a_text_that_cannot_be_found_in_the_code_is_refused(messages: ModuleType, source: str):
    with pytest.raises(SystemExit, match=r"x\.py:1: "):
        list(messages.in_source(source, "x.py"))


def test_a_changed_text_keeps_the_chinese_of_the_old_one_to_be_looked_at(messages: ModuleType):
    old = messages.Entry("", "one head of the layer", chinese="一个头")
    [new] = messages.merged([messages.Entry("", "one head of this layer")], [old])
    assert (new.chinese, new.fuzzy) == ("一个头", True)


def test_a_broken_catalogue_of_others_leaves_the_text_in_english(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "strange.py").write_text(
        "from headwise.wording import tr\ntext = tr('{a} is bad', a=3)\nother = tr('worse')"
    )
    folder = tmp_path / "locale" / "zh" / "LC_MESSAGES"
    folder.mkdir(parents=True)
    po = 'msgid "{a} is bad"\nmsgstr "{b} 不好"\n\nmsgid "worse"\nmsgstr "更\\坏"\n'
    (folder / "strange.po").write_text(po, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    strange = importlib.import_module("strange")
    assert (strange.text.zh, strange.other.zh) == ("3 is bad", "worse")
