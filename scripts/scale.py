"""Makes the tables and the picture of docs/scale.md, by the formulas of headwise.costs.communication.

    python scripts/scale.py            prints the tables
    python scripts/scale.py --write    puts them into the page, and draws docs/pictures/scale.png (needs matplotlib)

The first table has the sizes of tests/parallel/test_head_parallel.py, which counts the bytes that processes really send
and holds them to the same formulas.
"""

import argparse
import sys
from pathlib import Path

from blocks import replaced

from headwise.base.files import atomic_path
from headwise.costs import Work
from headwise.costs.communication import (
    Way,
    attention_flops,
    exposed_seconds,
    head_parallel,
    heads_by_ring,
    hiding_tokens,
    hybrid,
    ring,
    ulysses,
    ways,
)
from headwise.costs.configs import find
from headwise.nn.registry import attentions_of, counts_of
from headwise.plan.tables import Column, Table, Value, markdown_table, scaled, written

ROOT = Path(__file__).parent.parent
DOC, PICTURE = ROOT / "docs" / "scale.md", ROOT / "docs" / "pictures" / "scale.png"
BEGIN, END = "<!-- {}: python scripts/scale.py --write -->", "<!-- end of {} -->"
MODEL = "llama-3-70b"
PEAK = 4e14  # FLOP/s that attention reaches on a device: about 40 % of an H100's bfloat16 products
SLOW, FAST = 5e10, 4.5e11  # bytes/s that a device sends: 400 Gbit/s between machines, NVLink inside of one
COUNTED = ((8, 4, 12, "float32"), (4, 1, 8, "bfloat16"), (8, 8, 4, "float32"))  # h, h_kv, d_k, dtype
COUNTED_WIDTH, COUNTED_TOKENS, COUNTED_BATCH = 24, 16, 3


def counted() -> Table:
    """Bytes a rank at the sizes of the tests."""
    rows: list[tuple[Value, ...]] = []
    for ranks in (2, 4):
        for h, h_kv, d, dtype in COUNTED:
            sizes = {"d_model": COUNTED_WIDTH, "num_heads": h, "num_kv_heads": h_kv, "head_dim": d}
            counts, work = counts_of("multi_head", sizes), Work(COUNTED_BATCH, *[COUNTED_TOKENS] * 2, dtype=dtype)
            found = [head_parallel(counts, work, ranks), ulysses(counts, work, ranks), ring(counts, work, ranks)]
            found.append(ring(counts, work, ranks, layout="contiguous"))
            sent: list[Value] = [f"{way.forward:,} + {way.backward:,}" for way in found]
            rows.append((ranks, f"{h} / {h_kv}", dtype, *sent))
    columns = (
        Column("ranks", "count"), Column("h / h_kv"), Column("dtype"), Column("head-parallel"), Column("Ulysses"),
        Column("ring, zigzag"), Column("ring, contiguous"),
    )  # fmt: skip
    return Table("counted", "", columns, tuple(rows))


def devices() -> Table:
    """One layer of a large model over some devices."""
    counts, work = attentions_of(find(MODEL)).layers[0], Work(1, 131_072, 131_072)
    rows: list[tuple[Value, ...]] = [
        (number, way.name, way.forward, way.backward, way.gradients, way.weights, way.kept)
        for number in (8, 16, 64, 128)
        for way in (
            *ways(counts, work, number),
            *([make(counts, work, number, 8) for make in (hybrid, heads_by_ring)] if number > 8 else []),
        )
    ]
    columns = (
        Column("devices", "count"), Column("way"), Column("forward", "bytes"), Column("backward", "bytes"),
        Column("weight gradients", "bytes"), Column("weights held", "bytes"), Column("kept for backward", "bytes"),
    )  # fmt: skip
    return Table("devices", "", columns, tuple(rows))


