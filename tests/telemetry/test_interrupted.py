"""Forward passes that end with an error, which is raised as it is, or with a KeyboardInterrupt, after which PyTorch
runs no hooks; and the next one, which is seen whole."""

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import headwise as hw

N, D, H = 5, 12, 3


class Written(nn.Module):
    """Attention that is written out."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Interrupted(nn.Module):
    """Two layers, and a KeyboardInterrupt between them when it is told."""

    def __init__(self, made):
        super().__init__()
        self.first, self.second, self.now = made(), made(), False

    def forward(self, x):
        x = self.first(x)
        if self.now:
            raise KeyboardInterrupt
        return self.second(x)


def interrupted(model, x):
    model.now = True
    with pytest.raises(KeyboardInterrupt):
        model(x)
    model.now = False


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(2, N, D)


@pytest.mark.parametrize("made", [Written, lambda: hw.MultiHeadAttention(D, H)], ids=["recognised", "headwise"])
def test_a_record_measures_the_forward_after_it(made, x):
    model = Interrupted(made)
    with hw.watch(model, measures=["entropy"]) as whole:
        model(x)
    with hw.watch(model, measures=["entropy"]) as record:
        model(x)
        interrupted(model, x)
        for _ in range(2):
            model(x)
        assert _get_current_function_mode_stack() == []
        assert record.layers == ("first", "second")
        assert record.ledger.steps == record.ledger.index == 3
        assert torch.equal(record.latest.numbers, whole.latest.numbers)


@pytest.mark.parametrize("how", ["watch", "attach", "gate_gradients"])
def test_an_error_of_the_model_is_raised_as_it_is(how, x):
    class Failing(Interrupted):
        def forward(self, x):
            return super().forward(x) + torch.ones(N + 2)

    model = Failing(Written)
    watching = {
        "watch": lambda: hw.watch(model, measures=["entropy"]),
        "attach": lambda: hw.attach(model),
        "gate_gradients": lambda: hw.telemetry.gate_gradients(model),
    }[how]
    with pytest.raises(RuntimeError, match="must match the size"):
        model(x)
    with watching(), pytest.raises(RuntimeError, match="must match the size"):
        model(x)
    assert _get_current_function_mode_stack() == []


def test_an_attached_model_computes_the_forward_after_it(x):
    model = Interrupted(Written)
    expected, calls = model(x), []
    with hw.attach(model, batch=x) as handle, hw.models.observe(calls.append, model=model):
        interrupted(model, x)
        calls.clear()
        torch.testing.assert_close(model(x), expected)
        assert _get_current_function_mode_stack() == []
        assert [call.name for call in calls] == ["first", "second"]
        assert handle.attached == ("first", "second")
    assert torch.equal(model(x), expected)


def test_gradients_of_gates_are_those_of_the_forward_after_it(x):
    def gates(interrupt):
        with hw.telemetry.gate_gradients(model) as found:
            model(x).square().sum().backward()
            if interrupt:
                interrupted(model, x)
            model(x).square().sum().backward()
            assert _get_current_function_mode_stack() == []
        return found

    model = Interrupted(Written)
    one, other = (gates(interrupt).importance().table.to_dict() for interrupt in (True, False))
    assert one == other


def test_a_module_that_calls_itself_is_one_forward(x):
    class Twice(Interrupted):
        def forward(self, x, again=True):
            return super().forward(self(x, again=False) if again else x)

    model = Twice(Written)
    with hw.watch(model, measures=["entropy"]) as record:
        model(x)
    assert record.ledger.steps == 1
    assert torch.equal(record.ledger.states[0].layers["first"].pooled.numbers[1], torch.full((1, H), 4.0 * N))
