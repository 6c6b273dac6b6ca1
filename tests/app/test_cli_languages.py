"""The command line in English and in Chinese: help, sentences and errors; and what shells complete."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import rich.text
from rich.cells import cell_len
from typer.main import get_command

from commands import Command
from headwise.cli import main
from headwise.cli.options import WORK, work
from headwise.cli.program import Listed, app
from headwise.wording import language, looked_up, speaking


def every_command(command: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A command and all commands in it, with their names."""
    yield names, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from every_command(inner, *names, name)


def every_help() -> Iterator[str]:
    """All help of all commands, in English."""
    group: Any = get_command(app)
    others = [command.loaded() for command in group.commands.values() if isinstance(command, Listed)]
    for command in (*(found for _, found in every_command(group)), *others):
        yield command.help
        yield from (param.help for param in command.params if getattr(param, "help", None))


@pytest.fixture
def locale(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the user's locale."""

    def use(**variables: str) -> None:
        for name in ("HEADWISE_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return use


@pytest.mark.thorough
def test_every_help_has_chinese():
    chinese = {text: looked_up(text, "headwise_textbook") or "" for text in every_help()}
    assert [text for text, shown in chinese.items() if not re.search("[一-鿿]", shown)] == []
    for english, shown in chinese.items():  # it names the same options
        assert re.findall(r"--[a-z][\w-]*", english) == re.findall(r"--[a-z][\w-]*", shown), english


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("command", [names for names, _ in every_command(get_command(app))], ids=" ".join)
def test_help_in_chinese_has_no_english_sentence(headwise: Command, locale: Any, command: tuple[str, ...]):
    locale(LANG="zh_CN.UTF-8")
    done = headwise(*command, "--help")
    assert done.code == 0
    assert "用法：" in done.out
    assert "选项" in done.out
    assert re.findall(r"[A-Z][a-z]+ (?:[a-z]+ ){2,}", done.out) == []
    assert "…" not in done.out  # nothing is cut


@pytest.mark.parametrize("columns", ["80", "66"])
@pytest.mark.parametrize("args", [["see", "-h"], ["prune", "-h"], ["measures"], ["plan", "model", "llama-2-7b"]])
def test_chinese_lines_end_between_characters_and_begin_with_no_closing_mark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], columns: str
):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.argv", ["headwise", *args, "--lang", "zh"])
    with contextlib.suppress(SystemExit):
        main()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(cell_len, lines)) <= int(columns)
    assert [line for line in lines if re.match(r"[│\s]*[，。、；：？！）》”]", line)] == []
    assert rich.text.divide_line.__module__.startswith("rich.")  # as before


@pytest.mark.thorough
def test_lang_counts_more_than_the_locale_wherever_it_stands(headwise: Command, locale: Any):
    locale(LC_ALL="zh_CN.UTF-8", LANG="en_GB.UTF-8")
    assert "用法" in headwise("see", "--help").out
    for args in (["see", "--lang", "en", "--help"], ["see", "--help", "--lang=en"], ["--lang", "en", "see", "--help"]):
        assert "Usage: headwise see" in headwise(*args).out
    assert language() == "zh"  # what a command chose is for that command
    locale(LANG="en_GB.UTF-8")
    assert "名称" in headwise("measures", "--lang", "zh").out
    assert "名称" not in headwise("measures").out


def test_the_language_of_the_environment():
    assert language({"HEADWISE_LANG": "zh", "LC_ALL": "en_US"}) == "zh"
    assert language({"LC_MESSAGES": "zh_TW.UTF-8", "LANG": "en_US.UTF-8"}) == "zh"
    assert language({"LANG": "Chinese (Simplified)_China.936"}) == "zh"
    assert [language(given) for given in ({}, {"LANG": "C"}, {"LANG": "de_DE"})] == ["en"] * 3


def test_a_wrong_language_is_one_error(headwise: Command, locale: Any):
    locale(HEADWISE_LANG="fr")
    done = headwise("measures")
    assert (done.code, done.out) == (2, "")
    assert "HEADWISE_LANG='fr': expected 'en' or 'zh'" in done.err
    locale()
    assert "lang='fr': expected 'en' or 'zh'" in headwise("doctor", "--lang", "fr").err


def test_errors_begin_in_chinese(headwise: Command):
    assert headwise("see", "--lang", "zh", "--sort", "entropi").err.startswith("错误：")


def test_work_is_named_in_chinese():
    with speaking("zh"):
        assert work("reading") == "读入"
        assert work("healing, loss 3.210") == "恢复训练, loss 3.210"
        assert work("another thing") == "another thing"
    assert work("reading") == "reading"
    assert all(re.search("[一-鿿]", words.zh) for words in WORK)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "found", "absent"),
    [("pru", "prune", "budget"), ("see --so", "--sort", "--png"), ("see --lang ", "zh", "prune")],
)
def test_shells_complete_commands_options_and_values(
    headwise: Command, monkeypatch: pytest.MonkeyPatch, shell: str, line: str, found: str, absent: str
):
    words = f"headwise {line}"
    monkeypatch.setenv("_HEADWISE_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", words)
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("_TYPER_COMPLETE_WORD_TO_COMPLETE", line.split(" ")[-1])
    done = headwise()
    assert done.code == 0
    assert found in done.out
    assert absent not in done.out


def test_a_shell_gets_its_script(headwise: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("_HEADWISE_COMPLETE", "source_zsh")
    assert "#compdef headwise" in headwise().out
