"""Heads of hand-written modules: found on a batch, recorded, scaled, removed and merged; or the reason why not."""

import copy
import io

import hand_written as hand
import pytest
import torch
from torch import nn

import headwise as hw
from headwise.errors import ConfigError

B, N = 2, 5


def made(kind, **sizes):
    torch.manual_seed(0)
    return hand.Model(kind, **sizes).double().eval()


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(B, N, 12, dtype=torch.float64)


# kind: its sizes, query heads, KV heads, whether heads can be removed
KINDS = {
    "Split": ({}, 3, 3, True),
    "Merged": ({}, 3, 3, True),
    "Kept": ({}, 3, 3, True),
    "CausalSelfAttention": ({}, 3, 3, True),
    "ByInput": ({}, 3, 3, True),
    "Packed": ({}, 3, 3, True),
    "Interleaved": ({}, 3, 3, True),
    "Transposed": ({}, 3, 3, True),
    "Grouped": ({}, 6, 2, True),
    "WithTemperatures": ({}, 3, 3, True),
}


@pytest.mark.thorough_except("Packed", "Interleaved", "Transposed", "Grouped")
@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_found_recorded_and_scaled(kind, x):
    sizes, h, kv, _ = KINDS[kind]
    model = made(getattr(hand, kind), **sizes)
    sites = hw.find_heads(model, x)
    assert [site.name for site in sites] == ["attention.0", "attention.1"]
    assert {(site.num_heads, site.num_kv_heads, site.head_dim, site.value_dim) for site in sites} == {(h, kv, 4, 4)}
    (call, *_) = hw.models.recognise(model, x)
    with hw.models.record_heads(sites) as heads, torch.no_grad():
        model(x)
    torch.testing.assert_close(heads[0], call.map @ call.v.repeat_interleave(h // call.num_kv_heads, 1))
    gates = [torch.ones(h), torch.zeros(h)]
    with hw.models.scale_heads(sites, gates), torch.no_grad():
        masked = model(x)
    model.attention[1].register_forward_hook(lambda module, args, y: torch.zeros_like(y) + bias_of(sites[1]))
    torch.testing.assert_close(masked, model(x))


def test_sites_print_as_a_table_without_their_modules(x):
    sites = hw.find_heads(made(hand.Grouped), x)
    assert repr(sites).splitlines() == [
        "name         module   kind    heads  KV heads  head_dim  value_dim",
        "attention.0  Grouped  traced      6         2         4          4",
        "attention.1  Grouped  traced      6         2         4          4",
    ]
    assert "<td>attention.1</td><td>Grouped</td>" in sites._repr_html_()
    assert repr(sites[1:]) == f"[{sites[1]!r}]"


def bias_of(site):
    return site.output.bias


@pytest.mark.thorough_except("Packed", "Interleaved", "Transposed", "Grouped")
@pytest.mark.parametrize("kind", KINDS)
def test_matrices_of_a_head_are_those_that_the_module_uses(kind, x):
    model = made(getattr(hand, kind))
    site = hw.find_heads(model, x)[0]
    (call, *_) = hw.models.recognise(model, x)
    w, y = site.weights(), model.norms[0](x)
    assert w["v"].shape == (site.num_kv_heads, 12, 4)
    assert w["o"].shape == (site.num_heads, 4, 12)
    values = torch.einsum("bnd,hde->bhne", y, w["v"])
    values = values - call.v  # what is left is the bias, the same for all tokens
    torch.testing.assert_close(values, values[:1, :, :1].expand_as(values))
    if kind != "Interleaved":  # whose queries and keys have norms
        products = torch.einsum("bnd,hde->bhne", y - y.roll(1, 1), w["q"])
        torch.testing.assert_close(products * _ratio(products, call), call.q - call.q.roll(1, 2))


def _ratio(products, call):
    """Queries are compared up to a number, the scale that the code applies to them."""
    return ((call.q - call.q.roll(1, 2)) / products).flatten()[0]


@pytest.mark.thorough_except("False-Transposed")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind][3]])
@pytest.mark.parametrize("copy", [True, False])
def test_removing_heads_equals_masking_them(kind, copy, x):
    sizes, h, kv, _ = KINDS[kind]
    model = made(getattr(hand, kind), **sizes)
    sites = hw.find_heads(model, x)
    removed = list(range(h // kv))  # all that share the first KV head
    gates = [torch.ones(h).index_fill(0, torch.tensor(removed), 0), torch.ones(h)]
    with hw.models.scale_heads(sites, gates), torch.no_grad():
        masked = model(x)
    smaller = hw.edit.prune(model, {"attention.0": removed}, copy=copy).model
    torch.testing.assert_close(smaller(x), masked)
    assert [site.num_heads for site in hw.find_heads(smaller)] == [h - len(removed), h]
    again = hw.edit.prune(smaller, {"attention.1": [h - 1 - i for i in removed]}).model
    assert torch.isfinite(again(x)).all()
    assert [site.num_heads for site in hw.find_heads(model)] == ([h] * 2 if copy else [h - len(removed)] * 2)


def test_a_query_head_of_each_group_can_be_removed(x):
    model = made(hand.Grouped)
    sites = hw.find_heads(model, x)
    gates = [torch.tensor([1.0, 0, 1, 1, 1, 0]), torch.ones(6)]
    with hw.models.scale_heads(sites, gates), torch.no_grad():
        masked = model(x)
    pruned = hw.edit.prune(model, {0: [1, 5]}).model
    torch.testing.assert_close(pruned(x), masked)
    assert (pruned.attention[0].n_heads, pruned.attention[0].n_kv_heads) == (4, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["mean", "svd"])
def test_kv_heads_are_merged_where_the_code_repeats_them(method, x):
    model = made(hand.Grouped)
    for attention in model.attention:  # equal keys and values, so that nothing is lost
        for linear in (attention.wk, attention.wv):
            linear.weight.data[4:] = linear.weight.data[:4]
        attention.wk.bias.data[4:] = attention.wk.bias.data[:4]
    expected = model(x)
    hw.find_heads(model, x)
    merged = hw.edit.merge_kv(model, 1, method).model
    torch.testing.assert_close(merged(x), expected)
    assert merged.attention[0].wk.weight.shape == (4, 12)
    assert [site.num_kv_heads for site in hw.find_heads(merged)] == [1, 1]


class Flash(hand.CausalSelfAttention):
    def __init__(self, **sizes):
        super().__init__(flash=True, **sizes)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [hand.CausalSelfAttention, Flash])
@pytest.mark.parametrize("method", ["mean", "first", "svd", "cluster"])
def test_kv_heads_of_a_packed_map_are_merged_though_the_code_repeats_none(kind, method, x):
    model = made(kind, n_head=6)
    for attention in model.attention:  # keys and values of head 0 in 0 to 2, and of head 3 in 3 to 5
        for p in attention.c_attn.parameters():
            heads = p.data.view(3, 2, 3, 2, -1)
            heads[1:, :, 1:] = heads[1:, :, :1]
    expected = model(x)
    hw.find_heads(model, x)
    merged = hw.edit.merge_kv(model, 2, method, copy=True)
    torch.testing.assert_close(merged.model(x), expected)
    assert merged.parameters_before - merged.parameters_after == 2 * 2 * 8 * (12 + 1)  # of 2 layers; of k and v
    assert torch.equal(model(x), expected)
    sites = hw.find_heads(merged.model)
    assert [(site.num_heads, site.num_kv_heads) for site in sites] == [(6, 2), (6, 2)]
    with hw.models.scale_heads(sites, [torch.tensor([1.0, 0, 1, 1, 1, 0]), torch.ones(6)]):
        masked = merged.model(x)
    smaller = hw.edit.prune(merged.model, {0: [1, 5]}).model
    torch.testing.assert_close(smaller(x), masked)
    again = hw.find_heads(smaller, x)[0]
    assert (again.num_heads, again.num_kv_heads, again.anatomy.resizing(again).fixed) == (4, 2, "")
    with hw.attach(smaller, x) as handle:
        torch.testing.assert_close(smaller(x), masked)
        assert handle.attached == ("attention.0", "attention.1")


@pytest.mark.thorough
def test_separate_maps_are_merged_though_the_code_repeats_none(x):
    model = made(hand.Split)
    hw.find_heads(model, x)
    for attention in model.attention:  # keys and values of head 0 in all
        for linear in (attention.wk, attention.wv):
            for p in linear.parameters():
                p.data.view(3, 4, -1)[1:] = p.data.view(3, 4, -1)[:1]
    expected = model(x)
    merged = hw.edit.merge_kv(model, 1).model
    torch.testing.assert_close(merged(x), expected)
    assert merged.attention[1].wk.k.weight.shape == (4, 12)


@pytest.mark.thorough
def test_a_module_with_fewer_heads_than_its_input_has_channels_trains_copies_and_compiles(x):
    def trained(run, model):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimiser.zero_grad()
            run(x).square().sum().backward()
            optimiser.step()
        return [p.detach() for p in model.parameters()]

    model = made(hand.CausalSelfAttention)
    hw.find_heads(model, x)
    pruned = hw.edit.prune(model, {0: [1], 1: [0, 2]}).model
    expected = pruned(x)
    file = io.BytesIO()
    torch.save(pruned, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(x), expected)
    compiled = torch.compile(copy.deepcopy(pruned), backend="eager")
    torch.testing.assert_close(compiled(x), expected)
    assert loaded.state_dict().keys() == made(hand.CausalSelfAttention).state_dict().keys()
    torch.testing.assert_close(trained(compiled, compiled), trained(pruned, pruned))
    assert pruned.attention[0].c_attn.weight.grad.norm() > 0


@pytest.mark.thorough
def test_rotated_keys_are_merged_but_not_by_a_method_that_turns_them(x):
    model = made(hand.Grouped, rotary=True)
    hw.find_heads(model, x)
    with pytest.raises(ConfigError, match=r"svd.*Grouped changes its queries and keys before they are multiplied"):
        hw.edit.merge_kv(model, 1, "svd")
    assert hw.edit.merge_kv(model, 1, copy=True).model.attention[1].n_kv_heads == 1


@pytest.mark.thorough_except("Constant-reason0", "Residual-reason1")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("Constant", r"without a head, the code of Constant raises RuntimeError at hand_written.py:\d+: shape "
                     r"'\[2, 5, 3, 4\]' is invalid .* from attributes of the module; or mask heads with scale_heads$"),
        ("Residual", r"without a head, the code of Residual raises RuntimeError at hand_written.py:\d+: shape "
                     r"'\[2, 5, 12\]' is invalid"),
    ],
)  # fmt: skip
def test_heads_that_the_code_cannot_lose_are_refused_with_the_reason(kind, reason, x):
    model = made(getattr(hand, kind))
    hw.find_heads(model, x)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(ConfigError, match=rf"attention.0: {reason}"):
        hw.edit.prune(model, {0: [1]})
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_heads_that_do_not_arrive_unchanged_have_no_site_to_scale(x):
    model = made(hand.Gated)
    sites = hw.find_heads(model, x)
    assert "changed, or reordered, before the next linear map" in sites[0].layout().missing
    with pytest.raises(ConfigError, match=r"attention\.0: its heads are changed"), hw.models.record_heads(sites):
        pass
    with pytest.raises(ConfigError, match="its heads are changed"):
        sites[0].weights()


