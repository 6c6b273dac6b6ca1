"""The five texts that the claims are taken from: an outline of each, and places in them.

The outline has what a reader can point at: sections with titles in our own words, numbered or counted equations,
paragraphs, list items, tables, listings and figures. The texts themselves are not part of headwise.

>>> text = TEXTS["treatment"]
>>> text.section("5.3.4").equations
('5.3.3', '5.3.4')
>>> place("treatment", "5.3.4", "heads are stacked by rows", "各头按行堆叠", equations="5.3.3").where.zh
'数学推导 §5.3.4，式 (5.3.3)'
"""

from collections.abc import Iterator
from dataclasses import dataclass

from headwise.errors import ConfigError, unknown_name
from headwise.wording import Bilingual, joined


@dataclass(frozen=True)
class Section:
    """One section of a text.

    Attributes:
        number: as printed, such as "5.3.4"; counted from 1 where the text numbers nothing.
        title: what it is about, in our words.
        paragraphs, items, tables, listings, figures: how many there are, each counted from the top of the section.
            A paragraph is a line of running text; formulas and list items are not paragraphs.
        equations: the printed numbers, such as "5.3.3", or "1", "2", … where none are printed.
    """

    number: str
    title: Bilingual
    paragraphs: int = 0
    items: int = 0
    equations: tuple[str, ...] = ()
    tables: int = 0
    listings: int = 0
    figures: int = 0


@dataclass(frozen=True)
class Text:
    """A text.

    Attributes:
        id: its short name. title: what it is. named: how a section is named, with {} for its number.
        sections: all of them. also: what else readers call the text, in either language.
    """

    id: str
    title: Bilingual
    named: Bilingual
    sections: tuple[Section, ...]
    also: tuple[str, ...] = ()

    @property
    def is_counted(self) -> bool:
        """Whether its sections are counted, so that a number alone names none of them."""
        return self.named is _PART

    def label(self, section: str) -> Bilingual:
        """A section as tables name it, such as "11.2.1", "§5.3.4" or "first tutorial part 2"."""
        en, zh = self.named.format(section), self.named.zh.format(section)
        return Bilingual(f"{self.title} {en}", f"{self.title.zh} {zh}") if self.is_counted else Bilingual(en, zh)

    def section(self, number: str) -> Section:
        """The section of that number; ConfigError if there is none."""
        for section in self.sections:
            if section.number == number:
                return section
        raise ConfigError(
            f"section={number!r}: not in the {self.title}; expected one of {', '.join(s.number for s in self.sections)}"
        )


@dataclass(frozen=True)
class Place:
    """A place in a text, and what the text says there.

    Attributes:
        text, section: the `id` of a text and the number of a section of it.
        says: a paraphrase of the place, in our words.
        equations: their numbers. paragraph, item, table, listing, figure: which one of the section, 0 for none.
    """

    text: str
    section: str
    says: Bilingual
    equations: tuple[str, ...] = ()
    paragraph: int = 0
    item: int = 0
    table: int = 0
    listing: int = 0
    figure: int = 0

    def __post_init__(self) -> None:
        if self.text not in TEXTS:
            raise unknown_name("text", self.text, TEXTS)
        section = TEXTS[self.text].section(self.section)
        missing = [number for number in self.equations if number not in section.equations]
        if missing:
            has = ", ".join(section.equations) or "none"
            raise ConfigError(f"equation {missing[0]}: section {self.section} of the {self.text} has {has}")
        for kind in COUNTED:
            if not 0 <= getattr(self, kind) <= getattr(section, f"{kind}s"):
                raise ConfigError(
                    f"{kind}={getattr(self, kind)}: section {self.section} of the {self.text} has "
                    f"{getattr(section, f'{kind}s')}"
                )

    @property
    def where(self) -> Bilingual:
        """The place in words, such as "mathematical section §5.3.4, eq. 5.3.3"."""
        text = TEXTS[self.text]
        en, zh = text.named.format(self.section), text.named.zh.format(self.section)
        parts = [Bilingual(f"{text.title} {en}", f"{text.title.zh} {zh}")]
        if self.equations:
            word = "eq." if len(self.equations) == 1 else "eqs."
            parts.append(
                Bilingual(f"{word} {', '.join(self.equations)}", f"式 {'、'.join(f'({n})' for n in self.equations)}")
            )
        for kind, (en, zh) in COUNTED.items():
            if number := getattr(self, kind):
                parts.append(Bilingual(f"{en} {number}", zh.format(number)))
        return joined(parts)


