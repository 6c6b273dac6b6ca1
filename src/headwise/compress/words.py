"""The words of plans and evaluations of changed models, in English and in Chinese.

>>> term("of_heads", count=3, of=32, share=0.09375).zh
'32 个头中的 3 个（9.4%）'
"""

from headwise.wording import Message

TERMS: dict[str, tuple[str, str]] = {
    # Facts.
    "model": ("model", "模型"),
    "text": ("text", "文本"),
    "why": ("selected", "依据"),
    "go": ("remove", "移除"),
    "method": ("method", "方法"),
    "short if": ("short if", "短缓存的条件"),
    "short are": ("short", "使用短缓存"),
    "expected": ("expected", "预期"),
    "sizes": ("{layers} layers × {heads} heads ({design})", "{layers} 层 × {heads} 头（{design}）"),
    "named_sizes": ("{name}, {sizes}", "{name}，{sizes}"),
    "texts": (
        "{name}: {decide} windows of {context} tokens to choose heads; of the last {share:.0%}, {foretell} to estimate "
        "the loss and {judge} for the evaluation",
        "{name}：{decide} 个窗口（各 {context} 个词元）用于决策；最后 {share:.0%} 中，{foretell} 个用于预估，"
        "{judge} 个用于评估",
    ),
    "held_texts": (
        "{name}: of the last {share:.0%}, {foretell} windows of {context} tokens to estimate the loss and {judge} for "
        "the evaluation",
        "{name}：最后 {share:.0%} 中，{foretell} 个窗口（各 {context} 个词元）用于预估，{judge} 个用于评估",
    ),
    "by": ("by {by}: {what}, lowest first", "按 {by}：{what}，从小到大"),
    "named": ("by name", "由用户指定"),
    "of_heads": ("{count} of {of} heads ({share:.1%})", "{of} 个头中的 {count} 个（{share:.1%}）"),
    "of_key_heads": ("{count} of {of} KV heads", "{of} 个键值头中的 {count} 个"),
    "how": ("{method}: {what}", "{method}：{what}"),
    "short_condition": (
        "the first {sinks} and the last {window} tokens hold {share:.1%} of the attention of every query head that "
        "reads the keys",
        "读取这些键的每个查询头，其注意力的 {share:.1%} 落在最前 {sinks} 个与最近 {window} 个词元上",
    ),
    "loss_change": (
        "loss {before:.4f} → {after:.4f} ({change:+.2f} %)",
        "损失 {before:.4f} → {after:.4f}（{change:+.2f} %）",
    ),
    # Methods.
    "ablation": ("increase of the loss without it, one head at a time", "逐一去掉每个头时损失的增加"),
    "gradient": ("|dL/dξ| of a factor ξ on its output", "对该头输出上的系数 ξ 的 |dL/dξ|"),
    "taylor": ("Σ|o · dL/do| over tokens", "对词元求和的 Σ|o · dL/do|"),
    "gates": ("log α of a learned gate with a penalty on open gates", "学习该头是否值得保留的门控的 log α"),
    "mean": ("the mean of adjacent heads", "相邻头的平均"),
    "first": ("the first of adjacent heads", "相邻头中的第一个"),
    "cluster": (
        "the mean of heads with similar W_K and W_V (cosine)",
        "W_K 与 W_V 相近（余弦）的头的平均",
    ),
    "svd": (
        "the smallest error of W_Q W_Kᵀ and W_V W_O, for groups of heads with similar subspaces",
        "在张成相近空间的头之间，使 W_Q W_Kᵀ 与 W_V W_O 误差最小的合并",
    ),
    # Titles and columns.
    "plan_prune": ("Plan: heads to remove", "计划：要移除的头"),
    "plan_convert": ("Plan: KV heads to merge", "计划：要共享的键值头"),
    "plan_budget": ("Plan: short caches", "计划：短缓存"),
    "judged": (
        "Evaluation: the written model is loaded and compared with the original",
        "评估：重新读入写出的模型，与原模型对照",
    ),
    "before_after": ("Before and after", "修改前后"),
    "expected_curve": (
        "Expected: loss from the curve, other numbers by formula",
        "预期：损失取自曲线，其余按公式计算",
    ),
    "expected_measured": (
        "Expected before healing: measured loss, other numbers by formula",
        "恢复训练前的预期：损失为实测，其余按公式计算",
    ),
    "heads_named": ("Heads, as LAYER.HEAD", "头（层.头）"),
    "heads_important": (
        "Heads, as LAYER.HEAD, with their importance ({unit})",
        "头（层.头）及其重要性（{unit}）",
    ),
    "curve": ("Loss against heads kept", "损失与保留头数的关系"),
    "key_heads": ("KV heads", "键值头"),
    "bytes_title": ("Keys and values of all layers, by formula, in float32", "全部层的键与值，按公式计算，float32"),
    "loss": ("loss", "损失"),
    "rise": ("rise", "增幅"),
    "reads tok/s": ("reads tok/s", "读入 词元/秒"),
    "writes tok/s": ("writes tok/s", "生成 词元/秒"),
    "parameters": ("parameters", "参数量"),
    "KV B/token": ("KV B/token", "键值缓存 字节/词元"),
    "layer": ("layer", "层"),
    "heads": ("heads", "头数"),
    "that go": ("removed", "移除的头"),
    "kept": ("kept", "保留"),
    "random": ("random", "随机平均"),
    "least": ("lowest", "随机最小"),
    "most": ("highest", "随机最大"),
    "better": ("better", "优于随机"),
    "key heads": ("KV heads", "键值头"),
    "error of W_Q W_Kᵀ": ("error of W_Q W_Kᵀ", "W_Q W_Kᵀ 的误差"),
    "error of W_V W_O": ("error of W_V W_O", "W_V W_O 的误差"),
    "shared by": ("shared by", "共享者"),
    "short": ("short", "短缓存"),
    "least kept": ("lowest kept", "最小保留"),
    "mean kept": ("mean kept", "平均保留"),
    "last tokens of each key head": ("last tokens kept by each KV head", "各键值头保留的最近词元数"),
    "tokens": ("tokens", "词元数"),
    "all kept": ("all kept", "全部保留"),
    "with the budget": ("with the budget", "按预算"),
    "saved": ("saved", "节省"),
    # Rows.
    "now": ("now", "现在"),
    "before": ("before", "修改前"),
    "pruned": ("pruned", "剪枝后"),
    "merged": ("merged", "合并后"),
    "healed": ("healed", "恢复训练后"),
    "all tokens": ("all tokens", "全部词元"),
    "budget": ("budget", "按预算"),
    "change": ("change", "变化"),
    "keys_too": ("{before} → {after}, KV heads {kv} → {kv_after}", "{before} → {after}，键值头 {kv} → {kv_after}"),
    "of": ("{count} of {of}", "{of} 中的 {count}"),
    "all": ("all", "全部"),
    "no": ("no", "否"),
    "than mean": ("than mean", "优于平均"),
    "than all": ("than all", "优于全部"),
    # Notes.
    "judged_note": (
        "Loss in nats per token on text that was not used to choose; ± is the standard error of the rise over batches "
        "of the text. Speeds are medians of {rounds} alternating rounds, threads: {threads}: {read} tokens read at "
        "once, {written} generated one by one. Bytes of keys and values in float32.",
        "损失单位为奈特/词元，取自未用于决策的文本；± 为增幅在各批文本上的标准误。"
        "速度为 {rounds} 轮的中位数，各模型轮流测量，使用 {threads} 个线程：一次读入 {read} 个词元，"
        "逐个生成 {written} 个。键与值的字节数按 float32 计。",
    ),
    "merges_note": (
        "Error: relative error of the matrices W_Q W_Kᵀ and W_V W_O, the expected error for isotropic inputs.",
        "误差：矩阵 W_Q W_Kᵀ 与 W_V W_O 的相对误差，假定输入没有特定方向。",
    ),
    "kept_note": (
        "Kept: the share of a query head's attention on the window and the first tokens, minimum and mean over the "
        "heads of a layer.",
        "保留：查询头的注意力落在窗口与开头词元上的比例，取一层各头的最小值与平均值。",
    ),
    "skipped_note": (
        "A layer keeps at least one head (or group that shares keys): {names} are kept, each as the last one of its "
        "layer; the next heads in the order are removed instead.",
        "每层至少保留一个头（或一组共享键的头）：{names} 本应移除，但各为其层的最后一个，故保留，"
        "改为移除顺序中的下一个。",
    ),
    "chance_note": (
        "The same number of random heads, {count} times: loss {least:.4f} to {most:.4f}.",
        "随机移除同样数目的头 {count} 次：损失 {least:.4f} 至 {most:.4f}。",
    ),
    "random_note": (
        "Random: mean, minimum and maximum of {count} random orders of single heads, which may empty a layer. Better "
        "than their mean at {mean} of {points} points, than each at {every}; {removable} of {total} heads can be "
        "removed for at most 1 %.",
        "随机：{count} 种逐头移除的随机顺序的平均、最小与最大，可能清空某一层。"
        "在 {points} 个点中，有 {mean} 个点优于其平均，{every} 个点优于其全部；"
        "损失增加不超过 1 % 时可移除 {total} 个头中的 {removable} 个。",
    ),
}


def term(code: str, /, **values: int | float | str) -> Message:
    """One of TERMS with its values."""
    return Message(code, *TERMS[code], **values)
