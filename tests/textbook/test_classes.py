"""`headwise check multi-head-class`: right classes are accepted, and the mistake of a wrong one is named."""

import re
from pathlib import Path

import pytest

from commands import Command
from headwise_textbook.exercises.classes import Report, grade_class
from headwise_textbook.exercises.definition import MISTAKES

DATA = Path(__file__).parent / "data"


def listings(name: str) -> dict[str, str]:
    return dict(re.findall(r"## (.*?)\n\n```python\n(.*?)```", (DATA / name).read_text(encoding="utf-8"), re.DOTALL))


RIGHT, BLIND = listings("right_classes.md"), listings("blind_classes.md")
BLIND_FINDINGS = (
    "split/kept", "split/view", "softmax/heads", "scale/width", "mask/inverted", "mask/after", "dropout/evaluation",
    "merge/view", "output/missing", "project/uses-vk",
)  # fmt: skip
K_SPLIT = "K = self.Wk(x).view(b, n, self.num_heads, self.d_key).transpose(1, 2)"
PLANTED = [  # the class, what is replaced, by what, and the mistake
    ("separate", "K.transpose(-2, -1)", "K", "score/untransposed"),
    ("separate", K_SPLIT, K_SPLIT.replace("num_heads, self.d_key).transpose(1, 2)", "num_heads, self.d_key)"),
     "split/kept-k"),
    ("separate", " / (self.d_key ** 0.5)", "", "scale/none"),
    ("separate", "(self.d_key ** 0.5)", "self.d_key", "scale/square"),
    ("separate", "/ (self.d_key ** 0.5)", "* (self.d_key ** 0.5)", "scale/times"),
    ("separate", "mask == 0, -1e9", "mask == 0, 1e-9", "mask/zero"),
    ("separate", "mask == 0, -1e9", 'mask == 0, float("-inf")', "mask/dark"),
    ("separate", "dim=-1", "dim=-2", "softmax/queries"),
    ("separate", "dim=-1", "dim=0", "softmax/batch"),
    ("separate", "out.transpose(1, 2).contiguous()", "out", "merge/view"),
    ("separate", "return self.Wo(out)", "return out", "output/missing"),
    ("separate", "return self.Wo(out)", "return out @ self.Wo.weight.T", "output/unbiased"),
    ("configured", "torch.tril(torch.ones(size, size))", "torch.tril(torch.ones(size, size), -1)", "mask/strict"),
    ("configured", "[:, :, :T, :T] == 0", "[:, :, :T, :T] == 1", "mask/inverted"),
    ("annotated", "scores.masked_fill(mask == 0, -1e9)", "scores * mask", "mask/zero"),
    ("annotated", "lin(x).view(n, -1, self.h, self.d_k).transpose(1, 2)", "lin(x).view(n, self.h, -1, self.d_k)",
     "split/view"),
    ("separate", "torch.matmul(Q, K.transpose(-2, -1))", "torch.matmul(K, Q.transpose(-2, -1))", "score/swapped"),
    ("annotated", "torch.matmul(p_attn, value), p_attn", "torch.matmul(p_attn.mT, value), p_attn", "weigh/transposed"),
    ("listed", "q.shape[-1] ** 0.5", "x.shape[-1] ** 0.5", "scale/width"),
    ("heads", "~mask", "mask", "mask/inverted"),
    ("heads", "softmax(scores, dim=-1)", "softmax(scores, dim=1)", "softmax/heads"),
    ("added", "scores = scores + attention_mask", "pass", "mask/ignored"),
    ("values first", "k.mT / q.shape[-1] ** 0.5", "k.mT", "scale/none"),
    ("padded", "masked_fill(key_padding_mask[:, None, None, :], float(\"-inf\"))", "masked_fill(scores < -1e9, 0)",
     "mask/ignored"),
    ("lengths", "-1e6", "1e-6", "mask/zero"),
    ("narrow heads", "k.shape[-1] ** -0.5", "x.shape[-1] ** -0.5", "scale/width"),
    ("a matrix for all heads", "self.head_dim**0.5", "(self.heads * self.head_dim) ** 0.5", "scale/width"),
    ("einsum", "self.W_V)", "self.W_K)", "project/uses-vk"),
    ("functional", "dropout_p=self.p if self.training else 0.0", "dropout_p=self.p", "dropout/evaluation"),
    ("strided", "F.softmax(scores, dim=-1)", "scores", "softmax/none"),
    ("strided", "F.dropout(F.softmax(scores, dim=-1), p=self.dropout, training=self.training)",
     "F.softmax(scores, dim=-1)", "dropout/never"),
]  # fmt: skip


def checked(source: str, **options: object) -> Report:
    return grade_class(source, **{"seconds": 60.0, **options})


@pytest.mark.thorough
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_class_is_accepted(name: str):
    report = checked(RIGHT[name])
    assert report.passed, report.lines


@pytest.mark.thorough
@pytest.mark.parametrize(("head", "finding"), list(zip(BLIND, BLIND_FINDINGS, strict=True)))
def test_mistakes_that_were_written_before_the_checker_are_named(head: str, finding: str):
    assert checked(BLIND[head]).finding == finding


