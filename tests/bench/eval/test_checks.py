"""Checks of serving: each planted fault is named, and the right server passes whatever it can do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fidelab.bench.eval import SERVING, Evaluated, faults_of, open_of
from fidelab.bench.eval.asker import Failure, Outcome
from fidelab.bench.eval.chat import Ask, ChatAnswer, Position, Usage
from fidelab.bench.eval.checks import (
    CHECKS,
    Singles,
    context,
    length,
    logprobs,
    loops,
    parallel,
    pictures,
    repeat,
    singles,
    stop,
    streaming,
    template,
    turns,
    usage,
)
from fidelab.engines.openai.http import Client
from fidelab.inputs.questions.question import KINDS
from tests.bench.eval.asking import Scripted, chat_server, check_of, evaluated, wrong
from tests.bench.eval.chat_server import FAULTS, serving

NAMED = {
    "template": "template",
    "looping": "loops",
    "ignored-stop": "stop",
    "mixed-parallel": "parallel",
    "dropped-images": "pictures",
    "usage": "usage",
    "tool-arguments": "tools",
    "context-4k": "context",
    "lossy-stream": "streaming",
    "forgets-turns": "turns",
    "not-greedy": "repeat",
    "other-logprobs": "logprobs",
}
SHOWN_BY = {"tool-arguments": "tools", "context-4k": "retrieval", "dropped-images": "images"}  # questions
MORE = {"dropped-images": {"images"}}  # kinds that the fault makes wrong, too
SPREADS = ("mixed-parallel", "template")  # to other checks
HALF = {
    "dropped-images": "one picture of two is seen, so that answers depend on it, and half of the questions are right",
    "forgets-turns": "one answer of two names the number of the first turn: a small model would not do better",
    "tool-arguments": "half of the calls are right",
}


ONCE = "looping"  # a single answer is long enough to loop


def names(found: Evaluated) -> set[str]:
    """Checks and kinds that an evaluation's faults begin with."""
    return {fault.partition(":")[0] for fault in faults_of(found)}


def struck(fault: str, **about: Any) -> Evaluated:
    return evaluated(SERVING, *([SHOWN_BY[fault]] if fault in SHOWN_BY else []), fault=fault, **about)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_named_and_no_other(fault: str) -> None:
    found = names(struck(fault))
    assert NAMED[fault] in found
    if fault not in SPREADS:
        assert found == {NAMED[fault], *MORE.get(fault, ())}


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in (*HALF, ONCE)])
def test_a_fault_of_every_second_request_is_named(fault: str) -> None:
    assert NAMED[fault] in names(struck(fault, every=2))


@pytest.mark.parametrize("fault", HALF)
def test_a_fault_that_leaves_half_of_the_answers_right_is_not_shown(fault: str) -> None:
    found = struck(fault, every=2)
    assert names(found) == set()
    assert wrong(found) or check_of(found, "turns").right < 3


def passing(*kinds: str, **about: Any) -> Evaluated:
    """The evaluation of a server on which nothing fails, and all is asked or not tested; without kinds, a whole run."""
    found = evaluated(*kinds, **about)
    assert list(faults_of(found)) == list(open_of(found)) == []
    assert wrong(found) == []
    assert {check.name for check in found.checks} == {*CHECKS}
    return found


def not_tested(found: Evaluated) -> dict[str, int]:
    """Untested checks with 1, and kinds with the number of untested questions."""
    checks = {check.name: 1 for check in found.checks if check.state == "not tested"}
    kinds = {kind: sum(one.state == "not tested" for one in found.of(kind)) for kind in KINDS}
    return checks | {kind: n for kind, n in kinds.items() if n}


def test_the_right_server_passes_everything_in_a_whole_run() -> None:
    found = passing()
    assert not_tested(found) == {}
    assert {one.state for one in found.questions} == {"right"}
    assert {one.question.kind for one in found.questions} == {*KINDS}
    assert found.notes == []
    assert found.tokens > 1000


