"""The tokenizer facade: ids without additions, offsets, chat templates, what ends a turn."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fidelab.core import Vocabulary, digest
from fidelab.core.errors import InputError
from fidelab.inputs import tokens
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import Model, resolve
from tests.conftest import MakeFolder

SPECIAL = ["<s>", "</s>", "<end>"]
CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:"
    "{% if enable_thinking is undefined or enable_thinking %} THINK{% endif %}{% endif %}"
)
QUESTION = [{"role": "user", "content": "hi"}]

MakeTokenizer = Callable[..., Tokenizer]


@pytest.fixture
def make(tmp_path: Path, make_folder: MakeFolder) -> MakeTokenizer:
    """A byte-level tokenizer with three special tokens in front; ``bos`` adds ``<s>`` to every text."""

    def build(bos: bool = False, template: str | None = None, generation: dict[str, Any] | None = None) -> Tokenizer:
        from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
        from tokenizers import Tokenizer as Backend
        from transformers import PreTrainedTokenizerFast

        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Backend(models.BPE({piece: i for i, piece in enumerate([*SPECIAL, *letters])}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(piece, special=True) for piece in SPECIAL])
        if bos:
            backend.post_processor = processors.TemplateProcessing(
                single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
            )
        folder = make_folder(tmp_path / f"m{bos}")
        fast_class: Any = PreTrainedTokenizerFast
        fast = fast_class(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
        fast.chat_template = template
        fast.save_pretrained(folder)
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        return Tokenizer.load(resolve(str(folder)))

    return build


@pytest.fixture
def fake() -> Tokenizer:
    return Tokenizer.load(resolve("fake"))


def test_ids_carry_no_bos_offsets_are_character_starts_and_special_tokens_stay_whole(make: MakeTokenizer) -> None:
    tokenizer = make(bos=True)
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"
    assert len(tokenizer.encode("ab")) == 2
    ids, starts = tokenizer.encode_with_offsets("aé b")
    assert (len(ids), starts) == (5, (0, 1, 1, 2, 3))
    assert tokenizer.encode("a<end>")[1:] == (2,)


def test_pieces_are_the_strings_by_id_and_the_vocabulary_their_hash(make: MakeTokenizer) -> None:
    tokenizer = make()
    pieces = tokenizer.pieces()
    assert (len(pieces), pieces[:3]) == (259, SPECIAL)
    assert [pieces[i] for i in tokenizer.encode("a b")] == ["a", "Ġ", "b"]
    assert tokenizer.vocabulary() == Vocabulary(259, digest(*pieces))


@pytest.mark.parametrize(("bos", "expected"), [(True, 0), (False, None)])
def test_bos_is_known_only_where_the_tokenizer_adds_it(bos: bool, expected: int | None, make: MakeTokenizer) -> None:
    assert make(bos=bos).bos_id == expected


def test_template_is_the_models_own_with_thinking_off_and_raw_where_there_is_none_or_it_is_asked_for(
    make: MakeTokenizer,
) -> None:
    tokenizer = make(bos=True, template=CHATML)
    assert tokenizer.template == "chat"
    assert tokenizer.decode(tokenizer.chat(QUESTION)) == "<s>user: hi<end>\n<s>assistant:"
    assert tokenizer.decode(tokenizer.chat(QUESTION, template="raw")) == "<s>hi"
    bare = make()
    assert bare.template == "raw"
    assert bare.decode(bare.chat([*QUESTION, *QUESTION])) == "hi\n\nhi"


def test_prompt_that_the_template_refuses_is_one_line(make: MakeTokenizer) -> None:
    tokenizer = make(template="{{ raise_exception('no system\nrole') }}")
    with pytest.raises(InputError, match=r"refuses the prompt: no system$"):
        tokenizer.chat(QUESTION)


@pytest.mark.parametrize(
    ("template", "generation", "expected"),
    [
        (None, None, (1,)),
        (CHATML, None, (1, 2)),
        (None, {"eos_token_id": 7}, (1, 7)),
        (CHATML, {"eos_token_id": [1, 9]}, (1, 2, 9)),
        ("{{ raise_exception('only tools') }}", None, (1,)),
        ("{% for m in messages %}{{ m['content'] }} {% endfor %}", None, (1,)),
    ],
)
def test_stop_ids_come_from_tokenizer_template_and_generation_config(
    template: str | None, generation: dict[str, Any] | None, expected: tuple[int, ...], make: MakeTokenizer
) -> None:
    assert make(template=template, generation=generation).stop_ids == expected


def test_folder_without_tokenizer_is_one_line(tmp_path: Path, make_folder: MakeFolder) -> None:
    with pytest.raises(InputError, match="no tokenizer that can be loaded") as caught:
        Tokenizer.load(resolve(str(make_folder(tmp_path / "m"))))
    assert "\n" not in str(caught.value)


def test_tokenizer_code_in_a_folder_is_never_run(tmp_path: Path, make_folder: MakeFolder) -> None:
    folder = make_folder(tmp_path / "m", model_type="unheard_of")
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(InputError, match="no tokenizer that can be loaded"):
        Tokenizer.load(resolve(str(folder)))
    assert not (tmp_path / "ran").exists()


def test_fake_tokenizer_is_bytes(fake: Tokenizer) -> None:
    assert fake.encode("aé") == (97, 0xC3, 0xA9)
    assert fake.encode_with_offsets("aé b") == ((97, 0xC3, 0xA9, 32, 98), (0, 1, 1, 2, 3))
    assert fake.decode(fake.encode("aé")) == "aé"
    assert (fake.bos_id, fake.stop_ids, fake.template) == (None, (0,), "raw")
    assert fake.vocabulary().size == len(set(fake.pieces())) == 256


@pytest.mark.model
def test_embedded_model_stops_at_the_end_of_its_turn(smollm2: Model) -> None:
    tokenizer = Tokenizer.load(smollm2)
    assert [tokenizer.pieces()[i] for i in tokenizer.stop_ids] == ["<|im_end|>"]
    assert tokenizer.bos_id is None
    assert len(tokenizer.pieces()) == smollm2.vocab_size


@pytest.mark.model
def test_embedded_model_chats_with_its_own_system_prompt(smollm2: Model) -> None:
    tokenizer = Tokenizer.load(smollm2)
    text = tokenizer.decode(tokenizer.chat(QUESTION))
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def again(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer as another process has it."""
    tokens._recent.clear()
    return Tokenizer.load(resolve(str(tokenizer.model.path)))


