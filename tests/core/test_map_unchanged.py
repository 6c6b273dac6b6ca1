"""A map whose inputs were changed in place since raises, and one whose inputs are the same is read."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import headwise as hw
from headwise.cache import SlidingCache
from headwise.errors import ConfigError
from headwise.kernels import QuantizedKV
from headwise.map import AttentionMap
from headwise.masks import Causal, Dense, Lengths, Mask, Window
from headwise.scores import Bias, SinkLogits, SoftCap

READS: dict[str, Callable[[AttentionMap, Path], Any]] = {
    "weights": lambda amap, path: amap[0, 1, 2:3],
    "statistics": lambda amap, path: amap.measure("entropy"),
    "product": lambda amap, path: amap @ torch.ones(7, 2),
    "transposed": lambda amap, path: amap.T @ torch.ones(5, 2),
    "pool": lambda amap, path: amap.pool(3),
    "topk": lambda amap, path: amap.topk(2),
    "received": lambda amap, path: amap.received(),
    "diagonals": lambda amap, path: amap.diagonals(),
    "head": lambda amap, path: amap.head(0, 1),
    "using": lambda amap, path: amap.using("reference"),
    "clone": lambda amap, path: amap.clone(),
    "deepcopy": lambda amap, path: copy.deepcopy(amap),
    "pickle": lambda amap, path: pickle.dumps(amap),
    "file": lambda amap, path: amap.save(path / "map.safetensors"),
    "q": lambda amap, path: amap.q,
    "k": lambda amap, path: amap.k,
}  # fmt: skip


def inputs(n: int = 5, m: int = 7, **sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n + m)
    b, h, h_kv, d = (sizes.get(name, size) for name, size in (("b", 2), ("h", 6), ("h_kv", 3), ("d", 11)))
    shapes = (b, h, n, d), (b, h_kv, m, d), (b, h_kv, m, d)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)  # type: ignore[return-value]


def map_of(q: Tensor, k: Any, mask: Mask | None = None, score: Any = ()) -> AttentionMap:
    return hw.attend(q, k, k, mask=mask, score=score, return_map=True)[1]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize("before", [False, True], ids=["never written to", "written to before"])
def test_every_read_raises_after_a_change(read: str, name: str, before: bool, tmp_path: Path) -> None:
    given = dict(zip("qkv", inputs(), strict=True))
    if before:
        given[name] += 1.0
    amap = map_of(given["q"], given["k"], Causal())
    READS[read](amap, tmp_path)
    given[name][1, 2, 4] += 1e-3
    with pytest.raises(
        ConfigError, match=rf"^this attention map .*: {name}, or a tensor that shares .* map\.clone\(\)"
    ):
        READS[read](amap, tmp_path)
    repr(amap)


def test_an_optimizer_step_on_a_leaf() -> None:
    q, k, v = (x.requires_grad_() for x in inputs())
    optimizer = torch.optim.SGD([q, k, v], lr=1e-6)
    for _ in range(2):  # the second time, the leaves were written to before
        out, amap = hw.attend(q, k, v, return_map=True)
        kept, weights = amap.clone(), amap.to_dense()
        out.square().sum().backward()
        assert torch.equal(amap.to_dense(), weights)
        optimizer.step()
        with pytest.raises(ConfigError, match="q, or a tensor"):
            amap.to_dense()
        assert torch.equal(kept.to_dense(), weights)


@pytest.mark.parametrize("given", ["mask", "lengths", "score"])
def test_tensors_of_masks_and_scores(given: str) -> None:
    q, k, _ = inputs()
    held = {
        "mask": torch.ones(2, 1, 5, 7, dtype=torch.bool),
        "lengths": torch.tensor([7, 4]),
        "score": torch.zeros(1, 1, 5, 7),
    }[given]
    mask = {"mask": Dense, "lengths": Lengths}.get(given, lambda x: Causal())(held)
    amap = map_of(q, k, mask, Bias(held) if given == "score" else ())
    kept, weights = amap.clone(), amap.to_dense()
    held[-1] = 0 if given != "score" else torch.randn(5, 7)
    with pytest.raises(ConfigError, match=r"a tensor of its (mask|scores)"):
        amap.to_dense()
    assert torch.equal(kept.to_dense(), weights)


@pytest.mark.thorough_except("a view of the filled part-dtype0", "a view of the filled part-dtype2")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("whole", [False, True], ids=["a view of the filled part", "the whole buffer, masked"])
def test_a_static_cache_may_be_written_on(whole: bool, dtype: torch.dtype) -> None:
    cache, kept = torch.zeros(2, 3, 24, 11, dtype=dtype), []
    for step in range(5, 20):
        cache[:, :, step] = torch.randn(2, 3, 11)
        keys = cache if whole else cache[:, :, : step + 1]
        seen = (torch.arange(keys.shape[2]) <= step).expand(2, 1, 2, -1)
        amap = map_of(torch.randn(2, 6, 2, 11, dtype=dtype), keys, Dense(seen))
        kept.append((amap, amap.to_dense()))
    for amap, weights in kept:
        assert torch.equal(amap.to_dense(), weights)
    cache[1, 2, 16, 3] += 0.5
    for step, (amap, weights) in enumerate(kept, 5):
        if step < 16:
            assert torch.equal(amap.to_dense(), weights)
        else:
            with pytest.raises(ConfigError, match="k, or a tensor"):
                amap.to_dense()


def test_keys_moved_along_a_static_window() -> None:
    """The weights of a query still add up to one then, and are not the same."""
    keys = torch.zeros(1, 1, 16, 4)
    keys[0, 0, 9, 0] = 60.0
    amap = map_of(torch.tensor([[[[8.0, 0, 0, 0]]]]), keys)
    assert int(amap.to_dense().argmax()) == 9
    keys.copy_(keys.roll(-1, 2))
    with pytest.raises(ConfigError, match="k, or a tensor"):
        amap.to_dense()


@pytest.mark.thorough
@pytest.mark.parametrize("stored", [None, "int8", "bfloat16"])
@pytest.mark.parametrize("make", [hw.KVCache, lambda **options: SlidingCache(9, 2, **options)], ids=["all", "some"])
def test_steps_of_a_layers_cache(make: Callable[..., Any], stored: str | None) -> None:
    layer, cache, kept = hw.MultiHeadAttention(24, 3), make(stored=stored), []
    with torch.no_grad():
        for _ in range(80):  # beyond the room that a cache begins with
            amap = layer(torch.randn(2, 1, 24), mask=Causal(), cache=cache, return_map=True)[1]
            kept.append((amap, None if stored == "int8" else amap.to_dense()))
    for amap, weights in kept:
        assert torch.equal(amap.to_dense(), amap.to_dense() if weights is None else weights)
        assert amap.k._version == 0  # or every step would copy some, and every read look at them


def test_quantized_keys() -> None:
    q, k, _ = inputs()
    keys = QuantizedKV.of(k)
    amap = map_of(q, keys)
    kept = amap.clone()
    keys.steps[0, 0, 0] = 0
    with pytest.raises(ConfigError, match="k, or a tensor"):
        amap.to_dense()
    assert torch.isfinite(kept.to_dense()).all()
    read = map_of(q, keys)
    weights = read.to_dense()  # dequantizes them
    keys.steps.zero_()
    assert torch.equal(read.to_dense(), weights)


def test_copies_have_memory_of_their_own(tmp_path: Path) -> None:
    q, k, _ = inputs()
    amap = map_of(q, k, Causal())
    weights = amap.to_dense()
    amap.save(tmp_path / "map")
    others = [copy.deepcopy(amap), pickle.loads(pickle.dumps(amap)), AttentionMap.load(tmp_path / "map"), amap.clone()]
    k.zero_()
    for other in others:
        assert torch.equal(other.to_dense(), weights)
        other._k.zero_()
        with pytest.raises(ConfigError, match="k, or a tensor"):
            other.to_dense()


@pytest.mark.parametrize("read", ["weights", "statistics", "product", "transposed", "pool", "topk", "received"])
@pytest.mark.parametrize("inference", [True, False], ids=["inference mode", "data"])
def test_what_pytorch_does_not_count_shows_in_the_sums_of_rows(inference: bool, read: str, tmp_path: Path) -> None:
    with torch.inference_mode(inference):
        q, k, _ = inputs()
        amap, kept = map_of(q, k), map_of(q, k).clone()
        k.data[:, :, 2:].zero_()
        with pytest.raises(ConfigError, match="one of its inputs"):
            READS[read](amap, tmp_path)
        READS[read](kept, tmp_path)


def test_a_map_whose_weights_do_not_add_up_is_not_saved(tmp_path: Path) -> None:
    q, k, _ = inputs()
    amap = map_of(q, k)
    k.data[:, :, 2:].zero_()
    with pytest.raises(ConfigError, match="one of its inputs"):
        amap.save(tmp_path / "map")
    assert not (tmp_path / "map").exists()


@pytest.mark.parametrize("kernel", ["cpu", "torch_blocks", "reference"])
def test_large_biases_that_cancel_are_no_change(kernel: str) -> None:
    """Their sum is exact to 1e6 · 2^-24 only, which shows in the weights."""
    q, k, _ = inputs()
    large = torch.randn(1, 1, q.shape[2], k.shape[2], generator=torch.Generator().manual_seed(0)) * 1e6
    _, amap = hw.attend(q * 30, k, k, score=(Bias(large), Bias(-large)), kernel=kernel, return_map=True)
    assert amap.using("auto").pool(5).isfinite().all()


@pytest.mark.thorough
def test_a_compiled_function_may_read_and_return_maps() -> None:
    def step(q: Tensor, k: Tensor) -> Any:
        out, amap = hw.attend(q, k, k, mask=Causal(), return_map=True)
        return out, amap, amap.q.sum() + amap.k.sum()

    q, k, _ = inputs()
    graphs = CompileCounter()
    compiled = torch.compile(step, fullgraph=True, backend=graphs)
    for _ in range(3):
        amap = compiled(q, k)[1]
        weights = amap.to_dense()  # from here on, changes are noticed
        torch.testing.assert_close(weights, map_of(q, k, Causal()).to_dense())
        k += 1.0
        with pytest.raises(ConfigError, match="k, or a tensor"):
            amap.to_dense()
    assert graphs.frame_count == 1  # no guard on a count of changes


@pytest.mark.thorough_except("-1.0-dtype0", "-30.0-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize("score", [(), (SinkLogits(torch.linspace(-3, 9, 6)), SoftCap(20.0))], ids=["", "sinks"])
def test_weights_of_the_same_keys_add_up(dtype: torch.dtype, size: float, score: Any) -> None:
    """A count has changed, and no key: kept keys are the same, and the log-sum-exp is theirs, to rounding."""
    q, k, _ = (x.to(dtype) for x in inputs(70, 150))
    room = torch.zeros(2, 3, 200, 11, dtype=dtype)
    room[:, :, :150] = k
    for mask in (None, Causal() & Window(9), Lengths([150, 0]), Dense(torch.rand(2, 6, 70, 150) < 0.02)):
        amap = map_of(q * size, room[:, :, :150], mask, score)
        room[:, :, 150:] += 1.0
        weights = amap.to_dense()
        assert torch.isfinite(weights).all()
        room[:, :, 140] = room[:, :, 140] * 3.0 + 1.0  # not among those that are kept
        with pytest.raises(ConfigError, match="k, or a tensor"):
            amap.to_dense()
        room[:, :, :150] = k


def test_keys_that_no_query_attends_to_may_change() -> None:
    q, k, _ = inputs(5, 40)
    k += 0.0
    amap = map_of(q, k, Lengths([40, 12]))
    weights = amap.to_dense()
    k[1, :, 12:] = 7.0
    assert torch.equal(amap.to_dense(), weights)
    k[0, :, 39] += 1e-6  # one that is kept
    with pytest.raises(ConfigError, match="k, or a tensor"):
        amap.to_dense()


def test_steps_over_a_static_cache_do_not_read_it_twice() -> None:
    """Of keys that had been written to before, some are kept, however many there are."""
    k = torch.zeros(1, 2, 50_000, 8)
    k += 1.0
    kept = [one.probes for one in map_of(torch.randn(1, 2, 1, 8), k)._inputs._originals if one.probes is not None]
    assert [x.shape for x in kept] == [(1, 2, 65, 8)]
