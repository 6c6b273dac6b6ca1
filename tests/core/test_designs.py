"""What every head design of the registry promises: one call, masks, caches, maps, gradients, files, the compiler."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from design_samples import CASES, ONCE, design, given, once
from samples import MASKS
from torch import Tensor

from headwise.cache import KVCache
from headwise.errors import ConfigError, DTypeError, HeadwiseError, ShapeError
from headwise.map.attention import attend
from headwise.masks import Causal, Lengths, Mask
from headwise.nn.layout import parameters_of
from headwise.nn.registry import DESIGNS
from headwise.scores import SoftCap

every = pytest.mark.parametrize(("name", "options"), ONCE, ids=lambda value: str(value))
cached = pytest.mark.parametrize(
    ("name", "options"),
    once([(n, o) for n, o in CASES if DESIGNS[n].takes_cache and o.get("per") != "sequence"]),
    ids=lambda value: str(value),
)
crossed = pytest.mark.parametrize(
    ("name", "options"),
    once([(n, o) for n, o in CASES if DESIGNS[n].takes_context and design(n, o).rotary is None]),
    ids=lambda value: str(value),
)
plain = pytest.mark.parametrize("name", [name for name in DESIGNS if DESIGNS[name].takes_mask])
masked = pytest.mark.parametrize(
    ("name", "options"), once([case for case in CASES if DESIGNS[case[0]].takes_mask]), ids=lambda value: str(value)
)


@every
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
def test_nothing_gives_nothing(name: str, options: dict[str, Any], shape: tuple[int, int]) -> None:
    """No sequences, or sequences without a token: empty results of the right shapes, and gradients of zero."""
    module = design(name, options)
    x = torch.zeros(*shape, 12, dtype=torch.float64, requires_grad=True)
    if name == "convolution":  # its kernel is longer than nothing
        if shape[1]:
            assert module(x).shape == x.shape
        return
    y, amap, concat = module(x, return_map=True, measures=("entropy",), return_concat=True)
    assert y.shape == x.shape
    assert amap.shape == (shape[0], module.num_heads, shape[1], shape[1])
    assert concat.shape == (*shape, module.num_heads * module.value_dim)
    y.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in module.parameters())
    if module.takes_mask:
        assert module(x, mask=Causal()).shape == x.shape


def reach(module: Callable[..., Tensor], x: Tensor, mask: Mask) -> Tensor:
    """Boolean [b, n, n]: whether output i changes with input j."""
    x = x.clone().requires_grad_()
    y = module(x, mask=mask)
    weights = torch.randn(y.shape[-1], generator=torch.Generator().manual_seed(9), dtype=y.dtype)
    rows = []
    for i in range(x.shape[1]):
        (grad,) = torch.autograd.grad((y[:, i] @ weights).sum(), x, retain_graph=True)
        rows.append(grad.abs().amax(-1) > 0)
    return torch.stack(rows, 1)


@pytest.mark.thorough_beyond(4)
@plain
@pytest.mark.parametrize("kind", MASKS)
def test_a_query_reads_what_its_mask_allows_and_itself(name: str, kind: str) -> None:
    mask = MASKS[kind](2, 11, 11)
    allowed = mask.to_dense(11, 11, batch=2, heads=1)[:, 0].expand(2, 11, 11)
    read = reach(design(name, {}), given(11), mask)
    own = torch.eye(11, dtype=torch.bool)
    assert not (read & ~(allowed | own)).any()
    if name not in ("sparse_mixture", "mixture_of_heads"):
        assert torch.equal(read & ~own, allowed & ~own)  # and all of it


@masked
def test_a_query_that_sees_nothing_adds_nothing(name: str, options: dict[str, Any]) -> None:
    module, x = design(name, options), given(9)
    x.requires_grad_()
    y, concat = module(x, mask=Lengths([0, 9]), return_concat=True)
    assert y.isfinite().all()
    y.sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())
    alone = module(x[1:], mask=Lengths([9]), return_concat=True)[1]
    torch.testing.assert_close(concat[1:], alone)
    constant = concat[0] - concat[0, :1]  # what is left where nothing is seen depends on no key
    torch.testing.assert_close(constant, torch.zeros_like(constant))


@crossed
def test_cross_attention_reads_the_context(name: str, options: dict[str, Any]) -> None:
    module, x, context = design(name, options | {"context_dim": 18}), given(7), given(11, 18, seed=5)
    y = module(x, context, mask=Lengths([11, 6]))
    changed = context.clone()
    changed[1, 6:] = 100.0
    torch.testing.assert_close(module(x, changed, mask=Lengths([11, 6])), y)
    changed[1, 5] = 0.5
    other = module(x, changed, mask=Lengths([11, 6]))
    torch.testing.assert_close(other[0], y[0])
    assert not torch.isclose(other[1], y[1]).all()


@pytest.mark.thorough_beyond(6)
@every
def test_copies_and_files_are_the_same_function(name: str, options: dict[str, Any]) -> None:
    from safetensors.torch import load, save

    module, x = design(name, options), given()
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    other = DESIGNS[name].build(12, 6, **options).double().eval()
    other.load_state_dict(load(save(module.state_dict())))
    assert torch.equal(other(x), module(x))


@every
def test_autocast_stays_close(name: str, options: dict[str, Any]) -> None:
    module, x = design(name, options, dtype=torch.float32), given(dtype=torch.float32)
    expected = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        half = module(x)
        loss = half.float().sum()
    loss.backward()
    assert (half - expected).norm() / expected.norm() < 0.05
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.thorough
@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the compiler's own looking around
def test_it_compiles(name: str) -> None:
    module, x = design(name, {}, dtype=torch.float32), given(dtype=torch.float32)
    mask = {"mask": Causal()} if module.takes_mask else {}
    torch.compiler.reset()
    compiled = torch.compile(module, backend="eager")
    torch.testing.assert_close(compiled(x, **mask), module(x, **mask))


@every
def test_repr_tells_the_sizes(name: str, options: dict[str, Any]) -> None:
    assert "d_model=12" in repr(design(name, options))


@every
def test_bad_calls_are_named(name: str, options: dict[str, Any]) -> None:
    module = design(name, options)
    with pytest.raises(ShapeError, match=r"x: .*12.*\(2, 13, 10\)"):
        module(given(d=10))
    with pytest.raises(ShapeError, match=r"x: .*\(13, 12\)"):
        module(given()[0])
    with pytest.raises(ConfigError, match=r"dropout=1\.5"):
        DESIGNS[name].build(12, 6, **options | {"dropout": 1.5})
    with pytest.raises(HeadwiseError, match="num_heads=0"):
        DESIGNS[name](12, num_heads=0, **options)
    if module.takes_context:
        with pytest.raises(ShapeError, match=r"context: .*\(2, 7, 10\)"):
            module(given(), given(7, 10))
    if module.takes_cache:
        with pytest.raises(ConfigError, match="cache"):
            module(given(), given(), cache=KVCache())
    for option, value in (("context", given()), ("cache", KVCache()), ("mask", Causal())):
        if not getattr(module, f"takes_{option}"):
            with pytest.raises(ConfigError, match=f"does not support `{option}`: "):
                module(given(), **{option: value})
            assert module.takes_none_as[option]
    if module.takes_context and module.rotary is not None:
        way_out = r"rope_dim=0 \(this layer has rope_dim=\d" if name == "latent" else r"rotary=False \("
        with pytest.raises(ConfigError, match=f"context: requires {way_out}"):
            module(given(), given())


@plain
@pytest.mark.parametrize("mask", [torch.ones(13, 13, dtype=torch.int32), "causal", True, Causal])
def test_what_is_no_mask_is_refused_in_the_words_of_attend(name: str, mask: Any) -> None:
    q = torch.zeros(1, 1, 13, 4)
    with pytest.raises(DTypeError, match="mask: expected a") as expected:
        attend(q, q, q, mask=mask)
    with pytest.raises(DTypeError) as found:
        design(name, {})(given(), mask=mask)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.parametrize("value", [0, -3, 8.0, 2.5, "32", True])
def test_sizes_are_whole_and_positive(name: str, value: Any) -> None:
    """Each size that a design takes is refused by its own name, not by PyTorch."""
    cls = DESIGNS[name]
    sizes = [o for o, p in parameters_of(cls).items() if p.annotation in (int, int | None)]
    for option in ["d_model", "num_heads", *sizes]:
        if option in ("rope_dim", "shared_heads") and value == 0:
            continue
        given = {"d_model": 32, "num_heads": 8, option: value}
        with pytest.raises(ConfigError, match=f"{option}={value!r}: expected"):
            cls.build(given.pop("d_model"), given.pop("num_heads"), **given)


def test_sizes_may_be_those_of_numpy() -> None:
    layer = DESIGNS["multi_head"](np.int64(32), np.int64(8), num_kv_heads=np.int32(2))
    assert layer.num_kv_heads == 2
    assert type(layer.d_model) is type(layer.num_heads) is type(layer.num_kv_heads) is int


@pytest.mark.parametrize("name", DESIGNS)
def test_an_option_that_is_not_there_is_named_with_those_that_are(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"foo=3: .*{DESIGNS[name].__name__} supports .*dropout"):
        DESIGNS[name].build(64, 8, foo=3)
    with pytest.raises(ConfigError, match=r"dropuot=0\.5: did you mean dropout"):
        DESIGNS[name].build(64, 8, dropuot=0.5)


@every
def test_inputs_of_another_kind_are_named(name: str, options: dict[str, Any]) -> None:
    module, x = design(name, options, dtype=torch.float32), given(dtype=torch.float32)
    inputs: dict[str, tuple[Any, ...]] = {"x": ()}
    if module.takes_context and module.rotary is None:
        inputs["context"] = (x,)
    for argument, before in inputs.items():
        with pytest.raises(DTypeError, match=rf"{argument}: expected a torch.Tensor, got list"):
            module(*before, x.tolist())
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            words = rf"{argument} is {dtype}, but the weights of \w+ are torch.float32"
            with pytest.raises(DTypeError, match=words):
                module(*before, x.to(dtype))
            if not dtype.is_floating_point:
                with torch.autocast("cpu", torch.bfloat16), pytest.raises(DTypeError, match=words):
                    module(*before, x.to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x.bfloat16()).isfinite().all()
    if module.takes_cache:
        for cache in ({}, [], "cache"):
            with pytest.raises(DTypeError, match=rf"cache: .*KVCache\(\), got {type(cache).__name__}"):
                module(x, cache=cache)


def test_every_design_explains_itself() -> None:
    for cls in DESIGNS.values():
        for word in ("Parameters", "Cost", "Source"):
            assert word in (cls.__doc__ or ""), f"{cls.__name__}'s docstring lacks {word}"


@pytest.mark.parametrize("name", DESIGNS)
def test_a_score_reaches_the_attention_or_is_refused(name: str) -> None:
    module, x = design(name, {}), given()
    if not module.takes_score:
        with pytest.raises(ConfigError, match=f"does not support `score`: {module.takes_none_as['score']}"):
            module(x, score=SoftCap(1.0))
        return
    _, amap = module(x * 9, mask=Causal(), score=SoftCap(0.5), return_map=True, measures=("max_logit",))
    assert amap.measured["max_logit"].max() <= 0.5
    _, loose = module(x * 9, mask=Causal(), score=(), return_map=True, measures=("max_logit",))
    assert loose.measured["max_logit"].max() > 1.0
