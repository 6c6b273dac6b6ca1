"""What each rank of a small head-parallel job does; run by test_head_parallel.py in processes of their own.

Every job compares with the same model in one process, in float64 where nothing else is said, and gives plain numbers.
"""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from counted import Sent
from head_parallel_cases import CASES, HEADS, SPREADABLE, TRAFFIC, WIDTH, Case, Crossing, mha, model_of, normal
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import headwise as hw
from headwise.costs import Work
from headwise.costs.communication import Way, head_parallel, heads_by_ring, ring, ulysses
from headwise.lm.model import Decoder, DecoderConfig, write
from headwise.lm.texts import CharTokenizer
from headwise.nn.registry import counts_of
from headwise.parallel import ring_attend, sequence_parallel, shard, sum_gradients
from headwise.parallel.ulysses import ulysses_attend

Answer = dict[str, Any]
JOBS_WANTED = sys.argv[4].split(",")
WANTED = sys.argv[5:]  # names of cases


def cases(mesh: DeviceMesh) -> Answer:
    """Outputs and all gradients of every case: the largest differences from one process, relative to the largest."""
    return {case.name: _differences(case, mesh, torch.float64) for case in CASES if case.name in WANTED}


def half(mesh: DeviceMesh) -> Answer:
    """Relative errors against float64 in bfloat16 and under autocast, ours and those of one process."""
    found: Answer = {}
    for autocast in (False, True):
        truth, x = model_of(CASES[0], torch.float64), normal(3, 7, WIDTH, seed=1)
        whole = copy.deepcopy(truth).to(torch.float32 if autocast else torch.bfloat16)
        spread = hw.parallel.parallelize_heads(whole, mesh, copy=True)
        exact = truth(x, mask=hw.Causal())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            given = x.to(next(whole.parameters()).dtype)
            one, many = whole(given, mask=hw.Causal()), spread(given, mask=hw.Causal())
        found["autocast" if autocast else "bfloat16"] = [
            float((y.double() - exact).norm() / exact.norm()) for y in (one, many)
        ] + [str(many.dtype)]
    return found


def statistics(mesh: DeviceMesh) -> Answer:
    """Every measure and tiles of the map, gathered, against the whole layer's; merging two batches too."""
    found: Answer = {}
    for case in CASES:
        if case.wraps or case.name not in WANTED:
            continue
        layer, x = model_of(case, torch.float64), normal(3, 7, WIDTH, seed=1)
        spread = hw.parallel.parallelize_heads(layer, mesh, copy=True)
        names = tuple(hw.stats.MEASURES)
        (a, b), (c, d) = (
            [model(z, return_map=True, measures=names, **case.call(z))[1] for z in (x, x + 1)]
            for model in (spread, layer)
        )
        a, b = hw.parallel.gather_map(a, spread), hw.parallel.gather_map(b, spread)
        both, theirs = a.measured.merge(b.measured), c.measured.merge(d.measured)
        found[case.name] = {
            "shape": list(a.shape), "wanted": list(c.shape), "tile": _far(a[1, :, 2:5, 0:4], c[1, :, 2:5, 0:4]),
            "measured": max(_far(a.measured[name], c.measured[name]) for name in names),
            "merged": max(_far(both[name], theirs[name]) for name in names),
            "again": _far(a.measure("entropy")["entropy"], c.measured["entropy"]),
        }  # fmt: skip
    return found


def decoding(mesh: DeviceMesh) -> Answer:
    """One token after the other with each kind of cache against all at once by one process; what a cache holds."""
    found: Answer = {}
    x = normal(2, 11, WIDTH, seed=4)
    for heads in ((8, 8), (8, 2), (4, 1)):
        torch.manual_seed(3)
        layer = hw.MultiHeadAttention(WIDTH, heads[0], num_kv_heads=heads[1], head_dim=8, rotary=True).double()
        spread = hw.parallel.parallelize_heads(layer, mesh, copy=True)
        held = hw.parallel.held_heads(spread)
        windows = [3, None, 5, 2, None, 4, 1, 7][: heads[1]]
        caches: dict[str, Callable[[list[int | None]], Any]] = {
            "KVCache": lambda _: hw.KVCache(), "SlidingCache": lambda _: hw.cache.SlidingCache(window=4, sinks=1),
            "BudgetCache": lambda windows: hw.cache.BudgetCache(windows, sinks=1),
        }  # fmt: skip
        for name, make in caches.items():
            own, whole = make([windows[i] for i in held.kv_heads]), make(windows)
            pieces = [x[:, :5], *x[:, 5:].split(1, 1)]
            ours = torch.cat([spread(piece, mask=hw.Causal(), cache=own) for piece in pieces], 1)
            theirs = torch.cat([layer(piece, mask=hw.Causal(), cache=whole) for piece in pieces], 1)
            found[f"{name} {heads}"] = {
                "y": _far(ours, theirs), "bytes": own.nbytes, "whole": whole.nbytes, "seen": own.seen,
                "share": len(held.kv_heads) / heads[1],
            }  # fmt: skip
    return found


