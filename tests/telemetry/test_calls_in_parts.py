"""Attention that a module computes in parts: blocks of queries, steps with a cache of fixed length, heads in a loop."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.models.recognise import scores

B, H, N, D, STEP = 2, 3, 11, 5, 4  # the last block is shorter
PLACED = ("mean_distance", "self_mass", "previous_mass")
MEASURES = (*PLACED, "entropy")
STARTS = range(0, N, STEP)

CAUSAL = torch.ones(N, N).tril().bool()
NEAR = CAUSAL & ~CAUSAL.tril(-3)
REAL = torch.arange(N) < torch.tensor([N, 6])[:, None]
ALLOWED = {
    "causal": CAUSAL[None, None],
    "window": NEAR[None, None],
    "window and first key": (NEAR | (CAUSAL & (torch.arange(N) == 0)))[None, None],
    "padding": CAUSAL & REAL[:, None, None],
    "all padded": (CAUSAL & (torch.arange(N) < N - 1))[None, None],
    "padded at the start": CAUSAL & (torch.arange(N) >= torch.tensor([0, 3])[:, None, None, None]),
    "another for each head": torch.stack([CAUSAL, NEAR, CAUSAL])[None],
}


class Blocks(nn.Module):
    """Attention of some queries at a time."""

    def __init__(self, way: str, allowed: Tensor | None) -> None:
        super().__init__()
        self.way, self.allowed = way, allowed

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([self.block(q[:, :, i : i + STEP], k, v, i) for i in STARTS], 2)

    def block(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        mask = None if self.allowed is None else self.allowed[:, :, start : start + STEP]
        if self.way == "fused":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        added = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -1e9)
        if self.way == "added":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=added)
        return (q @ k.mT / math.sqrt(D) + added).softmax(-1) @ v


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return list(torch.randn(3, B, H, N, D, dtype=torch.float64))


def dense(q: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    """All weights."""
    logits = q @ k.mT / math.sqrt(D)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -math.inf)
    return logits.softmax(-1).nan_to_num(0.0)


def numbers(p: Tensor) -> dict[str, Tensor]:
    """The measures of weights [b, h, n, n], means over queries that may attend to such keys: [h]."""
    i = torch.arange(N)
    seen = p.sum(-1) > 0

    def mean(rows: Tensor, which: Tensor) -> Tensor:
        return ((rows * which).sum((0, 2)) / which.sum((0, 2))).float()

    own, before = p.diagonal(0, 2, 3), F.pad(p.diagonal(-1, 2, 3), (1, 0))
    return {
        "mean_distance": mean((p * (i[:, None] - i).abs()).sum(-1), seen),
        "self_mass": mean(own, own > 0),
        "previous_mass": mean(before, before > 0),
        "entropy": mean(-p.xlogy(p).sum(-1), seen),
    }


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("way", ["fused", "added", "written"])
@pytest.mark.parametrize("kind", ALLOWED)
def test_blocks_of_queries_are_measured_at_their_positions(kind, way):
    q, k, v = inputs()
    model = Blocks(way, ALLOWED[kind])
    expected = dense(q, k, ALLOWED[kind])
    with hw.watch(model, measures=MEASURES, maps="lazy") as record:
        model(q, k, v)
    for name, wanted in numbers(expected).items():
        torch.testing.assert_close(record.latest[name][0], wanted, rtol=1e-5, atol=1e-6, msg=name)
    for start, amap in zip(STARTS, record.maps.values(), strict=True):
        rows = slice(start, min(start + STEP, N))
        torch.testing.assert_close(amap[:], expected[:, :, rows, : rows.stop])
    assert record.unwatched == {}


def test_the_mask_of_a_block_is_causal_and_its_later_keys_are_left_out():
    q, k, v = inputs()
    found = hw.models.recognise(Blocks("written", ALLOWED["causal"]), q, k, v)
    assert [call.map.shape[2:] for call in found] == [(4, 4), (4, 8), (3, 11)]
    assert [repr(call.mask) for call in found] == ["Causal()"] * 3
    window = hw.models.recognise(Blocks("fused", ALLOWED["window"]), q, k, v)
    assert [repr(call.mask) for call in window] == [repr(hw.Causal() & hw.Window(3))] * 3
    padded = hw.models.recognise(Blocks("fused", ALLOWED["padding"]), q, k, v)
    assert ["Dense" in repr(call.mask) for call in padded] == [False] * 3
    certificate = hw.models.certify(Blocks("written", ALLOWED["causal"]), (q, k, v))
    assert [one.function for one in certificate] == [
        "attend(q, k[:, :, :4], v[:, :, :4], mask=Causal(), scale=0.4472)",
        "attend(q, k[:, :, :8], v[:, :, :8], mask=Causal(), scale=0.4472)",
        "attend(q, k, v, mask=Causal(), scale=0.4472)",
    ]


def test_a_strictly_causal_mask_of_all_queries_is_not_cut():
    q, k, v = inputs()
    found = hw.models.recognise(_One(CAUSAL.tril(-1)[None, None]), q, k, v)
    assert found[0].map.shape == (B, H, N, N)
    torch.testing.assert_close(found[0].map[:], dense(q, k, CAUSAL.tril(-1)))


class _One(nn.Module):
    def __init__(self, allowed: Tensor | None) -> None:
        super().__init__()
        self.allowed = allowed

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.allowed)


def test_blocks_that_attach_computes_have_the_same_outputs_and_gradients():
    q, k, v = (x.requires_grad_() for x in inputs())
    model = Blocks("written", ALLOWED["padding"])
    expected = model(q, k, v)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    with hw.attach(model, (q, k, v)) as handle, hw.watch(model, measures=MEASURES) as record:
        out = model(q, k, v)
        assert handle.attached == ("",)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (q, k, v)), wanted)
    mine = numbers(dense(q.detach(), k.detach(), ALLOWED["padding"]))
    torch.testing.assert_close(record.latest["mean_distance"][0], mine["mean_distance"])


@pytest.mark.parametrize("kept", [1 << 20, 0])
def test_a_mask_is_looked_at_once_for_all_layers_that_share_it(kept, monkeypatch):
    """Also if it is too large to be kept; another one is not mistaken for it."""
    monkeypatch.setattr(scores, "KEPT", kept)
    looked = []
    place = scores.placed_mask
    monkeypatch.setattr(scores, "placed_mask", lambda *a, **b: looked.append(1) or place(*a, **b))
    q, k, v = inputs()
    other = CAUSAL[:4].clone()
    other[2, 9] = True  # hidden from all queries of the first
    model = nn.ModuleList([_One(CAUSAL[:4]), _One(CAUSAL[:4].clone()), _One(other), _One(CAUSAL[1:5])])

    class All(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, q, k, v):
            return [layer(q[:, :, :4], k, v) for layer in self.layers]

    found = hw.models.recognise(All(), q, k, v)
    assert len(looked) == 3
    assert [call.map.shape[3] for call in found] == [4, 4, N, 5]
    assert found[0].mask is found[1].mask


def test_positions_that_nothing_determines_are_remarked_and_not_measured():
    q, k, v = inputs()
    model = Blocks("fused", None)
    with hw.watch(model, measures=(*MEASURES, "max_logit"), maps="lazy") as record:
        model(q, k, v)
    assert all(bool(record.latest[name].isnan().all()) for name in PLACED)
    expected = dense(q, k, None)
    torch.testing.assert_close(record.latest["entropy"][0], numbers(expected)["entropy"])
    assert bool(record.latest["max_logit"].isfinite().all())
    assert "its 4 queries are among its 11 keys is not known" in record.remarks[""]
    assert record.to_dict()["remarks"] == record.remarks
    assert "1 with remarks" in repr(record)
    assert "see record.remarks" in repr(record.table())
    torch.testing.assert_close(torch.cat([amap[:] for amap in record.maps.values()], 2), expected)
    record.clear()
    assert record.remarks == {}


BESIDE = torch.arange(N)[None] - torch.arange(N)[:, None]  # of the key and the query


@pytest.mark.parametrize("way", ["fused", "written"])
@pytest.mark.parametrize(
    "allowed", [BESIDE.abs() <= 2, (BESIDE >= -3) & (BESIDE <= 1), BESIDE <= 4, BESIDE.abs() <= 6],
    ids=["two-sided", "longer before", "four keys ahead", "wider than a block"],
)  # fmt: skip
def test_blocks_with_a_window_to_later_keys_are_not_taken_for_causal_ones(allowed, way):
    q, k, v = inputs()
    with hw.watch(Blocks(way, allowed[None, None]), measures=MEASURES, maps="lazy") as record:
        record.model(q, k, v)
    assert all(bool(record.latest[name].isnan().all()) for name in PLACED)
    assert "would overlap" in record.remarks[""] or "not known" in record.remarks[""]
    expected = dense(q, k, allowed)
    torch.testing.assert_close(record.latest["entropy"][0], numbers(expected)["entropy"])


def test_blocks_of_strictly_causal_attention_are_not_taken_for_causal_ones():
    q, k, v = inputs()
    allowed = CAUSAL.tril(-1).clone()
    allowed[0, 0] = True  # PyTorch's own result for a fully masked query is NaN
    with hw.watch(Blocks("fused", allowed[None, None]), measures=MEASURES) as record:
        record.model(q, k, v)
    assert all(bool(record.latest[name].isnan().all()) for name in PLACED)
    assert "not known" in record.remarks[""]


def test_sequences_one_after_the_other_in_blocks_are_measured_at_their_positions():
    q, k, v = inputs()

    class Each(Blocks):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            forward = super().forward
            return torch.cat([forward(q[i : i + 1], k[i : i + 1], v[i : i + 1]) for i in range(B)])

    with hw.watch(Each("fused", ALLOWED["causal"]), measures=MEASURES) as record:
        record.model(q, k, v)
    for name, wanted in numbers(dense(q, k, CAUSAL)).items():
        torch.testing.assert_close(record.latest[name][0], wanted, rtol=1e-5, atol=1e-6, msg=name)


class Cross(nn.Module):
    """Attention of one tensor to another."""

    def __init__(self, cached: bool) -> None:
        super().__init__()
        self.q, self.k, self.cached = nn.Linear(H * D, H * D), nn.Linear(H * D, H * D), cached

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in (self.q(x), self.k(context)))
        k = torch.tensor(k.tolist()) if self.cached else k
        return F.scaled_dot_product_attention(q, k, k)


def crossed(model: nn.Module) -> hw.telemetry.Record:
    torch.manual_seed(1)
    x, context = torch.randn(B, STEP, H * D), torch.randn(B, N, H * D)
    with hw.watch(model, measures=MEASURES, maps="lazy") as record:
        model(x, context)
    return record


def test_cross_attention_is_measured_as_before():
    """Queries and keys of two tensors, and those of a module that is called so."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.cross_attn = _One(None)

        def forward(self, x, context):
            q, k = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in (x, context))
            return self.cross_attn(q, k, k)

    for model in (Cross(cached=False), Named()):
        record = crossed(model)
        (amap,) = record.maps.values()
        assert record.remarks == {}
        for name in MEASURES:
            torch.testing.assert_close(record.latest[name][0], amap.measure(name)[name].mean(0))