PLAIN = {"pictures": 1, "images": 8, "tools": 6}
LESS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {  # the server, and what is not tested on it
    "no end token": ({"counts_end": False}, {}),
    "no tokenizer": ({"tokenizes": False}, {}),
    "no log-probabilities": ({"scores": False}, {"logprobs": 1}),
    "no images": ({"takes_images": False}, {"pictures": 1, "images": 8}),
    "no tools": ({"takes_tools": False}, {"tools": 6}),
    "4,096 tokens": ({"max_model_len": 4096}, {"retrieval": 6}),
    "no template": ({"chat": "no-template"}, PLAIN),
    "no chat": ({"chat": "missing"}, PLAIN),
    "reasoning": ({"reasoning": "reasoning"}, {}),
    "reasoning_content": ({"reasoning": "content"}, {}),
    "think": ({"reasoning": "think"}, {}),
}


@pytest.mark.parametrize("name", LESS)
def test_the_serving_checks_pass_on_a_server_that_is_right_in_another_way(name: str) -> None:
    about, untested = LESS[name]
    found = passing(SERVING, "tools", "images", **about)
    left = not_tested(found)
    assert left.pop("context") == 1  # no long text was asked
    assert left == {part: n for part, n in untested.items() if part != "retrieval"}


@pytest.mark.full
@pytest.mark.parametrize("name", LESS)
def test_a_whole_run_passes_on_a_server_that_is_right_in_another_way(name: str) -> None:
    about, untested = LESS[name]
    assert not_tested(passing(**about)) == untested


@pytest.mark.parametrize("reasoning", ["reasoning", "content", "think"])
def test_the_place_of_the_reasoning_is_remarked(reasoning: str) -> None:
    found = evaluated("arithmetic", reasoning=reasoning)
    assert {one.state for one in found.questions} == {"right"}
    [remark] = found.notes
    assert ("in the text" in remark) is (reasoning == "think")


def test_lengths_beyond_the_servers_limit_say_so() -> None:
    found = evaluated("retrieval", max_model_len=4096)
    states = [(one.question.context, one.state) for one in found.questions]
    assert {n for n, state in states if state == "right"} == {1024, 2048, 4096}
    assert {n for n, state in states if state == "not tested"} == {8192, 16384, 32768}
    assert all("maximum context length" in one.fault for one in found.questions if one.state == "not tested")


# ------------------------------------------------------------------------------------- answers made by hand

TEXTS = tuple(f"{word} of the north are known to many who travel in autumn and in spring" for word in "ABCDEFGH")
ASK = Ask(({"role": "user", "content": "Why?"},), 32, exact=True)


def say(text: str, **more: Any) -> ChatAnswer:
    return ChatAnswer(text, **{"finish": "length", **more})


def base(first: Sequence[str] = TEXTS, second: Sequence[str] | None = None) -> Singles:
    asks = tuple(replace(ASK, messages=({"role": "user", "content": f"About {n}"},)) for n in range(len(first)))
    return Singles(asks, tuple(map(say, first)), tuple(map(say, second or first)))


def late(text: str) -> str:
    """The same beginning, and another end."""
    return text[:40] + "…"


def early(text: str) -> str:
    """Another text from its third character on."""
    return text[:2] + text[:1:-1]


def test_a_single_answer_that_parts_late_still_repeats() -> None:
    assert repeat(base(TEXTS, [late(TEXTS[0]), *TEXTS[1:]])).state == "passed"


@pytest.mark.parametrize(
    "second",
    [[early(TEXTS[0]), early(TEXTS[1]), *TEXTS[2:]], [late(text) for text in TEXTS]],
    ids=["two part early", "all part late"],
)
def test_answers_that_vary_more_than_by_rounding_do_not_repeat(second: list[str]) -> None:
    found = repeat(base(TEXTS, second))
    assert found.state == "failed"
    assert found.right == sum(a == b for a, b in zip(TEXTS, second, strict=True))


def test_parallel_answers_that_part_late_are_rounding() -> None:
    found = parallel(Scripted([say(late(text)) for text in TEXTS], parallel=4), base())
    assert (found.state, found.right, found.asked) == ("passed", 0, 8)


