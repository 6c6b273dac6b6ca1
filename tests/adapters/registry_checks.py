"""Some twenty checks of one model type: what headwise computes is what the model's own code ("eager") computes.

How far numbers may lie apart is measured for each output: the model's own code runs again with every weight moved by
one unit in the last place, and `FACTOR` times what that changes is allowed.
"""

import copy
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch
from registry_inputs import BATCH, LENGTH, Inputs, candidates, tokens
from registry_models import configurations, make_model, model_class
from registry_overrides import PAD_FREE
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from headwise.adapters.huggingface.mask_tensor import MaskTensor
from headwise.errors import HeadwiseError

FACTOR, FLOOR, UNSTABLE = 30.0, 4e-6, 1e-2
PADDED = 4  # tokens of the second batch entry
MEASURES = ("entropy", "max_logit", "sink_mass")

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
    hw.switch(model)
    try:
        yield model
    finally:
        hw.restore(model)


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


# --- where a model computes attention


# Called attention, or in it, but no weights of keys for queries: sampled places, mixed streams, gates.
_OTHERS = "deformableattention", "hyperconnection", "gatedattention", "router"


class Softmaxes(TorchDispatchMode):
    """Within it: the modules whose own code computes attention weights or calls PyTorch's attention, by name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {module: name for name, module in model.named_modules()}
        self.stack: list[nn.Module] = []
        self.found: dict[str, nn.Module] = {}
        self.calls: Counter[str] = Counter()
        self.handles = ExitStack()
        for module in model.modules():
            before = module.register_forward_pre_hook(lambda module, _: self.stack.append(module))
            after = module.register_forward_hook(lambda *_: self.stack.pop() and None, always_call=True)
            self.handles.callback(before.remove)
            self.handles.callback(after.remove)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name()
        if "softmax" in name and "log_softmax" not in name and "backward" not in name:
            self._see(out, "scores")
        elif "scaled_dot_product" in name and "backward" not in name:
            self._see(out[0] if isinstance(out, tuple) else out, "fused")
        return out

    def _see(self, out: Tensor, how: str) -> None:
        inside = [m for m in self.stack if type(m) is not nn.Softmax and type(m) is not nn.Dropout]
        if not inside or out.ndim < 3:
            return
        module = inside[-1]
        called = " ".join(f"{type(m).__name__} {self.names.get(m, '').rpartition('.')[2]}" for m in inside[-2:]).lower()
        attends = "attention" in called or "attn" in called
        if any(name in called for name in _OTHERS) or (how == "scores" and not attends):
            return
        if out.shape[-1] == 1:
            return
        name = self.names.get(module, type(module).__name__)
        self.found[name] = module
        self.calls[name] += 1


def attention_modules(model: Any, given: Inputs) -> tuple[dict[str, nn.Module], Counter[str]]:
    """The modules that compute attention in the model's own code, and how often in one call."""
    mode = Softmaxes(model)
    with mode.handles, mode, torch.no_grad():
        run(model, given)
    return mode.found, mode.calls


# --- one model, ready to be checked