def writing(mesh: DeviceMesh) -> Answer:
    """A decoder writes the same text, greedily and sampled."""
    text = "the quick brown fox jumps over the lazy dog. " * 3
    tokenizer = CharTokenizer.from_text(text)
    torch.manual_seed(2)
    decoder = Decoder(DecoderConfig(tokenizer.vocab_size, 24, 2, 4, 2, 16, context=7)).eval().double()
    spread = hw.parallel.parallelize_heads(decoder, mesh, copy=True)
    found = {}
    for temperature in (0.0, 1.0):
        pair = (
            "".join(write(model, tokenizer, "the", 9, temperature=temperature, seed=5)) for model in (decoder, spread)
        )
        found[str(temperature)] = list(pair)
    return found


def refusals(mesh: DeviceMesh) -> Answer:
    """What is said of that which cannot be spread, and that nothing has changed then."""
    ranks = mesh.size()
    wrong: dict[str, Callable[[], nn.Module]] = {
        "uneven": lambda: hw.MultiHeadAttention(15, 3, head_dim=4),
        "uneven keys": lambda: hw.MultiHeadAttention(24, 12, num_kv_heads=3 if ranks == 2 else 6, head_dim=4),
        "uneven channels": lambda: hw.MultiHeadAttention(24, 4, num_kv_heads=1, head_dim=5, value_dim=4),
        "uneven feed-forward": lambda: hw.TransformerBlock(hw.MultiHeadAttention(24, 4), d_ff=31),
        "none": lambda: nn.Linear(3, 3),
        "twice": lambda: hw.parallel.parallelize_heads(hw.MultiHeadAttention(24, 4), mesh),
        **{name: lambda design=design: design.build(24, 4) for name, design in hw.nn.DESIGNS.items()
           if name not in SPREADABLE},
    }  # fmt: skip
    found = {}
    for name, make in wrong.items():
        model = nn.Sequential(hw.MultiHeadAttention(24, 4), make()) if name != "none" else make()
        try:
            hw.parallel.parallelize_heads(model, mesh)
            found[name] = "nothing"
        except hw.HeadwiseError as error:
            spread = [p for p in model[0].parameters() if isinstance(p, DTensor)] if name != "none" else []
            found[name] = f"{type(error).__name__}: {error}" + (" BUT CHANGED" if spread else "")
    return found


def checkpoints(mesh: DeviceMesh) -> Answer:
    """The whole state out of a spread model, and into another one; and by PyTorch's own plan."""
    torch.manual_seed(11)
    model = Decoder(DecoderConfig(13, 24, 2, 4, 1, 16, context=12, options={"head_dim": 8})).double()
    spread = hw.parallel.parallelize_heads(model, mesh, copy=True)
    state = hw.parallel.whole_state(spread)
    same = all(torch.equal(state[name], x) for name, x in model.state_dict().items()) and len(state) == len(
        model.state_dict()
    )
    torch.manual_seed(12 + mesh.get_local_rank())  # each rank draws others: those of the first count
    other = hw.parallel.parallelize_heads(Decoder(model.config).double(), mesh)
    differ = not torch.equal(hw.parallel.whole_state(other)["embedding.weight"], state["embedding.weight"])
    first = hw.parallel.whole_state(other)["embedding.weight"].double().sum().item()
    set_model_state_dict(other, state, options=StateDictOptions(full_state_dict=True))
    ids = torch.arange(9).view(1, 9) % 13
    planned = copy.deepcopy(model.blocks[0].attention)
    parallelize_module(planned, mesh, hw.parallel.head_parallel_plan(planned))
    x = normal(2, 5, 24, seed=6)
    return {
        "same": same and spread.config == model.config, "differ": differ, "first": first,
        "loaded": _far(other(ids), model(ids)),
        "plan": _far(planned(x), model.blocks[0].attention(x)),
        "own": {name: list(x.to_local().shape) for name, x in planned.state_dict().items()},
        "config": str(hw.parallel.held_heads(planned)),
    }  # fmt: skip


