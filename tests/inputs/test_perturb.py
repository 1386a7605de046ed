"""Perturbations: known cases, what each may and may not change, and the tables behind them."""

from __future__ import annotations

import re

import pytest

from fidelab.core.errors import UnknownNameError
from fidelab.inputs.perturb import PERTURBATIONS, differences, perturb, perturb_prompt, synonyms
from fidelab.inputs.prompts import Prompt, load_prompts

SEEDS = range(40)
PINNED = [
    "Describe two big roads near the hrabour.",
    "describe two big roads near the harbour.",
    "Describe two big roads near the harbour",
    "Describe two big streets near the harbour.",
]


def _prompt(*messages: tuple[str, str]) -> Prompt:
    return Prompt("p", "user", tuple({"role": role, "content": content} for role, content in messages))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("case", "Hello World", "hello world"),
        ("punct", "Yes.", "Yes"),
        ("punct", "Hello", "Hello?"),
        ("punct", "What?!", "What?!?"),
        ("paraphrase", "Big things happen.", "Large things happen."),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 42])
def test_cases_of_metrics(name: str, text: str, expected: str, seed: int) -> None:
    assert perturb(text, name, seed) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Why?", "Why"),
        ("Really...", "Really.."),
        ("Yes. \n", "Yes \n"),
        ("Hello\n", "Hello?\n"),
        ("Is it so?.", "Is it so?"),
        ("Stop!", "Stop!?"),
    ],
)
def test_punct_touches_one_character_at_the_end_of_the_words(text: str, expected: str) -> None:
    assert perturb(text, "punct", 0) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("typo", "a be sea"),  # no word of four letters
        ("typo", "because there would have been"),  # stop-words alone
        ("typo", "aaaa 12345"),  # nothing to exchange
        ("case", "all small, 7 numbers and NASA"),
        ("punct", ""),
        ("punct", " \n"),
        ("punct", " ?"),  # nothing would be left
        ("paraphrase", "zebra zero zinc"),
        ("paraphrase", ""),
    ],
)
def test_what_does_not_apply_is_none(name: str, text: str) -> None:
    assert perturb(text, name, 3) is None


def test_typo_exchanges_two_neighbours_inside_one_word_that_is_long_enough_and_no_stop_word() -> None:
    text = "There were apples, because the orchard was old and 'Banana' costs 1234."
    allowed = {"apples", "orchard", "Banana", "costs"}
    seen = set()
    for seed in SEEDS:
        changed = perturb(text, "typo", seed)
        assert changed is not None
        apart = [i for i, (a, b) in enumerate(zip(text, changed, strict=True)) if a != b]
        assert len(apart) == 2
        i, j = apart
        assert (j, changed[i], changed[j]) == (i + 1, text[j], text[i])
        word = next(m for m in re.finditer(r"[A-Za-z]+", text) if m.start() <= i < m.end())
        assert word.start() <= j < word.end()
        seen.add(word[0])
    assert seen == allowed  # every word gets its turn, and no other does


def test_typo_always_changes_a_word_of_twin_letters() -> None:
    assert {perturb("oooa", "typo", seed) for seed in SEEDS} == {"ooao"}


def test_case_lowers_the_first_letter_of_every_capitalised_word_and_leaves_acronyms() -> None:
    text = "I think Émile's SQL from McGill (B2) is Fine."
    assert perturb(text, "case", 0) == "i think émile's SQL from mcGill (b2) is fine."


def test_paraphrase_replaces_one_word_and_keeps_its_capital() -> None:
    # in capitals: a keyword or a name
    assert {perturb("A Big BIG thing", "paraphrase", seed) for seed in SEEDS} == {"A Large BIG thing"}
    text = "a big and happy story"
    found = {perturb(text, "paraphrase", seed) for seed in SEEDS}
    assert found == {"a large and happy story", "a big and cheerful story", "a big and happy tale"}


def test_paraphrase_takes_whole_words_alone() -> None:
    assert perturb("bigger bigots", "paraphrase", 0) is None


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_the_seed_alone_decides(name: str) -> None:
    text = "Describe two big roads near the harbour, and write a happy story about each of the visitors."
    assert [perturb(text, name, seed) for seed in SEEDS] == [perturb(text, name, seed) for seed in SEEDS]
    if name in ("typo", "paraphrase"):
        assert len({perturb(text, name, seed) for seed in SEEDS}) > 3


def test_choices_are_the_same_on_every_machine() -> None:
    text = "Describe two big roads near the harbour."
    assert [perturb(text, name, 42) for name in PERTURBATIONS] == PINNED


def test_an_unknown_name_lists_the_four() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown perturbation 'tpyo'; did you mean 'typo'\?") as caught:
        perturb("text", "tpyo", 0)
    assert sorted(caught.value.known) == sorted(PERTURBATIONS) == ["case", "paraphrase", "punct", "typo"]


def test_only_the_last_user_message_changes() -> None:
    before = _prompt(("system", "Be Brief."), ("user", "First."), ("assistant", "Yes."), ("user", "Then."))
    after = perturb_prompt(before, "punct", 0)
    assert after == _prompt(("system", "Be Brief."), ("user", "First."), ("assistant", "Yes."), ("user", "Then"))


def test_a_prompt_without_user_message_is_not_perturbed() -> None:
    assert perturb_prompt(_prompt(("system", "Be Brief.")), "punct", 0) is None


def test_differences_name_the_words_and_stop_after_three() -> None:
    before, after = _prompt(("user", "One Two Three Four five")), _prompt(("user", "one two three four five"))
    assert differences(before, after) == "One → one, Two → two, Three → three, …"
    assert differences(_prompt(("user", "Why me?")), _prompt(("user", "Why me"))) == "me? → me"


def test_differences_of_a_text_without_spaces_stay_short() -> None:
    before = "".join(chr(0x4E00 + i) for i in range(400))
    after = before[:200] + before[201] + before[200] + before[202:]
    shown = differences(_prompt(("user", before)), _prompt(("user", after)))
    assert len(shown) < 80
    assert before[200] + before[201] in shown
    assert before[201] + before[200] in shown


def _takes_an(word: str) -> bool:
    return word[0] in "aeiou" and not re.match(r"u[st][eiu]", word)  # useful, usual, utilise


def test_a_synonym_keeps_the_article_before_it_right() -> None:
    verbs = {"explain", "explains"}
    pairs = [pair for pair in synonyms().items() if pair[0] not in verbs]
    assert [(word, other) for word, other in pairs if _takes_an(word) != _takes_an(other)] == []


def test_every_perturbation_applies_to_most_of_the_packages_own_prompts() -> None:
    prompts = load_prompts()
    for name in PERTURBATIONS:
        reached = sum(perturb_prompt(prompt, name, 42 + i) is not None for i, prompt in enumerate(prompts))
        assert reached >= 0.6 * len(prompts), name
