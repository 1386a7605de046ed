"""``fidelab`` and ``python -m fidelab``: prepares standard streams and Ctrl-C before anything else is imported.

Out of reach is what runs before the lines below: the start of Python, some ten milliseconds in which Ctrl-C ends the
process or shows Python's own traceback.  In the last moments of Python's end, SIGINT ends the process silently.
"""

from __future__ import annotations

import os
import signal
import sys


def _stop(_number: int, _frame: object) -> None:
    """End at once: no command has begun, or it has ended."""
    try:
        os.write(2, b"fidelab: stopped\n")
    finally:
        os._exit(130)


def _leave(_number: int, _frame: object) -> None:
    """End at once, after the stop was reported."""
    os._exit(130)


def main() -> None:
    """Run the command line, which lets Ctrl-C raise ``KeyboardInterrupt`` only while a command runs."""
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # "nohup" and "&" of scripts ignore it
    if heeded:
        signal.signal(signal.SIGINT, _stop)
    open_streams()
    from fidelab.cli import main as command_line

    code: str | int | None = 130
    try:
        command_line()
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:  # once more, while the first was reported
        pass
    if heeded:
        signal.signal(signal.SIGINT, _leave if code == 130 else _stop)
    sys.exit(code)


def open_streams() -> None:
    """Open the null device as each standard stream that the caller closed, so that no file gets its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            stream = os.fdopen(number, "w" if number else "r", encoding="utf-8", errors="replace", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


if __name__ == "__main__":
    main()