class Case:
    """A model of one type with inputs that its own code takes, and what that computes.

    Attributes:
        model, given, kind: the model, what it is called with, and of what. how: which configuration.
        theirs: the outputs of its own code; allowed: how far each may lie apart.
        attention: the modules that compute attention.
    """

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type
        self.model_class = model_class(model_type)
        self.how, self.kind, self.model, self.given, self.theirs = self._made()
        self.attention, self.calls = attention_modules(self.model, self.given)
        with torch.no_grad():
            self.allowed, self.unstable = self._allowed(lambda: outputs(self.model, self.given), self.theirs)
        self.state = {name: x.clone() for name, x in self.model.state_dict().items()}
        self.refused: str | None = None

    def _made(self) -> tuple[str, str, Any, Inputs, Outputs]:
        why: list[str] = []
        for how, config in configurations(self.model_type):
            if isinstance(config, Exception):
                why.append(f"{how}: configuration: {_short(config)}")
                continue
            try:
                model = make_model(self.model_class, config)
            except Exception as error:
                why.append(f"{how}: model: {_short(error)}")
                continue
            tried: list[str] = []
            for kind, given in candidates(model, self.model_type):
                try:
                    with torch.no_grad():
                        theirs = outputs(model, given)
                    if any(not torch.isfinite(x).all() for x in theirs.values()):
                        raise ValueError("its own outputs are not finite")
                    return how, kind, model, given, theirs
                except Exception as error:
                    tried.append(f"{kind}: {_short(error)}")
            why.append(f"{how}: {' | '.join(dict.fromkeys(tried)) or 'no inputs found'}")
        raise NotApplicable(" || ".join(why))

    def _allowed(self, again: Callable[[], Outputs], theirs: Outputs) -> tuple[dict[str, float], dict[str, float]]:
        """How far each output may lie apart, and those that one unit in the last place changes too much."""
        moved = {name: 0.0 for name in theirs}
        for seed in (1, 2):
            with nudged(self.model, seed):
                for name, x in again().items():
                    if name in moved and x.shape == theirs[name].shape:
                        moved[name] = max(moved[name], float((x - theirs[name]).abs().max()))
        sizes = {name: float(x.abs().max()) for name, x in theirs.items()}
        allowed = {name: max(FACTOR * moved[name], FLOOR * sizes[name], 1e-12) for name in theirs}
        return allowed, {
            name: moved[name] / max(sizes[name], 1e-30) for name in theirs if allowed[name] > max(UNSTABLE * sizes[name], 1e-12)
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
                raise Wrong(f"{name}: differs by {error:.1e}, {error / max(float(their.abs().max()), 1e-30):.1e} of its "
                            f"largest number; allowed {bound:.1e}")  # fmt: skip
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


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


# --- the checks: each raises Wrong, NotApplicable, HeadwiseError (refused), or anything else (a crash)


def same_outputs(case: Case) -> None:
    """Outputs are those of the model's own code."""
    with torch.no_grad(), switched(case.model):
        ours = outputs(case.model, case.given)
    case.compare(ours, case.theirs)


def same_bits_again(case: Case) -> None:
    """The same call gives the same bits."""
    with torch.no_grad(), switched(case.model):
        one, two = outputs(case.model, case.given), outputs(case.model, case.given)
    if any(not torch.equal(one[name], two[name]) for name in one):
        with torch.no_grad():
            again = outputs(case.model, case.given)
        if all(torch.equal(case.theirs[name], again[name]) for name in again):
            raise Wrong("two equal calls differ")
        raise NotApplicable("its own code is random")


def alone_as_in_a_batch(case: Case) -> None:
    """A batch entry is what it is alone."""
    def first(given: Inputs) -> Inputs:
        return {k: x[:1] if isinstance(x, Tensor) and x.ndim and len(x) == BATCH else x for k, x in given.items()}

    if any(isinstance(x, Tensor) and (not x.ndim or len(x) != BATCH) for x in case.given.values()):
        raise NotApplicable("its batch is packed in one row")

    def parts(found: Outputs, whole: Outputs) -> Outputs:
        return {name: found[name] for name in found if whole[name].ndim and len(whole[name]) == BATCH}

    with torch.no_grad():
        try:
            theirs = parts(outputs(case.model, first(case.given)), case.theirs)
        except Exception as error:
            raise NotApplicable(f"its own code does not take one entry: {_short(error)}") from None
        batch = {name: case.theirs[name][:1] for name in theirs}
        try:
            case.compare(theirs, batch)
        except Wrong:
            raise NotApplicable("its own code mixes batch entries") from None
        with switched(case.model):
            ours = outputs(case.model, first(case.given))
    case.compare({name: ours[name] for name in theirs}, batch)


def _padded(case: Case, side: str) -> None:
    given, real = case.padding(side)
    with torch.no_grad():
        try:
            theirs = outputs(case.model, given)
            other = dict(given)
            other["input_ids"] = torch.where(real, given["input_ids"], given["input_ids"].flip(0) + 1)
            leaking = outputs(case.model, other)
        except Exception as error:
            raise NotApplicable(f"its own code does not take it: {_short(error)}") from None
        allowed, _ = case._allowed(lambda: outputs(case.model, given), theirs)
        with switched(case.model):
            ours = outputs(case.model, given)
            unread = outputs(case.model, other)
    try:
        case.compare(leaking, theirs, allowed, real)
    except Wrong:
        raise NotApplicable("in its own code real tokens depend on padding") from None
    case.compare(ours, theirs, allowed, real)
    case.compare(unread, ours, allowed, real)


def padding_on_the_left(case: Case) -> None:
    """With padding on the left, the real places are those of the model's own code, whatever the padding is."""
    _padded(case, "left")


def padding_on_the_right(case: Case) -> None:
    """With padding on the right, too."""
    _padded(case, "right")


def padding_of_targets(case: Case) -> None:
    """With a padding mask of the decoder's tokens, too."""
    if "decoder_input_ids" not in case.given or not case.takes("decoder_attention_mask"):
        raise NotApplicable("it has no decoder beside its encoder")
    n = case.given["decoder_input_ids"].shape[1]
    mask = torch.ones(BATCH, n, dtype=torch.long)
    mask[1, -3:] = 0
    given = {**case.given, "decoder_attention_mask": mask}
    with torch.no_grad():
        try:
            theirs = outputs(case.model, given)
        except Exception as error:
            raise NotApplicable(f"its own code does not take it: {_short(error)}") from None
        allowed, _ = case._allowed(lambda: outputs(case.model, given), theirs)
        with switched(case.model):
            ours = outputs(case.model, given)
    case.compare(ours, theirs, allowed, mask.bool())


def _gradients(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of the parameters, and of the inputs that have any."""
    given = {k: x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
             for k, x in case.given.items()}  # fmt: skip
    floats = {k: x for k, x in given.items() if isinstance(x, Tensor) and x.requires_grad}
    weights = {name: p for name, p in case.model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(11)
    loss = torch.zeros(())
    for name, x in outputs(case.model, given).items():
        if name not in case.unstable and x.requires_grad:
            loss = loss + (x.float() * torch.randn(x.shape, generator=generator)).sum() / max(1e-6, float(x.detach().abs().max()))
    if not loss.requires_grad:
        raise NotApplicable("its outputs have no gradient")
    found = torch.autograd.grad(loss, [*weights.values(), *floats.values()], allow_unused=True)
    named = dict(zip([*weights, *floats], found, strict=True))
    return ({name: named[name] for name in weights if named[name] is not None},
            {name: named[name] for name in floats if named[name] is not None})  # fmt: skip


def _same_gradients(case: Case, which: int) -> None:
    try:
        theirs = _gradients(case)[which]
        moved = {name: 0.0 for name in theirs}
        for seed in (1, 2):
            with nudged(case.model, seed):
                for name, x in _gradients(case)[which].items():
                    moved[name] = max(moved.get(name, 0.0), float((x - theirs[name]).abs().max()))
    except NotApplicable:
        raise
    except Exception as error:
        raise NotApplicable(f"its own code has no gradients: {_short(error)}") from None
    if not theirs:
        raise NotApplicable("no inputs are numbers")
    with switched(case.model):
        ours = _gradients(case)[which]
    largest = max(float(x.abs().max()) for x in theirs.values())
    for name in ours.keys() | theirs.keys():
        mine, their = ours.get(name), theirs.get(name)
        if mine is None or their is None:
            there = their if mine is None else mine
            if bool(there.abs().max() > 1e-6 * largest):
                raise Wrong(f"gradient of {name}: only {'theirs' if mine is None else 'ours'} is there")
            continue
        bound = max(FACTOR * moved[name], 2 * FLOOR * largest)
        error = float((mine - their).abs().max())
        if bound > UNSTABLE * largest and error <= largest:
            continue
        if not error <= bound:
            raise Wrong(f"gradient of {name}: differs by {error:.1e}, {error / largest:.1e} of the largest; allowed {bound:.1e}")


def gradients_of_weights(case: Case) -> None:
    """Gradients of all parameters are those of the model's own code."""
    _same_gradients(case, 0)


def gradients_of_inputs(case: Case) -> None:
    """Gradients of the inputs that are numbers, too."""
    _same_gradients(case, 1)


def training_mode(case: Case) -> None:
    """In training mode, without dropout, outputs are those of the model's own code."""
    with torch.no_grad(), kept_buffers(case.model):
        def training() -> Outputs:
            with kept_buffers(case.model):
                case.model.train()
                return outputs(case.model, case.given)

        try:
            theirs = training()
            with kept_buffers(case.model):
                case.model.train()
                torch.manual_seed(1)
                other = dict(leaves(case.model(**case.given, **({"use_cache": False} if case.takes("use_cache") else {}))))
        except Exception as error:
            raise NotApplicable(f"its own code does not run in training mode: {_short(error)}") from None
        if any(name not in other or not torch.equal(x, other[name]) for name, x in theirs.items()):
            raise NotApplicable("its own code is random in training")
        allowed, _ = case._allowed(training, theirs)
        with switched(case.model):
            ours = training()
    case.compare(ours, theirs, allowed)


def _steps(case: Case, ids: Tensor, first: int) -> Tensor:
    """The logits of a text, computed with a cache: a beginning at once, the rest one by one."""
    model, cache, found = case.model, None, []
    for start, stop in [(0, first), *((i, i + 1) for i in range(first, ids.shape[1]))]:
        more = {} if cache is None else {"past_key_values": cache}
        torch.manual_seed(0)
        out = model(input_ids=ids[:, start:stop], use_cache=True, **more)
        cache = out.past_key_values
        found.append(out.logits)
    return torch.cat(found, 1)


def _decoded(case: Case) -> tuple[Tensor, float]:
    if not case.generates() or not case.takes("past_key_values", "input_ids") or "decoder_input_ids" in case.given:
        raise NotApplicable("it is no causal language model")
    ids = tokens(case.model.config, LENGTH)
    try:
        with torch.no_grad():
            theirs = _steps(case, ids, 6)
            moved = 0.0
            for seed in (1, 2):
                with nudged(case.model, seed):
                    moved = max(moved, float((_steps(case, ids, 6) - theirs).abs().max()))
    except Exception as error:
        raise NotApplicable(f"its own code does not decode so: {_short(error)}") from None
    size = float(theirs.abs().max())
    if FACTOR * moved > UNSTABLE * size:
        raise NotApplicable(f"one unit in the last place changes its own logits by {moved / size:.0e}")
    return theirs, max(FACTOR * moved, FLOOR * size)


def decoding_with_a_cache(case: Case) -> None:
    """Logits computed with a cache, token by token, are those of the model's own code with its cache."""
    theirs, bound = _decoded(case)
    with torch.no_grad(), switched(case.model):
        ours = _steps(case, tokens(case.model.config, LENGTH), 6)
    error = float((ours - theirs).abs().max())
    if not error <= bound:
        raise Wrong(f"logits differ by {error:.1e}; allowed {bound:.1e}")


def cache_as_the_full_pass(case: Case) -> None:
    """Logits computed with a cache are those of one call with the whole text."""
    theirs, bound = _decoded(case)
    ids = {"input_ids": tokens(case.model.config, LENGTH)}
    with torch.no_grad():
        full = run(case.model, ids).logits
        if not float((full - theirs).abs().max()) <= 2 * bound:
            raise NotApplicable("its own code computes something else with a cache")
        with switched(case.model):
            ours, whole = _steps(case, ids["input_ids"], 6), run(case.model, ids).logits
    error = float((ours - whole).abs().max())
    if not error <= 2 * bound:
        raise Wrong(f"logits differ by {error:.1e}; allowed {2 * bound:.1e}")


def generated_tokens(case: Case) -> None:
    """model.generate gives the tokens that it gives with the model's own code, with padding on the left."""
    if not case.model.can_generate():
        raise NotApplicable("it does not generate")
    given = {name: x for name, x in case.given.items() if not name.startswith("decoder_")}
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    if getattr(case.model.config, "is_encoder_decoder", False):
        options |= {"decoder_start_token_id": 1, "bos_token_id": 1}
    if case.kind == "text" and case.takes("attention_mask") and case.model_type not in PAD_FREE:
        mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
        mask[1, :PADDED] = 0
        given["attention_mask"] = mask

    def generate() -> Tensor:
        torch.manual_seed(0)
        made = case.model.generate(**given, **options)
        return made if isinstance(made, Tensor) else made.sequences

    with torch.no_grad():
        try:
            theirs = generate()
            with nudged(case.model, 1):
                again = generate()
        except Exception as error:
            raise NotApplicable(f"its own code does not generate so: {_short(error)}") from None
        if not torch.equal(theirs, again):
            raise NotApplicable("one unit in the last place changes its own tokens")
        with switched(case.model):
            ours = generate()
    if not torch.equal(ours, theirs):
        raise Wrong(f"{int((ours != theirs).sum())} of {theirs[:, -6:].numel()} tokens differ")


def _attentions(x: Any) -> dict[str, list[Tensor]]:
    items = x.items() if hasattr(x, "items") else ()
    return {name: [y for y in part if isinstance(y, Tensor)] for name, part in items
            if str(name).endswith("attentions") and isinstance(part, list | tuple)}  # fmt: skip


def returned_weights(case: Case) -> None:
    """output_attentions=True returns the weights of the model's own code, and makes none of them before it is read."""
    try:
        with torch.no_grad():
            theirs = _attentions(run(case.model, case.given, output_attentions=True))
    except Exception as error:
        raise NotApplicable(f"its own code does not take output_attentions: {_short(error)}") from None
    theirs = {name: found for name, found in theirs.items() if found}
    if not theirs:
        raise NotApplicable("its own code returns none")
    with torch.no_grad():
        with nudged(case.model, 1):
            nearby = _attentions(run(case.model, case.given, output_attentions=True))
        with switched(case.model):
            ours = _attentions(run(case.model, case.given, output_attentions=True))
    moved = {name: [float((x - y).abs().max()) for x, y in zip(found, nearby[name], strict=True)]
             for name, found in theirs.items()}  # fmt: skip
    for name, found in theirs.items():
        if len(ours.get(name, ())) != len(found):
            raise Wrong(f"{name}: {len(ours.get(name, ()))} instead of {len(found)}")
        for i, (mine, their) in enumerate(zip(ours[name], found, strict=True)):
            if getattr(mine, "made", False):
                raise Wrong(f"{name}[{i}] was made before it was read")
            mine = mine.dense() if hasattr(mine, "dense") else mine
            if mine.shape != their.shape:
                raise Wrong(f"{name}[{i}]: shape {tuple(mine.shape)} instead of {tuple(their.shape)}")
            error, bound = float((mine - their).abs().max()), max(3e-5, FACTOR * moved[name][i])
            sums = mine.sum(-1, keepdim=True)
            if error > bound and bool((sums < 1 - 1e-4).any()):
                error = float((mine / sums - their).abs().max())
                if error <= 10 * bound:
                    raise Partly("the model's own weights leave out the learned sink's share, which is in headwise's")
            if not error <= bound:
                raise Wrong(f"{name}[{i}]: differs by {error:.1e}; allowed {bound:.1e}")


def _observed(case: Case, **options: Any) -> tuple[list[hw.Observation], Outputs]:
    seen: list[hw.Observation] = []
    with torch.no_grad(), switched(case.model), hw.observe(seen.append, model=case.model, **options):
        out = outputs(case.model, case.given)
    return seen, out


def every_attention_seen(case: Case) -> None:
    """Each module that computes attention in the model's own code is computed and seen by headwise, call by call."""
    seen, _ = _observed(case)
    names = {one.name for one in seen}
    missing = [
        name for name in case.attention
        if not any(name == one or name.startswith(f"{one}.") or one.startswith(f"{name}.") for one in names)
    ]  # fmt: skip
    if missing and not names:
        raise Wrong(f"switch says nothing, but headwise computes none of the {len(missing)} attention modules")
    if missing:
        kinds = sorted({type(case.attention[name]).__name__ for name in missing})
        said = f"{len(missing)} of {len(case.attention)} attention modules compute by themselves: {', '.join(kinds)}"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hw.switch(case.model)
        said_there = " ".join(str(one.message) for one in caught)
        if not all(any(kind in said_there for kind in _around(case.model, name)) for name in missing):
            raise Wrong(f"{said}, and switch does not say so")
        raise Partly(said)
    counts = Counter(one.name for one in seen)
    for name, calls in case.calls.items():
        if name in counts and counts[name] < calls:
            raise Wrong(f"{name} computes {calls} times, and {counts[name]} of them are seen")


def _around(model: nn.Module, name: str) -> list[str]:
    """The classes of a module and of those that it lies in, as far as they are called attention."""
    parts = name.split(".")
    kinds = [type(model.get_submodule(".".join(parts[:at]))).__name__ for at in range(len(parts), 0, -1)]
    return [kind for at, kind in enumerate(kinds) if at == 0 or "Attention" in kind]


def rows_of_weights(case: Case) -> None:
    """Every row of every map sums to one; to less with learned sinks, to nothing where nothing may be seen."""
    seen, _ = _observed(case)
    if not seen:
        raise NotApplicable("no map was seen")
    for one in seen:
        dense = one.map.to_dense()
        sums = dense.sum(-1)
        if not torch.isfinite(dense).all() or float(dense.min()) < 0:
            raise Wrong(f"{one.name}: weights that are not finite or negative")
        sinks = any(type(score).__name__ == "SinkLogits" for score in one.map.rule.scores)
        # Weights are exp(score − log-sum-exp), exact to the rounding of the scores.
        scores = one.map.rule.scale * one.map.q.norm(dim=-1).max() * one.map.k.norm(dim=-1).max()
        fits = (sums - 1).abs() < 1e-5 + 8 * torch.finfo(torch.float32).eps * float(scores.abs())
        if sinks:
            fits |= sums <= 1
        fits |= sums == 0
        if not fits.all():
            raise Wrong(f"{one.name}: rows sum to {float(sums[~fits][0]):.6f}")


def observing_changes_nothing(case: Case) -> None:
    """Outputs while somebody observes are those while nobody does, to rounding."""
    with torch.no_grad(), switched(case.model):
        unseen = outputs(case.model, case.given)
    _, seen = _observed(case, measures=list(MEASURES))
    case.compare(seen, unseen)


def watched_measures(case: Case) -> None:
    """`watch` measures every head that it sees, all numbers are finite, and the model is afterwards what it was."""
    with torch.no_grad():
        with hw.watch(case.model, measures=list(MEASURES), maps="lazy") as record:
            out = outputs(case.model, case.given)
        if case.model.config._attn_implementation != "eager":
            raise Wrong(f"watch leaves attn_implementation={case.model.config._attn_implementation!r}")
    case.compare(out, case.theirs)
    seen = [one.name for one in _observed(case)[0]]
    if len(record.maps) != len(seen):
        raise Wrong(f"{len(record.maps)} maps are kept of {len(seen)} calls")
    for at, name in enumerate(record.latest.layers):
        heads = record.maps[name].shape[1]
        for measure in MEASURES:
            if not torch.isfinite(torch.as_tensor(record.latest[measure][at][:heads])).all():
                raise Wrong(f"{measure} of {name} is not finite")


def masks_stay_short(case: Case) -> None:
    """No mask of n×m booleans is made of what transformers says of padding and causality."""
    made, make = [], MaskTensor.make

    def counting(self: MaskTensor) -> Tensor:
        made.append(tuple(self.shape))
        return make(self)

    given = case.given
    try:
        given, _ = case.padding("right")
        with torch.no_grad():
            outputs(case.model, given)
    except Exception:
        given = case.given
    MaskTensor.make = counting  # type: ignore[method-assign]
    try:
        with torch.no_grad(), switched(case.model):
            outputs(case.model, given)
    finally:
        MaskTensor.make = make  # type: ignore[method-assign]
    if made:
        raise NotApplicable(f"the model itself reads its mask as a tensor, {len(made)} times")


def bfloat16(case: Case) -> None:
    """In bfloat16, at most twice the error of the model's own code, both against float32."""
    try:
        narrow = copy.deepcopy(case.model).bfloat16()
        small = {k: x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in case.given.items()}
        wide = copy.deepcopy(narrow).float()
        back = {k: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in small.items()}
        with torch.no_grad():
            truth, theirs = outputs(wide, back), outputs(narrow, small)
            with nudged(narrow, 1):
                moved = outputs(narrow, small)
    except Exception as error:
        raise NotApplicable(f"its own code does not run in it: {_short(error)}") from None
    with torch.no_grad(), switched(narrow):
        ours = outputs(narrow, small)
    seen = 0
    for name, exact in truth.items():
        size = float(exact.square().mean().sqrt())
        if name in case.unstable or name not in theirs or exact.numel() < 64:
            continue

        def error(x: Tensor, exact: Tensor = exact) -> float:
            rows = (x.float() - exact).flatten(0, -2) if exact.ndim > 1 else (x.float() - exact)[:, None]
            return float(rows.square().mean(-1).sqrt().median())  # where a router chooses otherwise, rows are far off

        their = max(error(theirs[name]), error(moved[name]))
        if not their <= 0.1 * size:
            continue
        seen += 1
        if not error(ours[name]) <= 2 * their + 2e-3 * size:
            raise Wrong(f"{name}: error {error(ours[name]) / size:.1e}, its own code's {their / size:.1e}")
    if not seen:
        raise NotApplicable("its own error is more than a tenth of its outputs, or they are few numbers")


def restored(case: Case) -> None:
    """After `restore` every bit of the outputs and every configuration is what it was."""
    hw.switch(case.model)
    hw.restore(case.model)
    with torch.no_grad():
        again = outputs(case.model, case.given)
    for part in case.model.modules():
        used = getattr(getattr(part, "config", None), "_attn_implementation", "eager")
        if used == "headwise":
            raise Wrong(f"{type(part).__name__} still has attn_implementation={used!r}")
    if any(not torch.equal(x, again[name]) for name, x in case.theirs.items()):
        raise Wrong("outputs have other bits than before")


def weights_untouched(case: Case) -> None:
    """After all that, weights and buffers have the bits that they had."""
    now = case.model.state_dict()
    changed = [name for name, x in case.state.items() if name not in now or not torch.equal(now[name], x)]
    if changed or now.keys() != case.state.keys():
        raise Wrong(f"{', '.join(changed[:3]) or 'names'} changed")


CHECKS: dict[str, Callable[[Case], None]] = {
    "outputs": same_outputs,
    "every attention": every_attention_seen,
    "same bits": same_bits_again,
    "alone": alone_as_in_a_batch,
    "padding left": padding_on_the_left,
    "padding right": padding_on_the_right,
    "padding of targets": padding_of_targets,
    "gradients": gradients_of_weights,
    "input gradients": gradients_of_inputs,
    "training": training_mode,
    "cache": decoding_with_a_cache,
    "cache = full": cache_as_the_full_pass,
    "generate": generated_tokens,
    "weights": returned_weights,
    "rows": rows_of_weights,
    "observe": observing_changes_nothing,
    "watch": watched_measures,
    "short masks": masks_stay_short,
    "bfloat16": bfloat16,
    "restore": restored,
    "untouched": weights_untouched,
}


# --- all of them


def check(case: Case, name: str) -> str:
    """"pass", or "refused: …", "not applicable: …", "wrong: …", "crash: …" with why."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            CHECKS[name](case)
    except NotApplicable as error:
        return f"not applicable: {error}"
    except Partly as error:
        return f"in part: {error}"
    except Wrong as error:
        return f"wrong: {error}"
    except HeadwiseError as error:
        return f"refused: {' '.join(str(error).split())}"
    except Exception as error:
        return f"crash: {_short(error)}"
    finally:
        hw.restore(case.model)
    return "pass"


def examine(model_type: str) -> dict[str, Any]:
    """The row of a model type: what was made, each check's result, and what they come to."""
    started = time.process_time()
    row: dict[str, Any] = {"type": model_type}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row["class"] = model_class(model_type).__name__
            case = Case(model_type)
    except Exception as error:
        why = str(error) if isinstance(error, NotApplicable) else _short(error)
        return {**row, "status": "not made", "why": why, "seconds": round(time.process_time() - started, 2)}
    size = sum(x.numel() for x in case.model.parameters())
    row |= {"size": case.how, "inputs": case.kind, "parameters": size, "attention": len(case.attention)}
    if not case.attention:
        row |= {"status": "no attention"}
        return {**row, "seconds": round(time.process_time() - started, 2)}
    try:
        hw.switch(case.model)
        hw.restore(case.model)
    except HeadwiseError as error:
        return {**row, "status": "refused", "why": str(error), "seconds": round(time.process_time() - started, 2)}
    except Exception as error:
        return {**row, "status": "crash", "why": f"switch: {_short(error)}"}
    row["checks"] = {name: check(case, name) for name in CHECKS}
    for status in ("crash", "wrong"):
        if any(said.startswith(status) for said in row["checks"].values()):
            row["status"] = status
            break
    else:
        for name in ("outputs", "every attention"):
            said = row["checks"][name]
            row["status"] = said.partition(":")[0]
            if said != "pass":
                row["why"] = said.partition(": ")[2]
                break
    row["seconds"] = round(time.process_time() - started, 2)
    return row
