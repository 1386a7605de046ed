"""What the commands of ``fidelab kernels`` share: the device, lists of numbers, versions, tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["check_device", "device_name", "finite", "new_console", "new_table", "parse_numbers", "versions"]


def check_device(device: str) -> None:
    """Whether that device is here.

    Raises:
        UsageError: it is not, or there is none of this name.
    """
    import torch

    from fidelab.errors import UsageError

    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device {device!r}: there are cpu and cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here")


def device_name(device: str) -> str:
    """Its name, as results show it."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def parse_numbers(text: str, flag: str) -> tuple[int, ...]:
    """Numbers separated by commas.

    Raises:
        UsageError: they are none; names the flag.
    """
    from fidelab.errors import UsageError

    if not all(part.isdecimal() for part in text.split(",")):
        raise UsageError(f"{flag} {text!r}: write numbers, separated by commas")
    return tuple(map(int, text.split(",")))


def versions() -> dict[str, str | None]:
    """Of what kernels are made with; None where it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    def of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {package: of(package) for package in ("fidelab", "torch", "triton")}


def finite(figures: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity, which broken kernels give: null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}


def new_table(*headings: str) -> Any:
    """An empty table."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def new_console() -> Console:
    """Where tables go."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=120)  # a file or a pipe has no width of its own
