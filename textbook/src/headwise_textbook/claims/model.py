"""What is measured: random inputs and small layers in float64, the same in every run, and a trained model."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from headwise import AttentionMap
from headwise.kernels import use_kernel
from headwise.lm import CharTokenizer, Decoder, load_pretrained
from headwise.models import find_heads, record_heads, scale_heads
from headwise.nn import DESIGNS, STANDARD
from headwise_textbook.trace import seeded


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Independent standard normal numbers, float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(design: str, d_model: int, num_heads: int, *, seed: int = 0, **options: Any) -> Any:
    """A layer of a design with random weights, in eval mode. The type is `Any`: claims use the parts of one design."""
    with seeded(seed):
        module = DESIGNS[design].build(d_model, num_heads, **options).double().eval()
        with torch.no_grad():
            for parameter in module.parameters():
                if not parameter.any():  # biases are initialised to zero, which would hide errors in them
                    parameter.copy_(0.1 * torch.randn_like(parameter))
    return module


def multi_head() -> Any:
    """The standard layer with three heads of four channels."""
    return layer(STANDARD, 12, 3)


def standard(d_model: int, num_heads: int, **options: Any) -> Any:
    """The standard layer as constructed: float32, in training mode."""
    return DESIGNS[STANDARD].build(d_model, num_heads, **options)


def counted(run: Callable[[], Tensor]) -> int:
    """FLOPs of matrix products, counted at run time with a kernel whose products PyTorch counts."""
    with torch.no_grad(), use_kernel("torch_blocks"), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def size_of(module: nn.Module) -> int:
    """How many parameters a module has."""
    return sum(p.numel() for p in module.parameters())


def rank(matrix: Tensor) -> int:
    """The rank of a matrix: how many singular values are above 1e-10 of the largest."""
    return int(torch.linalg.matrix_rank(matrix, rtol=1e-10))


def adam(
    parameters: Iterable[Tensor], loss: Callable[[], Tensor], steps: int, lr: float, *, last: float = 1.0
) -> Iterator[float]:
    """Minimise a loss with Adam; yields the loss of each step. The rate falls linearly from `lr` to `last · lr`."""
    optimizer = torch.optim.Adam(parameters, lr=lr)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, last, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        rate.step()
        yield value.item()


# The decoder that comes with headwise, for claims about trained heads.
# From chapter 120 of Water Margin, which the model has not been trained on.
PASSAGE = files(__package__).joinpath("passage.txt").read_text(encoding="utf-8").strip()


@dataclass(frozen=True)
class Trained:
    """A trained decoder and the results of its heads on the passage."""

    decoder: Decoder
    tokenizer: CharTokenizer
    ids: Tensor
    losses: Tensor  # nats per token, [n − 1]
    maps: list[AttentionMap]  # one per layer
    heads: list[Tensor]  # the heads' outputs of each layer, [n, h, d_v]

    @property
    def every(self) -> list[tuple[int, int]]:
        """Each head: its layer, and its number there."""
        return [(i, head) for i in range(len(self.heads)) for head in range(self.decoder.config.num_heads)]

    def attention(self, layer: int) -> Any:
        """The attention of a layer."""
        return self.decoder.blocks[layer].attention


@cache
def trained() -> Trained:
    """The embedded decoder with its results on the passage; loaded and run once."""
    decoder, tokenizer, _ = load_pretrained()
    return observed(decoder, tokenizer)


@cache
def untrained() -> Trained:
    """A decoder of the same sizes as it is before training, with its results on the passage."""
    with seeded(0):
        return observed(Decoder(trained().decoder.config).eval(), trained().tokenizer)


@torch.no_grad()
def observed(decoder: Decoder, tokenizer: CharTokenizer) -> Trained:
    """Run a decoder on the passage."""
    ids = torch.from_numpy(tokenizer.encode(PASSAGE))[None]
    with record_heads(find_heads(decoder)) as heads:
        logits, maps = decoder(ids, return_maps=True)
    return Trained(decoder, tokenizer, ids, _losses(logits, ids)[0], maps, [x[0].transpose(0, 1) for x in heads])


@torch.no_grad()
def losses_without(model: Trained, removed: list[tuple[int, int]], ids: Tensor | None = None) -> Tensor:
    """Nats per token, [n − 1], of the passage or other `ids` [1, n] with outputs of heads (layer, head) set to zero."""
    sites = find_heads(model.decoder)
    gates = [torch.ones(site.num_heads) for site in sites]
    for layer, head in removed:
        gates[layer][head] = 0.0
    with scale_heads(sites, gates):
        return losses_of(model.decoder, model.ids if ids is None else ids)[0]


@torch.no_grad()
def losses_of(decoder: Decoder, ids: Tensor, *, scale: float = 1.0) -> Tensor:
    """Nats per token of texts [b, n], as [b, n − 1]. scale: of the outputs of all heads."""
    sites = find_heads(decoder)
    with (
        scale_heads(sites, [torch.full((site.num_heads,), scale) for site in sites]) if scale != 1.0 else nullcontext()
    ):
        return _losses(decoder(ids), ids)


def _losses(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].float().mT, ids[:, 1:], reduction="none")
