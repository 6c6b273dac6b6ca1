"""Mutation testing: apply small defects to the library one by one and check that the tests fail.

    python scripts/mutants.py                        # run the tests of `make test`, then those of `make test-all`
    python scripts/mutants.py --only masks           # only mutants of files whose path contains a word
    python scripts/mutants.py --tests ../other/tests # run another test suite

Each mutant changes one line in a copy of the library, like a typing error. Its test files run until the first failure.
One line per mutant reports which tests killed it, or that it is alive: then a test is missing, or the change has no
effect. On one core this takes about twenty minutes.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
QUICK = "not thorough and not slow and not bench and not wheel"
ALL = "not slow and not bench and not wheel"
TIMEOUT = 600.0  # seconds for the tests of one mutant


class Mutant(NamedTuple):
    """path: in src/headwise; old: text that occurs there once, replaced by new; tests: files in tests/."""

    path: str
    old: str
    new: str
    tests: str


CACHES = "core/test_cache.py core/test_cache_storage.py"
KERNELS = "core/test_kernels.py core/test_scores.py"
MAPS = "core/test_map.py core/test_map_kernels.py"
MASKS = "core/test_masks.py core/test_lowering.py core/test_kernels.py"
MEASURES = "core/test_measures.py core/test_measures_range.py core/test_map_compiled.py"
SCORES = "core/test_scores.py core/test_lowering.py"
BLOCKS = "parallel/test_blocks.py"
FILES = "core/test_tensor_files.py core/test_map_file.py lm/test_lm_checkpoint.py core/test_outputs.py"
MUTANTS = [
    Mutant(path, *change, tests)
    for path, tests, changes in [
        ("masks/positional.py", MASKS, [
            ("return ((rows + grid.shift)[:, None] >= cols)", "return ((rows + grid.shift)[:, None] > cols)"),
            ("return ((rows + grid.shift)[:, None] >= cols)", "return (rows[:, None] >= cols)"),
            ("if cols.start > rows.stop - 1 + grid.shift:", "if cols.start >= rows.stop - 1 + grid.shift:"),
            ("return State.FULL if cols.stop - 1 <= rows.start + grid.shift", "return State.FULL if cols.stop - 2 <= rows.start + grid.shift"),
            ("return spans.one(0, grid.positions()[None] + 1, grid.m)", "return spans.one(0, grid.positions()[None], grid.m)"),
            ("(distance < self.left) & (distance >= -self.right)", "(distance <= self.left) & (distance >= -self.right)"),
            ("(distance < self.left) & (distance >= -self.right)", "(distance < self.left) & (distance > -self.right)"),
            ("if nearest >= self.left or farthest < -self.right:", "if nearest >= self.left - 1 or farthest < -self.right:"),
            ("State.FULL if farthest < self.left and nearest", "State.FULL if farthest <= self.left and nearest"),
            ("return spans.one(position - left + 1,", "return spans.one(position - left,"),
            ("return (cols < self.count)", "return (cols <= self.count)"),
            ("return State.FULL if cols.stop <= self.count", "return State.FULL if cols.stop <= self.count + 1"),
        ]),
        ("masks/given.py", MASKS, [
            ("else index >= size - lengths", "else index > size - lengths"),
            ("return State.FULL if stop <= low", "return State.FULL if stop <= high"),
            ("if start >= high:", "if start >= low:"),
            ("return spans.one(grid.m - lengths, grid.m, grid.m)", "return spans.one(grid.m - lengths + 1, grid.m, grid.m)"),
            ("& (of_key >= 0)[:, None, :])", ")"),
            ("ids[:, rows + grid.shift], ids[:, cols]", "ids[:, rows], ids[:, cols]"),
            ("& (first_q == first_k) & (first_k >= 0)", "& (first_q == first_k)"),
            ("torch.where(closes, key + 1, grid.m)", "torch.where(closes, key, grid.m)"),
        ]),
        ("masks/positional.py", CACHES, [
            ("(distance < self._lengths", "(distance <= self._lengths"),
            ("if farthest < self._least or", "if farthest < self._most or"),
            ("nearest >= self._most and", "nearest >= self._least and"),
        ]),
        ("masks/spans.py", MASKS, [
            ("opens[..., 1:] = start[..., 1:] > reach[..., :-1]", "opens[..., 1:] = start[..., 1:] >= reach[..., :-1]"),
            ('scatter_reduce(-1, place, stop, "amax")', 'scatter_reduce(-1, place, stop, "amin")'),
            ("stop = torch.minimum(left[..., :, None, 1]", "stop = torch.maximum(left[..., :, None, 1]"),
        ]),
        ("rule/__init__.py", f"{KERNELS} {MAPS}", [
            ("scores = raw_scores(q, k, scale / soft_cap, None, out).tanh_()", "scores = raw_scores(q, k, scale, None, out).tanh_()"),
            ("return scores if minus is None else scores.clamp_(max=0.0)", "return scores"),
            ("padded = torch.nn.functional.pad(x.flip(2), (0, r))", "padded = torch.nn.functional.pad(x, (0, r))"),
        ]),
        ("rule/__init__.py", BLOCKS, [
            ("return -(sink_weight(sinks, lse) * delta).sum((0, 2))", "return (sink_weight(sinks, lse) * delta).sum((0, 2))"),
        ]),
        ("scores/base.py", f"{KERNELS} {MAPS}", [
            ("_all(torch.add, [_split(one, split) for one in given])", "_all(lambda one, other: other, [_split(one, split) for one in given])"),
            ("_all(torch.logaddexp, [one.sinks", "_all(torch.maximum, [one.sinks"),
        ]),
        ("scores/kinds.py", SCORES, [
            ("first, rows = 1 - grid.n - grid.shift, max", "first, rows = 1 - grid.n, max"),
            ("return -self.slopes.to(offset.device, dtype)[:, None] * offset.abs()", "return -self.slopes.to(offset.device, dtype)[:, None] * -offset"),
            ("(offset - self.first).clamp(0, values.shape[1] - 1)", "(offset - self.first).clamp(0, values.shape[1] - 2)"),
            ("slopes += [2.0 ** (-4.0 * i / power) for i in range(1, 2 * power, 2)]", "slopes += [2.0 ** (-4.0 * i / power) for i in range(2, 2 * power, 2)]"),
            ("bucket = bucket + (offset > 0) * buckets", "bucket = bucket + (offset >= 0) * buckets"),
            ("bucket = torch.where(distance < exact,", "bucket = torch.where(distance < exact - 1,"),
        ]),
        ("kernels/joint.py", KERNELS, [
            ("self.sinks -= (mass * delta.squeeze(-1)).sum((0, 2))", "self.sinks += (mass * delta.squeeze(-1)).sum((0, 2))"),
        ]),
        ("kernels/torch_blocks.py", KERNELS, [
            ("total = total.mul_(keep).add_(weights.sum(-1))", "total = total.add_(weights.sum(-1))"),
            ("base = new_top.masked_fill(new_top == -torch.inf, 0.0)", "base = new_top"),
            ("mixed, top = mixed.mul_(keep[..., None]), torch.where(empty, top, base)", "mixed, top = mixed.mul_(keep[..., None]), base"),
            ("delta = (d_out * compute(out[:, :, r])).sum(-1, keepdim=True)", "delta = d_out.sum(-1, keepdim=True)"),
            ("            d_scores.mul_(call.rule.scale)\n", ""),
            ("d_weights = drop(grouped(d_out, values.mT), rows, cols)", "d_weights = grouped(d_out, values.mT)"),
            ("rows_out.masked_fill_(poison, torch.nan)", "pass"),
            ("self.seed + rows.start * self.m + cols.start", "self.seed + rows.start * self.m"),
            ("d_scores.mul_(slope if allowed is None", "d_scores.mul_(1.0 if allowed is None"),
        ]),
        ("stats/weights.py", MEASURES, [
            ("return total[..., 1] >= 2", "return total[..., 1] >= 1"),
            ("return entropy / keys.clamp_min(2).log()", "return entropy / keys.clamp_min(2).log2()"),
        ]),
        ("stats/weights.py", f"{BLOCKS} {MEASURES}", [
            ("mass, squares = (a * one[..., 1] + b * other[..., 1], a * a * one[..., 2] + b * b * other[..., 2])", "mass, squares = (a * one[..., 1] + b * other[..., 1], a * one[..., 2] + b * other[..., 2])"),
            ("return log_share.exp().square() * x", "return log_share.exp() * x"),
        ]),
        ("stats/weights.py", MEASURES, [
            ("both = torch.cat((one, other), -1)\n        return both", "both = one\n        return both"),
        ]),
        ("stats/places.py", f"{BLOCKS} {MEASURES}", [
            ("+ apart.square() * mine * share", "+ apart.square() * mine"),
            ("return self.shared(here, one.log_share) + self.shared(there, other.log_share)", "return self.shared(here, one.log_share) + there"),
        ]),
        ("stats/places.py", f"{BLOCKS} {MEASURES}", [
            ("self._range = RangeMass(-radius, radius + 1, relative=True)", "self._range = RangeMass(-radius, radius, relative=True)"),
            ("near = (tile.positions[:, None] - tile.keys).abs() <= self.radius", "near = (tile.positions[:, None] - tile.keys).abs() < self.radius"),
            ("inside = self.count - tile.tokens.start", "inside = self.count"),
            ("return total[..., 1] > 0", "return total[..., 1] >= 0"),
            ("min(max(end - cols.start, 0), cols.size)", "min(max(end, 0), cols.size)"),
        ]),
        ("stats/keys.py", BLOCKS, [
            ("return type(self)(self.weights[:, cols.start : cols.stop])", "return type(self)(self.weights[:, : cols.stop - cols.start])"),
        ]),
        ("rule/tiles.py", MEASURES, [
            ("target = self.positions + offset - self.tokens.start", "target = self.positions + offset"),
            ("edge = tokens.stop - 1 if before else tokens.start", "edge = tokens.stop if before else tokens.start"),
            ("self.rows.stop + first, device=self.lse.device)", "self.rows.stop + first, device=self.lse.device) - first"),
            ("return self.allowed.sum(-1).to(self.lse)", "return self.allowed.any(-1).to(self.lse)"),
        ]),
        ("rule/pooling.py", MAPS, [
            ("return Squares(total / count.clamp_min(1), largest, count)", "return Squares(total / cell**2, largest, count)"),
            ("first = cols.start - (rows.stop - 1) + n - 1", "first = cols.start - rows.start + n - 1"),
            ("best, order = both.sort(dim=-1, descending=True, stable=True)", "best, order = both.flip(-1).sort(dim=-1, descending=True, stable=True)"),
        ]),
        ("parallel/layout.py", BLOCKS, [
            ("base = both.masked_fill(both == -torch.inf, 0.0)", "base = both"),
            ("self.relative[:, where] += part", "self.relative[:, where] = part"),
        ]),
        ("parallel/layout.py", "parallel/test_sequence_parallel.py", [
            ("self._chunk(2 * self.ranks - 1 - rank, 2 * self.ranks)", "self._chunk(self.ranks + rank, 2 * self.ranks)"),
            ("start = index * size + min(index, longer)", "start = index * size"),
        ]),
        ("parallel/travel.py", "parallel/test_sequence_parallel.py", [
            ("for hop in range(ranks - 1, 0, -1):", "for hop in range(1, ranks):"),
        ]),
        ("cache/kinds.py", CACHES, [
            ("rows.cut(self.sinks, self.window - 1)", "rows.cut(self.sinks, self.window)"),
            ("if n == 1:\n            return None\n        near", "if n <= 2:\n            return None\n        near"),
            ("near | Sinks(self.sinks) if self.sinks", "near if self.sinks"),
        ]),
        ("cache/base.py", CACHES, [
            ("self._room.write(0, held)", "pass"),
            ("room, held = self._room, first + last", "room, held = self._room, last"),
            ("start = self.length - last", "start = self.length - last - 1"),
            ("return sum(part[:, :, :1].numel()", "return sum(part.numel()"),
        ]),
        ("cache/kinds.py", CACHES, [
            ("and self.seen + n > self.capacity:", "and self.seen + n >= self.capacity:"),
            ("self._kind, self._seen = kind, self.seen + k.shape[2]", "self._kind, self._seen = kind, k.shape[2]"),
        ]),
        ("cache/kinds.py", CACHES, [
            ("for window in self.windows for _ in range(group)]", "for _ in range(group) for window in self.windows]"),
            ("start = self.sinks if x.shape[2] < out.shape[2] else 0", "start = 0"),
        ]),
        ("base/files.py", FILES, [
            ("temporary.chmod(0o666 & ~umask)", "pass"),
            ("            os.replace(temporary, target)\n\n\ndef write_text", "            shutil.copyfile(temporary, target)\n            raise OSError\n\n\ndef write_text"),
            ("                    if lock(handle):\n", "                    if True:\n"),
            ("        shutil.rmtree(folder, ignore_errors=True)\n", "        pass\n"),
        ]),
        ("base/read.py", FILES, [
            ("if written is None or written != _checksum(tensors, header):", "if written is None:"),
            ("if any(start < last and first < stop for first, last in spans):", "if False:"),
            ("return x.detach().resolve_conj().resolve_neg().cpu().contiguous()", "return x.detach().cpu().contiguous()"),
            ("    _put_in_order(path)", "    pass"),
        ]),
        ("nn/steps.py", "core/test_heads.py core/test_designs.py core/test_cache.py", [
            ("torch.arange(start, start + n,", "torch.arange(0, n,"),
            ("two * cos + one * sin", "two * cos - one * sin"),
        ]),
        ("nn/gated_output.py", "core/test_design_forms.py core/test_design_mixing.py core/test_designs.py", [
            ("return super().merge(heads * self.gates(x).to(heads.dtype), x)", "return super().merge(heads, x)"),
        ]),
        ("nn/multi_head.py", "core/test_heads.py core/test_designs.py", [
            ("([linear.weight for linear in linears], [other.in_proj_weight])", "([linear.weight for linear in linears[::-1]], [other.in_proj_weight])"),
        ]),
    ]
    for change in changes
]  # fmt: skip


def main() -> int:
    """Returns the exit code: the number of mutants that are alive or whose text was not found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="only mutants of files whose path contains this, or by number: 3,17")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="the folder of the test suite")
    parser.add_argument("--all", action="store_true", help="run all tests at once, not those of `make test` first")
    options = parser.parse_args()
    numbers = {int(part) for part in options.only.split(",")} if options.only[:1].isdigit() else None
    chosen = [
        (i, x) for i, x in enumerate(MUTANTS) if (i in numbers if numbers is not None else options.only in x.path)
    ]
    wrong = [one for _, one in chosen if _times(one) != 1]
    for one in wrong:
        sys.stdout.write(f"does not occur exactly once: {one.path}: {one.old!r}\n")
    found: dict[str, list[int]] = {"killed": [], "killed by thorough tests": [], "alive": []}
    with tempfile.TemporaryDirectory(prefix="mutants") as scratch:
        library = Path(scratch) / "headwise"
        shutil.copytree(ROOT / "src/headwise", library, ignore=shutil.ignore_patterns("__pycache__"))
        os.environ.update(PYTHONPATH=scratch, PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
        _preload()
        every = sorted({name for _, one in chosen for name in one.tests.split()})
        if chosen and not _passes(every, ALL, options.tests, scratch):
            output = (Path(scratch) / "output.txt").read_text(encoding="utf-8", errors="replace")
            sys.stdout.write(f"{output[-4000:]}\nthe tests fail without a mutant\n")
            return 1
        for number, one in chosen:
            if one in wrong:
                continue
            path, begun = library / one.path, time.monotonic()
            whole = path.read_text(encoding="utf-8")
            path.write_text(whole.replace(one.old, one.new), encoding="utf-8")
            names = one.tests.split()
            if not options.all and not _passes(names, QUICK, options.tests, scratch):
                outcome = "killed"
            elif not _passes(names, ALL, options.tests, scratch):
                outcome = "killed" if options.all else "killed by thorough tests"
            else:
                outcome = "alive"
            path.write_text(whole, encoding="utf-8")
            found[outcome].append(number)
            seconds = time.monotonic() - begun
            sys.stdout.write(f"{number:3} {outcome:24} {seconds:5.1f} s  {one.path}: {one.new.strip()[:70]!r}\n")
            sys.stdout.flush()
    sys.stdout.write("; ".join(f"{len(numbers)} {outcome}" for outcome, numbers in found.items()) + "\n")
    return len(found["alive"]) + len(wrong)


def _times(one: Mutant) -> int:
    """How often the text that it replaces occurs in its file."""
    path = ROOT / "src/headwise" / one.path
    return path.read_text(encoding="utf-8").count(one.old) if path.exists() else 0


def _preload() -> None:
    """Import once the packages that every test run needs and no mutant changes."""
    import pytest
    import torch

    assert pytest
    assert torch


def _passes(names: list[str], marks: str, tests: Path, scratch: str) -> bool:
    """Run test files in a forked process that imports the library from the scratch folder; whether they pass."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(_run(names, marks, tests, Path(scratch)))
        finally:
            traceback.print_exc()
            os._exit(3)
    until = time.monotonic() + TIMEOUT
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            if code in (3, 4, 5):  # of pytest: internal error, usage error, no tests collected
                raise SystemExit((Path(scratch) / "output.txt").read_text(encoding="utf-8", errors="replace"))
            return code == 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _run(names: list[str], marks: str, tests: Path, scratch: Path) -> int:
    """Run pytest and return its exit code."""
    import pytest

    os.setsid()  # so that the processes that tests start can be killed, too
    sys.path.insert(0, str(scratch))
    os.chdir(tests.parent)
    with open(scratch / "output.txt", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=same-examples", "-m", marks]
    return int(pytest.main([*options, *(str(tests / name) for name in names)]))


if __name__ == "__main__":
    sys.exit(main())
