"""One model of a type with inputs for it, what its own code computes of them, and how far numbers may lie apart.

That is measured for each output: the model's own code runs again with every weight moved by one unit in the last place,
and `FACTOR` times what that changes is allowed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from registry_inputs import BATCH, Inputs, candidates
from registry_models import configurations, make_model, model_class
from registry_softmax import Softmaxes
from torch import Tensor, nn

from headwise.models.adapters import huggingface

FACTOR, FLOOR, UNSTABLE = 30.0, 4e-6, 1e-2
PADDED = 4  # tokens of the second batch entry

Outputs = dict[str, Tensor]


class NotApplicable(Exception):
    """A check that says nothing about this model, and why."""


class Partly(Exception):
    """Right, but not all of it."""


class Wrong(AssertionError):
    """Headwise computes something else than the model's own code."""


# --- running a model


def leaves(x: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating tensors in what a model returns, by their place; no caches and no attentions."""
    if isinstance(x, Tensor):
        if x.is_floating_point() and x.numel():
            yield path, x.masked_fill(x.isinf(), 0.0)  # what a model itself forbids
    elif isinstance(x, dict):
        for name, part in x.items():
            if "attention" not in str(name) and "past_key" not in str(name):
                yield from leaves(part, f"{path}.{name}" if path else str(name))
    elif isinstance(x, list | tuple):
        for i, part in enumerate(x):
            yield from leaves(part, f"{path}[{i}]")
    elif hasattr(x, "__dataclass_fields__"):
        yield from leaves(vars(x), path)


def run(model: Any, given: Inputs, **more: Any) -> Any:
    """One call, with the same random numbers each time."""
    names = signature(model.forward).parameters
    if "use_cache" in names and "use_cache" not in more:
        more["use_cache"] = False
    torch.manual_seed(0)
    return model(**{**given, **more})


def outputs(model: Any, given: Inputs, **more: Any) -> Outputs:
    """What a call computes, by name."""
    found = dict(leaves(run(model, given, **more)))
    if not found:
        raise NotApplicable("it returns no floating tensor")
    return found


@contextmanager
def nudged(model: nn.Module, seed: int) -> Iterator[None]:
    """Every weight one unit in the last place up or down."""
    kept = [p.detach().clone() for p in model.parameters()]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                up = torch.rand(p.shape, generator=generator) < 0.5
                p.copy_(torch.nextafter(p, torch.where(up, torch.inf, -torch.inf).to(p.dtype)))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, before in zip(model.parameters(), kept, strict=True):
                p.copy_(before)


@contextmanager
def switched(model: Any) -> Iterator[Any]:
    """The model with headwise's attention, and then with its own again."""
    huggingface.convert(model)
    try:
        yield model
    finally:
        restore(model)


def restore(model: Any) -> None:
    """The model with its own attention again, if it has it no longer."""
    if huggingface.was_converted(model):
        huggingface.restore(model)


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """What training changes beside weights, such as running means, is put back."""
    before = {name: x.clone() for name, x in model.named_buffers()}
    mode = model.training
    try:
        yield
    finally:
        model.train(mode)
        with torch.no_grad():
            for name, x in model.named_buffers():
                if name in before:
                    x.copy_(before[name])


# --- one model, ready to be checked


class Case:
    """A model of one type with inputs that its own code takes, and what that computes.

    Attributes:
        model, given, kind: the model, what it is called with, and of what. how: which configuration.
        theirs: the outputs of its own code; allowed: how far each may lie apart.
        attention: the modules that compute attention; calls: how often each does in one call of the model.
    """

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type
        self.model_class = model_class(model_type)
        self.how, self.kind, self.model, self.given, self.theirs = self._made()
        mode = Softmaxes(self.model)
        with mode.handles, mode, torch.no_grad():
            run(self.model, self.given)
        self.attention, self.calls = mode.found, mode.calls
        with torch.no_grad():
            self.allowed, self.unstable = self.measured(lambda: outputs(self.model, self.given), self.theirs)
        self.state = {name: x.clone() for name, x in self.model.state_dict().items()}

    def _made(self) -> tuple[str, str, Any, Inputs, Outputs]:
        why: list[str] = []
        for how, config in configurations(self.model_type):
            if isinstance(config, Exception):
                why.append(f"{how}: configuration: {short_error(config)}")
                continue
            try:
                model = make_model(self.model_class, config)
            except Exception as error:
                why.append(f"{how}: model: {short_error(error)}")
                continue
            tried: list[str] = []
            try:
                for kind, given in candidates(model, self.model_type):
                    if (theirs := self._computed(model, given, tried)) is not None:
                        return how, kind, model, given, theirs
            except ValueError as error:
                tried.append(short_error(error))
            why.append(f"{how}: {' | '.join(dict.fromkeys(tried)) or 'no inputs found'}")
        raise NotApplicable(" || ".join(why))

    def _computed(self, model: Any, given: Inputs, tried: list[str]) -> Outputs | None:
        """What the model's own code computes; None if it does not take such inputs, and why is added to `tried`."""
        try:
            with torch.no_grad():
                theirs = outputs(model, given)
        except Exception as error:
            tried.append(short_error(error))
            return None
        if all(torch.isfinite(x).all() for x in theirs.values()):
            return theirs
        tried.append("its own outputs are not finite")
        return None

    def measured(self, again: Callable[[], Outputs], theirs: Outputs) -> tuple[dict[str, float], dict[str, float]]:
        """How far each output may lie apart, and those that one unit in the last place changes too much."""
        moved = dict.fromkeys(theirs, 0.0)
        for seed in (1, 2):
            with nudged(self.model, seed):
                for name, x in again().items():
                    if name in moved and x.shape == theirs[name].shape:
                        moved[name] = max(moved[name], float((x - theirs[name]).abs().max()))
        sizes = {name: float(x.abs().max()) for name, x in theirs.items()}
        allowed = {name: max(FACTOR * moved[name], FLOOR * sizes[name], 1e-12) for name in theirs}
        return allowed, {
            name: moved[name] / max(sizes[name], 1e-30)
            for name in theirs
            if allowed[name] > max(UNSTABLE * sizes[name], 1e-12)
        }

    def compare(
        self, ours: Outputs, theirs: Outputs, allowed: dict[str, float] | None = None, real: Tensor | None = None,
        factor: float = 1.0,
    ) -> None:  # fmt: skip
        """Raise `Wrong` if an output lies too far apart; `real`: the places [b, n] that are no padding."""
        allowed = self.allowed if allowed is None else allowed
        if ours.keys() != theirs.keys():
            raise Wrong(f"outputs {sorted(ours.keys() ^ theirs.keys())} are not in both")
        seen = 0
        for name, their in theirs.items():
            mine = ours[name]
            if mine.shape != their.shape:
                raise Wrong(f"{name}: shape {tuple(mine.shape)} instead of {tuple(their.shape)}")
            if real is not None:
                if their.shape[:2] == real.shape:
                    mine, their = mine[real], their[real]
                elif their.shape[0] == len(real):
                    mine, their = mine[real.all(-1)], their[real.all(-1)]
                else:
                    continue
            if name in self.unstable or not their.numel():
                continue
            seen += 1
            error, bound = float((mine - their).abs().max()), factor * allowed.get(name, 0.0)
            if not error <= bound:
                largest = max(float(their.abs().max()), 1e-30)
                said = f"{name}: differs by {error:.1e}, {error / largest:.1e} of its largest number"
                raise Wrong(f"{said}; allowed {bound:.1e}")
        if not seen:
            worst = max(self.unstable.values(), default=0.0)
            raise NotApplicable(f"one unit in the last place changes its own outputs by {worst:.0e}")

    def takes(self, *names: str) -> bool:
        """Whether the forward has all these arguments."""
        return all(name in signature(self.model.forward).parameters for name in names)

    @property
    def text(self) -> bool:
        return "input_ids" in self.given and self.given["input_ids"].ndim == 2

    def padding(self, side: str) -> tuple[Inputs, Tensor]:
        """The inputs with an attention mask, and the places that are no padding."""
        if not self.text or not self.takes("attention_mask"):
            raise NotApplicable("it takes no padding mask")
        n = self.given["input_ids"].shape[1]
        mask = torch.ones(BATCH, n, dtype=torch.long)
        if self.kind != "text" and side == "left":
            raise NotApplicable("its image lies on the left")
        mask[1, slice(0, PADDED) if side == "left" else slice(n - PADDED, None)] = 0
        return {**self.given, "attention_mask": mask}, mask.bool()

    def generates(self) -> bool:
        return bool(self.model.can_generate()) and self.text


def short_error(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"
