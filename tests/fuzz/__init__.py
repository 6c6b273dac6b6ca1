"""A fuzzer of `headwise.attend` and of the maps it returns: random cases against an oracle that shares no code with it.

    python -m tests.fuzz --seconds 600                # from the repository's root
    python -m tests.fuzz --seed 3 --case 1234         # one case again, shrunk, as a few lines of Python
    python -m tests.fuzz --skip dtype:bfloat16+read:received

A case is drawn from (seed, number) alone (`case.py`), becomes lines of Python (`source.py`) that make its tensors, its
call and its reads of the map, and these very lines are what runs and what a failure prints. `oracle.py` and `dense.py`
say what must come out, in float64 and from the formulas; `bounds.py` says how far off it may be; `check.py` and
`reads.py` compare; `shrink.py` looks for the smallest case with the same failure. After the cases come sequences of
what is done to the caches of layers (`sequences.py`) and edits of padded batches (`padded.py`); `--sequence 17` and
`--padded 17` run one of them again.

The tolerance of a case follows its conditioning, not its kernel. With u the unit roundoff of the accumulating dtype
(2⁻²⁴; 2⁻⁵³ for float64) and S the scores:

- scores: |ΔS| ≤ u·((3 + √d)·|scale|·Σ|q||k| + the cap, biases and the log-sum-exp that pass through the rounding).
- weights: the largest change of exp(S − lse) when every score moves by its ΔS. Logits of 1e9 are known to some tens,
  so of near ties anything is right; of what is not near, nothing else is.
- outputs, gradients, products, statistics: that change of the weights, summed as the formula sums them, the roundings
  of the sum, and those of the dtype (half precision may round weights to the dtype of v before the product).
- where no score is larger than 8 in magnitude, the contract holds as well: relative error ≤ 2e-6 (Frobenius) in
  float32, 6e-3 in bfloat16, 1e-3 in float16; and statistics ≤ 1e-5.
- rows of a map of float32 sum to 1 within 2e-6, or to what a learned sink leaves, however large the logits are; a read
  of logits above 10⁴ warns.
- exact, always: zeros and −∞ of fully masked queries, gradients of zero there; integers (keys, counts, offsets); the
  same bits for any number of threads of the compiled kernel, for a call repeated, and for a map saved and loaded whose
  kernel was not named.
- NaN and infinity: a query whose allowed scores hold NaN or +∞ is not finite, and so is its log-sum-exp; a value that
  is not finite makes its column of every query that may see it not finite; all other numbers are as if it were not
  there. Queries whose scores exceed 1e37 in an accumulating float32 are not compared.
"""
