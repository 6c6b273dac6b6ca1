"""A view: the strongest key of each query, as arcs over the text."""

from html import escape
from pathlib import Path

from headwise.base.files import atomic_path
from headwise.reports.data import Report
from headwise.reports.views import View, register
from headwise.wording import in_language, tr

STEP, GAP = 16, 40


class Arcs(View):
    """One row a head, the tokens of the first passage along it, an arc from each query to its strongest key."""

    name, about = "arcs", "the strongest key of each query, as arcs (SVG)"

    def write(self, report: Report, path: Path, *, lang: str) -> None:
        """As in `View`."""
        passage = report.passages[0]
        side, rows = passage.maps.shape[-1], len(report.heads)
        height, width = STEP * side // 2 + GAP, STEP * (side + 6)
        drawn = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{rows * height}" font-size="11">',
            f"<title>{escape(report.title)}</title>",
        ]
        for row, (layer, head) in enumerate(report.heads):
            base = (row + 1) * height - GAP // 2
            word = in_language(tr("layer {layer} head {head}", layer=layer, head=head), lang)
            drawn.append(f'<text x="0" y="{base}">{word}</text>')
            for query, weights in enumerate(passage.maps[layer, head]):
                key = int(weights.argmax())
                x, y = STEP * (6 + query), STEP * (6 + key)
                if passage.cell == 1:
                    drawn.append(f'<text x="{x}" y="{base}">{escape(passage.tokens[query])}</text>')
                drawn.append(
                    f'<path d="M {x} {base - 12} A {abs(x - y) / 2 + 1} {abs(x - y) / 2 + 1} 0 0 {int(x < y)} {y} '
                    f'{base - 12}" fill="none" stroke="#345" stroke-opacity="{float(weights[key]):.3f}"/>'
                )
        with atomic_path(path) as temporary:
            temporary.write_text("\n".join([*drawn, "</svg>"]), encoding="utf-8")


register(Arcs())
