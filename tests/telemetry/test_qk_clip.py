import pytest
import torch
from torch import nn
from torch.testing import assert_close
from watched_models import ids, transformers_model, x

import headwise as hw
from by_hand import ByHand

OPTIONS = {"measures": ["max_logit"]}


def clipped(model, run, share=0.6, **options):
    """Largest logits [layers, heads] before, τ, and after one clip at τ = `share` of the largest."""
    with hw.watch(model, measures=["max_logit"], **options) as record, torch.no_grad():
        run()
        before = record.latest["max_logit"].double()
        tau = share * before.nan_to_num(0.0).max().item()
        result = hw.telemetry.qk_clip(model, record, tau=tau)
        again = hw.telemetry.qk_clip(model, record, tau=tau)
        run()
        after = record.latest["max_logit"].double()
    assert not again  # a step is used once
    return before, tau, after, result


def first_layer_is_exact(before, tau, after):
    """Inputs of the first layer do not change, so that its largest logits are known."""
    assert (before[0] > tau).any()
    assert (before[0] < tau).any()
    assert_close(after[0], before[0].clamp_max(tau), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_new_largest_logit_is_tau_and_heads_that_are_well_stay(name):
    model = transformers_model(name)
    with hw.watch(model, **OPTIONS) as record:
        model(ids())
    largest = record.latest["max_logit"][0]
    share = float((largest.max() + largest.min()) / 2 / record.latest["max_logit"].max())
    before, tau, after, result = clipped(model, lambda: model(ids()), share)
    first_layer_is_exact(before, tau, after)
    assert {head for layer, head, *_ in result.heads if layer == record.layers[0]} == set(
        (before[0] > tau).nonzero().flatten().tolist()
    )


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize(
    "build",
    [
        lambda: hw.MultiHeadAttention(24, 4, bias=True),
        lambda: hw.MultiHeadAttention(24, 4, num_kv_heads=2, bias=True, rotary=True),
        lambda: hw.MultiHeadAttention(24, 4, num_kv_heads=1),
        lambda: hw.nn.PerHeadAttention(24, 4, bias=True),
        lambda: hw.nn.ContractionAttention(24, 4),
        lambda: hw.nn.GatedAttention(24, 4),
        lambda: hw.nn.LatentAttention(24, 4, latent_dim=7, rope_dim=4),
        lambda: hw.nn.BlockDiagonalAttention(24, 4),
        lambda: hw.nn.GroupedMLPAttention(24, 4, num_kv_heads=2),
        lambda: nn.MultiheadAttention(24, 4, batch_first=True, add_bias_kv=True),
    ],
)
def test_every_layout_of_weights_is_exact(build):
    torch.manual_seed(3)
    layer = build().eval().double()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p) * 0.4)
    z = x().double()
    torch_layer = isinstance(layer, nn.MultiheadAttention)
    run = (lambda: layer(z, z, z)) if torch_layer else (lambda: layer(z, mask=hw.Causal()))
    with hw.watch(layer, **OPTIONS) as record:
        run()
    middle = record.latest["max_logit"].sort().values[0, 1:3].mean() / record.latest["max_logit"].max()
    before, tau, after, result = clipped(layer, run, float(middle))
    first_layer_is_exact(before, tau, after)
    assert len(result) == 2
    assert f"τ = {tau:g}: 2 heads clipped" in repr(result)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "own"])
def test_norms_of_queries_and_keys_take_the_layers_largest(name):
    if name == "own":
        torch.manual_seed(3)
        model = hw.MultiHeadAttention(24, 4, num_kv_heads=2, qk_norm=True).eval()
        run = lambda: model(x(), mask=hw.Causal())  # noqa: E731
    else:
        model = transformers_model(name)
        run = lambda: model(ids())  # noqa: E731
    with hw.watch(model, **OPTIONS) as record:
        run()
    share = 0.7 * float(record.latest["max_logit"][0].max() / record.latest["max_logit"].max())
    before, tau, after, _ = clipped(model, run, share)
    assert_close(after[0], before[0] * (tau / before[0].max()), rtol=1e-4, atol=1e-5)


class Odd(torch.nn.Module):
    """A norm that neither multiplies with its weight nor with one more."""

    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, z):
        return z * (self.weight + 2.0)


