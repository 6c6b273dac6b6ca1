"""All texts of the viewer, in English and Chinese. Texts that the report uses too are taken from it."""

from headwise.reports.words import LANGUAGES, words as report_words

SHARED = (
    "theme", "head_name", "layer_short", "short_name", "cells", "mean", "peak", "scale", "linear",
    "sqrt", "log", "range", "own", "all", "all_heads", "key_axis", "query_axis", "query", "key", "weight", "save",
    "bar_label",
)  # fmt: skip

WORDS: dict[str, tuple[str, str]] = {
    "title": ("Attention on long texts", "长文本的注意力"),
    "lead": (
        "Load a text and see what every head attends to, from the whole map down to single weights. Weights show which "
        "tokens a head attends to, not why the model produces its output.",
        "载入一段文本，查看每个头的注意力，从全图一直放大到单个权重。权重说明一个头关注哪些词元，不能解释模型为何给出这样的输出。",
    ),
    "language": ("中文", "English"),
    "language_tip": ("Show this page in Chinese", "切换到英文"),
    "text_label": ("Text", "文本"),
    "text_hint": ("Type or paste a text, or open a file.", "输入或粘贴文本，或打开文件。"),
    "open_file": ("Open a file", "打开文件"),
    "read": ("Read", "载入"),
    "cancel": ("Cancel", "取消"),
    "another": ("Load another text", "载入其他文本"),
    "back_to_text": ("Keep this text", "保留当前文本"),
    "count": ("{n} characters", "{n} 个字符"),
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
    "order": ("Order", "排序"),
    "by_layer": ("by layer", "按层"),
    "largest": ("largest first", "从大到小"),
    "smallest": ("smallest first", "从小到大"),
    "statistic": ("Statistic", "统计量"),
    "none": ("none", "无"),
    "statistic_bar": ("Bar below a map: {name}, {low} to {high} {unit}", "图下色条：{name}，{low} 至 {high} {unit}"),
    "controls": ("Display options", "显示选项"),
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
    "hits": ("{n} matches", "{n} 处匹配"),
    "hits_more": ("first {n} matches", "前 {n} 处匹配"),
    "no_hits": ("No matches for “{q}”.", "未找到“{q}”。"),
    "next": ("Next", "下一处"),
    "previous": ("Previous", "上一处"),
    "hit_of": ("{i} of {n}", "第 {i} 处，共 {n} 处"),
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


def words(lang: str) -> dict[str, str]:
    """The page's table in one language, "en" or "zh"."""
    report = report_words(lang)
    own = {key: both[LANGUAGES.index(lang)] for key, both in WORDS.items()}
    return {key: report[key] for key in SHARED} | own
