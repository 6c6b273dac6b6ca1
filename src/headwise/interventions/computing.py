"""An attention call computed with edits."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from headwise.errors import ConfigError
from headwise.fields import Section, same
from headwise.interventions.edits import Arguments, Placed, kv_heads
from headwise.kernels import events
from headwise.kernels.quantized import Vectors, decoded
from headwise.map import AttentionMap
from headwise.map.arguments import rule_of
from headwise.map.attention import attend_to, nonfinite_values
from headwise.masks import Grid, Mask, real_tokens
from headwise.rule import Rule
from headwise.scores import Score
from headwise.stats import Measure, resolve

Result = tuple[Tensor, AttentionMap | None]


def attend_edited(
    edits: Sequence[Placed], at_end: bool, q: Tensor, k: Vectors, v: Vectors, *,
    mask: Mask | None, scale: float | None, score: Score | Sequence[Score], dropout_p: float,
    return_map: bool, measures: Sequence[str | Measure], kernel: str, gap: tuple[int, int] | None = None,
    placed: bool = True, extra: int = 0,
) -> Tensor | tuple[Tensor, AttentionMap]:  # fmt: skip
    """`attend` with edits, the first applied first. at_end: whether queries are the last of the keys' tokens, as in
    self attention; placed: whether their positions are known; extra: as `Grid` has it."""
    plain = partial(attend_to, dropout_p=dropout_p, kernel=kernel)
    on_delta = events.here().on_delta
    with events.within(edited=None, on_delta=None):
        rule = rule_of(q, k, v, mask, scale, score, dropout_p, gap=gap)
        grid = replace(rule.grid, extra=extra)
        at_end = at_end and grid.n <= grid.m
        real = _real(edits[0], rule.mask, grid) if at_end else real_tokens(rule.mask, grid)
        whole = Arguments(
            q, decoded(k), decoded(v), rule.mask, rule.scale, rule.scores, range(q.shape[1]), q.shape[1], "",
            grid.gap, at_end, placed, extra, real,
        )  # fmt: skip
        out, amap = _joined(edits, whole, plain, return_map)
        if on_delta is not None and out.requires_grad:
            receive, value = on_delta, out.detach()

            def report(gradient: Tensor) -> None:  # δ_i = Σ_c dO_ic·O_ic of all heads together
                wide = torch.promote_types(value.dtype, torch.float32)
                receive((gradient.to(wide) * value.to(wide)).sum(-1))

            out.register_hook(report)
        if amap is None:
            return out
        amap.rule = replace(amap.rule, grid=replace(amap.rule.grid, gap=grid.gap, extra=extra))
        amap.nonfinite_values = nonfinite_values(whole.v)
        if measures:
            amap.measured = amap.measured_by(None, resolve(measures))
        return out, amap


def _real(one: Placed, mask: Mask, grid: Grid) -> Tensor | None:
    """`Arguments.real` of self attention. In a step with a cache, a mask may hide keys for another reason: it goes on
    from the call before, if that had all tokens but the step's, and the step sees none of its padding."""
    found = real_tokens(mask, grid)
    real = torch.ones(1, grid.tokens, dtype=torch.bool, device="cpu") if found is None else found
    last = one.before.get(one.name)
    if last is not None and last.shape[1] == grid.first_token > 0 and {len(last), len(real)} <= {1, grid.b}:
        wide = max(len(last), len(real))
        joined = torch.cat((last.expand(wide, -1), real[:, grid.first_token :].expand(wide, -1)), 1)
        if not bool(grid.of_keys(real & ~joined).any()):
            found = real = joined
    one.before[one.name] = real
    return found


