"""The maximum length of a text: by option, by the model, and by the free memory of this machine."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from headwise.lm.loading import LoadedModel
from headwise.reports.messages import message
from headwise.wording import Message

MAX_TOKENS = 1 << 17
SHARE = 0.5  # of the free memory for the longest text
ACTIVATIONS = 28  # vectors of the model's width per token in a forward pass, besides the maps
CHARACTERS = 8  # per token in the limit of characters, where tokens are longer than characters
AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class Limits:
    """The maximum length of a text.

    Attributes:
        tokens, characters: the maximum numbers.
        why: the reason for the number of tokens, for messages.
    """

    tokens: int
    characters: int
    why: Message


def limits_of(subject: LoadedModel, max_tokens: int = MAX_TOKENS) -> Limits:
    """The limits of a model on this machine. Runs the model on one token to find the size of its maps."""
    tokens, why = max_tokens, message("limit_of_option")
    if subject.limit is not None and subject.limit < tokens:
        tokens = subject.limit
        why = message("limit_of_positions", name=subject.name)
    free = free_memory()
    if free is not None:
        fits = int(SHARE * free / bytes_a_token(subject))
        if fits < tokens:
            tokens = max(1, fits)
            why = message("limit_of_memory")
    return Limits(tokens, tokens if subject.kind == "headwise" else CHARACTERS * tokens, why)


def bytes_a_token(subject: LoadedModel) -> int:
    """Bytes per token while a text is computed: q, k and the log-sum-exp of every head, and the activations."""
    maps = subject.maps(torch.zeros(1, dtype=torch.long))
    held = sum(x.nbytes for amap in maps.values() for x in (amap.q, amap.k, amap.lse))
    width = max(amap.q.shape[1] * amap.q.shape[3] for amap in maps.values())
    return held + ACTIVATIONS * width * 4


def free_memory() -> int | None:
    """Bytes of available memory; half of all memory where only that is known, None where neither is."""
    info = Path("/proc/meminfo")
    found = AVAILABLE.search(info.read_text()) if info.exists() else None
    if found:
        return int(found[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return None