def thousands() -> Table:
    """A million tokens over thousands of devices: what a layer's forward pass sends, and how long a device waits."""
    counts, work = attentions_of(find(MODEL)).layers[0], Work(1, 1 << 20, 1 << 20)
    rows: list[tuple[Value, ...]] = []
    for number in (64, 256, 1024, 4096, 16_384):
        computed = attention_flops(counts, work) / number / PEAK
        row: list[Value] = [number, work.queries // number, computed]
        for way in (ring(counts, work, number), hybrid(counts, work, number, 8), hybrid(counts, work, number, 64)):
            waits = exposed_seconds(way, counts, work, number, peak=PEAK, link=SLOW)
            row += [way.forward, waits or "nothing"]
        rows.append(tuple(row))
    columns = (
        Column("devices", "count"), Column("tokens each", "count"), Column("computes", "seconds"),
        Column("ring sends", "bytes"), Column("waits", "seconds"), Column("hybrid 8 × R", "bytes"),
        Column("waits", "seconds"), Column("hybrid 64 × R", "bytes"), Column("waits", "seconds"),
    )  # fmt: skip
    return Table("thousands", "", columns, tuple(rows))


def hiding() -> Table:
    """Tokens a device from which on a ring hides its transfers."""
    rows: list[tuple[Value, ...]] = []
    for name in ("gpt-3", "llama-3-8b", MODEL, "gemma-2b"):
        counts, work = attentions_of(find(name)).layers[0], Work(1, 8, 8)
        tokens = [
            hiding_tokens(counts, work, PEAK, link, backward=back) for link in (SLOW, FAST) for back in (False, True)
        ]
        rows.append((name, f"{counts.heads} / {counts.key_vectors}", *tokens))
    columns = (
        Column("model"), Column("h / h_kv"), Column("50 GB/s, forward", "count"), Column("backward", "count"),
        Column("450 GB/s, forward", "count"), Column("backward", "count"),
    )  # fmt: skip
    return Table("hiding", "", columns, tuple(rows))


TABLES = (counted, devices, thousands, hiding)


def page(text: str) -> str:
    """The page's text with tables as they are now."""
    for make in TABLES:
        begin, end = BEGIN.format(make.__name__), END.format(make.__name__)
        text = replaced(text, begin, end, f"\n{markdown_table(make(), 'en')}", DOC)
    return text


def draw(path: Path) -> None:
    """What a device sends, and how long it waits, over the number of devices."""
    from matplotlib.ticker import LogLocator

    from headwise.reports.colours import stops
    from headwise.reports.figure import INK, MUTED, figure_class, font, quiet

    counts, work = attentions_of(find(MODEL)).layers[0], Work(1, 1 << 20, 1 << 20)
    cool, warm = stops("light"), stops("dark")
    numbers = [2**i for i in range(1, 15)]
    lines = {
        "head-parallel": (cool[30], head_parallel), "Ulysses": (warm[22], ulysses), "ring": (cool[19], ring),
        "hybrid, Ulysses × 8": (warm[15], lambda c, w, p: hybrid(c, w, p, 8)),
    }  # fmt: skip
    figure = figure_class()(figsize=(10.4, 4.5), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    for name, (colour, make) in lines.items():
        points: list[tuple[int, Way]] = []
        for number in numbers:
            if number <= counts.heads or name in ("ring", "hybrid, Ulysses × 8"):
                if name.startswith("hybrid") and number < 16:
                    continue
                points.append((number, make(counts, work, number)))
        look = {"color": colour, "linewidth": 2, "marker": "o", "markersize": 3.5}
        left.plot([p for p, _ in points], [way.forward + way.backward for _, way in points], label=name, **look)
        waits = [exposed_seconds(way, counts, work, p, peak=PEAK, link=SLOW) for p, way in points]
        right.plot([p for p, _ in points], [wait or float("nan") for wait in waits], label=name, **look)
    computed = [attention_flops(counts, work) / p / PEAK for p in numbers]
    right.plot(numbers, computed, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)), label="computation")
    left.set_title("bytes sent per device, forward and backward", loc="left", color=INK, fontproperties=font(10.5))
    right.set_title("waiting in a forward pass", loc="left", color=INK, fontproperties=font(10.5))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(numbers[::2], [f"{p:,}" for p in numbers[::2]])
        axes.minorticks_off()
        axes.set_xlabel("devices", color=MUTED, fontproperties=font(9.5))
        quiet(axes)
        axes.legend(frameon=False, prop=font(9), labelcolor=INK)
    left.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    left.yaxis.set_major_formatter(lambda value, _: scaled(value, "B").replace(".00", "").replace(".0", ""))
    right.yaxis.set_major_formatter(lambda value, _: written(value, "seconds").replace(".00", "").replace(".0", ""))
    figure.suptitle(
        f"One attention layer of {MODEL}, {work.queries:,} tokens, causal, bfloat16", color=INK,
        fontproperties=font(12),
    )  # fmt: skip
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")


def main() -> None:
    """Print or write."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--write", action="store_true", help="into docs/scale.md, and the picture")
    options.add_argument("--picture", type=Path, default=PICTURE, help="where the picture goes")
    given = options.parse_args()
    if given.write:
        text = page(DOC.read_text(encoding="utf-8"))
        with atomic_path(DOC) as temporary:
            temporary.write_text(text, encoding="utf-8")
        draw(given.picture)
        return
    sys.stdout.write("\n".join(f"{make.__name__}\n\n{markdown_table(make(), 'en')}" for make in TABLES))


if __name__ == "__main__":
    main()
