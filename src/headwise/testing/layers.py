"""Checks of head designs and of kinds of attention modules: what they say of their heads is what happens."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.cache import KVCache
from headwise.edit import prune
from headwise.errors import ConfigError
from headwise.masks import Causal, Dense, Lengths, Window
from headwise.models import HeadSite, find_heads, scale_heads
from headwise.nn.base import AttentionLayer
from headwise.nn.layout import Part
from headwise.nn.registry import CONTRACT, DESIGNS, counts_of, sizes_of
from headwise.nn.steps import Steps
from headwise.testing.truth import CheckFailed, check, require, require_close

BATCH, TOKENS = 2, 13
FAR = 1e-9  # what differs by less is rounding, in float64


@check
def check_design(name: str, *, d_model: int = 12, num_heads: int = 6, **options: Any) -> None:
    """Check that a registered design is what it declares: its call, its parts of the contract, and its heads.

    Shapes and dtypes; masks, padding, caches and empty inputs; gradients by finite differences; `steps`, `costs` and
    `layout` against the call; whether heads depend on each other (`coupling`) and can be removed (`resizing`).

    Args:
        name: in `headwise.nn.registry.DESIGNS`.
        d_model, num_heads: of the layers that are built. options: of the design.
    Raises:
        CheckFailed: naming what it does not hold.
    """
    require(name in DESIGNS, name, f"not registered in DESIGNS: {', '.join(DESIGNS)}")
    missing = [part for part in CONTRACT if part not in vars(DESIGNS[name])]
    require(not missing, name, f"its class does not define {', '.join(missing)}")
    module = DESIGNS[name].build(d_model, num_heads, **options).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # every parameter is drawn, so that none is at a zero or a one
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    x = _given(TOKENS, d_model)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        y = copy.deepcopy(module).to(dtype)(x.to(dtype))
        require(y.shape == x.shape and y.dtype == dtype, name, f"y of {dtype} is {y.dtype} {tuple(y.shape)}")
        require(y.isfinite().all(), name, f"y of {dtype} is not finite")
    if module.takes_mask:
        _check_masks(name, module, x)
    if module.takes_cache and not module.reads_ahead:
        _check_cache(name, module, x)
    _check_extras(name, module, x)
    _check_gradients(name, module, _given(5, d_model)[:1])
    sizes = {"d_model": d_model, "num_heads": num_heads, **options}
    found = counts_of(name, {size: value for size, value in sizes.items() if size in sizes_of(name)}).parameters
    held = sum(p.numel() for p in module.parameters())
    require(found == held, name, f"costs counts {found:,} parameters; the layer has {held:,}")
    _check_steps(name, module, x)
    _check_layout(name, module, x)


def _given(tokens: int, d_model: int, seed: int = 3) -> Tensor:
    return torch.randn(BATCH, tokens, d_model, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _check_masks(name: str, module: AttentionLayer, x: Tensor) -> None:
    n = x.shape[1]
    for mask in (Causal(), Window(3, 2), Lengths([n, n - 4])):
        dense = Dense(mask.to_dense(n, n, batch=BATCH))
        require_close(module(x, mask=mask), module(x, mask=dense), name, f"mask={mask} as a matrix", atol=1e-9)
        if module.reads_ahead:
            continue
        allowed = dense.to_dense(n, n, batch=BATCH)[:, 0].expand(BATCH, n, n)
        given = x.clone().requires_grad_()
        y = module(given, mask=mask)
        pull = torch.randn(y.shape[-1], generator=torch.Generator().manual_seed(9), dtype=y.dtype)
        rows = [torch.autograd.grad((y[:, i] @ pull).sum(), given, retain_graph=True)[0] for i in range(n)]
        read = torch.stack([grad.abs().amax(-1) > 0 for grad in rows], 1) & ~torch.eye(n, dtype=torch.bool)
        require(not (read & ~allowed).any(), name, f"mask={mask}: a query reads a token that it may not attend to")
    y = module(x, mask=Lengths([0, n]))
    require(y.isfinite().all(), name, "a fully masked query is not finite")
    if module.reads_ahead or module.outside_attend:
        return
    junk = 7 + _given(5, x.shape[-1], seed=8)  # left padding shifts all positions
    padded = module(torch.cat((junk, x), 1), mask=Lengths([n, n], side="right") & Causal())[:, 5:]
    require_close(
        padded, module(x, mask=Causal()), name,
        "five tokens of padding on the left shift all positions and change y; positions may enter by distances alone",
        atol=1e-4,
    )  # fmt: skip


def _check_cache(name: str, module: AttentionLayer, x: Tensor) -> None:
    whole = module(x, mask=Causal())
    for chunks in ([x.shape[1]], [1] * x.shape[1], [5, 1, 1, x.shape[1] - 7]):
        cache = KVCache()
        parts = [module(part, mask=Causal(), cache=cache) for part in x.split(chunks, 1)]
        what = f"with a cache, {len(chunks)} chunks, against one pass"
        require_close(torch.cat(parts, 1), whole, name, what, atol=1e-5)
    require(cache.seen == x.shape[1], name, f"its cache has seen {cache.seen} of {x.shape[1]} tokens")


def _check_extras(name: str, module: AttentionLayer, x: Tensor) -> None:
    mask = {"mask": Causal()} if module.takes_mask else {}
    y = module(x, **mask)
    again, amap, concat = module(x, **mask, return_map=True, measures=("entropy",), return_concat=True)
    require(torch.equal(again, y), name, "return_map or return_concat changes y")
    require_close(module.output(concat), y, name, "output(concat)", atol=1e-9)
    width = module.num_heads * module.value_dim
    require(concat.shape == (*x.shape[:2], width), name, f"concat has shape {tuple(concat.shape)}, expected …, {width}")
    sums = amap.to_dense().sum(-1)
    ones = torch.isclose(sums, torch.ones_like(sums), atol=1e-5) | (sums == 0)
    require(ones.all(), name, "rows of its map do not sum to 1")
    require(torch.equal(copy.deepcopy(module)(x, **mask), y), name, "a copy is another function")
    half = copy.deepcopy(module).train()
    half.dropout = 0.5
    require(not torch.equal(half(x, **mask), half(x, **mask)), name, "dropout does nothing in training")
    half.eval()
    require(torch.equal(half(x, **mask), y), name, "dropout changes y in evaluation")


def _check_gradients(name: str, module: AttentionLayer, x: Tensor) -> None:
    if module.rotary is not None:  # positions are rotated in float32, too coarse for finite differences
        return
    mask = {"mask": Causal()} if module.takes_mask else {}
    names = [key for key, _ in module.named_parameters()]

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,), mask)
        return found

    inputs = x.clone().requires_grad_(), *module.parameters()
    try:
        torch.autograd.gradcheck(call, inputs, fast_mode=True, nondet_tol=1e-9)
    except Exception as error:
        raise CheckFailed(f"{name}: gradients are not those of finite differences: {error}") from error


def _check_steps(name: str, module: AttentionLayer, x: Tensor) -> None:
    for causal in (False, True) if module.takes_mask else (False,):
        y = module(x, mask=Causal()) if causal else module(x)
        for lang in ("en", "zh"):
            note = Steps(lang, causal)
            with torch.no_grad():
                module.steps(x, note)
            names = [step.name for step in note.steps]
            twice = {step for step in names if names.count(step) > 1}
            require(not twice, name, f"steps: two of the name {', '.join(sorted(twice))}")
            require(bool(names), name, "steps notes no step")
            require(all(step.words.strip() for step in note.steps), name, f"steps: a step without words in {lang!r}")
            last = note.steps[-1]
            require_close(last.tensor, y, name, f"steps: the last step, {last.name!r}, against y", atol=1e-5)


def _check_layout(name: str, module: AttentionLayer, x: Tensor) -> None:
    """Parts hold every entry once; those of a head change that head and no other; heads that can go are gone."""
    layout, h = module.layout(), module.num_heads
    require(bool(layout.parts) or bool(layout.missing), name, "layout has neither parts nor a reason in `missing`")
    _check_entries(name, layout.parts, h, module.num_kv_heads)
    if module.coupling.at in ("", "output"):
        plain = _heads(module, x)
        tensors = [part.tensor for part in layout.parts]
        held = {id(p) for x in tensors for p in ([x] if isinstance(x, Tensor) else x)}
        for part in (part for part in layout.parts if part.letter != "o"):
            count = h if part.heads == "query" else module.num_kv_heads
            for head in range(count):
                with _moved(_piece(part, head)):
                    found = _changed(plain, _heads(module, x))
                own = set(range(head * (h // count), (head + 1) * (h // count)))
                # One vector added to all keys changes no weight of a softmax.
                right = found <= own if (part.letter, part.name) == ("k", "bias") else found == own
                what = f"layout: {part.name!r} of head {head} ({part.letter}) changes the heads {sorted(found)}"
                require(right, name, f"{what}, expected {sorted(own)}")
        for key, parameter in module.named_parameters():
            if id(parameter) not in held:
                with _moved(parameter.detach()):
                    found = _changed(plain, _heads(module, x))
                common = found in (set(), set(range(h)))
                require(common, name, f"layout: {key!r} is in no part, but changes the heads {sorted(found)} alone")
    (site,) = find_heads(nn.Sequential(module))
    if not module.coupling.at and not module.resizing.fixed:
        _check_removal(name, nn.Sequential(module), site, x)
        return
    try:
        prune(nn.Sequential(copy.deepcopy(module)), [0])
    except ConfigError:
        return
    raise CheckFailed(f"{name}: its heads depend on each other or are fixed, but prune removes one")


def _check_entries(name: str, parts: Sequence[Part], heads: int, kv_heads: int) -> None:
    entries: dict[tuple[int, str, int], tuple[int, list[int]]] = {}
    for part in parts:
        count = heads if part.heads == "query" else kv_heads
        if isinstance(part.tensor, nn.ParameterList):
            require(len(part.tensor) == count, name, f"layout: {part.name!r} has {len(part.tensor)} of {count} heads")
            continue
        size = part.tensor.shape[part.axis]
        _, along = entries.setdefault((id(part.owner), part.name, part.axis), (size, []))
        along += [i for head in range(count) for i in range(part.entries(head).start, part.entries(head).stop)]
    for (_, parameter, axis), (size, along) in entries.items():
        whole = sorted(along) == list(range(size))
        require(whole, name, f"layout: parts of {parameter!r} do not hold every entry of axis {axis} once")


def _heads(module: AttentionLayer, x: Tensor) -> Tensor:
    with torch.no_grad():
        concat: Tensor = module(x, return_concat=True)[1]
    return concat.unflatten(-1, (module.num_heads, module.value_dim))


def _changed(before: Tensor, after: Tensor) -> set[int]:
    return set(((after - before).abs().amax((0, 1, 3)) > FAR).nonzero().flatten().tolist())


def _piece(part: Part, head: int) -> Tensor:
    """The numbers of one head."""
    if isinstance(part.tensor, nn.ParameterList):
        return part.tensor[head].detach()
    return part.tensor.detach().narrow(part.axis, part.entries(head).start, part.width)


@contextmanager
def _moved(x: Tensor) -> Iterator[None]:
    """While open, other numbers in the place of these."""
    kept = x.detach().clone()
    with torch.no_grad():
        x.add_(0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(x))
        yield
        x.copy_(kept)


@check
def check_kind(model: nn.Module, batch: Any, *, kind: str | None = None) -> None:
    """Check that the heads of a model are where a kind says they are: removing a head is masking it.

    For each attention module of the kind: its matrices (`weights`) and the parts of its `layout`; each gate of
    `scale_heads` acts; and without each head, and without all but one, the pruned model equals the masked one.

    Args:
        model: a small model in float64 and evaluation mode, with modules of the kind.
        batch: with which it is called: a tensor, a tuple of arguments or a mapping of keyword arguments. It returns a
            tensor, or a tuple or mapping whose first entry is one.
        kind: the name of the kind; None for all that are found.
    Raises:
        CheckFailed: naming the module and what does not hold, or if no module is of the kind.
    """
    sites = [site for site in find_heads(model, batch) if kind in (None, site.kind)]
    require(bool(sites), kind or type(model).__name__, "no attention module of this kind was found in the model")
    for site in sites:
        layout = site.layout()
        if layout.missing:
            continue
        _check_entries(site.place, layout.parts, site.num_heads, site.num_kv_heads)
        weights = site.weights()
        sizes = {"q": (site.num_heads, site.head_dim), "k": (site.num_kv_heads, site.head_dim),
                 "v": (site.num_kv_heads, site.value_dim)}  # fmt: skip
        for letter, (count, width) in sizes.items():
            shape = tuple(weights[letter].shape)
            right = shape[0] == count and shape[-1] == width
            require(right, site.place, f"weights[{letter!r}] has shape {shape}, expected ({count}, …, {width})")
        if not site.anatomy.resizing(site).fixed:
            _check_removal(site.place, model, site, batch)


def _check_removal(name: str, model: nn.Module, site: HeadSite, batch: Any) -> None:
    """Without a head, and without all but one: pruned is masked; and no head is without effect."""
    h = site.num_heads
    group = h // site.num_kv_heads
    single = [[head] for head in range(h)] if group == 1 else []
    groups = [list(range(first, first + group)) for first in range(0, h, group)]
    rest = [[head for head in range(h) if head not in groups[-1]]] if len(groups) > 1 else []
    with torch.no_grad():
        plain = _called(model, batch)
        for gone in [*(single or groups if len(groups) > 1 else []), *rest]:
            gate = torch.ones(h, dtype=plain.dtype)
            gate[gone] = 0.0
            with scale_heads([site], [gate]):
                masked = _called(model, batch)
            require(not torch.equal(masked, plain), name, f"scaling the heads {gone} by 0 changes nothing")
            heads: dict[str | int, list[int]] = {site.name: gone}
            smaller = prune(model, heads, copy=True).model
            found = _called(smaller, batch)
            what = f"without the heads {gone}, pruned against masked; its layout does not say where they lie"
            require_close(found, masked, name, what, atol=1e-6)
        require(torch.equal(_called(model, batch), plain), name, "the model is another one afterwards")


def _called(model: nn.Module, batch: Any) -> Tensor:
    args: tuple[Any, ...] = batch if isinstance(batch, tuple) else ()
    out = model(**batch) if isinstance(batch, Mapping) else model(*(args or (batch,)))
    while not isinstance(out, Tensor):
        out = next(iter(out.values())) if isinstance(out, Mapping) else out[0]
    return out
