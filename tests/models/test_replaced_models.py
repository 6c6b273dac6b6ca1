"""Models that are attached by recognition: training, caches, memory, other modes, and detaching."""

import gc
import weakref
from contextlib import ExitStack

import pytest
import torch
import touched
import ways
from largest_tensor import Largest
from test_recognise import model_of
from test_replaced import batch, results, same
from torch import nn
from torch.utils.checkpoint import checkpoint
from ways import B, D, E, H, N, Way

import headwise as hw
from headwise.errors import ConfigError


class Trainable(nn.Module):
    """Two blocks with residuals, a cache of keys and values, and a causal or padding mask."""

    def __init__(self, p=0.0, checkpointed=False):
        super().__init__()
        self.attention = nn.ModuleList([Cached(p) for _ in range(2)])
        self.norm, self.checkpointed = nn.LayerNorm(E), checkpointed

    def forward(self, x, mask=None, cache=None):
        for i, attention in enumerate(self.attention):
            past = None if cache is None else cache.setdefault(i, {})
            if self.checkpointed:
                x = x + checkpoint(attention, self.norm(x), mask, use_reentrant=False)
            else:
                x = x + attention(self.norm(x), mask, past)
        return x


class Cached(Way):
    def __init__(self, p):
        super().__init__()
        self.dropout = nn.Dropout(p)

    def forward(self, x, mask=None, past=None):
        q, k, v = self.heads(x)
        if past is not None:
            k, v = (torch.cat((past[name], y), 2) if name in past else y for name, y in (("k", k), ("v", v)))
            past.update(k=k, v=v)
        scores = q @ k.transpose(-2, -1) / D**0.5
        n, m = scores.shape[-2:]
        scores = scores.masked_fill(~torch.ones(n, m, dtype=torch.bool).tril(m - n), -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None] == 0, -torch.inf)
        return self.merge(self.dropout(scores.softmax(-1)) @ v)


@pytest.mark.thorough
def test_masks_lengths_and_caches_may_change_between_calls():
    model = Trainable().double().eval()
    lengths = [5, 7, 5, 11]
    masks = [None, None, torch.tensor([[1, 1, 1, 0, 0], [1] * 5]), torch.ones(B, 11)]
    expected = [model(batch(i, n), mask) for i, (n, mask) in enumerate(zip(lengths, masks, strict=True))]
    with hw.attach(model) as handle:
        for i, (n, mask) in enumerate(zip(lengths, masks, strict=True)):
            torch.testing.assert_close(model(batch(i, n), mask), expected[i], rtol=1e-9, atol=1e-11)
        assert handle.attached == ("attention.0", "attention.1")
        x, cache = batch(5, 7), {}
        steps = [model(x[:, :4], cache=cache), *(model(x[:, i : i + 1], cache=cache) for i in range(4, 7))]
        assert handle.skipped == {}
    torch.testing.assert_close(torch.cat(steps, 1), model(x), rtol=1e-9, atol=1e-11)


@pytest.mark.thorough
@pytest.mark.parametrize("given", [True, False], ids=["batch", "first pass"])
def test_training_with_checkpoints_and_an_optimiser_takes_the_same_steps(given):
    def trained(attach):
        torch.manual_seed(0)
        model = Trainable(checkpointed=True).double()
        handle = hw.attach(model, batch=batch() if given else None) if attach else None
        optimiser = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(4):
            optimiser.zero_grad()
            model(batch(step)).square().sum().backward()
            optimiser.step()
        assert handle is None or handle.attached == ("attention.0", "attention.1")
        return list(model.parameters())

    same(trained(True), trained(False))


def test_a_checkpoint_of_a_part_of_a_forward_keeps_its_own_code():
    class Core(Way):
        def forward(self, x):
            return self.merge(
                checkpoint(lambda q, k, v: (q @ k.mT / 2).softmax(-1) @ v, *self.heads(x), use_reentrant=False)
            )

    model = nn.Sequential(Core(), ways.DividedByTensor()).double()
    expected = results(model, batch(1))
    with pytest.warns(UserWarning, match="0: a part of its forward is called by torch.utils.checkpoint"):
        handle = hw.attach(model, batch=batch())
    with handle:
        same(results(model, batch(1)), expected)


