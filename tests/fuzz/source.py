"""A case as lines of Python: what runs, and what a failure prints."""

import random
from dataclasses import dataclass, field

from .case import MEASURES, Case, Tree

TINY = {"float16": 1e-6}  # below the least normal number of the other dtypes: 1e-39
CONTEXTS = {
    "no_grad": "with torch.no_grad():",
    "inference": "with torch.inference_mode():",
    "autocast": 'with torch.autocast("cpu", dtype=torch.bfloat16):',
}


@dataclass
class Source:
    """data: lines that need torch alone. call: those that call the library. reads: an expression for each read.

    mask, scores: as the oracle reads them, with the names of tensors in the place of seeds. learned: names of the
    tensors that require gradients.
    """

    data: list[str] = field(default_factory=list)
    call: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    mask: Tree = ()
    scores: list[Tree] = field(default_factory=list)
    learned: list[str] = field(default_factory=list)

    def text(self, read: int | None = None) -> str:
        """All of it as a program, with one of the reads."""
        lines = ["import torch", "import headwise as hw", *self.data, *self.call]
        if read is not None:
            lines.append(f"print({self.reads[read]})")
        return "\n".join(lines)


def source(case: Case) -> Source:
    """The lines of a case."""
    made = Source()
    _tensors(case, made)
    made.mask, mask = _mask(case, case.mask, made.data)
    scores = [_score(case, score, i, made) for i, score in enumerate(case.scores)]
    _call(case, made, mask, scores)
    made.reads = [_read(case, kind, at) for kind, at in case.reads] if case.way == "map" else []
    return made


def _generator(seed: int) -> str:
    return f"generator=torch.Generator().manual_seed({seed})"


def _tensors(case: Case, made: Source) -> None:
    shapes = {
        "q": (case.b, case.h, case.n, case.d),
        "k": (case.b, case.kv, case.m, case.d),
        "v": (case.b, case.kv, case.m, case.e),
    }
    tiny = TINY.get(case.dtype, 1e-39)
    alias = _alias(case)
    for i, (name, shape) in enumerate(shapes.items()):
        if alias.get(name):
            made.data.append(f"{name} = {alias[name]}")
            continue
        size = ", ".join(map(str, shape))
        if case.data == "whole":
            x = f"torch.randint(-2, 3, ({size}), {_generator(case.seed + i)}).double()"
        elif case.data == "zeros" and name == "q":
            x = f"torch.zeros({size}, dtype=torch.float64)"
        else:
            x = f"torch.randn({size}, {_generator(case.seed + i)}, dtype=torch.float64)"
        if case.data == "alike" and name == "k":
            noise = f"torch.randn({case.b}, {case.kv}, {case.m}, 1, {_generator(case.seed + 7)}, dtype=torch.float64)"
            x = f"({x}[:, :, :1] * (1 + 1e-6 * {noise}))"
        factor = case.loud_v if name == "v" else case.loud if name == "q" else 1.0
        factor = max(factor, tiny) * (tiny if case.data == "denormal" and name == "q" else 1.0)
        factor = min(factor, 1e3) if case.dtype == "float16" else factor
        made.data.append(f"{name} = {x}{f'.mul({factor!r})' if factor != 1.0 else ''}.to(torch.{case.dtype})")
        for where, at, value in case.bad:
            if where == name and 0 not in shape:
                index = ", ".join(str(int(part * length)) for part, length in zip(at, shape, strict=True))
                made.data.append(f"{name}[{index}] = {value}")
        made.data += _laid(name, case.layouts[i], case)
    if case.grad:
        names = ("q",) if case.eight else dict.fromkeys(alias.get(name) or name for name in "qkv")
        made.data += [f"{name} = {name}.detach().requires_grad_()" for name in names]
        made.data += [f"{name} = {first}" for name, first in alias.items() if first]
        made.learned += names


def _alias(case: Case) -> dict[str, str]:
    same_kv, same_qk = case.d == case.e, case.group == 1 and case.n == case.m
    match case.alias:
        case "q is k" if same_qk:
            return {"k": "q"}
        case "k is v" if same_kv:
            return {"v": "k"}
        case "all" if same_kv and same_qk:
            return {"k": "q", "v": "q"}
    return {}


