"""What is observed of a padded batch is what is observed of its sentences one by one."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headwise as hw

LENGTHS = (11, 5, 3)
MEASURES = (
    "sink_mass", "entropy", "max_logit", "normalized_entropy", "previous_mass", "mean_distance", "received_mass",
)  # fmt: skip


class Squares(hw.stats.RowMeasure):
    """A measure that keeps rows in its own way."""

    name, unit, range, source = "squares", "", "", "Σp²"

    def partial(self, tile):
        return tile.weights.square().sum(-1)

    def update(self, state, tile):
        super().update(state, tile)


def bert():
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(vocab_size=37, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=29)
    return BertModel(config).eval()


def llama(shared=2):
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4 // shared, "intermediate_size": 29}
    return LlamaModel(LlamaConfig(vocab_size=37, num_hidden_layers=2, **sizes)).eval()


def sentences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 37, (1, length), generator=generator) for length in LENGTHS]


def batch(side):
    """Tokens, what is real of them, and their positions; each [3, 11]."""
    tokens, positions = torch.zeros(2, len(LENGTHS), max(LENGTHS), dtype=torch.long)
    for i, one in enumerate(sentences()):
        n = one.shape[1]
        at = slice(0, n) if side == "right" else slice(max(LENGTHS) - n, None)
        tokens[i, at], positions[i, at] = one[0], torch.arange(n)
    return tokens, (tokens > 0).long(), positions


def places(side, i):
    return slice(0, LENGTHS[i]) if side == "right" else slice(max(LENGTHS) - LENGTHS[i], None)


def seen_by(model, measures, run):
    seen: list[hw.models.AttentionCall] = []
    with torch.no_grad(), hw.models.observe(seen.append, model=model, measures=measures):
        run()
    return seen


def latest(record, layer, name):
    """A measure of a layer's heads in the last step, [heads] float32."""
    return record.latest.table.layer(layer).column(name).float()


