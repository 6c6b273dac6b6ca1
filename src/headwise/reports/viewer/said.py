"""Chinese texts for the codes that the server sends: notes, errors and names of statistics. The page fills in the
values; a code without a Chinese text is shown in English."""

from headwise.lm.loading.remarks import map_code
from headwise.nn.named import design_of, names
from headwise.stats import describe, shown_in

IN_CHINESE: dict[str, str] = {
    # Notes on a model or a text: headwise.lm.loading.remarks.
    "untrained_length": "此模型的训练长度为 {trained} 个词元；超出部分未经训练。",
    "no_next_token": "此模型不预测下一个词元，因此无法用损失衡量各头的重要性。",
    "read_as_bytes": "有 {count} 个字符不在模型的词表中，按 UTF-8 字节读入；每个字符仍完整显示。",
    "unknown_tokens": "共 {of} 个词元，其中 {count} 个不在模型的词表中；模型将它们视为 {sign}，此处显示原文。",
    "parts_of_characters": "由多个词元组成的字符完整显示：有 {count} 个词元在字符内部结束。",
    "not_finite": "第 {layer} 层第 {head} 头：{count} 个查询的分数为 NaN 或无穷大，图中不显示。",
    # Errors.
    "too_many_characters": "文本有 {n} 个字符；上限为 {characters} 个字符、{tokens} 个词元：{why}。",
    "too_many_tokens": "文本有 {n} 个词元；上限为 {tokens} 个：{why}。",
    "limit_of_option": "由 --max-tokens 设定",
    "limit_of_positions": "{name} 的位置编码只有这么长",
    "limit_of_memory": "超出本机的可用内存",
    "too_large": "请求过大：文本最多 {characters} 个字符。",
    "unreadable": "无法载入这段文本：{sentence}",
    "no_text": "服务器没有这段文本；服务器可能已重新启动。",
    "no_head": "第 {layer} 层没有第 {head} 头。",
    "still_reading": "这段文本仍在计算中，请稍后再试。",
    "failed": "无法载入这段文本：{error}",
    "failure": "{sentence}",
    "no_memory": "内存不足，无法计算这段文本；请换一段较短的文本。",
    "given_up": "这段文本的计算已停止：已被取消，或被新的文本取代。",
    "busy": "同时请求的图块过多，请稍后再试。",
    "misfit": "请求无效：{sentence}",
    "broke": "headwise 发生内部错误，详情见终端。",
}


def in_chinese() -> dict[str, str]:
    """All of it, with what head designs say of their maps, and the names, descriptions and units of the statistics that
    the viewer shows."""
    maps = {map_code(name): design_of(name).notes.map for name in names()}
    found = IN_CHINESE | {code: said.zh for code, said in maps.items() if said is not None}
    for name in shown_in("viewer"):
        english, words = describe(name), describe(name, "zh")
        if english is not None and words is not None:
            found |= {f"name_{name}": words.label, f"about_{name}": words.about, f"unit_{english.unit}": words.unit}
    return found