def test_a_norm_that_is_unknown_is_refused_before_anything_changes():
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(hw.MultiHeadAttention(24, 4, qk_norm=True) for _ in range(2)))
    model[1].q_norm = Odd(6)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with hw.watch(model, **OPTIONS) as record:
        model(torch.randn(2, 7, 24))
    with pytest.raises(
        hw.ConfigError, match=r"1 \(MultiHeadAttention\): how its norm Odd applies its weight is unknown"
    ):
        hw.telemetry.qk_clip(model, record, tau=1e-3)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_largest_logits_at_or_below_zero_change_nothing():
    torch.manual_seed(1)
    layer = hw.MultiHeadAttention(8, 2).eval()
    z = torch.ones(1, 1, 8)
    with torch.no_grad():
        layer.k_proj.weight.copy_(-layer.q_proj.weight)
    weights = {name: p.clone() for name, p in layer.named_parameters()}
    with hw.watch(layer, **OPTIONS) as record:
        layer(z)
    assert (record.latest["max_logit"] < 0).all()
    assert not hw.telemetry.qk_clip(layer, record, tau=1e-6)
    assert all(torch.equal(p, weights[name]) for name, p in layer.named_parameters())


def test_nan_changes_nothing():
    layer = hw.MultiHeadAttention(8, 2).eval()
    weights = layer.q_proj.weight.clone()
    with hw.watch(layer, **OPTIONS) as record:
        layer(torch.full((1, 3, 8), torch.nan))
    assert not hw.telemetry.qk_clip(layer, record, tau=1.0)
    assert torch.equal(layer.q_proj.weight, weights)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_heads_whose_largest_logit_is_no_number_are_named(bad):
    layer = hw.MultiHeadAttention(8, 2).eval()
    with torch.no_grad():
        layer.q_proj.weight[5] = bad
        layer.q_proj.weight[:4] *= 50
    with hw.watch(layer, **OPTIONS) as record:
        layer(torch.randn(1, 3, 8))
    clipped = hw.telemetry.qk_clip(layer, record, tau=1.0)
    assert [entry[:2] for entry in clipped.heads] == [("", 0)]
    assert [entry[:2] for entry in clipped.unclipped] == [("", 1)]
    assert "not clipped, as their largest logit is not known: the model head 1 (" in repr(clipped)


def test_a_step_that_was_used_is_not_used_again_before_the_next_measured_one():
    layer = hw.MultiHeadAttention(24, 2).eval()
    with hw.watch(layer, every=2, **OPTIONS) as record:
        found = []
        for _ in range(4):
            layer(100 * x())
            found.append(bool(hw.telemetry.qk_clip(layer, record, tau=1e-3)))
    assert found == [True, False, True, False] or found == [True, False, False, False]
    assert_close(record.latest["max_logit"], torch.full((1, 2), 1e-3), rtol=1e-4, atol=1e-7)


def test_layers_that_cannot_be_clipped_are_named_and_nothing_is_changed():
    model = nn.ModuleList([hw.MultiHeadAttention(24, 2), hw.nn.TalkingHeadsAttention(24, 2)])
    before = model[0].q_proj.weight.clone()
    with hw.watch(model, **OPTIONS) as record:
        for layer in model:
            layer(30 * x())
    with pytest.raises(hw.ConfigError, match=r"1 \(TalkingHeadsAttention\): its scores are mixtures"):
        hw.telemetry.qk_clip(model, record, tau=0.1)
    assert torch.equal(model[0].q_proj.weight, before)


@pytest.mark.parametrize(("measures", "tau", "message"), [(["entropy"], 1.0, "max_logit"), (["max_logit"], 0.0, "tau")])
def test_arguments_that_will_not_do_are_named(measures, tau, message):
    layer = hw.MultiHeadAttention(8, 2)
    with hw.watch(layer, measures=measures) as record:
        layer(x(d=8))
    with pytest.raises(hw.ConfigError, match=message):
        hw.telemetry.qk_clip(layer, record, tau=tau)


