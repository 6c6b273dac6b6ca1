"""`headwise check multi-head-class FILE`: a reader's module against the definition of multi-head attention.

The module runs in the process of exercises, with random parameters, which are read from it. Its result is compared with
the definition, and with the definition with each known mistake: the one that gives the same numbers is the finding. If
none does, the last step that agrees is named.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.wording import COMMA, Bilingual, Message, joined, tr
from headwise_textbook.exercises.definition import MISTAKES, PARTS, Case, Weights, agree, explained, steps
from headwise_textbook.exercises.exercise import CLASS
from headwise_textbook.exercises.grade import MEMORY, Raised, Sandbox, Stopped, raised
from headwise_textbook.texts import read_toml

TASK = tr(
    "Write multi-head attention as a class, a `torch.nn.Module` with the width and the number of heads as arguments. "
    "`forward` has one input x, or queries, keys and values, as [b, n, d] (or, without projections, as [b, h, n, d]), "
    "and may have a mask: True where a query may see a key, or added to the scores."
)
STEP_NAMES = {
    "project": tr("projections"), "split": tr("splitting into heads"), "score": tr("scores"), "scale": tr("scaling"),
    "mask": tr("mask"), "softmax": tr("softmax"), "weigh": tr("weighted values"), "merge": tr("merging the heads"),
    "output": tr("output projection"), "dropout": tr("dropout"),
}  # fmt: skip
NAMES = read_toml(__package__, "arguments.toml")
INSIDE = f"NAMES = {NAMES!r}\n" + (Path(__file__).parent / "inside.py").read_text(encoding="utf-8")
WIDTH, HEADS, BATCH, LENGTHS = 15, 3, 2, (7, 5, 3)  # prime sizes differ; a length of d_k or h lets some mistakes run
FORMS = {
    "boolean": tr("boolean masks"), "whole": tr("boolean masks"), "additive": tr("masks that are added"),
    "padding": tr("padding masks"), "lengths": tr("lengths of sequences"),
}  # fmt: skip
_OF_LENGTHS = r"valid_?len|(^|_)len(gth)?s?$"  # arguments with the number of keys of each sequence
EVEN_WIDTH = 24
HIDDEN = -1e4  # scores below it are hidden, as −∞ is


@dataclass(frozen=True)
class Report:
    """What was found. finding: the name of the mistake, "" if there is none or if its cause was not identified."""

    passed: bool
    lines: tuple[Bilingual, ...]
    finding: str = ""


@dataclass(frozen=True)
class _Found:
    theirs: Tensor
    records: list[list[Any]]  # line, name, value and function
    x: tuple[Tensor, Tensor, Tensor]
    failed: str = ""  # the error at the usual length, if this is another one


def grade_class(
    source: str, *, file: str = "answer.py", only: str | None = None, seconds: float = 10.0, memory: int = MEMORY,
    seed: int = 0,
) -> Report:  # fmt: skip
    """Compare a module with the definition. only: the name of the class, None for the one that there is."""
    together = ""
    try:
        with Sandbox(source, file, "candidates", seconds=seconds, memory=memory, beside=INSIDE) as sandbox:
            together = sandbox.together
            names = sandbox()
            if only is not None and only not in names:
                listed = ", ".join(names) or "-"
                said = tr("{file} has no module {only}; it has: {listed}", file=file, only=only, listed=listed)
                return _refused(said)
            if not names:
                return _refused(tr("{file} defines no torch.nn.Module with a `forward`", file=file))
            if only is None and len(names) > 1:
                listed = ", ".join(names)
                said = tr("{file} defines {count} modules: {listed}; name one of them: --module {first}", file=file,
                    count=len(names), listed=listed, first=names[-1],
                )  # fmt: skip
                return _refused(said)
            report = _Checked(sandbox, only or names[0], seed).report()
    except Stopped as end:
        report = _refused(end.message)
    except Raised as error:
        report = _refused(raised(str(error)))
    if together:
        said = tr("  the code was limited in time and memory, but not kept from your files and network: {why}",
            why=together,
        )  # fmt: skip
        report = replace(report, lines=(*report.lines, said))
    return report


class _Checked:
    """One module in a sandbox, and how it is called."""

    def __init__(self, sandbox: Sandbox, name: str, seed: int) -> None:
        self.sandbox, self.name, self.seed = sandbox, name, seed
        self.generator = torch.Generator().manual_seed(seed)

    def report(self) -> Report:
        """Compare the module; an error of its own is given with the arguments of its constructor."""
        try:
            return self._report()
        except Raised as error:
            why: Message = raised(str(error))
            if given := self.sandbox.call("called_with"):
                why = tr("{why}; called with {given}", why=why, given=given)
            return _refused(why)

    def _report(self) -> Report:
        """Build the module, and compare it without a mask, with one, and with dropout."""
        try:
            built = self.sandbox.call("build", self.name, WIDTH, HEADS, 32, 0.5, self.seed)
        except Raised:  # some classes need an even width
            built = self.sandbox.call("build", self.name, EVEN_WIDTH, HEADS, 32, 0.5, self.seed)
        if len(built) == 1:
            said = tr("{name} needs an argument {argument!r}, whose meaning is not known; give it a default",
                name=self.name, argument=built[0],
            )  # fmt: skip
            return _refused(said)
        self.width, self.heads, rows, arguments, self.dropouts = built
        try:
            self.weights = _weights(rows, self.width, self.heads)
        except (RuntimeError, IndexError):  # parameters of other shapes: the result alone is compared
            self.weights = [{}]
        masks = [one for one, _ in arguments if re.search(rf"mask|^bias$|{_OF_LENGTHS}", one.lower())]
        self.inputs = [one for one, required in arguments if required and one not in masks]
        roles = {one: _role(one)[:1] for one in self.inputs}  # queries first, also where the class has them last
        if "q" in roles.values() and len({*roles.values()} - {"", "o"}) == len(roles):
            self.inputs.sort(key=lambda one: "qkv".index(roles[one]))
        needed = {one for one, required in arguments if required}
        self.mask = next((one for one in masks if "padding" not in one), masks[0] if masks else "")
        self.needs_mask = self.mask in needed
        if len(self.inputs) not in (1, 2, 3) or self.width % self.heads:
            said = tr("{name}.forward needs {names}; expected one input, or queries, keys and values", name=self.name,
                names=", ".join(self.inputs) or "-",
            )  # fmt: skip
            return _refused(said)
        found = self._called()
        cases = [
            Case(found.x, self.heads, weights, mask, strided, apart=found.theirs.ndim == 4 and found.x[0].ndim == 4)
            for mask in (None, torch.ones(2 * (found.x[0].shape[-2],), dtype=torch.bool).tril())
            for weights in self.weights for strided in itertools.product((False, True), repeat=2)
        ]  # fmt: skip
        usable = _nearest_first(cases)
        if not usable:
            return _refused(tr("the parameters of {name} have other shapes than W_Q, W_K, W_V and W_O", name=self.name))
        why = explained(found.theirs, usable, self._allowed(found))
        if why is None:
            return self._unknown(found, usable)
        case, mistakes = why
        mistakes = mistakes or self._lacking(case)
        if mistakes:
            return self._wrong(found, case, mistakes)
        says = [tr("a causal mask of its own")] if case.mask is not None else []
        if self.mask and (masked := self._with_mask(case, says)):
            return masked
        return self._with_dropout(found) or self._right(case, says)

    def _allowed(self, found: _Found, mask: bool = False) -> Any:
        """Which mistakes are possible with these inputs."""
        given = found.x[0].ndim == 4
        unlike = ("mask/strict", "mask/loose") if mask else ()

        def allowed(one: str) -> bool:
            step = one.split("/")[0]
            if given and step in ("project", "split", "output"):
                return False
            if len(self.inputs) == 1 and one.startswith("project/from"):
                return False
            return one not in unlike

        return allowed

    def _called(self) -> _Found:
        """The result without a mask, at the first length at which there is one. Raised: if there is none."""
        first = None
        four = not any("q" in weights for weights in self.weights)
        for length in LENGTHS:
            for axes in (4, 3) if four else (3, 4):
                shape = [BATCH, length, self.width]
                if axes == 4:
                    shape = [BATCH, self.heads, length, self.width // self.heads]
                x = [torch.randn(shape, generator=self.generator) for _ in self.inputs]
                x += x[-1:] * (3 - len(x))
                try:
                    theirs, records = self._run(x, self._open(length))
                except Raised as error:
                    first = first or error
                    continue
                return _Found(theirs, records, (x[0], x[1], x[2]), str(first) if first and length != 7 else "")
        raise first or Raised("")

    def _run(self, x: Sequence[Tensor], mask: dict[str, Tensor], *, training: bool = False, dropout: bool = False,
        seed: int = 0,
    ) -> tuple[Tensor, list[list[Any]]]:  # fmt: skip
        names = [*self.inputs, *mask]
        given = [*x[: len(self.inputs)], *mask.values()]
        theirs, records = self.sandbox.call("call", names, given, training, not dropout, seed)
        if not isinstance(theirs, Tensor):
            raise Raised(f"returned a value of type {type(theirs).__name__}; expected a tensor")
        return theirs, records

    def _open(self, length: int) -> dict[str, Tensor]:
        """A mask that shows all keys, if the class needs one."""
        if not self.needs_mask:
            return {}
        if re.search(_OF_LENGTHS, self.mask.lower()):
            return {self.mask: torch.full((BATCH,), length)}
        return {self.mask: torch.ones(BATCH if "padding" in self.mask else length, length, dtype=torch.bool)}

    def _lacking(self, case: Case) -> tuple[str, ...]:
        """The projections for which the module has no parameters."""
        if case.x[0].ndim == 4:
            return ()
        lacking = [f"project/raw-{x}" for x in "qkv" if x not in case.weights]
        return (*lacking, *([] if "o" in case.weights else ["output/missing"]))

    def _with_mask(self, right: Case, says: list[Message]) -> Report | None:
        """Compare with masks of each form until one agrees; then hide all keys from a query."""
        first, why = None, None
        for form, given, mask in self._masks(right):
            case = replace(right, mask=mask)
            try:
                theirs, records = self._run(right.x, {self.mask: given})
            except Raised as error:
                first = first or error
                continue
            found = _Found(theirs, records, right.x)
            if agree(theirs, steps(case)["output"]):
                says.append(FORMS[form])
                return self._dark(case, form, given.shape) if form in ("boolean", "whole", "additive") else None
            if form != "additive" and why is None:
                reason = explained(theirs, [case], self._allowed(found, mask=True), pairs=0)
                why = (found, case, reason[1]) if reason else None
            elif form == "additive" and why is None:
                return self._unknown(found, [case])
        if why is not None:
            return self._wrong(*why)
        if first is not None and self.needs_mask:
            raise first
        if first is not None:
            says.append(tr("its mask was not checked: {why}", why=raised(str(first))))
        return None

    def _masks(self, right: Case) -> list[tuple[str, Tensor, Tensor]]:
        """The form of a mask, what the class gets, and what the definition gets: for each form that it may have."""
        n = right.x[0].shape[-2]
        own = torch.ones(n, n, dtype=torch.bool) if right.mask is None else right.mask
        square = (torch.rand(n, n, generator=self.generator) < 0.6) | torch.eye(n, dtype=torch.bool)
        lengths = torch.tensor([n - 1, n - 2])
        padding = torch.arange(n) < lengths[:, None]
        padded = padding[:, None, None, :] & own
        if re.search(_OF_LENGTHS, self.mask.lower()):
            return [("lengths", lengths, padded)]
        squares = [
            (form, _mask(square & own, form).expand(shape).contiguous(), square & own)
            for form in ("boolean", "whole", "additive")
            for shape in ((n, n), (BATCH, 1, n, n), (BATCH, n, n))
        ]
        pads = [("padding", padding, padded), ("padding", padding.long(), padded)]
        if "padding" in self.mask:  # PyTorch's is True where a key is hidden
            return [*pads, ("padding", ~padding, padded), *squares]
        return [*squares, *pads]

    def _dark(self, case: Case, form: str, shape: tuple[int, ...]) -> Report | None:
        mask = case.mask.clone()  # type: ignore[union-attr]
        mask[2] = False
        theirs, _ = self._run(case.x, {self.mask: _mask(mask, form).expand(shape).contiguous()})
        if not (bad := int((~theirs.isfinite()).sum())):
            return None
        said = tr(
            "a query that may see no key gets NaN: {bad} of {all} numbers; softmax of a row of −∞ is 0/0. Expected 0: "
            "set the weights of such rows to 0, for example by torch.nan_to_num",
            bad=bad, all=theirs.numel(),
        )  # fmt: skip
        return Report(False, (_head(STEP_NAMES["mask"], said),), "mask/dark")

    def _with_dropout(self, found: _Found) -> Report | None:
        """Evaluation is to have none, and training some if the class has an argument for it."""
        mask = self._open(found.x[0].shape[-2])
        one, two = (self._run(found.x, mask, dropout=True, seed=seed)[0] for seed in (1, 2))
        step = STEP_NAMES["dropout"]
        if not agree(one, two):
            said = tr("it is active in evaluation: after .eval(), two calls with the same input differ by up to "
                "{most:.3g}; give it training=self.training, or use nn.Dropout", most=float((one - two).abs().max()),
            )  # fmt: skip
            return Report(False, (_head(step, said),), "dropout/evaluation")
        one, two = (self._run(found.x, mask, dropout=True, training=True, seed=seed)[0] for seed in (1, 2))
        if self.dropouts and agree(one, two):
            said = tr("the class has an argument for it, but two calls in training are equal: it is never applied")
            return Report(False, (_head(step, said),), "dropout/never")
        return None

    def _wrong(self, found: _Found, case: Case, mistakes: tuple[str, ...]) -> Report:
        """Name the mistake, and where it shows first."""
        first = mistakes[0]
        out: list[Bilingual] = [_head(STEP_NAMES[first.split("/")[0]], _filled(first, case))]
        part = PARTS[first.split("/")[0]]
        if (what := first.partition("-")[2][:1]) in ("q", "k", "v"):
            part = part.replace("q", what)
        if not case.apart or part not in ("merged", "output"):
            try:
                ours, theirs = steps(case)[part], steps(case, *mistakes)[part]
                out += _compared(found, part, theirs, ours)
            except (RuntimeError, KeyError):
                pass
        out += [tr("  then also: {said}", said=_filled(one, case)) for one in mistakes[1:]]
        if found.failed:
            out.append(tr("  at n = {n} the shapes do not fit: {failed}", n=LENGTHS[0], failed=raised(found.failed)))
        out.append(tr("  The definition with this change alone gives your numbers.") if len(mistakes) == 1
            else tr("  The definition with these changes gives your numbers."))  # fmt: skip
        return Report(False, tuple(out), first)

    def _unknown(self, found: _Found, cases: Sequence[Case]) -> Report:
        """Say which step is the last that agrees; the cause was not identified."""
        ours = steps(cases[0])
        if found.theirs.shape != ours["output"].shape:
            said = tr("the result is {theirs}, expected {ours}", theirs=str(list(found.theirs.shape)),
                ours=str(list(ours["output"].shape)),
            )  # fmt: skip
        elif not bool(found.theirs.isfinite().all()):
            said = tr("{count} of {all} numbers of the result are NaN or infinite",
                count=int((~found.theirs.isfinite()).sum()), all=found.theirs.numel(),
            )  # fmt: skip
        else:
            most = float((found.theirs - ours["output"]).abs().max())
            said = tr("the result differs from the definition by up to {most:.3g}", most=most)
        out: list[Bilingual] = [_head(tr("result"), said)]
        seen = [
            (part, line, name)
            for case in cases
            for part, value in steps(case).items()
            for one in (value, *(value.unbind(1) if value.ndim == 4 else ()))
            for line, name, theirs, _ in found.records
            if part != "output" and _alike(theirs, one)
        ]
        if seen:
            order = list(ours)
            part, line, name = max(seen, key=lambda one: order.index(one[0]))
            out.append(tr("  line {line}: {name} still agrees ({part}); what differs comes after it", line=line,
                name=name, part=part,
            ))  # fmt: skip
        if found.failed:
            out.append(tr("  at n = {n} the shapes do not fit: {failed}", n=LENGTHS[0], failed=raised(found.failed)))
        out.append(tr("  None of the {count} known mistakes gives these numbers: the cause was not identified.",
            count=len(MISTAKES),
        ))  # fmt: skip
        return Report(False, tuple(out))

    def _right(self, case: Case, says: Sequence[Message]) -> Report:
        said = tr("{name} agrees with the definition", name=self.name)
        facts = joined([tr("{h} heads of {d_k}", h=self.heads, d_k=case.names["d_k"]), *says], COMMA)
        return Report(True, (tr("✓ {exercise}: {said} ({facts})", exercise=CLASS, said=said, facts=facts),))


def _head(step: Message, said: Bilingual) -> Message:
    return tr("✗ {exercise}: {step}: {said}", exercise=CLASS, step=step, said=said)


def _refused(said: Message) -> Report:
    return Report(False, (tr("✗ {name}: {stopped}", name=CLASS, stopped=said),))


def _filled(mistake: str, case: Case) -> Bilingual:
    said = MISTAKES[mistake]
    return Bilingual(str(said).format(**case.names), said.zh.format(**case.names))


def _compared(found: _Found, part: str, theirs: Tensor, ours: Tensor) -> list[Bilingual]:
    """Where the step is in the reader's file, with shapes and the first number that differs."""
    at, whole = None, [(theirs, ours)]
    if theirs.ndim == 4 and theirs.shape == ours.shape:  # a class may compute each head by itself
        whole += [(theirs[:, head], ours[:, head]) for head in range(theirs.shape[1])]
    for one, other in whole:
        at = next(((line, name) for line, name, value, _ in found.records if _alike(value, one)), None)
        if at is not None:
            theirs, ours = one, other
            break
    name = part if at is None else at[1]
    place: Bilingual = Bilingual("", "") if at is None else tr("line {line}: ", line=at[0])
    if theirs.shape != ours.shape:
        said = tr("  {place}{name} is {theirs}, expected {ours}", place=place, name=name,
            theirs=str(list(theirs.shape)), ours=str(list(ours.shape)),
        )  # fmt: skip
        return [said]
    theirs, ours = theirs.clamp(min=HIDDEN), ours.clamp(min=HIDDEN)
    wrong = ~torch.isclose(theirs, ours, rtol=2e-4, atol=2e-4)
    if not wrong.any():
        return []
    spot = tuple(wrong.nonzero()[0].tolist())
    return [tr("  {place}{name} is {shape}; {name}{spot} is {theirs:.4g}, expected {ours:.4g}", place=place, name=name,
        shape=str(list(theirs.shape)), spot=str(list(spot)), theirs=theirs[spot].item(), ours=ours[spot].item(),
    )]  # fmt: skip