def _joined(edits: Sequence[Placed], whole: Arguments, plain: Callable[..., Result], mapped: bool) -> Result:
    """The call, computed for each run of heads that have the same edits."""
    masks: Mask = whole.mask
    chosen = []
    for placed in edits:
        named = replace(whole, name=placed.name, mask=masks)
        chosen.append(placed.edit.chosen(named).tolist())
        placed.applied.append((placed.name, placed.edit.applies(named)))
        masks = placed.edit.mask(named)
    outs, maps, start = [], [], 0
    for own, same_edits in groupby(zip(*chosen, strict=True)):  # consecutive heads with the same edits
        heads = range(start, start + len(list(same_edits)))
        start = heads.stop
        here = [placed for placed, mine in zip(edits, own, strict=True) if mine]
        out, amap = _edited(here, _part(whole, heads), plain, mapped)
        outs.append(out)
        maps.append(amap)
    out = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
    if not mapped:
        return out, None
    own_keys = all(placed.edit.own_keys for placed in edits)
    return out, _joined_map([amap for amap in maps if amap is not None], whole, masks, own_keys)


def _part(whole: Arguments, heads: range) -> Arguments:
    """The arguments of these heads."""
    if len(heads) == whole.num_heads:
        return whole
    cuts = {"h": Section(heads.start, heads.stop, whole.num_heads)}
    return replace(
        whole, q=whole.q[:, heads.start : heads.stop], k=kv_heads(whole.k, heads, whole.num_heads),
        v=kv_heads(whole.v, heads, whole.num_heads), mask=whole.mask.cut(cuts),
        scores=tuple(score.cut(cuts) for score in whole.scores), heads=heads,
    )  # fmt: skip


def _edited(edits: Sequence[Placed], call: Arguments, plain: Callable[..., Result], mapped: bool) -> Result:
    """The call with edits that apply to all of its heads."""
    if not edits:
        return plain(
            call.q, call.k, call.v, mask=call.mask, scale=call.scale, score=call.scores, return_map=mapped
        )  # fmt: skip
    placed, *rest = edits
    edit, call = placed.edit, replace(call, name=placed.name)
    rows = edit.rows(call)
    if not bool(rows.any()):
        return _edited(rest, call, plain, mapped)
    changed = edit.changed(call)
    if edit.by_row or bool(rows.all()):
        return _edited(rest, changed, plain, mapped)
    (out, amap), (other, other_map) = (_edited(rest, one, plain, mapped) for one in (changed, call))
    here = rows[:, None, :, None].to(out.device)
    out = torch.where(here, out, other)
    if amap is None or other_map is None:
        return out, None
    if not edit.own_keys:
        raise ConfigError(
            f"{edit!r}: the weights of some queries are replaced, and one map cannot hold both kinds; edit all "
            f"queries, or record no maps and measures meanwhile"
        )
    return out, other_map


def _joined_map(maps: list[AttentionMap], whole: Arguments, mask: Mask, own_keys: bool) -> AttentionMap:
    """The map of all heads. own_keys: whether all queries, keys, scales and scores are the model's own."""
    rule, one = Rule(mask, whole.scale, whole.grid, whole.scores), maps[0]
    if len(maps) == 1:
        return one
    lse = torch.cat([amap.lse for amap in maps], 1)
    q, k = whole.q, whole.k
    if not own_keys:
        start = 0
        for amap in maps:
            heads = Section(start, start + amap.shape[1], whole.num_heads)
            expected, start = rule.cut({"h": heads}), heads.stop
            if amap.rule.scale != expected.scale or not same(
                (expected.mask, *expected.scores), (amap.rule.mask, *amap.rule.scores)
            ):
                raise ConfigError(
                    "the edited heads have another mask, scale or score than the others, and one map cannot hold both; "
                    "record no maps and measures while they are edited"
                )
        q = torch.cat([amap.q for amap in maps], 1)
        k = torch.cat([amap.k.repeat_interleave(amap.q.shape[1] // amap.k.shape[1], 1) for amap in maps], 1)
    return AttentionMap(q, k, lse, rule, kernel=one.kernel, named=one.named, refusals=one.refusals)
