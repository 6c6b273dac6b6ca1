"""The attention matrix as an object that computes its entries on demand.

    >>> import torch, headwise as hw
    >>> q, k, v = torch.randn(3, 1, 4, 1000, 32)
    >>> out, amap = hw.attend(q, k, v, mask=hw.Causal(), return_map=True)
    >>> amap.shape
    (1, 4, 1000, 1000)
    >>> amap[0, 3, 990:992, 0:500].shape                      # exact weights of any tile
    torch.Size([2, 500])
    >>> torch.allclose(amap @ v, out, atol=1e-5)              # it multiplies
    True
    >>> sorted(amap.measure("entropy", "sink_mass"))          # and is measured in one pass
    ['entropy', 'sink_mass']

It stores q, k and each row's log-sum-exp: p_ij = exp(S_ij − lse_i), O(n) memory (Dao et al. 2022).
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.base.read import write_tensors
from headwise.base.run import Progress, held_bytes
from headwise.errors import ConfigError, KernelError, ShapeError, check_whole
from headwise.kernels import KERNELS, check_name, named as kernel_of, read
from headwise.kernels.graph import has_no_numbers, in_graph
from headwise.kernels.quantized import Vectors, decoded
from headwise.kernels.reads import Matrix, TileReads
from headwise.map import file, pairs, shares
from headwise.map.gradients import Learned, attached
from headwise.map.index import TransposedMap, linear_operator, operand, reading, select
from headwise.map.unchanged import add_up, check_sums, noted
from headwise.masks import Mask, Span
from headwise.masks.given import put_tensors, take_tensors
from headwise.rule import Rule, pooling
from headwise.rule.pooling import Squares
from headwise.rule.tiles import Tile
from headwise.stats import Measure, Measurements, Statistic, measure, resolve, statistics_for
from headwise.table.show import Shown
from headwise.wording import scaled

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

DENSE_LIMIT = 1 << 26  # the most weights that to_dense() returns without force=True: 256 MB in float32


class AttentionMap(Shown):
    """Attention weights of all batch entries and heads, [b, h, n, m], computed from q, k and the log-sum-exp.

    All results are float32 (float64 for float64 inputs) and exact up to the rounding of the logits; numbers of
    `measure` per head are float32, computed in float64. Weights are those before dropout. Results are detached, unless
    the map is of `attend(…, differentiable=True)`: then q, k and the tensors of the scores have exact gradients from
    all of them, in O(n) memory, but not from counts and indices; results of `measure` are then in the dtype of others.

    Attributes:
        q, k: [b, h, n, d] and [b, h_kv, m, d], the tensors given to `attend` (no copy), in float32 if the keys were
            quantized (they are dequantized when they are first read); lse: [b, h, n]. A read raises ConfigError if one
            of them, or a tensor of the mask or the scores, was changed in place since; keep `clone()` of a map to read
            it after such a change. A cache that is written after the keys of the map changes none of them.
        layer: the name of the module that computed it, in the model that was watched or observed, or ""; first_head:
            the number in the layer of the map's first head, which `head` sets.
        rule: mask, scale and sizes; kernel: the kernel that computed it; refusals: why faster kernels did not.
        named: the kernel named in the call, which then also reads the map, or raises KernelError. "auto": the fastest
            kernel that supports a read, or the one that `use_kernel` or HEADWISE_KERNEL names at that time.
        read_by: the kernel of the last read of each kind: "weights", "tiles", "statistics", "times" and others.
        measured: the `Measurements` that `attend(..., measures=…)` requested, or None.
        nonfinite_values: [b, h_kv] count of NaN and infinite entries of v per KV head of v, or None if there are none.
            Values that are not computed, those of heads of a mixture that no token selected, count 0. Within
            `hw.intervene`, v is that of the model.
    """

    def __init__(
        self, q: Tensor, k: Vectors, lse: Tensor, rule: Rule, *, kernel: str = "", named: str = "auto",
        refusals: Mapping[str, str] | None = None, nonfinite_values: Tensor | None = None, whole: bool = True,
        differentiable: bool = False,
    ) -> None:  # fmt: skip
        """whole: whether the log-sum-exp is over the keys of the rule, so that rows sum to 1; False: over more."""
        self._q, self._lse, self.rule = q.detach(), lse.detach(), rule.kept()
        self._k = k.detach() if isinstance(k, Tensor) else k
        self._rounding = 0.0 if isinstance(k, Tensor) else torch.finfo(k.dtype).eps  # of keys that are dequantized
        self._inputs = noted(self._q, self._k, self.rule)
        self.kernel, self.named, self.refusals = kernel, named, dict(refusals or {})
        self.read_by: dict[str, str] = {}
        self.layer, self.first_head = "", 0
        self.nonfinite_values = nonfinite_values
        self.measured: Measurements | None = None
        self._whole, self._looked_at = whole, not whole
        self._read_from: Matrix | None = None
        self._exact: Tensor | None = None  # the log-sum-exp as gradients need it
        graph = torch.is_grad_enabled()
        self._learned = Learned(q, decoded(k), rule, self._lse) if differentiable and graph else None
        self._cut = graph and not differentiable and (q.requires_grad or (isinstance(k, Tensor) and k.requires_grad))

    @property
    def q(self) -> Tensor:
        """The queries, [b, h, n, d]."""
        self._check()
        return self._q

    @property
    def k(self) -> Tensor:
        """The keys, [b, h_kv, m, d]."""
        self._check()
        if not isinstance(self._k, Tensor):
            self._k = decoded(self._k)
            self._inputs = noted(self._q, self._k, self.rule)
        return self._k

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of each row, [b, h, n]."""
        return self._lse if self._learned is None else self._with_graph(self._lse, shares.LogSums())

    @property
    def differentiable(self) -> bool:
        """Whether results have gradients, as of `attend(…, differentiable=True)` outside of `torch.no_grad()`."""
        return self._learned is not None

    def _check(self) -> None:
        """Raise if an input has changed. What a graph returns is noted when it is first read."""
        if self._inputs is None:
            self._inputs = noted(self._q, self._k, self.rule)
        elif not in_graph():
            self._inputs.check(lambda: add_up(self._q, decoded(self._k), self._lse, self.rule))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(b, h, n, m)"""
        b, h, n, m = self.rule.grid
        return b, h, n, m

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the map holds: q, k, the log-sum-exp, the tensors of its mask and scores, and what its
        reads have kept. Memory shared by several counts once; a slice of a tensor keeps all of that tensor."""
        return held_bytes(self)

    @property
    def mask(self) -> Mask:
        """The mask of the call."""
        return self.rule.mask

    @reading
    def __getitem__(self, index: Any) -> Tensor:
        """Exact weights of a tile: `amap[b, h, i0:i1, j0:j1]`, with integers, slices and `...` as of a tensor, and
        lists of batch entries or heads.

        Only these rows and columns are computed. An omitted index selects the whole axis.
        """
        return select(index, self.shape, self._entries)

    @reading
    def log(self, index: Any = ...) -> Tensor:
        """ln of the weights of a tile, by an index as of the map itself, such as `np.s_[0, 3, 5:9, :]`; −∞ where
        masked. It is exact where weights underflow."""
        return select(index, self.shape, partial(self._entries, logs=True))

    def _entries(self, batch: range, heads: range, rows: range, cols: range, logs: bool = False) -> Tensor:
        """Weights, or their logarithms, [len(batch), len(heads), len(rows), len(cols)]."""
        self._look()
        places = batch, heads, rows, cols
        found = shares.log_weights(self._matrix, *places) if logs else self._read("weights", *places)
        if len(batch) == len(heads) == 1 and self._learned is not None:
            one = shares.Entries(range(1), range(1), rows, cols, logs=logs)
            return self._with_graph(found, one, head=(batch[0], heads[0]))
        return self._with_graph(found, shares.Entries(*places, logs=logs))

    def __len__(self) -> int:
        """The number of batch entries."""
        return self.shape[0]

    def __bool__(self) -> bool:
        """True, of an empty batch too."""
        return True

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """All weights as a NumPy array [b, h, n, m]; ConfigError if `to_dense` refuses so many."""
        if copy is False:
            raise ValueError("an attention map stores no weights: a NumPy array of them is always a copy")
        weights = self.to_dense().cpu().numpy()
        return weights if dtype is None else weights.astype(dtype, copy=False)

    def row(self, i: int) -> Tensor:
        """The weights of query i, [b, h, m]. A negative i counts from the end."""
        return self[:, :, i, :]

    @reading
    def __matmul__(self, x: Tensor) -> Tensor:
        """P @ x for x [m, e], or [b, h or h_kv, m, e]: [b, h, n, e]. Attention with the values x."""
        x = operand(x, self, "keys")
        return self._with_graph(self._read("times", x.detach()), shares.Product(), operand=x)

    @property
    def T(self) -> "TransposedMap[AttentionMap]":
        """The transpose, for `amap.T @ y`."""
        return TransposedMap(self)

    @reading
    def measure(self, *wanted: str | Measure, rows: bool = False, progress: Progress | None = None) -> Measurements:
        """Per-head statistics, all in one pass over the tiles: name → [b, h].

        Args:
            wanted: names (`headwise measures` lists them) and `Measure` objects.
            rows: also keep the value of each query, as `.rows[name]` [b, h, n].
            progress: called with the number of rows done and in total (`headwise.base.run`).
        """
        return self.measured_by(None, resolve(wanted), rows=rows, progress=progress)

    @reading
    def measured_by(
        self, found: Mapping[Statistic, Tensor] | None, wanted: Sequence[Measure], *, rows: bool = False,
        progress: Progress | None = None, lse: Tensor | None = None,
    ) -> Measurements:  # fmt: skip
        """Like `measure`, but uses the statistics that a kernel has already computed; None if there are none. lse: that
        of the call, with a graph if those statistics have one."""

        def tiles() -> Iterator[Tile]:
            streamed: Iterator[Tile] = self._read("tiles", progress)
            return streamed

        ran, given = self.kernel, found
        found = None if found is None else {s: x.detach() for s, x in found.items()}
        missing = tuple(s for s in statistics_for(wanted, self.rule) if found is None or s not in found)
        # Statistics missing from the output's kernel are not requested again, unless one kernel is named for all reads.
        if missing and (found is None or kernel_of(self.named) != "auto"):
            found = {**(found or {}), **self._read("statistics", missing, progress)}
            ran = self.read_by["statistics"]
        reduce = KERNELS[ran].reads.reduced if ran in KERNELS else None
        kept = rows or self.differentiable
        result = measure(tiles, self._lse, self.rule, wanted, rows=kept, found=found, reduce=reduce)
        result.nonfinite_values = self.nonfinite_values
        if not self.differentiable:
            return result
        joint = {} if lse is None or given is None else shares.joint_rows(wanted, given, lse, self._matrix)
        return shares.with_gradients(result, wanted, self._lse, self._with_graph, joint)

    @reading
    def pool(self, size: int, reduce: str = "mean", *, progress: Progress | None = None) -> Tensor:
        """A picture at most `size` wide and high: [b, h, ⌈n/cell⌉, ⌈m/cell⌉] with cell = ⌈max(n, m)/size⌉.

        "mean" averages the unmasked pairs of each square; "max" keeps peaks that a mean would hide.
        """
        cell = pooling.cell_for(size, reduce, *self.shape[2:])
        found = self._squares(range(self.shape[2]), range(self.shape[3]), cell, progress)
        return found.mean if reduce == "mean" else found.largest

    @reading
    def pooled(
        self, rows: range | slice, cols: range | slice, cell: int, *, progress: Progress | None = None
    ) -> Squares:
        """A rectangle pooled over squares of `cell` × `cell`, starting at its first row and column.

        Returns mean weight, largest weight and number of unmasked pairs, each [b, h, ⌈rows/cell⌉, ⌈cols/cell⌉]; all are
        0 if every pair is masked. For a single head use `amap.head(b, h).pooled(…)`.

            >>> import torch, headwise as hw
            >>> q, k, v = torch.randn(3, 1, 4, 1000, 32)
            >>> _, amap = hw.attend(q, k, v, mask=hw.Causal(), return_map=True)
            >>> mean, largest, allowed = amap.head(0, 2).pooled(range(500, 600), range(0, 600), 10)
            >>> mean.shape, int(allowed[0, 0, 0, 59])
            (torch.Size([1, 1, 10, 60]), 0)
        """
        n, m = self.shape[2:]
        rows, cols = pooling.side("rows", rows, n), pooling.side("cols", cols, m)
        cell = min(check_whole("pooled", "cell", cell, 1), max(len(rows), len(cols)))  # larger ones are one square
        return self._squares(rows, cols, cell, progress)

    def _squares(self, rows: range, cols: range, cell: int, progress: Progress | None) -> Squares:
        part = None if (len(rows), len(cols)) == self.shape[2:] else self._matrix.part(rows, cols)
        found: Squares = self._read("squares", cell, progress, of=part)
        at = Span(rows.start, rows.stop), Span(cols.start, cols.stop), cell, found.allowed
        mean = self._with_graph(found.mean, shares.SquareMeans(*at))
        return Squares(mean, self._with_graph(found.largest, shares.SquareMaxima(*at)), found.allowed)

    @reading
    def topk(self, k: int, *, progress: Progress | None = None) -> tuple[Tensor, Tensor]:
        """The k largest weights of each row and their keys, both [b, h, n, k], largest first; of equal scores the lower
        key comes first. Masked entries have weight 0 and key −1; rows that are NaN have weight NaN and key −1."""
        k = check_whole("topk", "k", k, 1)
        if k > self.shape[3]:
            raise ConfigError(f"topk(k={k}): expected 1 <= k <= {self.shape[3]}, the number of keys")
        weights, keys = self._read("top", k, progress)
        return self._with_graph(weights, shares.Largest(keys)), keys

    @reading
    def received(self) -> Tensor:
        """Column mass Σ_i p_ij, the weight that each key receives: [b, h, m]; without a learned sink it sums to the
        number of queries that are not fully masked."""
        return self._with_graph(self._read("received"), shares.Received())

    @reading
    def diagonals(self) -> tuple[Tensor, Tensor]:
        """Mean weight by relative distance: offsets (key − position, ascending) [n + m − 1] and means
        [b, h, n + m − 1] over the unmasked pairs of each diagonal; 0 if all are masked. If a cache has dropped tokens
        between the keys, they are the diagonals of the keys on both sides, n − 1 more or fewer if sides share some.
        Keys that are no tokens, as of add_bias_kv, have none."""
        n, parts = self.shape[2], []
        for cols in self.rule.grid.sides()[1 if self.rule.grid.extra else 0 :]:
            side = self._matrix if cols.size == self.shape[3] else self._matrix.part(range(n), range(*cols))
            sums = self._with_graph(self._read("diagonals", of=side), shares.Diagonals(n, cols))
            parts.append((side.rule, sums))
        return pooling.diagonal_means(parts)

    @pairs.comparing
    def kl(self, teacher: "AttentionMap", *, heads: pairs.Heads = None, renormalized: bool = False) -> Tensor:
        """KL(t ‖ p) = Σ_j t_ij ln(t_ij / p_ij) of each query, [b, h, n] in nats, from the weights t of another map.

        Gradients reach both maps, if they are differentiable. They may differ in all but batch, queries and keys. A
        learned sink's weight is divided out. Fully masked queries have 0. Source: Kullback & Leibler 1951.

        Args:
            teacher: the other map. heads: for each head of this map, one of the teacher's, or a list of those whose
                mean weights are t; None if they are the same heads.
            renormalized: divide t by its sum over the keys that this map may attend to, as for a sparse indexer.
        Raises:
            ConfigError: if t has weight on a key that is masked here, or none, with the query's index; if q or k has
                gradients and this map has not (`detach()` it for the number alone). ShapeError.
        """
        return pairs.beside(self, teacher, "kl", heads, renormalized)

    @pairs.comparing
    def js(self, other: "AttentionMap", *, heads: pairs.Heads = None) -> Tensor:
        """Jensen–Shannon divergence of each query from another map, [b, h, n], from 0 to ln 2: the mean of both KL
        divergences from the mean of both rows. Arguments as of `kl`; masks may differ. Source: Lin 1991."""
        return pairs.beside(self, other, "js", heads)

    @pairs.comparing
    def cross_entropy(
        self, targets: "AttentionMap | Tensor | pairs.Sparse", *, heads: pairs.Heads = None, empty: bool = False
    ) -> Tensor:
        """−Σ_j t_ij ln p_ij of each query, [b, h, n] in nats, of which `kl` is another form; errors as there.

        Args:
            targets: another map; or a tensor [n, m] or broadcasting to [b, h, n, m]; or a pair of keys and weights,
                both broadcasting to [b, h, n, count], key −1 for none. Each row is divided by its sum.
            heads: as of `kl`, for a map. empty: whether rows may sum to 0, which then have 0.
        """
        return pairs.beside(self, targets, "cross_entropy", heads, empty=empty)

    def to_dense(self, *, force: bool = False) -> Tensor:
        """All weights, [b, h, n, m]. Raises ConfigError above 2²⁶ weights (256 MB in float32) unless `force=True`."""
        b, h, n, m = self.shape
        if b * h * n * m > DENSE_LIMIT and not force:
            raise ConfigError(
                f"to_dense(): {b}×{h}×{n}×{m} weights would take {b * h * n * m * 4 / 1e9:.1f} GB; index a tile, "
                f"pool() it, or use to_dense(force=True)"
            )
        return self[:]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the map as safetensors (q, k, log-sum-exp, mask, scale, scores): O(n) bytes, atomically. Raises
        CheckpointError if the file cannot be written, or the class of the mask or of a score is not registered."""
        tensors = {"q": self.q, "k": self.k, "lse": self._lse}
        if self.nonfinite_values is not None:
            tensors["nonfinite_values"] = self.nonfinite_values
        content = file.content(tensors, self.rule, self.kernel)
        self._look()
        write_tensors(path, *content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "AttentionMap":
        """Load a map that `save` wrote. Raises CheckpointError if the file is missing, of another format or damaged.

        `kernel` is the kernel that computed it. `named` is "auto", because this machine may have other kernels.
        """
        tensors, rule, kernel = file.load(path)
        q, k, lse = (tensors[name] for name in ("q", "k", "lse"))
        return cls(q, k, lse, rule, kernel=kernel, nonfinite_values=tensors.get("nonfinite_values"))

    def as_linear_operator(self, batch: int = 0, head: int = 0) -> "LinearOperator":
        """One head as a SciPy `LinearOperator` of shape (n, m), for randomized SVD and eigenvalues without n×m."""
        return linear_operator(self.head(batch, head))

    def head(self, batch: int, head: int) -> "AttentionMap":
        """The map of one batch entry and head, shape (1, 1, n, m); no copy."""
        b, h = self.shape[:2]
        batch, head = check_whole("head", "batch", batch, 0), check_whole("head", "head", head, 0)
        if not (0 <= batch < b and 0 <= head < h):
            raise ShapeError(f"head(batch={batch}, head={head}): the map has {b} batch entries and {h} heads")
        strange = self.nonfinite_values
        if strange is not None:
            strange = strange[batch, head // (h // strange.shape[1])].view(1, 1)
        part = self._matrix.head(batch, head)
        one = AttentionMap(
            *part[:4], kernel=self.kernel, named=self.named, refusals=self.refusals, nonfinite_values=strange,
            whole=self._whole,
        )  # fmt: skip
        one._read_from, one._cut, one.layer, one.first_head = part, self._cut, self.layer, self.first_head + head
        one._learned = None if self._learned is None else self._learned.head(batch, head)
        return one

    def clone(self) -> "AttentionMap":
        """Return the same map with copies of q, k and the tensors of its mask and scores: O(n) memory. It can be read
        after those were changed in place."""
        self._check()
        same = copy(self)
        same._q, same._k, same._read_from = self._q.clone(), self._k.clone(), None
        mask, held = take_tensors(self.rule.mask)
        scores = tuple(score.mapped(Tensor.clone) for score in self.rule.scores)
        same.rule = replace(self.rule, mask=put_tensors(mask, [x.clone() for x in held]), scores=scores)
        same._inputs = noted(same._q, same._k, same.rule)
        same._learned = None if self._learned is None else self._learned.clone()
        return same

    def detach(self) -> "AttentionMap":
        """Return the same map without gradients. No copy."""
        same = copy(self)
        same._learned, same._cut = None, False
        if isinstance(self.measured, shares.LearnedMeasurements):
            same.measured = self.measured.detach()
        return same

    def using(self, kernel: str) -> "AttentionMap":
        """Return the same map with another kernel for its reads, which run with it or raise; "auto": the fastest that
        supports a read. No copy.

        Raises ConfigError if there is no kernel of that name."""
        check_name(kernel)
        same = copy(self)
        same.named, same.read_by = kernel, {}
        return same

    def __repr__(self) -> str:
        b, h, n, m = self.shape
        scores = "".join(f", {score!r}" for score in self.rule.scores)
        missing = self.rule.grid.gap
        gap = f" without tokens {missing.start}:{missing.stop}" if missing.size else ""
        gap += f", the first {extra} no tokens" if (extra := self.rule.grid.extra) else ""
        name = f"{self.layer}, head {self.first_head}" if h == 1 else self.layer
        name = f"{name}: " if self.layer else ""
        return (
            f"AttentionMap({name}{b} × {h} heads, {n} queries × {m} keys{gap}, {self.rule.mask!r}{scores}, "
            f"kernel {self.kernel}; "
            f"{scaled(self.nbytes, 'B')} stored, {scaled(b * h * n * m * 4, 'B')} if dense)"
        )

    def __copy__(self) -> "AttentionMap":
        self._check()
        same = object.__new__(type(self))
        vars(same).update(vars(self))
        return same

    def __getstate__(self) -> dict[str, Any]:
        self._check()
        return {**vars(self.detach()), "_inputs": None, "_read_from": None, "_exact": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _read_from=None)
        self._inputs = noted(self._q, self._k, self.rule)  # a copy's memory has counts of its own

    @property
    def _matrix(self) -> Matrix:
        q, k = self.q, self.k  # raises if they have changed
        if self._read_from is None:
            self._read_from = (Matrix.of_all_keys if self._whole else Matrix)(q, k, self._lse, self.rule)
        return self._read_from

    def _with_graph(
        self, value: Tensor, of: shares.Shares, *, operand: Tensor | None = None, head: tuple[int, int] | None = None
    ) -> Tensor:
        """What was read, as a node of the graph if the map is differentiable; head: the only one it depends on."""
        if self._learned is None or not torch.is_grad_enabled():
            return value
        learned = self.with_exact()
        return attached(value, of, learned if head is None else learned.head(*head), operand=operand)

    def tensors(self) -> Learned:
        """The tensors of the map, with their graph if it is differentiable; internal."""
        learned = self._learned or Learned(self.q, self.k, self.rule, self._lse)
        return replace(learned, rule=replace(self.rule, scores=learned.rule.scores))

    def with_exact(self) -> Learned:
        """`tensors` with the exact log-sum-exp; internal."""
        self._look()
        if self._exact is None:
            with torch.no_grad():
                self._exact = TileReads().exact(self._matrix).lse
        return replace(self.tensors(), lse=self._exact)

    def _look(self) -> None:
        """Check before the first read that the weights add up."""
        if not (self._looked_at or in_graph() or has_no_numbers(self._lse)):
            check_sums(self._q, self.k, self._lse, self.rule, self._rounding)
            self._looked_at = True

    def _read(self, what: str, *given: Any, of: Matrix | None = None) -> Any:
        """The result of the method `what` of `kernels.reads.Reads` for this map, or for a part of it."""
        if has_no_numbers(self._lse):
            raise KernelError(f"this map has no data to read: it is on {self._lse.device}, or consists of FakeTensors")
        self._look()
        found, name = read(what, self._matrix if of is None else of, *given, kernel=self.named)
        self.read_by[what] = name
        return found