class Part(Cross):
    """Self attention of a part of the queries."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return super().forward(context[:, 2 : 2 + STEP], context)


class Swapped(Cross):
    """More queries than keys."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return super().forward(context, x)


@pytest.mark.parametrize(("kind", "cached", "sizes"), [(Part, False, (4, 11)), (Cross, True, (4, 11)),
                                                       (Swapped, True, (11, 4))])  # fmt: skip
def test_what_is_not_known_to_be_cross_attention_is_remarked(kind, cached, sizes):
    """Keys that are no output of a layer may be of any tensor."""
    record = crossed(kind(cached))
    assert "its {} queries are among its {} keys".format(*sizes) in record.remarks[""]
    assert bool(record.latest["mean_distance"].isnan().all())
    assert bool(record.latest["entropy"].isfinite().all())


@pytest.mark.parametrize("length", [None, 7])
def test_a_step_with_a_cache_is_at_the_last_key_that_it_may_attend_to(length):
    """Of a cache that ends with the step, or one of fixed length, of which later keys are masked."""
    q, k, v = inputs()
    model = _One(None if length is None else (torch.arange(N) < length)[None])
    with hw.watch(model, measures=PLACED, maps="lazy") as record:
        model(q[:, :, -1:], k, v)
    end = length or N
    p = dense(q[:, :, -1:], k[:, :, :end], None)[:, :, 0]
    distance = (p * (end - 1 - torch.arange(end))).sum(-1).mean(0).float()
    torch.testing.assert_close(record.latest["mean_distance"][0], distance)
    torch.testing.assert_close(record.latest["self_mass"][0], p[..., -1].mean(0).float())
    assert record.maps[""].shape == (B, H, 1, end)
    assert record.remarks == {}


