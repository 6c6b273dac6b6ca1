"""All texts of the report page, in English and Chinese."""

from headwise.errors import ConfigError

WORDS: dict[str, tuple[str, str]] = {
    "lead": (
        "The attention weights of every head on this text. They show which tokens a head attends to, not why the model "
        "produces its output; on another text the same head may attend to other tokens.",
        "本页展示每个注意力头在这段文本上的注意力权重。权重说明一个头关注哪些词元，不能解释模型为何给出这样的输出；换一段文本，同一个头的关注点可能不同。",
    ),
    "theme": ("Switch between light and dark", "切换浅色或深色"),
    "noscript": (
        "This page requires JavaScript, which is disabled.",
        "本页需要 JavaScript，但它已被禁用。",
    ),
    "controls": ("Display options", "显示选项"),
    "passage": ("Passage", "段落"),
    "layer": ("Layer", "层"),
    "head": ("Head", "头"),
    "layer_tip": ("Numbered from 0, starting at the input.", "从输入端起编号，从 0 开始。"),
    "head_tip": ("Numbered from 0 within the layer.", "在层内编号，从 0 开始。"),
    "layer_short": ("L{layer}", "第 {layer} 层"),
    "head_name": ("Layer {layer} · head {head}", "第 {layer} 层 · 第 {head} 头"),
    "sentence": ("Sentence", "句子"),
    "whole": ("Whole text", "全文"),
    "cells": ("Cells show", "单元格取值"),
    "mean": ("mean", "平均值"),
    "peak": ("maximum", "最大值"),
    "scale": ("Colour scale", "色标"),
    "linear": ("linear", "线性"),
    "sqrt": ("square root", "平方根"),
    "log": ("logarithm", "对数"),
    "range": ("Colour range", "颜色范围"),
    "own": ("this head", "当前头"),
    "all": ("all heads", "全部头"),
    "all_heads": ("All heads", "全部注意力头"),
    "grid_hint": (
        "One map per head: rows are layers, columns are heads. Select a map to enlarge it.",
        "每个头一张注意力图：行为层，列为头。点击可放大。",
    ),
    "pattern": ("Strongest pattern", "最强模式"),
    "pattern_tip": (
        "The pattern that best describes this head on this text.",
        "最符合这个头在这段文本上表现的模式。",
    ),
    "map_hint": (
        "Each row shows the keys that one query attends to. Hover over a cell for its value, click to pin the row, "
        "drag to zoom. Keyboard: arrow keys, Enter, Escape.",
        "每一行是一个查询对各个键的权重。悬停可查看数值，点击固定该行，拖动可放大。键盘：方向键、Enter、Esc。",
    ),
    "key_axis": ("key (attended token)", "键（被关注的词元）"),
    "query_axis": ("query (attending token)", "查询（当前词元）"),
    "query": ("query", "查询"),
    "key": ("key", "键"),
    "weight": ("weight", "权重"),
    "mean_of": ("mean weight in this cell", "单元格内的平均权重"),
    "peak_of": ("largest weight in this cell", "单元格内的最大权重"),
    "masked": ("masked: after the query", "已屏蔽：位于查询之后"),
    "save": ("Save PNG", "保存为 PNG"),
    "save_hint": ("Save the map of this head", "保存这个头的注意力图"),
    "bar_label": ("Colour bar from 0 to {top}", "色标：0 至 {top}"),
    "text": ("Text", "文本"),
    "looks": ("attends to", "关注"),
    "looked": ("attended by", "被关注"),
    "chosen": ("selected", "选中"),
    "strip_label": ("The text; use the left and right arrow keys to select a token", "文本；用左右方向键选择词元"),
    "queries_text": ("Text of the queries", "查询文本"),
    "keys_text": ("Text of the keys", "键文本"),
    "strip_hint": (
        "Hover over a token to see what it attends to and which tokens attend to it; click to pin it.",
        "悬停在词元上，可查看它关注哪些词元、又被哪些词元关注；点击可固定。",
    ),
    "unpin": ("Unpin", "取消固定"),
    "looks_most": ("{what} attends most to", "{what} 最关注"),
    "looked_most": ("Tokens that attend most to {what}", "最关注 {what} 的词元"),
    "numbers": ("Statistics of all heads", "全部头的统计量"),
    "numbers_hint": (
        "Measured on this text. Click a column header to sort, or a row to show that head.",
        "在这段文本上测得。点击列名可排序，点击某一行可显示对应的头。",
    ),
    "unit_tip": ("Unit: {unit}.", "单位：{unit}。"),
    "cell_hint": ("Each cell covers {cell} × {cell} tokens.", "每个单元格覆盖 {cell} × {cell} 个词元。"),
    "card": ("Statistics of layer {layer} · head {head}", "第 {layer} 层 · 第 {head} 头的统计量"),
    "card_hint": ("Blue: this head. Grey: all heads.", "蓝色：当前头；灰色：全部头。"),
    "roles_hint": ("Roles on this text: {roles}.", "在这段文本上的角色：{roles}。"),
    "no_role": ("none with enough confidence", "没有置信度足够的角色"),
    "role": ("Role", "角色"),
    "role_tip": (
        "Roles that the head plays on this text with high confidence, by published definitions, with their scores.",
        "按已发表的定义，这个头在这段文本上高置信度的角色；数字为得分。",
    ),
    "tabs": ("Views", "视图"),
    "tab_maps": ("Maps", "注意力图"),
    "tab_compare": ("Compare heads", "头的比较"),
    "alike": ("Similarity of heads", "头之间的相似度"),
    "alike_hint": (
        "Each cell is a pair of heads. Hover over it for its value, click it to show the head of its row. Heads that "
        "are similar on this text may differ on another.",
        "每个单元格对应一对头。悬停可查看数值，点击可显示该行的头。在这段文本上相似的头，换一段文本可能不同。",
    ),
    "alike_label": ("Pairs of heads: {name}", "各对头：{name}"),
    "compared": ("Compare by", "比较方式"),
    "order": ("Order", "排序"),
    "order_alike": ("by similarity", "按相似度"),
    "order_layers": ("by layer", "按层"),
    "pairs": ("Most similar pairs", "最相似的头"),
    "importance": ("Importance of heads", "头的重要性"),
    "importance_hint": (
        "How much the loss on this text changes without a head, or how sensitive it is to the head. Rows are layers, "
        "columns are heads; orange means that the loss decreases.",
        "去掉一个头后，模型在这段文本上的损失变化多少，或损失对该头有多敏感。行为层，列为头；橙色表示损失下降。",
    ),
    "measured_by": ("Method", "方法"),
    "matters_most": ("Most important", "最重要"),
    "matters_least": ("Least important", "最不重要"),
    "short_name": ("L{layer}H{head}", "{layer} 层 {head} 头"),
    "notes": ("Notes", "说明"),
    "footer": (
        "Written by headwise. This file is self-contained and loads nothing from the network.",
        "由 headwise 生成。此文件包含全部内容，不从网络加载任何资源。",
    ),
    "failure": (
        "This browser cannot show the weights ({error}). Use a browser from 2023 or later.",
        "此浏览器无法显示权重（{error}）。请使用 2023 年或更新的浏览器。",
    ),
}
LANGUAGES = ("en", "zh")


def check_language(lang: str) -> None:
    """Raise ConfigError for a language that reports are not written in."""
    if lang not in LANGUAGES:
        raise ConfigError(f"lang={lang!r}: expected {' or '.join(map(repr, LANGUAGES))}")


def words(lang: str) -> dict[str, str]:
    """The table in one language, "en" or "zh"."""
    return {key: both[LANGUAGES.index(lang)] for key, both in WORDS.items()}