def test_parallel_answers_that_part_early_are_a_fault() -> None:
    changed = [say(early(text)) for text in TEXTS[:2]] + [say(text) for text in TEXTS[2:]]
    assert parallel(Scripted(changed, parallel=2), base()).state == "failed"


def test_the_answer_of_another_prompt_is_named_with_its_topic() -> None:
    apart = [f"{topic} " * 8 for topic in ("river", "bread", "bridge", "winter", "chess", "light", "bike", "honey")]
    swapped = [apart[1], apart[0], *apart[2:]]
    found = parallel(Scripted(list(map(say, swapped)), parallel=2), base(apart))
    assert found.state == "failed"
    assert "the request about rivers got the answer about bread" in found.detail


def test_one_request_at_a_time_leaves_parallel_untested() -> None:
    assert parallel(Scripted([], parallel=1), base()).state == "not tested"


def test_a_stream_that_lacks_a_piece_in_its_middle_is_a_fault() -> None:
    broken = [say(TEXTS[0][:20] + TEXTS[0][25:]), *map(say, TEXTS[1:4])]
    found = streaming(Scripted(broken), base())
    assert found.state == "failed"
    assert found.detail == f"a stream lacks “{TEXTS[0][20:25].strip()}”"


def test_a_stream_that_parts_late_by_rounding_is_not_a_fault() -> None:
    found = streaming(Scripted([say(late(text)) for text in TEXTS[:4]]), base())
    assert (found.state, found.right) == ("passed", 0)


def test_a_stream_that_begins_with_other_words_is_a_fault() -> None:
    assert streaming(Scripted([say(early(text)) for text in TEXTS[:4]]), base()).state == "failed"


def test_a_stream_without_a_finish_reason_is_a_fault() -> None:
    found = streaming(Scripted([say(TEXTS[0], finish=""), *map(say, TEXTS[1:4])]), base())
    assert found.state == "failed"
    assert "finish_reason" in found.detail


def test_streams_that_fail_are_a_fault() -> None:
    outcomes: list[Outcome] = [Failure("it broke off"), *map(say, TEXTS[1:4])]
    found = streaming(Scripted(outcomes), base())
    assert (found.state, found.detail) == ("failed", "1 of 4 streams failed: it broke off")


def test_a_stop_sequence_is_searched_in_the_answer() -> None:
    begun = [say(text[:10].replace("e", "")) for text in TEXTS]
    assert stop(Scripted(begun), base()).state == "passed"
    found = stop(Scripted(list(map(say, TEXTS))), base())
    assert found.state == "failed"
    assert "goes on after the stop sequence" in found.detail


@pytest.mark.parametrize(
    ("answer", "state", "said"),
    [
        (say("A of the"), "passed", "end there"),
        (say(TEXTS[0]), "failed", "8 tokens were requested"),
        (say("A of the", finish="stop"), "failed", "finish_reason 'stop', not 'length'"),
        (say("A of the", finish=""), "failed", "no finish_reason"),
    ],
)
def test_an_answer_has_to_end_at_max_tokens_and_say_so(answer: ChatAnswer, state: str, said: str) -> None:
    found = length(Scripted([answer] * 2), base())
    assert found.state == state
    assert said in found.detail


def test_answers_that_end_by_themselves_leave_the_length_untested() -> None:
    ended = replace(base(), first=tuple(say(text[:40], finish="stop") for text in TEXTS))
    assert length(Scripted([]), ended).state == "not tested"


def test_turns_fail_only_where_all_answers_are_the_same() -> None:
    assert turns(Scripted([say("I do not know.")] * 3)).state == "failed"
    assert turns(Scripted([say("4817"), say("2953"), say("I do not know.")])).right == 2
    unlike = turns(Scripted([say("Four."), say("Two."), say("Seven.")]))
    assert (unlike.state, unlike.right) == ("passed", 0)


def test_a_refrain_in_the_middle_of_a_long_answer_is_not_a_loop() -> None:
    words = [f"word{n}" for n in range(200)]
    refrain = ["the", "sea", "sings"] * 60
    assert loops(Scripted([say(" ".join(words + refrain + words))])).state == "passed"
    found = loops(Scripted([say(" ".join(words + refrain))]))
    assert found.state == "failed"
    assert "from word 201 of 380" in found.detail


