"""Texts and the windows cut from them."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest

from fidelab.core.errors import InputError, UsageError
from fidelab.inputs.corpus import Place, Protocol, WindowSet, make_windows
from fidelab.inputs.texts import Text, load_text
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import Model, resolve


@pytest.fixture
def fake() -> Tokenizer:
    """One token per byte, so that tokens can be counted by eye."""
    return Tokenizer.load(resolve("fake"))


def _text(content: str, *doc_starts: int) -> Text:
    return Text("t", content, doc_starts, "")


def _load(tmp_path: Path, content: str) -> Text:
    file = tmp_path / "t.txt"
    file.write_bytes(content.encode())
    return load_text(file)


def test_text_keeps_its_bytes(tmp_path: Path) -> None:
    text = _load(tmp_path, "a\r\nb\n")
    assert text.content == "a\r\nb\n"
    assert text.sha256 == hashlib.sha256(b"a\r\nb\n").hexdigest()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_wikitext_titles_begin_documents(end: str, tmp_path: Path) -> None:
    lines = [" ", " = One = ", " text = not = title ", " = = Part = = ", " = Two = Too = ", " x ", ""]
    text = _load(tmp_path, end.join(lines))
    assert [text.content[start:].split("=")[1].strip() for start in text.doc_starts] == ["One", "Two"]


def test_markdown_titles_begin_documents(tmp_path: Path) -> None:
    text = _load(tmp_path, "# One\n\nx\n\n## Part\n\n# Two\n\ny #no\n")
    assert [text.content[start : start + 5] for start in text.doc_starts] == ["# One", "# Two"]


@pytest.mark.parametrize("content", ["plain\n", "# only one\n", "x = 1\n# a comment\n# another\n"])
def test_other_text_has_no_documents(content: str, tmp_path: Path) -> None:
    assert _load(tmp_path, content).doc_starts == ()


def test_default_text_is_the_packages_own() -> None:
    text = load_text("default")
    assert text.name == "default"
    titles = [text.content[start:].splitlines()[0] for start in text.doc_starts]
    assert (titles[0], titles[-1]) == ("# The Eel's Errand", "# Report on the Fall of the Winter Garden")


def test_other_encoding_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"ab\nc\nd\xe9f\n")
    with pytest.raises(InputError, match=r"not UTF-8: byte 0xe9 in line 3 \(byte 6 of the file\)"):
        load_text(tmp_path / "t.txt")


def test_windows_are_cut_from_the_text_tokenised_once(fake: Tokenizer) -> None:
    found = make_windows(fake, _text("abcdefghijklm"), n_ctx=4, n_windows=3, place="start")
    assert [fake.decode(window) for window in found.windows] == ["abcd", "efgh", "ijkl"]
    assert not found.bos


def test_bos_takes_the_place_of_the_first_token(fake: Tokenizer) -> None:
    found = make_windows(replace(fake, bos_id=1), _text("abcdefgh"), n_ctx=4, n_windows=2)
    assert found.windows == ((1, *b"bcd"), (1, *b"fgh"))
    assert found.bos


@pytest.mark.parametrize(("protocol", "first", "last"), [("half", 256, 510), ("full", 1, 510), ("sliding", 0, 511)])
def test_protocol_says_which_rows_are_scored(protocol: Protocol, first: int, last: int, fake: Tokenizer) -> None:
    found = make_windows(fake, _text("x" * 1024), n_ctx=512, n_windows=2, protocol=protocol)
    assert (found.first, found.last) == (first, last)
    assert [len(units) for units in found.units] == [last - first + 1] * 2


def test_sliding_windows_begin_every_stride(fake: Tokenizer) -> None:
    found = make_windows(fake, _text("abcdefgh"), n_ctx=4, n_windows=3, protocol="sliding", stride=2)
    assert [fake.decode(window) for window in found.windows] == ["abcd", "cdef", "efgh"]
    guide = _text("x" * (99 * 512 + 2048))
    found = make_windows(fake, guide, n_ctx=2048, n_windows=100, protocol="sliding", stride=512)
    assert sum(len(units) for units in found.units) == 204_800


def _begins(text: Text, found: WindowSet) -> list[int]:
    """Where the windows lie in a text of different bytes, or of documents of different letters."""
    return [text.content.index(bytes(window).decode()) for window in found.windows]


def _documents(*lengths: int) -> Text:
    """Documents of so many tokens, no two places alike: their bytes are the base-62 digits of the place."""
    digits = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    total = sum(lengths)
    content = "".join(digits[i % 62] + digits[i // 62 % 62] + digits[i // 3844] for i in range(total // 3 + 1))[:total]
    return _text(content, *(sum(lengths[:i]) for i in range(len(lengths))))


@pytest.mark.parametrize("n_ctx", [8, 32])
@pytest.mark.parametrize("n", range(1, 13))
def test_spread_windows_do_not_overlap_and_lie_in_the_text(n: int, n_ctx: int, fake: Tokenizer) -> None:
    text = _documents(7, 40, 9, 10, 100, 33, 5, 64, 70, 46)
    begins = _begins(text, make_windows(fake, text, n_ctx, n))
    assert begins == sorted(begins)
    taken = [token for begin in begins for token in range(begin, begin + n_ctx)]
    assert len(set(taken)) == len(taken) == n * n_ctx
    assert taken[-1] < 384


def test_spread_windows_begin_where_documents_do_one_to_a_document(fake: Tokenizer) -> None:
    text = _documents(*[100] * 12)
    for n in range(1, 13):
        found = make_windows(fake, text, 32, n)
        assert all(begin % 100 == 0 for begin in _begins(text, found))
        assert len({unit for units in found.units for unit in units}) == n


@pytest.mark.parametrize(
    ("lengths", "n", "begins"),
    [
        pytest.param([100] * 12, 4, [100, 400, 700, 1000], id="chosen documents are evenly spread"),
        pytest.param([40, 40, 120, 40], 5, [0, 40, 80, 112, 200], id="a second window when every document has one"),
        pytest.param([24, 200], 6, [0, 32, 64, 96, 128, 160], id="a window that reaches in costs no other"),
        pytest.param([50, 50, 28], 4, [0, 32, 64, 96], id="a text that just suffices is taken whole"),
    ],
)
def test_windows_are_spread_over_documents(lengths: list[int], n: int, begins: list[int], fake: Tokenizer) -> None:
    text = _documents(*lengths)
    assert _begins(text, make_windows(fake, text, 32, n)) == begins


def test_windows_over_short_documents_come_last(fake: Tokenizer) -> None:
    text = _documents(10, 10, 10, 10, 10, 50, 50)  # only the last two reach into the scored half of 32
    assert _begins(text, make_windows(fake, text, 32, 2)) == [50, 100]
    assert _begins(text, make_windows(fake, text, 32, 3)) == [0, 50, 100]


def test_without_documents_windows_lie_at_even_distances(fake: Tokenizer) -> None:
    text = replace(_documents(100), doc_starts=())
    assert _begins(text, make_windows(fake, text, 10, 4)) == [0, 30, 60, 90]


@pytest.mark.parametrize(
    ("protocol", "place", "says"),
    [("half", "end", "unknown place 'end': write spread or start"), ("sliding", "spread", "leave out place")],
)
def test_places_that_cannot_be_are_refused(protocol: str, place: str, says: str, fake: Tokenizer) -> None:
    with pytest.raises(UsageError, match=says):
        make_windows(fake, _text("x" * 99), 8, 1, protocol, None, place)  # type: ignore[arg-type]


def test_unit_is_the_document_of_the_predicted_token_at_a_window_border_that_of_the_next(fake: Tokenizer) -> None:
    text = _text("..AAABB" + "C" * 9, 2, 5, 7)
    found = make_windows(fake, text, n_ctx=8, n_windows=2, protocol="full", place="start")
    assert (found.unit, found.units) == ("document", ((1, 1, 1, 2, 2, 3), (3,) * 6))
    found = make_windows(fake, _text("AAAABBBB", 0, 4), n_ctx=4, n_windows=2, protocol="sliding", stride=4)
    assert found.units == ((1, 1, 1, 2), (2, 2, 2, 2))


def test_without_documents_or_offsets_the_unit_is_a_block_of_windows_which_overlapping_ones_share(
    fake: Tokenizer,
) -> None:
    found = make_windows(fake, _text("x" * 128), n_ctx=4, n_windows=32)
    assert found.unit == "block"
    assert [units[0] for units in found.units][:7] == [0, 0, 0, 1, 1, 1, 2]
    found = make_windows(fake, _text("x" * 64), n_ctx=32, n_windows=8, protocol="sliding", stride=4)
    assert {units[0] for units in found.units} == {0}
    assert make_windows(replace(fake, offsets=False), _text("AAAABBBB", 0, 4), 4, 2).unit == "block"


def test_short_text_says_how_many_tokens_are_needed_of_overlapping_ones_once(fake: Tokenizer) -> None:
    with pytest.raises(InputError, match="text t has 9 tokens, but 3 windows of n_ctx 4 need 12: use fewer"):
        make_windows(fake, _text("x" * 9), n_ctx=4, n_windows=3)
    with pytest.raises(InputError, match="has 7 tokens, but 3 windows of n_ctx 4 need 8"):
        make_windows(fake, _text("x" * 7), n_ctx=4, n_windows=3, protocol="sliding", stride=2)


@pytest.mark.parametrize(
    ("n_ctx", "n_windows", "protocol", "stride", "says"),
    [
        (2, 1, "half", None, "at least 4"),
        (8, 0, "half", None, "at least 1"),
        (8, 1, "halves", None, "half, full, sliding"),
        (8, 1, "half", 4, "--stride is for protocol sliding"),
        (8, 1, "sliding", 9, "tokens are left out"),
        (8, 1, "sliding", 0, "from 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    n_ctx: int, n_windows: int, protocol: str, stride: int | None, says: str, fake: Tokenizer
) -> None:
    with pytest.raises(UsageError, match=says):
        make_windows(fake, _text("x" * 99), n_ctx, n_windows, protocol, stride)  # type: ignore[arg-type]


@pytest.mark.model
def test_default_text_is_long_enough_for_the_default_windows(smollm2: Model) -> None:
    found = make_windows(Tokenizer.load(smollm2), load_text("default"), n_ctx=512, n_windows=32)
    assert len(found.windows) == 32
    assert found.unit == "document"


@pytest.mark.model
def test_default_text_has_ten_documents_that_hold_a_window_of_2048(smollm2: Model) -> None:
    tokenizer, text = Tokenizer.load(smollm2), load_text("default")
    found = make_windows(tokenizer, text, n_ctx=2048, n_windows=10)
    owners = {unit for units in found.units for unit in units}
    documents = [text.content[a:b] for a, b in pairwise([*text.doc_starts, len(text.content)])]
    assert len(owners) == 10
    assert min(len(tokenizer.encode(documents[owner - 1])) for owner in owners) >= 2200


@pytest.mark.model
def test_the_default_windows_reach_nearly_every_document(smollm2: Model) -> None:
    tokenizer, text = Tokenizer.load(smollm2), load_text("default")
    reached = {
        place: len({unit for units in make_windows(tokenizer, text, 512, 32, place=place).units for unit in units})
        for place in get_args(Place)
    }
    assert reached["spread"] > 1.4 * reached["start"]
    assert reached["spread"] >= 0.9 * len(text.doc_starts)


@pytest.mark.parametrize(
    ("tokens", "remedy"),
    [
        (140, "need 6144: use about 44 times more text, or --n-ctx 64"),
        (9, "need 6144: use about 683 times more text"),
        (1200, "need 6144: use fewer --windows or a longer text"),
    ],
)
def test_a_text_too_short_for_any_window_is_not_told_to_use_fewer(fake: Tokenizer, tokens: int, remedy: str) -> None:
    with pytest.raises(InputError, match=f"{remedy}$"):
        make_windows(fake, _text("x" * tokens), n_ctx=768, n_windows=8)
