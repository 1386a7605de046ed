"""Text from token ids is the tokenizer's own text, whatever notation its vocabulary has."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fidelab.captures.reader import Detokenizer

TEXT = 'He said: "été — 3 naïve cafés",\n\tthen 日本 and 🙂, 12.5% of it.  Two  spaces. ĠA Ā'
WORDS = ["the quick brown fox jumps over the lazy dog", "a b c 0 1 2 . , : and so on", TEXT]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|end|>", "<｜fin▁du｜>"])
    tokenizer.train_from_iterator(WORDS, trainer)
    return tokenizer


def sentencepiece() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(WORDS[:2], trainers.BpeTrainer(vocab_size=320, special_tokens=special))
    return tokenizer


def pieces(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.id_to_token(token) or "" for token in range(tokenizer.get_vocab_size())]


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_a_text_comes_back(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    ids = tokenizer.encode(TEXT).ids
    assert len(ids) > 20
    assert Detokenizer(pieces(tokenizer))(ids) == TEXT


def test_any_ids_read_as_the_tokenizer_reads_them() -> None:
    tokenizer = byte_level()
    read = Detokenizer(pieces(tokenizer))
    rng = np.random.default_rng(0)
    for ids in rng.integers(0, tokenizer.get_vocab_size(), (300, 5)).tolist():
        assert read(ids) == tokenizer.decode(ids, skip_special_tokens=False)


def test_special_tokens_are_taken_literally_and_half_a_character_or_an_unknown_id_is_not_an_error() -> None:
    tokenizer = byte_level()
    assert Detokenizer(pieces(tokenizer))([0, 1]) == "<|end|><｜fin▁du｜>"
    read = Detokenizer([f"<0x{byte:02X}>" for byte in range(256)])
    assert read([0x41, 0xC3, 0x42, 999]) == "A\ufffdB"
