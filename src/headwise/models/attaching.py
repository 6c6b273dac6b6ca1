"""`attach(model)`: compute the attention of a model with headwise until it is detached; `intervene(model)`: edit it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from headwise.errors import ConfigError, check_choice, warn
from headwise.interventions.edits import Edit, Placed
from headwise.kernels import events
from headwise.kernels.compiling import eager
from headwise.kernels.spread import Held
from headwise.map import AttentionMap
from headwise.models.adapters.huggingface.attention import always_weights
from headwise.models.adapters.places import (
    Layers,
    entrances,
    find,
    give_back,
    named,
    nothing_found,
    of_transformers,
    proven,
    select,
    take_over,
    taken_anew,
)
from headwise.models.frames import Calls
from headwise.models.hooks import Hook, around, called
from headwise.models.replace import Replacement
from headwise.nn.base import AttentionLayer
from headwise.nn.owned import copied
from headwise.publishing import TOLD, AttentionCall, observe
from headwise.text import tr

_attached: "WeakSet[nn.Module]" = WeakSet()  # attention modules with a handle


def attach(
    model: nn.Module, batch: Any = None, *, copy: bool = False, weights: bool = False, differentiable: bool = False
) -> "Attachment":
    """Compute the attention of a model with headwise until the handle is detached.

    >>> import torch, headwise as hw
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, 32), 2, enable_nested_tensor=False)
    >>> handle = hw.attach(model)
    >>> handle.attached
    ('layers.0.self_attn', 'layers.1.self_attn')
    >>> handle.detach()

    or as a context manager:

    >>> with hw.attach(model):
    ...     y = model(torch.randn(7, 3, 16))

    Modules, parameters, hooks and state dict stay the same objects, so optimizers continue as before, and outputs are
    equal to rounding. `nn.MultiheadAttention` gets another class; in models of transformers every configuration gets
    attn_implementation="headwise". headwise's own layers need no attachment. A copy of an attached model is attached
    too; attach it to get a handle of its own. docs/models.md lists the tested models and the differences.

    In any other model, attention is recognised in each forward pass by what it computes, as `headwise.models.recognise`
    does. The first pass, or one with `batch`, computes it both ways and compares; from then on headwise computes each
    call that is the same function, and no n×m product is made unless your code reads it. A copy of such a model is not
    attached. Compiled models run uncompiled while they are attached. With fullgraph=True, attach the module that
    `torch.compile` returned; functions that call the model, and were compiled and called before, compute recognised
    attention with its own code until `torch.compiler.reset()`.

    Args:
        model: any module with attention: `nn.MultiheadAttention`, models of transformers (>= 5), headwise's layers, or
            attention that is written by hand.
        batch: a tensor, a tuple of arguments or a mapping of keyword arguments. The model is called with it once,
            without gradients, and attention that is recognised in it is attached too where modules of the other kinds
            are found. Give it if several forward passes with gradient checkpointing precede the first backward pass.
        copy: attach a deepcopy, the handle's `.model`; the model itself is unchanged.
        weights: attention modules of transformers return their weights from every call, as with "eager", to the hooks
            of other libraries: `AttentionWeights`, which are computed when they are read. What such a library changes
            in them, where eager attention drops some of the weights, changes the output. Without it, only calls with
            output_attentions=True return them.
        differentiable: the handle's `.maps` are those of the last forward of the model, with gradients, as of
            `attend(…, differentiable=True)`, for `headwise.losses`, which take the handle; the next forward releases
            them, as does `detach`. A part with attention that is called by itself is a forward, as in `watch`.
            Attention that is recognised has maps from the second forward on, or with a batch from the first.
    Returns:
        The handle: `.detach()` restores the model, as does the end of a `with` block; `.attached` and `.skipped` name
        the modules that are computed by headwise now, and those that cannot be, with the reason.
    Raises:
        ConfigError: if nothing can be attached, with the reason for each module, if a module is attached already, or if
            the forward of one was replaced on the instance and that of a copy would call the original.
            The model is unchanged then. Where attention is recognised without a batch, the first forward raises it.
    Warns:
        UserWarning: if some of the attention modules cannot be attached, such as image encoders that compute their
            attention themselves; and once for each module of which headwise does not compute a call, which its own
            attention computes: the module is among `.skipped` from then on.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"attach(model): expected an nn.Module, got {type(model).__name__}")
    if copy:
        model = copied(model)
    places, targets, skipped = find(model)
    if not places and batch is None and any(map(of_transformers, model.modules())):
        raise nothing_found(model, "attach", "attached", skipped, "hw.attach(model, batch=…)")
    for name, module in model.named_modules():
        if module in _attached:
            raise ConfigError(
                f"attach(model): {name or type(model).__name__} is attached already; call .detach() on its handle first"
            )
    for name, module in places.items() if weights else ():
        # nnsight keeps a rewritten copy of a function that a module calls, which replaces it in a trace.
        operations = getattr(getattr(module, "__source_accessor__", None), "operations", {})
        if any(getattr(one, "_source_accessor", None) is not None for one in operations.values()):
            raise ConfigError(
                f"attach(model, weights=True): nnsight has rewritten the attention function of {name}, and would "
                f"use that one further; attach the model first, then wrap it: StandardizedTransformer(model, …)"
            )
    targets = [target for target in targets if taken_anew(target)]
    parts = {part for target in targets for part in target.modules()}
    taken = {
        name: module for name, module in places.items() if module in parts and not isinstance(module, AttentionLayer)
    }
    recognised = None
    take_over(targets, adopt=True)
    if batch is not None or not places:
        recognised = Replacement(model, frozenset(places.values()))
        try:
            if batch is not None:
                recognised.run(batch)
        except BaseException:
            give_back(targets)
            raise
        recognised.open()
        skipped = {} if not places else {
            name: why for name, why in skipped.items() if name not in recognised.computed
        }  # fmt: skip
    _attached.update(taken.values() if recognised is None else model.modules())
    if skipped:
        listed = "; ".join(f"{name or type(model).__name__}: {why}" for name, why in skipped.items())
        out = "; attach(model, batch=…) recognises attention of any code" if batch is None else ""
        warn(f"attach(model): not attached: {listed}{out}")
    if weights:
        others = AttentionLayer, nn.MultiheadAttention
        always_weights.update(module for module in places.values() if not isinstance(module, others))
    own = tuple(name for name in places if name not in taken)
    return Attachment(model, taken, targets, own, skipped, recognised, differentiable)


