"""Open a page in the user's browser, without waiting for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_WAIT = 3.0  # seconds in which an opener that cannot open anything has ended


def open_page(page: Path) -> bool:
    """Open a page in a graphical browser; return whether one was started.

    ``BROWSER`` names a program that is tried first.  A text browser would take the terminal, so without a display
    nothing is opened.
    """
    if sys.platform == "win32":
        try:
            os.startfile(page)
        except OSError:
            return False
        return True
    command = opener(os.environ, sys.platform)
    if command is None:
        return False
    try:
        started = subprocess.Popen(
            [command, page.absolute().as_uri() if command.endswith("xdg-open") else str(page.absolute())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C and the end of this program do not reach it
        )
        return started.wait(_WAIT) == 0
    except subprocess.TimeoutExpired:
        return True  # a browser that runs
    except OSError:
        return False


def opener(environment: Mapping[str, str], platform: str) -> str | None:
    """Return the program that opens pages here, or ``None`` if there is no display or no such program."""
    named = environment.get("BROWSER", "").partition(os.pathsep)[0]
    if named and "%" not in named and (found := shutil.which(named)):
        return found
    if platform == "darwin":
        return shutil.which("open")
    if not (environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY")):
        return shutil.which("wslview")
    return shutil.which("xdg-open") or shutil.which("wslview")