# kind → words for one of it
COUNTED = {
    "paragraph": ("paragraph", "第 {} 段"),
    "item": ("item", "第 {} 项"),
    "table": ("table", "表 {}"),
    "listing": ("listing", "代码 {}"),
    "figure": ("figure", "图 {}"),
}


def place(text: str, section: str, en: str, zh: str, *, equations: str = "", **at: int) -> Place:
    """A place, with the paraphrase in English and Chinese. equations: numbers separated by spaces."""
    return Place(text, section, Bilingual(en, zh), tuple(equations.split()), **at)


def everything() -> Iterator[tuple[Text, Section, str, str]]:
    """All that a reader can point at: (text, section, kind, number) for each section, equation, table, listing, figure.

    kind is "section", "equation", "table", "listing" or "figure"; a section has the number "".
    """
    for text in TEXTS.values():
        for section in text.sections:
            yield text, section, "section", ""
            for number in section.equations:
                yield text, section, "equation", number
            for kind in ("table", "listing", "figure"):
                for index in range(getattr(section, f"{kind}s")):
                    yield text, section, kind, str(index + 1)


def _section(number: str, en: str, zh: str, equations: str = "", **counts: int) -> Section:
    return Section(number, Bilingual(en, zh), equations=tuple(equations.split()), **counts)


