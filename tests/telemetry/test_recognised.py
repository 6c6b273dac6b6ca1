"""`hw.watch` of models that headwise has no adapter for: their attention is recognised while they run."""

import copy
import math
import sys
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event, Thread

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headwise as hw

B, H, N, D = 2, 3, 5, 4
E = H * D


class Attention(nn.Module):
    """Attention of a tutorial, which keeps its weights."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(E, 3 * E), nn.Linear(E, E), nn.Dropout(p)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        q, k, v = (y.view(*y.shape[:2], H, D).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / math.sqrt(D)
        if real is not None:
            scores = scores.masked_fill(~real[:, None, None], -1e9)
        weights = F.softmax(scores, dim=-1)
        self.weights = weights.detach()
        return self.out((self.dropout(weights) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A residual connection, checkpointed if so wanted."""

    def __init__(self, p: float, again: str) -> None:
        super().__init__()
        self.attn, self.norm, self.again = Attention(p), nn.LayerNorm(E), again

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            return x + checkpoint(self.attn, self.norm(x), use_reentrant=self.again == "reentrant")
        return x + self.attn(self.norm(x))


def model_of(p: float = 0.0, again: str = "") -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Block(p, again), Block(p, again))


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(B, N, E)


def modes() -> int:
    return torch._C._len_torch_function_stack()


def test_measures_and_maps_are_those_of_the_model_s_own_weights(x):
    model = model_of().double()
    expected = model(x.double())
    with hw.watch(model, measures=["entropy", "max_logit"], maps="lazy") as record:
        assert torch.equal(model(x.double()), expected)
    assert record.layers == tuple(record.maps) == tuple(record.modules()) == ("0.attn", "1.attn")
    assert record.unwatched == {}
    for i, name in enumerate(record.layers):
        weights = record.modules()[name].weights
        torch.testing.assert_close(record.maps[name][:], weights)
        entropy = -(weights * weights.log()).sum(-1).mean((0, 2))
        torch.testing.assert_close(record.latest["entropy"][i], entropy.float())
    assert modes() == 0


