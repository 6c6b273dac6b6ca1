"""The introduction of docs/claims.md and docs/claims.zh.md."""

from headwise.wording import Bilingual

ENGLISH = """# What the texts claim

Textbooks and tutorials on multi-head attention make many claims. Here each one is run, on random numbers, on small
layers or on the trained model that comes with headwise, and judged by what was measured. This page is the output of
`headwise claims --all --markdown`; `--lang zh` gives it in Chinese, `--html claims.html` as a page with plots.
`headwise claims` runs the quick ones, `--only ID` a single one; the command exits with 1 if a verdict is not the
expected one.

A check compares a number with its expected value: ✓ it holds, ✗ it does not. The verdict follows from the checks:

- **holds**: all checks hold.
- **holds under conditions**: it holds within its conditions, and fails outside of them.
- **does not hold**: no check holds.
- **faithful but misleading**: what it states is true, what it suggests is not.

Each claim has a control, marked ⇄: the same measurement in a case where the result must be another one, or on a
baseline. A control rejects the number that the claim's own case gave; if a control fails, nothing is decided.

Five texts make the claims: a chapter of a textbook on Transformers, two tutorials (the first in seven parts with
PyTorch code, the second notes on shapes), a mathematical section with sixteen equations, and a demonstration on
*Water Margin*. Each source is followed by what the text says there, in our words; other literature is named.
Paragraphs are counted within a section, without formulas and list items.
Errors are the largest difference over the largest entry, in float64 unless stated otherwise."""
CHINESE = """# 书中的论断

关于多头注意力，教科书和教程提出了许多论断。这里逐条实测：用随机数、小型的层或 headwise 内置的训练好的模型，\
再依测得的数值判断。本页由 `headwise claims --all --markdown --lang zh` 生成；`--html claims.html` 生成带图的网页。\
`headwise claims` 只检验耗时短的论断，`--only 编号` 只检验其中一条；若有结论与预期不符，命令的退出码为 1。

每项检验把一个数与预期值比较：✓ 相符，✗ 不符。结论由检验得出：

- **成立**：所有检验都相符。
- **有条件成立**：在其条件之内相符，之外不符。
- **不成立**：没有一项相符。
- **属实但易误导**：字面属实，但它让人以为的并非如此。

每条论断都有对照，以 ⇄ 标出：在结果必须不同的情形下，或在基线上，做同样的测量。对照必须拒绝该论断自身测得的数；\
对照不通过，就不下结论。

论断出自五篇文章：一本 Transformer 教科书的一章、两篇教程（第一篇分七部分并附 PyTorch 代码，第二篇是关于形状的笔记）、\
含十六个公式的一节数学推导，以及一篇《水浒》演示。每个出处之后概述其原意；其他文献另行注明。\
段落在各节内编号，公式与列表项不计。\
误差为最大差值与最大元素之比；除另有说明外，用 float64 计算。"""
INTRODUCTION = Bilingual(ENGLISH, CHINESE)