@pytest.mark.parametrize(
    ("name", "old", "new", "finding"),
    [pytest.param(*row, marks=pytest.mark.thorough if at else ()) for at, row in enumerate(PLANTED)],
)
def test_a_planted_mistake_is_named(name: str, old: str, new: str, finding: str):
    assert old in RIGHT[name]
    report = checked(RIGHT[name].replace(old, new, 1) if finding != "project/uses-vk" else new.join(
        RIGHT[name].rsplit(old, 1)
    ))  # fmt: skip
    assert (report.passed, report.finding) == (False, finding), report.lines


WRAPPED = """
from torch import nn
class Wrapped(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, num_heads)
    def forward(self, x):
        return self.attn(x, x, x)[0]
"""


@pytest.mark.thorough
def test_a_module_of_pytorch_is_right_with_the_batch_first():
    assert checked(WRAPPED).finding == "project/turned"
    assert checked(WRAPPED.replace("num_heads)\n    def", "num_heads, batch_first=True)\n    def")).passed


@pytest.mark.thorough
def test_an_even_width_may_be_needed_and_layers_may_be_lazy():
    even = RIGHT["separate"].replace("super().__init__()", "super().__init__(); assert d_model % 2 == 0")
    assert checked(even).passed
    lazy = RIGHT["lengths"].replace("nn.Linear(num_hiddens, num_hiddens, bias)", "nn.LazyLinear(num_hiddens, bias)")
    assert checked(lazy).passed


@pytest.mark.thorough
def test_a_mask_of_a_form_that_is_not_known_is_left_out():
    report = checked(RIGHT["padded"].replace("[:, None, None, :]", "[:, :3, None, None, 0]"))
    assert report.passed
    assert "its mask was not checked: line 14: IndexError" in report.lines[0]


THREE = """
from torch import nn
class One(nn.Module):
    def forward(self, x): return x
class Two(One):
    def forward(self, x): return x
class Three(One):
    def forward(self, x): return x
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        pytest.param(
            THREE, "defines 3 modules: One, Two, Three; name one of them: --module Three", marks=pytest.mark.thorough
        ),
        pytest.param("x = 1\n", "defines no torch.nn.Module with a `forward`", marks=pytest.mark.thorough),
        pytest.param(
            RIGHT["separate"].replace("d_model, num_heads)", "d_model, num_heads, zeta)", 1),
            "needs an argument 'zeta', whose meaning is not known", marks=pytest.mark.thorough,
        ),
        pytest.param(
            RIGHT["separate"].replace("b, n, _ = x.shape", "while True: pass"), "took longer than 2 seconds",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            RIGHT["separate"].replace("b, n, _ = x.shape", "torch.ones(25_000_000_000)"),
            "line 17: RuntimeError: .*alloc", marks=pytest.mark.thorough,
        ),
        pytest.param(
            RIGHT["separate"].replace("(self, x, mask=None)", "(self, x, y, z, zeta)"),
            "MultiHeadAttention.forward needs x, y, z, zeta", marks=pytest.mark.thorough,
        ),
        pytest.param(
            RIGHT["separate"].replace("self.Wo = nn.Linear(d_model, d_model)", "self.Wo = nn.Linear(7, d_model)", 1)
            .replace("self.Wo(out)", "self.Wo(out[..., :7])"),
            "the parameters of MultiHeadAttention have other shapes than W_Q, W_K, W_V and W_O",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            RIGHT["separate"].replace("super().__init__()", "super().__init__(); assert d_model % 7 == 0, 'seven'"),
            r"line 7: AssertionError: seven; called with d_model=24, num_heads=3", marks=pytest.mark.thorough,
        ),
        pytest.param("class A(:\n", "line 1: SyntaxError", marks=pytest.mark.thorough),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_checked_gets_one_line(source: str, said: str):
    report = checked(source, seconds=2.0 if "longer" in said else 60.0)
    assert len(report.lines) == 1
    assert re.search(said, report.lines[0]), report.lines


@pytest.mark.thorough
def test_a_mistake_is_named_in_both_languages_with_line_shape_and_numbers(headwise: Command, tmp_path: Path):
    (tmp_path / "a.py").write_text(BLIND["scale: by the width of the model"])
    done = headwise("check", "multi-head-class", tmp_path / "a.py", "--seconds", "60")
    assert done.code == 1
    assert "the scores are divided by √d_model = √15, expected √d_k = √5" in done.out
    assert re.search(
        r"line 22: scores is \[2, 3, 7, 7\]; scores\[0, 0, 0, 0\] is -?[\d.]+, expected -?[\d.]+", done.out
    )
    for mistake, said in MISTAKES.items():
        assert said.zh != str(said), mistake


@pytest.mark.thorough
def test_an_unknown_mistake_is_not_given_a_cause():
    report = checked(RIGHT["listed"].replace("return w @ v", "return w @ v.sin().cumsum(1)"))
    assert (report.passed, report.finding) == (False, "")
    assert "the cause was not identified" in report.lines[-1]
    assert "w still agrees" in " ".join(report.lines) or "return still agrees" in " ".join(report.lines)
