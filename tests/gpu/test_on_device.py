"""What users do on a GPU has the results of the CPU: calls and reads of maps by every kernel, layers, models, records,
edits. Without a GPU the same runs on the CPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from formula import error, output, weights
from samples import MASKS, SCORES, qkv
from torch import Tensor, nn

import headwise as hw
from headwise.errors import KernelError
from headwise.masks import Causal
from headwise.nn import DESIGNS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [] if DEVICE == "cuda" else [pytest.mark.thorough]
on_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
KERNELS = ("auto", "triton_gpu", "torch_blocks", "torch_fused", "reference")


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def mapped(kernel: str, *given: Tensor, **options: object) -> tuple[Tensor, hw.AttentionMap]:
    """Output and map of a call, by a kernel that may refuse it."""
    try:
        return hw.attend(*given, kernel=kernel, return_map=True, **options)  # type: ignore[no-any-return]
    except KernelError as refused:
        pytest.skip(str(refused))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks(kernel: str, name: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(n=41, m=53, d=16, e=16, dtype=dtype)
    mask = MASKS[name](2, 41, 53)
    p, lse = weights(q, k, mask)
    out, amap = mapped(kernel, *(x.to(DEVICE) for x in (q, k, v)), mask=mask)
    assert out.device.type == amap.lse.device.type == DEVICE
    assert error(out.cpu(), output(p, v)) <= (2e-6 if dtype == torch.float32 else 6e-3)
    torch.testing.assert_close(amap.lse.double().cpu(), lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(amap.using("auto")[:].double().cpu(), p, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SCORES)
def test_scores_with_gradients(kernel: str, name: str) -> None:
    def gradients(device: str, dtype: torch.dtype, run: Callable[..., Tensor]) -> list[Tensor]:
        given = [x.to(device, dtype).requires_grad_() for x in qkv(n=41, m=53, d=16, e=16)]
        score = SCORES[name](2, 6, 41, 53)
        for one in score:
            for key, value in vars(one).items():
                if isinstance(value, Tensor):
                    object.__setattr__(one, key, value.detach().to(device, dtype).requires_grad_())
        learned = [x for one in score for x in vars(one).values() if isinstance(x, Tensor)]
        out = run(*given, score)
        pull = torch.arange(out.numel(), dtype=torch.float64).sin().reshape(out.shape).to(out)
        grads = torch.autograd.grad((out * pull).sum(), [*given, *learned])
        return [out.detach(), *grads]

    def exactly(q: Tensor, k: Tensor, v: Tensor, score: tuple[hw.scores.Score, ...]) -> Tensor:
        return hw.attend(q, k, v, mask=Causal(), score=score, kernel="reference")  # type: ignore[return-value]

    def here(q: Tensor, k: Tensor, v: Tensor, score: tuple[hw.scores.Score, ...]) -> Tensor:
        return mapped(kernel, q, k, v, mask=Causal(), score=score)[0]

    due = gradients("cpu", torch.float64, exactly)
    found = gradients(DEVICE, torch.float32, here)
    for one, other in zip(found, due, strict=True):
        assert one.device.type == DEVICE
        far = float((one.cpu().double() - other).norm())
        assert far <= 2e-5 * (float(other.norm()) + other.numel() ** 0.5)  # some gradients are 0 but for rounding


@pytest.mark.parametrize("mask", ["causal", "dense", "documents and padding", "window and sinks"])
def test_reads(kernel: str, mask: str) -> None:
    q, k, v = qkv(n=41, m=53, d=16, e=16)
    p, _ = weights(q, k, MASKS[mask](2, 41, 53))
    _, amap = mapped(kernel, *(x.to(DEVICE) for x in (q, k, v)), mask=MASKS[mask](2, 41, 53))
    x, y = torch.randn(2, 6, 53, 3), torch.randn(2, 6, 41, 3)
    cpu = hw.attend(q, k, v, mask=MASKS[mask](2, 41, 53), return_map=True, kernel="reference")[1]
    reads: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "tile": (lambda: amap[1, 2, 5:20, 3:50], p[1, 2, 5:20, 3:50]),
        "row": (lambda: amap.row(-1), p[..., -1, :]),
        "product": (lambda: amap @ x.to(DEVICE), p @ x.double()),
        "transposed": (lambda: amap.T @ y.to(DEVICE), p.mT @ y.double()),
        "received": (amap.received, p.sum(-2)),
        "top": (lambda: amap.topk(4)[0], p.topk(4).values),
        "entropy": (lambda: amap.measure("entropy", rows=True).rows["entropy"], torch.special.entr(p).sum(-1)),
        "dense": (amap.to_dense, p),
        "pool": (lambda: amap.pool(8), cpu.pool(8)),
        "largest": (lambda: amap.pool(8, "max"), cpu.pool(8, "max")),
        "diagonals": (lambda: amap.diagonals()[0], cpu.diagonals()[0]),
    }  # fmt: skip
    for name in ("max_logit", "sink_mass", "mean_distance", "top1_mass", "effective_keys", "previous_mass"):
        reads[name] = lambda name=name: amap.measure(name)[name], cpu.measure(name)[name]
    for name, (read, expected) in reads.items():
        try:
            found = read()
        except KernelError:
            assert kernel != "auto"
            continue
        assert found.device.type == DEVICE, name
        assert torch.allclose(found.double().cpu(), expected.double(), 1e-4, 1e-5, equal_nan=True), name


def test_a_map_from_the_device_in_a_file(tmp_path: Path) -> None:
    q, k, v = (x.to(DEVICE) for x in qkv())
    _, amap = hw.attend(q, k, v, mask=hw.Causal(), return_map=True)
    amap.save(tmp_path / "map.safetensors")
    again = hw.AttentionMap.load(tmp_path / "map.safetensors")
    torch.testing.assert_close(again[:].cpu(), amap[:].cpu(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", DESIGNS)
def test_designs(name: str) -> None:
    torch.manual_seed(0)
    layer = hw.nn.build(name, 32, 4).eval()
    x = torch.randn(2, 19, 32)
    masked = {} if name == "convolution" else {"mask": hw.Causal()}
    expected = layer(x, **masked)
    found = layer.to(DEVICE)(x.to(DEVICE), **masked)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stored", [None, "int8"])
def test_decoding_with_a_cache(stored: str | None) -> None:
    torch.manual_seed(0)
    layer = hw.MultiHeadAttention(64, 8, num_kv_heads=2, rotary=True).to(DEVICE).eval()
    x = torch.randn(2, 23, 64, device=DEVICE)
    whole, cache = layer(x, mask=hw.Causal()), hw.KVCache(stored=stored)
    parts = [layer(x[:, :16], mask=hw.Causal(), cache=cache)]
    parts += [layer(x[:, i : i + 1], mask=hw.Causal(), cache=cache) for i in range(16, 23)]
    near = 1e-4 if stored is None else 5e-2
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=near, atol=near)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_in_mixed_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = hw.TransformerBlock(hw.MultiHeadAttention(64, 4, rotary=True), d_ff=128).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    x = torch.randn(4, 33, 64, device=DEVICE)
    losses = []
    with hw.watch(model, measures=["max_logit", "entropy", "sink_mass"]) as record:
        for _ in range(8):
            with torch.autocast(DEVICE, dtype):
                loss = (model(x, mask=hw.Causal()) - x.roll(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not record.remarks
    assert bool(torch.as_tensor(record.latest["entropy"]).isfinite().all())


class ByHand(nn.Module):
    """Attention as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(48, 144), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 4, 12).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-2, -1) * 12**-0.5
        s = s.masked_fill(torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1), float("-inf"))
        return self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))  # type: ignore[no-any-return]


