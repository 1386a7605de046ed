"""Slices of documents: parts of about one window, in turn over all documents, each byte with its document."""

from __future__ import annotations

import hashlib
from itertools import accumulate, pairwise

from fidelab.inputs.slices import EvaluationText, as_it_is, in_turn, units_of
from fidelab.inputs.texts import Text

N_CTX = 16
WINDOW = 4 * N_CTX  # bytes that a part has at most
LINES = "".join(f"line {number:03} of it\n" for number in range(40))  # 18 characters each
LONG_LINE = "a few short words " * 40
NO_BREAK = "x" * 500


def text_of(*documents: str) -> Text:
    starts = tuple(accumulate(map(len, documents[:-1]), initial=0))
    content = "".join(documents)
    return Text("t", content, starts, hashlib.sha256(content.encode()).hexdigest())


def parts_of(text: EvaluationText) -> list[tuple[int, str]]:
    ends = (*text.begins[1:], len(text.content))
    places = zip(text.documents, text.begins, ends, strict=True)
    return [(document, text.content[begin:end].decode()) for document, begin, end in places]


def test_a_part_is_between_half_a_window_and_one_and_ends_with_a_line_or_a_word() -> None:
    documents = (LINES, LONG_LINE, NO_BREAK, "head\n" + NO_BREAK)
    parts = parts_of(in_turn(text_of(*documents), 1000, N_CTX))
    for number, document in enumerate(documents, 1):
        *full, last = (part for which, part in parts if which == number)
        assert "".join((*full, last)) == document
        assert all(WINDOW / 2 <= len(part) <= WINDOW for part in full)
        assert 0 < len(last) <= WINDOW
    assert all(part.endswith("\n") for which, part in parts if which == 1)
    assert all(part.endswith(" ") for which, part in parts if which == 2)
    assert {len(part) for which, part in parts if which >= 3} >= {WINDOW}


def test_as_many_windows_as_documents_are_of_as_many_documents() -> None:
    found = parts_of(in_turn(text_of(*[LINES] * 9), 9, N_CTX))
    assert sorted(document for document, _ in found[:9]) == list(range(1, 10))


def test_the_first_documents_are_spread_over_all() -> None:
    order = [document for document, _ in parts_of(in_turn(text_of(*[LINES] * 64), 64, N_CTX))]
    for count in (4, 8, 16, 32):
        first = sorted(order[:count])
        gaps = [after - before for before, after in pairwise((*first, first[0] + 64))]
        assert max(gaps) <= 2 * 64 / count


def test_a_token_belongs_to_the_document_of_its_last_byte() -> None:
    text = EvaluationText(b"abcdefgh", (0, 3, 6), (2, 1, 3))
    assert units_of(text, [1, 3, 4, 6, 7, 8]) == [2, 2, 1, 1, 3, 3]


def test_a_whole_text_keeps_its_bytes_and_counts_what_precedes_the_first_document() -> None:
    text = Text("t", "préface\none\ntwo\n", (8, 12), "0" * 64)
    whole = as_it_is(text)
    assert whole.content == text.content.encode()
    assert parts_of(whole) == [(0, "préface\n"), (1, "one\n"), (2, "two\n")]


def test_a_text_without_documents_stays_in_its_order() -> None:
    text = Text("t", LINES, (), "0" * 64)
    assert in_turn(text, 4, N_CTX) == as_it_is(text) == EvaluationText(LINES.encode())