class Loop(nn.Module):
    """Heads one by one."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.stack([F.scaled_dot_product_attention(q[:, i], k[:, i], v[:, i]) for i in range(H)], 1)


def test_heads_that_are_computed_in_a_loop_are_remarked():
    q, k, v = inputs()
    model = Loop()
    with hw.watch(model, measures=["entropy"], maps="lazy") as record:
        model(q, k, v)
    expected = numbers(dense(q, k, None))["entropy"]
    assert record.latest["entropy"].shape == (1, 1)
    torch.testing.assert_close(record.latest["entropy"][0, 0], expected.mean())
    apart = torch.stack([amap.measure("entropy")["entropy"].mean() for amap in record.maps.values()])
    torch.testing.assert_close(apart.float(), expected)
    assert f"{H} calls of one head each in one forward pass" in record.remarks[""]


def test_what_is_plain_has_no_remark():
    """Several calls with several heads, one call with one head, and a layer whose number of heads is known."""
    q, k, v = inputs()

    class Shared(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, *args):
            return self.layer(*args), self.layer(*args)

    layer = hw.MultiHeadAttention(D, 1)
    one, x = (q[:, :1], k[:, :1], v[:, :1]), torch.randn(B, N, D)
    for model, args in ((Shared(_One(None)), (q, k, v)), (_One(None), one), (Shared(layer), (x,))):
        with hw.watch(model, measures=["entropy"]) as record:
            model(*args)
        assert record.latest.steps == 1
        assert record.remarks == {}
