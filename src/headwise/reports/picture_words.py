"""What pictures of measurements, of training and of plans say, in the user's language.

>>> from headwise.wording import speaking
>>> with speaking("zh"):
...     said("kept")
'保留的头数；最左为全部'
"""

from headwise.wording import language

WORDS: dict[str, tuple[str, str]] = {
    # The trade-off of the number of heads and their size.
    "materialised": ("scores, materialised", "分数，存为矩阵"),
    "cache": ("cache, multi-head", "键值缓存，多头"),
    "mqa_cache": ("cache, MQA", "键值缓存，MQA"),
    "blockwise": ("log-sum-exps, blockwise", "log-sum-exp，分块"),
    "flops": ("FLOPs", "FLOPs"),
    "exponentials": ("exponentials", "指数运算"),
    "memory": ("memory of one layer", "一层的内存"),
    "work": ("work of one forward pass of one layer", "一层一次前向的计算量"),
    "sizes": ("number of heads h, and below it d_k = d_model / h", "头数 h，下一行为 d_k = d_model / h"),
    # Measures of a corpus.
    "head": ("head", "头"),
    "layer": ("layer", "层"),
    "measured": ("every head on {tokens} of {files}", "全部注意力头，{files}的 {tokens}"),
    # Pruning.
    "removed": ("{count} heads, removed by {method}", "{count} 个头，按 {method} 依次移除"),
    "against": ("loss against heads kept", "损失与保留的头数"),
    "near": ("near the loss of the whole model", "完整模型的损失附近"),
    "increase": ("increase, %", "增幅，%"),
    "one_random": ("1 random order", "1 个随机顺序"),
    "random": ("{count} random orders", "{count} 个随机顺序"),
    "mean": ("their mean", "随机顺序的平均"),
    "order": ("this order, ± a standard error", "此顺序，± 一个标准误"),
    "limit": ("{percent:g} % more", "增加 {percent:g}%"),
    "chosen": ("chosen: {count} removed", "选定：移除 {count} 个"),
    "kept": ("heads kept; all of them at the left", "保留的头数；最左为全部"),
    "loss": ("loss, nats per token", "损失，奈特／词元"),
    # Training.
    "step": ("step", "步"),
    "batch": ("training batch", "训练批次"),
    "heldout": ("held out", "留出集"),
    "heldout_of": ("held out: {name}", "留出集：{name}"),
    "training": ("Heads during training: {title}", "训练中的注意力头：{title}"),
    "previous": ("weight on the previous token · random tokens, repeated", "前一词元权重 · 随机词元，重复一遍"),
    "induction": ("induction weight · random tokens, repeated", "归纳权重 · 随机词元，重复一遍"),
    "broad": ("entropy, nats · held-out passage", "熵，奈特 · 留出的段落"),
    "alike": (
        "similarity of the outputs of two heads, mean · held-out passage", "两个头输出的相似度，平均 · 留出的段落",
    ),
    "unmeasured": ("not measured", "未测量"),
    "clearest": ("clearest role at the last step (heads)", "最后一步最明显的角色（头数）"),
    "no_role": ("no role", "无明显角色"),
    "cosine": ("cosine", "余弦"),
    "within": ("{measure}, pairs of one layer", "{measure}，同层的头对"),
    "pairs": ("{measure}, all pairs", "{measure}，全部头对"),
}  # fmt: skip


def said(code: str, /, **values: object) -> str:
    """One of WORDS with its values."""
    return WORDS[code][language() == "zh"].format(**values)