def training(mesh: DeviceMesh) -> Answer:
    """Some steps of AdamW with clipped gradients; weights and losses as in one process."""
    found: Answer = {}
    for kv in (4, 1):
        torch.manual_seed(1)
        whole = Decoder(
            DecoderConfig(13, 24, 2, 4, kv, 16, context=12, options={"qk_norm": True, "head_dim": 8})
        ).double()
        spread = hw.parallel.parallelize_heads(whole, mesh, copy=True)
        ids = torch.randint(13, (3, 9), generator=torch.Generator().manual_seed(1))
        losses, norms = [], []
        for model in (whole, spread):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            for _ in range(3):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                loss.backward()
                norms.append(float(hw.parallel.clip_gradients(model, 0.1)))
                optimizer.step()
                losses.append(float(loss))
        one = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        state = hw.parallel.whole_state(spread)
        found[str(kv)] = {
            "losses": losses, "norms": norms, "clipped": float(one),
            "weights": max(_far(state[name], x) for name, x in whole.state_dict().items()),
        }  # fmt: skip
    return found


def dropout(mesh: DeviceMesh) -> Answer:
    """Heads that are all alike, each rank's with a dropout of its own, and generators that stay together."""
    torch.manual_seed(1)
    layer = hw.MultiHeadAttention(24, 4, head_dim=8, dropout=0.5)
    with torch.no_grad():
        for proj in (layer.q_proj, layer.k_proj, layer.v_proj):
            proj.weight.copy_(proj.weight[:8].repeat(4, 1))
    block = hw.TransformerBlock(layer, d_ff=16, inner_dropout=0.5, dropout=0.5)
    hw.parallel.parallelize_heads(block, mesh)
    x = normal(2, 9, 24, seed=2).float()
    torch.manual_seed(7)
    _, train = block.attention(x, return_concat=True)
    y = block(x)
    after = float(torch.rand(()))
    _, still = block.eval().attention(x, return_concat=True)
    gathered = [_gathered(z[..., :8], mesh) for z in (train, still)]
    return {
        "differ": len({z.sum().item() for z in gathered[0]}), "after": after, "y": float(y.double().sum()),
        "alike": max(_far(z, gathered[1][0]) for z in gathered[1]),
    }  # fmt: skip


def watching(mesh: DeviceMesh) -> Answer:
    """A record numbers this rank's heads as the whole layer does, and all ranks together are one process."""
    torch.manual_seed(1)
    whole = nn.ModuleDict({name: mha(8, kv).double() for name, kv in (("a", 8), ("b", 2))})
    spread = hw.parallel.parallelize_heads(whole, mesh, copy=True)
    xs = [normal(3, 7, WIDTH, seed=1), normal(2, 5, WIDTH, seed=2)]
    records = []
    for model in (whole, spread):
        with hw.watch(model, measures=tuple(hw.stats.MEASURES), heads=[0, 3, 6], steps="manual") as record:
            for x in xs:
                for layer in model.values():
                    layer(x, mask=hw.Causal())
            record.step()
        records.append(record)
    one, many = records
    reduced = many.reduce()
    held = hw.parallel.held_heads(spread["a"]).heads
    mine = [i for i, (_, head) in enumerate(one.latest.places) if head in held]
    with hw.watch(spread, measures=["max_logit"]) as narrow:
        spread["a"](xs[0])
    alone = ""
    try:
        hw.telemetry.qk_clip(nn.ModuleDict({"a": spread["a"]}), narrow)
    except hw.ConfigError as error:
        alone = str(error)
    with hw.watch(spread, measures=["max_logit"]) as record:
        spread["b"](xs[0])
    with hw.watch(whole, measures=["max_logit"]) as of_one:
        whole["b"](xs[0])
    tau = float(of_one.latest["max_logit"].median())
    clipped = [hw.telemetry.qk_clip(whole, of_one, tau), hw.telemetry.qk_clip(spread, record.reduce(), tau)]
    state = hw.parallel.whole_state(spread)
    return {
        "places": many.latest.places, "wanted": [one.latest.places[i] for i in mine],
        "own": _far(many.latest.numbers, one.latest.numbers[mine]) if mine else 0.0,
        "all": [list(place) for place in reduced.latest.places] == [list(place) for place in one.latest.places],
        "latest": _far(reduced.latest.numbers, one.latest.numbers),
        "totals": _far(reduced.totals.numbers, one.totals.numbers),
        "layers": sorted({head for _, head in narrow.latest.places}), "alone": alone,
        "clipped": list(map(len, clipped)),
        "weights": max(_far(state[name], x) for name, x in whole.state_dict().items()),
    }  # fmt: skip


