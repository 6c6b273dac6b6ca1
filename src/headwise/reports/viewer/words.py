"""Every word of the viewer's page that is not the user's, in English and Chinese; what the report says too is taken
from there."""

from headwise.reports.words import LANGUAGES, words as report_words

SHARED = (
    "theme", "head_name", "layer_short", "short_name", "cells", "mean", "peak", "scale", "linear",
    "sqrt", "log", "range", "own", "all", "all_heads", "key_axis", "query_axis", "query", "key", "weight", "save",
    "bar_label",
)  # fmt: skip

WORDS: dict[str, tuple[str, str]] = {
    "title": ("Attention of long texts", "长文注意力"),
    "lead": (
        "Read a text and see where every head looks, from the whole map down to single weights. Weights show what a "
        "head reads on this text, not why the model answers as it does.",
        "读入一段文字，看每个头看向何处：从全图一直放大到单个权重。权重说明头在这段文字上读了什么，不说明模型为何如此回答。",
    ),
    "language": ("中文", "English"),
    "language_tip": ("Show this page in Chinese", "用英文显示本页"),
    "text_label": ("Text", "原文"),
    "text_hint": ("Type or paste a text, or open a file.", "输入或粘贴文字，或打开文件。"),
    "open_file": ("Open a file", "打开文件"),
    "read": ("Read", "读入"),
    "cancel": ("Cancel", "取消"),
    "another": ("Another text", "换一段文字"),
    "back_to_text": ("Keep this text", "保留当前文字"),
    "count": ("{n} characters", "{n} 个字符"),
    "count_limit": ("{n} of at most {limit} characters", "{n} 个字符，上限 {limit}"),
    "too_long": (
        "This text has {n} characters; this model takes at most {limit}.",
        "这段文字有 {n} 个字符；此模型最多读 {limit} 个。",
    ),
    "empty_text": ("There is no text to read yet.", "还没有可读的文字。"),
    "bad_file": ("{name} is not a text in UTF-8.", "{name} 不是 UTF-8 文本。"),
    "tokens": ("{n} tokens", "{n} 个词元"),
    "one_token": ("1 token", "1 个词元"),
    "trained": ("trained on {n} tokens at most", "训练长度 {n} 个词元"),
    "model_facts": ("{name} · {layers} layers · {heads} heads", "{name} · {layers} 层 · {heads} 个头"),
    "state_waiting": ("Waiting for the model", "等待模型"),
    "state_reading": (
        "Reading layer {layer} of {layers} · {drawn} of {heads} heads drawn",
        "正在读第 {layer} 层，共 {layers} 层 · 已绘制 {drawn} 个头，共 {heads} 个",
    ),
    "state_drawing": (
        "Drawing layer {layer} of {layers} · {drawn} of {heads} heads drawn",
        "正在绘制第 {layer} 层，共 {layers} 层 · 已绘制 {drawn} 个头，共 {heads} 个",
    ),
    "seconds_left": ("about {n} s left", "约剩 {n} 秒"),
    "minutes_left": ("about {n} min left", "约剩 {n} 分钟"),
    "cancelled": ("Reading was cancelled.", "已取消读取。"),
    "taken": (
        "This text was given up: it was cancelled, or a newer one took its place.",
        "这段文字已放弃：已被取消，或被更新的文字取代。",
    ),
    "failed": ("The text could not be read: {error}", "无法读取这段文字：{error}"),
    "heads_hint": (
        "One map a head: queries go down, keys across. Choose one to enlarge it.",
        "每头一图：纵向为查询，横向为键。选择一个以放大。",
    ),
    "order": ("Order", "次序"),
    "by_layer": ("by layer", "按层"),
    "largest": ("largest first", "从大到小"),
    "smallest": ("smallest first", "从小到大"),
    "statistic": ("Statistic", "统计量"),
    "none": ("none", "无"),
    "statistic_bar": ("Bar below a map: {name}, {low} to {high} {unit}", "图下色条：{name}，{low} 至 {high} {unit}"),
    "controls": ("What the map shows", "显示内容"),
    "previous_head": ("Previous head", "上一个头"),
    "next_head": ("Next head", "下一个头"),
    "auto": ("as in view", "随视野"),
    "from": ("from", "自"),
    "to": ("to", "至"),
    "fit": ("Whole map", "全图"),
    "zoom_in": ("Zoom in", "放大"),
    "zoom_out": ("Zoom out", "缩小"),
    "link": ("Copy link", "复制链接"),
    "link_tip": ("A link to this view; it opens while the server runs", "本视图的链接；服务器运行期间有效"),
    "linked": ("Link copied.", "链接已复制。"),
    "link_by_hand": ("The address of this page is the link.", "本页的地址即是链接。"),
    "keys_tip": ("Mouse and keys", "鼠标与按键"),
    "keys_help": (
        "Drag to move, wheel or + and − to zoom, double click to come closer, click to pin a cell. Arrow keys move, "
        "Enter sets a cursor for them, Esc lets go, 0 shows the whole map, [ and ] change the head, m the pooling, "
        "/ searches, n and N go on.",
        "拖动移动，滚轮或 + − 缩放，双击放大，单击固定一格。方向键移动，Enter 放置光标，Esc 取消，0 显示全图，"
        "[ 与 ] 换头，m 换汇总方式，/ 搜索，n 与 N 跳到下一处、上一处。",
    ),
    "map_label": ("Map of layer {layer}, head {head}", "第 {layer} 层第 {head} 头的图"),
    "mean_of": ("mean of {c}×{c} weights", "{c}×{c} 个权重的平均值"),
    "max_of": ("largest of {c}×{c} weights", "{c}×{c} 个权重的最大值"),
    "cell_mean": ("A cell is the mean of {c}×{c} weights.", "每格为 {c}×{c} 个权重的平均值。"),
    "cell_max": ("A cell is the largest of {c}×{c} weights.", "每格为 {c}×{c} 个权重的最大值。"),
    "level_exact": ("every weight", "逐个权重"),
    "level_mean": ("mean of {c}×{c}", "{c}×{c} 平均"),
    "level_max": ("maximum of {c}×{c}", "{c}×{c} 最大"),
    "nothing_allowed": ("nothing may look here", "此处无可看"),
    "not_there_yet": ("loading …", "载入中…"),
    "point_hint": ("Point at a cell, or tap it, to read it.", "指向或点按一格可读数。"),
    "search": ("Search", "搜索"),
    "search_label": ("Search the text", "搜索原文"),
    "search_hint": ("Search the text", "搜索原文"),
    "hits": ("{n} places", "{n} 处"),
    "hits_more": ("the first {n} places", "前 {n} 处"),
    "no_hits": ("“{q}” does not occur.", "没有“{q}”。"),
    "next": ("Next", "下一处"),
    "previous": ("Previous", "上一处"),
    "hit_of": ("{i} of {n}", "第 {i} 处，共 {n} 处"),
    "lost": ("No connection to headwise; trying again …", "与 headwise 失去连接，正在重试…"),
    "busy": ("headwise is busy; trying again …", "headwise 正忙，正在重试…"),
    "wrong_token": (
        "This page’s address has not the server’s token: open the address that headwise view printed.",
        "本页地址中的令牌与服务器不符：请打开 headwise view 打印的地址。",
    ),
    "gone": (
        "The server no longer keeps this text; read it again.",
        "服务器已不再保存这段文字；请重新读入。",
    ),
    "still_busy": ("headwise stayed busy; try again in a moment.", "headwise 一直很忙；请稍后再试。"),
    "refused": ("headwise answered with status {status}.", "headwise 返回状态 {status}。"),
    "footer": (
        "Served by headwise on this machine only; nothing leaves it.",
        "由 headwise 仅在本机提供；任何内容都不会离开本机。",
    ),
}


def words(lang: str) -> dict[str, str]:
    """The page's table in one language, "en" or "zh"."""
    report = report_words(lang)
    own = {key: both[LANGUAGES.index(lang)] for key, both in WORDS.items()}
    return {key: report[key] for key in SHARED} | own
