"""A record of a watched model in a notebook: small pictures of its maps and of each statistic, and its table."""

from html import escape

import numpy as np

from headwise.map import AttentionMap
from headwise.reports.messages import message
from headwise.reports.notebook.small import CELLS, MOST, small, small_maps
from headwise.reports.ranges import value_range
from headwise.reports.words import label, unit, words
from headwise.shown import register
from headwise.table import HeadTable
from headwise.table.show import number
from headwise.telemetry import Record
from headwise.telemetry.lens import Picture
from headwise.wording import in_language

COMPUTED = 40_000_000  # weights, as for a map


def _record(record: Record, lang: str) -> str:
    """The maps as small multiples if there are any, then each statistic as layers × heads, then the numbers."""
    table, parts = record.table(), [f"<p><b>{escape(repr(record))}</b></p>"]
    maps = list(record.maps.values())
    heads = sum(kept.shape[1] for kept in maps)
    work = sum(kept.shape[1] * kept.shape[2] * kept.shape[3] for kept in maps if isinstance(kept, AttentionMap))
    if maps and heads <= MOST and work <= COMPUTED:
        parts.append(small_maps([_pooled(kept) for kept in maps], range(len(maps)), lang))
    elif maps:
        parts.append(f"<p>{escape(in_language(message('no_picture_of_record'), lang))}</p>")
    parts += [_statistics(table, lang), table._repr_html_()]
    if maps:
        parts.append(f"<p>{escape(in_language(message('record_more'), lang))}</p>")
    return f"<div>{''.join(parts)}</div>"


def _pooled(kept: AttentionMap | Picture) -> list[np.ndarray]:
    """A picture of each head, of the first entry of the batch."""
    if isinstance(kept, Picture):
        return list(kept.mean[0].float().cpu().numpy())
    own = kept.using(kept.named)
    return [own.head(0, head).pool(CELLS)[0, 0].cpu().numpy() for head in range(kept.shape[1])]


def _statistics(table: HeadTable, lang: str) -> str:
    """Each statistic as a picture, a row a layer and a column a head."""
    if not table.places:
        return ""
    cells = []
    for name, column in table.items():
        values = table.dense(name).numpy(force=True)
        if not np.isfinite(values).any():
            continue
        low, high = value_range(values)
        shares = (values - low) / (high - low) if high > low else np.zeros_like(values)
        title = f"{label(name, lang)}: {number(low)} – {number(high)} {unit(column.unit, lang)}"
        cells.append((escape(title), small(shares, title)))
    head = "".join(f"<th>{title}</th>" for title, _ in cells)
    row = "".join(f"<td>{picture}</td>" for _, picture in cells)
    hint = escape(words(lang, "notebook")["statistics_hint"])
    return f"<table><tr>{head}</tr><tr>{row}</tr></table><p>{hint}</p>" if cells else ""


register(Record, _record)
