"""`headwise audit`: planted errors of chapters are found, and what is right is not called wrong."""

from pathlib import Path

import pytest
import typer

from headwise.errors import ConfigError
from headwise_textbook import commands
from headwise_textbook.audit import Audit, audit

DATA = Path(__file__).parent / "data"
TEXTS = Path(__file__).parents[2] / "docs" / "guide" / "en"
PLANTED = {  # the lines with an error: eleven of them
    "chapter_one.md": [16, 29, 39],
    "chapter_two.md": [20, 43, 55, 58],
    "chapter_three.md": [10, 28, 33, 39],
}
WITHOUT_TRANSPOSES = """
```python
# X: [batch_size, seq_len, num_hiddens]
Q = W_Q * X  # [batch_size, seq_len, num_hiddens]
K = W_K * X  # [batch_size, seq_len, num_hiddens]
Q = reshape(Q, [batch_size, seq_len, h, d_k])  # [batch_size, seq_len, h, d_k]
K = reshape(K, [batch_size, seq_len, h, d_k])
```
```python
scores = Q @ K.transpose(-2, -1)  # [batch_size, h, seq_len, seq_len]
```
"""
STACKED = r"""
Let $W_i^Q \in \mathbb{R}^{d_{\text{model}} \times d_k}、W_i^V \in \mathbb{R}^{d_{\text{model}} \times d_v}$ and
$W_O \in \mathbb{R}^{hd_v \times d_{\text{model}}}$.
$$
W_Q^{\text{all}} = \begin{bmatrix} W_1^Q \\ W_2^Q \\ \vdots \\ W_h^Q \end{bmatrix} \in \mathbb{R}^{(h \cdot d_k) \times d_{\text{model}}}
$$
With $X \in \mathbb{R}^{n \times d_{\text{model}}}$:
$$
Q^{\text{all}} = XW_Q^{\text{all}} \in \mathbb{R}^{n \times (h \cdot d_k)}
$$
$$
\mathcal{O} = \text{Concat}_i(\mathcal{O}_i) \in \mathbb{R}^{n \times (h \cdot d_k)}
$$
$$
Y = \mathcal{O} W_O \in \mathbb{R}^{n \times d_{\text{model}}}
$$
"""  # noqa: E501


def audited(text: str) -> Audit:
    return audit(text, seconds=60.0)


def found(text: str) -> list[int]:
    return sorted(line for line, _ in audited(text).findings)


@pytest.mark.thorough
@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_are_found_and_nothing_else(name: str):
    assert found((DATA / name).read_text(encoding="utf-8")) == PLANTED[name]


@pytest.mark.thorough
def test_a_listing_without_transposes_is_followed_with_names_that_the_text_leaves_out():
    result = audited(WITHOUT_TRANSPOSES)
    assert [line for line, _ in result.findings] == [10]
    said = str(result.findings[0][1])
    assert said == ("scores is [2, 7, 3, 3], and the text says [batch_size, h, seq_len, seq_len], with h = 3 in line 6")
    assert (result.read["listing"], result.read["shape"]) == (2, 4)


def test_projections_stacked_in_rows_are_found_and_other_products_are_not():
    result = audited(STACKED)
    assert [line for line, _ in result.findings] == [4, 8]
    assert "blocks of d_model × d_k in rows give (h·d_model) × d_k" in str(result.findings[0][1])
    assert "is that of W_Q^all transposed" in str(result.findings[1][1])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["splitting", "merging", "scores", "parameters"])
