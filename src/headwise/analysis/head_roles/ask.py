"""`roles`: the one door to the roles of heads."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from headwise.analysis.head_roles import given
from headwise.analysis.head_roles.collect import collect
from headwise.analysis.head_roles.coreference import Mention, coreference
from headwise.analysis.head_roles.result import Roles
from headwise.analysis.head_roles.sight import Sight
from headwise.analysis.head_roles.syntax import Placed, syntax
from headwise.analysis.head_roles.targets import Told
from headwise.errors import ConfigError, DTypeError, ShapeError
from headwise.map import AttentionMap


def roles(
    maps: AttentionMap | Sequence[AttentionMap],
    *,
    tokens: Any = None,
    pieces: Any = None,
    frequencies: Mapping[int, float] | Tensor | None = None,
    arcs: Sequence[Placed] = (),
    mentions: Sequence[Mention] = (),
    reach: int = 8,
    radius: int = 8,
    rare: float = 0.05,
) -> Roles:
    """What each head does on this input: its score for every role, and the roles that it plays.

    O(n) memory: one pass of the kernel a layer for entropies and classes of keys, and a few products a query for the
    rest; 32,768 tokens are as well as 32. Queries and keys are one sequence, the queries at its end.

    Args:
        maps: a map for each layer, all of one size and number of heads.
        tokens: integers [m] or [b, m], for repeats and induction.
        pieces: the text of each token, a list of m strings or one list a batch entry, for separators and punctuation.
        frequencies: how often each token is in some corpus, token → count or one number a token, for rare tokens; needs
            `tokens`.
        arcs: sentences with their trees, as `place_words` gives them, for syntax.
        mentions: of entities, for coreference; with `pieces` or `tokens`, equal head words are a baseline too.
        reach: offsets −reach … reach are looked through for the best one. radius: what is nearby, in tokens.
        rare: share of the keys that counts as rare.
    Returns:
        `Roles`: role → `RoleScore` with arrays [layers, heads], and `labels(layer, head)`.
    Raises:
        ShapeError, DTypeError, ConfigError: naming the argument.
    Source: Clark et al. 2019, 1906.04341; Voita et al. 2019, 1905.09418; Olsson et al. 2022, 2209.11895; Wang et al.
    2022, 2211.00593; Gu et al. 2024, 2410.10781; thresholds, each with its source: `science.roles.DEFINITIONS`.
    """
    layers = _layers(maps)
    b, _, _, m = layers[0].shape
    for name, value in (("reach", reach), ("radius", radius)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r}: expected a whole number of tokens, at least 1")
    ids = None if tokens is None else given.token_ids(tokens, b, m)
    rows = None if pieces is None else given.texts(pieces, b, m)
    classes = {} if rows is None else given.classes(rows)
    if frequencies is not None:
        if ids is None:
            raise ConfigError("frequencies: need tokens=, the integers that they are the frequencies of")
        classes["rare"] = given.rare(ids, Sight(layers[0].rule).seen(), frequencies, rare)
    collected = collect(layers, Told(ids, classes, reach, radius))
    heads = ids.tolist() if rows is None and ids is not None else rows
    return Roles(
        collected,
        reach,
        syntax(layers, list(arcs)) if arcs else {},
        coreference(layers, list(mentions), heads) if mentions else None,
    )


def _layers(maps: AttentionMap | Sequence[AttentionMap]) -> list[AttentionMap]:
    layers = [maps] if isinstance(maps, AttentionMap) else list(maps)
    if not layers:
        raise ConfigError("maps: there is none; give the map of each layer, as attend(…, return_map=True) makes them")
    for index, amap in enumerate(layers):
        if not isinstance(amap, AttentionMap):
            raise DTypeError(f"maps[{index}]: expected an AttentionMap, got {type(amap).__name__}")
        if amap.shape != layers[0].shape:
            raise ShapeError(
                f"maps[{index}]: {tuple(amap.shape)}, but maps[0] is {tuple(layers[0].shape)}; all layers need one size"
            )
    if 0 in layers[0].shape:
        raise ShapeError(f"maps: {tuple(layers[0].shape)} [batch, heads, queries, keys] holds nothing to look at")
    return layers
