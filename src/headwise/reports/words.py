"""Every word of the page and the terminal table that is not the user's, in English and Chinese."""

WORDS: dict[str, tuple[str, str]] = {
    "lead": (
        "Attention weights on this input: where each head looks, token by token. They show what a head reads, "
        "not why the model answers as it does; on another text the same head may look elsewhere.",
        "本页是各注意力头在这段输入上的权重：每个头的每个词元看向哪里。它说明头读了什么，不说明模型为何如此回答；换一段文字，同一个头可能看向别处。",
    ),
    "theme": ("Light or dark", "浅色或深色"),
    "noscript": (
        "This page draws its pictures with JavaScript, which is switched off.",
        "本页用 JavaScript 绘图，而它已被关闭。",
    ),
    "controls": ("What to show", "显示内容"),
    "passage": ("Passage", "段落"),
    "layer": ("Layer", "层"),
    "head": ("Head", "头"),
    "layer_tip": ("Counted from 0, from the input.", "从 0 数起，自输入端。"),
    "head_tip": ("Counted from 0 in its layer.", "层内编号，从 0 数起。"),
    "layer_short": ("L{layer}", "{layer} 层"),
    "head_name": ("Layer {layer} · head {head}", "第 {layer} 层 · 第 {head} 头"),
    "sentence": ("Sentence", "句子"),
    "whole": ("Whole text", "全文"),
    "cells": ("Cells show", "格子显示"),
    "mean": ("mean", "平均值"),
    "peak": ("maximum", "最大值"),
    "scale": ("Colour scale", "色标"),
    "linear": ("linear", "线性"),
    "sqrt": ("square root", "平方根"),
    "log": ("logarithm", "对数"),
    "range": ("Colour range", "色域"),
    "own": ("this head’s", "本头"),
    "all": ("all heads’", "全部头"),
    "all_heads": ("All heads", "全部注意力头"),
    "grid_hint": (
        "One picture a head: rows are layers, columns are heads. Choose one to enlarge it.",
        "每头一图：行是层，列是头。选择一个以放大。",
    ),
    "pattern": ("Strongest pattern", "最强模式"),
    "pattern_tip": (
        "The pattern that this head follows most on this input.",
        "这个头在这段输入上最符合的模式。",
    ),
    "map_hint": (
        "Each row is a query and where it looks. Point at a cell to read it, click to pin its row, drag to zoom. "
        "With the keyboard: arrow keys, Enter, Escape.",
        "每一行是一个查询及其去向。指向格子可读数，点击固定该行，拖动放大。键盘：方向键、Enter、Esc。",
    ),
    "key_axis": ("key: what is looked at", "键：被看的词元"),
    "query_axis": ("query: what looks", "查询：在看的词元"),
    "query": ("query", "查询"),
    "key": ("key", "键"),
    "weight": ("weight", "权重"),
    "mean_of": ("mean weight in this cell", "此格平均权重"),
    "peak_of": ("largest weight in this cell", "此格最大权重"),
    "masked": ("ahead of the query: masked", "在查询之后：被遮挡"),
    "save": ("Save PNG", "存为 PNG"),
    "save_hint": ("Save this head’s picture", "保存此头的图"),
    "bar_label": ("Colour bar from 0 to {top}", "色标：0 至 {top}"),
    "text": ("Text", "原文"),
    "looks": ("where it looks", "它看向"),
    "looked": ("what looks at it", "看向它"),
    "chosen": ("chosen", "所选"),
    "strip_label": ("The text; left and right arrow keys choose a token", "原文；左右方向键选词元"),
    "queries_text": ("What looks", "在看的文本"),
    "keys_text": ("What is looked at", "被看的文本"),
    "strip_hint": (
        "Point into the text to see where that looks and what looks at it; click to pin it.",
        "指向文中一处，看它看向哪里、谁看向它；点击固定。",
    ),
    "unpin": ("Unpin", "取消固定"),
    "looks_most": ("{what} looks most at", "{what} 最常看向"),
    "looked_most": ("Looks most at {what}", "最看 {what} 的"),
    "numbers": ("All heads in numbers", "全部头的统计"),
    "numbers_hint": (
        "Measured on this input. Click a column to sort, a row to show that head.",
        "在这段输入上测得。点击列名排序，点击行显示该头。",
    ),
    "unit_tip": ("Unit: {unit}.", "单位：{unit}。"),
    "cell_hint": ("Each cell covers {cell} × {cell} tokens.", "每格为 {cell} × {cell} 个词元。"),
    "card": ("Layer {layer} · head {head} in numbers", "第 {layer} 层 · 第 {head} 头的统计"),
    "card_hint": ("Blue: this head. Grey: all heads.", "蓝：本头；灰：全部头。"),
    "roles_hint": ("Roles on this input: {roles}.", "在这段输入上的角色：{roles}。"),
    "no_role": ("none that we are sure of", "没有可确信的"),
    "role": ("Role", "角色"),
    "role_tip": (
        "What the head is sure to do on this input, by published definitions; the number is its score.",
        "按已发表的定义，这个头在这段输入上确实在做的事；数字是得分。",
    ),
    "tabs": ("Views", "视图"),
    "tab_maps": ("Maps", "权重图"),
    "tab_compare": ("Heads compared", "头的比较"),
    "alike": ("How alike the heads are", "各头有多相似"),
    "alike_hint": (
        "A cell is a pair of heads. Point at it to read it, click it to see the head of its row. Heads that are alike "
        "on this input may differ on another.",
        "每格是一对头。指向可读数，点击查看该行的头。在这段输入上相似的头，换一段可能不同。",
    ),
    "alike_label": ("Head by head: {name}", "头与头：{name}"),
    "compared": ("Compare by", "比较方式"),
    "order": ("Order", "次序"),
    "order_alike": ("like beside like", "相似者相邻"),
    "order_layers": ("by layer", "按层"),
    "pairs": ("Most alike", "最相似"),
    "importance": ("How much each head matters", "每个头有多重要"),
    "importance_hint": (
        "What the loss on this input loses without a head, or how fast it changes with the head. Rows are layers, "
        "columns are heads; orange: the loss would fall.",
        "去掉一个头后，这段输入的损失怎样变化，或损失随该头变化的速度。行是层，列是头；橙色：损失反而下降。",
    ),
    "measured_by": ("Measured by", "度量方式"),
    "matters_most": ("Matters most", "最重要"),
    "matters_least": ("Matters least", "最不重要"),
    "short_name": ("L{layer}H{head}", "{layer} 层 {head} 头"),
    "notes": ("Notes", "说明"),
    "footer": (
        "Written by headwise. This file holds everything it shows and loads nothing from elsewhere.",
        "由 headwise 生成。此文件自带全部内容，不从别处加载任何东西。",
    ),
    "failure": (
        "This browser cannot show the weights ({error}). A browser of 2023 or later can.",
        "此浏览器无法显示权重（{error}）。请用 2023 年或更新的浏览器。",
    ),
}
LANGUAGES = ("en", "zh")


def words(lang: str) -> dict[str, str]:
    """The table in one language, "en" or "zh"."""
    return {key: both[LANGUAGES.index(lang)] for key, both in WORDS.items()}
