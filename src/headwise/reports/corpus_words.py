"""Words of the passages of a corpus, in English and Chinese: in the page of a sweep, in reports and in the terminal."""

from headwise.stats import describe
from headwise.wording import Bilingual

PASSAGES: dict[str, tuple[str, str]] = {
    "passages": ("Strongest passages in the corpus", "语料中最强的段落"),
    "passages_about": (
        "Each passage is one query (outlined) and the text around it, tinted by what the query attends to. Strongest: "
        "where this head is strongest in the corpus, at most one passage of a text. Sampled: at random, from the same "
        "windows for all heads, which shows what the head usually does.",
        "每个段落是一个查询（加框）及其周围的文本，底色表示该查询关注的词元。最强：语料中这个头最强之处，每篇文本至多一段；"
        "抽样：随机抽取，各头的窗口相同，显示这个头平常的表现。",
    ),
    "passages_by_weight": (
        "Strength: the largest weight of a query on a token of the text other than the first of the window and the "
        "query itself.",
        "强度：查询在文本词元上的最大权重，不计窗口的首词元与查询自身。",
    ),
    "passages_by": ("Strength: {name} of the query.", "强度：该查询的{name}。"),
    "passages_strongest": ("Strongest", "最强"),
    "passages_sampled": ("Sampled", "抽样"),
    "list_comma": (", ", "，"),
    "passages_none": ("This head was not measured, or no query has a strength.", "未测量这个头，或没有查询有强度。"),
    "passage_place": ("{file}, {where}, token {at}", "{file}，{where}，第 {at} 个词元"),
    "passage_attends": ("“{query}” → {keys}", "“{query}” → {keys}"),
    "passage_key": ("“{token}” {weight}", "“{token}” {weight}"),
}
CORPUS: dict[str, tuple[str, str]] = {
    "corpus_lead": (
        "Every head over a corpus: the mean of each statistic over all queries, and the passages in which the head is "
        "strongest.",
        "整个语料上的每个头：各统计量对全部查询的平均，以及这个头最强的段落。",
    ),
    "scatter": ("Heads by two statistics", "按两个统计量排列的头"),
    "scatter_hint": (
        "Each point is a head. Select one to read its passages; with the keyboard, the arrow keys move between heads.",
        "每个点是一个头。点击可阅读它的段落；用键盘时，方向键在各头之间移动。",
    ),
    "scatter_label": ("Heads by {x} and {y}; colour: {colour}", "头按{x}与{y}排列；颜色：{colour}"),
    "across": ("Across", "横轴"),
    "up": ("Up", "纵轴"),
    "colour": ("Colour", "颜色"),
    "contrast": ("contrast of passages", "段落强度之差"),
    "contrast_about": (
        "Mean strength of the strongest passages minus that of the sampled ones: large for a head that attends "
        "strongly in few passages.",
        "最强段落与抽样段落的平均强度之差：只在少数段落中强烈关注的头，此值较大。",
    ),
    "no_passages": (
        "The sweep kept no passages; run it without --passages 0.",
        "这次测量没有保留段落；去掉 --passages 0 可重新测量。",
    ),
}
# Places of texts in files, as `headwise.corpus` writes them.
PLACES: dict[str, tuple[str, str]] = {
    "byte": ("byte {at}", "第 {at} 字节"),
    "row": ("row {at}", "第 {at} 行"),
}
TERMINAL: dict[str, tuple[str, str]] = {
    "distinctive": (
        "Heads that attend strongly in few passages ({by} in the strongest passage; in brackets: mean of the sample):",
        "只在少数段落中强烈关注的头（最强段落中的{by}；括号内为抽样平均）：",
    ),
}


def by_name(by: str) -> Bilingual:
    """What a strength is called."""
    words = [describe(by, lang) for lang in ("en", "zh")]
    if words[0] is None or words[1] is None:
        return Bilingual("weight", "权重")
    return Bilingual(words[0].label, words[1].label)
