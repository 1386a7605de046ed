"""Names and options: what exists is built, everything else is refused in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fidelab.core import FormatSpec, KVSpec
from fidelab.core.errors import UnknownNameError, UsageError
from fidelab.formats import FORMATS, create


def refuse(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        create(KVSpec.parse(text).k)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", FORMATS.names())
def test_every_name_makes_a_format_of_that_name(name: str) -> None:
    assert create(FormatSpec(name)).name == name


def test_what_no_format_has_is_refused_with_what_there_is() -> None:
    with pytest.raises(UnknownNameError, match="unknown KV format 'fp8_e4m'; did you mean 'fp8_e4m3'"):
        create(FormatSpec("fp8_e4m"))
    assert refuse("f16[group=32]") == "KV format 'f16[group=32]': f16 has no option 'group'; it takes none"
    assert refuse("int4[scale=none]").endswith("int4 has no option 'scale'; it takes group")
    assert refuse("fp8_e4m3[scale=per-row]") == (
        "KV format 'fp8_e4m3[scale=per-row]': option scale of fp8_e4m3 takes "
        "none, per-tensor, per-head, per-channel or per-token-head, not 'per-row'"
    )


@pytest.mark.parametrize("name", FORMATS.names())
def test_an_unknown_option_is_refused(name: str) -> None:
    message = refuse(f"{name}[colour=red]")
    assert f"{name} has no option 'colour'" in message


@pytest.mark.parametrize("value", ["0", "-8", "12", "8.0", "x", "", "032", "8,16", "٣٢", "9" * 5000])
def test_a_bad_group_is_refused(value: str) -> None:
    assert "option group of int8 takes a positive multiple of 8, not" in refuse(f"int8[group={value}]")


@pytest.mark.parametrize("group", [8, 32, 72, 1024])
def test_a_multiple_of_eight_is_a_group(group: int) -> None:
    fmt = create(KVSpec.parse(f"int4[group={group}]").k)
    assert fmt.token_bytes(1024) == 512 + 2 * -(-1024 // group)


def test_the_table_is_read_without_torch() -> None:
    code = "import sys; from fidelab.formats import FORMATS; FORMATS.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