def traffic(mesh: DeviceMesh) -> Answer:
    """Bytes that this rank sends in each pass of each way, and what the formulas say."""
    ranks = mesh.size()
    found: Answer = {}
    for h, kv, d, dtype in TRAFFIC:
        counts = counts_of("multi_head", {"d_model": WIDTH + 3, "num_heads": h, "num_kv_heads": kv, "head_dim": d})
        work = Work(3, 16, 16, dtype=dtype)
        layer = hw.MultiHeadAttention(WIDTH + 3, h, num_kv_heads=kv, head_dim=d).to(getattr(torch, dtype))
        q, k, v = (normal(3, heads, 16, d, seed=1).to(next(layer.parameters())) for heads in (h, kv, kv))
        hw.parallel.parallelize_heads(layer, mesh)
        x = normal(3, 16, WIDTH + 3, seed=2).to(q).requires_grad_()
        parts = [shard(z, "zigzag").requires_grad_() for z in (q, k, v)]
        even = [shard(z, "contiguous").requires_grad_() for z in (q, k, v)]
        calls: dict[str, tuple[Callable[[], Tensor], Way, tuple[str, ...]]] = {
            "head-parallel": (
                lambda layer=layer, x=x: layer(x, mask=hw.Causal()), head_parallel(counts, work, ranks),
                ("all_reduce", "all_gather", "reduce_scatter"),
            ),
            "Ulysses": (
                lambda even=even: ulysses_attend(*even, mask=hw.Causal()), ulysses(counts, work, ranks), ("all_to_all",)
            ),
            "ring": (
                lambda parts=parts: ring_attend(*parts, mask=hw.Causal()), ring(counts, work, ranks), ("send",)
            ),
            "ring, contiguous": (
                lambda even=even: ring_attend(*even, mask=hw.Causal(), layout="contiguous"),
                ring(counts, work, ranks, layout="contiguous"), ("send",),
            ),
        }  # fmt: skip
        if ranks == 4 and kv > 1:  # else all-gathers of keys are among those in which ranks agree on the call
            both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "heads"))
            small = hw.MultiHeadAttention(WIDTH + 3, h, num_kv_heads=kv, head_dim=d).to(getattr(torch, dtype))
            hw.parallel.parallelize_heads(small, both["heads"])
            part = shard(x.detach(), "zigzag", dim=1, group=both["sequence"]).requires_grad_()
            sequence_parallel(small, both["sequence"])
            calls["heads by ring"] = (
                lambda small=small, part=part: small(part, mask=hw.Causal()), heads_by_ring(counts, work, 4, 2),
                ("all_reduce", "send"),
            )  # fmt: skip
        for name, (call, way, kinds) in calls.items():
            with SentBelow() as forward:
                y = call()
            with SentBelow() as backward:
                y.backward(torch.ones_like(y))
            sent = [sum(count.by[kind] for kind in kinds) for count in (forward, backward)]
            found[f"{name} {h}/{kv}"] = {"sent": sent, "formula": [way.forward, way.backward]}
    return found


