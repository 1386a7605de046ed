"""Formatting of numbers and text for people, shared by all reports."""

from __future__ import annotations

import math
import re
import shlex
import unicodedata
from collections.abc import Iterable
from pathlib import PurePath

ABSENT = "–"
MINUS = "−"
MIB = 2**20
GIB = 2**30


def format_kld(value: float | None, *, signed: bool = False, bound: bool = False, digits: int = 3) -> str:
    """Format nats with 3 significant digits: ``0.0312``, ``0.0000294``; ``≥`` before a lower bound."""
    if value is None:
        return ABSENT
    sign = MINUS if value < 0 else "+" if signed and value > 0 else ""
    return ("≥ " if bound else "") + sign + _significant(abs(value), digits)


def format_nats(value: float | None, *, digits: int = 3) -> str:
    """Format nats for a sentence: ``0.0312``, or ``below 0.0001`` for smaller values."""
    if value is not None and 0 < value < 1e-4:
        return "0.0001" if value >= 5e-5 else "below 0.0001"
    return format_kld(value, digits=digits)


def plain_nats(value: float) -> str:
    """Format nats with two digits and no exponent, as for the ticks of an axis: ``0.000021``."""
    return (
        f"{value:.{max(0, 1 - math.floor(math.log10(value)))}f}" if 1e-6 <= value < 1 else format_kld(value, digits=2)
    )


def format_span(interval: tuple[float, float] | None) -> str:
    """Format an interval in nats, which may be skewed, as ``low–high``; an absent one is ``–``.

    The ends have two significant digits, or three if two would make both the same. ``to`` separates ends that may have
    a sign.
    """
    if interval is None:
        return ABSENT
    low, high = (format_kld(end, digits=2) for end in interval)
    if low == high:
        low, high = (format_kld(end) for end in interval)
    return f"{low} to {high}" if interval[0] < 0 else f"{low}–{high}"


def format_range(interval: tuple[float, float] | None) -> str:
    """Format an interval of scores as ``65–100``; it is lopsided near its ends, and an absent one is ``–``.

    A narrow interval has a decimal: ``99.5–99.9`` must not read ``100–100``.
    """
    if interval is None:
        return ABSENT
    decimals = 1 if interval[1] - interval[0] < 5 else 0
    return f"{interval[0]:.{decimals}f}–{interval[1]:.{decimals}f}"


def format_score(value: float | None, *, signed: bool = False) -> str:
    """Format a score 0-100 with one decimal."""
    if value is None:
        return ABSENT
    text = f"{abs(value):.1f}"
    sign = MINUS if value < 0 and text != "0.0" else "+" if signed and value > 0 else ""
    return sign + text


def format_share(value: float | None) -> str:
    """Format a share 0-1 as a percentage, never rounded up to 100% or down to 0%."""
    if value is None:
        return ABSENT
    text = f"{100 * value:.2f}"
    if text == "100.00" and value < 1:
        return "> 99.99%"
    return "< 0.01%" if text == "0.00" and value > 0 else f"{text}%"


def format_percent(share: float | None) -> str:
    """Format a share 0-1 as a percentage of at most three significant digits: ``0.082%``, ``1.52%``, ``15.2%``."""
    if share is None:
        return ABSENT
    if 0.9995 <= share < 1:
        return "> 99.9%"
    return f"{_significant(100 * share, 3 if share >= 0.01 else 2)}%" if share < 1 else "100%"


def format_percent_span(interval: tuple[float, float] | None, share: float | None) -> str:
    """Format the interval of ``share`` like :func:`format_percent`: ``1.3–1.8%``, and ``≤ 0.40%`` if the share is 0."""
    if interval is None or share is None:
        return ABSENT
    low, high = (_significant(100 * end, 2) for end in interval)
    return f"≤ {high}%" if share == 0 else f"{low}–{high}%"


def format_bytes(value: float | None) -> str:
    """Format bytes in full, with separators: ``23,040``."""
    return ABSENT if value is None else f"{value:,.0f}"


def format_count(value: float | None) -> str:
    """Format a count in full, with separators; four significant digits for a small count that is not a whole number."""
    return ABSENT if value is None else f"{value:,.4g}" if value % 1 and abs(value) < 1000 else f"{value:,.0f}"


def format_amount(value: float | None) -> str:
    """Format a measured amount with 3 significant digits, as a whole number from 1,000 on: ``24.4``, ``1,234``."""
    if value is None:
        return ABSENT
    return f"{value:,.0f}" if value >= 999.5 else _significant(value, 3)


def format_mib(value: float | None) -> str:
    """Format bytes as MiB, without the unit."""
    return ABSENT if value is None else format_amount(value / MIB)


def format_gib(value: float | None, *others: float | None) -> str:
    """Format bytes as GiB with three significant digits, without the unit; of several ``others`` with an arrow."""
    if others:
        return " → ".join(format_gib(one) for one in (value, *others))
    if value is None:
        return ABSENT
    size = value / GIB
    if size and size < 0.001:
        return "< 0.001"
    if size >= 999.5:
        return f"{size:,.0f}"
    decimals = 2 - math.floor(math.log10(size)) if size else 0
    return f"{size:.{min(4, decimals)}f}"


def format_ratio(value: float | None) -> str:
    """Format a ratio: ``1.03×``."""
    return ABSENT if value is None else f"{format_amount(value) if value >= 10 else f'{value:.2f}'}×"


