"""Sizes, lengths, times and shares as people write them: every accepted form, and each refusal with its message."""

from __future__ import annotations

import math

import pytest

from fidelab.core.amounts import parse_bytes, parse_counts, parse_seconds, parse_tokens
from fidelab.core.errors import UsageError
from fidelab.core.share import CHANGE_LIMIT, LIMIT, ShareBounds

LONGEST = "9" * 400  # beyond a double


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("512", 512), ("80G", 80e9), ("80GB", 80e9), ("80gb", 80e9), ("80 G", 80e9), ("24e9", 24e9)),
        *(("80GiB", 80 * 2**30), ("80Gi", 80 * 2**30), (" 2kib ", 2048), ("1.5 TiB", 1.5 * 2**40), (".5M", 5e5)),
        *(("7b", 7), ("1e3k", 1e6)),
    ],
)
def test_a_size_has_decimal_or_binary_units(text: str, size: float) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "0", "0GiB", "-1G", "G", "80X", "80 GBs", "80iB", "1,5G", "80G 10M", "1e400", "1e308T", "nan", "inf", LONGEST],
)
def test_another_text_is_refused_as_a_size(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_bytes(text)
    assert str(refused.value) == f"{text!r} is not a size; write 80G (10^9), 80GiB (2^30) or a number of bytes"


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        *(("32768", 32768), ("32,768", 32768), ("1,048,576", 2**20), ("32k", 32768), ("32K", 32768), ("32 k", 32768)),
        *(("1m", 2**20), ("1.5k", 1536), (" 128k ", 131072), ("2.0", 2), ("1,024k", 2**20)),
    ],
)
def test_a_length_is_whole_tokens_and_k_is_1024(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(
    "text",
    ["", "0", "-4", "k", "abc", "1.3", "1.0001k", "32kb", "32g", "1,2", "32,76", "1234,567", ",5", "1e3", LONGEST],
)
def test_another_text_is_refused_as_a_length(text: str) -> None:
    with pytest.raises(ValueError, match="is not a length") as refused:
        parse_tokens(text)
    assert str(refused.value) == f"{text!r} is not a length; write tokens such as 32768 or 32k"


def test_the_least_length_is_the_callers() -> None:
    assert parse_tokens("0", 0) == 0
    with pytest.raises(ValueError, match="'7' is not a length"):
        parse_tokens("7", 8)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("128,1k", (128, 1024)), ("128", (128,)), (" 1 , 2 ", (1, 2)), ("2,1,2", (2, 1, 2)), ("1,024", (1, 24))],
)
def test_a_list_of_numbers_keeps_its_order_and_a_comma_separates(text: str, counts: tuple[int, ...]) -> None:
    assert parse_counts(text) == counts


@pytest.mark.parametrize(
    ("text", "least"), [("", 1), ("1,,2", 1), ("1,", 1), ("0", 1), ("a", 1), ("1,-2", 0), ("1;2", 0)]
)
def test_another_text_is_refused_as_a_list_of_numbers(text: str, least: int) -> None:
    above = " above 0" if least else ""
    with pytest.raises(ValueError, match="separated by commas") as refused:
        parse_counts(text, least)
    assert str(refused.value) == f"{text!r}: write numbers{above}, separated by commas, as in 128,1k"


def test_a_list_may_hold_zero_where_the_caller_allows_it() -> None:
    assert parse_counts("0,1", 0) == (0, 1)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90", 90), ("90s", 90), ("90 sec", 90), ("90 seconds", 90), ("10m", 600), ("10M", 600), ("10 min", 600)),
        *(("1h30m", 5400), ("1 hour 30 minutes", 5400), ("1.5h", 5400), ("2 days", 172_800), ("1d2h3m4s", 93_784)),
        *(("10ms", 0.01), ("5us", 5e-6), (".5s", 0.5), (" 3 hrs ", 10_800)),
    ],
)
def test_a_time_is_seconds_or_has_units(text: str, seconds: float) -> None:
    assert math.isclose(parse_seconds(text), seconds)


@pytest.mark.parametrize(
    "text",
    ["", "0", "0s", "-5", "m", "abc", "1h30", "30 1h", "5 parsecs", "1e3", "1:30", "1,5h", "nan", "inf", LONGEST],
)
def test_another_text_is_refused_as_a_time(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time") as refused:
        parse_seconds(text)
    assert str(refused.value) == f"{text!r} is not a time; write seconds, or a time such as 90s, 10m or 1h30m"


@pytest.mark.parametrize(
    ("value", "bounds", "share"),
    [
        *(("1%", ShareBounds(), 0.01), ("0.01", ShareBounds(), 0.01), (0.5, ShareBounds(), 0.5)),
        *((" 97% ", LIMIT, 0.97), ("0", LIMIT, 0.0), ("100%", LIMIT, 1.0), ("-5%", CHANGE_LIMIT, -0.05)),
        ("150%", ShareBounds(beyond=True), 1.5),
    ],
)
def test_a_share_is_a_percentage_or_a_fraction(value: object, bounds: ShareBounds, share: float) -> None:
    assert bounds.parse(value) == share


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        ("97", LIMIT, "97 is not a share: write 97% or 0.97"),
        (1, LIMIT, "1 is not a share: write 1% or 0.01"),
        ("1000", LIMIT, "1000 is not a share: write 1% or 0.01"),
        ("much", LIMIT, "'much' is not a share: write 1% or 0.01"),
        ("", LIMIT, "'' is not a share: write 1% or 0.01"),
        ("-5%", LIMIT, "-5% is not a share: write 1% or 0.01"),
        ("nan", LIMIT, "'nan' is not a share: write 1% or 0.01"),
        (True, LIMIT, "True is not a share: write 1% or 0.01"),
        ("0%", ShareBounds(), "0% is not a share above 0%: write 1% or 0.01"),
        ("100%", ShareBounds(), "100% is not a share below 100%: write 1% or 0.01"),
        ("101%", LIMIT, "101% is not a share up to 100%: write 1% or 0.01"),
    ],
)
def test_another_value_is_refused_as_a_share(value: object, bounds: ShareBounds, message: str) -> None:
    with pytest.raises(ValueError, match="is not a share") as refused:
        bounds.parse(value)
    assert str(refused.value) == message