_CHAPTER = (
    _section("11", "the chapter in one sentence", "一句话总结", paragraphs=1),
    _section("11.1.1", "what a single head lacks", "单头的局限", items=4),
    _section("11.1.2", "several heads", "用多个头"),
    _section("11.1.3", "looking at a painting", "看画的类比", items=2),
    _section("11.2.1", "dividing d_model among heads", "切分维度", items=3, figures=1),
    _section("11.2.2", "why transpose", "为什么转置", items=4),
    _section("11.2.3", "Q, K and V are all split", "Q、K、V 都切分"),
    _section("11.2.4", "two ways to split", "两种切分方式", items=8, figures=1),
    _section("11.3.1", "each head by itself", "每个头独立计算", equations="1 2 3", figures=1),
    _section("11.3.2", "shapes, step by step", "逐步看形状"),
    _section("11.3.3", "one head of the figure", "图中的一个头", items=3),
    _section("11.4.1", "concatenation", "拼接", items=1, figures=1),
    _section("11.4.2", "the output projection", "输出投影", equations="1", items=3),
    _section("11.4.3", "why an output projection", "为什么要输出投影", items=3),
    _section("11.5.1", "before and after W_O", "W_O 前后", items=4, figures=1),
    _section("11.5.2", "the numbers before and after", "前后的数值", items=5),
    _section("11.6.1", "the whole flow", "完整流程", figures=1),
    _section("11.6.2", "PyTorch code", "PyTorch 代码", listings=1),
    _section("11.7.1", "parameters", "参数量", equations="1", items=1, tables=1),
    _section("11.7.2", "common configurations", "常见配置", items=2, tables=1),
    _section("11.8.1", "what heads attend to", "各头关注什么", tables=1),
    _section("11.8.2", "example of patterns", "模式示例"),
    _section("11.8.3", "redundancy", "冗余", items=3),
    _section("11.9.1", "cost against a single head", "与单头比较计算量", items=3),
    _section("11.9.2", "quality against a single head", "与单头比较效果", items=3),
    _section("11.9.3", "why not more heads", "为什么不用更多头", items=2),
    _section("11.10.1", "concepts", "概念", tables=1),
    _section("11.10.2", "shapes", "维度变化"),
    _section("11.10.3", "what to remember", "核心认知"),
    _section(
        "Part 3", "outcomes and summary of the part", "学习目标与本部分小结", equations="1 2 3", items=9, tables=1
    ),
)
_TUTORIAL = (
    _section("1", "idea", "思想", items=2),
    _section("2", "computation, step by step", "分步计算", items=2, listings=3),
    _section("3", "an example", "例子", items=3),
    _section("4", "code", "代码", listings=1),
    _section("5", "why it works", "为什么有效", items=3),
    _section("6", "against a single head", "与单头对比", tables=1),
    _section("7", "questions", "常见问题", items=4),
)
_NOTES = (
    _section("1", "the number of heads, and the idea", "头数与思想", paragraphs=3),
    _section("2", "dividing the features among heads", "特征划分", equations="1", items=6, figures=1),
    _section("3", "attention in each head", "每个头的注意力", paragraphs=3, equations="1", items=3),
    _section("4", "the weighted sum", "加权求和", equations="1", items=4, figures=1),
    _section("5", "concatenation", "拼接", equations="1", items=3),
    _section("6", "the output map", "线性变换", equations="1", items=4),
)
_TREATMENT = (
    _section("5.3", "introduction", "引言", paragraphs=2),
    _section("5.3.1", "from one head to several", "从单头到多头", paragraphs=3),
    _section("5.3.2", "definition", "定义", "5.3.1 5.3.2", paragraphs=4),
    _section("5.3.3", "parameters and sizes", "参数与维度", paragraphs=4),
    _section("5.3.4", "projections in parallel", "投影的并行计算", "5.3.3 5.3.4", paragraphs=5),
    _section("5.3.5", "tensor form", "张量形式", "5.3.5 5.3.6 5.3.7 5.3.8", paragraphs=6),
    _section("5.3.6", "two layers, and block-diagonal projections", "相邻两层与分块对角", "5.3.9 5.3.10", paragraphs=5),
    _section("5.3.7", "subspaces", "子空间", paragraphs=3),
    _section("5.3.8", "mixture of experts", "混合专家", paragraphs=3),
    _section("5.3.9", "specialisation", "分工与专业化", "5.3.11", paragraphs=4),
    _section("5.3.10", "number against size of heads", "头数与头维度", paragraphs=4),
    _section("5.3.11", "complexity", "复杂度", paragraphs=10),
    _section("5.3.12", "parallel hardware", "并行硬件", paragraphs=4),
    _section("5.3.13", "sparse heads", "稀疏激活", "5.3.12", paragraphs=4),
    _section("5.3.14", "groups, and attention between heads", "分组与跨头交互", "5.3.13 5.3.14", paragraphs=5),
    _section("5.3.15", "shared keys and values", "共享键值", "5.3.15", paragraphs=3),
    _section("5.3.16", "basis functions", "基函数", "5.3.16", paragraphs=3),
    _section("5.3.17", "information", "信息", paragraphs=4),
    _section("5.3.18", "convolution", "卷积", paragraphs=4),
    _section("5.3.19", "summary", "小结", paragraphs=5),
)
_DEMONSTRATION = (
    _section("00", "introduction", "引言", paragraphs=3),
    _section("01", "one head, as a search through files", "单头：查找文件的比喻", paragraphs=5),
    _section("02", "several heads, as several assistants", "多头：几位助手的比喻", paragraphs=9),
    _section(
        "03", "code, and how to read its heat maps", "代码，以及怎样读热图", paragraphs=22, listings=1, figures=12
    ),
    _section("04", "closing words", "结束语", paragraphs=3),
)
_PLAIN, _SIGN, _PART = Bilingual("{}", "{}"), Bilingual("§{}", "§{}"), Bilingual("part {}", "第 {} 部分")
_FIRST = ("tutorial", "tutorial 1", "1st tutorial", "教程", "教程 1", "第 1 篇教程")
_SECOND = ("notes", "tutorial 2", "2nd tutorial", "笔记", "教程 2", "第 2 篇教程")
_WATER_MARGIN = ("demonstration", "demo", "Water Margin", "演示", "水浒", "水浒传", "《水浒传》演示")
TEXTS: dict[str, Text] = {
    text.id: text
    for text in (
        Text("chapter", Bilingual("book chapter", "教科书"), _PLAIN, _CHAPTER, ("chapter", "book", "教材")),
        Text("tutorial", Bilingual("first tutorial", "教程一"), _PART, _TUTORIAL, _FIRST),
        Text("notes", Bilingual("second tutorial", "教程二"), _PART, _NOTES, _SECOND),
        Text("treatment", Bilingual("mathematical section", "数学推导"), _SIGN, _TREATMENT, ("mathematics", "推导")),
        Text("demonstration", Bilingual("Water Margin demonstration", "《水浒》演示"), _PART, _DEMONSTRATION,
            _WATER_MARGIN),
    )
}  # fmt: skip
