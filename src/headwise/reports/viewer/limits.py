"""How long a text may be: what the user allows, what the model can read, and what fits into this machine's memory."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from headwise.lm.loading import Subject
from headwise.lm.loading.remarks import Remark

MAX_TOKENS = 1 << 17
SHARE = 0.5  # of the free memory that the largest text may take
ACTIVATIONS = 28  # vectors of the model's width that a forward pass holds for each token, beside the maps
CHARACTERS = 8  # of a text that is looked at, for each token that may be read, where tokens are longer than characters
AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class Limits:
    """The longest text.

    Attributes:
        tokens, characters: at most so many.
        why: the reason of the number of tokens, to stand in a message.
    """

    tokens: int
    characters: int
    why: Remark


def limits_of(subject: Subject, max_tokens: int = MAX_TOKENS) -> Limits:
    """The limits of a model on this machine. Runs the model on a single token, to see what its maps hold."""
    tokens, why = max_tokens, Remark("limit_of_option", "set by --max-tokens")
    if subject.limit is not None and subject.limit < tokens:
        tokens = subject.limit
        why = Remark("limit_of_positions", "{name} has no positions beyond that", name=subject.name)
    free = free_memory()
    if free is not None:
        fits = int(SHARE * free / bytes_a_token(subject))
        if fits < tokens:
            tokens = max(1, fits)
            why = Remark("limit_of_memory", "more does not fit into the free memory of this machine")
    return Limits(tokens, tokens if subject.kind == "headwise" else CHARACTERS * tokens, why)


def bytes_a_token(subject: Subject) -> int:
    """What a token takes while a text is read: q, k and the log-sum-exp of every head, and the activations."""
    maps = subject.maps(torch.zeros(1, dtype=torch.long))
    held = sum(x.nbytes for amap in maps.values() for x in (amap.q, amap.k, amap.lse))
    width = max(amap.q.shape[1] * amap.q.shape[3] for amap in maps.values())
    return held + ACTIVATIONS * width * 4


def free_memory() -> int | None:
    """Bytes that could be taken now; half of all memory where the system does not tell; None if it tells nothing."""
    info = Path("/proc/meminfo")
    found = AVAILABLE.search(info.read_text()) if info.exists() else None
    if found:
        return int(found[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return None
