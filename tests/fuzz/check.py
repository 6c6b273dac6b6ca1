"""Running a case, and comparing what comes out with the oracle."""

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import oracle, reads
from .bounds import CONTRACT, LEAST, ROUND, Bounds
from .case import Case, leaves
from .compare import Mismatch, close, same
from .source import Source, source


@dataclass
class Outcome:
    """What became of a case: `kind` is "" for passed, "refused" where a named kernel refused, or the failure's name."""

    case: Case
    kind: str = ""
    told: str = ""
    features: set[str] = field(default_factory=set)
    read: int | None = None

    @property
    def failed(self) -> bool:
        """Whether something is wrong."""
        return self.kind not in ("", "refused")


SUBNORMAL = 1e-40  # what float32 sums of gradients, all of them subnormal, may lose of their few digits


class Runner:
    """Runs cases on a library: an object with the names of `headwise` that a case uses."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.targets = _targets()

    def run(self, case: Case) -> Outcome:
        """All that can be compared of a case."""
        outcome = Outcome(case, features=case.features())
        lines = source(case)
        try:
            with _settings(case):
                self._run(case, lines, outcome)
        except Mismatch as wrong:
            outcome.kind, outcome.told = wrong.name, str(wrong)
        except self.library.KernelError as refusal:
            if case.kernel == "auto" or case.kernel not in str(refusal):
                outcome.kind, outcome.told = "KernelError", str(refusal)
            else:
                outcome.kind = "refused"
        except Exception as error:  # whatever it is, a case must not end the run
            where = f" in {lines.reads[outcome.read]}" if outcome.read is not None else ""
            outcome.kind, outcome.told = f"{type(error).__name__}{where and ' in a read'}", f"{error}{where}"
        return outcome

    def _run(self, case: Case, lines: Source, outcome: Outcome) -> None:
        held: dict[str, Any] = {"torch": torch, "hw": self.library}
        exec("\n".join(lines.data), held)
        before = {name: held[name]._version for name in "qkv"}
        if case.n > case.m and {"causal", "documents"} & set(leaves(lines.mask)):
            try:
                exec("\n".join(lines.call), held)
            except self.library.ShapeError:
                return
            raise Mismatch("no ShapeError", "more queries than keys under a mask aligned to the end of the keys")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* logits of about")  # measures of the call read its map
            exec("\n".join(lines.call), held)
        torch.set_default_dtype(torch.float32)
        for name, version in before.items():
            if held[name]._version != version:
                raise Mismatch("changed", f"{name} was written to")
        t, near = expected(case, lines, held)
        kept = self._kept(case, lines, held, t, near) if case.dropout else None
        _outputs(case, held, t, near, kept)
        self._again(case, lines, held)
        if case.grad and held["out"].requires_grad:
            _gradients(case, lines, held, t, near, kept)
        if case.way == "map":
            reads.of_map(case, held, t, near)
            with _remark(held["amap"], new=not held["amap"].read_by):
                for i, expression in enumerate(lines.reads):
                    outcome.read = i
                    reads.check(case, i, expression, held, t, near)
            outcome.read = None

    def _kept(self, case: Case, lines: Source, held: dict[str, Any], t: oracle.Truth, near: Bounds) -> Tensor:
        """What dropout multiplied each weight by, learnt with the unit matrix as values; checked on the way."""
        b, kv, m, _ = held["k"].shape
        other = {**held, "v": torch.eye(m, dtype=held["q"].dtype).expand(b, kv, m, m)}
        with torch.no_grad():
            exec("\n".join(lines.call), other)
        torch.set_default_dtype(torch.float32)
        got, whole = other["out"].double(), t.p / (1 - case.dropout)
        dropped = got == 0
        off = near.p / (1 - case.dropout) + near.weight * whole + near.rounded(whole)
        close("dropout", got, whole, off, ~dropped)
        sure = t.p > torch.maximum(near.p, torch.full_like(t.p, 1e-6))
        if (count := int(sure.sum())) > 200:
            share = float((dropped & sure).sum()) / count
            if abs(share - case.dropout) > 6 * (case.dropout * (1 - case.dropout) / count) ** 0.5:
                raise Mismatch("dropout share", f"{share:.4f} of {count} weights were dropped, not {case.dropout}")
        # What is below the least number of the dtype may look dropped and not be.
        unsure = dropped & (whole < 2 * near.rounded(whole * 0))
        near.p, near.unsure = near.p + t.p * unsure, unsure
        return (~dropped | unsure).double() / (1 - case.dropout)

    def _again(self, case: Case, lines: Source, held: dict[str, Any]) -> None:
        """The same bits once more, and for another number of threads."""
        if case.way not in ("twice", "threads"):
            return
        other = dict(held)
        if case.way == "threads":
            if case.kernel != "cpu":  # PyTorch's products differ in bits
                return
            torch.set_num_threads(1)
        for _ in range(2):
            exec("\n".join(lines.call), other)
            torch.set_default_dtype(torch.float32)
            same(f"bits {case.way}", other["out"].detach(), held["out"].detach())


def expected(case: Case, lines: Source, held: dict[str, Any]) -> tuple[oracle.Truth, Bounds]:
    """The oracle's answer for the tensors that were made."""
    given = {name: held[name] for name in "qkv"}
    for name in case.eight:
        x = held[f"{name}8"]
        given[name] = oracle.decoded(x.steps, x.scales, x.parts, torch.float32)
    t = oracle.truth(*given.values(), lines.mask, lines.scores, case.scale, held)
    dtype = held["q"].dtype
    half = dtype in (torch.bfloat16, torch.float16)
    # Keys of eight bits may be rounded to the dtype before they are used.
    lost = 2 * ROUND[dtype] if case.eight and half else 0.0
    # The exponentials of half precision: PyTorch's operator has them to four digits, native/simd.h to 3e-6.
    rough = 0.0 if not half else 2e-4 if case.kernel in ("torch_fused", "auto") else 4e-6
    return t, Bounds(t, dtype, lost, rough)