class SentBelow(Sent):
    """Bytes counted below DTensors too, which turn one operator into several."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def waiting(mesh: DeviceMesh) -> Answer:
    """What a layer is given and gives while its collectives may be under way, of one token and of several."""
    found: Answer = {}
    layer = hw.parallel.parallelize_heads(hw.MultiHeadAttention(WIDTH, 4, num_kv_heads=2, head_dim=8).double(), mesh)
    given: list[str] = []
    layer.attention = lambda q, k, v, **options: (  # type: ignore[method-assign]
        given.extend(type(x).__name__ for x in (q, k, v)) or type(layer).attention(layer, q, k, v, **options)
    )
    for tokens in (1, 3):
        y = layer(normal(1, tokens, WIDTH, seed=tokens))
        found[str(tokens)] = [*given, type(y).__name__]
        given.clear()
    return found


def meshes(mesh: DeviceMesh) -> Answer:
    """One dimension of a larger mesh: rows of ranks, each with its own batch."""
    if mesh.size() != 4:
        return {}
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
    found: Answer = {}
    for kv in (2, 1):
        torch.manual_seed(1)
        layer = hw.MultiHeadAttention(WIDTH, 4, num_kv_heads=kv, head_dim=8).double()
        spread = hw.parallel.parallelize_heads(layer, both["heads"], copy=True)
        x = normal(2, 5, WIDTH, seed=1 + both["data"].get_local_rank())
        found[str(kv)] = _far(spread(x), layer(x))
    try:
        hw.parallel.parallelize_heads(layer, both, copy=True)
    except hw.ConfigError as error:
        found["error"] = str(error)
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "heads"))
    for how, kv in (("ring", 2), ("ulysses", 1), ("ring", 4)):
        torch.manual_seed(3)
        layer = hw.TransformerBlock(mha(4, kv, rotary=True, bias=True), d_ff=8).double()
        spread = hw.parallel.parallelize_heads(layer, both["heads"], copy=True)
        x, d_y = normal(2, 9, WIDTH, seed=4), normal(2, 9, WIDTH, seed=5)
        score = hw.ALiBi(normal(4, seed=6).abs())
        layer(x, mask=hw.Causal(), score=score).backward(d_y)
        with sequence_parallel(spread, both["sequence"], how=how, layout="zigzag"):
            part = shard(x, "zigzag", dim=1, group=both["sequence"])
            y = spread(part, mask=hw.Causal(), score=score)
            y.backward(shard(d_y, "zigzag", dim=1, group=both["sequence"]))
        sum_gradients(spread, both["sequence"])
        far = _far(y, shard(layer(x, mask=hw.Causal(), score=score), "zigzag", dim=1, group=both["sequence"]))
        for (name, one), (_, many) in zip(layer.named_parameters(), spread.named_parameters(), strict=True):
            whole = many.grad.full_tensor() if isinstance(many.grad, DTensor) else many.grad
            least = 1e-2 if name.endswith("k_proj.bias") else 1e-9
            far = max(far, _far(whole, one.grad, least))
        found[f"{how} {kv}"] = far
    return found


def _differences(case: Case, mesh: DeviceMesh, dtype: torch.dtype) -> dict[str, float]:
    whole = model_of(case, dtype)
    spread = hw.parallel.parallelize_heads(whole, mesh, copy=True)
    found = {}
    xs = [normal(3, 7, WIDTH, seed=1).to(dtype).requires_grad_() for _ in range(2)]
    calls = [case.call(x) for x in xs]
    ys = [model(x, **call) for model, x, call in zip((whole, spread), xs, calls, strict=True)]
    d_y = normal(*ys[0].shape, seed=2).to(dtype)
    for y in ys:
        y.backward(d_y)
    found["y"], found["x"] = _far(ys[1], ys[0]), _far(xs[1].grad, xs[0].grad)
    for one, other in zip(*(Crossing.leaves(call) for call in calls), strict=True):
        found[f"given {len(found)}"] = _far(other.grad, one.grad)
    grads = {name: parameter.grad for name, parameter in whole.named_parameters()}
    least = 1e-3 * max(float(grad.abs().max()) for grad in grads.values())  # that of a key bias is nothing but rounding
    for name, parameter in spread.named_parameters():
        grad = parameter.grad
        found[name] = _far(grad.full_tensor() if isinstance(grad, DTensor) else grad, grads[name], least)
    return found


def _far(one: Tensor, other: Tensor, least: float = 1e-9) -> float:
    """The largest difference, relative to the largest number or `least`; infinite if the shapes differ."""
    if one.shape != other.shape:
        return float("inf")
    scale = max(least, float(other.detach().abs().max()))
    return float((one.detach() - other.detach()).abs().max()) / scale


def _gathered(x: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(mesh.size())]
    dist.all_gather(parts, x.detach().contiguous())
    return parts


JOBS = (
    cases, half, statistics, decoding, writing, refusals, checkpoints, training, dropout, watching, traffic, waiting,
    meshes,
)  # fmt: skip

if __name__ == "__main__":
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    spread_over = init_device_mesh("cpu", (ranks,))
    assert HEADS % ranks == 0
    answers = {job.__name__: job(spread_over) for job in JOBS if job.__name__ in JOBS_WANTED}
    (folder / f"{rank}.json").write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()
