"""Chinese texts: one term for one thing, a space between Chinese and Latin, and Chinese punctuation."""

import re
from functools import cache
from pathlib import Path

import pytest

from headwise.text import entries as of_catalogue
from headwise_textbook.tour import wrapped_off

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "src" / "headwise", ROOT / "textbook" / "src" / "headwise_textbook"]
HAN = "[一-鿿]"
# what is not written → the term for it
TERMS = {
    "头宽": "头维度", "头大小": "头维度", "KV 头": "键值头", "KV头": "键值头", "缩并": "收缩", "小批次": "小批量",
    "随机失活": "dropout", "丢弃概率": "dropout 概率", "权重图": "注意力图", "词元嵌入": "词嵌入", "词符": "词元",
    "热力图": "热图", "隐向量": "潜向量", "潜变量": "潜向量", "自带模型": "内置模型", "前馈层": "前馈网络",
    "汇聚": "注意力汇", "首词元权重": "注意力汇的权重", "沉降": "注意力汇",
}  # fmt: skip
FAULTS = {
    "no space between Chinese and Latin": rf"{HAN}[A-Za-z0-9]|[A-Za-z0-9]{HAN}",
    "punctuation of English after Chinese": rf"{HAN}[,;:!?](?:\s|{HAN}|$)|{HAN}\.\.\.",
    "a space beside Chinese punctuation": r"[，。；：！？、] | [，。；：！？、]",
    "quotation marks of English": rf"\"{HAN}|{HAN}\"",
}


@cache  # and not of each worker that collects this
def texts() -> dict[str, str]:
    """The place of every text in which most letters are Chinese: of the catalogues, the guide and the claims."""
    found = {}
    for path in [path for source in SOURCES for path in sorted(source.rglob("*.po"))]:
        for (sense, english), chinese in of_catalogue(path.read_text(encoding="utf-8")).items():
            prose = re.sub(r"`[^`]*`", "·", wrapped_off(chinese))
            if is_chinese(prose):
                found[f"{path.name}: {sense} {english}"] = prose
    for path in sorted((ROOT / "docs" / "guide" / "zh").glob("*.md")):
        prose = re.sub(r"^ *```.*?^ *```|<!--.*?-->|^\$\$.*?^\$\$", "", path.read_text("utf-8"), flags=re.M | re.S)
        for number, line in enumerate(re.sub(r"`[^`]*`", "·", prose).splitlines()):
            if is_chinese(line) and not line.startswith(("|", "←", "[")):
                found[f"{path.relative_to(ROOT)}, line {number}"] = line
    for path in sorted(SOURCES[1].rglob("*.toml")):
        entries = re.findall(r'"""\\\n(.*?)"""|"([^"\n]*)"', path.read_text("utf-8"), re.DOTALL)
        for text in (re.sub(r"\\\n", "", long or short) for long, short in entries):
            if is_chinese(text):
                found[f"{path.relative_to(ROOT)}: {text[:20]}"] = re.sub(r"`[^`]*`", "·", text)
    return found


def is_chinese(text: str) -> bool:
    """Whether most letters of a text are Chinese."""
    return len(re.findall(HAN, text)) > 3 * len(re.findall(r"[A-Za-z]{3,} [a-z]{2,}", text))


def test_there_are_texts() -> None:
    assert len(texts()) > 1000


@pytest.mark.parametrize("fault", FAULTS)
def test_chinese_is_set_as_chinese(fault: str) -> None:
    found = {where: m[0] for where, text in texts().items() if (m := re.search(FAULTS[fault], text))}
    assert found == {}, fault


def test_one_term_for_one_thing() -> None:
    found = {where: (term, TERMS[term]) for where, text in texts().items() for term in TERMS if term in text}
    assert found == {}
