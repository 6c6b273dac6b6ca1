"""Access control: only requests from this machine's own browser with the token that was printed at the start.

Another site's page can make a browser send requests to 127.0.0.1, and by DNS rebinding even under the name of that
site. The Host header must therefore be the server's, as must an Origin if there is one, and every request must have
the token. No response allows another origin to read it.
"""

import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headwise.reports.messages import message
from headwise.reports.viewer.refusals import error_body

NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
OPEN_ANOTHER = "headwise：请打开 headwise view 启动时打印的地址，其中含有令牌。"
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
    """An application behind a token.

    Args:
        hosts: accepted values of the Host header, such as "127.0.0.1:8765".
    """

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

        refusal = self._refusal(scope)
        app = self.app if refusal is None else _answer(refusal, Headers(scope=scope))
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
        site = headers.get("sec-fetch-site", "none")
        if site not in ("none", "same-origin") and not self._is_visit(scope, headers):
            return "pages of other sites have no access"
        if not hmac.compare_digest(self._given(scope), self.token):
            return "the token is missing or wrong; open the address that was printed when the viewer started"
        return None

    @staticmethod
    def _is_visit(scope: Scope, headers: Headers) -> bool:
        return scope["method"] == "GET" and scope["path"] == "/" and headers.get("sec-fetch-mode") == "navigate"

    @staticmethod
    def _given(scope: Scope) -> bytes:
        found = QueryParams(scope["query_string"]).getlist("token")
        return found[0].encode("utf-8", "replace") if len(found) == 1 else b""


def _answer(refusal: str, headers: Headers) -> Response:
    """The refusal as plain text for a browser, otherwise as JSON."""
    if "text/html" in headers.get("accept", ""):
        return PlainTextResponse(f"headwise: {refusal}.\n\n{OPEN_ANOTHER}\n", 403)
    return JSONResponse(error_body(message("not_allowed", sentence=refusal)), 403)
