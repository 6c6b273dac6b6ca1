"""Every part of the registries holds what `headwise.testing` checks of its kind; one without a sample is named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from design_samples import ONCE, given
from hf_models import draw, hf_model, ids
from samples import FORMULAS_OF_SCORES, MASKS, SCORES, kernels_here
from test_anatomy_four_maps import made
from test_measures import FORMULAS, ready
from torch import Tensor, nn

from headwise import testing
from headwise.fields import inside
from headwise.kernels import KERNELS
from headwise.lm.model import Decoder, DecoderConfig
from headwise.masks import Causal, HeadWindows, Mask
from headwise.models import KINDS
from headwise.reports.views import VIEWS
from headwise.scores import Score, WithGap as ScoreWithGap
from headwise.stats import GIVEN, MEASURES
from parameters import thorough

SIZES = 2, 6, 17, 29


class Written(nn.Module):
    """Attention that a model has written by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, 3)).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = (q @ k.mT / 3**0.5).softmax(-1)
        y: Tensor = self.o((weights @ v).transpose(1, 2).flatten(2))
        return y


# Their queries are numbered from the first one on.
FROM_THE_FIRST = {"nothing for some", "forbidden", "dense"}


def own(kind: type) -> bool:
    """Whether a class is headwise's, not one of a package or of another test."""
    return kind.__module__.startswith("headwise.")


MASKS_HERE = MASKS | {"head windows": lambda b, n, m: HeadWindows([1, 4, 2, 9, 3, 5], 1) & Causal()}


def test_every_registered_mask_and_score_has_a_sample() -> None:
    masks = [make(2, 17, 29) for make in MASKS_HERE.values()]
    sampled = {type(one) for mask in masks for one in inside(mask)} | FORMULAS_OF_SCORES.keys() | {ScoreWithGap}
    known = [kind for kind in (*Mask.known.values(), *Score.known.values()) if own(kind)]
    missing = {kind.__name__ for kind in known if kind not in sampled}
    assert not missing, "add it to MASKS, or to SCORES and FORMULAS_OF_SCORES, of tests/core/samples.py"


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("name", MASKS_HERE)
def test_mask(name: str) -> None:
    testing.check_mask(MASKS_HERE[name](2, 17, 29), sizes=SIZES, aligned=name not in FROM_THE_FIRST)


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("name", [name for name in SCORES if name not in ("two biases", "all")])
def test_score(name: str) -> None:
    (score,) = SCORES[name](*SIZES)
    formula = FORMULAS_OF_SCORES.get(type(score))
    testing.check_score(score, formula and (lambda *x: formula(score, *x)), sizes=SIZES)


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("name", thorough([*MEASURES, *GIVEN], {"duplicate_mass", "induction_mass"}))
def test_measure(name: str) -> None:
    kind = MEASURES.get(name) or GIVEN[name]
    if isinstance(kind, type) and not own(kind):
        pytest.skip("its own package checks it")
    assert name in FORMULAS, f"{name}: add its dense formula to FORMULAS of tests/core/test_measures.py"
    if name in GIVEN:
        testing.check_measure(lambda batch, keys: ready(name, keys, batch), lambda *x: FORMULAS[name](x))
    else:
        testing.check_measure(kind(), lambda *x: FORMULAS[name](x))


@pytest.mark.thorough_except("triton_gpu", "cpu")
@pytest.mark.parametrize("name", KERNELS)
def test_kernel(name: str) -> None:
    if name not in kernels_here():
        pytest.skip("it does not run on this machine")
    testing.check_kernel(name)


@pytest.mark.thorough_beyond(7)
@pytest.mark.parametrize(("name", "options"), ONCE, ids=str)
def test_design(name: str, options: dict[str, Any]) -> None:
    # At its default sharpness a head of a convolution reads one place to rounding.
    testing.check_design(name, **({"sharpness": 2.0} if name == "convolution" else {}) | options)


def of_torch() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(24, 4, 29, batch_first=True).double().eval()
    draw(layer)
    return layer, given(11, 24)


def by_hand() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(Written()).double().eval(), given(11, 12)


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "headwise": lambda: (Decoder(DecoderConfig(53, 24, 2, 4)).double().eval(), ids()),
    "torch": of_torch,
    "traced": by_hand,
    **{name: lambda name=name: (hf_model(name), ids()) for name in ("bert", "gpt2", "llama", "distilbert")},
    **{name: lambda name=name: made(name) for name in ("bart", "vit", "t5")},
}


@pytest.mark.thorough_except("torch", "traced")
@pytest.mark.parametrize("name", [kind.name for kind in KINDS if own(type(kind))])
def test_kind(name: str) -> None:
    assert name in MODELS, f"{name}: add a small model with modules of the kind"
    model, batch = MODELS[name]()
    testing.check_kind(model, batch, kind=name)


@pytest.mark.thorough_except("html", "arcs")
@pytest.mark.parametrize("name", VIEWS)
def test_view(name: str) -> None:
    testing.check_view(name)
