"""Amounts in words: with three significant figures and a decimal prefix, and counts of what is in a text.

>>> scaled(25_056), scaled(3_830_000), scaled(1.5e9, "B"), scaled(12)
('25.1 k', '3.83 M', '1.50 GB', '12')
>>> counted("token", 1), counted("token", 1200), counted("token", 1200).zh
('1 token', '1,200 tokens', '1,200 个词元')
"""

from headwise.wording import Bilingual

PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
COUNTED = {"character": "个字符", "token": "个词元", "window": "个窗口", "file": "个文件"}


def scaled(value: float, unit: str = "") -> str:
    """Format an amount with three significant figures, a decimal prefix and a unit; whole ones below 1000 as they are.

    Args:
        unit: such as "B" or "FLOP/s"; "" for a count.
    """
    step = 0
    while abs(value) >= 999.5 and step < len(PREFIXES) - 1:
        value, step = value / 1000, step + 1
    if not step and value == int(value):
        return f"{value:.0f} {unit}".rstrip()
    return f"{three_figures(value)} {PREFIXES[step]}{unit}".rstrip()


def three_figures(value: float) -> str:
    """Format a number from 0 to 1000 with three significant figures: 1.50, 12.3, 512."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def counted(what: str, count: int) -> Bilingual:
    """Format a number of characters, tokens, windows or files; what: one of COUNTED."""
    return Bilingual(f"{count:,} {what}{'s' * (count != 1)}", f"{count:,} {COUNTED[what]}")
