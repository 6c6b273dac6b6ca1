"""A report's page in a frame, above pictures that show if there is no frame or no script."""

import html

from headwise.reports.data import Report
from headwise.reports.html import page
from headwise.reports.notebook.small import still_of

HEIGHT = 760  # pixels
_LOOK = (
    f"grid-area: 1 / 1; z-index: 1; box-sizing: border-box; width: 100%; height: {HEIGHT}px; margin: 0; "
    "border: 1px solid #8884; border-radius: 6px"
)


def framed(report: Report, lang: str, still: str | None = None) -> str:
    """The page of a report in a sandboxed frame: its scripts cannot reach the notebook.

    still: pictures below the frame; None for small ones of the report's heads.
    """
    inside = still_of(report, lang)
    source = html.escape(page(report, lang, still=inside))
    frame = (
        f'<iframe srcdoc="{source}" sandbox="allow-scripts allow-downloads" title="headwise" style="{_LOOK}"></iframe>'
    )
    look = f"grid-area: 1 / 1; max-height: {HEIGHT}px; overflow: auto"
    below = f'<div style="{look}">{inside if still is None else still}</div>'
    return f'<div style="display: grid; grid-template-columns: minmax(0, 1fr)">{below}{frame}</div>'
