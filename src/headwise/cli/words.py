"""What the commands print, in English and in Chinese.

    say(console, "wrote_model", path=out)

Values are plain text; the sentences may have markup of rich. Help texts are in `chinese.py`.
"""

from rich.console import Console
from rich.markup import escape

from headwise.wording import Message, in_language, language

SENTENCES: dict[str, tuple[str, str]] = {
    "finished": (
        "{path} already contains the finished result of this command; use --force to run it again.",
        "{path} 已有此命令的完整结果；如需重新运行，请加 --force。",
    ),
    "finished_table": (
        "{path} already contains the finished table of this command; use --restart to measure again.",
        "{path} 已有此命令的完整表格；如需重新测量，请加 --restart。",
    ),
    "finished_run": (
        "{path} contains this finished run, saved {ago} ago; use --fresh to train again.",
        "{path} 中的训练已完成，保存于 {ago}前；如需重新训练，请加 --fresh。",
    ),
    "resumed": (
        "Resumed after step {step} of {steps}, saved {ago} ago in {path}.",
        "从第 {step} 步（共 {steps} 步）继续，进度于 {ago}前保存在 {path}。",
    ),
    "stopped_training": (
        "Stopped at step {step}; run the same command to resume.",
        "已在第 {step} 步停止；再次运行同一命令即可继续。",
    ),
    "interrupted_training": (
        "Interrupted; the same command without --fresh resumes after the last save.",
        "已中断；去掉 --fresh 再次运行同一命令，可从最近一次保存处继续。",
    ),
    "stopped_measuring": (
        "Stopped; {done} of {of} units are done. Run the same command to resume.",
        "已停止；共 {of} 份，已完成 {done} 份。再次运行同一命令即可继续。",
    ),
    "stopped_restarting": (
        "Stopped; {done} of {of} units are done. Run the same command without --restart to resume.",
        "已停止；共 {of} 份，已完成 {done} 份。去掉 --restart 再次运行即可继续。",
    ),
    "stopped_before": ("Stopped before anything was measured.", "已停止，尚未测得任何数值。"),
    "heldout": (
        "held-out loss, {name}: {loss:.4f} nats per token",
        "留出集损失，{name}：每词元 {loss:.4f} 奈特",
    ),
    "training": ("training", "训练"),
    "training_note": (
        "loss {loss:.3f}{held}  {rate:,.0f} tokens/s",
        "损失 {loss:.3f}{held}  每秒 {rate:,.0f} 个词元",
    ),
    "training_heldout": (" held-out {loss:.3f}", " 留出集 {loss:.3f}"),
    "trained": (
        "Wrote the model to [bold]{path}[/bold]. Look at its heads: headwise see --model {path}",
        "模型已写入 [bold]{path}[/bold]。查看它的注意力头：headwise see --model {path}",
    ),
    "changed": (
        "\nWrote the new model to [bold]{path}[/bold]. Use it: headwise write --model {path}",
        "\n新模型已写入 [bold]{path}[/bold]。用它续写：headwise write --model {path}",
    ),
    "ask": ("\nWrite to {path}? \\[y/N] ", "\n写入 {path}？\\[y/N] "),
    "nothing_written": ("Nothing was written.", "没有写入任何文件。"),
    "wrote_budget": (
        "\nWrote the budget to [bold]{path}[/bold]. Use it: headwise write{model} --budget {path}",
        "\n预算已写入 [bold]{path}[/bold]。使用方法：headwise write{model} --budget {path}",
    ),
    "wrote_curve": ("\nWrote the curve to [bold]{path}[/bold].", "\n曲线已写入 [bold]{path}[/bold]。"),
    "wrote_plot": ("\nWrote the plot to [bold]{path}[/bold].", "\n图已写入 [bold]{path}[/bold]。"),
    "wrote_measures": (
        "Wrote a plot of every measure to [bold]{path}[/bold].",
        "各统计量的图已写入 [bold]{path}[/bold]。",
    ),
    "wrote_corpus_page": (
        "Wrote the heads and their passages to [bold]{path}[/bold]; open it in a browser.",
        "各头及其段落已写入 [bold]{path}[/bold]，请用浏览器打开。",
    ),
    "wrote_roles": (
        "Wrote the roles of all heads at each evaluation to [bold]{path}[/bold].",
        "各次评估时全部头的角色已写入 [bold]{path}[/bold]。",
    ),
    "wrote_roles_plot": (
        "Wrote a plot of the roles over training to [bold]{path}[/bold].",
        "训练过程中各角色的变化图已写入 [bold]{path}[/bold]。",
    ),
    "no_plot": ("No plot was drawn: {why}", "未绘图：{why}"),
    "left": ("{what}: about {time} left", "{what}：约剩 {time}"),
    "serving": (
        "[bold]{address}[/bold]\nOnly this machine can open it, and only with this token. Ctrl-C stops the server.",
        "[bold]{address}[/bold]\n只有本机可以打开，并且需要此令牌。按 Ctrl-C 停止服务。",
    ),
    "error": ("error:", "错误："),
    "measures_name": ("name", "名称"),
    "measures_unit": ("unit", "单位"),
    "measures_range": ("range", "取值范围"),
    "measures_about": ("description", "说明"),
    "measures_source": ("source", "来源"),
}
# What a `progress=` callback is called with.
WORK: dict[str, str] = {
    "checking the files": "检查文件", "comparing": "比较", "done": "完成", "computing the curve": "计算曲线",
    "drawing": "绘图", "estimating the loss: the model as it is": "估计原模型的损失",
    "estimating the loss: the merged model": "估计合并后模型的损失", "estimating the loss": "估计损失",
    "importance": "重要性", "measuring heads": "测量各头", "measuring speed": "测量速度", "measuring": "测量",
    "merging": "合并", "pooling (mean)": "池化（平均值）", "pooling (max)": "池化（最大值）", "reading": "读入",
    "roles": "角色", "training": "训练", "healing": "恢复训练", "judging": "评估",
}  # fmt: skip


def said(code: str, /, **values: int | float | str) -> str:
    """A sentence in the user's language, as markup of rich."""
    shown = {name: escape(x) if isinstance(x, str) else x for name, x in values.items()}
    return in_language(Message(code, *SENTENCES[code], **shown), language())


def say(console: Console, code: str, /, **values: object) -> None:
    """Print a sentence. Values that are not numbers become text."""
    plain = {name: x if isinstance(x, int | float) else str(x) for name, x in values.items()}
    console.print(said(code, **plain), highlight=False, soft_wrap=True)


def work(what: str) -> str:
    """A part of the work, as the progress bar shows it."""
    begins = next((word for word in WORK if what.startswith(word)), "") if language() == "zh" else ""
    return WORK[begins] + what.removeprefix(begins) if begins else what