def _laid(x: str, layout: str, case: Case) -> list[str]:
    match layout:
        case "bnhd":
            return [f"{x} = {x}.transpose(1, 2).contiguous().transpose(1, 2)"]
        case "column":
            return [f"{x} = {x}.mT.contiguous().mT"]
        case "step":
            return [f"{x} = torch.stack(({x}, {x} + 1), 3).flatten(2, 3)[:, :, ::2]"]
        case "step in a row":
            return [f"{x} = torch.stack(({x}, {x} + 1), 4).flatten(3)[..., ::2]"]
        case "offset":
            return [f"{x} = torch.nn.functional.pad({x}, (3, 2, 1, 1), value=9.0)[:, :, 1:-1, 3:-2]"]
        case "negative" if case.dtype in ("float32", "float64"):
            return [f"{x} = torch.complex(torch.zeros_like({x}), -{x}).conj().imag"]
        case "one batch":
            return [f"{x} = {x}[:1].expand({x}.shape)"]
        case "one head":
            return [f"{x} = {x}[:, :1].expand({x}.shape)"]
        case "one row":
            return [f"{x} = {x}[:, :, :1].expand({x}.shape)"]
        case "one number":
            return [f"{x} = {x}[..., :1].expand({x}.shape)"]
    return []


def _mask(case: Case, tree: Tree, data: list[str]) -> tuple[Tree, str]:
    """The tree with names for seeds, and the expression."""
    if not tree:
        return (), "None"
    kind, *rest = tree
    b, n, m = case.b, case.n, case.m
    name = f"{kind}{len(data)}"
    match kind:
        case "and" | "or":
            left, one = _mask(case, rest[0], data)
            right, two = _mask(case, rest[1], data)
            return (kind, left, right), f"({one} {'&' if kind == 'and' else '|'} {two})"
        case "causal":
            return tree, "hw.Causal()"
        case "window":
            return tree, f"hw.Window({rest[0]}, {rest[1]})"
        case "sinks":
            return tree, f"hw.Sinks({rest[0]})"
        case "head windows" if case.h:
            seed, sinks = rest
            windows = random.Random(seed).choices((None, 1, 2, 3, 7, 17, 64), k=case.h)
            return (kind, windows, sinks), f"hw.masks.HeadWindows({windows}, {sinks})"
        case "lengths" if b:
            seed, with_queries, side = rest
            data.append(f"{name} = torch.randint(0, {m + 1}, ({b},), {_generator(seed)})")
            if not with_queries:
                return (kind, name, None, side), f"hw.Lengths({name}, side={side!r})"
            data.append(f"{name}q = torch.randint(0, {n + 1}, ({b},), {_generator(seed + 1)})")
            return (kind, name, f"{name}q", side), f"hw.Lengths({name}, {name}q, side={side!r})"
        case "documents":
            seed, each, how = rest
            size = f"({b}, {m})" if each and b else f"({m},)"
            ids = {
                "runs": f"torch.randint(0, 6, {size}, {_generator(seed)}).eq(0).cumsum(-1)",
                "padded": f"torch.randint(0, 6, {size}, {_generator(seed)}).eq(0).cumsum(-1) - 1",
                "mixed": f"torch.randint(-1, 3, {size}, {_generator(seed)})",
            }[how]
            data.append(f"{name} = {ids}")
            return (kind, name), f"hw.Documents({name})"
        case "forbidden":
            seed, each, all_heads, share = rest
            size = f"{b}, " if each and b else ""
            for at, shape in (("q", f"{size}{n}"), ("k", f"{size}{m}"), ("h", str(case.h))):
                below = 2.0 if at == "h" and all_heads else share
                data.append(f"{name}{at} = torch.rand({shape}, {_generator(seed)}) < {below}")
            heads = "None" if all_heads and seed % 2 else f"{name}h"
            return (kind, f"{name}q", f"{name}k", f"{name}h"), f"hw.masks.Forbidden({name}q, {name}k, {heads})"
        case "dense":
            seed, ndim, share = rest
            size = ", ".join(map(str, (b if seed % 2 else 1, case.h if seed % 3 else 1, n, m)[4 - ndim :]))
            if ndim == 3:
                size = f"{b if seed % 2 else 1}, {n}, {m}"
            data.append(f"{name} = torch.rand({size}, {_generator(seed)}, dtype=torch.float64) < {share}")
            return (kind, name), f"hw.Dense({name})"
    return ("everything",), "hw.masks.Everything()"


