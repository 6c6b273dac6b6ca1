"""In Chinese what the server says in English with a code: notes, refusals, and the statistics' names. The page fills in
the values and shows them; a code that is not here is shown in English."""

from headwise.lm.loading.remarks import map_code
from headwise.nn.named import design_of, names
from headwise.stats import describe, shown_in

IN_CHINESE: dict[str, str] = {
    # Of a model or a text: headwise.lm.loading.remarks.
    "untrained_length": "此模型训练时每次读 {trained} 个词元；更远处的行为未经训练。",
    "no_next_token": "此模型不预测下一个词元，因此没有损失可说明各头的重要性。",
    "read_as_bytes": "有 {count} 个字符不在模型的词表中，按 UTF-8 字节读入；每个字符仍完整显示。",
    "unknown_tokens": "共 {of} 个词元，其中 {count} 个不在模型的词表中；模型将它们读作 {sign}，此处显示原文。",
    "parts_of_characters": "由几个词元组成的字符完整显示：有 {count} 个词元止于字符之内。",
    "not_finite": "第 {layer} 层第 {head} 头：{count} 个查询的分数为 NaN 或无穷，图中不显示。",
    # Refusals.
    "too_many_characters": "这段文字有 {n} 个字符；最多接受 {characters} 个字符、读 {tokens} 个词元：{why}。",
    "too_many_tokens": "这段文字有 {n} 个词元；最多读 {tokens} 个：{why}。",
    "limit_of_option": "由 --max-tokens 设定",
    "limit_of_positions": "{name} 只学过这么多位置",
    "limit_of_memory": "再多则超出本机的空闲内存",
    "too_large": "请求过大：一段文字最多 {characters} 个字符。",
    "unreadable": "无法读取这段文字：{sentence}",
    "no_text": "服务器没有这段文字；它可能已重新启动。",
    "no_head": "第 {layer} 层没有第 {head} 头。",
    "still_reading": "这段文字仍在读取中；请稍后再试。",
    "failed": "无法读取这段文字：{error}",
    "failure": "{sentence}",
    "no_memory": "内存不足以读这段文字；请换一段较短的。",
    "given_up": "这段文字已放弃：已被取消，或被更新的文字取代。",
    "busy": "同时请求的图块过多；请稍后再试。",
    "misfit": "请求不合要求：{sentence}",
    "broke": "headwise 在此出错；终端中有详情。",
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
