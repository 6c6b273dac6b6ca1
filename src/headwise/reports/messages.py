"""Facts, titles, notes and errors of reports and of the viewer, and what pictures say, in English and Chinese.

>>> message("fact_loss", loss=1.5).zh
'每词元 1.50 奈特'
>>> from headwise.wording import speaking
>>> with speaking("zh"):
...     said("kept")
'保留的头数；最左为全部'
"""

from headwise.wording import Message, language

MESSAGES: dict[str, tuple[str, str]] = {
    # Facts and titles of a report.
    "text": ("text", "文本"),
    "model": ("model", "模型"),
    "kernel": ("kernel", "计算内核"),
    "corpus": ("corpus", "语料"),
    "fact_corpus": ("{tokens} in {windows}", "{windows}中的 {tokens}"),
    "steps": ("steps", "步数"),
    "loss": ("loss", "损失"),
    "fact_model": ("{name}, {size} weights", "{name}，{size} 参数"),
    "fact_steps": ("{count:,} measured; the last of them is shown", "已测量 {count:,} 步，此处显示最后一步"),
    "heldout": ("held-out loss", "留出集损失"),
    "fact_heldout": (
        "{least:.2f} to {most:.2f} nats per token, on held-out text of the same kind as the training text",
        "每词元 {least:.2f} 至 {most:.2f} 奈特，取自与训练文本同类的留出文本",
    ),
    "windows": ("windows", "窗口"),
    "fact_windows": (
        "the text is longer than the {size:,} tokens that the model is read with: windows of that length that overlap "
        "by half; a token attends to at least the {half:,} tokens before it",
        "文本超过模型一次读入的 {size:,} 个词元：按此长度分窗读入，相邻窗口重叠一半；"
        "每个词元至少可关注其前 {half:,} 个词元",
    ),
    "windows_sampled": (
        "Patterns, roles and the comparison of heads are of {count} evenly spaced windows; statistics and maps are of "
        "the whole text. A map has no weights beyond a window.",
        "模式、角色与头的比较取自 {count} 个等间隔的窗口；统计量与注意力图取自全文。窗口之外没有权重。",
    ),
    "caution": ("caution", "注意"),
    "unknown_text": (
        "The loss of {loss:.2f} nats per token means that the model predicts this text as poorly as a choice among "
        "{choices:,.0f} equally likely tokens; on text like its training text it is at most {most:.2f} nats "
        "({usual:,.0f} tokens). What the heads do here may differ from what they do on such text.",
        "每词元 {loss:.2f} 奈特的损失相当于在 {choices:,.0f} 个等可能的词元中猜测；"
        "在与训练文本同类的文本上至多为 {most:.2f} 奈特（{usual:,.0f} 个词元）。"
        "各头在这段文本上的行为可能与在同类文本上不同。",
    ),
    "fact_loss": ("{loss:.2f} nats per token", "每词元 {loss:.2f} 奈特"),
    "title_cross": ("cross attention, {queries} at {keys}", "交叉注意力：{queries}对 {keys}"),
    "title_decoder": ("decoder, {tokens}", "解码器，{tokens}"),
    "title_encoder": ("encoder, {tokens}", "编码器，{tokens}"),
    "title_entry": ("entry {entry}", "批次第 {entry} 条"),
    "mixed": ("mixed", "混合"),
    # Comparisons and importance.
    "by_cka": ("outputs (CKA)", "输出（CKA）"),
    "about_cka": (
        "Linear CKA of the heads' outputs: 1 if they differ by a rotation, a scale and a shift only; few tokens "
        "increase it.",
        "各头输出的线性 CKA：若只差旋转、缩放与平移则为 1；词元少时偏高。",
    ),
    "by_cosine": ("outputs (cosine)", "输出（余弦）"),
    "about_cosine": (
        "Cosine of the heads' outputs, each in its own basis: near 0 does not mean that they carry different things.",
        "各头输出的余弦相似度，各用自己的基：接近 0 并不表示内容不同。",
    ),
    "by_maps": ("attention maps", "注意力图"),
    "about_maps": (
        "Jensen–Shannon divergence between the rows of their maps, mean over queries: 0 for equal attention.",
        "两个头的注意力图逐行的詹森–香农散度，对查询取平均：注意力相同时为 0。",
    ),
    "about_ablation": (
        "Loss without the head, minus the loss with all heads.",
        "去掉该头后的损失减去全部头都在时的损失。",
    ),
    "about_gradient": (
        "Gradient of the loss with respect to a mask of the head (Michel et al. 2019).",
        "损失对该头掩码的梯度（Michel et al. 2019）。",
    ),
    "on_windows": (
        "{about} On {windows} windows of {tokens} tokens.",
        "{about}取 {windows} 个窗口，每个 {tokens} 个词元。",
    ),
    # Notes.
    "explained": (
        "Weights show which tokens a head attends to on this text; they do not explain the output of the model.",
        "权重说明一个头在这段文本上关注哪些词元，不能解释模型的输出。",
    ),
    "beside": (
        "Statistics, patterns, roles and comparisons are those of the first text.",
        "统计量、模式、角色与比较均取自第一段文本。",
    ),
    "not_compared": (
        "The {heads:,} heads are not compared: a picture holds at most {most}.",
        "未比较这 {heads:,} 个头：一张图最多容纳 {most} 个。",
    ),
    "maps_only": (
        "The outputs of each head are not known for this model: heads are compared by their maps only.",
        "此模型各头的输出未知，因此只按注意力图比较。",
    ),
    "maps_only_finite": (
        "Outputs of heads are NaN or infinite: heads are compared by their maps only.",
        "有的头输出为 NaN 或无穷大，因此只按注意力图比较。",
    ),
    "not_compared_finite": (
        "Outputs of heads are NaN or infinite: heads are not compared.",
        "有的头输出为 NaN 或无穷大，因此不作比较。",
    ),
    "gradient_only": (
        "Ablating each of the {heads} heads would take {work:.0e} operations, so importance is estimated by the "
        "gradient of the loss only; headwise.analysis.ablation_importance computes it.",
        "逐一去掉这 {heads} 个头需要 {work:.0e} 次运算，因此只用损失的梯度估计重要性；"
        "headwise.analysis.ablation_importance 可作完整计算。",
    ),
    "over_batch": (
        "Numbers, patterns and roles are over all entries of the batch, of which each map shows one.",
        "数值、模式与角色取自整个批次；每张注意力图只显示其中一条。",
    ),
    "first_entries": (
        "The first {shown} of {entries} entries of the batch are shown; entries=… chooses others.",
        "批次共 {entries} 条，显示前 {shown} 条；可用 entries=… 另选。",
    ),
    "pooled_only": (
        "The record keeps maps pooled to at most 64 × 64 cells; watch(maps='lazy') keeps them whole.",
        "记录中的注意力图已池化，至多 64 × 64 个单元格；watch(maps='lazy') 保留完整的图。",
    ),
    "repeated_calls": (
        "A layer that the model calls several times has a row for each call, with #2 for the second; statistics that "
        "were watched, and are not those of the maps, are over all of its calls.",
        "被模型多次调用的层，每次调用各占一行，第二次标为 #2；并非由注意力图算出的统计量取自全部调用。",
    ),
    "no_patterns": (
        "In cross attention there are no patterns: its queries and keys have no positions in common.",
        "交叉注意力没有模式：查询与键的位置互不对应。",
    ),
    # Pictures and the table in a terminal.
    "panels_title": ("Sentence {sentence}, head {head}: attention weights", "第 {sentence} 句 第 {head} 头 注意力权重"),
    "panel": (
        "{zero} of the cells are 0; rows sum to {low:.2f} to {high:.2f}",
        "{zero} 的格子为 0；每行之和 {low:.2f} 至 {high:.2f}",
    ),
    "panel_padded": (
        "{zero} of the cells are 0; rows sum to {low:.2f} to {high:.2f}, with padding, which is not drawn",
        "{zero} 的格子为 0；每行之和 {low:.2f} 至 {high:.2f}，含未画出的填充",
    ),
    "pooled_weight": ("largest weight of {cell} × {cell} tokens", "{cell} × {cell} 个词元中的最大权重"),
    "not_shown": (
        "Not shown here: {names}. Use a wider terminal or the HTML report.",
        "此处未显示：{names}。请用更宽的终端或查看 HTML 报告。",
    ),
    "wrote_report": (
        "Wrote the report to [bold]{path}[/bold]; open it in a browser.",
        "报告已写入 [bold]{path}[/bold]，请用浏览器打开。",
    ),
    "not_opened": (
        "No browser could be opened here; open the file yourself.",
        "此处无法打开浏览器，请自行打开该文件。",
    ),
    "wrote_view": ("Wrote {name} to [bold]{path}[/bold].", "{name} 已写入 [bold]{path}[/bold]。"),
    "wrote_pictures": (
        "Wrote {count} heat maps to [bold]{path}[/bold].",
        "{count} 张热图已写入 [bold]{path}[/bold]。",
    ),
    # Notebooks.
    "title_map": ("Attention map", "注意力图"),
    "head_number": ("head {head}", "第 {head} 头"),
    "no_picture": (
        "No picture is drawn; pool(512) computes one for each head.",
        "未绘制图片；pool(512) 可为每个头计算一张。",
    ),
    "small_pictures": (
        "{shown} of {heads} heads, entry 0 of the batch of {entries}: queries down, keys across; darker is larger, "
        "scaled to the largest weight of each head.",
        "共 {heads} 个头，显示 {shown} 个（批次共 {entries} 条，取第 0 条）：纵向为查询，横向为键；"
        "颜色越深权重越大，按每个头的最大权重缩放。",
    ),
    "small_pooled": (
        "{shown} of {heads} heads, entry 0 of the batch of {entries}: queries down, keys across, mean over squares of "
        "{cell} × {cell}; darker is larger, scaled to the largest weight of each head.",
        "共 {heads} 个头，显示 {shown} 个（批次共 {entries} 条，取第 0 条）：纵向为查询，横向为键，"
        "每格为 {cell} × {cell} 个权重的平均值；颜色越深权重越大，按每个头的最大权重缩放。",
    ),
    "no_picture_of_record": (
        "The maps are too large or too many for small pictures; hw.report(record, 'report.html') writes a page.",
        "注意力图过大或过多，未绘制小图；hw.report(record, 'report.html') 可写出页面。",
    ),
    "record_more": (
        "hw.show(record, tokenizer, tokens=ids) shows every weight with its tokens.",
        "hw.show(record, tokenizer, tokens=ids) 可显示每个权重及其词元。",
    ),
    # NaN and infinity, in reports and the viewer.
    "not_finite": (
        "Layer {layer}, head {head}: the scores of {count:,} queries are NaN or infinite and are not shown.",
        "第 {layer} 层第 {head} 头：{count:,} 个查询的分数为 NaN 或无穷大，图中不显示。",
    ),
    "values_not_finite": (
        "Layer {layer}, head {head}: {count:,} numbers among its values are NaN or infinite; its weights are not "
        "affected.",
        "第 {layer} 层第 {head} 头：值中有 {count:,} 个数为 NaN 或无穷大；其权重不受影响。",
    ),
    "windows_values_not_finite": (
        "Layer {layer}, head {head}: NaN or infinity is among its values; its weights are not affected.",
        "第 {layer} 层第 {head} 头：值中含有 NaN 或无穷大；其权重不受影响。",
    ),
    "more_not_finite": (
        "NaN or infinity in the scores or values of {heads:,} heads in total.",
        "共有 {heads:,} 个头的分数或值含有 NaN 或无穷大。",
    ),
    # Errors of the viewer.
    "too_many_characters": (
        "the text has {n:,} characters; at most {characters:,} characters and {tokens:,} tokens are supported: {why}",
        "文本有 {n:,} 个字符；上限为 {characters:,} 个字符、{tokens:,} 个词元：{why}。",
    ),
    "too_many_tokens": (
        "the text has {n:,} tokens; at most {tokens:,} are supported: {why}",
        "文本有 {n:,} 个词元；上限为 {tokens:,} 个：{why}。",
    ),
    "limit_of_option": ("set by --max-tokens", "由 --max-tokens 设定"),
    "limit_of_positions": ("{name} has no positions beyond that", "{name} 的位置编码只有这么长"),
    "limit_of_memory": ("more does not fit into the free memory of this machine", "超出本机的可用内存"),
    "too_large": (
        "the request is too large: a text may have {characters:,} characters at most",
        "请求过大：文本最多 {characters:,} 个字符。",
    ),
    "unreadable": ("{sentence}", "无法载入这段文本：{sentence}"),
    "no_text": (
        "there is no text of this name; the server may have been restarted",
        "服务器没有这段文本；服务器可能已重新启动。",
    ),
    "no_head": ("there is no head {head} in layer {layer}", "第 {layer} 层没有第 {head} 头。"),
    "still_reading": ("the text is still being computed; try again", "这段文本仍在计算中，请稍后再试。"),
    "failed": ("the text could not be loaded: {error}", "无法载入这段文本：{error}"),
    "failure": ("{sentence}", "{sentence}"),
    "no_memory": (
        "not enough memory for this text; use a shorter one",
        "内存不足，无法计算这段文本；请换一段较短的文本。",
    ),
    "given_up": (
        "this text is no longer being computed: it was cancelled or replaced by a newer one",
        "这段文本的计算已停止：已被取消，或被新的文本取代。",
    ),
    "busy": ("too many tiles were requested at once; try again", "同时请求的图块过多，请稍后再试。"),
    "misfit": ("{sentence}", "请求无效：{sentence}"),
    "broke": ("internal error of the viewer; the terminal shows details", "headwise 发生内部错误，详情见终端。"),
    "not_allowed": ("{sentence}", "请求被拒绝：{sentence}"),
}


def message(code: str, /, **values: int | float | str) -> Message:
    """One of MESSAGES with its values."""
    return Message(code, *MESSAGES[code], **values)


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