class Flash(ByHand):
    """The same with PyTorch's function."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 4, 12).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, n, d))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(48, 4, 96, batch_first=True, dropout=0.0), 2),
    "by hand": lambda: nn.Sequential(ByHand(), ByHand()),
    "flash": lambda: nn.Sequential(Flash(), Flash()),
    "blocks": lambda: nn.Sequential(*(hw.TransformerBlock(hw.MultiHeadAttention(48, 4), d_ff=96) for _ in range(2))),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("train", [False, True])
def test_models_are_watched(name: str, train: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train(train)
    x = torch.randn(2, 21, 48)
    seen = []
    for device in ("cpu", DEVICE):
        model.to(device)
        plain = model(x.to(device))
        with hw.watch(model, maps="lazy") as record:
            out = model(x.to(device))
            if train:
                out.square().mean().backward()
        assert not record.remarks
        assert not record.unwatched
        torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-5)
        seen.append((record.latest, list(record.maps.values())))
    (latest, maps), (there, those) = seen
    for measure in ("max_logit", "entropy", "sink_mass", "mean_distance"):
        torch.testing.assert_close(
            torch.as_tensor(there[measure]).cpu(), torch.as_tensor(latest[measure]), rtol=1e-3, atol=1e-4
        )
    for one, other in zip(maps, those, strict=True):
        assert other.lse.device.type == DEVICE
        torch.testing.assert_close(other[:].cpu(), one[:], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "GPT2LMHeadModel", "BertModel", "Gemma2ForCausalLM"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_of_transformers(kind: str, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "GPT2LMHeadModel":
        sizes = {"vocab_size": 99, "n_embd": 64, "n_layer": 2, "n_head": 4}
    elif kind != "BertModel":
        sizes |= {"num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 16}
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    model = cls(cls.config_class(**sizes)).to(DEVICE, dtype).eval()
    ids = torch.randint(99, (2, 23), device=DEVICE)
    padding = torch.ones_like(ids)
    padding[1, :5] = 0
    near = 1e-4 if dtype == torch.float32 else 5e-2
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(ids, attention_mask=padding, output_attentions=True)
    with torch.no_grad(), hw.watch(model, maps="lazy") as record:
        found = model(ids, attention_mask=padding)
    torch.testing.assert_close(found[0][:, 5:], expected[0][:, 5:], rtol=near, atol=near)
    for amap, p in zip(record.maps.values(), expected.attentions, strict=True):
        torch.testing.assert_close(amap[:][0].float(), p[0].float(), rtol=near, atol=near / 10)
    if dtype == torch.float32 and hasattr(model, "generate") and kind != "BertModel":
        tokens = model.generate(ids[:1], max_new_tokens=6, do_sample=False)
        with hw.attach(model):
            assert torch.equal(model.generate(ids[:1], max_new_tokens=6, do_sample=False), tokens)


def test_edits_and_importance() -> None:
    torch.manual_seed(0)
    model = hw.lm.Decoder(hw.lm.DecoderConfig(vocab_size=50, d_model=48, num_heads=4, num_layers=2)).eval()
    ids = torch.randint(50, (2, 31))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    found = []
    for device in ("cpu", DEVICE):
        model.to(device)
        given = ids.to(device)
        importance = hw.analysis.ablation_importance(model, [given], loss)
        gradient = hw.analysis.gradient_importance(model, [given], loss)
        pruned = hw.edit.prune(model, {"blocks.0.attention": [1, 3]}, copy=True).model
        with hw.intervene(model, hw.interventions.Forbid(3, 2), layers="blocks.1.attention"):
            changed = model(given)
        with hw.watch(model, maps="lazy") as record:
            model(given)
        roles = hw.analysis.roles(list(record.maps.values()), tokens=given)
        found.append(
            [
                importance.table.tensor().cpu(), gradient.table.tensor().cpu(),
                pruned(given).cpu(), changed.cpu(), hw.analysis.rollout(list(record.maps.values())).row(-1).cpu(),
            ]
        )  # fmt: skip
        assert str(roles)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_clipping() -> None:
    torch.manual_seed(0)
    model = MODELS["by hand"]().to(DEVICE)
    with torch.no_grad():
        for layer in model:
            layer.qkv.weight *= 12  # type: ignore[union-attr, operator]
    x = torch.randn(2, 21, 48, device=DEVICE)
    hw.find_heads(model, x)
    with hw.watch(model) as record:
        model(x)
        assert float(torch.as_tensor(record.latest["max_logit"]).max()) > 20
        hw.telemetry.qk_clip(model, record, tau=5.0)
        model(x[:1])
    with hw.watch(model) as record:
        model(x)
    # Biases are scaled with the rest: the largest logit moves to the limit.
    assert float(torch.as_tensor(record.latest["max_logit"])[0].max()) == pytest.approx(5.0, rel=1e-3)


def test_under_torch_compile() -> None:
    torch.manual_seed(0)
    layer = hw.MultiHeadAttention(64, 4).to(DEVICE)
    x = torch.randn(2, 33, 64, device=DEVICE, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True)
    found, expected = compiled(x, mask=hw.Causal()), layer(x, mask=hw.Causal())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    one, other = (torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected))
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@on_cuda
def test_in_a_cuda_graph() -> None:
    layer = hw.MultiHeadAttention(64, 4).to(DEVICE, torch.bfloat16).eval()
    x = torch.randn(2, 128, 64, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = layer(x, mask=hw.Causal())
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layer(x, mask=hw.Causal())
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x, mask=hw.Causal())
        out.zero_()
        graph.replay()
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)


@on_cuda
@pytest.mark.parametrize("kernel", ["triton_gpu", "torch_blocks"])
def test_memory_of_a_long_text(kernel: str) -> None:
    """O(n): beside inputs and output, a thousandth of the weights' bytes."""
    n = 32_768
    q, k, v = (torch.randn(1, 8, n, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    hw.attend(q[:, :, :512], k[:, :, :512], v[:, :, :512], mask=hw.Causal(), kernel=kernel, return_map=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _, amap = hw.attend(
        q, k, v, mask=hw.Causal(), kernel=kernel, return_map=True, measures=["entropy", "max_logit", "sink_mass"]
    )
    amap.measure("entropy", "max_logit", "sink_mass")
    assert torch.cuda.max_memory_allocated() - before < 8 * n * n * 2 / 20
    assert float(amap.using("auto")[0, 3, -1:, :].sum()) == pytest.approx(1, abs=1e-4)
