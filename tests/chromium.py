"""A headless Chromium that tests can drive: real wheels, keys and touches, over the DevTools protocol on two pipes."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--remote-debugging-pipe", "--force-color-profile=srgb", "--hide-scrollbars",
    "--disable-backgrounding-occluded-windows", "--enable-logging=stderr",
]  # fmt: skip
# The browser reads from descriptor 3 and writes to 4; a small program puts ours there.
TRAMPOLINE = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(read, 3); os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One Chromium with a profile of its own; `close` ends it."""

    def __init__(self, profile: Path) -> None:
        theirs, self._write = os.pipe()
        self._read, their_write = os.pipe()
        command = [sys.executable, "-c", TRAMPOLINE, str(theirs), str(their_write), str(BROWSER), *FLAGS]
        self._log = profile / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, f"--user-data-dir={profile}", "about:blank"], pass_fds=(theirs, their_write),
                stdout=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip
        os.close(theirs)
        os.close(their_write)
        self._count, self._buffer = 0, b""
        self._free: list[tuple[str, str]] = []  # tabs that are empty again, and their contexts
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a command; events that come in the meantime are kept."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params} | ({"sessionId": session} if session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        end = time.monotonic() + 60
        while True:
            answer = self._receive(end)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def page(self, width: int = 1280, height: int = 800, **options: Any) -> "Page":
        """A page of that size in css pixels, with storage of its own: what other pages kept is not in it.

        A tab that a closed page left empty serves again: its process has started, and has drawn before."""
        if self._free:
            context, target = self._free.pop()
        else:
            context = self.send("Target.createBrowserContext")["browserContextId"]
            target = self.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, context, target, session, width, height, **options)

    def take_back(self, context: str, target: str, session: str) -> None:
        """The tab of a closed page, empty, for the next one. What a session set ends with it."""
        self.send("Target.detachFromTarget", sessionId=session)
        self.events = [event for event in self.events if event.get("sessionId") != session]
        self._free.append((context, target))

    def console(self) -> list[str]:
        """What all pages have written to the console so far, and the frames in them, whose processes are others."""
        return [line for line in self._log.read_text("utf-8", errors="replace").splitlines() if "CONSOLE" in line]

    def close(self) -> None:
        """End the browser."""
        for fd in (self._write, self._read):
            os.close(fd)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            more = os.read(self._read, 1 << 20)
            if not more:
                raise ConnectionError("the browser has ended")
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)


class Page:
    """A tab: opened, asked, clicked, scrolled, and looked at."""

    def __init__(
        self, browser: Browser, context: str, target: str, session: str, width: int, height: int, *,
        scale: float = 1.0, touch: bool = False, theme: str = "light", still: bool = True,
    ) -> None:  # fmt: skip
        self._browser, self._context, self._target, self._session = browser, context, target, session
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self._screen = {"deviceScaleFactor": scale, "mobile": touch}
        self.resize(width, height)
        self.send("Emulation.setTouchEmulationEnabled", enabled=touch)
        motion = "reduce" if still else "no-preference"
        wishes = {"prefers-color-scheme": theme, "prefers-reduced-motion": motion}
        self.send("Emulation.setEmulatedMedia", features=[{"name": k, "value": v} for k, v in wishes.items()])
        self.send("Emulation.setFocusEmulationEnabled", enabled=True)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the protocol, to this tab."""
        return self._browser.send(method, self._session, **params)

    def resize(self, width: int, height: int) -> None:
        """The window's size, in css pixels."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, **self._screen)

    def open(self, url: str) -> None:
        """Go there; the page's scripts have begun when this returns."""
        self.send("Page.navigate", url="about:blank")  # else an address with another fragment would load nothing
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def before(self, script: str) -> None:
        """Run a script in every document of this tab, before the page's own."""
        self.send("Page.addScriptToEvaluateOnNewDocument", source=script)

    def do(self, script: str) -> Any:
        """The value of an expression, or of the promise that it is."""
        how = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        answer = self.send("Runtime.evaluate", expression=script, **how)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description") or script)
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 30) -> None:
        """Until the expression is true."""
        end = time.monotonic() + seconds
        while not self.do(f"Boolean({condition})"):
            if time.monotonic() > end:
                says = self.do("document.body.innerText")[:600]
                raise TimeoutError(f"waited in vain for {condition}; the page says: {says}")
            time.sleep(0.03)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """mouseMoved, mousePressed, mouseReleased or mouseWheel at a point of the window."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float, count: int = 1) -> None:
        """One click, or two."""
        self.mouse("mouseMoved", x, y)
        for n in range(1, count + 1):
            for kind in ("mousePressed", "mouseReleased"):
                self.mouse(kind, x, y, button="left", clickCount=n)

    def drag(self, x: float, y: float, dx: float, dy: float, steps: int = 8) -> None:
        """Press, move, release."""
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        for i in range(1, steps + 1):
            self.mouse("mouseMoved", x + dx * i / steps, y + dy * i / steps, button="left", buttons=1)
        self.mouse("mouseReleased", x + dx, y + dy, button="left", clickCount=1)

    def touch(self, kind: str, *points: tuple[float, float]) -> None:
        """touchStart, touchMove or touchEnd with fingers at these points."""
        at = [{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(points)]
        self.send("Input.dispatchTouchEvent", type=kind, touchPoints=at)

    def press(self, key: str, **more: Any) -> None:
        """A key, by the name that scripts see."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = {"Enter": 13, "Escape": 27, "Tab": 9}.get(key, 0)
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text, **more)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code, **more)

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self.send("Input.insertText", text=text)

    def picture(self, path: Path | None = None) -> bytes:
        """The window as PNG."""
        data = base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])
        if path:
            path.write_bytes(data)
        return data

    def events(self) -> list[dict[str, Any]]:
        """What the protocol told of this tab."""
        return [event for event in self._browser.events if event.get("sessionId") == self._session]

    def said(self) -> list[str]:
        """Errors and warnings of the console, and exceptions that nobody caught."""
        out = []
        for event in self.events():
            params = event["params"]
            if event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                out.append(str([arg.get("value", arg.get("description")) for arg in params["args"]]))
            elif event["method"] == "Runtime.exceptionThrown":
                out.append(str(params["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                out.append(params["entry"]["text"])
        return out

    def close(self) -> None:
        """Leave nothing of it: no document, history, storage or settings."""
        self.send("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank'")
        self.do("window.name = ''")
        self.send("Storage.clearDataForOrigin", origin="*", storageTypes="all")
        self.send("Page.resetNavigationHistory")
        self._browser.take_back(self._context, self._target, self._session)