@pytest.mark.thorough
def test_dropout_has_the_same_distribution():
    model = Trainable(0.3).double().train()
    torch.manual_seed(0)
    x = batch().detach()[:1].expand(1500, N, E)  # dropout differs between entries of a batch
    with torch.no_grad():
        expected = model.attention[0](x)
        with hw.attach(model, batch=x[:2]) as handle:
            found = model.attention[0](x)
            assert "attention.0" in handle.attached
            torch.manual_seed(7)
            first = model(x[:2])
            torch.manual_seed(7)
            assert torch.equal(model(x[:2]), first)
    error = expected.std(0) / 1500**0.5
    assert float(((found.mean(0) - expected.mean(0)).abs() / error).max()) < 7
    torch.testing.assert_close(found.std(0), expected.std(0), rtol=0.15, atol=1e-3)


@pytest.mark.parametrize("way", ["SmallGPT", "FoldedHeads", "GroupedKeys"])
def test_autocast_gives_the_same_dtypes_and_numbers(way):
    model = model_of(getattr(ways, way)()).float()
    x, other = batch(0).float(), batch(1).float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = results(model, other.detach().requires_grad_())
        with hw.attach(model, batch=x) as handle:
            found = results(model, other.detach().requires_grad_())
            assert handle.skipped == {}
            assert handle.attached
    scale = max(float(theirs.detach().abs().max()) for theirs in expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.01 * scale)


def test_a_module_that_is_used_twice_is_attached_once():
    shared = ways.AnnotatedTransformer()
    model = nn.Sequential(shared, nn.LayerNorm(E), shared).double().eval()
    expected = results(model, batch(1))
    with hw.attach(model, batch=batch()) as handle:
        same(results(model, batch(1)), expected)
        assert handle.attached == ("0",)


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("way", ["SplitAfterProjection", "SlidingWindow", "WrittenSoftmax", "FoldedRotary", "Sinks"])
def test_no_product_of_queries_and_keys_is_made(way):
    n = 311
    model = model_of(getattr(ways, way)()).float()
    x = batch(1, n).detach().float().requires_grad_()
    with hw.attach(model, batch=x), Largest() as largest:
        results(model, x)
    assert largest.numel <= n * n  # a mask of the model's own has as many
    with Largest() as largest:
        results(model, x)
    assert largest.numel >= B * H * n * n


@pytest.mark.thorough_except("attach")
@pytest.mark.parametrize("first", ["attach", "watch"])
def test_attached_models_are_watched_and_observed_once(first):
    model = Trainable().double()
    x, seen = batch(), []
    model(x)
    with hw.watch(model, measures=["entropy"], maps="lazy") as record:
        model(x)
        expected = record.latest["entropy"]
    with hw.attach(model, batch=x) if first == "attach" else hw.watch(model) as one:
        other = hw.watch(model, measures=["entropy"], maps="lazy") if first == "attach" else hw.attach(model, batch=x)
        with other as two, hw.models.observe(seen.append, model=model):
            model(x)
            record = two if first == "attach" else one
            torch.testing.assert_close(record.latest["entropy"], expected)
            assert list(record.maps if first == "attach" else record.layers) == ["attention.0", "attention.1"]
            assert [call.name for call in seen] == ["attention.0", "attention.1"]


@pytest.mark.thorough
@pytest.mark.parametrize("first", ["attach", "watch"])
@pytest.mark.parametrize("n", [1, N])
def test_calls_that_the_code_of_an_attached_model_computes_are_watched(first, n):
    """The first call of another form (of one token), and weights through which no gradients flow."""
    model = nn.Sequential(ways.SmallGPT(), touched.DetachedWeights()).double().eval()
    x, seen = batch(1, n), []
    with hw.watch(model, measures=["entropy"], maps="lazy") as record:
        model(x)
    with ExitStack() as stack:
        opened = [lambda: hw.attach(model, batch=batch()), lambda: hw.watch(model, measures=["entropy"], maps="lazy")]
        one, two = [stack.enter_context(open_()) for open_ in (opened if first == "attach" else opened[::-1])]
        stack.enter_context(hw.models.observe(seen.append, model=model))
        model(x)
        found = two if first == "attach" else one
        assert [call.name for call in seen] == list(found.maps) == list(record.maps) == ["0", "1"]
        torch.testing.assert_close(found.latest["entropy"], record.latest["entropy"])
        for mine, theirs in zip(found.maps.values(), record.maps.values(), strict=True):
            torch.testing.assert_close(mine[:], theirs[:])


