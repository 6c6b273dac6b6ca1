"""A topic as a Markdown page in one language, and the page that lists them.

The output of the code is part of the page. `stored_output` reads it back, so that a page is compared with what would be
written without running its code again.
"""

import re

from headwise.errors import ConfigError
from headwise.wording import Bilingual, in_language
from headwise_textbook.claims import choose
from headwise_textbook.guide.outputs import code_hash
from headwise_textbook.guide.prose import wrapped_off
from headwise_textbook.guide.registry import topics
from headwise_textbook.guide.topic import Exercise, Topic

WORDS = {
    "run": Bilingual("Run it", "运行"),
    "prints": Bilingual("It prints", "输出"),
    "claims": Bilingual("What the claim check says", "论断检验的结果"),
    "exercises": Bilingual("Exercises", "练习"),
    "check": Bilingual(
        "Write each function in a file of its own; `headwise check` compares it with ours on random inputs and prints "
        "the smallest input on which they differ.",
        "把每个函数写进一个文件；`headwise check` 在随机输入上把它与参考实现比较，并打印使两者不同的最小输入。",
    ),
    "guide": Bilingual("The guide", "指南"),
    "other": Bilingual("中文", "English"),
    "claim": Bilingual("claim", "论断"),
    "verdict": Bilingual("verdict", "结论"),
    "test": Bilingual("test it", "自行检验"),
    "index": Bilingual(
        "Multi-head attention, one topic a page, in the order of a textbook chapter. Every page has the formula, code "
        "with its real output, a picture, the verdicts of the claims that textbooks make, and three exercises. In the "
        "terminal, `headwise tour` lists the topics, `headwise tour splitting` runs one, and `headwise tour 11.2.1` or "
        "`headwise tour 5.3.4` finds the one that belongs to a section of your book ([table](sections.md)).",
        "多头注意力指南：一页一个主题，按教材章节的顺序排列。"
        "每一页都有公式、代码及其真实输出、图、对教材论断的检验结论，以及三道练习。"
        "在终端中，`headwise tour` 列出所有主题，`headwise tour splitting --lang zh` 运行其中一个，"
        "`headwise tour 11.2.1` 或 `headwise tour 5.3.4` 找到与书中某一节对应的主题（[对照表](sections.md)）。",
    ),
    "topic": Bilingual("topic", "主题"),
    "formula": Bilingual("formula", "公式"),
    "guards": Bilingual(
        "`headwise check` runs your code in a process of its own, with limits: 10 seconds of CPU time, 2 GiB of "
        "memory, 1 MiB of printed text, 64 MiB of files. On Linux it has a file system of its own, in which Python and "
        "its packages can only be read and your files are not there, no network, and no other processes; all of it is "
        "gone afterwards. Where the system does not allow that, the result says so.",
        "`headwise check` 在单独的进程中运行你的代码，并加以限制："
        "10 秒 CPU 时间、2 GiB 内存、1 MiB 打印输出、64 MiB 文件。在 Linux 上，它有自己的文件系统："
        "Python 及其包只可读取，你的文件不在其中；没有网络，也没有其他进程，结束后全部消失。"
        "系统不允许这样隔离时，结果会说明。",
    ),
}


def page(topic: Topic, lang: str, output: str) -> str:
    """The page of a topic. output: what its code prints."""
    code, kind = topic.code_in(lang), "console" if topic.is_command else "python"
    shown = f"$ {code}" if topic.is_command else code
    parts = [
        f"# {in_language(topic.title, lang)}",
        _neighbours(topic, lang),
        wrapped_off(in_language(topic.introduction, lang)),
        f"$$\n{in_language(topic.formula, lang).strip()}\n$$",
        f"## {_word('run', lang)}",
        f"```{kind}\n{shown}\n```",
        f"{_word('prints', lang)}{'：' if lang == 'zh' else ':'}",
        f"<!-- output of {code_hash(code)} -->\n```text\n{output}\n```",
        wrapped_off(in_language(topic.reading, lang)),
        f"![{in_language(topic.caption, lang)}](../pictures/{topic.name}.{lang}.svg)",
        f"*{in_language(topic.caption, lang)}*",
    ]
    if topic.claims:
        parts += [f"## {_word('claims', lang)}", claims_table(topic, lang)]
    parts += [f"## {_word('exercises', lang)}", _word("check", lang)]
    parts += [_exercise(number, one, lang) for number, one in enumerate(topic.exercises, 1)]
    return "\n\n".join(parts) + "\n"


