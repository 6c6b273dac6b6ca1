"""The input embedding of a model, for what requires the meaning of tokens."""

from torch import Tensor, nn


def input_embedding(model: nn.Module) -> Tensor | None:
    """The embedding of each token id, [vocabulary, d], of a model with the method `get_input_embeddings`, such as those
    of transformers and headwise's decoder; None for other models, and for inputs that are not tokens."""
    find = getattr(model, "get_input_embeddings", None)
    if find is None:
        return None
    try:
        weight = getattr(find(), "weight", None)
    except NotImplementedError:  # transformers, of a model without tokens
        return None
    return weight.detach() if isinstance(weight, Tensor) and weight.ndim == 2 else None