@pytest.mark.thorough
def test_finding_heads_changes_nothing(x):
    model = made(hand.Kept).train()
    expected, attributes = model.state_dict(), [sorted(vars(module)) for module in model.modules()]
    values = {name: x.clone() for name, x in expected.items()}
    parameters = list(model.parameters())
    hw.find_heads(model, x)
    assert all(torch.equal(values[name], x) for name, x in model.state_dict().items())
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    assert all(module.training for module in model.modules())
    added = [set(vars(module)) - set(names) for module, names in zip(model.modules(), attributes, strict=True)]
    assert set().union(*added) == {"_headwise_heads"}
    assert model.attention[0].last is None
    assert all(p.grad is None for p in model.parameters())


def test_without_a_batch_the_error_begins_with_that(x):
    with pytest.raises(ConfigError, match=r"^model=Model: no .{60,80} call find_heads\(model, batch\) first") as error:
        hw.find_heads(made(hand.Merged))
    assert str(error.value).count("find_heads") == 1


def test_a_batch_on_which_no_attention_is_recognised_is_not_asked_for_again(x):
    with pytest.raises(ConfigError, match=r"^model=Linear: no .*on the batch \(hw.models.recognise") as error:
        hw.find_heads(torch.nn.Linear(12, 12).double(), x)
    assert "find_heads" not in str(error.value)


