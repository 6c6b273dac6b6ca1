"""`attach`: one verb for every kind of model, undone exactly."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.errors import ConfigError


def mixed() -> nn.ModuleDict:
    """One model with attention of PyTorch, transformers and headwise."""
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 16, "intermediate_size": 19, "num_attention_heads": 2, "num_hidden_layers": 1}
    torch.manual_seed(0)
    return nn.ModuleDict({
        "torch": nn.TransformerEncoderLayer(16, 2, 19, batch_first=True),
        "llama": LlamaModel(LlamaConfig(vocab_size=23, **sizes)),
        "own": hw.MultiHeadAttention(16, 2),
    })  # fmt: skip


ATTACHED = "torch.self_attn", "llama.layers.0.self_attn"


def state(model: nn.Module) -> list[object]:
    """All that attaching may change."""
    found: list[object] = []
    for module in model.modules():
        config = getattr(module, "config", None)
        found += [id(module), type(module), sorted(vars(module)), list(module._forward_hooks.values())]
        found += [id(config), getattr(config, "_attn_implementation_internal", None)]
    return [*found, *((name, id(p)) for name, p in model.named_parameters())]


def test_every_kind_is_attached_and_restored_exactly():
    model = mixed().eval()
    x, ids = torch.randn(3, 5, 16), torch.arange(7)[None]
    before, keys = state(model), list(model.state_dict())
    with torch.no_grad():
        theirs = model["torch"](x), model["llama"](ids).last_hidden_state
        seen: list[hw.models.AttentionCall] = []
        with hw.attach(model) as handle, hw.models.observe(seen.append, model=model):
            ours = model["torch"](x), model["llama"](ids).last_hidden_state
            assert list(model.state_dict()) == keys
        assert sorted(call.name for call in seen) == sorted(ATTACHED)
        again = model["torch"](x), model["llama"](ids).last_hidden_state
    assert state(model) == before
    for mine, their, then in zip(ours, theirs, again, strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-4, atol=1e-5)
        assert torch.equal(then, their)
    assert (handle.own, handle.skipped, handle.attached) == (("own",), {}, ())


def test_handle_says_what_it_holds():
    model = mixed()
    handle = hw.attach(model)
    assert handle.attached == ATTACHED
    assert repr(handle) == "Attachment(2 modules attached)"
    handle.detach()
    handle.detach()
    assert repr(handle) == "Attachment(detached)"
    with pytest.raises(ConfigError, match="detached: attach"), handle:
        pass


def test_headwises_own_layers_need_nothing():
    model = nn.Sequential(hw.MultiHeadAttention(16, 2))
    before = state(model)
    with hw.attach(model) as handle:
        assert (handle.attached, handle.own) == ((), ("0",))
        assert state(model) == before


@pytest.mark.parametrize("part", ["", "torch", "torch.self_attn", "llama"])
def test_what_is_attached_is_not_attached_twice(part):
    model = mixed()
    handle = hw.attach(model)
    held = state(model)
    with pytest.raises(ConfigError, match=r"attached already; call \.detach\(\)"):
        hw.attach(model.get_submodule(part))
    assert state(model) == held
    handle.detach()
    hw.attach(model).detach()


def test_the_whole_is_not_attached_over_its_part():
    model = mixed()
    before = state(model)
    with hw.attach(model["llama"]):
        held = state(model)
        with pytest.raises(ConfigError, match=r"llama\.layers\.0\.self_attn is attached already"):
            hw.attach(model)
        assert state(model) == held
        with hw.attach(model["torch"]) as other:
            assert other.attached == ("self_attn",)
    assert state(model) == before


def test_an_error_within_detaches():
    model = mixed()
    before = state(model)
    with pytest.raises(ZeroDivisionError), hw.attach(model):
        1 / 0  # noqa: B018
    assert state(model) == before


def test_a_model_is_freed_with_its_handle():
    model = mixed()
    gone = weakref.ref(model["torch"])
    hw.attach(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.thorough
def test_weights_are_returned_to_hooks_of_every_call_and_computed_when_they_are_read():
    from largest_tensor import Largest
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=23, hidden_size=16, intermediate_size=19, num_attention_heads=4,
                         num_key_value_heads=2, num_hidden_layers=2)  # fmt: skip
    model, ids, sums = LlamaModel(config).eval(), torch.arange(2000)[None] % 23, []
    module = model.layers[1].self_attn
    module.register_forward_hook(lambda _, args, result: sums.append(None if result[1] is None else result[1].sum(2)))
    with torch.no_grad():
        with hw.attach(model, weights=True), Largest() as largest:
            model(ids)
        with hw.attach(model):
            model(ids)
        model.set_attn_implementation("eager")
        model(ids)
    ours, none, theirs = sums
    assert none is None
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert largest.numel < 2000 * 2000 / 4


def test_attentions_requested_by_the_configuration():
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(vocab_size=23, hidden_size=16, intermediate_size=19, num_attention_heads=4,
                         num_hidden_layers=2, attn_implementation="eager")  # fmt: skip
    config.output_attentions = True
    model, ids = LlamaModel(config).eval(), torch.arange(7)[None]
    theirs = model(ids).attentions
    with hw.attach(model), torch.no_grad():
        ours = model(ids).attentions
    assert not any(weights.made for weights in ours)
    torch.testing.assert_close(ours[1] + 0, theirs[1].detach(), rtol=1e-4, atol=1e-6)


def test_a_model_that_ignores_the_setting_is_recognised_and_left_as_it_is() -> None:
    from transformers import LlamaConfig, LlamaModel

    class Stubborn(LlamaModel):
        def set_attn_implementation(self, *args: object, **kwargs: object) -> None:
            """Take none."""

    torch.manual_seed(0)
    model = Stubborn(LlamaConfig(vocab_size=23, hidden_size=16, intermediate_size=19, num_attention_heads=2,
                                 num_hidden_layers=1, attn_implementation="eager"))  # fmt: skip
    model.config = copy.deepcopy(model.config)  # that of the model is not that of its layers
    before, ids = state(model), torch.arange(7)[None]
    with hw.watch(model) as record:
        model(ids)
    assert "1 of 1 steps" in repr(record)
    with pytest.raises(ConfigError, match="did not take attn_implementation"):
        hw.attach(model)
    gates = hw.telemetry.gate_gradients(model)
    with gates:
        model(ids).last_hidden_state.sum().backward()
    assert not gates.active
    assert state(model) == before