def refuse(model: Model) -> Any:
    raise AssertionError("the library was asked")


def test_what_was_asked_before_needs_no_tokenizer_library(make: MakeTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make(bos=True, template=CHATML, generation={"eos_token_id": [1, 2]})
    answers = [ask(first) for ask in ASKED]
    monkeypatch.setattr(tokens, "_HuggingFace", refuse)
    second = again(first)
    assert (second.bos_id, second.stop_ids, second.template, second.offsets) == (0, (1, 2), "chat", True)
    assert [ask(second) for ask in ASKED] == answers
    with pytest.raises(AssertionError, match="the library was asked"):
        second.encode("never asked before")


ASKED: tuple[Callable[[Tokenizer], Any], ...] = (
    lambda t: t.encode("a b é"),
    lambda t: t.encode_with_offsets("a b é"),
    lambda t: t.chat(QUESTION),
    lambda t: t.chat(QUESTION, "raw"),
    lambda t: t.decode((3, 4, 5)),
    lambda t: t.pieces(),
    lambda t: t.special_ids(),
    lambda t: t.vocabulary(),
)


def test_another_file_of_the_tokenizer_is_asked_anew(make: MakeTokenizer) -> None:
    tokenizer = make(template=CHATML)
    before = tokenizer.chat(QUESTION)
    template = tokenizer.model.path / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "model"))
    changed = again(tokenizer)
    assert changed.decode(changed.chat(QUESTION)) == changed.decode(before).replace("assistant", "model")


def test_a_template_that_shows_the_date_is_never_remembered(
    make: MakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make(template="{{ strftime_now('%H') }}" + CHATML)
    tokenizer.chat(QUESTION)
    monkeypatch.setattr(tokens, "_HuggingFace", refuse)
    with pytest.raises(AssertionError, match="the library was asked"):
        again(tokenizer).chat(QUESTION)


@pytest.mark.parametrize("damage", [b"no database", b""], ids=["other-content", "empty"])
def test_a_damaged_store_costs_nothing_but_time(damage: bytes, make: MakeTokenizer, cache: Path) -> None:
    tokenizer = make()
    ids = tokenizer.encode("text")
    (cache / "tokens.sqlite3").write_bytes(damage)
    assert again(tokenizer).encode("text") == ids
    assert (cache / "tokens.sqlite3").stat().st_size > len(damage)
    with sqlite3.connect(cache / "tokens.sqlite3") as database:
        database.execute("UPDATE answers SET answer = '[1, '")
    assert again(tokenizer).encode("text") == ids


def test_a_store_that_cannot_be_written_is_done_without(make: MakeTokenizer, cache: Path) -> None:
    (cache / "tokens.sqlite3").mkdir(parents=True)
    assert len(make().encode("text")) == 4


def test_a_store_beyond_its_size_forgets_the_older_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tokens._Store(tmp_path / "s")
    for number in range(10):
        store.write(bytes([number]), "x" * 1000)
    monkeypatch.setattr(tokens, "_MAX_CACHED_BYTES", 1)
    kept = tokens._Store(tmp_path / "s")
    assert [kept.read(bytes([number])) is not None for number in range(10)] == [False] * 6 + [True] * 4