def _outputs(case: Case, held: dict[str, Any], t: oracle.Truth, near: Bounds, kept: Tensor | None) -> None:
    out = held["out"].detach()
    if out.dtype != held["q"].dtype or out.shape != t.out.shape:
        raise Mismatch("out", f"{out.dtype} {tuple(out.shape)}, expected {held['q'].dtype} {tuple(t.out.shape)}")
    right = t.out if kept is None else (t.p * kept) @ t.spread(t.v).nan_to_num(0.0, 0.0, 0.0)
    free = near.free[..., None]
    dark = t.dark[..., None].expand(out.shape) & ~(t.bad_out | t.open_out | free)
    if bool((out[dark] != 0).any()):
        raise Mismatch("out of fully masked queries", f"{out[dark & (out != 0)][:4].tolist()}, expected 0")
    close("out", out, right, near.out(kept), ~(t.bad_out | t.open_out | free))
    missed = t.bad_out & ~free & out.isfinite()
    if bool(missed.any()):
        raise Mismatch("out hides what is not finite", f"at {missed.nonzero()[0].tolist()}: {out[missed][:3].tolist()}")
    if near.calm and kept is None and right.numel():
        size = float((t.p @ t.spread(t.v).abs()).norm())
        off, norm = float((out.double() - right).norm()), float(right.norm())
        share = 0.5 if near.half else 0.05  # rounded weights miss a sum that cancels by a share of its terms
        limit = CONTRACT[out.dtype] * max(norm, share * size) + float(near.rounded(right * 0).norm())
        if off > limit:
            raise Mismatch("contract", f"relative error {off / max(norm, 1e-300):.3g} of the output (Frobenius)")


