"""Chinese texts for the codes that the server sends: notes, errors and names of statistics. The page fills in the
values; a code without a Chinese text is shown in English."""

from headwise.lm.loading.remarks import map_code
from headwise.nn.named import design_of, names

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
    "about_entropy": "H_i = −Σ_j p_ij ln p_ij，以奈特计，对查询取平均；0 表示只关注一个键，ln m 表示均匀关注所有键。",
    "about_normalized_entropy": "H_i / ln(查询 i 可见的键数)，对至少可见两个键的查询取平均。",
    "about_effective_keys": "(Σ_j p_ij)² / Σ_j p_ij²，对查询取平均：权重分给多少个键（逆参与率）。",
    "about_max_logit": "softmax 之前的最大分数 max_ij S_ij，已乘缩放、已加掩码。",
    "about_mean_distance": "Σ_j p_ij·|i − j|，以词元计，对查询取平均（位置沿键轴计）。",
    "about_local_mass": "|i − j| ≤ 8 之内的 Σ p_ij，对查询取平均。",
    "about_sink_mass": "对第一个键的 p_ij，对查询取平均：注意力汇聚（sink）。",
    "about_previous_mass": "p_{i,i−1}，对能看到前一个键的查询取平均。",
    "about_self_mass": "p_{i,i}，对能看到自身的查询取平均。",
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