def _score(case: Case, score: Tree, i: int, made: Source) -> str:
    kind, *rest = score
    name, h = f"{kind}{i}", case.h
    if kind == "cap":
        made.scores.append(score)
        return f"hw.SoftCap({rest[0]})"

    def tensor(size: tuple[int, ...], dtype: str, seed: int, more: str = "") -> None:
        shape = ", ".join(map(str, size))
        x = f"torch.randn({shape}, {_generator(seed)}, dtype=torch.float64){more}.to(torch.{dtype})"
        made.data.append(f"{name} = {x}{'.requires_grad_()' if case.learn else ''}")
        if case.learn:
            made.learned.append(name)

    match kind:
        case "alibi":
            standard, seed = rest
            if standard and h and not case.learn:
                made.scores.append(("alibi", h))
                return f"hw.ALiBi.standard({h})"
            tensor((h,), "float32", seed, ".abs().mul(0.3)")
            made.scores.append(("alibi", name))
            return f"hw.ALiBi({name})"
        case "relative":
            shared, length, first, dtype, seed = rest
            tensor((1 if shared else h, length), dtype, seed)
            made.scores.append(("relative", name, first))
            return f"hw.RelativeBias({name}, {first})"
        case "t5":
            both, dtype, seed = rest
            tensor((10 if both else 7, h), dtype, seed)
            made.scores.append(("t5", name, both, 11))
            return f"hw.scores.t5_bias({name}, bidirectional={both}, max_distance=11)"
        case "bias":
            full, hidden, dtype, seed = rest
            size = tuple(x if there else 1 for x, there in zip((case.b, h, case.n, case.m), full, strict=True))
            more = (
                f".masked_fill(torch.rand({', '.join(map(str, size))}, {_generator(seed + 1)}) < {hidden}, -torch.inf)"
            )
            tensor(size, dtype, seed, (".add(9e3)" if seed % 5 == 0 else "") + (more if hidden else ""))
            made.scores.append(("bias", name))
            return f"hw.Bias({name})"
        case "sinks":
            shift, dtype, seed = rest
            tensor((h,), dtype, seed, f".add({shift})" if shift else "")
            made.scores.append(("sinks", name))
            return f"hw.SinkLogits({name})"
    raise AssertionError(kind)


def _call(case: Case, made: Source, mask: str, scores: list[str]) -> None:
    options = {
        "mask": mask if mask != "None" else None,
        "scale": repr(case.scale) if case.scale is not None else None,
        "score": f"({', '.join(scores)},)" if scores else None,
        "dropout_p": repr(case.dropout) if case.dropout else None,
        "kernel": repr(case.kernel) if case.kernel != "auto" else None,
    }
    if case.way == "map":
        options["return_map"] = "True"
        options["measures"] = repr(MEASURES) if case.measures else None
    given = "".join(f", {name}={value}" for name, value in options.items() if value is not None)
    names = {name: name for name in "qkv"}
    for name in case.eight:
        width = case.d if name == "k" else case.e
        parts = f", ({width // 3}, {width - width // 3})" if case.parts and width > 2 else ""
        made.call.append(f"{name}8 = hw.kernels.QuantizedKV.of({name}{parts})")
        names[name] = f"{name}8"
    result = "out, amap" if case.way == "map" else "out"
    if case.way == "vmap":
        each = ", ".join(f"{name}[None]" for name in "qkv")
        call = f"{result} = torch.func.vmap(lambda q, k, v: hw.attend({each}{given})[0])(q, k, v)"
    else:
        call = f"{result} = hw.attend({', '.join(names.values())}{given})"
    lines = [f"torch.manual_seed({case.seed})", call] if case.dropout else [call]
    if case.context == "float64":
        lines = ["torch.set_default_dtype(torch.float64)", *lines]
    elif case.context:
        lines = [CONTEXTS[case.context], *(f"    {line}" for line in lines)]
    made.call += lines


