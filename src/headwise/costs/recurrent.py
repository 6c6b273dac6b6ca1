"""Layers with a state of constant size instead of a cache: state-space models, linear attention, short convolutions.

Work is in multiply-adds, sizes are in numbers, as in `Counts`. A state is counted as the recurrence computes it, token
by token: the outer product that is added to it, and its product with a vector (two for the delta rule); kernels that
compute a text in chunks do more. Multiplication by decays and gates is not counted, as elsewhere.

>>> mamba_2(64, heads=8, head_dim=16, groups=1, state=32, kernel=4).state
4096
"""

from dataclasses import dataclass

STATE_BYTES = 4  # float32, whatever the dtype of the model is


@dataclass(frozen=True)
class Recurrence:
    """One layer."""

    parameters: int
    width: int  # d_model
    per_token: int  # work of projections and convolution
    inside: int  # numbers per token that one step passes to the next
    update: int  # work per token to update the state and to read it
    state: int  # numbers in the state of a text, which are float32
    recent: int  # numbers of the last tokens that the convolution reads in the next step

    def state_bytes(self, size: int) -> int:
        """Bytes that are kept between decoding steps of a text; size: of a number of the model."""
        return self.state * STATE_BYTES + self.recent * size


def mamba_1(
    d_model: int, *, inner: int, rank: int, state: int, kernel: int, bias: bool = False, conv_bias: bool = True,
    norms: bool = False,
) -> Recurrence:  # fmt: skip
    """A selective state-space model (Gu, Dao 2023, 2312.00752); norms: of what chooses, as in Jamba."""
    linear = d_model * 2 * inner + inner * (rank + 2 * state) + rank * inner + inner * d_model
    convolved = inner * kernel
    extra = inner * (state + 2)  # A, D, and the bias of time steps
    extra += bias * (2 * inner + d_model) + conv_bias * inner + norms * (rank + 2 * state)
    return Recurrence(
        linear + convolved + extra, d_model, linear + convolved, inside=4 * inner + rank + 2 * state,
        update=2 * inner * state, state=inner * state, recent=inner * kernel,
    )  # fmt: skip


def mamba_2(
    d_model: int, *, heads: int, head_dim: int, groups: int, state: int, kernel: int, bias: bool = False,
    out_bias: bool = False, conv_bias: bool = True, norm: bool = True,
) -> Recurrence:  # fmt: skip
    """A state-space model with heads (Dao, Gu 2024, 2405.21060); norm: of its output."""
    inner = heads * head_dim
    channels = inner + 2 * groups * state
    projected = inner + channels + heads
    linear, convolved = d_model * projected + inner * d_model, channels * kernel
    extra = 3 * heads + norm * inner + conv_bias * channels + bias * projected + out_bias * d_model
    return Recurrence(
        linear + convolved + extra, d_model, linear + convolved, inside=projected + channels + inner,
        update=2 * inner * state, state=inner * state, recent=channels * kernel,
    )  # fmt: skip


def gated_delta(d_model: int, *, heads: int, key_heads: int, key_dim: int, value_dim: int, kernel: int) -> Recurrence:
    """Linear attention by the gated delta rule (Yang et al. 2024, 2412.06464), as in Qwen3-Next."""
    keys, values = key_heads * key_dim, heads * value_dim
    channels, projected = 2 * keys + values, 2 * keys + 2 * values + 2 * heads
    linear, convolved = d_model * projected + values * d_model, channels * kernel
    state = heads * key_dim * value_dim
    return Recurrence(
        linear + convolved + 2 * heads + value_dim, d_model, linear + convolved, inside=projected + channels + values,
        update=3 * state, state=state, recent=channels * kernel,
    )  # fmt: skip


def short_convolution(d_model: int, *, kernel: int, bias: bool = False) -> Recurrence:
    """A gated convolution over the last tokens, as in LFM2."""
    linear, convolved = 4 * d_model * d_model, d_model * kernel
    return Recurrence(
        linear + convolved + bias * 5 * d_model, d_model, linear + convolved, inside=5 * d_model, update=0, state=0,
        recent=d_model * kernel,
    )  # fmt: skip
