"""Notes on a model or a text, in English and Chinese."""

from headwise.nn.registry import design_of
from headwise.wording import Message

SENTENCES = {
    "untrained_length": (
        "The model was trained on {trained:,} tokens at a time. Do not trust weights, statistics and losses of the "
        "last {beyond:,} tokens: its behaviour there is untrained.",
        "此模型每次以 {trained:,} 个词元训练。最后 {beyond:,} 个词元超出这一长度，"
        "模型在那里的行为未经训练，其权重、统计量与损失不可信。",
    ),
    "no_next_token": (
        "The model does not predict the next token, so there is no loss to measure the importance of heads.",
        "此模型不预测下一个词元，因此无法用损失衡量各头的重要性。",
    ),
    "read_as_bytes": (
        "Not in the model's vocabulary and read as UTF-8 bytes: {count:,} of the characters; each is shown as a whole.",
        "有 {count:,} 个字符不在模型的词表中，按 UTF-8 字节读入；每个字符仍完整显示。",
    ),
    "unknown_tokens": (
        "Not in the model's vocabulary: {count:,} of the {of:,} tokens; the model reads {sign}; the original text is "
        "shown.",
        "共 {of:,} 个词元，其中 {count:,} 个不在模型的词表中；模型读入的是 {sign}，此处显示原文。",
    ),
    "parts_of_characters": (
        "Characters that consist of several tokens are shown as a whole: {count:,} tokens end inside a character.",
        "由多个词元组成的字符完整显示：有 {count:,} 个词元在字符内部结束。",
    ),
}


def remark(code: str, /, **values: int | str) -> Message:
    """One of SENTENCES with its values."""
    return Message(code, *SENTENCES[code], **values)


def remarks_on_map(design: str) -> list[Message]:
    """What the map of a head design does not show, by the design's own notes; empty if it shows all."""
    notes = design_of(design).notes.map
    return [] if notes is None else [Message(f"map_of_{design}", "{en}", "{zh}", en=notes.en, zh=notes.zh)]
