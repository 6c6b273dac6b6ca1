"""Every step of a layer with its shape and its numbers."""

from torch import Tensor

from headwise.reports.curves import Matrices, Matrix
from headwise.textbook.guide.topic import Topic, exercise
from headwise.textbook.trace import trace
from headwise.wording import Bilingual


@exercise(
    "Four shapes, each as a list: of Q after the split and the transpose, of the scores, of the outputs of the heads (before they are merged), and of the output of the layer; for `b` sequences of `n` tokens, width `d` and `h` heads.",
    "对 `b` 个长度为 `n` 的序列、模型维度 `d`、`h` 个头，依次返回四个形状（各为一个列表）：切分并转置后的 Q、分数、各头的输出（合并之前）、整层的输出。",
    lambda draw: (draw.size(), draw.size(), (h := draw.size(1, 8)) * draw.size(1, 8), h),
)
def shapes_of(b: int, n: int, d: int, h: int) -> list[list[int]]:
    """Our solution."""
    return [[b, h, n, d // h], [b, h, n, n], [b, h, n, d // h], [b, n, d]]


@exercise(
    "A multi-head layer without loops, softmax(q kᵀ / √d_k) v in each head, head 0 on the first d/h columns: `x` `[b, n, d]`, `wq`, `wk`, `wv`, `wo` `[d, d]` (used as x @ w), `num_heads` heads.",
    "不用循环计算整个多头层，每个头算 softmax(q kᵀ / √d_k) v，第 0 个头取前 d/h 列：`x` `[b, n, d]`，`wq`、`wk`、`wv`、`wo` `[d, d]`（用作 x @ w），共 `num_heads` 个头。",
    lambda draw: (
        draw.normal(draw.size(1, 3), draw.size(), d := (h := draw.size(1, 3)) * draw.size(1, 3)),
        *(draw.normal(d, d) / d**0.5 for _ in range(4)), h,
    ),
    tolerance=1e-3,
)  # fmt: skip
def multi_head(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, num_heads: int) -> Tensor:
    """Our solution."""
    q, k, v = ((x @ w).unflatten(-1, (num_heads, -1)).transpose(1, 2) for w in (wq, wk, wv))
    p = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return (p @ v).transpose(1, 2).flatten(2) @ wo


@exercise(
    "Q has the shape `[b, n, h, d_k]`: nobody transposed it. Return the scores that `q @ k.transpose(-2, -1) / √d_k` gives; their shape shows what attends to what.",
    "Q 的形状是 `[b, n, h, d_k]`，忘了转置。返回 `q @ k.transpose(-2, -1) / √d_k` 得到的分数；从它的形状可以看出是什么在关注什么。",
    lambda draw: (
        draw.normal(b := draw.size(1, 3), n := draw.size(), h := draw.size(1, 4), d := draw.size()),
        draw.normal(b, n, h, d),
    ),
)
def scores_without_transpose(q: Tensor, k: Tensor) -> Tensor:
    """Our solution."""
    return q @ k.mT / q.shape[-1] ** 0.5


def picture() -> Matrices:
    """The matrices of one head in a small trace."""
    steps = {step.name: step.tensor for step in trace(5, 8, 2)}
    shown = (
        ("X [5, 8]", steps["x"][0]), ("S = Q Kᵀ / √d_k [5, 5]", steps["scores"][0, 0]),
        ("P = softmax(S) [5, 5]", steps["weights"][0, 0]), ("Y [5, 8]", steps["output"][0]),
    )  # fmt: skip
    return Matrices(tuple(Matrix(title, one) for title, one in shown))


TOPIC = Topic(
    place=3,
    title=Bilingual("Shapes, step by step", "逐步追踪形状"),
    formula=r"\underset{[b,h,n,d_k]}{Q}\;\underset{[b,h,d_k,n]}{K^{\top}} = \underset{[b,h,n,n]}{S}, \qquad \underset{[b,h,n,n]}{P}\;\underset{[b,h,n,d_k]}{V} = \underset{[b,h,n,d_k]}{\text{heads}}",
    plain="[b,h,n,d_k] @ [b,h,d_k,n] = [b,h,n,n];  [b,h,n,n] @ [b,h,n,d_k] = [b,h,n,d_k]",
    intro=Bilingual(
        """
        Most errors in a hand-written layer are errors of shape that PyTorch does not notice. `headwise trace` computes a
        small layer by its definition and prints every step: the formula, the shape, what the axes are, and the numbers
        of the first head. The last step is compared with the module's own output, so the steps are those of the layer
        and not a drawing of it. Any design can be traced: `--design latent`, `--num-kv-heads 1`, `--causal`.
        """,
        """
        手写多头层时的错误大多是形状错误，而 PyTorch 未必会报错。`headwise trace` 按定义计算一个小层，并打印每一步：公式、
        形状、各轴的含义，以及第一个头的数值。最后一步会与模块自身的输出核对，所以打印出来的就是这个层真正的计算步骤。
        任何设计都可以这样追踪，例如 `--design latent`、`--num-kv-heads 1`、`--causal`。
        """,
    ),
    code="headwise trace --seq 3 --d-model 4 --num-heads 2{lang}",
    reading=Bilingual(
        """
        Follow one axis at a time. The token axis n is second in X, third between steps 6 and 11, and second again in Y.
        Between them the head is in front of it, so that `@` treats batch and head alike: b·h independent products of
        [n, d_k] with [d_k, n]. A listing that reshapes to [b, n, h, d_k] and multiplies without the transpose runs
        without an error as well; its scores are [b, n, h, h], and heads of one token attend to each other.
        """,
        """
        一次只看一个轴。词元轴 n 在 X 中排第二，在第 6 至第 11 步中排第三，在 Y 中又回到第二。其间头轴排在它前面，`@`
        把批次与头同等对待：共 b·h 个相互独立的 [n, d_k] 与 [d_k, n] 的乘积。如果只重塑成 [b, n, h, d_k] 而不转置就相乘，
        程序同样能运行，但得到的分数是 [b, n, h, h]：变成了同一词元的各个头互相关注。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "The input, the scores and weights of one head, and the output of a traced layer with five tokens.",
        "一个五词元的层：输入、其中一个头的分数与权重，以及输出。",
    ),
    claims=("multi-head-formula", "one-step-path", "listing-transposes"),
    exercises=(shapes_of, multi_head, scores_without_transpose),
)
