"""The viewer's protocol without a model: maps by formula, tokens of a given text, and a log of what was asked.

Cells of one token hold `weights(layer, head, i, j)` exactly; a coarser one holds the weight of its middle, and nothing
where all of its keys stand after all of its queries.
"""

import json
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from headwise.reports.colours import font_path

SIDE = 256
TOKEN = "a-token-of-the-test"


def weights(layer: int, head: int, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """[len(i), len(j)]: heads look near, at the first token, in stripes, or at blocks; no two cells are alike."""
    i, j = np.asarray(i, np.float64)[:, None], np.asarray(j, np.float64)[None, :]
    apart = np.maximum(i - j, 0)
    kinds = [
        lambda: 0.7 * np.exp(-apart / (3 + 5 * layer)) + 0.002 / (1 + apart),
        lambda: 0.6 * np.exp(-j / 2) + 0.3 * np.exp(-((apart - 40) ** 2) / 50),
        lambda: 0.25 * (np.cos(apart * 0.37 + layer) ** 8) * np.exp(-apart / 300) + 1e-4,
        lambda: 0.02 + 0.4 * ((i // 97).astype(int) % 3 == (j // 97).astype(int) % 3) * np.exp(-apart / 500),
    ]
    wobble = 0.75 + 0.25 * np.sin(i * 1.7 + j * 0.9 + head)
    return np.where(i >= j, kinds[(head + layer) % 4]() * wobble, np.nan)


def cells(layer: int, head: int, n: int, cell: int, rows: range, cols: range, reduce: str = "mean") -> np.ndarray:
    """Cells of a level, float32 [rows, cols]; "max" is half as much again, so that the two are told apart."""
    top, left = np.array(rows) * cell, np.array(cols) * cell
    middle = [np.minimum(at + (cell - 1) // 2, n - 1) for at in (top, left)]
    values = weights(layer, head, *middle)
    some = (np.minimum(top + cell, n) - 1)[:, None] >= left  # the last query of the cell sees its first key
    diagonal = np.diagonal(weights(layer, head, middle[0], middle[0]))[:, None]
    values = np.where(some, np.where(np.isnan(values), diagonal, values), np.nan)
    return np.float32(np.minimum(1.0, values * (1.5 if reduce == "max" and cell > 1 else 1.0)))


def encode(maps: np.ndarray) -> bytes:
    """[count, rows, cols] as the page reads them."""
    count, rows, cols = maps.shape
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.clip(np.round(65534 + 1024 * np.log2(maps)), 1, 65534)
    codes = np.where(np.isnan(maps), 65535, np.where(maps == 0, 0, codes))
    return struct.pack("<HHI", rows, cols, count) + codes.astype("<u2").tobytes()


def decoded(data: bytes) -> np.ndarray:
    """The weights that the page knows after the way through codes: [count, rows, cols]."""
    rows, cols, count = struct.unpack_from("<HHI", data)
    codes = np.frombuffer(data, "<u2", offset=8).astype(np.float64).reshape(count, rows, cols)
    return np.where(codes == 65535, np.nan, np.where(codes == 0, 0.0, 2 ** ((codes - 65534) / 1024)))


@dataclass
class Fake:
    """What the server knows, does, and was asked; tests change it while it runs."""

    page: str
    heads: tuple[int, ...] = (4, 4, 3)
    context: int | None = 512
    limit: int = 200_000
    words: bool = False  # tokens are words
    present: str | None = None  # the text that is read when the page opens
    delay: float = 0.0  # seconds a tile takes
    answer: Callable[[str, str], tuple[int, str] | None] = lambda method, path: None  # refusals: status and sentence
    texts: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)  # method and path with query, without the token
    steps: int = 2  # polls that a reading takes
    url: str = ""
    notes: list[dict[str, Any]] = field(default_factory=lambda: [{"text": "A note.", "zh": "一条说明。"}])
    cut: int = 0  # tiles whose reader had gone before they were sent

    def add(self, text: str, title: str = "") -> str:
        """A text that is ready at once."""
        name = f"t{len(self.texts)}"
        self.texts[name] = {"text": text, "title": title, "left": 0, "state": "ready", "drawn": sum(self.heads)}
        return name

    def tokens(self, name: str) -> list[tuple[str, str]]:
        """What stands ahead of each token, and the token: characters, or words and signs."""
        text = self.texts[name]["text"]
        return re.findall(r"(\s*)(\w+|[^\w\s])", text) if self.words else [("", letter) for letter in text]

    def tiles(self) -> list[str]:
        """The tiles that were asked for: "layer/head/cell/row/col?reduce"."""
        return [path.split("/tiles/")[1] for path in self.asked if "/tiles/" in path]

    def state(self, name: str) -> dict[str, Any]:
        """The account of a text."""
        entry = self.texts[name]
        n = len(self.tokens(name))
        if entry["state"] not in ("cancelled", "failed"):
            entry["state"] = "ready" if entry["left"] <= 0 else "reading"
            entry["left"] -= 1
        done = self.steps - max(0, entry["left"] + 1)
        entry["drawn"] = sum(self.heads) * done // self.steps  # heads
        coarsest = 1
        while -(-n // coarsest) > SIDE:
            coarsest *= 2
        every = list(enumerate(self.heads))
        entropy = [[layer + head / 7 for head in range(count)] for layer, count in every]
        spread: list[list[float | None]] = [
            [float((head * 5 + layer) % 7) for head in range(count)] for layer, count in every
        ]
        spread[0][1] = None
        statistics = {
            "entropy": {"words": words("entropy", "熵", "nat"), "values": entropy},
            "mean_distance": {"words": words("mean distance", "平均距离", "token"), "values": spread},
        }
        return {
            "id": name, "state": entry["state"], "what": "drawing" if done % 2 else "reading", "layer": 0, "done": done,
            "of": self.steps, "drawn": entry["drawn"], "error": entry.get("error"), "title": entry["title"], "n": n,
            "coarsest": coarsest, "base": min(16, coarsest), "statistics": statistics, "notes": self.notes,
        }  # fmt: skip


def words(en: str, zh: str, unit: str) -> dict[str, dict[str, str]]:
    """The words of a statistic in both languages."""
    return {
        lang: {"label": label, "about": f"About {label}.", "unit": unit} for lang, label in (("en", en), ("zh", zh))
    }


@contextmanager
def serving(fake: Fake) -> Iterator[Fake]:
    """The fake at `fake.url`, with the token in it, until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}/?token={TOKEN}"
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(fake: Fake) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.respond("GET")

        def do_POST(self) -> None:
            self.respond("POST")

        def do_DELETE(self) -> None:
            self.respond("DELETE")

        def respond(self, method: str) -> None:
            address = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(address.query, keep_blank_values=True).items()}
            token = query.pop("token", None)
            line = f"{method} {address.path}" + (f"?{query['reduce']}" if "reduce" in query else "")
            fake.asked.append(line)
            size = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(size) if size else b""
            if address.path == "/":
                self.send(200, fake.page.encode(), "text/html; charset=utf-8")
            elif token != TOKEN:
                self.send_json(403, {"error": "wrong token"})
            elif refused := fake.answer(method, address.path):
                status, sentence = refused
                if status == 0:  # the line goes dead
                    self.close_connection = True
                    self.connection.close()
                    return
                self.send_json(status, {"error": sentence})
            else:
                self.route(method, address.path.strip("/").split("/"), query, body)

        def route(self, method: str, path: list[str], query: dict[str, str], body: bytes) -> None:
            match method, path:
                case "GET", ["api", "model"]:
                    layers = [{"name": f"blocks.{i}.attention", "heads": heads} for i, heads in enumerate(fake.heads)]
                    model = {"name": "fake", "kind": "headwise", "context": fake.context, "layers": layers}
                    self.send_json(200, model | {"text": fake.present, "limits": {"characters": fake.limit}})
                case "POST", ["api", "texts"]:
                    given = json.loads(body)
                    name = fake.add(given["text"], given.get("title", ""))
                    fake.texts[name] |= {"left": fake.steps, "state": "reading"}
                    self.send_json(202, {"id": name})
                case _, ["api", "texts", name, *_] if name not in fake.texts:
                    self.send_json(404, {"error": f"there is no text {name!r}"})
                case "DELETE", ["api", "texts", name]:
                    fake.texts[name]["state"] = "cancelled"
                    self.send_json(200, {})
                case "GET", ["api", "texts", name]:
                    self.send_json(200, fake.state(name))
                case "GET", ["api", "font"]:
                    self.send(200, font_path().read_bytes(), "font/otf")
                case "GET", ["api", "texts", name, "tokens"]:
                    part = slice(int(query["from"]), int(query["to"]))
                    ahead, pieces = zip(*fake.tokens(name)[part], strict=True)
                    self.send_json(200, {"pieces": pieces, "ahead": ahead})
                case "GET", ["api", "texts", name, "search"]:
                    pieces, word, limit = [piece for _, piece in fake.tokens(name)], query["q"], int(query["limit"])
                    found = [i for i in range(len(pieces)) if "".join(pieces[i : i + len(word)]).startswith(word)]
                    self.send_json(200, {"positions": found[:limit], "more": len(found) > limit})
                case "GET", ["api", "texts", name, "tops", *numbers]:
                    layer, head, token = map(int, numbers)
                    self.send_json(200, tops(fake, name, layer, head, token, int(query["k"])))
                case "GET", ["api", "texts", name, "pair", *numbers]:
                    cell, row, col = map(int, numbers)
                    n, reduce = len(fake.tokens(name)), query["reduce"]
                    found = [
                        [
                            float(cells(layer, head, n, cell, range(row, row + 1), range(col, col + 1), reduce)[0, 0])
                            for head in range(count)
                        ]
                        for layer, count in enumerate(fake.heads)
                    ]
                    weights_or_none = [[None if np.isnan(w) else w for w in layer] for layer in found]
                    self.send_json(200, {"weights": weights_or_none})
                case "GET", ["api", "texts", name, "overview"]:
                    self.send(200, encode(overview(fake, name, int(query["cells"]), query["reduce"])))
                case "GET", ["api", "texts", name, "tiles", *numbers]:
                    time.sleep(fake.delay)
                    layer, head, cell, row, col = map(int, numbers)
                    n = len(fake.tokens(name))
                    most = -(-n // cell)
                    rows, cols = (range(at * SIDE, min(most, (at + 1) * SIDE)) for at in (row, col))
                    self.send(200, encode(cells(layer, head, n, cell, rows, cols, query["reduce"])[None]))
                case _:
                    self.send_json(404, {"error": "there is nothing here"})

        def send_json(self, status: int, answer: dict[str, Any]) -> None:
            self.send(status, json.dumps(answer).encode(), "application/json")

        def send(self, status: int, data: bytes, kind: str = "application/octet-stream") -> None:
            try:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except (BrokenPipeError, ConnectionResetError):
                fake.cut += 1
                self.close_connection = True

    return Handler


def tops(fake: Fake, name: str, layer: int, head: int, token: int, k: int) -> dict[str, Any]:
    """The largest weights of a query and of a key."""
    pieces = [piece for _, piece in fake.tokens(name)]
    every = np.arange(len(pieces))

    def largest(row: np.ndarray) -> list[dict[str, Any]]:
        order = np.argsort(-np.nan_to_num(row))[:k].tolist()
        return [{"at": at, "piece": pieces[at], "weight": float(row[at])} for at in order if row[at] > 0]

    keys, queries = weights(layer, head, [token], every)[0], weights(layer, head, every, [token])[:, 0]
    return {"piece": pieces[token], "keys": largest(keys), "queries": largest(queries)}


def overview(fake: Fake, name: str, most: int, reduce: str) -> np.ndarray:
    """Every head's small map."""
    n = len(fake.tokens(name))
    cell = 1
    while -(-n // cell) > most:
        cell *= 2
    every = range(-(-n // cell))
    heads = [(layer, head) for layer, count in enumerate(fake.heads) for head in range(count)]
    return np.stack([cells(*place, n, cell, every, every, reduce) for place in heads[: fake.texts[name]["drawn"]]])
