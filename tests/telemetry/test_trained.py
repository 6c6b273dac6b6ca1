"""Losses on the attention of a watched or attached model have the gradients of its eager weights."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from watched_models import ids, transformers_model, x

import headwise as hw
from headwise import losses
from headwise.text import in_language

B, N = 3, 11
PADDED = torch.arange(N) >= torch.tensor([[N], [7], [9]])


class Written(nn.Module):
    """Attention by hand, causal: with a softmax of its own, or with PyTorch's function."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(24, 24) for _ in "qkv")
        self.fused, self.weights = fused, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (4, 6)).transpose(1, 2) for one in self.projections)
        if self.fused:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
            self.weights = (q @ k.mT / 6**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
            y = self.weights @ v
        return x + y.transpose(1, 2).flatten(2)


class Stack(nn.Module):
    """Modules one after the other, each perhaps computed again in the backward pass, the last one's rows added up."""

    def __init__(self, *layers: nn.Module, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers, self.reentrant = nn.ModuleList(layers), reentrant

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        for layer in self.layers:
            run: Callable[..., Any] = layer
            if self.reentrant is not None:
                run = lambda x, layer=layer: checkpoint(layer, x, use_reentrant=self.reentrant)  # noqa: E731
            x = run(x, **options)
        return x


def written(*, fused: bool = False, reentrant: bool | None = None) -> Stack:
    torch.manual_seed(3)
    return Stack(Written(fused), Written(fused), reentrant=reentrant).double()


def blocks(**options: Any) -> Stack:
    torch.manual_seed(4)
    layers = [hw.TransformerBlock(hw.MultiHeadAttention(24, 4, num_kv_heads=2, rotary=True), 17) for _ in range(2)]
    return Stack(*layers, **options).double()


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(5)
    layer = nn.TransformerEncoderLayer(24, 4, 19, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()


def entropy_and_sink(weights: list[Tensor], lit: Tensor | None = None) -> Tensor:
    """max(0, 2 − H) and max(0, mass − 0.1) of stored weights [b, h, n, m], by the formulas."""
    found = []
    for p in weights:
        rows = torch.ones(len(p), 1, p.shape[2]) if lit is None else lit[:, None].double()
        entropy, sink = -(p * p.clamp_min(1e-300).log()).sum(-1), p[..., 0]
        h, mass = ((one * rows).sum(-1) / rows.sum(-1) for one in (entropy, sink))
        found.append((2.0 - h).clamp_min(0).mean() + 0.3 * (mass - 0.1).clamp_min(0).mean())
    return torch.stack(found).mean()


def of(seen: Any) -> Tensor:
    """The same of what has been watched."""
    return losses.entropy_floor(seen, 2.0) + 0.3 * losses.class_mass(seen, most=0.1)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_alike(got: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 1e-10) -> None:
    assert got.keys() == expected.keys()
    size = max(float(one.norm()) for one in expected.values())
    assert size > 1e-3
    for name, one in expected.items():
        error = float((got[name].double() - one.double()).norm())
        assert error <= bound * max(float(one.norm()), 0.01 * size), f"{name}: {error:.1e} of {float(one.norm()):.1e}"


def by_hand() -> tuple[nn.Module, Callable[[nn.Module], Tensor], Callable[[nn.Module], Tensor]]:
    def dense(model: Any) -> Tensor:
        y = model(x(B, N).double())
        return y.square().mean() + entropy_and_sink([layer.weights for layer in model.layers])

    return written(), lambda model: model(x(B, N).double()).square().mean(), dense


def fused() -> tuple[nn.Module, Callable[[nn.Module], Tensor], Callable[[nn.Module], Tensor]]:
    def dense(model: Any) -> Tensor:
        other = written()
        other.load_state_dict(model.state_dict())
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            its.register_hook(lambda grad, mine=mine: setattr(mine, "grad", grad.clone()))
        y = other(x(B, N).double())
        return y.square().mean() + entropy_and_sink([layer.weights for layer in other.layers])  # type: ignore[misc]

    return written(fused=True), lambda model: model(x(B, N).double()).square().mean(), dense


def own() -> tuple[nn.Module, Callable[[nn.Module], Tensor], Callable[[nn.Module], Tensor]]:
    def dense(model: Any) -> Tensor:
        weights, z = [], x(B, N).double()
        for block in model.layers:
            attention, inside = block.attention, block.attention_norm(z)
            q, k, _ = attention.project(inside, inside)
            q, k = attention.apply_rope(q, k, 0)
            scores = q @ k.repeat_interleave(2, 1).mT / 6**0.5
            weights.append(scores.masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf).softmax(-1))
            z = block(z, mask=hw.Causal())
        return z.square().mean() + entropy_and_sink(weights)

    return blocks(), lambda model: model(x(B, N).double(), mask=hw.Causal()).square().mean(), dense


def of_torch() -> tuple[nn.Module, Callable[[nn.Module], Tensor], Callable[[nn.Module], Tensor]]:
    def loss(model: nn.Module) -> Tensor:
        y: Tensor = model(x(B, N).double(), src_key_padding_mask=PADDED)
        return y[~PADDED].square().mean()

    def dense(model: Any) -> Tensor:
        weights: list[Tensor] = []
        handles = []
        wanted = {"need_weights": True, "average_attn_weights": False}
        for layer in model.layers:
            attention = layer.self_attn
            handles.append(attention.register_forward_pre_hook(lambda _, a, k: (a, k | wanted), with_kwargs=True))
            handles.append(attention.register_forward_hook(lambda _, a, out: weights.append(out[1])))
        total = loss(model)
        for handle in handles:
            handle.remove()
        return total + entropy_and_sink(weights, ~PADDED)

    return encoder(), loss, dense


def of_transformers(name: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor], Callable[[nn.Module], Tensor]]:
    model = transformers_model(name).double()
    model = model.base_model if name == "llama" else model
    options = {"attention_mask": (~PADDED).long()} if name == "bert" else {}
    lit = ~PADDED if name == "bert" else None

    def loss(model: nn.Module) -> Tensor:
        return model(ids(B, N), **options).last_hidden_state[:, :7].square().mean()

    def dense(model: Any) -> Tensor:
        model.set_attn_implementation("eager")
        out = model(ids(B, N), output_attentions=True, **options)
        model.set_attn_implementation("sdpa")
        return out.last_hidden_state[:, :7].square().mean() + entropy_and_sink(list(out.attentions), lit)

    return model, loss, dense


KINDS: dict[str, Callable[[], Any]] = {
    "by hand": by_hand, "fused function": fused, "own blocks": own, "nn.TransformerEncoder": of_torch,
    "bert": lambda: of_transformers("bert"), "llama": lambda: of_transformers("llama"),
}  # fmt: skip


@contextmanager
def attached(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> Iterator[Any]:
    """Attached, with attention that is recognised certified by a first forward."""
    with hw.attach(model, differentiable=True) as handle:
        run(model)
        yield handle


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("way", ["watch", "attach"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_eager_weights(kind: str, way: str) -> None:
    model, run, dense = KINDS[kind]()
    expected = gradients(model, dense(model))
    if way == "watch":
        seen: Any = hw.watch(model, measures=["entropy", "received_mass"], differentiable=True)
    elif kind == "own blocks":
        pytest.skip("headwise's own layers need no attachment")
    else:
        seen = attached(model, run)
    with seen as found:
        got = gradients(model, run(model) + of(found))
        assert len(found.maps) == 2
    assert_alike(got, expected, bound=1e-6 if kind == "llama" else 1e-10)  # whose norms and softmax are in float32


def test_measures_of_the_call_have_gradients_and_the_numbers_of_the_record_have_none() -> None:
    model = encoder()
    with hw.watch(model, measures=["entropy"], differentiable=True) as record:
        model(x(B, N).double(), src_key_padding_mask=PADDED)
        maps = list(record.maps.values())
        got = gradients(model, torch.stack([amap.measured["entropy"] for amap in maps]).mean())
        model(x(B, N).double(), src_key_padding_mask=PADDED)
        again = gradients(
            model, torch.stack([amap.measure("entropy")["entropy"] for amap in record.maps.values()]).mean()
        )
    assert_alike(got, again)
    assert not record.latest["entropy"].requires_grad
    assert not record.totals["entropy"].requires_grad


def test_block() -> None:
    block = blocks().layers[0]
    _, amap = block(x(B, N).double(), mask=hw.Causal(), return_map=True, differentiable=True)
    losses.z_loss(amap).backward()
    assert float(block.attention.k_proj.weight.grad.norm()) > 0  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("make", [written, blocks])
def test_under_autocast(make: Callable[..., Stack]) -> None:
    model, given = make().float(), x(B, N)
    with hw.watch(model, differentiable=True) as record:
        with torch.autocast("cpu", torch.bfloat16):
            model(given)
        assert {amap.q.dtype for amap in record.maps.values()} == {torch.bfloat16}
        got = gradients(model, of(record))
        model(given)
        assert_alike(got, gradients(model, of(record)), bound=0.06)


def test_gradients_accumulate() -> None:
    model, parts = written(), x(4, N).double().chunk(2)
    with hw.watch(model, differentiable=True) as record:
        model(torch.cat(parts))
        expected = gradients(model, of(record))
    model.zero_grad()
    with hw.watch(model, steps="manual", differentiable=True) as record:
        for part in parts:
            model(part)
            losses_of_part = torch.stack([  # a mean over the batch, as that of all has it
                (2.0 - amap.measured["entropy"]).clamp_min(0).mean() for amap in record.maps.values()
            ]).mean() + 0.3 * losses.class_mass(record, most=0.1)  # fmt: skip
            (losses_of_part / 2).backward()
        record.step()
    assert_alike({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, expected)


@pytest.mark.parametrize("make", [written, blocks])
def test_checkpointing(make: Callable[..., Stack]) -> None:
    """The measures of a call too, which are nodes inside what is computed again."""

    def trained(model: Stack) -> dict[str, Tensor]:
        with hw.watch(model, measures=["entropy"], differentiable=True) as record:
            y = model(x(B, N).double().requires_grad_())
            measured = sum(amap.measured["entropy"].mean() for amap in record.maps.values())
            return gradients(model, y.square().mean() + of(record) + measured)

    assert_alike(trained(make(reentrant=False)), trained(make()))
    with pytest.raises(hw.ConfigError, match=r"no gradients.*\(layer: layers\.0.*use_reentrant=True"):
        trained(make(reentrant=True))


def test_the_graph_of_a_step_is_released_when_the_next_begins() -> None:
    model, given = Stack(*written().layers, nn.Linear(24, 24).double()), x(B, N).double()
    for seen in (hw.watch(model, differentiable=True), hw.attach(model, given, differentiable=True)):
        with seen as found:
            model(given).sum().backward()
            held = [weakref.ref(amap) for amap in found.maps.values()]
            assert len(held) == 2
            alive: list[int] = []
            watching = model.layers[0].register_forward_pre_hook(
                lambda *_, held=held, alive=alive: alive.append(sum(one() is not None for one in held))
            )
            gc.collect()
            model(given)
            watching.remove()
            assert alive == [0]


class Parted(nn.Module):
    """Layers in a part of the model, and a part without attention."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(24, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


@pytest.mark.parametrize("make", [written, blocks])
def test_a_part_that_is_called_by_itself_has_the_maps_of_its_last_call(make: Callable[..., Stack]) -> None:
    model, given = Parted(make()), x(B, N).double()
    with hw.attach(model, given if make is written else None, differentiable=True) as handle:
        model(given)
        expected = list(handle.maps)
        assert len(expected) == 2
        for _ in range(3):
            y = model.inner(given)
            model.head(y)  # computes no attention
            assert list(handle.maps) == expected
            assert list(gradients(model, of(handle)))


def test_nothing_of_the_graph_is_held_by_a_handle_that_is_detached() -> None:
    model = encoder()
    with hw.attach(model, differentiable=True) as handle:
        model(x(B, N).double())
        held = [weakref.ref(amap) for amap in handle.maps.values()]
        assert len(held) == 2
    assert handle.maps == {}
    gc.collect()
    assert [one() for one in held] == [None, None]


def test_measures_of_a_call_whose_queries_were_changed_in_place_are_refused() -> None:
    class Changed(Written):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.queries.detach().mul_(1.5)
            return y

    model = Stack(Changed()).double()
    keep = model.layers[0].projections[0].register_forward_hook(lambda m, _, q: setattr(model.layers[0], "queries", q))
    with keep, hw.watch(model, measures=["entropy"], differentiable=True) as record:
        model(x(B, N).double())
        measured = record.maps["layers.0"].measured
        assert measured is not None
        message = r"float64 \[3, 4, 11, 6\].*was changed in place since"
        with pytest.raises(hw.ConfigError, match=message) as caught:
            measured["entropy"].sum().backward()
    assert "就地修改" in caught.value.zh


def test_what_has_no_gradients_is_refused() -> None:
    model, given = written(), x(B, N).double()
    with hw.watch(model, maps="lazy") as record:
        model(given)
    with pytest.raises(hw.ConfigError, match=r"no gradients.*\(layer: layers\.0\).*differentiable=True"):
        of(record)
    with torch.no_grad():
        assert float(of(record)) > 0
    with pytest.raises(hw.ConfigError, match=r"no maps of a last forward.*hw\.watch"):
        losses.z_loss(hw.watch(model))
    with pytest.raises(hw.ConfigError, match="pictures have no gradients"):
        hw.watch(model, maps="pooled", differentiable=True)
    with hw.watch(model, every=2, differentiable=True) as record:
        model(given)
        model(given)  # is not measured, and the maps of the first are not its own
        with pytest.raises(hw.ConfigError, match="no maps of a last forward"):
            of(record)
    with hw.watch(model, differentiable=True) as record, torch.no_grad():
        model(given)
        assert float(of(record)) > 0


def test_maps_that_are_not_of_one_call_have_a_remark() -> None:
    layer = hw.nn.TalkingHeadsAttention(12, 3)
    with pytest.warns(UserWarning, match="its map has no gradients"), hw.watch(layer, differentiable=True) as record:
        layer(x(d=12))
    assert float(record.latest["entropy"].min()) > 0
    assert "没有梯度" in in_language(record.remarks[""], "zh")
    with pytest.raises(hw.ConfigError, match="no gradients"):
        of(record)


def test_another_record_of_the_same_model_keeps_no_graph() -> None:
    model = blocks()
    with hw.watch(model, differentiable=True) as record, hw.watch(model, maps="lazy", values=True) as other:
        model(x(B, N).double())
    assert all(amap.differentiable for amap in record.maps.values())
    assert not any(amap.differentiable for amap in other.maps.values())
    z = "blocks.0.attn.hook_z"
    assert not other.maps[z].requires_grad
    with hw.watch(model, values=True, differentiable=True) as record:
        model(x(B, N).double())
    gradients(model, losses.output_similarity(record.maps[z].transpose(1, 2)))
    assert not any(amap.differentiable for amap in copy.deepcopy(record).maps.values())


def test_pairs_of_maps() -> None:
    student, teacher = written(), written()
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(1.5)
    with hw.watch(student, differentiable=True) as mine, hw.watch(teacher, maps="lazy") as theirs:
        student(x(B, N).double())
        teacher(x(B, N).double())
    for loss in (losses.distillation, losses.indexer_kl):
        apart = [loss(mine.maps[name], theirs.maps[name]) for name in mine.maps]
        torch.testing.assert_close(loss(mine, theirs), torch.stack(apart).mean())
    with pytest.raises(hw.ConfigError, match="2 maps to train, and 1 that they follow"):
        losses.distillation(mine, [*theirs.maps.values()][:1])
