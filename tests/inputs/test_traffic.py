from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fidelab.core.errors import InputError
from fidelab.inputs.tokens import Tokenizer
from fidelab.inputs.traffic import arrivals, mixed_prompts, random_prompts, text_prompts
from fidelab.models import Model, resolve
from fidelab.models.tiny import make_tiny


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A real tokenizer with a template, in whose vocabulary no word is: bytes and pairs of letters."""
    folder = make_tiny(tmp_path_factory.mktemp("tiny") / "tiny")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}:")
    return Tokenizer.load(resolve(str(folder)))


def _chat(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.chat([{"role": "user", "content": text}]))


@given(st.integers(2, 300), st.integers(1, 40), st.integers(0, 40), st.integers(0, 2**32))
def test_random_prompts_are_exact_ordinary_and_differ_from_the_first_token_on(
    vocab: int, length: int, count: int, seed: int
) -> None:
    special = {0, vocab // 2}
    usable = vocab - len(special)
    if usable < 1 or count > (usable if length == 1 else usable**2):
        with pytest.raises(InputError, match="cannot be made"):
            random_prompts(vocab, special, length, count, seed)
        return
    found = random_prompts(vocab, special, length, count, seed)
    assert [len(prompt) for prompt in found] == [length] * count
    assert all(0 <= token < vocab and token not in special for prompt in found for token in prompt)
    heads = {prompt[: 1 if count <= usable else 2] for prompt in found}
    assert len(heads) == count


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others() -> None:
    assert random_prompts(1000, (), 32, 8, 7) == random_prompts(1000, (), 32, 8, 7)
    assert random_prompts(1000, (), 32, 8, 7) != random_prompts(1000, (), 32, 8, 8)


def test_random_ids_are_uniform_over_the_vocabulary() -> None:
    ids = np.concatenate([prompt[1:] for prompt in random_prompts(50, {3}, 2001, 10, 1)])
    counts = np.bincount(ids, minlength=50)
    assert counts[3] == 0
    assert stats.chisquare(np.delete(counts, 3)).pvalue > 1e-4


def test_prompts_of_several_lengths_keep_their_order() -> None:
    assert [len(prompt) for prompt in mixed_prompts(100, (), [3, 1, 9], 0)] == [3, 1, 9]


@pytest.mark.parametrize("length", [24, 40, 257])
@pytest.mark.parametrize("chat", [False, True])
def test_texts_have_the_exact_length_even_where_no_word_is_one_token(
    bytes_tokenizer: Tokenizer, length: int, chat: bool
) -> None:
    texts = text_prompts(bytes_tokenizer, [length] * 5, 1, chat=chat)
    counts = [_chat(bytes_tokenizer, text) if chat else len(bytes_tokenizer.encode(text)) for text in texts]
    assert counts == [length] * 5
    assert len({bytes_tokenizer.encode(text)[0] for text in texts}) == 5


@pytest.mark.model
@pytest.mark.parametrize("chat", [False, True])
def test_texts_of_a_real_model_have_the_exact_length_with_its_template(smollm2: Model, chat: bool) -> None:
    tokenizer = Tokenizer.load(smollm2)
    lengths = [64, 100, 1024]
    texts = text_prompts(tokenizer, lengths, 3, chat=chat)
    counts = [_chat(tokenizer, text) if chat else len(tokenizer.encode(text)) for text in texts]
    assert counts == lengths


def test_a_length_below_the_template_is_refused_in_one_line(bytes_tokenizer: Tokenizer) -> None:
    least = _chat(bytes_tokenizer, "a")
    assert least > 1  # it has a template
    with pytest.raises(InputError, match=f"the chat template alone takes {least} tokens"):
        text_prompts(bytes_tokenizer, [least - 1], 0, chat=True)


def test_constant_arrivals_come_at_equal_gaps_from_zero() -> None:
    assert arrivals("constant", 4, 5, 0) == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])


def test_poisson_gaps_are_exponential_with_the_asked_mean() -> None:
    due = arrivals("poisson", 20, 20_001, 5)
    gaps = np.diff(due)
    assert due[0] == 0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)
    assert stats.kstest(gaps, stats.expon(scale=1 / 20).cdf).pvalue > 1e-3
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03  # no memory


def test_arrivals_repeat_with_their_seed() -> None:
    assert (arrivals("poisson", 3, 9, 1) == arrivals("poisson", 3, 9, 1)).all()
    assert (arrivals("poisson", 3, 9, 1) != arrivals("poisson", 3, 9, 2)).any()
