"""Layers and a decoder whose sequence lies on many ranks, against one process."""

import copy

import torch
from compared import HOW, close, raises
from torch import nn

import headwise as hw
from headwise import parallel
from headwise.lm.model import Decoder, DecoderConfig
from headwise.parallel.sequence import STEPS

N = 23
DESIGNS = [design for design in hw.nn.DESIGNS.values() if not design.outside_attend]


def layers(design: type) -> list[nn.Module]:
    torch.manual_seed(3)
    if issubclass(design, hw.nn.SingleHeadAttention):
        return [design.build(24, 1, rotary=True)]
    if design is hw.MultiHeadAttention:
        return [
            design(24, 4, num_kv_heads=2, rotary=True, qk_norm=True, bias=True),
            design(24, 4, value_dim=5),
        ]  # fmt: skip
    return [design.build(24, 4)]


def every_design(rank: int, ranks: int) -> None:
    """Outputs and, added up, gradients of every design are one process's, or it is refused by name."""
    x = torch.randn(2, N, 24, generator=torch.Generator().manual_seed(1))
    toward = torch.randn(2, N, 24, generator=torch.Generator().manual_seed(2))
    for design in hw.nn.DESIGNS.values():
        if design not in DESIGNS:
            other = design.build(24, 4)
            raises(hw.ConfigError, design.__name__, parallel.sequence_parallel, other)
            assert not any(step in vars(other) for step in STEPS)
            continue
        for how in HOW:
            for layer in layers(design):
                if how == "ulysses" and layer.num_heads < ranks:
                    continue
                whole = copy.deepcopy(layer)
                y = whole(x, mask=hw.Causal())
                (y * toward).sum().backward()
                layout = parallel.sequence_parallel(layer, how=how).layout
                own = layer(parallel.shard(x, layout), mask=hw.Causal())
                close(design.__name__, own, parallel.shard(y, layout), 1e-5)
                (own * parallel.shard(toward, layout)).sum().backward()
                parallel.sum_gradients(layer)
                for (name, found), wanted in zip(layer.named_parameters(), whole.parameters(), strict=True):
                    close(f"{design.__name__}.{name}", found.grad, wanted.grad, 1e-5)


