"""The modules of a model where a forward may begin."""

from torch import nn

from headwise.models.adapters.places import Place


def entrances(model: nn.Module, places: list[Place]) -> dict[nn.Module, None]:
    """The modules where a forward may begin: the model, its children, and models of transformers in it. Trainers and
    generation call such parts directly."""
    watched = {place.module for place in places}
    parts = [*model.children(), *(part for part in model.modules() if hasattr(part, "set_attn_implementation"))]
    return dict.fromkeys([model, *(part for part in parts if not watched.isdisjoint(part.modules()))])