def _read(case: Case, kind: str, at: tuple[float, ...]) -> str:
    sizes = (case.b, case.h, case.n, case.m)
    x, y, z, w = at
    progress = ", progress=lambda what, done, of: steps.append((done, of))" if case.progress else ""

    def at_of(size: int, part: float) -> int:
        return min(int(part * size), size - 1)

    match kind:
        case "tile":
            return f"amap[{', '.join(_slice(size, part) for size, part in zip(sizes, at, strict=True))}]"
        case "times" | "transposed":
            rows, left = (case.m, "amap") if kind == "times" else (case.n, "amap.T")
            heads = f"{case.b}, {(case.h, case.kv if kind == 'times' else case.h, 1)[int(y * 3)]}, "
            shape = f"{heads if x < 0.6 else ''}{rows}, {1 + int(z * 7)}"
            x = f"torch.randn({shape}, {_generator(int(w * 1000))}, dtype=torch.float64)"
            return f"{left} @ {x}.to(torch.{case.dtype})"
        case "pool":
            return f"amap.pool({1 + int(x * 40)}, {'mean' if y < 0.5 else 'max'!r}{progress})"
        case "pooled":
            rows, cols = (_inside(size, *part) for size, part in ((case.n, (x, y)), (case.m, (z, w))))
            return f"amap.pooled(range({rows}), range({cols}), {1 + int(y * 13)}{progress})"
        case "topk":
            return f"amap.topk({1 + at_of(case.m, x if y < 0.3 else x * 0.1)}{progress})"
        case "row":
            return f"amap.row({at_of(case.n, x) - (case.n if y < 0.5 else 0)})"
        case "measure":
            names = ", ".join(map(repr, MEASURES[: 1 + int(x * len(MEASURES))]))
            return f"amap.measure({names}{', rows=True' if y < 0.4 else ''}{progress})"
        case "head":
            return f"amap.head({at_of(case.b, x)}, {at_of(case.h, y)}).to_dense()"
        case "operator":
            side, rows = (".matmat", case.m) if z < 0.5 else (".rmatmat", case.n)
            made = f"amap.as_linear_operator({at_of(case.b, x)}, {at_of(case.h, y)})"
            return f"{made}{side}(torch.randn({rows}, 3, {_generator(int(w * 1000))}, dtype=torch.float64).numpy())"
        case "given":
            ids = f"torch.randint(0, 4, ({f'{case.b}, ' if x < 0.5 else ''}{case.m},), {_generator(int(w * 1000))})"
            kinds = f"hw.stats.ClassMass({ids} > 1), hw.stats.DuplicateMass({ids}), hw.stats.InductionMass({ids})"
            return f"amap.measure({kinds}{', rows=True' if y < 0.4 else ''}{progress})"
        case "merge":
            names = MEASURES[int(x * 9) : 10 + int(x * 6)]
            return f"amap.measure{names!r}.merge(amap.measure{names!r})"
        case "save":
            return "saved(amap)"
        case "received" | "diagonals":
            return f"amap.{kind}()"
    return "amap.to_dense()"


def _slice(size: int, part: float) -> str:
    """A slice or an index, of any kind, by one number."""
    start, length = int(part * size * 0.7), 1 + int(part * 977) % max(1, size)
    kind = int(part * 1000) % 7
    if kind == 0 and size:
        return str(start - (size if int(part * 100) % 2 else 0))
    if kind == 1:
        return f"{start}:{start + length}:{1 + int(part * 100) % 3}"
    if kind == 2:
        return f"{start + length}:{start}:-1"
    return ":" if kind in (3, 4) else f"{start}:{start + length}"


def _inside(size: int, first: float, last: float) -> str:
    start = min(int(first * size), size - 1)
    return f"{start}, {start + 1 + int(last * (size - start - 1))}"
