"""The viewer's server: its routes, its page, and access by the token that was printed at the start.

Another site's page can make a browser send requests to 127.0.0.1, and by DNS rebinding even under the name of that
site. The Host header must therefore be the server's, as must an Origin if there is one, and every request must have
the token. No response allows another origin to read it.

>>> viewer_page()[:15]
'<!doctype html>'
"""

import asyncio
import hmac
import json
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import h11
import numpy as np
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from headwise.errors import TextError
from headwise.map import AttentionMap
from headwise.reports.colours import QUOTES, font_face, font_path
from headwise.reports.messages import message
from headwise.reports.page import COLOURS, digest, document, inert, source
from headwise.reports.viewer import requests, tiles
from headwise.reports.viewer.requests import Kept, Refusal, Workers, error_body, misfit
from headwise.reports.viewer.session import Session, Text, TooLong
from headwise.reports.viewer.tiles import Unwanted, Wanted, rectangle, tile_spans
from headwise.reports.words import words
from headwise.wording import LANGUAGES, check_language, in_language, tr

ARRIVAL = 20.0  # seconds for a request to arrive, head and body
MOST = 100  # connections; a browser opens six
HEAD = 1 << 14  # bytes of a request's head


class Connection(H11Protocol):
    """uvicorn's HTTP connection with a time limit for the rest of a request, for which uvicorn has none."""

    _arrival: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection; above the maximum, close the one that has waited longest for a request."""
        super().connection_made(transport)
        if len(self.connections) > MOST:
            held = [one for one in self.connections if isinstance(one, Connection)]
            waiting = [(one._arrival.when(), one) for one in held if one._arrival is not None]
            first = min(waiting, key=lambda pair: pair[0])[1] if waiting else self
            first._stop()
            self.connections.discard(first)  # now: the next connection may arrive before this one is closed
            first.transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit."""
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Run the time limit while a request is arriving."""
        arriving = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if not arriving or self.transport.is_closing():
            self._stop()
        elif self._arrival is None:
            self._arrival = self.loop.call_later(ARRIVAL, self.transport.abort)

    def _stop(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None


NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
OPEN_ANOTHER = tr("headwise: open the address that headwise view printed; it contains the token.")
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Content-Security-Policy": NOTHING,
    "Cache-Control": "no-store",
}


class Guard:
    """An application behind a token. hosts: accepted values of the Host header, such as "127.0.0.1:8765"."""

    def __init__(self, app: ASGIApp, token: str, hosts: Iterable[str]) -> None:
        self.app, self.token, self.hosts = app, token.encode(), frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # WebSockets are not supported
            raise ValueError(f"expected an HTTP request, got {scope['type']}")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        app = self.app
        if (refusal := self._refusal(scope)) is not None:  # plain text for a browser, otherwise JSON
            app = JSONResponse(error_body(message("not_allowed", sentence=refusal)), 403)
            if "text/html" in Headers(scope=scope).get("accept", ""):
                app = PlainTextResponse(f"headwise: {refusal}.\n\n{OPEN_ANOTHER.zh}\n", 403)
        await app(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self.hosts:
            return "this is not the address of the viewer; open the one that was printed when it started"
        for origin in headers.getlist("origin"):
            scheme, _, host = origin.lower().partition("://")
            if scheme != "http" or host not in self.hosts:
                return "pages of other sites have no access"
        # Another page may link to the viewer, but not use it in any other way.
        visit = scope["method"] == "GET" and scope["path"] == "/" and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not visit:
            return "pages of other sites have no access"
        found = QueryParams(scope["query_string"]).getlist("token")
        given = found[0].encode("utf-8", "replace") if len(found) == 1 else b""
        if not hmac.compare_digest(given, self.token):
            return "the token is missing or wrong; open the address that was printed when the viewer started"
        return None


FROM_REPORT = ("elements.js", "numbers.js", "signs.js")
SCRIPTS = (
    "wire.js", "ink.js", "tiles.js", "pieces.js", "camera.js", "axes.js", "plot.js", "hand.js", "pairs.js",
    "readout.js", "tops.js", "heads.js", "search.js", "picture.js", "reading.js", "controls.js", "address.js",
    "main.js",
)  # fmt: skip


def viewer_page(lang: str | None = None) -> str:
    """The page of `headwise view` as HTML; it reads the server's token from its own address. lang: the initial
    language; None for that of the browser."""
    if lang is not None:
        check_language(lang)
    table = {name: words(name, "viewer") for name in LANGUAGES}
    settings = {"lang": lang, "words": table, "colours": COLOURS}
    # The page contains the characters of its own words; the server sends the whole font for other texts.
    style = _font(*table["zh"].values()) + source("base.css") + _own("view.css")
    scripts = [*map(source, FROM_REPORT), _own("words.js"), source("palette.js"), *map(_own, SCRIPTS)]
    parts = {
        "lang": lang or "en",
        "settings": inert(json.dumps(settings, ensure_ascii=False, separators=(",", ":"))),
    }
    allow = "connect-src 'self'; font-src 'self' data:"
    return document(_own("view.html"), table[lang or "en"], parts, style, scripts, allow)


@cache
def _font(*texts: str) -> str:
    """The font with the characters of these texts."""
    return font_face("".join(sorted({letter for text in texts for letter in text if ord(letter) not in QUOTES})))


def _own(name: str) -> str:
    return source(name, "headwise.reports.viewer")


THREADS = max(1, (os.cpu_count() or 2) // 2)  # for tiles, each of which is computed on several cores
QUEUE = 256  # waiting requests for tiles
KEPT = 64 << 20  # bytes of cached tiles
BINARY = "application/octet-stream"
log = logging.getLogger(__name__)


def make_app(session: Session, token: str, hosts: Iterable[str], lang: str | None = None) -> Guard:
    """The application of a session, behind its token. hosts: accepted values of the Host header."""
    api = _Api(session, lang)
    one = "/api/texts/{id}"
    routes = [
        Route("/", api.page),
        Route("/api/font", api.font),
        Route("/api/model", api.model),
        Route("/api/texts", api.open, methods=["POST"]),
        Route(one, api.status),
        Route(one, api.cancel, methods=["DELETE"]),
        Route(f"{one}/tokens", api.tokens),
        Route(f"{one}/search", api.search),
        Route(f"{one}/overview", api.overview),
        Route(one + "/tops/{layer}/{head}/{token}", api.tops),
        Route(one + "/pair/{cell}/{row}/{col}", api.pair),
        Route(one + "/tiles/{layer}/{head}/{cell}/{row}/{col}", api.tile),
    ]
    handlers: dict[Any, Any] = {
        HTTPException: _refuse, Unwanted: _gone, ClientDisconnect: _gone, Exception: _break
    }  # fmt: skip
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.state.workers = api.workers
    return Guard(app, token, hosts)


class _Api:
    def __init__(self, session: Session, lang: str | None) -> None:
        self.session, self.lang = session, lang
        self.workers = Workers(THREADS, QUEUE)
        self.asides = Workers(2, QUEUE)  # for short responses, which do not wait for tiles
        self.kept: Kept[tuple[str, requests.TileRequest]] = Kept(KEPT)

    async def page(self, request: Request) -> Response:
        html = viewer_page(self.lang)
        return HTMLResponse(html, headers={"Content-Security-Policy": policy_of(html)})

    async def font(self, request: Request) -> Response:
        return FileResponse(font_path(), media_type="font/otf", headers={"Cache-Control": "private, max-age=86400"})

    async def model(self, request: Request) -> Response:
        subject, limits, present = self.session.subject, self.session.limits, self.session.present
        layers = [{"name": n, "heads": h} for n, h in zip(subject.layers, subject.heads, strict=True)]
        return JSONResponse({
            "name": subject.name, "zh": in_language(subject.name, "zh"), "kind": subject.kind, "about": subject.about,
            "context": subject.context, "causal": subject.causal, "layers": layers,
            "text": None if present is None else present.id,
            "limits": {"characters": limits.characters, "tokens": limits.tokens, "why": limits.why},
        })  # fmt: skip

    async def open(self, request: Request) -> Response:
        text, title = await requests.text_of(request, self.session.limits.characters)
        try:
            opened = await self.asides.run(request, lambda _: self.session.open(text, title))
        except TooLong as error:
            raise Refusal(413, error.says) from None
        except TextError as error:
            raise Refusal(400, message("unreadable", sentence=str(error))) from None
        self.kept.drop(lambda key: key[0] != opened.id)
        return JSONResponse({"id": opened.id}, 202)

    async def status(self, request: Request) -> Response:
        return JSONResponse(self._text(request).status())

    async def cancel(self, request: Request) -> Response:
        text = self._text(request)
        self.session.cancel(text)
        self.kept.drop(lambda key: key[0] == text.id)
        return JSONResponse(text.status())

    async def tokens(self, request: Request) -> Response:
        text = self._present(request)
        start, stop = requests.whole(request, "from", 0), requests.whole(request, "to", text.n)
        if not start <= stop <= text.n or stop - start > requests.PIECES:
            raise misfit(
                "from",
                f"from={start}, to={stop}: expected a range of 0 to {text.n} with at most {requests.PIECES} tokens",
            )
        return JSONResponse({"pieces": text.reading.pieces[start:stop], "ahead": text.ahead(start, stop)})

    async def search(self, request: Request) -> Response:
        text = self._present(request)
        wanted, limit = request.query_params.get("q", ""), requests.whole(request, "limit", 100)
        if not 1 <= len(wanted) <= requests.QUERY or not 1 <= limit <= requests.POSITIONS:
            raise misfit(
                "q", f"q: expected 1 to {requests.QUERY} characters; limit: 1 to {requests.POSITIONS}, got {limit}"
            )
        positions, more = await self.asides.run(request, lambda _: text.find(wanted, limit))
        return JSONResponse({"positions": positions, "more": more})

    async def tops(self, request: Request) -> Response:
        text = self._present(request)
        place, token = requests.head_of(request, text), requests.whole(request, "token")
        k = requests.whole(request, "k", 8)
        if token >= text.n or not 1 <= k <= requests.TOPS:
            raise misfit("token", f"token: expected less than {text.n}, got {token}; k: 1 to {requests.TOPS}, got {k}")
        return JSONResponse(await self.asides.run(request, lambda _: text.tops(place, token, k)))

    async def pair(self, request: Request) -> Response:
        text = self._present(request)
        (cell, row, col), reduce = requests.cell_of(request, text), requests.reduce_of(request)
        if cell > requests.PAIR:
            raise misfit("cell", f"cell: expected at most {requests.PAIR} tokens, got {cell}")
        find = partial(text.weights, cell, row, col, reduce)
        return JSONResponse({"weights": await self.asides.run(request, find)})

    async def overview(self, request: Request) -> Response:
        text = self._present(request)
        cells, reduce = requests.whole(request, "cells", 64), requests.reduce_of(request)
        if not requests.CELLS[0] <= cells <= requests.CELLS[1]:
            raise misfit("cells", f"cells: expected {requests.CELLS[0]} to {requests.CELLS[1]}, got {cells}")
        if not text.pyramids:
            raise requests.not_yet(text)
        return Response(await self.asides.run(request, lambda _: _overview(text, reduce, cells)), media_type=BINARY)

    async def tile(self, request: Request) -> Response:
        text = self._present(request)
        tile = requests.tile_of(request, text)
        if tile.cell >= text.levels.base:
            pyramid = text.pyramids.get((tile.layer, tile.head))
            if pyramid is None:
                raise requests.not_yet(text)
            return Response(pyramid.tile(tile.reduce, tile.cell, tile.row, tile.col), media_type=BINARY)
        found = self.kept.get((text.id, tile))
        if found is None:
            both = await self.workers.run(request, partial(self._computed, text, tile))
            if text.wanted():  # the other pooling is often requested next
                for reduce, data in both.items():
                    self.kept.put((text.id, replace(tile, reduce=reduce)), data)
            found = both[tile.reduce]
        return Response(found, media_type=BINARY)

    def _computed(self, text: Text, tile: requests.TileRequest, wanted: Wanted) -> dict[str, bytes]:
        head = text.heads.get((tile.layer, tile.head))
        if head is None or not wanted():
            raise Unwanted
        return computed(head, tile.cell, tile.row, tile.col, lambda: wanted() and text.wanted())

    def _text(self, request: Request) -> Text:
        text = self.session.find(request.path_params["id"])
        if text is None:
            raise Refusal(404, message("no_text"))
        return text

    def _present(self, request: Request) -> Text:
        text = self._text(request)
        if not text.wanted():
            raise requests.not_yet(text)
        return text


def computed(head: AttentionMap, cell: int, row: int, col: int, wanted: Wanted) -> dict[str, bytes]:
    """The encoded tile for each pooling, computed in one pass."""
    found = rectangle(head, *tile_spans(head.shape[2], head.shape[3], cell, row, col), cell, wanted)
    return {"mean": tiles.encode(found.mean[None].numpy()), "max": tiles.encode(found.largest[None].numpy())}


def _overview(text: Text, reduce: str, cells: int) -> bytes:
    """The pooled heads so far, each at the finest level with at most `cells` cells per side."""
    levels, pyramids = text.levels, text.pyramids
    if not pyramids:
        raise Unwanted
    cell = levels.base
    while max(levels.n, levels.m) > cells * cell:
        cell *= 2
    return tiles.encode(np.stack([pyramid.whole(reduce, cell) for pyramid in pyramids.values()]))


def policy_of(html: str) -> str:
    """A Content-Security-Policy that allows the page's own inline scripts and styles only."""
    scripts, styles = (
        " ".join(digest(code) for code in re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", html, re.DOTALL | re.IGNORECASE))
        for tag in ("script", "style")
    )
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; "
        "font-src 'self' data:; img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


async def _refuse(request: Request, error: HTTPException) -> Response:
    says = error.says if isinstance(error, Refusal) else misfit("path", error.detail).says  # the framework's own
    return JSONResponse(error_body(says), error.status_code, error.headers)


async def _gone(request: Request, error: Exception) -> Response:
    """The client disconnected, or the text was cancelled."""
    return JSONResponse(error_body(message("given_up")), 404)


async def _break(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse(error_body(message("broke")), 500)
