"""`serve`: a page for attention maps of long texts, drawn from tiles, on 127.0.0.1 until Ctrl-C.

>>> from headwise.lm.loading import load_model
>>> from headwise.reports.viewer import serve
>>> serve(load_model(None), say=log.info)                                # doctest: +SKIP
"""

import errno
import os
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable
from typing import TYPE_CHECKING

from headwise.errors import ConfigError, not_installed, reason
from headwise.lm.loading import LoadedModel
from headwise.reports.viewer.session import MAX_TOKENS, Session
from headwise.wording import tr

if TYPE_CHECKING:
    from starlette.types import ASGIApp
    from uvicorn import Server

HOST = "127.0.0.1"


def serve(
    subject: LoadedModel,
    *,
    text: str | None = None,
    title: str = "",
    port: int = 0,
    open_browser: bool = True,
    max_tokens: int = MAX_TOKENS,
    lang: str | None = None,
    say: Callable[[str], None],
) -> bool:
    """Serve the viewer of a model on 127.0.0.1, until it is interrupted. say: called with the address, which contains
    the token. Returns whether its thread has ended; if not, it is in a computation that cannot be interrupted."""
    check_serving(port)
    from headwise.reports.viewer.app import make_app

    with bind(port) as listening:
        port = listening.getsockname()[1]
        session = Session(subject, max_tokens=max_tokens)
        try:
            if text is not None:
                session.open(text, title)
            token = secrets.token_urlsafe(32)
            app = make_app(session, token, hosts_of(port), lang)
            address = f"http://{HOST}:{port}/?token={token}"
            listening.listen(128)  # browsers can connect from now on
            say(address)
            if open_browser:
                threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
            made_server(app).run(sockets=[listening])
        except KeyboardInterrupt:
            pass
        finally:
            ended = session.close()
    return ended


def check_serving(port: int) -> None:
    """Raise as `serve` does if packages are missing or the port is not available."""
    try:
        import uvicorn  # noqa: F401

        import headwise.reports.viewer.app  # noqa: F401
    except ImportError:
        raise not_installed(tr("the viewer"), "starlette", "uvicorn") from None
    bind(port).close()


def made_server(app: "ASGIApp") -> "Server":
    """A server with time limits, without a Server header and without a log, which would contain the token."""
    import uvicorn

    from headwise.reports.viewer.app import HEAD, Connection

    config = uvicorn.Config(
        app, http=Connection, h11_max_incomplete_event_size=HEAD, log_level="warning", access_log=False,
        server_header=False, ws="none", lifespan="off", timeout_graceful_shutdown=2,
    )  # fmt: skip
    return uvicorn.Server(config)


def bind(port: int) -> socket.socket:
    """A socket on 127.0.0.1. ConfigError if the port is in use or not permitted."""
    if not 0 <= port <= 65535:
        raise ConfigError("--port {port}: expected 0 to 65535; 0 selects a free port", port=port)
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if os.name == "posix":  # reuses a port at once; on Windows it would let two servers share it
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((HOST, port))
    except OSError as error:
        made.close()
        used = error.errno == errno.EADDRINUSE
        why = tr("is used by another program") if used else reason(error)
        raise ConfigError("--port {port}: {why}; leave --port out to use a free port", port=port, why=why) from None
    return made


def hosts_of(port: int) -> set[str]:
    """The values of the Host header for this server."""
    names = {HOST, "localhost"}
    return {f"{name}:{port}" for name in names} | (names if port == 80 else set())