@pytest.mark.parametrize(("words", "state"), [(0, "not tested"), (63, "not tested"), (64, "passed")])
def test_an_answer_that_is_too_short_for_a_loop_tells_nothing_of_loops(words: int, state: str) -> None:
    assert loops(Scripted([say(" ".join(f"word{n}" for n in range(words)))])).state == state


# --------------------------------------------------------------------------------- log-probabilities and counts


def scored(text: str, *unlikely: int, top: float = 0.0) -> ChatAnswer:
    """An answer with a position per word; ``unlikely``: positions whose token is the second one."""
    found = []
    for n, word in enumerate(text.split()):
        own = -2.0 if n in unlikely else -0.1
        likely = ((b" other", -0.15),) if n in unlikely else ()
        found.append(Position(f" {word}".encode(), own + top, ((f" {word}".encode(), own + top), *likely)))
    return say(text, positions=tuple(found))


def judged(answer: ChatAnswer) -> tuple[str, str]:
    found = logprobs(Scripted([answer] * 2), base())
    return found.state, found.detail


def test_a_penalty_that_makes_some_tokens_unlikely_passes_with_a_remark() -> None:
    state, said = judged(scored(TEXTS[0], 5, 9))
    assert state == "passed"
    assert "4 are not the most likely ones: the server applies a penalty, or samples" in said
    assert judged(scored(TEXTS[0])) == ("passed", "30 tokens agree with the text")


def test_log_probabilities_of_a_sampler_are_a_fault() -> None:
    state, said = judged(scored(TEXTS[0], *range(0, 15, 2), 1))
    assert state == "failed"
    assert "9 of 15 tokens of a greedy answer are not the most likely ones" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"positions": scored(TEXTS[1].upper()).positions}, "they are of"),
        ({"positions": scored(TEXTS[0], top=0.3).positions}, "above 0"),
        (
            {"positions": tuple(replace(one, top=one.top * 2) for one in scored(TEXTS[0]).positions or ())},
            "add up to 1.81",  # 2 · exp(−0.1)
        ),
    ],
    ids=["of another text", "above 0", "sum above 1"],
)
def test_impossible_log_probabilities_are_a_fault(change: dict[str, Any], said: str) -> None:
    state, detail = judged(replace(scored(TEXTS[0]), **change))
    assert state == "failed"
    assert said in detail


def test_log_probabilities_that_are_refused_are_not_tested() -> None:
    assert logprobs(Scripted([Failure("no logprobs", 400)] * 2), base()).state == "not tested"


def counted(prompt: int, completion: int = 1, text: str = "yes", **more: Any) -> ChatAnswer:
    total = more.pop("total", prompt + completion)
    return say(text, **more, usage=Usage(prompt, completion, total))


GROWN = [counted(150), counted(290), counted(430)]


def count(*answered: tuple[Ask, ChatAnswer], grown: Sequence[ChatAnswer] = GROWN) -> tuple[str, str]:
    """State and detail of the check of usage after these answers."""
    asker = Scripted(grown)
    asker.chat.plain = True  # nothing is asked of a tokenizer
    asker.asked += answered
    found = usage(asker)
    return found.state, found.detail


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (counted(10, 32, total=43), "10 and 32 tokens add up to 43"),
        (counted(10, 30), "an answer cut at 32 tokens counts 30"),
        (counted(10, 40, finish="stop"), "an answer of at most 32 tokens counts 40"),
        (counted(10, 0, finish="stop"), "the answer “yes” counts no token"),
        (
            replace(scored(TEXTS[0]), finish="stop", usage=Usage(10, 19, 29)),
            "an answer of 15 tokens counts 19",
        ),
    ],
)
def test_each_fault_of_usage_is_said(answer: ChatAnswer, said: str) -> None:
    assert count((ASK, answer)) == ("failed", said)


def test_right_counts_pass_with_and_without_the_end_token() -> None:
    ended = [replace(scored(TEXTS[0]), finish="stop", usage=Usage(10, n, 10 + n)) for n in (14, 15, 16)]
    assert [count((ASK, one))[0] for one in ended] == ["passed"] * 3
    assert count((ASK, counted(10, 32)), (ASK, counted(10, 7, finish="stop")))[0] == "passed"