def _gradients(
    case: Case, lines: Source, held: dict[str, Any], t: oracle.Truth, near: Bounds, kept: Tensor | None
) -> None:
    if bool(near.free.any()) or not lines.learned:
        return
    # PyTorch's own operator takes weights of more than 1 where the rounding of logits is that large.
    if case.kernel in ("torch_fused", "auto") and bool((near.near > 1)[t.allowed].any()):
        return
    out = held["out"]
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(case.seed + 9)).to(out.dtype)
    if case.seed % 3 == 0:
        d_out = torch.ones((), dtype=out.dtype).expand(out.shape)
    elif case.seed % 3 == 1:
        d_out = d_out.mT.contiguous().mT
    bad = bool(t.bad.any() or t.bad_out.any() or t.open_out.any() or not t.k.isfinite().all())
    if case.kernel == "reference" and (bad or not t.q.isfinite().all()):
        return  # its backward pass is autograd's own, where 0 · NaN is NaN
    names = list(dict.fromkeys(lines.learned))
    found = torch.autograd.grad(out, [held[name] for name in names], d_out, allow_unused=True)
    x = oracle.slopes_of(t, d_out, kept)
    right = oracle.gradients(t, x, d_out, lines.scores, held, kept)
    limits = near.gradients(x, d_out, oracle.terms(t, lines.scores, held), kept)
    for name, got in zip(names, found, strict=True):
        given = held[name]
        same_as = [other for other in "qkv" if held[other] is given] if name in "qkv" else [name]
        if got is None:
            if given.numel() and float(right[name].abs().sum()) > 0:
                raise Mismatch(f"gradient of {name}", "there is none")
            continue
        total, limit = (sum(x[other] for other in same_as) for x in (right, limits))
        if not total.numel():
            continue
        where = torch.ones_like(total, dtype=torch.bool)
        if bad:
            if name != "q" or len(same_as) > 1:
                continue
            sees_bad = (t.allowed.double() @ (~t.spread(t.k).isfinite()).double().amax(-1, keepdim=True)) > 0
            fine = ~(t.bad | (t.bad_out | t.open_out).any(-1) | ~t.q.isfinite().all(-1))[..., None] & ~sees_bad
            where = fine.expand(total.shape)
        narrow = (t.p.shape[2] + t.p.shape[3]) ** 0.5  # distances add up in the dtype of the score
        dark = t.dark[..., None].expand(total.shape) & where if same_as == ["q"] else None
        if dark is not None and bool((got[dark] != 0).any()):
            raise Mismatch("gradient of fully masked queries", f"{got[dark][:4].tolist()}, expected 0")
        more = (
            2 * near.rounded(total)
            if got.dtype == near.dtype
            else ROUND[got.dtype] * narrow * total.abs().max() + LEAST[got.dtype]
        )
        # The CPU's products of bfloat16 take what is below the least normal number for 0, each of them.
        small = SUBNORMAL + (sum(t.p.shape[2:]) * 2.0**-126 if near.dtype == torch.bfloat16 else 0.0)
        if case.kernel == "torch_fused" and near.half:  # PyTorch's operator rounds its sums to the dtype on the way
            more = more + 16 * ROUND[near.dtype] * total.abs().amax() + 16 * LEAST[near.dtype]
        where = where & (total.abs() + limit < torch.finfo(got.dtype).max)  # beyond it infinity is right
        close(f"gradient of {name if name in 'qkv' else 'scores'}", got, total, limit + more + small, where)


@contextlib.contextmanager
def _remark(amap: Any, new: bool) -> Iterator[None]:
    """The reads of a map warn of logits that float32 does not resolve, the first time, and of nothing else."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    told = [str(one.message) for one in caught]
    finite = amap.lse[amap.lse.isfinite()].abs()
    large = amap.lse.dtype == torch.float32 and finite.numel() > 0 and float(finite.max()) > 1e4
    if wrong := [one for one in told if not large or "logits of about" not in one]:
        raise Mismatch("warning", wrong[0])
    if large and new and amap.read_by and not told:
        raise Mismatch("no warning", f"of logits of {float(finite.max()):.2g}")


@contextlib.contextmanager
def _settings(case: Case) -> Iterator[None]:
    """Threads and target of a case."""
    before = torch.get_num_threads()
    with _target(case.target):
        torch.set_num_threads(case.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
            torch.set_default_dtype(torch.float32)


def _targets() -> tuple[str, ...]:
    """The levels of instructions that the compiled kernel can be switched to here."""
    library = _library()
    return () if library is None else tuple(library.runnable())


@contextlib.contextmanager
def _target(name: str) -> Iterator[None]:
    library = _library()
    if not name or library is None:
        yield
        return
    from headwise.kernels import prepare

    with library.using(name):
        prepare._prepared.clear()
        try:
            yield
        finally:
            prepare._prepared.clear()


def _library() -> Any:
    from headwise.kernels.cpu.library import library

    found = library()
    return found if found.handle is not None else None


def saved(amap: Any) -> Any:
    """A map after a journey through a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "map.safetensors"
        amap.save(path)
        return type(amap).load(path)
