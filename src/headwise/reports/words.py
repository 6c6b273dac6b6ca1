"""The words of the report, the viewer, pictures and tables, in English and Chinese; {name} marks a value.

Sentences that Python fills in are in `messages`; statistics, roles, designs and loaded models keep their own words.

>>> words("zh", "report")["head"], label("entropy", "zh")
('头', '熵')
"""

from headwise.stats import describe
from headwise.stats.base import UNITS
from headwise.table import HeadColumn
from headwise.wording import Bilingual, check_language, in_language

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


# Both pages, and the pictures.
SHARED: dict[str, tuple[str, str]] = {
    "theme": ("Switch between light and dark", "切换浅色或深色"),
    "head_name": ("Layer {layer} · head {head}", "第 {layer} 层 · 第 {head} 头"),
    "head_short": ("H{head}", "第 {head} 头"),
    "layer_short": ("L{layer}", "第 {layer} 层"),
    "short_name": ("L{layer}H{head}", "{layer} 层 {head} 头"),
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
    "key_axis": ("key (attended token)", "键（被关注的词元）"),
    "query_axis": ("query (attending token)", "查询（当前词元）"),
    "query": ("query", "查询"),
    "key": ("key", "键"),
    "weight": ("weight", "权重"),
    "save": ("Save PNG", "保存为 PNG"),
    "bar_label": ("Colour bar from 0 to {top}", "色标：0 至 {top}"),
    "controls": ("Display options", "显示选项"),
    "order": ("Order", "排序"),
    "text": ("Text", "文本"),
    "looks_most": ("“{what}” attends most to", "“{what}”最关注"),
    "looked_most": ("“{what}” is attended most by", "最关注“{what}”的词元"),
    "hits": ("{n} matches", "{n} 处匹配"),
    "hit_of": ("{i} of {n}", "第 {i} 处，共 {n} 处"),
    "none": ("none", "无"),
}
# The report page.
REPORT: dict[str, tuple[str, str]] = {
    "lead": (
        "The attention weights of every head on this text. They show which tokens a head attends to, not why the model "
        "produces its output; on another text the same head may attend to other tokens.",
        "本页展示每个注意力头在这段文本上的注意力权重。权重说明一个头关注哪些词元，不能解释模型为何给出这样的输出；换一段文本，同一个头的关注点可能不同。",
    ),
    "noscript": (
        "This page requires JavaScript, which is disabled.",
        "本页需要 JavaScript，但它已被禁用。",
    ),
    "passage": ("Passage", "段落"),
    "layer": ("Layer", "层"),
    "head": ("Head", "头"),
    "layer_tip": ("Numbered from 0, starting at the input.", "从输入端起编号，从 0 开始。"),
    "head_tip": ("Numbered from 0 within the layer.", "在层内编号，从 0 开始。"),
    "sentence": ("Sentence", "句子"),
    "whole": ("Whole text", "全文"),
    "full": ("Full size", "完整尺寸"),
    "full_hint": (
        "Show the characters of all rows and columns and the number in each cell; scroll to see the rest",
        "显示每行、每列的字符和每个单元格的数值；滚动查看其余部分",
    ),
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
    "mean_of": ("mean weight in this cell", "单元格内的平均权重"),
    "peak_of": ("largest weight in this cell", "单元格内的最大权重"),
    "masked": ("masked: after the query", "已屏蔽：位于查询之后"),
    "save_hint": ("Save what is shown", "保存当前显示的内容"),
    "save_png": ("Save the map as a picture (PNG)", "将注意力图保存为图片（PNG）"),
    "save_svg": ("Save as a vector graphic (SVG)", "保存为矢量图（SVG）"),
    "save_csv": ("Save the weights shown as a table (CSV)", "将显示的权重保存为表格（CSV）"),
    "find": ("Search the text", "搜索文本"),
    "next": ("Next match", "下一处匹配"),
    "previous": ("Previous match", "上一处匹配"),
    "text_as": ("Show the text as", "文本显示方式"),
    "as_strip": ("Text", "文本"),
    "as_arcs": ("Arcs", "弧线"),
    "arcs_label": (
        "Arcs from queries, on the left, to keys, on the right; use the up and down arrow keys to select a token",
        "从左侧查询到右侧键的弧线；用上下方向键选择词元",
    ),
    "everywhere": ("One token in all heads", "一个词元在全部头中"),
    "everywhere_hint": (
        "Pin a token to see in which head it attends most to which token.",
        "固定一个词元，可查看它在哪个头中最关注哪个词元。",
    ),
    "no_sink": ("without the first token and the token itself", "不计首词元与该词元自身"),
    "looks_where": ("Where “{what}” attends most, by head", "“{what}”在各头中最关注的词元"),
    "looked_where": ("What attends most to “{what}”, by head", "各头中最关注“{what}”的词元"),
    "writes": ("What this head writes", "这个头写入的内容"),
    "writes_about": (
        "The output of a head at a query is a sum over keys, projected into the residual stream. Direct effects only: "
        "later layers also read what a head writes.",
        "一个头在某个查询处的输出是对各个键求和，再投影到残差流。此处仅为直接作用：后面的层还会读取该头写入的内容。",
    ),
    "writes_hint": ("Pin a token, or point at a row of the map.", "请固定一个词元，或指向注意力图的一行。"),
    "writes_from": ("Written at “{what}” from each key, ‖Δ‖", "“{what}”处来自各个键的写入量 ‖Δ‖"),
    "writes_logits": (
        "Direct effect at “{what}” on logits, against their mean",
        "“{what}”处对 logit 的直接作用（相对于全部 logit 的均值）",
    ),
    "next_token": ("(next)", "（下一词元）"),
    "writes_channels": (
        "q·k of “{what}” and “{key}”: its {n} strongest of {of} channels",
        "“{what}”与“{key}”的 q·k：{of} 个通道中最强的 {n} 个",
    ),
    "channel": ("channel {c}", "通道 {c}"),
    "tab_sides": ("Side by side", "并排比较"),
    "sides_hint": (
        "Two heads, or one head on two texts. Texts with as many tokens are compared by position, others over the "
        "tokens that they have in common, in order. Both maps have the same colours.",
        "两个头，或同一个头在两段文本上。词元数相同的文本按位置比较，否则按两段文本依次共有的词元比较。两张图使用相同的色标。",
    ),
    "sides_bar": ("Colour bar of A and B", "A 与 B 的色标"),
    "difference_bar": ("Colour bar of the difference", "差值的色标"),
    "differences": ("Largest differences", "最大的差值"),
    "difference_same": (
        "Weights of A minus those of B: blue where A attends more, orange where B does.",
        "A 的权重减去 B 的权重：蓝色处 A 更关注，橙色处 B 更关注。",
    ),
    "difference_of": (
        "A minus B over {n} common positions, of {a} and {b}: blue where A attends more, orange where B does.",
        "A 减去 B，共同位置 {n} 个（分别有 {a} 与 {b} 个）：蓝色处 A 更关注，橙色处 B 更关注。",
    ),
    "no_difference": (
        "No difference: the two texts have no two tokens in common, or their cells cover different numbers of tokens.",
        "无法相减：两段文本没有两个共同的词元，或单元格所含词元数不同。",
    ),
    "looks": ("attends to", "关注"),
    "looked": ("attended by", "被关注"),
    "chosen": ("selected", "选中"),
    "image_label": ("The image; use the arrow keys to select a patch", "图像；用方向键选择图块"),
    "image_hint": (
        "Select a token to see its weights on the patches of the image, or a patch to see which tokens attend to it.",
        "选择一个词元可查看它与各图块之间的权重；选择一个图块可查看哪些词元关注它。",
    ),
    "image_patches": ("image, {rows} × {columns} patches", "图像，{rows} × {columns} 个图块"),
    "image_sum_looks": (
        "Weights of “{what}” on the patches, {sum} in all.",
        "“{what}”对各图块的权重，合计 {sum}。",
    ),
    "image_sum_looked": (
        "Weights of the patches on “{what}”, {sum} on average.",
        "各图块对“{what}”的权重，平均 {sum}。",
    ),
    "image_towards": ("Weights on the image", "图像上的权重"),
    "image_bar": ("Colour bar of the image", "图像的色标"),
    "save_image": ("Save the image with its weights (PNG)", "保存图像及其权重（PNG）"),
    "strip_label": ("The text; use the left and right arrow keys to select a token", "文本；用左右方向键选择词元"),
    "queries_text": ("Text of the queries", "查询文本"),
    "keys_text": ("Text of the keys", "键文本"),
    "strip_hint": (
        "Hover over a token to see what it attends to and which tokens attend to it; click to pin it.",
        "悬停在词元上，可查看它关注哪些词元、又被哪些词元关注；点击可固定。",
    ),
    "unpin": ("Unpin", "取消固定"),
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
# Maps, records and layers in notebooks.
NOTEBOOK: dict[str, tuple[str, str]] = {
    "small_hint": (
        "One picture per head: queries from top to bottom, keys from left to right; darker is larger, scaled to the "
        "largest weight of each head.",
        "每个头一张图：纵向为查询，横向为键；颜色越深权重越大，按每个头的最大权重缩放。",
    ),
    "more_heads": ("… and {count} more heads", "……另有 {count} 个头"),
    "statistics_hint": (
        "One picture per statistic: rows are layers, columns are heads; darker is larger.",
        "每个统计量一张图：行为层，列为头；颜色越深数值越大。",
    ),
    "step": ("step", "步骤"),
    "formula": ("formula", "公式"),
    "shape": ("shape", "形状"),
    "meaning": ("meaning", "含义"),
    "parameter": ("parameter", "参数"),
    "count": ("numbers", "数目"),
    "total": ("total", "合计"),
}
# The viewer.
VIEWER: dict[str, tuple[str, str]] = {
    "title": ("Attention on long texts", "长文本的注意力"),
    "lead": (
        "Load a text to see what every head attends to, from the whole map down to single weights. Weights show which "
        "tokens a head attends to, not why the model produces its output.",
        "载入一段文本，查看每个头的注意力，从全图一直放大到单个权重。权重说明一个头关注哪些词元，不能解释模型为何给出这样的输出。",
    ),
    "language": ("中文", "English"),
    "language_tip": ("Show this page in Chinese", "切换到英文"),
    "text_hint": ("Type or paste a text, or open a file.", "输入或粘贴文本，或打开文件。"),
    "open_file": ("Open a file", "打开文件"),
    "read": ("Read", "载入"),
    "cancel": ("Cancel", "取消"),
    "another": ("Load another text", "载入其他文本"),
    "back_to_text": ("Keep this text", "保留当前文本"),
    "count": ("{n} characters", "{n} 个字符"),
    "count_one": ("1 character", "1 个字符"),
    "count_limit": ("{n} of {limit} characters", "{n} / {limit} 个字符"),
    "too_long": (
        "The text has {n} characters; this model supports at most {limit}.",
        "文本有 {n} 个字符，超过了此模型的上限 {limit}。",
    ),
    "empty_text": ("Enter a text first.", "请先输入文本。"),
    "bad_file": ("{name} is not a UTF-8 text file.", "{name} 不是 UTF-8 文本文件。"),
    "tokens": ("{n} tokens", "{n} 个词元"),
    "one_token": ("1 token", "1 个词元"),
    "trained": ("trained on up to {n} tokens", "训练长度 {n} 个词元"),
    "model_facts": ("{name} · {layers} layers · {heads} heads", "{name} · {layers} 层 · {heads} 个头"),
    "state_waiting": ("Waiting for the model", "正在等待模型"),
    "state_reading": (
        "Computing layer {layer} of {layers} · {drawn} of {heads} heads drawn",
        "正在计算第 {layer} 层，共 {layers} 层 · 已绘制 {drawn} 个头，共 {heads} 个",
    ),
    "state_drawing": (
        "Drawing layer {layer} of {layers} · {drawn} of {heads} heads drawn",
        "正在绘制第 {layer} 层，共 {layers} 层 · 已绘制 {drawn} 个头，共 {heads} 个",
    ),
    "seconds_left": ("about {n} s left", "约剩 {n} 秒"),
    "minutes_left": ("about {n} min left", "约剩 {n} 分钟"),
    "cancelled": ("Cancelled.", "已取消。"),
    "taken": (
        "This text is no longer being computed: it was cancelled or replaced by a newer one.",
        "这段文本的计算已停止：已被取消，或被新的文本取代。",
    ),
    "failed": ("The text could not be loaded: {error}", "无法载入这段文本：{error}"),
    "heads_hint": (
        "One map per head: queries from top to bottom, keys from left to right. Select a map to enlarge it.",
        "每个头一张注意力图：纵向为查询，横向为键。点击可放大。",
    ),
    "by_layer": ("by layer", "按层"),
    "largest": ("largest first", "从大到小"),
    "smallest": ("smallest first", "从小到大"),
    "statistic": ("Statistic", "统计量"),
    "statistic_bar": ("Bar below a map: {name}, {low} to {high} {unit}", "图下色条：{name}，{low} 至 {high} {unit}"),
    "previous_head": ("Previous head", "上一个头"),
    "next_head": ("Next head", "下一个头"),
    "auto": ("current view", "当前视图"),
    "from": ("from", "自"),
    "to": ("to", "至"),
    "fit": ("Whole map", "全图"),
    "zoom_in": ("Zoom in", "放大"),
    "zoom_out": ("Zoom out", "缩小"),
    "link": ("Copy link", "复制链接"),
    "link_tip": ("Link to this view; valid while the server is running", "当前视图的链接，在服务器运行期间有效"),
    "linked": ("Link copied.", "链接已复制。"),
    "link_by_hand": ("Copy the address of this page instead.", "请直接复制本页地址。"),
    "keys_tip": ("Mouse and keyboard", "鼠标与键盘"),
    "keys_help": (
        "Drag to pan; use the wheel or + and − to zoom; double-click to zoom in; click to pin a cell. Arrow keys pan, "
        "Enter places a cursor, Esc removes it, 0 shows the whole map, [ and ] switch heads, m switches the pooling, "
        "/ searches, n and N go to the next and previous match.",
        "拖动可平移；滚轮或 + − 缩放；双击放大；单击固定单元格。方向键平移，Enter 放置光标，Esc 取消光标，0 显示全图，"
        "[ 与 ] 切换注意力头，m 切换池化方式，/ 搜索，n 与 N 跳到下一处、上一处匹配。",
    ),
    "map_label": ("Map of layer {layer}, head {head}", "第 {layer} 层第 {head} 头的注意力图"),
    "mean_of": ("mean of {c}×{c} weights", "{c}×{c} 个权重的平均值"),
    "max_of": ("largest of {c}×{c} weights", "{c}×{c} 个权重的最大值"),
    "cell_mean": ("Each cell is the mean of {c}×{c} weights.", "每个单元格为 {c}×{c} 个权重的平均值。"),
    "cell_max": ("Each cell is the maximum of {c}×{c} weights.", "每个单元格为 {c}×{c} 个权重的最大值。"),
    "level_exact": ("every weight", "逐个权重"),
    "level_mean": ("mean of {c}×{c}", "{c}×{c} 平均"),
    "level_max": ("maximum of {c}×{c}", "{c}×{c} 最大"),
    "nothing_allowed": ("masked", "已屏蔽"),
    "not_there_yet": ("loading …", "载入中…"),
    "point_hint": ("Hover over a cell, or tap it, for its value.", "悬停或点按单元格可查看数值。"),
    "search": ("Search", "搜索"),
    "search_label": ("Search the text", "搜索文本"),
    "search_hint": ("Search the text", "搜索文本"),
    "hits_more": ("first {n} matches", "前 {n} 处匹配"),
    "no_hits": ("No matches for “{q}”.", "未找到“{q}”。"),
    "next": ("Next", "下一处"),
    "previous": ("Previous", "上一处"),
    "lost": ("Connection to headwise lost; retrying …", "与 headwise 的连接已断开，正在重试…"),
    "busy": ("headwise is busy; retrying …", "headwise 正忙，正在重试…"),
    "wrong_token": (
        "The token in the address of this page is wrong. Open the address that headwise view printed.",
        "本页地址中的令牌不正确。请打开 headwise view 打印的地址。",
    ),
    "gone": (
        "The server no longer has this text; load it again.",
        "服务器已不再保存这段文本，请重新载入。",
    ),
    "still_busy": ("headwise is still busy; try again later.", "headwise 仍然繁忙，请稍后再试。"),
    "refused": ("headwise returned status {status}.", "headwise 返回状态码 {status}。"),
    "footer": (
        "Served by headwise on this machine only; no data leaves it.",
        "由 headwise 仅在本机提供，数据不会离开本机。",
    ),
}
# Columns that are no statistics of the registry.
COLUMNS: dict[str, tuple[str, str]] = {
    "loss without it": ("loss without it", "去掉后的损失变化"),
    "gradient": ("gradient", "梯度"),
    "padding_mass": ("padding mass", "填充权重"),
}
CORPUS_PAGE = {name: REPORT[name] for name in ("noscript", "layer", "head", "footer", "failure")}
PAGES = {
    "report": REPORT | PASSAGES, "viewer": VIEWER, "notebook": NOTEBOOK, "corpus": CORPUS_PAGE | PASSAGES | CORPUS,
}  # fmt: skip


def words(lang: str, page: str) -> dict[str, str]:
    """The words of the page "report", "viewer" or "corpus", or of the "notebook", those of all included, in "en" or
    "zh"."""
    check_language(lang)
    return {key: both[lang == "zh"] for key, both in {**SHARED, **PAGES[page]}.items()}


def label(name: str, lang: str, *, short: bool = False) -> str:
    """What the column of that name is called."""
    found = describe(name, lang)
    if found is not None:
        return found.short if short else found.label
    return COLUMNS[name][lang == "zh"] if name in COLUMNS else name.replace("_", " ")


def unit(text: str, lang: str) -> str:
    """A unit, in that language."""
    return {**UNITS, "cosine": "余弦"}.get(text, text) if lang == "zh" else text


def description(name: str, column: HeadColumn, lang: str) -> str:
    """What a column is; that of a known statistic in its own words."""
    english, found = describe(name, "en"), describe(name, lang)
    if english is not None and found is not None and column.description == english.summary:
        return found.summary
    return in_language(column.description, lang)