def test_one_prompt_has_one_count() -> None:
    assert count((ASK, counted(10, 32)), (ASK, counted(11, 32))) == ("failed", "one prompt counts 10 or 11 tokens")


@pytest.mark.parametrize("sizes", [(150, 290, 290), (150, 151, 152), (150, 290, 900)])
def test_a_text_twice_as_long_counts_twice_as_much(sizes: tuple[int, int, int]) -> None:
    state, said = count(grown=list(map(counted, sizes)))
    assert state == "failed"
    assert str(list(sizes)) in said


def test_a_prompt_that_the_servers_tokenizer_counts_otherwise_is_a_fault() -> None:
    with serving(chat_server()) as server:
        asker = Scripted(GROWN)
        asker.chat.client = Client(server.url, None, 5.0)
        asker.chat.model = server.models[0]
        found = usage(asker)
    assert found.state == "failed"
    assert re.fullmatch(r"a prompt counts 150 tokens, and /tokenize counts \d+", found.detail)


def test_several_faults_of_usage_are_counted() -> None:
    state, said = count((ASK, counted(10, 30)), (ASK, counted(10, 31)))
    assert (state, said) == ("failed", "an answer cut at 32 tokens counts 30 (2 such faults)")


def test_servers_without_counts_leave_usage_untested() -> None:
    assert count(grown=[say("yes")] * 3)[0] == "not tested"


# ----------------------------------------------------------------------------------------------- all answers


def test_a_prompt_that_counts_fewer_tokens_than_its_text_has_was_cut() -> None:
    sizes = [(4000, counted(1000)), (16000, counted(3900)), (64000, counted(4096))]
    found = context(sizes)
    assert found.state == "failed"
    assert found.detail == "a prompt of about 16,000 tokens counts 4,096: the server cuts it"
    assert context(sizes[:2]).state == "passed"


def test_one_length_says_nothing_about_the_context() -> None:
    assert context([(4000, counted(1000)), (4000, counted(1000))]).state == "not tested"
    assert context([(4000, say("yes")), (16000, say("yes"))]).state == "not tested"


@pytest.mark.parametrize("marker", ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "[/INST]", "</s>", "<｜User｜>"])
def test_one_marker_of_a_chat_template_is_a_fault(marker: str) -> None:
    found = template([*map(say, TEXTS), say(f"yes {marker}")])
    assert found.state == "failed"
    assert marker in found.detail


def test_markers_in_a_field_of_reasoning_are_not_in_the_answer() -> None:
    assert template([say("yes", apart="The user sent <|im_end|>, which ends a turn.")]).state == "passed"


def test_answers_that_continue_as_the_user_are_a_fault_if_there_are_several() -> None:
    going = say("It is 4.\n\nUser: And 3 plus 3?")
    assert template([*map(say, TEXTS), going]).state == "passed"
    found = template([*map(say, TEXTS), going, going])
    assert found.state == "failed"
    assert "2 of 10" in found.detail


def test_pictures_need_answers_of_their_own() -> None:
    assert pictures(Scripted([say("A house.")] * 4)).state == "failed"
    assert pictures(Scripted([say("Red."), *[say("A house.")] * 3])).state == "passed"
    assert pictures(Scripted([Failure("this is not a multimodal model", 400)])).state == "not tested"
    assert pictures(Scripted([]), blind="it takes none").detail == "it takes none"


@pytest.mark.parametrize("reason", ["refused", "over"])
def test_unanswered_checks_tell_a_refusal_from_the_end_of_the_time(reason: str) -> None:
    missed = reason == "over"
    failures = [Failure(reason, 0 if missed else 500, missed=missed)] * 16
    asker = Scripted(failures)
    found = [repeat(singles(asker)), turns(Scripted(failures)), loops(Scripted(failures))]
    found.append(parallel(Scripted(failures, parallel=2), base()))
    assert {one.state for one in found} == {"not reached" if missed else "failed"}
    assert all(reason in one.detail for one in found)