@pytest.mark.thorough
def test_arguments_are_given_by_name_or_in_order(x):
    causal = torch.ones(N, N).tril()
    for batch in ((x, causal), {"x": x, "mask": causal}, [x, causal]):
        module = hand.Split().double()
        assert hw.find_heads(module, batch)[0].num_heads == 3


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["Split", "Merged", "Kept"])
def test_a_class_of_a_tutorial_is_found_watched_and_attached(kind, x):
    model = made(getattr(hand, kind))
    with hw.watch(model, measures=["entropy"], maps="lazy") as record, torch.no_grad():
        expected = model(x)
    entropy = record.latest["entropy"]
    assert entropy.shape == (2, 3)
    assert [site.num_heads for site in hw.find_heads(model, x)] == [3, 3]
    with hw.attach(model) as handle, hw.watch(model, measures=["entropy"]) as again, torch.no_grad():
        for _ in range(2):  # its own code, then attend
            torch.testing.assert_close(model(x), expected)
        assert handle.attached == tuple(record.layers) == ("attention.0", "attention.1")
        torch.testing.assert_close(again.latest["entropy"], entropy)


def test_a_module_that_cannot_be_called_again_keeps_its_heads():
    """It appends keys to a cache that it is given, which is longer when it is tried without a head."""

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads = 3
            self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

        def forward(self, x, cache):
            q, k, v = (y.view(*y.shape[:2], self.num_heads, 4).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
            cache.append((k, v))
            k, v = (torch.cat(parts, 2) for parts in zip(*cache, strict=True))
            scores = q @ k.mT / 2 + torch.zeros(x.shape[1], x.shape[1])
            return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    model = Cached()
    (site,) = hw.find_heads(model, (torch.randn(1, 5, 12), []))
    assert site.weights()["o"].shape == (3, 4, 12)
    with pytest.raises(hw.ConfigError, match="called a second time with the same arguments, the code of Cached raises"):
        hw.edit.prune(model, {"": [1]})