def test_the_handle_restores_the_model_and_frees_it():
    model = Trainable().double()
    before = [(type(module), sorted(vars(module)), len(module._forward_hooks)) for module in model.modules()]
    handle = hw.attach(model)
    assert repr(handle) == "Attachment(attention is recognised in the first forward)"
    with pytest.raises(ConfigError, match="attached already"):
        hw.attach(model)
    model(batch())
    assert repr(handle) == "Attachment(2 modules attached)"
    handle.detach()
    assert handle.attached == ()
    assert [(type(module), sorted(vars(module)), len(module._forward_hooks)) for module in model.modules()] == before
    copied = hw.attach(model, copy=True)
    assert copied.model is not model
    copied.model(batch())
    gone = weakref.ref(model.attention[0])
    del model, copied, handle
    gc.collect()
    assert gone() is None


def test_what_headwise_knows_and_what_is_written_by_hand_are_attached_together():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.known = nn.MultiheadAttention(E, H, batch_first=True)
            self.mine = ways.SmallGPT()

        def forward(self, x):
            return self.mine(self.known(x, x, x, need_weights=False)[0])

    model = Mixed().double().eval()
    expected = results(model, batch(1))
    with hw.attach(model, batch=batch()) as handle:
        same(results(model, batch(1)), expected)
        assert handle.attached == ("known", "mine")
    with hw.attach(model) as handle:  # without a batch, modules of known classes only
        assert handle.attached == ("known",)


@pytest.mark.parametrize("mode", ["inference", "no_grad"])
def test_inference(mode):
    model = model_of(ways.InPlace())
    with torch.inference_mode() if mode == "inference" else torch.no_grad():
        x = batch(1).detach()
        expected = model(x)
        with hw.attach(model, batch=x) as handle:
            torch.testing.assert_close(model(x), expected)
            assert handle.attached


def test_weights_whose_arguments_changed_are_an_error_not_a_wrong_number():
    model = model_of(ways.PositionBias())
    with hw.attach(model, batch=batch()):
        model(batch(1))
        with torch.no_grad():
            model.blocks[0]["attn"].bias.add_(1)
        with pytest.raises(ConfigError, match=r"one of its arguments was changed in place since"):
            model.blocks[0]["attn"].weights + 1


@pytest.mark.thorough
def test_a_compiled_model_is_attached():
    model = model_of(ways.SmallGPT())
    compiled = torch.compile(model, backend="eager")
    expected = compiled(batch(1))
    with hw.attach(model, batch=batch()) as handle:
        torch.testing.assert_close(compiled(batch(1)), expected, rtol=1e-9, atol=1e-11)
        assert handle.attached == ("blocks.0.attn",)
    assert torch.equal(compiled(batch(1)), expected)


def test_another_branch_is_compared_when_it_is_first_taken():
    class Branches(Way):
        fused = False

        def forward(self, x):
            q, k, v = self.heads(x)
            if self.fused:
                return self.merge(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
            return self.merge((q @ k.mT / 2).softmax(-1) @ v)

    model = nn.Sequential(ways.DividedByTensor(), Branches()).double()
    handle = hw.attach(model, batch=batch())
    model[1].fused = True
    with hw.models.observe((seen := []).append, model=model):
        found = [results(model, batch(seed)) for seed in range(2)]
    assert [call.name for call in seen] == ["0", "0", "1"]  # the first call of the branch is the model's own
    handle.detach()
    for seed, mine in enumerate(found):
        same(mine, results(model, batch(seed)))


def test_nothing_of_a_forward_is_kept_after_it():
    model = Trainable().double()
    with hw.attach(model, batch=batch()), torch.no_grad():
        gc.collect()
        gc.disable()
        try:
            made = weakref.ref(model(batch(1)))
            kept = [weakref.ref(x) for x in gc.get_objects() if type(x).__name__ in ("Deferring", "Deferred", "_Open")]
        finally:
            gc.enable()
    assert made() is None
    assert [one for one in kept if one() is not None] == []


def test_what_an_observer_raises_is_raised_through_the_model():
    def failing(call):
        raise ValueError("stop")

    model = Trainable().double()
    with hw.attach(model, batch=batch()) as handle:
        with hw.models.observe(failing, model=model), pytest.raises(ValueError, match="stop"):
            model(batch())
        model(batch())
        assert handle.skipped == {}
