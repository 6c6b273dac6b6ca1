"""The routes of the viewer's server."""

import logging
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from headwise.errors import TextError
from headwise.map import AttentionMap
from headwise.reports.fonts import font_path
from headwise.reports.messages import message
from headwise.reports.template import digest
from headwise.reports.viewer import requests, wire
from headwise.reports.viewer.guard import Guard
from headwise.reports.viewer.page import viewer_page
from headwise.reports.viewer.refusals import Refusal, error_body, misfit
from headwise.reports.viewer.session import Session, TooLong
from headwise.reports.viewer.text import Text
from headwise.reports.viewer.tiles import Unwanted, Wanted, rectangle, tile_spans
from headwise.reports.viewer.workers import Kept, Workers
from headwise.wording import in_language

THREADS = max(1, (os.cpu_count() or 2) // 2)  # for tiles, each of which is computed on several cores
QUEUE = 256  # waiting requests for tiles
KEPT = 64 << 20  # bytes of cached tiles
BINARY = "application/octet-stream"
log = logging.getLogger(__name__)


def make_app(session: Session, token: str, hosts: Iterable[str], lang: str | None = None) -> Guard:
    """The application, behind its token.

    Args:
        session: the model and its text. token: required in every request. hosts: accepted values of the Host header.
        lang: of the page, as in `viewer_page`.
    """
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
    return {"mean": wire.encode(found.mean[None].numpy()), "max": wire.encode(found.largest[None].numpy())}


def _overview(text: Text, reduce: str, cells: int) -> bytes:
    """The pooled heads so far, each at the finest level with at most `cells` cells per side."""
    levels, pyramids = text.levels, text.pyramids
    if not pyramids:
        raise Unwanted
    cell = levels.base
    while max(levels.n, levels.m) > cells * cell:
        cell *= 2
    return wire.encode(np.stack([pyramid.whole(reduce, cell) for pyramid in pyramids.values()]))


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