class Attachment:
    """The handle of a model whose attention headwise computes, as returned by `attach`; a context manager.

    Attributes:
        model: the model that was given, or its copy.
        attached: qualified names of the modules that headwise computes because of it; () after `detach`. Where
            attention is recognised while the model runs, those in which it was, so far.
        own: names of those that headwise computed already: its own layers, and models loaded with
            attn_implementation="headwise".
        skipped: name → why a module is not attached.
        maps: with `differentiable`, name → map of each call in the last forward; repeated calls are name#2, name#3, …
    """

    def __init__(
        self, model: nn.Module, modules: Mapping[str, nn.Module], targets: Sequence[nn.Module], own: tuple[str, ...],
        skipped: Mapping[str, str], recognised: Replacement | None = None, differentiable: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.own, self._skipped = model, own, dict(skipped)
        self._modules, self._targets, self._recognised = dict(modules), list(targets), recognised
        self._active, self._own_code = True, dict[str, str]()
        self._proofs = proven(self._modules, self._left)
        for name, module in modules.items():
            vars(module)[TOLD] = Hook(partial(self._left, name))  # which copies do not keep
        self.maps: dict[str, AttentionMap] = {}
        self._calls, self._observing = Calls(), ExitStack()
        if differentiable:
            for part in entrances(model, dict(model.named_modules())):
                self._proofs += around(part, self._begin, self._end)
            self._observing.enter_context(
                observe(self._keep, model=model, on_error=self._without_map, differentiable=True)
            )

    @eager
    def _begin(self, module: nn.Module, args: Any) -> None:
        """An outermost call of the model, or of a part with attention, begins, which is no part of one elsewhere."""
        new = not events.in_backward() and self._calls.begin(module) and {*self._calls.elsewhere().values()} <= {module}
        if new and module in entrances(self.model, {x: self.model.get_submodule(x) for x in self.editable}):
            self.maps = {}

    @eager
    def _end(self, module: nn.Module, args: Any, result: Any) -> None:
        self._calls.end(module)

    def _keep(self, call: AttentionCall) -> None:
        self.maps[events.call_name(call.name, self.maps)] = call.map

    def _without_map(self, name: str, held: Held | None, out: Tensor, error: Exception) -> None:
        name = name or type(self.model).__name__
        warn(tr("attach(model): {name}: a call has no map: {error}", name=name, error=str(error)))

    def _left(self, name: str, why: str) -> None:
        """A call of a module was not computed by headwise."""
        if name not in self._own_code:
            self._own_code[name] = why
            warn(f"attach(model): {name or type(self.model).__name__} is computed by its own code: {why}")

    @property
    def attached(self) -> tuple[str, ...]:
        """Names of the attached modules, in the order of registration."""
        names = {*self._modules, *(() if self._recognised is None else self._recognised.attached)} - {*self._own_code}
        return tuple(name for name, _ in self.model.named_modules() if name in names)

    @property
    def editable(self) -> tuple[str, ...]:
        """Names of the modules whose attention headwise computes in some calls at least, in the order of
        registration: a call that the module's own code computes cannot be edited."""
        names = {*self._modules, *self.attached, *self.own}
        names |= set() if self._recognised is None else self._recognised.taken
        return tuple(name for name, _ in self.model.named_modules() if name in names)

    @property
    def skipped(self) -> dict[str, str]:
        """name → why a module is not attached."""
        return self._skipped | self._own_code | ({} if self._recognised is None else self._recognised.skipped)

    def detach(self) -> None:
        """Put back what computed the attention before: the same classes, configurations and hooks. Calling it again
        changes nothing."""
        give_back(self._targets)
        for module in self._modules.values() if self._recognised is None else self.model.modules():
            _attached.discard(module)
            always_weights.discard(module)
        for module in self._modules.values():
            vars(module).pop(TOLD, None)
        for handle in self._proofs:
            handle.remove()
        self._observing.close()
        self.maps = {}  # which hold a graph
        if self._recognised is not None:
            self._recognised.close()
        self._modules, self._targets, self._recognised, self._active = {}, [], None, False

    def __enter__(self) -> "Attachment":
        if not self._active:
            raise ConfigError("this handle was detached: attach(model) makes a new one")
        return self

    def __exit__(self, *_: Any) -> None:
        self.detach()

    def __repr__(self) -> str:
        if not self._active:
            return "Attachment(detached)"
        skipped = f"; {len(self.skipped)} skipped" if self.skipped else ""
        if self._recognised is not None and not self._recognised.computed:
            return "Attachment(attention is recognised in the first forward)"
        return f"Attachment({len(self.attached)} modules attached{skipped})"


UNUSED = ("warn", "raise", "ignore")
RECOGNISED = "hw.intervene(hw.attach(model, batch=…), …)"


def model_of(model: nn.Module | Attachment) -> nn.Module:
    """The model itself, for what supports both it and its handle."""
    return model.model if isinstance(model, Attachment) else model


@contextmanager
def intervene(
    model: nn.Module | Attachment,
    *edits: Edit,
    layers: Layers = None,
    unused: str = "warn",
) -> Iterator[None]:
    """Within it, the attention of a model is computed with these edits.

    >>> import torch, headwise as hw
    >>> from headwise.interventions import Forbid, Scale
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, 32), 2, enable_nested_tensor=False)
    >>> x = torch.randn(7, 1, 16)
    >>> with hw.intervene(model, Forbid(queries=6, keys=[0, 1]), Scale(0.0, heads=[2]), layers="layers.1.*"):
    ...     y = model(x)

    headwise computes the attention of models of transformers and of `nn.MultiheadAttention` meanwhile, as it does that
    of its own layers; afterwards the model is as before. Outputs and gradients are exact, in O(n) memory; run the
    backward pass within it if the model uses gradient checkpointing, which repeats the forward pass there. Observers
    and records receive the weights that were used.

    Args:
        model: a model of transformers, `nn.MultiheadAttention`s or headwise's layers; or, for any other model, the
            handle `hw.attach(model, batch=…)` of its recognised attention.
        edits: applied in this order, and after those of the enclosing `intervene` contexts.
        layers: names of attention modules (`*` matches anything) or their indices; None for all.
        unused: "warn", "raise" or "ignore" at the end if an edit changed nothing: its tokens were in no call, or there
            was no call; and if a module was called without an edit of its attention, as one whose forward was replaced
            on the instance.
    Returns:
        A context manager.
    Raises:
        ConfigError: naming the argument; also for a layer of a design whose heads mix their scores or outputs, such as
            `TalkingHeadsAttention` and `SparseHeadMixture`. While it is active, calls raise ConfigError for a head that
            the module lacks, and ShapeError for a map of another size.
    """
    if not edits or not all(isinstance(edit, Edit) for edit in edits):
        given = ", ".join(type(edit).__name__ for edit in edits) or "none"
        raise ConfigError(f"intervene(model, *edits): expected edits such as Forbid(queries, keys), got {given}")
    check_choice("unused", unused, UNUSED)
    targets: list[nn.Module] = []
    if isinstance(model, Attachment):
        modules = dict(model.model.named_modules())
        places = named({name: modules[name] for name in model.editable}, layers)
    else:
        places, targets, _ = select(model, layers, "intervene", done="edited", way_out=RECOGNISED)
    for name, module in places.items():
        if isinstance(module, AttentionLayer) and (why := module.coupling.of_heads):
            raise ConfigError(
                f"intervene(model): {name or 'the model'} ({type(module).__name__}) cannot be edited: {why}"
            )
    placed = [Placed(edit, []) for edit in edits]
    take_over(targets)
    try:
        names = {module: name for name, module in places.items()}
        with called(names) as calls, events.subscribe(modules=names, edits=placed):
            yield
    finally:
        give_back(targets)
    if unused == "ignore":
        return
    for what in _without_effect(placed, {name: module for name, module in places.items() if name in calls}):
        if unused == "raise":
            raise ConfigError(what)
        warn(what)


def _without_effect(placed: Sequence[Placed], places: Mapping[str, nn.Module]) -> Iterator[str]:
    """What was not done, in sentences."""
    reached = {name for name, _ in placed[0].applied}
    if missed := [f"{name or 'the model'} ({type(module).__name__})" for name, module in places.items()
                  if name not in reached]:  # fmt: skip
        yield (
            f"intervene(model): {', '.join(missed)}: called, but without an attention that headwise computes, as where "
            f"its forward was replaced on the instance; no edit was applied there"
        )
        if not reached:
            return
    for one in placed:
        if not any(hit for _, hit in one.applied):
            nowhere = f"none of the {len(one.applied)} calls had a token of each set, so it changed nothing"
            yield f"{one.edit!r}: {nowhere if one.applied else 'no attention of its layers was called'}"
