"""Opening a report in the browser of a desktop."""

import os
import sys
from pathlib import Path


def on_desktop() -> bool:
    """Whether a person at a desktop gave the command: from a terminal, not over SSH, not in CI, with a display."""
    if os.environ.get("CI") or os.environ.get("SSH_CONNECTION") or not sys.stderr.isatty():
        return False
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def open_in_browser(path: Path) -> bool:
    """Open a file, without waiting for the browser; whether that was possible. Its messages are discarded."""
    import webbrowser

    address = path.resolve().as_uri()
    text_only = {"www-browser", "links", "elinks", "lynx", "w3m"}  # these would take over the terminal
    try:
        browser = webbrowser.get()
        return getattr(browser, "name", "") not in text_only and browser.open(address)
    except webbrowser.Error:
        return False