def stored_output(text: str) -> tuple[str, str]:
    """The hash of the code and its output in a page. ConfigError if there is none."""
    found = re.search(r"<!-- output of (\w+) -->\n```text\n(.*?)\n?```\n", text, re.DOTALL)
    if found is None:
        raise ConfigError("page: expected <!-- output of … --> and a block of text; run scripts/guide.py")
    return found[1], found[2]


def index(lang: str) -> str:
    """The page that lists all topics."""
    rows = [
        f"| {number} | [{in_language(topic.title, lang)}]({topic.name}.md) | `{cell(in_language(topic.plain, lang))}` |"
        for number, topic in enumerate(topics().values(), 1)
    ]
    other = f"[{_word('other', lang)}](../{'en' if lang == 'zh' else 'zh'}/index.md)"
    head = f"| | {_word('topic', lang)} | {_word('formula', lang)} |\n| --- | --- | --- |\n"
    return (
        "\n\n".join(
            [f"# {_word('guide', lang)}", other, _word("index", lang), head + "\n".join(rows), _word("guards", lang)]
        )
        + "\n"
    )


def claims_of(topic: Topic, lang: str) -> list[tuple[str, str, str]]:
    """Id, statement and verdict of each claim of a topic."""
    return [
        (one.id, in_language(one.statement, lang), in_language(one.expected.words, lang))
        for one in choose(topic.claims)
    ]


def claims_table(topic: Topic, lang: str) -> str:
    """The claims of a topic as a Markdown table, and the command that tests them."""
    rows = [f"| **{name}** {cell(said)} | {result} |" for name, said, result in claims_of(topic, lang)]
    head = f"| {_word('claim', lang)} | {_word('verdict', lang)} |\n| --- | --- |\n"
    colon, option = ("：", " --lang zh") if lang == "zh" else (": ", "")
    command = f"headwise claims --only {','.join(topic.claims)}{option}"
    return head + "\n".join(rows) + f"\n\n{_word('test', lang)}{colon}`{command}`"


def cell(text: str) -> str:
    """A text within a Markdown table, where | ends a cell."""
    return text.replace("|", "\\|")


def exercise_text(one: Exercise, lang: str) -> str:
    """The name of an exercise and its task."""
    return f"**{one.name}**{'：' if lang == 'zh' else ': '}{in_language(one.task, lang)}"


def _exercise(number: int, one: Exercise, lang: str) -> str:
    option = " --lang zh" if lang == "zh" else ""
    skeleton = one.skeleton.replace("\n", "\n   ").replace("   \n", "\n")
    return (
        f"{number}. {exercise_text(one, lang)}\n\n"
        f"   ```python\n   {skeleton}\n   ```\n\n"
        f"   ```console\n   $ headwise check {one.name} answer.py{option}\n   ```"
    )


def _neighbours(topic: Topic, lang: str) -> str:
    """Links to the page before, the list, the page after, and the page in the other language."""
    names = list(topics())
    at = names.index(topic.name)
    before = f"← [{in_language(topics()[names[at - 1]].title, lang)}]({names[at - 1]}.md) · " if at else ""
    after = (
        f" · [{in_language(topics()[names[at + 1]].title, lang)}]({names[at + 1]}.md) →" if at + 1 < len(names) else ""
    )
    other = f" · [{_word('other', lang)}](../{'en' if lang == 'zh' else 'zh'}/{topic.name}.md)"
    notebook = f" · [Jupyter](../notebooks/{lang}/{topic.name}.ipynb)"
    return f"{before}[{_word('guide', lang)}](index.md){after}{other}{notebook}"


def _word(key: str, lang: str) -> str:
    return in_language(WORDS[key], lang)