def train(clip):
    """Losses and largest logits of a layer that learns to copy the token before each, at a rate too high for it."""
    torch.manual_seed(0)
    layer = hw.MultiHeadAttention(16, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    losses, logits = [], []
    with hw.watch(layer, measures=["max_logit"]) as record:
        for step in range(80):
            z = 3 * x(b=8, n=13, d=16, seed=step % 4)
            loss = (layer(z, mask=hw.Causal()) - z.roll(1, 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            logits.append(record.latest["max_logit"].max().item())
            if clip:
                hw.telemetry.qk_clip(layer, record, tau=5.0)
    return torch.tensor(losses), torch.tensor(logits)


@pytest.mark.thorough
def test_run_that_diverges_without_it_trains_with_it():
    wild, large = train(clip=False)
    tame, small = train(clip=True)
    assert large[-5:].max() > 50 * small[-5:].max()  # they grow without end, or stay near τ
    assert wild[-5:].mean() > wild[25:30].mean()  # and the loss rises again
    assert tame[-5:].mean() < 0.95 * tame[25:30].mean()


def test_attention_written_by_hand_is_clipped_once_its_heads_are_found() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(ByHand()), torch.randn(2, 5, 6) * 9
    with hw.watch(model, measures=["max_logit"]) as record:
        model(x)
    assert record.latest["max_logit"].min() > 2.0
    with pytest.raises(hw.ConfigError, match=r"find_heads\(model, batch\)"):
        hw.telemetry.qk_clip(model, record, tau=2.0)
    with record:
        hw.find_heads(model, x)
        assert record.ledger.index == 1  # the forwards that it runs are no steps
    assert len(hw.telemetry.qk_clip(model, record, tau=2.0)) == 2
    with record:
        model(x)
    torch.testing.assert_close(record.latest["max_logit"], torch.full((1, 2), 2.0), rtol=1e-5, atol=0)


class Both(nn.Sequential):
    """Layers that read the same input."""

    def forward(self, z):
        return self[0](z) + self[1](z)


def two_layers(**options):
    torch.manual_seed(3)
    return Both(*(hw.MultiHeadAttention(24, 4, **options) for _ in range(2))).eval()


def shared_weights(model):
    for name in ("q_proj", "k_proj"):
        getattr(model[1], name).weight = getattr(model[0], name).weight
    return model


def shared_maps(model):
    model[1].q_proj = model[0].q_proj
    return model


def shared_norms(model):
    model[1].q_norm, model[1].k_norm = model[0].q_norm, model[0].k_norm
    return model


@pytest.mark.parametrize(
    ("options", "share"), [({}, shared_weights), ({"num_kv_heads": 2}, shared_maps), ({"qk_norm": True}, shared_norms)]
)
def test_what_layers_share_is_multiplied_once(options, share):
    model = share(two_layers(**options))
    before, tau, after, result = clipped(model, lambda: model(5 * x()), 0.3)
    gammas = (tau / before).clamp_max(1.0).amin(0)
    if options.get("num_kv_heads") or not options:
        assert_close(after, before * gammas, rtol=2e-5, atol=1e-5)
    else:
        assert_close(after, before * gammas.min(), rtol=2e-5, atol=1e-5)
    assert all(abs(gamma - gammas[head]) < 1e-6 for _, head, _, gamma in result.heads)


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}])
def test_one_map_or_norm_for_queries_and_keys_is_multiplied_once(options):
    (model,) = two_layers(**options)[:1]
    model.k_proj = model.q_proj
    model.k_norm = model.q_norm
    before, tau, after, _ = clipped(model, lambda: model(x()), 0.3)
    expected = before.clamp_max(tau) if not options else before * (tau / before.max())
    assert_close(after, expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "layers", "message"),
    [
        (shared_maps, [0], r"'0\.q_proj\.weight' and '1\.q_proj\.weight' are one tensor"),
        (
            lambda m: setattr(m[0].v_proj, "weight", m[0].k_proj.weight),
            None,
            r"and '0\.v_proj\.weight' are",
        ),
        (lambda m: m[0].q_proj.register_parameter("again", m[0].q_proj.weight), None, r"q_proj\.again"),
        (lambda m: m[0].register_buffer("view", m[0].q_proj.weight.detach()[3:5]), None, r"0\.view' share memory"),
    ],
)
def test_weights_of_other_modules_are_not_scaled_with_them(change, layers, message):
    model = two_layers()
    change(model)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with hw.watch(model, layers=layers, **OPTIONS) as record:
        model(5 * x())
    with pytest.raises(hw.ConfigError, match=message):
        hw.telemetry.qk_clip(model, record, tau=1e-2)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    with pytest.raises(hw.ConfigError, match=message):  # the step was not used
        hw.telemetry.qk_clip(model, record, tau=1e-2)


def test_a_norm_of_what_attention_returns_is_not_taken_for_one_of_queries():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (the hf extra)")
    config = transformers.BitNetConfig(
        vocab_size=13, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.BitNetModel(config).eval()
    with hw.watch(model, **OPTIONS) as record:
        model(torch.arange(7)[None])
    with pytest.raises(hw.ConfigError, match="attn_sub_norm normalizes is not known"):
        hw.telemetry.qk_clip(model, record, tau=1e-3)