def _alike(value: Tensor, other: Tensor) -> bool:
    """Whether tensors agree where a large negative number is as good as −∞."""
    return agree(value.clamp(min=HIDDEN), other.clamp(min=HIDDEN)) if value.is_floating_point() else False


def _mask(mask: Tensor, form: str) -> Tensor:
    if form == "additive":
        return torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    return mask if form == "boolean" else mask.long()


def _nearest_first(cases: list[Case]) -> list[Case]:
    """Cases whose results differ, the usual ones first."""
    found: list[tuple[Tensor, Case]] = []
    for case in cases:
        try:
            value = steps(case)["output"]
        except RuntimeError:
            continue
        if not any(agree(value, other) for other, _ in found):
            found.append((value, case))
    plain, causal = ([case for _, case in found if (case.mask is None) == unmasked] for unmasked in (True, False))
    return [*plain[:1], *causal[:1], *plain[1:], *causal[1:]]


def _role(path: str) -> str:
    """Which matrix a parameter is by its name: "qkv", "kv", "q", "k", "v", "o", or "" if the name does not say."""
    name = path.lower().removesuffix(".weight").removesuffix(".bias").removesuffix("_weight").removesuffix("_bias")
    if re.search(r"qkv|c_attn|in_proj|query_key_value", name):
        return "qkv"
    if re.search(r"(^|[._]|to|w)kv($|[._])", name):
        return "kv"
    for role, word in (("q", "quer"), ("k", "key"), ("v", "value"), ("o", "out|dense|final|merge|unify|combine")):
        if re.search(rf"{word}|(^|[._]|w|to|fc|lin|linear|b){role}s?($|[._]|\d|proj|lin)", name):
            return role
    return "o" if re.search(r"(^|[._])(c_)?proj\d?$", name) else ""