def format_tokens(value: int) -> str:
    """Format a length in tokens as people write it: ``128``, ``4k`` for 4,096, ``1,000``."""
    return f"{value // 1024}k" if value and value % 1024 == 0 else f"{value:,}"


def format_figure(value: float | None, unit: str, *, signed: bool = False, mib: bool = False) -> str:
    """Format a metric's value by its unit; ``signed``: a plus sign for values above 0, ``mib``: bytes as MiB."""
    if value is None:
        return ABSENT
    size = abs(value)
    match unit:
        case "share":
            text = format_share(size)
        case "points":
            text = format_score(size)
        case "bytes":
            text = format_mib(size) if mib else format_bytes(size)
        case "count" | "tokens":
            text = format_count(size)
        case "tok/s" | "req/s" | "ms" | "s":
            text = format_amount(size)
        case "p" if 0 < size < 0.001:
            text = "< 0.001"
        case _:
            text = format_kld(size)
    zero = value == 0 or (unit == "points" and text == "0.0")
    return text if zero else f"{MINUS}{text}" if value < 0 else f"+{text}" if signed else text


def format_interval(interval: tuple[float, float | None] | None, unit: str, *, mib: bool = False) -> str:
    """Format an interval by the unit: ``low–high``, ``low to high`` with signs, ``–`` if absent, ``∞`` if unlimited."""
    if interval is None:
        return ABSENT
    low, high = interval
    if high is not None and unit == "nats":
        return format_span((low, high))
    if high is not None and unit == "points" and low >= 0:
        return format_range((low, high))
    ends = format_figure(low, unit, mib=mib), "∞" if high is None else format_figure(high, unit, mib=mib)
    return f"{ends[0]} to {ends[1]}" if low < 0 or unit == "share" else f"{ends[0]}–{ends[1]}"


def counted(n: int, word: str) -> str:
    """Format a number with its noun: ``1 document``, ``6 documents``."""
    return f"{n:,} {word}{'' if n == 1 else 's'}"


def heading(name: str, unit: str, *, mib: bool = False) -> str:
    """Return the name of a metric, with its unit if the values do not show it: ``rate, tok/s``."""
    unit = "MiB" if mib else unit
    named = unit in ("", "share", "points", "count", "ratio", "p") or unit in name.split()
    return one_line(name if named else f"{name}, {unit}")


def _significant(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    value = float(f"{value:.{digits - 1}e}")  # round first: 0.9996 has the exponent of 1.00
    exponent = math.floor(math.log10(value))
    if exponent < -7:  # shorter than its zeros
        mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa}e{int(power)}"
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


def one_line(text: str) -> str:
    """Put text from models, logs and configs on one line, without control characters."""
    if text.isprintable() and "  " not in text and text == text.strip():
        return text
    return "".join(char if char.isprintable() else "\ufffd" for char in " ".join(text.split()))


_FOLDERS = re.compile(r"(?<![\w.~/:\\-])~?/(?:[^\s/:;,'\"]+/)+(?=[^\s/])")  # of an absolute path


def without_folders(text: str) -> str:
    """Replace the absolute paths in a text by their last parts: published text must not show local folders."""
    return _FOLDERS.sub("", text)


def public_name(name: str) -> str:
    """Return a name as it is, and an absolute path, which may hold blanks, by its last part."""
    path = PurePath(name)
    return path.name if path.is_absolute() else name


def public_command(command: str) -> str:
    """Return a command with absolute paths by their last parts, for texts that others read."""
    try:
        words = shlex.split(command)
    except ValueError:
        return command
    named = [public_name(word) for word in words]
    return command if named == words else shlex.join(named)


def printable(text: str, *, escaped: bool = False) -> str:
    """Return text on its own lines, without characters that do more than display.

    Control characters of both sets (which begin sequences that move the cursor, colour, name the window or write to the
    clipboard), those that reorder what follows, lone surrogates and unassigned characters show as ``\ufffd``; with
    ``escaped`` as JSON escapes them, so that JSON stays the same JSON.  Blanks of all kinds stay, lines end in ``\n``.
    """
    text = text.replace("\r\n", "\n")
    if all(map(str.isprintable, text.split("\n"))):
        return text
    return text.translate(_ESCAPED if escaped else _REPLACED)


_KEPT_CHARACTERS = "\n\t\u200c\u200d"  # the joiners hold emoji and several scripts together


class _Table(dict[int, int | str]):
    """Replacement of each character, computed when it first occurs."""

    def __init__(self, escaped: bool) -> None:
        self._escaped = escaped

    def __missing__(self, code: int) -> int | str:
        char = chr(code)
        if char.isprintable() or char in _KEPT_CHARACTERS or unicodedata.category(char) == "Zs":
            self[code] = code
        elif self._escaped:
            units = char.encode("utf-16-be", "surrogatepass").hex()
            self[code] = "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
        else:
            self[code] = 0xFFFD
        return self[code]


_REPLACED, _ESCAPED = _Table(escaped=False), _Table(escaped=True)


def format_layers(layers: Iterable[int]) -> str:
    """Return ``layers 0–3, 7``; empty for none."""
    spans: list[list[int]] = []
    for layer in sorted(set(layers)):
        if spans and spans[-1][1] == layer - 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    shown = ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in spans)
    return f"layer{'s' if len(spans) > 1 or spans[0][0] < spans[0][1] else ''} {shown}" if spans else ""
