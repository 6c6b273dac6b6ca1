"""What holds for all tests."""

import gc
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from chromium import BROWSER, Browser, Page
from parameters import mark_beyond, mark_repeated_values, without_repeated_pairs
from processes import processor_time

gc.disable()  # until all is collected, which makes hardly any garbage
os.environ["HEADWISE_LANG"] = "en"  # whatever the locale is; tests in Chinese name the language
# The tests over registries hold for the parts of other packages too, if they are asked to.
if os.environ.get("HEADWISE_TEST_PLUGINS"):
    from headwise import plugins

    plugins.load()

# What PyTorch does with each graph that it has compiled, but for its log: it times the graph's guards, for which it
# empties the processor's caches, and collects garbage.
torch._C._dynamo.guards.profile_guard_manager = lambda *_: 0.0
os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"

# A device that is not here would keep each seed for later, with the stack of calls as text.
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():
        device.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]

# A job in the background ignores Ctrl-C, and hands that down; the programs that tests start and stop must not.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What takes longest to import, which on a new machine is compiled too: one worker begins with the first, another with
# the last, so that each finds compiled what the other has met.
LARGE = [
    "torch._dynamo.convert_frame", "functorch.compile", "torch.distributed.tensor.parallel", "headwise.parallel",
    "hypothesis", "headwise.reports", "headwise.analysis", "scipy.stats", "transformers.generation.utils",
    "transformers.modeling_utils",
]  # fmt: skip
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in LARGE if worker == "gw0" else reversed(LARGE):
            with suppress(ImportError):
                import_module(name)

# How long an example takes says nothing on a machine that does other things too.
settings.register_profile("new-examples", deadline=None)
settings.load_profile("new-examples")
# Where a change is judged, the examples are the same each time: what fails there fails by the change. Elsewhere each
# run looks for new ones.
settings.register_profile("same-examples", derandomize=True, deadline=None, database=None)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests."""
    if BROWSER is None:
        pytest.skip("no Chromium here to open the page in")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def new_page(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """A page of the browser: new_page(width=1400, theme="dark", …) -> Page. The console stays silent."""
    pages = []

    def made(**options: Any) -> Page:
        pages.append(chromium.page(**options))
        return pages[-1]

    yield made
    for page in pages:
        said = page.said()
        page.close()
        assert said == []


def pytest_itemcollected(item: pytest.Item) -> None:
    """Of a test with `thorough_except`, all sets of parameters but those are thorough."""
    kept = item.get_closest_marker("thorough_except")
    if kept is not None and item.callspec.id not in kept.args:  # type: ignore[attr-defined]
        item.add_marker(pytest.mark.thorough)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", metavar="FILE", help="add a line a test: seconds of CPU time, and seconds")
    parser.addoption("--products", action="store_true", help="all sets of parameters, and not each two values together")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests with three parameters or more run each two values together, and not the whole product; in `make test`, a
    test with two or more runs each value."""
    if not config.getoption("products"):
        kept = without_repeated_pairs(items)
        left_out = set(items) - set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = kept
        mark_repeated_values(items)
    mark_beyond(items)


def pytest_collection_finish() -> None:
    """What is imported and collected stays until the end: the garbage collector need not look through it each time."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)  # syntax trees and graphs are many objects and no garbage
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """So does what a file's tests leave, imported or compiled: millions of objects, of which a collection takes
    seconds."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Unlike --durations, processor time is the same on a machine that does other things too."""
    if not (path := item.config.getoption("--cpu-times")):
        return (yield)
    before, begun = processor_time(), time.monotonic()
    try:
        return (yield)
    finally:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{processor_time() - before:.2f} {time.monotonic() - begun:.2f} {item.nodeid}\n")