@pytest.mark.parametrize("again", ["", "reentrant", "other"])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_training_is_the_same_while_it_is_watched(p, again, x):
    """Outputs and gradients have the same bits, dropout the same numbers, and each call is seen once."""
    found = []
    for watched in (False, True):
        model = model_of(p, again).train()
        record = hw.watch(model, measures=["entropy"], maps="lazy")
        if watched:
            record.start()
        torch.manual_seed(2)
        y = model(x.requires_grad_())
        y.square().mean().backward()
        record.stop()
        found.append([y.detach(), *(p.grad for p in model.parameters())])
        if watched:
            assert record.ledger.steps == 1
            assert list(record.maps) == ["0.attn", "1.attn"]
            assert record.unwatched == {}
            if not again:  # else the weights are those of the repeated call
                torch.testing.assert_close(record.maps["1.attn"][:], model[1].attn.weights, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("mode", ["autocast", "inference"])
def test_autocast_and_inference_mode(mode, x):
    model = model_of().eval()
    with torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else torch.inference_mode():
        expected = model(x)
        with hw.watch(model, measures=["entropy"], maps="lazy") as record:
            assert torch.equal(model(x), expected)
    assert list(record.maps) == ["0.attn", "1.attn"]
    assert record.maps["0.attn"].q.dtype == (torch.bfloat16 if mode == "autocast" else torch.float32)
    assert not bool(record.latest["entropy"].isnan().any())


@pytest.mark.thorough
@pytest.mark.parametrize("inside", [True, False])
@torch.no_grad()
def test_a_compiled_model_is_watched(inside, x):
    model = model_of().eval()
    expected = model(x)
    compiled = torch.compile(model, backend="eager")
    if inside:
        compiled = nn.Sequential(*(torch.compile(block, backend="eager") for block in model))
    with hw.watch(compiled, measures=["entropy"]) as record:
        with pytest.warns(UserWarning, match=r"watch\(model\): .* is compiled\. .* it runs uncompiled"):
            torch.testing.assert_close(compiled(x), expected)
        compiled(x)  # it is said once
    assert [name.replace("_orig_mod.", "") for name in record.layers] == ["0.attn", "1.attn"]
    torch.testing.assert_close(compiled(x), expected)


OPENED = {
    "watch": lambda model: hw.watch(model, measures=["entropy"]),
    "gate_gradients": hw.telemetry.gate_gradients,
    "attach": hw.attach,
}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.* is called by compiled code", "ignore:The .grad attribute")
@pytest.mark.parametrize(
    "opened",
    [
        ("watch",) * 3,
        ("watch", "gate_gradients"),
        ("gate_gradients", "watch"),
        ("watch", "attach"),
        ("attach", "watch"),
    ],
    ids=" then ".join,
)
def test_what_calls_a_model_stays_compiled_however_many_follow_it(opened, x):
    model, ran = model_of(), []

    def backend(graph, inputs):
        return lambda *args: ran.append(len(list(graph.graph.nodes))) or graph.forward(*args)

    torch.compiler.reset()
    compiled = torch.compile(lambda x: model(x).relu() + 1.0, backend=backend)
    expected = model(x).relu() + 1.0
    with ExitStack() as contexts:
        entered = [contexts.enter_context(OPENED[name](model)) for name in opened]
        for _ in range(3):
            ran.clear()
            torch.testing.assert_close(compiled(x), expected)
            assert ran, "relu ran uncompiled"
        assert all(one.ledger.steps == 3 for one in entered if isinstance(one, hw.telemetry.Record))
        entered[0].detach() if opened[0] == "attach" else entered[0].stop()
        ran.clear()
        torch.testing.assert_close(compiled(x), expected)
        assert ran, "relu ran uncompiled"
    torch.compiler.reset()
    assert modes() == 0


def test_a_copy_made_between_forwards_is_not_watched(x):
    model = model_of()
    with hw.watch(model, measures=["entropy"]) as record:
        model(x)
        twin = copy.deepcopy(model)
        torch.testing.assert_close(twin(x), model(x))
    assert record.ledger.index == 2
    assert modes() == 0
    assert hw.kernels.events.subscribers == ()


@pytest.mark.thorough
def test_a_report_is_made_of_a_record(x, tmp_path):
    model = model_of()
    with hw.watch(model, maps="lazy") as record:
        model(x)
    report = hw.report(record, tmp_path / "report.html")
    assert "2 layers, 6 heads" in repr(report)
    assert "0.attn" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_queries_that_are_padding_are_not_counted(x):
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = Attention()

        def forward(self, x):
            return self.attn(x, torch.arange(N) < torch.tensor([[5], [2]]))

    model = Padded()
    with hw.watch(model, measures=["entropy"], maps="lazy") as record:
        model(x)
    assert torch.equal(record.maps["attn"].lse[1] == -torch.inf, (torch.arange(N) >= 2).expand(H, N))
    weights = model.attn.weights
    entropies = torch.special.entr(weights).sum(-1)
    expected = torch.cat((entropies[0], entropies[1, :, :2]), -1).mean(-1)
    torch.testing.assert_close(record.latest["entropy"][0], expected)


def test_the_mode_is_there_in_measured_forwards_only(x):
    seen = []
    model = model_of()
    model[0].attn.register_forward_pre_hook(lambda *_: seen.append(modes()))
    with hw.watch(model, every=2) as record:
        for _ in range(3):
            model(x)
    assert seen == [1, 0, 1]
    assert record.ledger.steps == 2


def test_the_mode_is_gone_after_an_error(x):
    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("broken")

    model = nn.Sequential(Attention(), Broken())
    with hw.watch(model) as record, pytest.raises(RuntimeError, match="broken"):
        model(x)
    assert modes() == 0
    assert record.layers == ()


def test_layers_are_chosen_by_name(x):
    model = model_of()
    with hw.watch(model, layers="1.*") as record:
        model(x)
    assert record.layers == ("1.attn",)
    with pytest.raises(hw.ConfigError, match=r"layers=\['nowhere\.\*'\]: Sequential has no module of that name"):
        hw.watch(model, layers=["nowhere.*"])
    with pytest.raises(hw.ConfigError, match=r"layers=\[1\]: the attention of Sequential is recognised while it runs"):
        hw.watch(model, layers=[1])


def test_a_model_without_attention_is_named_in_its_first_forward(x):
    model = nn.Sequential(nn.Linear(E, 7), nn.Softmax(-1))
    with (
        hw.watch(model) as record,
        pytest.raises(hw.ConfigError, match=r"watch\(model\): no attention in Sequential; .*nearest: 1: softmax of"),
    ):
        model(x)
    assert modes() == 0
    assert record.layers == ()
    assert model(x).shape == (B, N, 7)


def test_what_is_not_attention_is_listed_as_unwatched(x):
    class Gate(nn.Module):
        def forward(self, x):
            return x * F.softmax(x, -1)

    model = nn.Sequential(Attention(), Gate())
    with hw.watch(model) as record:
        model(x)
    assert record.layers == ("0",)
    assert list(record.unwatched) == ["1"]
    assert record.unwatched["1"].startswith("softmax of the output of a layer (linear), as in a classifier")
    assert record.unwatched["1"].endswith(f"(test_recognised.py:{Gate.forward.__code__.co_firstlineno + 1})")


def test_what_a_subscriber_raises_is_raised_through_the_model(x):
    def refuse(call):
        raise hw.ConfigError("refused")

    model = model_of()
    names = {module: name for name, module in model.named_modules()}
    with hw.watch(model), hw.models.observe(refuse, modules=names), pytest.raises(hw.ConfigError, match="refused"):
        model(x)


def test_calls_after_the_first_one_are_compared_too(x):
    class Changing(Attention):
        later = False

        def forward(self, x):
            q, k, v = (y.view(*y.shape[:2], H, D).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
            weights = (q @ k.mT).softmax(-1)
            return self.out(((weights * weights if self.later else weights) @ v).transpose(1, 2).flatten(2))

    model = nn.Sequential(Changing(), Attention())
    with hw.watch(model, maps="lazy") as record:
        model(x)
        assert list(record.maps) == ["0", "1"]
        model[0].later = True
        model(x)
    assert list(record.maps) == ["1"]
    assert record.unwatched["0"].startswith("the weights are changed after the softmax, by mul at")


class Mixed(nn.Module):
    """One attention of headwise, one of PyTorch, and one of a tutorial."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.ours, self.theirs = hw.MultiHeadAttention(E, H), nn.MultiheadAttention(E, H, batch_first=True)
        self.mine = Attention()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ours(x)
        x = x + self.mine(x)
        return x + self.theirs(x, x, x, need_weights=False)[0]


@pytest.mark.thorough
def test_known_layers_and_recognised_ones_are_watched_together(x):
    model = Mixed()
    with hw.watch(model, measures=["entropy"], maps="lazy") as record:
        for _ in range(2):
            model(x)
    assert record.layers == ("ours", "theirs", "mine")
    assert list(record.maps) == ["ours", "mine", "theirs"]
    assert record.unwatched == {}
    torch.testing.assert_close(record.maps["mine"][:], model.mine.weights, rtol=1e-4, atol=1e-6)
    assert record.latest["entropy"].shape == (3, H)
    assert type(model.theirs) is nn.MultiheadAttention


@pytest.mark.parametrize(
    ("layers", "expected"), [("mine", ("mine",)), (["theirs", "m*"], ("theirs", "mine")), ([0], ("ours",))]
)
def test_layers_of_a_mixed_model_are_chosen_by_name_and_known_ones_by_index(layers, expected, x):
    model = Mixed()
    with hw.watch(model, layers=layers) as record:
        model(x)
    assert record.layers == expected
    with pytest.raises(hw.ConfigError, match=r"layers='nowhere': no such layer among the 2"):
        hw.watch(model, layers=[*([layers] if isinstance(layers, str) else layers), "nowhere"])


def test_nothing_is_followed_after_a_forward_in_which_headwise_computed_everything(x):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.modes = hw.MultiHeadAttention(E, H), []

        def forward(self, x):
            self.modes.append(modes())
            return self.attn(x)

    model = Block()
    with hw.watch(model) as record:
        for _ in range(3):
            model(x)
    assert model.modes == [1, 0, 0]
    assert record.layers == ("attn",)
    assert record.ledger.steps == 3
    assert record.unwatched == {}


@pytest.mark.thorough
@pytest.mark.parametrize("kernel", ["torch_blocks", "reference"])
def test_the_functions_of_headwise_s_own_kernels_are_not_taken_for_attention(kernel, x):
    model = Mixed()
    with hw.kernels.use_kernel(kernel), hw.watch(model, maps="lazy") as record:
        model(x)
    assert list(record.maps) == ["ours", "mine", "theirs"]
    assert record.unwatched == {}


class InThreads(nn.Module):
    """As `nn.DataParallel` without several GPUs: replicas in threads of their own, a part of the batch each."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        parts = x.chunk(2)
        found: dict[int, Tensor] = {}

        def run(i: int, replica: nn.Module) -> None:
            found[i] = replica(parts[i])

        threads = [Thread(target=run, args=(i, replica(self.module))) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.cat([found[0], found[1]])


def replica(module: nn.Module) -> nn.Module:
    """One as `torch.nn.parallel.replicate` makes it, on the same device."""
    copies = {one: one._replicate_for_data_parallel() for one in module.modules()}
    for one, made in copies.items():
        for name, child in one._modules.items():
            made._modules[name] = copies[child]
        for name, parameter in one._parameters.items():
            made.__dict__[name] = parameter
    return copies[module]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["recognised", "mixed"])
def test_replicas_in_threads_are_seen(kind, x):
    model = InThreads(model_of() if kind == "recognised" else Mixed()).eval()
    with torch.no_grad():
        expected = model.module(x)
        with hw.watch(model.module, measures=["entropy"]) as whole:
            model.module(x)
        with hw.watch(model, measures=["entropy"], maps="lazy") as record:
            torch.testing.assert_close(model(x), expected)
    names = {"recognised": ("0.attn", "1.attn"), "mixed": ("ours", "theirs", "mine")}[kind]
    assert record.layers == tuple(f"module.{name}" for name in names)
    assert record.unwatched == {}
    assert len(record.maps) == 2 * len(names)
    torch.testing.assert_close(record.latest["entropy"], whole.latest["entropy"])
    assert modes() == 0
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in model.modules())


def test_a_thread_that_a_forward_left_running_ends_as_it_began(x):
    """Its module ends after the forward that called it."""
    left, go, after = Event(), Event(), []

    def hold(*given):
        left.set()
        assert go.wait(60)

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Attention(), Attention()
            self.two.dropout.register_forward_pre_hook(hold)

        def forward(self, x):
            self.thread = Thread(target=lambda: (self.two(x), after.append(modes())))
            self.thread.start()
            left.wait(60)
            return self.one(x)

    model = Late()
    with hw.watch(model, measures=["entropy"]) as record:
        for step in range(2):
            model(x)
            assert modes() == 0
            assert record.ledger.steps == step  # until the calls of both threads have ended
            go.set()
            model.thread.join()
            go.clear()
            assert record.ledger.steps == step + 1
        assert after == [0, 0]
        assert sorted(record.layers) == ["one", "two"]
        assert record.unwatched == {}


@pytest.mark.parametrize("first", [0, 1])
def test_forwards_of_two_threads_at_once_are_one_step(first, x):
    model, inside, go = model_of(), [Event(), Event()], [Event(), Event(), Event()]
    waits, found = iter(zip([*inside, Event()], go, strict=True)), []
    go[2].set()

    def hold(*given):
        here, wait = next(waits)
        here.set()
        assert wait.wait(60)

    model[0].register_forward_pre_hook(hold)
    threads = [Thread(target=lambda: found.append((model(x), modes()))) for _ in inside]
    with hw.watch(model, measures=["entropy"]) as record:
        for thread, event in zip(threads, inside, strict=True):
            thread.start()
            assert event.wait(60)
        for i in (first, 1 - first):
            go[i].set()
            threads[i].join()
    assert [left for _, left in found] == [0, 0]
    assert record.ledger.steps == record.ledger.index == 1
    with hw.watch(model, measures=["entropy"]) as alone:
        model(x)
    torch.testing.assert_close(record.latest["entropy"], alone.latest["entropy"])
    assert modes() == 0


def test_what_is_not_followed_in_a_thread_is_named_too(x):
    class Gate(nn.Module):
        def forward(self, x):
            return x * F.softmax(x, -1)

    model = InThreads(nn.Sequential(Attention(), Gate()))
    with hw.watch(model) as record:
        model(x)
    assert list(record.unwatched) == ["module.1"]


def test_a_module_that_a_thread_of_the_model_calls_is_seen(x):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Attention(), Attention()

        def forward(self, x):
            with ThreadPoolExecutor() as pool:
                return sum(pool.map(lambda branch: branch(x), (self.one, self.two)))

    model = Branches()
    with hw.watch(model) as record:
        model(x)
    assert sorted(record.layers) == ["one", "two"]


class Queries(nn.Module):
    """Weights of heads in the batch, and the values beside them."""

    def forward(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (y.view(*y.shape[:2], H, D).transpose(1, 2).reshape(-1, y.shape[1], D) for y in qkv.chunk(3, -1))
        return (q @ k.mT / 2).softmax(-1), v


class Values(nn.Module):
    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        weights, v = given
        return (weights @ v).unflatten(0, (-1, H)).transpose(1, 2).flatten(2)


def test_a_thread_that_begins_with_a_sequence_of_modules_is_followed_from_there(x):
    model = InThreads(nn.Sequential(nn.Linear(E, 3 * E), nn.Sequential(Queries(), Values()), nn.Linear(E, E)))
    with hw.watch(model.module, measures=["entropy"]) as whole:
        model.module(x)
    with hw.watch(model, measures=["entropy"]) as record:
        model(x)
    assert record.layers == ("module.1",)
    assert record.latest["entropy"].shape == whole.latest["entropy"].shape


@pytest.mark.parametrize("made", [lambda: model_of(), lambda: hw.MultiHeadAttention(E, H)], ids=["recognised", "ours"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_forward_that_a_thread_left_without_hooks_does_not_keep_later_ones_from_being_measured(made, x):
    model = nn.Sequential(made(), nn.Identity())
    handle = model[1].register_forward_pre_hook(lambda *given: sys.exit())
    with hw.watch(model, measures=["entropy"]) as record:
        thread = Thread(target=lambda: model(x))  # PyTorch runs no hooks after SystemExit
        thread.start()
        thread.join()
        handle.remove()
        for _ in range(3):
            model(x)
        assert record.ledger.steps == 3
        assert modes() == 0
    assert copy.deepcopy(record).ledger.steps == 3


def test_stop_in_another_thread_ends_the_forward_that_is_running(x):
    model, inside, go, left = model_of(), Event(), Event(), []

    def hold(*given):
        inside.set()
        assert go.wait(60)

    handle = model[1].register_forward_pre_hook(hold)
    record = hw.watch(model, measures=["entropy"]).start()

    def run():
        model(x)
        left.append(record.ledger.steps)
        with hw.watch(model) as again:
            model(x)
        left.append((again.layers, modes()))

    thread = Thread(target=run)
    thread.start()
    assert inside.wait(60)
    record.stop()
    go.set()
    thread.join()
    handle.remove()
    assert left == [0, (("0.attn", "1.attn"), 0)]
    with record.start():
        model(x)
    assert record.ledger.steps == 1


def test_layers_of_pytorch_take_their_fast_path_in_forwards_that_are_not_measured(x, monkeypatch):
    fast, calls = torch._transformer_encoder_layer_fwd, []
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *given: calls.append(1) or fast(*given))
    model = nn.Sequential(Attention(), nn.TransformerEncoderLayer(E, 2, batch_first=True)).eval()
    with torch.no_grad(), hw.watch(model, layers=["0"], measures=["entropy"], every=2):
        model(x)
        before = len(calls)
        model(x)
    assert len(calls) == before + 1


def gated(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """∂L/∂ξ of a factor on each head's output, for each row of the batch, by autograd."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            gate = torch.ones(B, H, 1, 1, dtype=x.dtype, requires_grad=True)
            hook = module.dropout.register_forward_hook(lambda *given, gate=gate: given[2] * gate)
            (found[name],) = torch.autograd.grad(model(x).square().mean(), gate)
            hook.remove()
    return {name: grad[..., 0, 0] for name, grad in found.items()}


@pytest.mark.parametrize("again", ["", "other"])
def test_gradients_of_heads_are_accumulated_in_the_model_s_own_backward_pass(again, x):
    model, x = model_of(again=again).double(), x.double()
    expected = gated(model, x)
    model(x).square().mean().backward()
    before = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with hw.telemetry.gate_gradients(model) as gates:
        model(x).square().mean().backward()
    assert all(torch.equal(one, p.grad) for one, p in zip(before, model.parameters(), strict=True))
    assert gates.layers == ("0.attn", "1.attn")
    assert gates.unwatched == {}
    for row, grads in zip(gates.importance().column, expected.values(), strict=True):
        torch.testing.assert_close(torch.as_tensor(row).double(), grads.sum(0).abs())
    for row, grads in zip(gates.importance(per="row").column, expected.values(), strict=True):
        torch.testing.assert_close(torch.as_tensor(row).double(), grads.abs().mean(0) * B)


def test_gradients_of_heads_with_dropout_are_those_of_the_dropped_weights(x):
    model, x = model_of(p=0.5).double(), x.double()
    torch.manual_seed(5)
    expected = gated(model[:1], x)["0.attn"]
    with hw.telemetry.gate_gradients(model[:1]) as gates:
        torch.manual_seed(5)
        model[:1](x).square().mean().backward()
    torch.testing.assert_close(torch.as_tensor(gates.importance().column[0]).double(), expected.sum(0).abs())


def test_gradients_of_heads_of_a_mixed_model(x):
    model = Mixed()
    with hw.telemetry.gate_gradients(model) as gates:
        model(x).square().mean().backward()
    assert gates.layers == ("ours", "theirs", "mine")
    assert set(gates.passes.values()) == {1}
    with hw.telemetry.gate_gradients(model, layers="mine") as gates:
        model(x).square().mean().backward()
    assert gates.layers == ("mine",)


@pytest.mark.parametrize("layers", [None, "*"])
def test_gradients_of_heads_beside_a_design_that_couples_them(layers, x):
    coupled = hw.nn.TalkingHeadsAttention(x.shape[-1], H)
    own = model_of()[:1]
    model = nn.Sequential(OrderedDict(talking=coupled, own=own)).double()
    expected = gated(own, coupled(x.double()))["0.attn"]
    with hw.telemetry.gate_gradients(model, layers=layers) as gates:
        model(x.double()).square().mean().backward()
    assert gates.layers == ("own.0.attn",)
    assert "mix their weights" in gates.unwatched["talking"]
    torch.testing.assert_close(torch.as_tensor(gates.importance().column[0]).double(), expected.sum(0).abs())
    with pytest.raises(hw.ConfigError, match="talking: its heads mix their weights"):
        hw.telemetry.gate_gradients(model, layers=["talking"])


def test_alarms_of_a_recognised_model(x):
    model = model_of()
    with torch.no_grad():
        model[1].attn.qkv.weight[: 2 * E] *= 30
    found = []
    with hw.watch(model, alarms=[hw.telemetry.MaxLogitAlarm(50.0, then=found.append)]):
        model(x)
    assert {layer for one in found for layer, _ in one.heads} == {"1.attn"}


def test_functions_of_the_user_that_pytorch_hands_to_modes_are_called_and_not_kept(x):
    class Own:
        __hash__ = None

        def __call__(self, x):
            return x + 1

    class Calling(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = Attention()

        def forward(self, x):
            big = torch.zeros(10)
            kept.append(weakref.ref(big))
            x = torch.overrides.handle_torch_function(Own(), (x,), x)
            return self.attn(torch.overrides.handle_torch_function(lambda x: x + big.sum(), (x,), x))

    model, kept = Calling(), []
    with hw.watch(model) as record:
        model(x)
    assert record.layers == ("attn",)
    assert kept[0]() is None


REPEATED = {
    "repeat_interleave": lambda x: x.repeat_interleave(3, 1),
    "named": lambda x: torch.repeat_interleave(x, dim=-3, repeats=3),
    "repeat": lambda x: x.repeat(1, 3, 1, 1),
    "tile": lambda x: x.tile((3, 1, 1)),
    "expand": lambda x: x[:, :, None].expand(-1, -1, 3, -1, -1).flatten(1, 2),
}


@pytest.mark.parametrize("how", REPEATED)
def test_padded_queries_of_grouped_heads_are_not_counted(how):
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(24, 24), nn.Linear(24, 8), nn.Linear(24, 8)

        def forward(self, x, real):
            q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            scores = (q @ REPEATED[how](k).mT / 2).masked_fill(~real[:, None, None], -torch.inf)
            seen.append(scores)
            return (scores.softmax(-1) @ REPEATED[how](v)).transpose(1, 2).flatten(2)

    torch.manual_seed(3)
    model, x, real, seen = Grouped(), torch.randn(2, 7, 24), torch.arange(7) < torch.tensor([[5], [3]]), []
    with hw.watch(model, measures=["entropy", "max_logit"]) as record:
        model(x, real)
    weights = seen[0].detach().double().softmax(-1)
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    expected = torch.stack([entropy[i, :, row].sum(-1) for i, row in enumerate(real)]).sum(0) / real.sum()
    largest = torch.stack([seen[0][i, :, row].amax((-1, -2)) for i, row in enumerate(real)]).amax(0)
    torch.testing.assert_close(record.latest["entropy"][0], expected.float())
    torch.testing.assert_close(record.latest["max_logit"][0], largest.detach())


def test_masks_of_large_numbers_that_were_added_to_each_other_are_a_mask():
    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(12, 36)

        def forward(self, x, real):
            q, k, v = (y.unflatten(-1, (3, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
            future, padding = torch.ones(7, 7).triu(1) * -1e9, (~real)[:, None, None] * -1e9
            return F.scaled_dot_product_attention(q, k, v, attn_mask=future + padding)

    model, real = Added(), torch.arange(7) < torch.tensor([[5], [3]])
    with hw.watch(model, measures=["entropy"], maps="lazy") as record:
        model(torch.randn(2, 7, 12), real)
    allowed = torch.ones(7, 7).tril().bool() & real[:, None] & real[:, :, None]
    torch.testing.assert_close(record.maps[""][:, 0] > 0, allowed)


def test_a_forward_within_vmap_is_refused_with_the_reason(x):
    model = model_of()
    with hw.watch(model), pytest.raises(hw.ConfigError, match=r"torch\.func\.vmap has batched it"):
        torch.vmap(model)(x[:, None])