def a_decoder(rank: int, ranks: int) -> None:
    """Logits, loss and gradients of a model that knows nothing of ranks; restored, it is what it was."""
    torch.manual_seed(4)
    model = Decoder(DecoderConfig(vocab_size=40, d_model=24, num_heads=4, num_layers=2, d_ff=32, context=64))
    ids = torch.randint(0, 40, (2, N + 1), generator=torch.Generator().manual_seed(5))
    whole = copy.deepcopy(model)
    logits = whole(ids[:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    for how in HOW:
        model.zero_grad()
        with parallel.sequence_parallel(model, how=how) as spread:
            own, targets = (parallel.shard(x, spread.layout, dim=-1) for x in (ids[:, :-1], ids[:, 1:]))
            found = model(own)
            close("logits", found, parallel.shard(logits, spread.layout), 1e-5)
            nn.functional.cross_entropy(found.flatten(0, 1), targets.flatten(), reduction="sum").backward()
            assert f"{how}, {spread.layout} over {ranks} ranks, 2 layers" in repr(spread)
            raises(hw.ConfigError, "already attends over several ranks", parallel.sequence_parallel, model)
        parallel.sum_gradients(model)
        for (name, parameter), wanted in zip(model.named_parameters(), whole.parameters(), strict=True):
            close(name, parameter.grad, wanted.grad, 2e-5)
        assert "restored" in repr(spread)
        spread.restore()
        assert torch.equal(model(ids[:, :-1]), logits)
        assert list(model.state_dict()) == list(whole.state_dict())


def maps_and_measures_of_a_layer(rank: int, ranks: int) -> None:
    layer = layers(hw.MultiHeadAttention)[0]
    x = torch.randn(2, N, 24)
    asked = {"mask": hw.Causal() & hw.Window(9), "return_map": True, "measures": ["entropy", "mean_distance"]}
    _, amap = layer(x, **asked)
    for how in HOW:
        with parallel.sequence_parallel(layer, how=how) as spread:
            _, own = layer(parallel.shard(x, spread.layout), score=(), **asked)
            for name in amap.measured:
                close(name, own.measured[name], amap.measured[name], 1e-5)
            raises(hw.ConfigError, "cache", layer, x, cache=hw.KVCache())
    assert layer(x, cache=hw.KVCache()).shape == x.shape


def watched(rank: int, ranks: int) -> None:
    """A record of a model whose sequence lies on many ranks is that of one process, on every rank."""
    torch.manual_seed(4)
    model = Decoder(DecoderConfig(vocab_size=40, d_model=24, num_heads=4, num_layers=2, d_ff=32, context=64))
    ids = torch.randint(0, 40, (2, N))
    with hw.watch(model, measures=["max_logit", "entropy", "received_mass"]) as whole:
        model(ids)
    for how in HOW:
        with (
            parallel.sequence_parallel(model, how=how) as spread,
            hw.watch(model, measures=["max_logit", "entropy", "received_mass"], maps="lazy") as record,
        ):
            model(parallel.shard(ids, spread.layout, dim=-1))
        close("the record", record.latest.numbers, whole.latest.numbers, 1e-5)
        close("of all ranks", record.reduce().latest.numbers, whole.latest.numbers, 1e-5)
        assert [amap.shape for amap in record.maps.values()] == [(2, 4, N, N)] * 2
    layer, x = model.blocks[0].attention, torch.randn(2, N, 24)
    x[0, 3, 1] = torch.nan
    with hw.watch(layer, measures=["max_logit"]) as whole:
        layer(x, mask=hw.Causal())
    for how in HOW:
        with parallel.sequence_parallel(layer, how=how) as spread, hw.watch(layer, measures=["max_logit"]) as record:
            layer(parallel.shard(x, spread.layout), mask=hw.Causal())
        for at in (0, 3):  # rows of scores, and values; queries and keys are counted where they lie
            assert torch.equal(record.latest.nonfinite[:, at], whole.latest.nonfinite[:, at])
            assert bool(whole.latest.nonfinite[:, at].all())


def cross_attention(rank: int, ranks: int) -> None:
    """A context of another length, sharded too."""
    layer = hw.MultiHeadAttention(24, 4, num_kv_heads=2, context_dim=10)
    x, context = torch.randn(2, 9, 24), torch.randn(2, 31, 10)
    y = layer(x, context)
    for how in HOW:
        with parallel.sequence_parallel(layer, how=how) as spread:
            own = layer(parallel.shard(x, spread.layout), parallel.shard(context, spread.layout))
            close("y", own, parallel.shard(y, spread.layout), 1e-5)


def models_that_cannot(rank: int, ranks: int) -> None:
    raises(hw.ConfigError, "no attention layers", parallel.sequence_parallel, nn.Linear(2, 2))
    layer = hw.MultiHeadAttention(24, 4, rotary=True)
    raises(hw.ConfigError, "how='spiral'", parallel.sequence_parallel, layer, how="spiral")
    raises(hw.ConfigError, "layout='spiral'", parallel.sequence_parallel, layer, layout="spiral")
    mixed = nn.ModuleDict({"good": layer, "bad": hw.nn.TalkingHeadsAttention(24, 4)})
    raises(hw.ConfigError, "'bad' (TalkingHeadsAttention)", parallel.sequence_parallel, mixed)
    assert not any(step in vars(layer) for step in STEPS)
    with parallel.sequence_parallel(layer):
        raises(hw.ShapeError, "x: the ranks hold", layer, torch.randn(1, 3 + 4 * (rank == 0), 24))


CASES = {
    case.__name__: case
    for case in (
        every_design, a_decoder, maps_and_measures_of_a_layer, watched, cross_attention, models_that_cannot,
    )
}  # fmt: skip
