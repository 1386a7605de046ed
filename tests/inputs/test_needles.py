"""Prompts with needles: exact length, the needle where it should be, word for word."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from itertools import permutations
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from fidelab.core.errors import InputError
from fidelab.inputs.haystack import Haystack, load_haystack, space_before
from fidelab.inputs.needles import CODES, FIXED_CODE, OTHERS, Needles, Style, build_prompt, draw_needles
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import Model, resolve
from tests.conftest import MakeFolder

WORDS = [
    "The rare paint color is what? Nobody in town knew. " * 3,
    "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ 0-9",
]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"


def _byte_level() -> Library:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator(
        WORDS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    return library


def _sentencepiece() -> Library:
    """Puts a space before every text, as Llama 2's does, and BOS."""
    library = Library(models.BPE(byte_fallback=True, unk_token="<unk>"))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    special = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    library.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=320, special_tokens=special))
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library


LIBRARIES: dict[str, Callable[[], Library]] = {"byte-level": _byte_level, "sentencepiece": _sentencepiece}


@pytest.fixture(params=["bytes", "byte-level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, make_folder: MakeFolder, tmp_path: Path) -> Tokenizer:
    if request.param == "bytes":
        return Tokenizer.load(resolve("fake"))
    folder = make_folder(tmp_path / "model")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=LIBRARIES[request.param](),
        bos_token="<s>" if request.param == "sentencepiece" else None,
        eos_token="<|end|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(str(folder))
    return Tokenizer.load(resolve(str(folder)))


@cache
def _plain() -> tuple[Tokenizer, Haystack]:
    tokenizer = Tokenizer.load(resolve("fake"))
    return tokenizer, load_haystack("default", tokenizer, 3000, 3)


@pytest.mark.parametrize("style", ["question", "cloze"])
def test_every_prompt_has_exactly_the_wanted_tokens_and_holds_the_needle_word_for_word(
    tokenizer: Tokenizer, style: Style
) -> None:
    for length in (700, 1023):
        haystack = load_haystack("default", tokenizer, length, 2)
        for trial, needles in enumerate(draw_needles(2, 1, 0, 7)):
            for position in (0.0, 0.1, 0.5, 0.9, 1.0):
                prompt = build_prompt(
                    tokenizer, haystack, needles, style=style, length=length, position=position, trial=trial, trials=2
                )
                code = needles.codes[0]
                line = f"The rare paint color is {code}." if style == "cloze" else f"{code} is the rare paint color."
                assert len(prompt.ids) == length
                assert tokenizer.decode(prompt.ids).count(line) == 1
                assert tokenizer.decode(prompt.ids[prompt.places[0] :]).lstrip().startswith(line)


def test_sentences_stand_one_space_apart_whatever_the_tokenizer_adds(tokenizer: Tokenizer) -> None:
    lead = space_before(tokenizer)
    assert (
        tokenizer.decode((*tokenizer.encode("The town."), *tokenizer.encode(f"{lead}The color.")))
        == "The town. The color."
    )


def test_a_cloze_ends_where_the_answer_begins_and_takes_no_template(tokenizer: Tokenizer) -> None:
    haystack = load_haystack("default", tokenizer, 600, 1)
    ids = build_prompt(tokenizer, haystack, Needles((FIXED_CODE,)), style="cloze", length=600, position=0.5).ids
    text = tokenizer.decode(ids)
    assert text.endswith("The rare paint color is")
    assert "<|user|>" not in text
    assert (ids[0] == tokenizer.bos_id) == (tokenizer.bos_id is not None)


def test_a_question_stands_in_the_models_own_template(tokenizer: Tokenizer) -> None:
    haystack = load_haystack("default", tokenizer, 600, 1)
    ids = build_prompt(tokenizer, haystack, Needles((FIXED_CODE,)), style="question", length=600, position=0.5).ids
    text = tokenizer.decode(ids)
    if tokenizer.template == "raw":
        assert text.endswith("\n\nQuestion: What is the rare paint color?\nAnswer:")
    else:
        assert text.count("<|user|>") == 1
        assert re.search(r"What is the rare paint color\?<\|end\|>\s*<\|assistant\|>\Z", text)


@pytest.mark.parametrize("position", [0.1, 0.5, 0.9])
def test_the_needle_lies_near_its_place_behind_a_sentence(position: float) -> None:
    tokenizer, haystack = _plain()
    prompt = build_prompt(tokenizer, haystack, Needles((FIXED_CODE,)), style="cloze", length=3000, position=position)
    assert prompt.places[0] / 3000 == pytest.approx(position, abs=0.08)
    assert re.search(r"[.?!…”\"']\Z|\n\n.*\Z", tokenizer.decode(prompt.ids[: prompt.places[0]]))


def test_distractors_tell_other_things_in_the_same_words() -> None:
    tokenizer, haystack = _plain()
    needles = draw_needles(1, 1, 5, 0)[0]
    prompt = build_prompt(tokenizer, haystack, needles, style="cloze", length=3000, position=0.5)
    text = tokenizer.decode(prompt.ids)
    told = re.findall(r"The (\w+ \w+) color is ([A-Z]+-\d-[A-Z]+)\.", text)
    assert sorted(told) == sorted([("rare paint", needles.codes[0]), *zip(needles.others, needles.wrong, strict=True)])
    assert len(prompt.ids) == 3000


def test_several_needles_are_spread_over_the_prompt() -> None:
    tokenizer, haystack = _plain()
    needles = draw_needles(1, 4, 0, 0)[0]
    prompt = build_prompt(tokenizer, haystack, needles, style="cloze", length=3000, position=0.1)
    assert [place / 3000 for place in prompt.places] == pytest.approx([0.1, 0.35, 0.6, 0.85], abs=0.09)
    text = tokenizer.decode(prompt.ids)
    assert [text[place:].split(".")[0].strip() for place in prompt.places] == [
        f"Among the rare paint colors is {code}" for code in needles.codes
    ]


def test_codes_differ_between_trials_and_follow_from_the_seed() -> None:
    drawn = draw_needles(50, 8, 36, 3)
    codes = [code for needles in drawn for code in (*needles.codes, *needles.wrong)]
    assert len(set(codes)) == len(codes) == 50 * 44
    assert drawn == draw_needles(50, 8, 36, 3)
    assert drawn != draw_needles(50, 8, 36, 4)
    assert "rare paint" not in OTHERS


def test_no_code_is_part_of_another() -> None:
    # Codes are name-digit-shade: one could hold another only by a name that ends, or a shade that begins, with another.
    names, shades = ({code.split("-")[part] for code in CODES} for part in (0, 2))
    assert not any(a.endswith(b) for a, b in permutations(names, 2))
    assert not any(a.startswith(b) for a, b in permutations(shades, 2))
    assert FIXED_CODE in CODES


def test_a_length_without_room_says_how_much_is_needed() -> None:
    tokenizer, haystack = _plain()
    with pytest.raises(InputError, match=r"length 100 leaves \d+ tokens .* at least \d+ tokens"):
        build_prompt(tokenizer, haystack, Needles((FIXED_CODE,)), style="cloze", length=100, position=0.5)


def test_a_haystack_that_holds_the_code_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("Somebody wrote apricot-7-blue on the wall. " * 60)
    tokenizer = Tokenizer.load(resolve("fake"))
    haystack = load_haystack(str(file), tokenizer, 1000, 1)
    with pytest.raises(InputError, match="holds the code APRICOT-7-BLUE"):
        build_prompt(tokenizer, haystack, Needles((FIXED_CODE,)), style="cloze", length=1000, position=0.5)


@pytest.mark.model
def test_the_embedded_models_prompts_are_exact(smollm2: Model) -> None:
    tokenizer = Tokenizer.load(smollm2)
    haystack = load_haystack("default", tokenizer, 4096, 3)
    styles: tuple[Style, ...] = ("question", "cloze")
    for style in styles:
        for trial, needles in enumerate(draw_needles(3, 2, 4, 0)):
            prompt = build_prompt(
                tokenizer, haystack, needles, style=style, length=4096, position=0.5, trial=trial, trials=3
            )
            assert len(prompt.ids) == 4096
            assert all(code in tokenizer.decode(prompt.ids) for code in (*needles.codes, *needles.wrong))