def _weights(rows: list[list[Any]], width: int, heads: int) -> list[Weights]:
    """What the parameters may be as matrices of q, k, v and o: one way if names and kinds say it, else several.

    A square parameter may be W or Wᵀ, and a matrix of several parts may have them in any order: each is as good. A
    matrix [d_k, d_k] that projects each head by itself is a block of a matrix of all heads.
    """
    roles: dict[str, str] = {}
    left = iter("qkvo")
    for path, _, _ in rows:
        owner = path.removesuffix(".weight").removesuffix(".bias")
        if owner not in roles:
            roles[owner] = _role(path) or next((one for one in left if one not in roles.values()), "")
    parts: dict[str, list[tuple[Tensor, bool]]] = {}  # matrices, and whether their orientation is open
    biases: dict[str, list[Tensor]] = {}
    for path, values, kind in rows:
        role = roles[path.removesuffix(".weight").removesuffix(".bias")]
        if not role:
            continue
        if values.ndim == 1 or "bias" in path:
            biases.setdefault(role, []).append(values.flatten())
        elif values.ndim == 2:
            packed_rows = role in ("qkv", "kv") and values.shape[0] > values.shape[1]
            matrix = values.mT if kind == "Linear" or packed_rows else values
            parts.setdefault(role, []).append((matrix, kind == "" and values.shape[0] == values.shape[1]))
        elif values.ndim == 3:  # a matrix for each head
            values = values if role == "o" or values.shape[1] == max(values.shape) else values.mT
            matrix = values.flatten(0, 1) if role == "o" else values.permute(1, 0, 2).flatten(1)
            parts.setdefault(role, []).append((matrix, False))
    for role in "qkv":
        given, narrow = parts.get(role, []), 2 * (width // heads,)
        if heads > 1 and len(given) in (1, heads) and all(w.shape == narrow for w, _ in given):
            blocks = [w for w, _ in given] * (heads // len(given))
            parts[role] = [(torch.block_diag(*blocks), given[0][1])]
            biases[role] = biases.get(role, []) * (heads // len(given))
    bias = {role: torch.cat(given) for role, given in biases.items() if given}
    ways: list[Weights] = []
    for turned in (False, True) if any(free for given in parts.values() for _, free in given) else (False,):
        whole = {
            role: torch.cat([w.mT if turned and free else w for w, free in given], -1) for role, given in parts.items()
        }
        alone = {role: (w, bias.get(role)) for role, w in whole.items() if len(role) == 1}
        packed = next((role for role in ("qkv", "kv") if role in whole), "")
        orders = itertools.product(itertools.permutations(range(3)), itertools.permutations(packed)) if packed else ()
        ways += [alone] if not packed else []
        for axes, letters in orders:
            split = _unpacked(whole[packed], len(packed), heads, axes)
            shifts = _unpacked(bias[packed], len(packed), heads, axes) if packed in bias else [None] * len(packed)
            ways.append({**alone, **dict(zip(letters, zip(split, shifts, strict=True), strict=True))})
    return ways


def _unpacked(matrix: Tensor, count: int, heads: int, axes: tuple[int, ...]) -> list[Tensor]:
    """The matrices that are in one: its columns are the axes (matrix, head, channel) in some order."""
    sizes = (count, heads, matrix.shape[-1] // (count * heads))
    split = matrix.unflatten(-1, [sizes[axis] for axis in axes])
    lead = matrix.ndim - 1
    back = [lead + axes.index(axis) for axis in range(3)]
    return list(split.permute(back[0], *range(lead), back[1], back[2]).flatten(-2))
