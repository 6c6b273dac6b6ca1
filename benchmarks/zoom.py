"""Time the tiles of the viewer: 256 × 256 cells of one head's map, computed and through HTTP.

    python -m benchmarks.zoom                       # 100,000 tokens, a head of 64; --quick for a short text

Prints a Markdown table: median and 95th percentile in milliseconds, over tiles drawn at random from the part of the map
that may be looked at, none of them asked for twice. Cells below the base are computed from q, k and the log-sum-exp;
those of the base come from the pyramid that was made when the text was read. The budget is one head's share in a model
of 12 × 12 heads.
"""

import argparse
import http.client
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from benchmarks.machine import examine
from headwise.lm.loading import DecoderModel
from headwise.lm.model import Decoder, DecoderConfig
from headwise.lm.texts import CharTokenizer
from headwise.masks import Causal, Span, State
from headwise.reports.viewer import HOST, bind, hosts_of, made_server
from headwise.reports.viewer.app import computed, make_app
from headwise.reports.viewer.session import Session, Text
from headwise.reports.viewer.tiles import BUDGET, always, tile_spans

CELLS = 1, 4, 16, 64
HEADS = 144  # that share the budget of a pyramid
LETTERS = "abcdefghijklmnopqrstuvwxyz "
TOKEN = "benchmark"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short text, to see that everything runs")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--tiles", type=int, default=60, help="of each size of cells")
    args = parser.parse_args()
    n, tiles = (1500, 4) if args.quick else (args.tokens, args.tiles)
    machine = examine(0.1 if args.quick else 1.0)
    print(
        f"{machine.cpu}, {machine.threads} threads, load {machine.load:.1f}, torch {machine.torch}; n = {n:,}.",
        flush=True,
    )
    session = Session(_subject(), max_tokens=n, budget=BUDGET // HEADS)
    text = _read(session, n)
    print("| cells | from | computed, ms | p95 | with HTTP, ms | p95 |\n| ---: | --- | ---: | ---: | ---: | ---: |")
    with _served(session) as ask:
        for cell, kept in _rows(text):
            places = _places(text, cell)
            computed = [] if kept else _times(lambda at, cell=cell: _compute(text, cell, *at), places[:tiles])
            asked = _times(lambda at, cell=cell: ask(_path(text, cell, *at)), places[-tiles:])
            source = "the pyramid" if kept else "q, k, lse"
            print(f"| {cell} | {source} | {_cells(computed)} | {_cells(asked)} |", flush=True)
    session.close()
    if args.quick:
        print("\nA short text: these times say nothing.")


def _subject() -> DecoderModel:
    """One layer of one head, untrained: what a tile costs does not depend on the weights."""
    torch.manual_seed(0)
    tokenizer = CharTokenizer(LETTERS)
    config = DecoderConfig(tokenizer.vocab_size, d_model=64, num_layers=1, num_heads=1, d_ff=64)
    return DecoderModel(Decoder(config), tokenizer, "one head")


def _read(session: Session, n: int) -> Text:
    """A text of n letters, read to the end, with what that took."""
    begun = time.perf_counter()
    text = session.open("".join(random.Random(0).choices(LETTERS, k=n)))
    pooled = 0.0
    while text.state == "reading":
        time.sleep(0.01)
        if text.what == "drawing" and not pooled:
            pooled = time.perf_counter()
    if text.state != "ready":
        raise SystemExit(text.error)
    ended = time.perf_counter()
    print(f"Reading one head took {(pooled or ended) - begun:.1f} s, pooling it {ended - (pooled or ended):.1f} s.\n")
    return text


def _rows(text: Text) -> Iterator[tuple[int, bool]]:
    """Cell sizes, and whether their tiles are kept."""
    levels = text.levels
    yield from ((cell, False) for cell in CELLS if cell < levels.base)
    yield levels.base, True


def _places(text: Text, cell: int) -> list[tuple[int, int]]:
    """Rows and columns of the tiles in which something is allowed, in random order."""
    n, mask = text.n, Causal()
    grid = text.heads[0, 0].rule.grid
    side = -(-n // (256 * cell))

    def seen(row: int, col: int) -> bool:
        rows, cols = tile_spans(n, n, cell, row, col)
        return mask.state(Span(*rows), Span(*cols), grid) is not State.EMPTY

    found = [(row, col) for row in range(side) for col in range(side) if seen(row, col)]
    random.Random(cell).shuffle(found)
    return found


def _compute(text: Text, cell: int, row: int, col: int) -> dict[str, bytes]:
    """What a worker of the server does."""
    return computed(text.heads[0, 0], cell, row, col, always)


def _path(text: Text, cell: int, row: int, col: int) -> str:
    return f"/api/texts/{text.id}/tiles/0/0/{cell}/{row}/{col}?token={TOKEN}"


@contextmanager
def _served(session: Session) -> Iterator[Callable[[str], bytes]]:
    """A function that sends requests to the session's server over one connection, as a browser does."""
    with bind(0) as listening:
        port = listening.getsockname()[1]
        server = made_server(make_app(session, TOKEN, hosts_of(port)))
        listening.listen()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        connection = http.client.HTTPConnection(HOST, port, timeout=600)

        def ask(path: str) -> bytes:
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
            except http.client.RemoteDisconnected:  # it was idle while tiles were computed without it
                connection.close()
                connection.request("GET", path)
                answer = connection.getresponse()
            body = answer.read()
            if answer.status != 200:
                raise SystemExit(f"{path}: {answer.status} {body[:200]!r}")
            return body

        try:
            yield ask
        finally:
            connection.close()
            server.should_exit = True
            thread.join()


def _times(call: Callable[[tuple[int, int]], object], places: list[tuple[int, int]]) -> list[float]:
    """Seconds of a call for each place; one of them warms up, and is timed only if it is the only one."""
    call(places[-1])
    found = []
    for place in places[:-1] or places:
        begun = time.perf_counter()
        call(place)
        found.append(time.perf_counter() - begun)
    return found


def _cells(seconds: list[float]) -> str:
    """Median and 95th percentile in milliseconds."""
    if not seconds:
        return "— | —"
    last = sorted(seconds)[max(0, -(-95 * len(seconds) // 100) - 1)]
    return f"{1e3 * statistics.median(seconds):.1f} | {1e3 * last:.1f}"


if __name__ == "__main__":
    main()
