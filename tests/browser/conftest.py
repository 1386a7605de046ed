"""Pages in Chromium: every visit notes what the console complains of and what is asked of a network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

UNFOLD = "document.querySelectorAll('details').forEach((part) => { part.open = true; })"
"""Opens everything that is folded."""


@dataclass
class Visit:
    """A page that is open.

    ``faults``: warnings and errors of the console, exceptions of scripts, and requests to anywhere but files, all of
    which are refused.
    """

    page: Any
    faults: list[str] = field(default_factory=list)

    def __call__(self, script: str, argument: Any = None) -> Any:
        """What a JavaScript expression or function gives in the page."""
        return self.page.evaluate(script, argument)


Open = Callable[..., Visit]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser; tests are skipped without it, or fail where FIDELAB_REQUIRE_BROWSER is set."""
    absent = "" if BROWSER else "no chromium, chromium-browser or google-chrome on the PATH"
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        absent = absent or f"{error}: pip install 'fidelab[browser]'"
    if absent:
        (pytest.fail if os.environ.get("FIDELAB_REQUIRE_BROWSER") else pytest.skip)(f"{absent}; make test-browser")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Open]:
    """``open_page(file, dark=False, width=1280)`` opens a file in a profile of its own."""
    contexts = []

    def visit(file: Path, *, dark: bool = False, width: int = 1280) -> Visit:
        context = chromium.new_context(
            viewport={"width": width, "height": 844}, color_scheme="dark" if dark else "light", reduced_motion="reduce"
        )
        contexts.append(context)
        found = Visit(context.new_page())

        def answer(route: Any) -> None:
            if route.request.url.startswith("file://"):
                route.continue_()
            else:
                found.faults.append(f"asks for {route.request.url}")
                route.abort()

        context.route("**/*", answer)
        found.page.on(
            "console",
            lambda said: found.faults.append(said.text) if said.type in ("error", "warning") else None,
        )
        found.page.on("pageerror", lambda error: found.faults.append(str(error)))
        found.page.goto(file.as_uri())
        return found

    yield visit
    for context in contexts:
        context.close()
