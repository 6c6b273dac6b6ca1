"""In Chinese what the server says in English with a code: notes, refusals, and the statistics' names. The page fills in
the values and shows them; a code that is not here is shown in English."""

from headwise.lm.loading.remarks import map_code
from headwise.nn.named import design_of, names

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
    # Statistics.
    "name_entropy": "熵",
    "name_normalized_entropy": "归一化熵",
    "name_effective_keys": "有效键数",
    "name_max_logit": "最大分数",
    "name_mean_distance": "平均距离",
    "name_local_mass": "邻近权重",
    "name_sink_mass": "首词元权重",
    "name_previous_mass": "前一词元权重",
    "name_self_mass": "自身权重",
    "about_entropy": "H_i = −Σ_j p_ij ln p_ij，以奈特计，对查询取平均；0 表示只看一个键，ln m 表示各键相同。",
    "about_normalized_entropy": "H_i / ln(查询 i 可见的键数)，对至少可见两个键的查询取平均。",
    "about_effective_keys": "(Σ_j p_ij)² / Σ_j p_ij²，对查询取平均：权重分给多少个键（逆参与率）。",
    "about_max_logit": "softmax 之前的最大分数 max_ij S_ij，已乘缩放、已加掩码。",
    "about_mean_distance": "Σ_j p_ij·|i − j|，以词元计，对查询取平均（位置在键轴上）。",
    "about_local_mass": "|i − j| ≤ 8 之内的 Σ p_ij，对查询取平均。",
    "about_sink_mass": "对第一个键的 p_ij，对查询取平均：注意力汇。",
    "about_previous_mass": "p_{i,i−1}，对可见前一键的查询取平均。",
    "about_self_mass": "p_{i,i}，对可见自身之键的查询取平均。",
    "unit_nats": "奈特",
    "unit_share": "比例",
    "unit_keys": "个键",
    "unit_logit": "分数",
    "unit_tokens": "个词元",
    "unit_mass": "权重",
}


def in_chinese() -> dict[str, str]:
    """All of it, with what head designs say of their maps."""
    maps = {map_code(name): design_of(name).notes.map for name in names()}
    return IN_CHINESE | {code: said.zh for code, said in maps.items() if said is not None}
