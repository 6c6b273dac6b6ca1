"""Edited attention against its definition in float64: the whole matrix of weights, changed by hand."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.interventions import Edit, Forbid, Replace, Scale, Uniform
from headwise.interventions.computing import attend_edited
from headwise.interventions.edits import Placed
from headwise.kernels import events

B, H, H_KV, N, M, D = 2, 6, 3, 5, 11, 7


def tensors(h_kv: int = H_KV, n: int = N, m: int = M, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H, n, D, dtype=torch.float64, generator=made)
    k, v = torch.randn(2, B, h_kv, m, D, dtype=torch.float64, generator=made)
    return q, k, v


def edited(edits: list[Edit], q: Tensor, k: Tensor, v: Tensor, to_itself: bool = True, **options: Any) -> Any:
    placed = [Placed(edit, [], "layer") for edit in edits]
    with events.within(edited=partial(attend_edited, placed, to_itself)), events.subscribe(modules={}, edits=placed):
        return hw.attend(q, k, v, **options)


def weights_of(q: Tensor, k: Tensor, allowed: Tensor, scale: float = 1 / math.sqrt(D)) -> Tensor:
    logits = q @ k.repeat_interleave(H // k.shape[1], 1).mT * scale
    return logits.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)


def causal(n: int = N, m: int = M) -> Tensor:
    return torch.ones(n, m, dtype=torch.bool).tril(m - n).expand(B, H, n, m).clone()


def product(weights: Tensor, v: Tensor) -> Tensor:
    return weights @ v.repeat_interleave(H // v.shape[1], 1)


# Query i of the call is at position i + 6 of the sequence.
@pytest.mark.parametrize("heads", [None, [1], [0, 1], [1, 2, 5], 4])
def test_forbidden_pairs_have_no_weight_and_the_others_sum_to_one(heads: Any) -> None:
    q, k, v = tensors()
    allowed = causal()
    for head in range(H) if heads is None else [heads] if isinstance(heads, int) else heads:
        for query, key in [(1, 0), (1, 4), (4, 0), (4, 4)]:
            allowed[:, head, query, key] = False
    expected = weights_of(q, k, allowed)
    out, amap = edited([Forbid([7, -1], [0, 4], heads=heads)], q, k, v, is_causal=True, return_map=True)
    torch.testing.assert_close(out, product(expected, v))
    torch.testing.assert_close(amap.to_dense(), expected)
    torch.testing.assert_close(amap.T @ q, expected.mT @ q)


def test_sets_may_differ_between_batch_entries() -> None:
    q, k, v = tensors()
    queries, keys = torch.zeros(B, M, dtype=torch.bool), torch.zeros(B, M, dtype=torch.bool)
    queries[0, 8], queries[1, 10], keys[0, 2:5], keys[1, ::2] = True, True, True, True
    allowed = causal()
    allowed[0, 3:, 2, 2:5] = False
    allowed[1, 3:, 4, ::2] = False
    out, amap = edited([Forbid(queries, keys, heads=[3, 4, 5])], q, k, v, is_causal=True, return_map=True)
    torch.testing.assert_close(out, product(weights_of(q, k, allowed), v))
    torch.testing.assert_close(amap.to_dense(), weights_of(q, k, allowed))


def test_a_query_that_loses_all_keys_is_fully_masked() -> None:
    q, k, v = tensors()
    out, amap = edited([Forbid(8, None)], q, k, v, is_causal=True, return_map=True)
    assert bool((out[:, :, 2] == 0).all())
    assert bool((amap[:, :, 2] == 0).all())
    assert bool((out[:, :, 3] != 0).all())


def test_many_separate_keys_are_forbidden_too() -> None:
    q, k, v = tensors(n=3, m=301)
    allowed = causal(3, 301)
    allowed[:, :, 1, ::2] = False
    out = edited([Forbid(299, slice(None, None, 2))], q, k, v, is_causal=True)
    torch.testing.assert_close(out, product(weights_of(q, k, allowed), v))


@pytest.mark.parametrize("queries", [None, [6, 9]])
@pytest.mark.parametrize("factor", [0.0, -0.5, 3])
def test_scaled_weights_are_not_normalised_again(factor: float, queries: Any) -> None:
    q, k, v = tensors()
    before = weights_of(q, k, causal())
    expected = before.clone()
    for query in range(N) if queries is None else [0, 3]:
        expected[:, [2, 3], query, 1:3] *= factor
    out, amap = edited([Scale(factor, queries, [1, 2], heads=[2, 3])], q, k, v, is_causal=True, return_map=True)
    torch.testing.assert_close(out, product(expected, v))
    torch.testing.assert_close(amap.to_dense(), before)


@pytest.mark.parametrize("score", [(), (hw.SoftCap(2.0), hw.SinkLogits(torch.arange(6.0)))])
def test_uniform_weights_are_equal_over_the_allowed_keys(score: Any) -> None:
    q, k, v = tensors()
    expected = hw.attend(q, k, v, is_causal=True, score=score, return_map=True)[1].to_dense()
    expected[:, 1:3] = (causal() / causal().sum(-1, keepdim=True))[:, 1:3]
    out = edited([Uniform(heads=[1, 2])], q, k, v, is_causal=True, score=score)
    torch.testing.assert_close(out, product(expected, v))
    expected[:, 1:3, :4] = hw.attend(q, k, v, is_causal=True, score=score, return_map=True)[1][:, 1:3, :4]
    out = edited([Uniform(heads=[1, 2], queries=10)], q, k, v, is_causal=True, score=score)
    torch.testing.assert_close(out, product(expected, v))


@pytest.mark.parametrize("other_kv", [1, 2, 6])
def test_weights_of_another_run_replace_those_of_some_heads(other_kv: int) -> None:
    q, k, v = tensors()
    other = hw.attend(*tensors(other_kv, seed=1), is_causal=True, return_map=True)[1]
    expected = weights_of(q, k, causal())
    expected[:, [0, 4, 5]] = other.to_dense()[:, [0, 4, 5]]
    out, amap = edited([Replace(other, heads=[5, 0, 4])], q, k, v, is_causal=True, return_map=True)
    torch.testing.assert_close(out, product(expected, v))
    torch.testing.assert_close(amap.to_dense(), expected)
    expected[:, :, :2] = weights_of(q, k, causal())[:, :, :2]
    out = edited([Replace({"layer": other}, heads=[5, 0, 4], queries=slice(8, None))], q, k, v, is_causal=True)
    torch.testing.assert_close(out, product(expected, v))


def test_edits_apply_in_their_order() -> None:
    q, k, v = tensors()
    allowed = causal()
    allowed[:, 1:4, :, 3] = False
    expected = weights_of(q, k, allowed)
    expected[:, 3:, 2, :4] *= 0.5
    edits = [Forbid(None, 3, heads=[1, 2, 3]), Scale(0.5, 8, slice(4), heads=[3, 4, 5])]
    torch.testing.assert_close(edited(edits, q, k, v, is_causal=True), product(expected, v))
    torch.testing.assert_close(
        edited([Uniform(), Forbid(None, slice(1, None))], q, k, v)[..., 0],
        v.repeat_interleave(2, 1)[:, :, :1, 0].expand(-1, -1, N),
    )


def test_queries_of_cross_attention_count_from_zero() -> None:
    q, k, v = tensors()
    allowed = torch.ones(B, H, N, M, dtype=torch.bool)
    allowed[:, :, [0, 4], 9] = False
    out = edited([Forbid([0, -1], 9)], q, k, v, to_itself=False)
    torch.testing.assert_close(out, product(weights_of(q, k, allowed), v))


@pytest.mark.parametrize("edits", [
    [Forbid([8, 9], 2, heads=[1])], [Scale(0.25, 9, [0, 1], heads=[0, 5])], [Uniform(heads=[2], queries=9)],
    [Replace(hw.attend(*tensors(2, seed=1), is_causal=True, return_map=True)[1], heads=[3]), Forbid(None, 1)],
])  # fmt: skip
def test_gradients_are_those_of_the_edited_weights(edits: list[Edit]) -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    y = torch.randn(B, H, N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def by_hand() -> Tensor:
        allowed = causal()
        weights = weights_of(q, k, allowed)
        for edit in edits:
            heads = range(H) if edit.heads is None else edit.heads
            rows = torch.zeros(H, N, 1, dtype=torch.bool)
            queries = edit.tokens["queries"]
            for head in heads:
                rows[head, [at - 6 for at in queries] if queries is not None else slice(None)] = True
            if isinstance(edit, Forbid):
                away = torch.zeros(M, dtype=torch.bool)
                away[edit.tokens["keys"]] = True
                kept = weights.masked_fill(rows & away, 0.0)
                weights = kept / kept.sum(-1, keepdim=True)
            elif isinstance(edit, Scale):
                factor = torch.ones(M, dtype=torch.float64)
                factor[edit.tokens["keys"]] = edit.factor
                weights = torch.where(rows, weights * factor, weights)
            elif isinstance(edit, Replace):
                weights = torch.where(rows, edit.maps.to_dense(), weights)
            else:
                weights = torch.where(rows, allowed / allowed.sum(-1, keepdim=True), weights)
        return product(weights, v)

    expected = torch.autograd.grad((by_hand() * y).sum(), (q, k, v))
    found = torch.autograd.grad((edited(edits, q, k, v, is_causal=True) * y).sum(), (q, k, v))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_delta_is_that_of_all_heads_together() -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    received = []
    with events.listen(received.append):
        out = edited([Forbid(9, 1, heads=[2]), Scale(0.5, 8, heads=[4])], q, k, v, is_causal=True)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    assert len(received) == 1
    torch.testing.assert_close(received[0], (gradient * out.detach()).sum(-1))


def test_measures_are_those_of_the_edited_weights() -> None:
    q, k, v = tensors()
    _, amap = edited([Forbid(None, 0, heads=[1])], q, k, v, is_causal=True, return_map=True, measures=["sink_mass"])
    sinks = amap.measured["sink_mass"]
    assert (sinks > 0).tolist() == [[True, False, True, True, True, True]] * B


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_and_quantised_keys(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in tensors())
    allowed = causal()
    allowed[:, 1, :, 5] = False
    expected = product(weights_of(q.double(), k.double(), allowed), v.double())
    for keys, values in ((k, v), (hw.kernels.QuantizedKV.of(k), hw.kernels.QuantizedKV.of(v))):
        out = edited([Forbid(None, 5, heads=1)], q, keys, values, is_causal=True)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)


def test_numbers_of_numpy_and_pytorch_are_numbers() -> None:
    q, k, v = tensors()
    plain = edited([Scale(0.5, 7, [0, 4], heads=[1, 2]), Forbid(-1, 3, heads=4)], q, k, v)
    of_numpy = [
        Scale(np.float32(0.5), np.int64(7), np.array([0, 4]), heads=np.array([1, 2])),
        Forbid(torch.tensor(-1), [np.int32(3)], heads=torch.tensor(4)),
    ]
    assert torch.equal(edited(of_numpy, q, k, v), plain)
    where = np.arange(11) == 7
    assert torch.equal(edited([Scale(0.5, where)], q, k, v), edited([Scale(0.5, 7)], q, k, v))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_scaling_by_zero_removes_values_that_are_not_finite(bad: float) -> None:
    q, k, v = tensors()
    spoilt = v.clone()
    spoilt[:, 1, 4] = bad
    out, amap = edited([Scale(0.0, keys=4)], q, k, spoilt, return_map=True)
    torch.testing.assert_close(out, edited([Scale(0.0, keys=4)], q, k, v))
    assert amap.nonfinite_values.tolist() == [[0, D, 0]] * B  # those of the model


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: Forbid("all", 1), hw.ConfigError, r"Forbid\(queries\)='all'"),
    (lambda: Forbid(1, [True]), hw.ConfigError, r"Forbid\(keys\)=\[True\]"),
    (lambda: Forbid(1, torch.ones(3)), hw.DTypeError, r"Forbid\(keys\): expected positions"),
    (lambda: Forbid(torch.ones(1, 1, 3) > 0, 1), hw.ShapeError, r"Forbid\(queries\): expected boolean \[tokens\]"),
    (lambda: Scale(math.nan), hw.ConfigError, r"Scale\(factor=nan\)"),
    (lambda: Uniform(heads=[]), hw.ConfigError, r"Uniform\(heads=\[\]\)"),
    (lambda: Uniform(heads=[-1]), hw.ConfigError, r"whole numbers, counted from 0"),
    (lambda: Uniform(heads=[1, 2.0]), hw.ConfigError, r"whole numbers, counted from 0"),
    (lambda: Uniform(heads=torch.tensor([True, False])), hw.ConfigError, r"whole numbers, counted from 0"),
    (lambda: Scale("1"), hw.ConfigError, r"Scale\(factor='1'\)"),
    (lambda: Forbid([1, 2.5], 1), hw.ConfigError, r"Forbid\(queries\)=\[1, 2.5\]"),
    (lambda: edited([Scale(0.0, torch.ones(3, 11) > 0)], *tensors()), hw.ShapeError,
     r"layer: its call is a batch of 2, but a set of tokens is boolean \[3, 11\]; expected \[tokens\], or \[2, col"),
    (lambda: edited([Forbid(7, torch.ones(5, 11) > 0)], *tensors()), hw.ShapeError, r"boolean \[5, 11\]"),
    (lambda: Replace({}), hw.ConfigError, r"Replace\(maps\): expected an AttentionMap"),
    (lambda: edited([Uniform(heads=[1, 6])], *tensors()), hw.ConfigError, r"Uniform\(heads=\[1, 6\]\): layer has 6"),
    (lambda: edited([Replace(hw.attend(*tensors(n=4), return_map=True)[1])], *tensors()), hw.ShapeError,
     r"the map of layer is \(2, 6, 4, 11\), but its call is \(2, 6, 5, 11\)"),
    (lambda: edited([Replace({"other": hw.attend(*tensors(), return_map=True)[1]})], *tensors()), hw.ConfigError,
     "no map of 'layer'"),
    (lambda: edited([Replace(hw.attend(*tensors(), scale=1.0, return_map=True)[1], heads=[0])], *tensors(),
                    return_map=True), hw.ConfigError, "another mask, scale or score"),
    (lambda: edited([Uniform(queries=8)], *tensors(), return_map=True), hw.ConfigError, "one map cannot hold both"),
])  # fmt: skip
def test_bad_input(make: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


PADDED = {
    "left": hw.Lengths([M, 7], side="right"),
    "right": hw.Lengths([M, 7]),
    "both": hw.Lengths([M, 9], side="right") & hw.Lengths([M, M - 2]),
}
FIRST = {"left": 4, "right": 0, "both": 2}  # column of the second sequence's first token


@pytest.mark.parametrize("side", PADDED)
def test_positions_are_of_tokens_and_two_dimensional_sets_are_of_columns(side: str) -> None:
    q, k, v = tensors(n=M)
    first, columns = FIRST[side], torch.zeros(B, M, dtype=torch.bool)
    columns[0, [1, 10]] = columns[1, [first + 1, first + 6]] = True
    whole = edited([Scale(0.0, keys=columns)], q, k, v, mask=PADDED[side])
    assert torch.equal(whole, edited([Scale(0.0, keys=[1, -1])], q, k, v, mask=PADDED[side]))
    tokens = torch.tensor([False, True, False, True])  # of 0, 1, 2 and 3, whatever the length
    columns[:] = False
    columns[0, [1, 3]] = columns[1, [first + 1, first + 3]] = True
    sets = [edited([Forbid(one, one)], q, k, v, mask=PADDED[side]) for one in (tokens, columns)]
    assert torch.equal(*sets)


@pytest.mark.parametrize("side", PADDED)
def test_keys_of_cross_attention_are_tokens_and_its_queries_are_counted_in_the_call(side: str) -> None:
    q, k, v = tensors()
    queries, keys = torch.zeros(B, N, dtype=torch.bool), torch.zeros(B, M, dtype=torch.bool)
    queries[:, [0, 4]] = keys[0, 10] = keys[1, FIRST[side] + 6] = True
    given = [Forbid([0, -1], -1), Forbid(queries, keys)]
    assert torch.equal(*(edited([one], q, k, v, to_itself=False, mask=PADDED[side]) for one in given))


def test_a_sequence_without_tokens_has_no_positions() -> None:
    q, k, v = tensors(n=M)
    mask, edits = hw.Lengths([0, 7]), [Scale(0.0, keys=[0, -1]), Forbid(slice(2), 1), Uniform(queries=-1)]
    changed = edited(edits, q, k, v, mask=mask)
    assert torch.equal(changed[0], hw.attend(q, k, v, mask=mask)[0])
    assert not torch.equal(changed[1], hw.attend(q, k, v, mask=mask)[1])


def test_weights_of_a_batch_that_is_padded_otherwise_are_refused() -> None:
    q, k, v = tensors(n=M)
    maps = {side: hw.attend(q, k, v, mask=mask, return_map=True)[1] for side, mask in PADDED.items()}
    edited([Replace(maps["left"])], q, k, v, mask=PADDED["left"])
    for mask in (PADDED["right"], None):
        with pytest.raises(hw.ShapeError, match=r"Replace\(maps\): the padding of layer is in other columns"):
            edited([Replace(maps["left"])], q, k, v, mask=mask)
