"""Mixtures of heads: a sparse one that computes only selected heads, and mixture-of-head attention (MoH)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headwise.cache import Cache, ChosenCache
from headwise.costs.work import Counts, positive
from headwise.errors import ConfigError, check_choice
from headwise.kernels.graph import has_no_numbers, is_batched, recording
from headwise.masks import Mask
from headwise.nn.base import ProjectedLayer
from headwise.nn.chosen_pairs import by_choice
from headwise.nn.gated_output import Gates, choose_heads
from headwise.nn.layout import Coupling, Layout, Resizing, size
from headwise.nn.multi_head import MultiHeadAttention, copied_as, copy_projections
from headwise.nn.sparse_attention import SparseCall, by_sequence, by_token, without_data
from headwise.nn.steps import Notes, Steps
from headwise.rule import own_dtypes
from headwise.scores import Score
from headwise.wording import tr

UNCHOSEN = tr(
    "A row without weights is a token that did not select the head; the gate's weight on a head is not shown."
)


class SparseHeadMixture(ProjectedLayer):
    """y = Σ_{i ∈ TopK(G(X))} Softmax(G(X))_i · head_i W_i^O, k ≪ h, with the gate G(X) = X W_G.

    `per="token"`: k heads are selected for each token. Queries are computed for their selected heads only, grouped by
    head. `keys` decides on keys and values:

    - "all": a query attends to all tokens. Keys and values are computed for all tokens in heads that any query
      selected; with a cache in all heads, since a later token may select any of them.
    - "chosen": in each head, a query attends to the tokens that selected this head too, among them itself. Nothing of
      a head is computed for other tokens, so all work is proportional to k, and attention to k² / h. Self attention
      only, with as many KV heads as heads, and with the cache `ChosenCache`, which has holes.

    `per="sequence"`: the mean of X selects k heads for the whole sequence; queries, keys and values are computed for
    these, with matrices gathered for each batch entry. The gate reads the whole sequence, so it leaks later tokens into
    a causal model, includes padding, and rules out a cache.

    Scores are not supported: a bias is laid out for all queries and heads, and only some are computed.

    Args:
        top_k: routed heads per token or sequence, a quarter of all heads by default.
        per: "token" or "sequence".
        keys: "all" or "chosen", as above.
        top_p: select only as many of the top_k heads (all routed heads by default) as it takes for their probabilities
            to sum to top_p, so that the number of heads varies from token to token; at least one. per="token" only.
        threshold: select only those of the top_k heads (all by default) with at least this probability, and the most
            probable one; per="token" only.
        shared_heads: number of first heads that are always selected, with weight 1; the gate selects among the others.
        renormalise: divide the weights of the selected heads by their sum.
        d_model, num_heads, options: sizes, bias, dropout, rotary and qk_norm, as in `MultiHeadAttention`.

    Parameters: those of `MultiHeadAttention` and d_model·(h − shared_heads) for the gate.
    Cost: for each query, s + k instead of h heads of the query and output maps and of the attention; keys and values
        of s + k heads (`per="sequence"` and keys="chosen"), or of all heads that some token selected.
    Source: sparse gating as in Shazeer et al. 2017, 1701.06538, with heads as experts (Zhang et al. 2022, 2210.05144).
    """

    takes_score = False
    takes_none_as: ClassVar[Mapping[str, str]] = {
        "score": "a bias is laid out for all queries and heads, and only some are computed"
    }
    notes = Notes(
        summary=tr("a gate selects a few of many heads"),
        use=tr("a few of many heads suffice for each token or sequence"),
        source="sparse gates: Shazeer et al. 2017, 1701.06538; heads as experts: Zhang et al. 2022, 2210.05144",
        parameters="MHA's + d·(h − s)",
        work='queries, attention, output: (s + k)/h of them; with `keys="chosen"` also keys and values',
        cache='MHA\'s, or (s + k)/h of it with `keys="chosen"`; none with `per="sequence"`, which cannot decode',
        limits={
            'cache and fewer KV heads with `per="sequence"`': (
                "its gate reads the whole sequence, including later tokens and padding"
            ),
            'a context and fewer KV heads with `keys="chosen"`': "tokens select the heads of their own keys",
        },
        map=UNCHOSEN,
        compared=None,
        form_of=None,
    )

    coupling = Coupling("heads", "its gate selects some of the heads for each token by comparing all of them")
    resizing = Resizing()
    outside_attend = "its gate selects heads, and each head attends from the tokens that selected it"

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        top_k: int | None = None,
        per: str = "token",
        keys: str = "all",
        top_p: float | None = None,
        threshold: float | None = None,
        shared_heads: int = 0,
        renormalise: bool = False,
        bias: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_heads, bias=bias, **options)
        shared_heads, varies = size("shared_heads", shared_heads, 0), top_p is not None or threshold is not None
        most = num_heads - shared_heads if varies else max(1, num_heads // 4)
        top_k = most if top_k is None else size("top_k", top_k)
        if shared_heads >= num_heads:
            raise ConfigError(f"shared_heads={shared_heads}: expected 0 <= shared_heads < num_heads={num_heads}")
        if top_k > num_heads - shared_heads:
            raise ConfigError(
                f"top_k={top_k}: expected 1 <= top_k <= {num_heads - shared_heads}, the heads that are not shared"
            )
        check_choice("per", per, ("token", "sequence"))
        if per == "sequence" and self.num_kv_heads != num_heads:
            raise ConfigError(f"per='sequence' gathers keys by head; num_kv_heads={self.num_kv_heads} shares them")
        check_choice("keys", keys, ("all", "chosen"))
        if keys == "chosen" and (self.num_kv_heads != num_heads or self.context_dim != d_model or per != "token"):
            raise ConfigError(
                f"keys='chosen': requires per='token', num_kv_heads={num_heads} and context_dim={d_model}, as each "
                f"token selects the heads of its own keys; got {per!r}, {self.num_kv_heads} and {self.context_dim}"
            )
        for name, value in (("top_p", top_p), ("threshold", threshold)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
                raise ConfigError(f"{name}={value!r}: expected a number with 0 < {name} <= 1")
            if per == "sequence":
                raise ConfigError(f"{name}={value}: requires per='token'; a batch of sequences has one number of heads")
        self.keys, self.top_p, self.threshold = keys, top_p, threshold
        self.top_k, self.per, self.shared_heads, self.renormalise = top_k, per, shared_heads, renormalise
        self.o_proj = nn.Linear(num_heads * self.value_dim, d_model, bias=bias)
        self.gate = nn.Linear(d_model, num_heads - shared_heads, bias=False)

    def forward(self, x: Tensor, context: Tensor | None = None, *, return_gates: bool = False, **options: Any) -> Any:
        """As in `AttentionLayer`; with return_gates also the `Gates`, last.

        The map has all h heads; where a query did not select a head, its row is that of a fully masked query. The
        concatenation holds the weighted heads, and zeros where a head was not selected.
        """
        result = super().forward(x, context, **options)
        if not return_gates:
            return result
        gates = self.route(x)  # recomputed: cheap beside the attention, and the same selection
        return (*result, gates) if isinstance(result, tuple) else (result, gates)

    def compute(
        self, x: Tensor, source: Tensor, cache: Cache | None, options: dict[str, Any], return_concat: bool
    ) -> tuple[Tensor, Any, Any]:
        """As in `AttentionLayer`, for the selected heads only."""
        if not x.shape[0] * x.shape[1]:  # no queries, so nothing to select
            return super().compute(x, source, cache, options, return_concat)
        if has_no_numbers(x):
            name = type(self).__name__
            if recording():
                raise ConfigError(
                    f"{name} cannot be part of a graph of torch.export or make_fx: how many tokens select a head is "
                    f"known only from the data. torch.compile without fullgraph=True runs it between two graphs"
                )
            if isinstance(cache, ChosenCache):
                raise ConfigError(
                    f"cache: x has no data (it is on {x.device}, or a FakeTensor), and how many keys a ChosenCache "
                    f"keeps depends on the heads that {name} selects"
                )
            return without_data(SparseCall(self, x, source, self.route(x), cache, options, return_concat))
        measures = options.pop("measures")
        if not torch.compiler.is_dynamo_compiling() and (is_batched(x) or is_batched(self.gate.weight)):
            raise ConfigError(
                f"{type(self).__name__} does not support torch.func.vmap: its gate selects the heads that are computed "
                f"by the data; call it on the whole batch [b, n, d_model], or on one entry after another"
            )
        call = SparseCall(self, x, source, self.route(x), cache, options, return_concat)
        computed = by_sequence if self.per == "sequence" else by_choice if self.keys == "chosen" else by_token
        y, amap, concat = computed(call)
        if amap is not None and measures:
            amap.measured = amap.measure(*measures)
        return y, amap, concat

    def route(self, x: Tensor) -> Gates:
        """Return the gates of x [b, n, d_model], computed in the gate's own precision, also under autocast."""
        with own_dtypes(x):
            logits = self.gate(self.routed_by(x))
            probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        chosen = self._choice(probabilities)
        weights = probabilities * chosen[..., self.shared_heads :]
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return Gates(nn.functional.pad(weights, (self.shared_heads, 0), value=1.0), chosen, probabilities)

    def _choice(self, probabilities: Tensor) -> Tensor:
        """The selected heads, boolean [b, g, h], by the probabilities of the routed ones."""
        return choose_heads(probabilities, self.top_k, self.shared_heads, top_p=self.top_p, threshold=self.threshold)

    def routed_by(self, x: Tensor) -> Tensor:
        """Return the gate's input: every token, or the mean of the sequence, [b, n or 1, d_model]."""
        x = x.to(self.gate.weight.dtype)
        return x.mean(1, keepdim=True) if self.per == "sequence" else x

    def layout(self) -> Layout:
        """As in `ProjectedLayer`, and columns of W_O, which is not called with the concatenation."""
        return super().layout().into(self.o_proj, self.value_dim, called=False)

    @staticmethod
    def costs(
        d_model: int, num_heads: int, *, top_k: int | None = None, per: str = "token", keys: str = "all",
        shared_heads: int = 0, top_p: float | None = None, threshold: float | None = None, **options: Any,
    ) -> Counts:  # fmt: skip
        """A gate with d·(h − s) weights selects k heads for each token, and s are always selected: queries, attention
        and output of s + k heads; keys and values of all, as any token may select any head (heads as experts: Zhang et
        al. 2022, 2210.05144).

        per: "token"; or "sequence", which computes the keys of the selected heads only, and has no cache.
        keys: "all"; or "chosen", where keys and values are those of k + s heads, and a pair of tokens has
            s + k² / (h − s) heads in common if all routed heads are selected equally often (rounded up).
        top_p, threshold: the number of heads depends on the tokens; counted are the most, k or all.
        """
        h = num_heads
        most = max(1, h // 4) if top_p is None and threshold is None else h - shared_heads
        k = most if top_k is None else top_k
        full = MultiHeadAttention.costs(d_model, h, **options)
        check_choice("per", per, ("token", "sequence"))
        check_choice("keys", keys, ("all", "chosen"))
        if not 0 <= shared_heads < h or not 1 <= k <= h - shared_heads:
            raise ConfigError(
                f"top_k={k}, shared_heads={shared_heads}: expected 1 and 0 at least, {h} together at most"
            )
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
        if keys == "chosen":
            if per == "sequence" or full.key_vectors != h:
                raise ConfigError(
                    f"keys='chosen': requires per='token' and {h} KV heads; got {full.key_vectors} and {per!r}"
                )
            routed = h - shared_heads

            def shared_part(count: int) -> int:
                return count // h * shared_heads + -(-(count // h) * k * k // routed)

            mixture = replace(
                mixture, scores=shared_part(full.scores), weighted_sum=shared_part(full.weighted_sum),
                heads=shared_heads + -(-k * k // routed),
            )  # fmt: skip
        elif per == "token":
            return mixture
        return replace(
            mixture, used=mixture.met - full.per_key + part(full.per_key), per_key=part(full.per_key),
            keys=part(full.keys), values=part(full.values), key_vectors=on, value_vectors=on, cached=per == "token",
        )  # fmt: skip

    def steps(self, x: Tensor, note: Steps) -> None:
        """As in `AttentionLayer`, computed for all heads."""
        read, tokens = x, "b n"
        if self.per == "sequence":
            tokens = "b 1"
            read = note("pooled", x.mean(1, keepdim=True), "b 1 d_model", "x̄ = mean X",
                        tr("the gate reads the mean of the sequence"))  # fmt: skip
        probabilities, chosen = self._noted_choice(read, tokens, note)
        routed = probabilities * chosen[..., self.shared_heads :]
        if self.renormalise:
            routed = routed / routed.sum(-1, keepdim=True)
        shared = torch.ones_like(chosen[..., : self.shared_heads])
        self._noted_heads(x, torch.cat((shared, routed), -1), tokens, note)

    def _noted_choice(self, read: Tensor, tokens: str, note: Steps) -> tuple[Tensor, Tensor]:
        """Return the probabilities of the routed heads, and which of all heads are selected."""
        logits = self.gate(read)
        note("gate_logits", logits, f"{tokens} h_routed", "G = X W_G",
             tr("one number per head that may be selected"))  # fmt: skip
        probabilities = logits.softmax(-1)
        note("probabilities", probabilities, f"{tokens} h_routed", "softmax(G)", tr("as probabilities"))
        chosen = self._choice(probabilities).to(probabilities.dtype)
        note("chosen", chosen, f"{tokens} h", "TopK",
             tr("1 where the head is selected; the others are not computed"))  # fmt: skip
        return probabilities, chosen

    def _noted_heads(self, x: Tensor, gates: Tensor, tokens: str, note: Steps) -> None:
        """Note all heads; the call computes the selected ones only."""
        note("gates", gates, f"{tokens} h", "g",
             tr("the weight of each head, 0 where it was not selected"))  # fmt: skip
        q, k, v = note.projected(self, x)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        scores = note.scores(q, k)
        if self.keys == "chosen":
            has = (gates > 0).mT[:, :, None, :]  # [b, h, 1, m]
            own = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)  # rows of other tokens are not computed
            scores = note("among_chosen", scores.masked_fill(~(has | own), -torch.inf), "b h n m",
                          "S ← S + mask", tr("in each head, only tokens that selected it are keys"))  # fmt: skip
        heads = note.heads(note.weights(scores), v) * gates.mT[..., None]
        note("weighted", heads, "b h n d_v", "H_i ← g_i H_i", tr("each head times its weight"))
        note.output(self, heads)

    def check(
        self, x: Tensor, context: Tensor | None, cache: Cache | None, mask: Mask | None, scores: tuple[Score, ...] = ()
    ) -> None:
        super().check(x, context, cache, mask, scores)
        if self.keys == "chosen":
            if context is not None and context is not x:
                raise ConfigError("context: keys='chosen' supports self attention only; keys='all' supports a context")
            if cache is not None and not isinstance(cache, ChosenCache):
                raise ConfigError(
                    f"cache: keys='chosen' requires a ChosenCache(), got {type(cache).__name__}; layer.new_cache() "
                    f"makes the cache that a layer supports"
                )
        if cache is not None and self.per == "sequence":
            raise ConfigError("cache: requires per='token'; with per='sequence' the whole sequence selects the heads")

    def new_cache(self, window: int | None = None) -> Cache:
        return ChosenCache(window) if self.keys == "chosen" else super().new_cache(window)

    @property
    def reads_ahead(self) -> str:
        token = self.per == "token"
        return "" if token else "per='sequence' lets the gate read later tokens; a decoder requires per='token'"

    def extra_repr(self) -> str:
        """The sizes, for print(module)."""
        given = {name: getattr(self, name) for name in ("keys", "top_p", "threshold")}
        more = "".join(f", {name}={value!r}" for name, value in given.items() if value not in (None, "all"))
        return f"{super().extra_repr()}, top_k={self.top_k}, per={self.per!r}, shared_heads={self.shared_heads}{more}"


class MixtureOfHeads(SparseHeadMixture):
    """y = Σ_i g_i head_i W_i^O, the sum form of Concat(g_1 head_1 … g_h head_h) W_O, with, for each token x,

    g_i = α_1 Softmax(W_s x)_i for the h_s shared heads, g_i = α_2 Softmax(W_r x)_i for the top k of the other h_r
    heads and 0 for the rest, [α_1, α_2] = Softmax(W_h x).

    With `scaled` the weights average 1 instead of 1 / (h_s + k), so that a module converted from a
    trained `MultiHeadAttention` starts close to it: 2·h_s·g_i for the shared heads, and 2·k·g_i / Σ of the selected
    probabilities.

    Args:
        shared_heads: h_s, a quarter of the heads by default; the first ones.
        top_k: k, half of all heads by default.
        scaled: as above.
        d_model, num_heads, options: sizes, bias, dropout, rotary and qk_norm, as in `MultiHeadAttention`; gates are
            per token.

    Parameters: those of `MultiHeadAttention` and d_model·(h + 2) for the routers.
    Cost: as in `SparseHeadMixture` with per="token": queries, outputs and attention of h_s + k of h heads.
    Source: Jin et al. 2024, 2410.11842, §3.
    """

    coupling = SparseHeadMixture.coupling
    resizing = Resizing()
    outside_attend = SparseHeadMixture.outside_attend
    refused_options = frozenset({"top_p", "threshold"})
    layout = SparseHeadMixture.layout
    notes = Notes(
        summary=tr("heads that all tokens share and heads that each token selects"),
        use=tr(
            "a few of many heads suffice beside some that are always active; it can be converted from a trained module"
        ),
        source="Jin et al. 2024, 2410.11842",
        parameters="MHA's + d·(h + 2)",
        work="as sparse_mixture",
        cache="MHA's",
        limits={},
        map=UNCHOSEN,
        compared=None,
        form_of=None,
    )

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        shared_heads: int | None = None,
        top_k: int | None = None,
        scaled: bool = False,
        **options: Any,
    ) -> None:
        num_heads = size("num_heads", num_heads)
        shared_heads = max(1, num_heads // 4) if shared_heads is None else size("shared_heads", shared_heads, 0)
        if num_heads > 1 and shared_heads < 1:
            raise ConfigError(f"shared_heads={shared_heads}: expected at least 1; SparseHeadMixture supports 0")
        if options.get("per", "token") != "token":
            raise ConfigError(f"per={options['per']!r}: MixtureOfHeads selects heads per token; see SparseHeadMixture")
        top_k = max(1, num_heads // 2) if top_k is None else top_k
        super().__init__(d_model, num_heads, shared_heads=shared_heads, top_k=top_k, **options)
        self.scaled = scaled
        self.shared_gate = nn.Linear(d_model, shared_heads, bias=False)
        self.balance = nn.Linear(d_model, 2, bias=False)

    def route(self, x: Tensor) -> Gates:
        """As in `SparseHeadMixture`; probabilities are those of the routed heads."""
        with own_dtypes(x):
            x = x.to(self.gate.weight.dtype)
            wide = torch.promote_types(x.dtype, torch.float32)
            shared, routed, alpha = (
                linear(x).to(wide).softmax(-1) for linear in (self.shared_gate, self.gate, self.balance)
            )
        chosen = choose_heads(routed, self.top_k, self.shared_heads)
        kept = routed * chosen[..., self.shared_heads :]
        if self.scaled:
            shared = 2.0 * self.shared_heads * shared
            kept = 2.0 * self.top_k * kept / kept.sum(-1, keepdim=True)
        return Gates(torch.cat((alpha[..., :1] * shared, alpha[..., 1:] * kept), -1), chosen, routed)

    @staticmethod
    def costs(
        d_model: int, num_heads: int, *, top_k: int | None = None, shared_heads: int | None = None, **options: Any
    ) -> Counts:
        """`sparse_mixture` with weights for its shared heads and a balance of both kinds: routers of d·(h + 2) weights
        (Jin et al. 2024, 2410.11842, §3)."""
        positive(d_model=d_model, num_heads=num_heads)
        shared = max(1, num_heads // 4) if shared_heads is None else shared_heads
        top_k = max(1, num_heads // 2) if top_k is None else top_k
        mixture = SparseHeadMixture.costs(d_model, num_heads, top_k=top_k, shared_heads=shared, **options)
        more = d_model * (shared + 2)
        parameters, per_query = mixture.parameters + more, mixture.per_query + more
        return replace(mixture, parameters=parameters, used=mixture.met + more, per_query=per_query)

    def steps(self, x: Tensor, note: Steps) -> None:
        """As in `AttentionLayer`, computed for all heads."""
        probabilities, chosen = self._noted_choice(x, "b n", note)
        shared, alpha = self.shared_gate(x).softmax(-1), self.balance(x).softmax(-1)
        note("shared", shared, "b n h_shared", "softmax(X W_s)", tr("weights of the shared heads"))
        note("balance", alpha, "b n 2", "α = softmax(X W_h)",
             tr("the shares of the shared and of the selected heads"))  # fmt: skip
        routed = probabilities * chosen[..., self.shared_heads :]
        if self.scaled:
            shared = 2 * self.shared_heads * shared
            routed = 2 * self.top_k * routed / routed.sum(-1, keepdim=True)
        self._noted_heads(x, torch.cat((alpha[..., :1] * shared, alpha[..., 1:] * routed), -1), "b n", note)

    @classmethod
    def from_multi_head(
        cls,
        other: MultiHeadAttention,
        *,
        shared_heads: int | None = None,
        top_k: int | None = None,
        router_std: float = 0.01,
    ) -> "MixtureOfHeads":
        """Return a mixture with the weights of a trained module and `scaled=True`, for further training.

        The first heads become the shared ones. Routers start at zero; the one that selects heads starts with random
        weights of standard deviation `router_std`, so that tokens select different heads. With router_std=0 and all
        heads selected (top_k = h − shared_heads) it computes the function of the module.
        """
        module = copied_as(cls, other, shared_heads=shared_heads, top_k=top_k, scaled=True)
        copy_projections(other, module)
        for router, std in ((module.gate, router_std), (module.shared_gate, 0.0), (module.balance, 0.0)):
            nn.init.normal_(router.weight, std=std)
        return module
