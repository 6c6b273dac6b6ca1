"""What each head design costs: one function a design, with the sizes that its module takes, and one line in `DESIGNS`.

>>> multi_head(512, 8).parameters
1048576
>>> counts_of("mqa", {"d_model": 512, "num_heads": 8}).cache
128

Letters: d = d_model, h heads, h_kv key and value heads, d_k and d_v sizes of a key and a value. `options` are those of
`multi_head` that come after the heads.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from headwise.costs.counts import Counts, divided, one_of, positive
from headwise.errors import ConfigError, ShapeError


def multi_head(
    d_model: int,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    bias: bool | str = False,
    qk_norm: bool = False,
) -> Counts:
    """d·h·d_k + d·h_kv·(d_k + d_v) + h·d_v·d weights; 2n²h(d_k + d_v) FLOPs (Vaswani et al. 2017, 1706.03762).

    bias: on all projections, or on those of "qkvo" whose letters are given. qk_norm: a learned scale on queries and
    one on keys.
    """
    d, h = d_model, num_heads
    d_k = divided(d, h) if head_dim is None else head_dim
    d_v = d_k if value_dim is None else value_dim
    kv = h if num_kv_heads is None else num_kv_heads
    positive(d_model=d, num_heads=h, num_kv_heads=kv, head_dim=d_k, value_dim=d_v)
    if h % kv:
        raise ShapeError(f"num_heads={h} is not divisible by num_kv_heads={kv}")
    letters = bias if isinstance(bias, str) else "qkvo" if bias else ""
    biases = {"q": h * d_k, "k": kv * d_k, "v": kv * d_v, "o": d}
    if set(letters) - set(biases):
        raise ConfigError(f"bias={bias!r}: expected True, False, or letters of 'qkvo'")
    extra = sum(biases[letter] for letter in set(letters)) + (2 * d_k if qk_norm else 0)
    return Counts(
        parameters=d * h * d_k + d * kv * (d_k + d_v) + h * d_v * d + extra,
        width=d, heads=h, per_query=d * h * d_k, per_key=d * kv * (d_k + d_v), scores=h * d_k, weighted_sum=h * d_v,
        output=h * d_v * d, query=h * d_k, keys=kv * d_k, values=kv * d_v, concat=h * d_v, key_vectors=kv,
        value_vectors=kv,
    )  # fmt: skip


def mqa(d_model: int, num_heads: int, *, head_dim: int | None = None, value_dim: int | None = None) -> Counts:
    """All heads share one key and value head (Shazeer 2019, 1911.02150): the cache is h times smaller."""
    return multi_head(d_model, num_heads, num_kv_heads=1, head_dim=head_dim, value_dim=value_dim)


def gqa(
    d_model: int, num_heads: int, *, num_kv_heads: int, head_dim: int | None = None, value_dim: int | None = None
) -> Counts:
    """h / h_kv heads share each key and value head (Ainslie et al. 2023, 2305.13245)."""
    return multi_head(d_model, num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, value_dim=value_dim)


def latent(
    d_model: int,
    num_heads: int,
    *,
    latent_dim: int | None = None,
    rope_dim: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    query_latent_dim: int | None = None,
    latent_norm: bool = False,
) -> Counts:
    """Keys and values of all heads from one vector c of size d_c, and one rotary key of size d_h^R for all: a token
    caches d_c + d_h^R numbers (DeepSeek-V2, 2405.04434, §2.1).

    A full pass unfolds c into each head's keys and values; a decoding step moves those matrices to the query and to the
    output instead, and attends to c itself. latent_norm: a learned scale on c, and on the queries' vector.
    """
    d, h = d_model, num_heads
    d_h = divided(d, h) if head_dim is None else head_dim
    d_v = d_h if value_dim is None else value_dim
    d_c = 4 * d_h if latent_dim is None else latent_dim
    d_r = 2 * -(-d_h // 4) if rope_dim is None else rope_dim
    c_q = 0 if query_latent_dim is None else query_latent_dim
    positive(d_model=d, num_heads=h, latent_dim=d_c, head_dim=d_h, value_dim=d_v)
    positive(least=0, rope_dim=d_r, query_latent_dim=c_q)
    query = c_q * (d + h * (d_h + d_r)) if c_q else d * h * (d_h + d_r)
    down, up_k, up_v, out = d * (d_c + d_r), d_c * h * d_h, d_c * h * d_v, h * d_v * d
    shared = 1 if d_r else 0
    whole = Counts(
        parameters=query + down + up_k + up_v + out + (d_c + c_q if latent_norm else 0),
        width=d, heads=h, per_query=query, per_key=down + up_k + up_v, scores=h * (d_h + d_r), weighted_sum=h * d_v,
        output=out, query=h * (d_h + d_r), keys=h * d_h + d_r, values=h * d_v, concat=h * d_v, key_vectors=h + shared,
        value_vectors=h,
    )  # fmt: skip
    folded = replace(
        whole, per_query=query + up_k, per_key=down, scores=h * (d_c + d_r), weighted_sum=h * d_c, output=up_v + out,
        query=h * (d_c + d_r), keys=d_c + d_r, values=0, concat=h * d_c, key_vectors=1 + shared, value_vectors=0,
    )  # fmt: skip
    return replace(whole, decoding=folded)


def per_head(d_model: int, num_heads: int, **options: Any) -> Counts:
    """One matrix a head instead of one for all: the function, and the counts, of `multi_head`."""
    return multi_head(d_model, num_heads, **options)


def contraction(d_model: int, num_heads: int, **options: Any) -> Counts:
    """One tensor for all heads: the function, and the counts, of `multi_head`."""
    return multi_head(d_model, num_heads, **options)


def single_head(d_model: int, **options: Any) -> Counts:
    """`multi_head` with one head as wide as the model: as many weights and FLOPs, one softmax instead of h."""
    return multi_head(d_model, 1, **options)


def block_diagonal(
    d_model: int, num_heads: int, *, head_dim: int | None = None, value_dim: int | None = None
) -> Counts:
    """Each head reads only its own d / h channels: Q, K and V take d·(2d_k + d_v) weights, h times fewer than in
    `multi_head`; the attention and the output are the same."""
    divided(d_model, num_heads)
    full = multi_head(d_model, num_heads, head_dim=head_dim, value_dim=value_dim)
    query, key = full.per_query // num_heads, full.per_key // num_heads
    return replace(full, parameters=query + key + full.output, per_query=query, per_key=key)


def sparse_mixture(
    d_model: int, num_heads: int, *, top_k: int | None = None, per: str = "token", shared_heads: int = 0, **options: Any
) -> Counts:
    """A gate with d·(h − s) weights chooses k of the heads for each token, and s are always on: queries, attention and
    output of s + k heads; keys and values of all, as any token may choose any head (heads as experts: Zhang et al.
    2022, 2210.05144).

    per: "token"; or "sequence", which needs no other keys, and has no cache.
    """
    h = num_heads
    k = max(1, h // 4) if top_k is None else top_k
    full = multi_head(d_model, h, **options)
    one_of("per", per, "token", "sequence")
    if not 0 <= shared_heads < h or not 1 <= k <= h - shared_heads:
        raise ConfigError(f"top_k={k}, shared_heads={shared_heads}: expected 1 and 0 at least, {h} together at most")
    if per == "sequence" and full.key_vectors != h:
        raise ConfigError(f"per='sequence' gathers keys by head; num_kv_heads={full.key_vectors} shares them")
    on, gate = shared_heads + k, d_model * (h - shared_heads)

    def part(count: int) -> int:
        return count // h * on

    idle = full.per_query + full.output - part(full.per_query) - part(full.output)
    mixture = replace(
        full, parameters=full.parameters + gate, used=full.parameters + gate - idle, heads=on,
        per_query=part(full.per_query) + gate, scores=part(full.scores), weighted_sum=part(full.weighted_sum),
        output=part(full.output), output_weights=full.output, query=part(full.query), concat=part(full.concat),
    )  # fmt: skip
    if per == "token":
        return mixture
    return replace(
        mixture, used=mixture.met - full.per_key + part(full.per_key), per_key=part(full.per_key), keys=part(full.keys),
        values=part(full.values), key_vectors=on, value_vectors=on, cached=False,
    )  # fmt: skip


def mixture_of_heads(
    d_model: int, num_heads: int, *, top_k: int | None = None, shared_heads: int | None = None, **options: Any
) -> Counts:
    """`sparse_mixture` with weights for its shared heads and a balance of both kinds: routers of d·(h + 2) weights
    (Jin et al. 2024, 2410.11842, §3)."""
    positive(d_model=d_model, num_heads=num_heads)
    shared = max(1, num_heads // 4) if shared_heads is None else shared_heads
    top_k = max(1, num_heads // 2) if top_k is None else top_k
    mixture = sparse_mixture(d_model, num_heads, top_k=top_k, shared_heads=shared, **options)
    more = d_model * (shared + 2)
    parameters, per_query = mixture.parameters + more, mixture.per_query + more
    return replace(mixture, parameters=parameters, used=mixture.met + more, per_query=per_query)


def grouped_mlp(
    d_model: int, num_heads: int, *, num_groups: int | None = None, hidden: int | None = None, **options: Any
) -> Counts:
    """Instead of W_O, a dense map of (h/g·d_v)² weights in each of g groups of heads, and an MLP after them."""
    if options.get("bias") in (True, 1):
        options["bias"] = "qkv"  # there is no W_O, and the MLP always has its own
    full = multi_head(d_model, num_heads, **options)
    groups = (2 if num_heads % 2 == 0 else num_heads) if num_groups is None else num_groups
    hidden = d_model if hidden is None else hidden
    positive(num_groups=groups, hidden=hidden)
    if num_heads % groups:
        raise ShapeError(f"num_heads={num_heads} is not divisible by num_groups={groups}")
    output = full.concat**2 // groups + full.concat * hidden + hidden * d_model
    parameters = full.parameters - full.output + output + hidden + d_model
    return replace(full, parameters=parameters, output=output)


def head_mixing(d_model: int, num_heads: int, **options: Any) -> Counts:
    """`multi_head`, and then each token's heads attend to one another: 3d_v² + h² weights, and for each token
    3h·d_v² + 5h²·d_v multiply-adds before W_O."""
    full, h = multi_head(d_model, num_heads, **options), num_heads
    d_v = full.concat // h
    weights = 3 * d_v * d_v + h * h
    return replace(
        full, parameters=full.parameters + weights, output=full.output + 3 * h * d_v * d_v + 5 * h * h * d_v,
        output_weights=full.output + weights,
    )  # fmt: skip


def talking_heads(d_model: int, num_heads: int, **options: Any) -> Counts:
    """`multi_head` and two h×h maps between the heads' scores and weights: 2h² more weights, 4n²h² more FLOPs
    (Shazeer et al. 2020, 2003.02436)."""
    plain, maps = multi_head(d_model, num_heads, **options), 2 * num_heads * num_heads
    return replace(plain, parameters=plain.parameters + maps, mixing=maps)


def gated_output(d_model: int, num_heads: int, *, gate: str = "head", **options: Any) -> Counts:
    """`multi_head` with a sigmoid gate on each head's output, or on each of its channels: (d + 1)·h weights, or
    (d + 1)·h·d_v (Qiu et al. 2025, 2505.06708)."""
    one_of("gate", gate, "head", "channel")
    full = multi_head(d_model, num_heads, **options)
    gates = num_heads if gate == "head" else full.concat
    parameters = full.parameters + (d_model + 1) * gates
    return replace(full, parameters=parameters, per_query=full.per_query + d_model * gates, query=full.query + gates)


def convolution(
    d_model: int, num_heads: int, *, axes: int = 1, places: int = 1024, out_dim: int | None = None, bias: bool = False
) -> Counts:
    """A head for each of the h places of a kernel, h·d·out weights as in the convolution, and h·(axes + 1) for where
    they look; keys are codes of up to `places` positions, values the input itself (Cordonnier et al. 2020, 1911.03584).
    """
    d, h = d_model, num_heads
    out = d if out_dim is None else out_dim
    positive(d_model=d, num_heads=h, axes=axes, places=places, out_dim=out)
    code = 2 * axes * (math.ceil(math.log2(max(2, places))) + 2)
    return Counts(
        parameters=h * d * out + (out if bias else 0) + h * (axes + 1), width=d, heads=h, per_query=0, per_key=0,
        scores=h * code, weighted_sum=h * d, output=h * d * out, query=h * code, keys=code, values=d, concat=h * d,
        key_vectors=1, value_vectors=1, cached=False, masked=False,
    )  # fmt: skip


DESIGNS: dict[str, Callable[..., Counts]] = {
    function.__name__: function
    for function in (
        multi_head, mqa, gqa, latent, per_head, contraction, single_head, block_diagonal, sparse_mixture,
        mixture_of_heads, grouped_mlp, head_mixing, talking_heads, gated_output, convolution,
    )
}  # fmt: skip


def sizes_of(design: str) -> dict[str, bool]:
    """The sizes that a design takes, and whether it needs them; ConfigError if there is none of that name."""
    if design not in DESIGNS:
        close = get_close_matches(design, DESIGNS, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(DESIGNS)}"
        raise ConfigError(f"design={design!r}: unknown; {hint}")
    sizes: dict[str, bool] = {}
    for name, parameter in inspect.signature(DESIGNS[design]).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            sizes |= {option: needed for option, needed in sizes_of("multi_head").items() if not needed}
        else:
            sizes[name] = parameter.default is parameter.empty
    return sizes


def counts_of(design: str, sizes: Mapping[str, Any]) -> Counts:
    """The counts of a design by name; ConfigError for a name or size that is not known, or a size that is missing."""
    taken = sizes_of(design)
    for name in sizes:
        if name not in taken:
            raise ConfigError(f"{name}={sizes[name]}: {design} takes {', '.join(taken)}")
    missing = [name for name, needed in taken.items() if needed and name not in sizes]
    if missing:
        raise ConfigError(f"{design} needs {' and '.join(missing)}; it takes {', '.join(taken)}")
    return DESIGNS[design](**sizes)