@pytest.mark.thorough
@pytest.mark.parametrize("kernel", ["auto", "torch_blocks"])
@pytest.mark.parametrize(("make", "side"), [(bert, "right"), (bert, "left"), (llama, "left"), (llama, "right")])
def test_maps_and_measures_are_those_of_the_sentences_alone(make, side, kernel):
    model, names = make(), [*MEASURES, "squares"]
    measures = [Squares() if name == "squares" else name for name in names]
    tokens, real, positions = batch(side)

    def run():
        return model(tokens, attention_mask=real, position_ids=positions).last_hidden_state

    with torch.no_grad():
        eager = run()
        hw.attach(model)
        before = run()
    outputs = []
    with hw.use_kernel(kernel):
        seen = seen_by(model, measures, lambda: outputs.append(run()))
        alone = [seen_by(model, measures, lambda one=one: model(one)) for one in sentences()]
    # A padded query that may see nothing, left of the tokens of a causal model, gives zeros and no mean of everything.
    same = real.bool() if (make, side) == (llama, "left") else torch.ones_like(real).bool()
    assert_close(before[same], eager[same], rtol=1e-4, atol=1e-5)
    assert_close(outputs[0], before, rtol=1e-4, atol=1e-5)
    for layer, call in enumerate(seen):
        assert (call.map.lse != -torch.inf).sum() == sum(LENGTHS) * call.map.shape[1]
        assert call.map.mask is seen[0].map.mask
        for i, ones in enumerate(alone):
            one, at = ones[layer].map, places(side, i)
            weights = call.map[i]
            assert_close(weights[:, at, at], one.to_dense()[0], rtol=1e-4, atol=1e-5)
            assert_close(weights.sum((-1, -2)), torch.full((call.map.shape[1],), float(LENGTHS[i])))
        again = call.map.measure(*measures)
        for name in names:
            assert_close(call.measured[name], again[name], rtol=1e-4, atol=1e-5)
            if name != "received_mass":  # an average over keys, whose number differs
                mine = torch.cat([ones[layer].measured[name] for ones in alone])
                assert_close(call.measured[name], mine, rtol=1e-3, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(("make", "side"), [(bert, "right"), (lambda: llama(shared=1), "left")])
def test_roles_are_those_of_the_sentences_alone(make, side):
    model = make()
    hw.attach(model)
    tokens, real, positions = batch(side)
    run = lambda: model(tokens, attention_mask=real, position_ids=positions)  # noqa: E731
    found = hw.analysis.roles([call.map for call in seen_by(model, (), run)], tokens=tokens)
    alone = [
        hw.analysis.roles([call.map for call in seen_by(model, (), lambda one=one: model(one))], tokens=one)
        for one in sentences()
    ]
    merged = alone[0].merge(alone[1]).merge(alone[2])
    assert found.rows == merged.rows == sum(LENGTHS)
    assert list(found) == list(merged)
    for name in merged:
        for field in ("mass", "uniform", "coverage"):
            mine, theirs = (torch.as_tensor(getattr(of[name], field)) for of in (found, merged))
            assert_close(mine, theirs, rtol=1e-3, atol=1e-4, equal_nan=True)


def test_watching_counts_the_same_rows_as_its_maps():
    model, (tokens, real, positions) = bert(), batch("right")
    with hw.watch(model, measures=["entropy", "received_mass"], maps="lazy") as record:
        model(tokens, attention_mask=real, position_ids=positions)
    for name, amap in record.maps.items():
        rows = amap.measure("entropy", rows=True).rows["entropy"]
        assert_close(
            latest(record, name, "entropy"),
            rows.sum((0, 2)) / sum(LENGTHS),
            rtol=1e-4,
            atol=1e-5,
        )


def hidden(holes=False):
    """True = ignore, [3, 7]."""
    mask = torch.zeros(3, 7, dtype=torch.bool)
    mask[0, 5:] = mask[1, 2:] = True
    mask[2, 3] = holes
    return mask


@pytest.mark.parametrize("own_keys", [False, True])
@pytest.mark.parametrize("floating", [False, True])
@pytest.mark.parametrize("holes", [False, True])
def test_multihead_attention_tells_tokens_and_returns_what_pytorch_returns(holes, floating, own_keys):
    torch.manual_seed(0)
    own = nn.MultiheadAttention(24, 4, batch_first=True, add_bias_kv=own_keys, add_zero_attn=own_keys)
    x, mask = torch.randn(3, 7, 24), hidden(holes)
    given = torch.zeros(3, 7).masked_fill(mask, -torch.inf) if floating else mask
    y, weights = own(x, x, x, key_padding_mask=given, average_attn_weights=False)
    hw.attach(own)
    seen: list[hw.models.AttentionCall] = []
    with hw.models.observe(seen.append, measures=["entropy", "received_mass"]):
        ours, lazy = own(x, x, x, key_padding_mask=given, average_attn_weights=False)
        own(x, x.clone(), x, key_padding_mask=given)  # of another sequence
    assert_close(ours, y, rtol=1e-4, atol=1e-5)
    assert_close(lazy.dense(), weights, rtol=1e-4, atol=1e-5)
    rows, all_rows = ((call.map.lse != -torch.inf)[:, 0] for call in seen)
    assert torch.equal(rows, ~mask)
    assert all_rows.all()
    for name, value in seen[0].map.measure("entropy", "received_mass").items():
        assert_close(seen[0].measured[name], value, rtol=1e-4, atol=1e-5)
    entropy = -(weights.clamp_min(1e-30).log() * weights).sum(-1)
    expected = (entropy * ~mask[:, None]).sum(-1) / (~mask).sum(-1)[:, None]
    assert_close(seen[0].measured["entropy"], expected, rtol=1e-3, atol=1e-4)
    assert seen[1].measured["entropy"].shape == (3, 4)
    assert_close(seen[1].measured["entropy"], entropy.mean(-1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["encoder_attn", "self_attn"])
@pytest.mark.parametrize("named", [False, True])
def test_padding_of_the_encoder_hides_no_query_of_the_decoder(name, named):
    from transformers import BartConfig, BartModel

    torch.manual_seed(0)
    sizes = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 19, "decoder_ffn_dim": 19, "d_model": 16, "max_position_embeddings": 32}
    model = BartModel(BartConfig(vocab_size=37, **sizes)).eval()
    hw.attach(model)
    tokens, real, _ = batch("right")
    seen = seen_by(model if named else None, (), lambda: model(tokens, attention_mask=real, decoder_input_ids=tokens))
    of = {module: key for key, module in model.named_modules()}
    assert len(seen) == 6
    for call in seen:
        counted = int((call.map.lse != -torch.inf)[:, 0].sum())
        key = of[call.module]
        if key.endswith(name):
            padded = key.startswith("encoder")
            assert counted == (sum(LENGTHS) if padded else 3 * max(LENGTHS)), key


@pytest.mark.thorough
@pytest.mark.parametrize("floating", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_padding_compiles_into_one_graph(masked, floating):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 4, 29, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train()
    hw.attach(encoder)
    x, pad = torch.randn(3, 7, 24), hidden(holes=True)
    options = {"mask": torch.ones(7, 7, dtype=torch.bool).triu(2)} if masked else {}
    options["src_key_padding_mask"] = torch.zeros(3, 7).masked_fill(pad, -torch.inf) if floating else pad
    if masked and floating:
        options["mask"] = torch.zeros(7, 7).masked_fill(options["mask"], -torch.inf)
    compiled = torch.compile(encoder, backend="eager", fullgraph=True)
    assert_close(compiled(x, **options), encoder(x, **options), rtol=1e-4, atol=1e-5)
    compiled(x, **options).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in encoder.parameters())
