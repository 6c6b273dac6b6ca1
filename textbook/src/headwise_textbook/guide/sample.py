"""The weights of the embedded model on a text, for pictures."""

from functools import cache

import torch
from torch import Tensor

from headwise.lm import load_pretrained


@cache
def weights_on(text: str) -> list[Tensor]:
    """The weights of every layer, [h, n, n]."""
    decoder, tokenizer, _ = load_pretrained()
    with torch.no_grad():
        _, maps = decoder(torch.from_numpy(tokenizer.encode(text))[None], return_maps=True)
    return [amap.to_dense()[0] for amap in maps]