def test_right_pages_are_not_called_wrong(name: str):
    assert found((TEXTS / f"{name}.md").read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("4 × 768² ≈ 236 万, 512 / 4 = 128, 8 × (2 + 3) = 40, x 3 × 4 = 13 + 1, 2 × 4 × 64 = 512.", []),
        ("so 8 × 64 = 521\n", [1]),
        ("1/2 = 50 %, 1/4 = 25%, 0.5 × 100 = 50%, 2/3 = 0.66, 2/3 = 0.67, 512/3 = 170, 10 × 100 = 1e3, 2 × 8 = 2⁴,\n"
         "4 × 512² = 1M, 4 × 512² = 1.0M, 2 × 1024 = 2K, 2 × 1024 = 2.0 KiB, 10 × 1000 = 10k, 1 + 2 = 3.5 - 0.5.", []),
        ("1/2 = 5 %\n4 × 512² = 1.1M\n2 × 1024 = 3K\n2/3 = 0.65\n3 × 4 = 12.1\n3 × 4 = 13 %\n", [1, 2, 3, 4, 5, 6]),
        ("[2, 3] @ [3, 4] = [2, 4]\n[seq, 512] @ [512, seq] → [seq, seq]\n[2, 3] @ [4, 3] = [2, 3]", [3]),
        ("split: [4, 16, 4, 128]\ntransposed: [4, 4, 16, 128]\nmerged: [4, 16, 512]\nmerged: [4, 16, 511]\n", [4]),
        ("d_k = d_model / h\n| x | d_model | heads | d_k |\n|--|--|--|--|\n|a|768|12|64|\n|b|768|12|96|", [5]),
        ("| model | d_model | heads | d_k |\n|--|--|--|--|\n| gemma | 3072 | 16 | 256 |\nand 2 × 3 = 6", []),
        ("The four matrices have d_model² each: total parameters = 3 × d_model²", [1]),
    ],
)  # fmt: skip
def test_what_a_text_says_of_itself(text: str, lines: list[int]):
    assert found(text) == lines


def test_what_cannot_be_read_is_one_line(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"chapter\.md has no listing, shape, calculation or table that can be read"):
        audited("Heads are like eyes.\n")
    with pytest.raises(ConfigError, match=r"has 10,000,000 characters; expected a chapter of at most 300,000"):
        audited("a" * 10_000_000)
    for data, said in ((b"", "is empty"), (b"a\0b", "offset 1")):
        (tmp_path / "chapter.md").write_bytes(data)
        with pytest.raises(Exception, match=said):
            commands.audit(tmp_path / "chapter.md", 60.0)


ON_PURPOSE = """
```python
import torch
x = torch.ones(2, 3, 4)  # [b, n, d]
z = x[:, 0]  # first token, [0, 1]
y = x[:, 0]  # the first token: [b, d]
x @ x  # raises a RuntimeError
```
```python
assert x.shape == z.shape, "on purpose"  # AssertionError
```
```pycon
>>> x @ z
Traceback (most recent call last):
RuntimeError: mat1 and mat2 shapes cannot be multiplied
```
"""


@pytest.mark.thorough
def test_errors_that_a_text_announces_and_other_lists_in_comments_are_not_called_wrong():
    result = audited(ON_PURPOSE)
    assert (result.findings, result.read["listing"], result.read["shape"]) == ([], 3, 2), result.lines()
    for said in ("  # raises a RuntimeError", "  # AssertionError"):
        assert len(audited(ON_PURPOSE.replace(said, "")).findings) == 1
    assert [line for line, _ in audited(ON_PURPOSE.replace(": [b, d]", ": [b, n]")).findings] == [6]


@pytest.mark.thorough
def test_a_listing_that_does_not_end_is_counted_and_the_next_one_runs():
    text = "```python\nwhile True: pass\n```\n\n```python\nimport torch\nx = torch.ones(2, 3)  # [2, 4]\n```\n"
    result = audit(text, seconds=1.0)
    assert (result.unread["listing"], result.read["listing"]) == (1, 1)
    assert [line for line, _ in result.findings] == [7]
    assert "took longer than 1 seconds" in " ".join(result.lines())


@pytest.mark.thorough
def test_the_command_exits_with_1_if_something_disagrees(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(typer.Exit):
        commands.audit(DATA / "chapter_one.md", 60.0)
    assert "✗ line 16: q is [2, 8, 10, 32], and the text says [2, 10, 8, 32]" in capsys.readouterr().out
