"""Checks of a server by its answers: whether they are those of the model, whatever the model knows.

Every check compares answers of the same model with each other, so that a small model passes, too.  See
docs/metrics/speed.md#serving-checks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fidelab.bench.eval.asker import Asker, Failure, Outcome
from fidelab.bench.eval.chat import Ask, ChatAnswer, Position
from fidelab.core.errors import EngineError
from fidelab.inputs.questions.pictures import data_url, picture
from fidelab.metrics.degeneration import WINDOW, loop_onset
from fidelab.metrics.intervals import wilson_interval

State = Literal["passed", "failed", "not tested", "not reached"]

CHECKS: Mapping[str, str] = {
    "repeat": "a greedy answer is the same when it is requested again",
    "parallel": "answers in parallel are those of single requests",
    "streaming": "streamed answers are those of whole ones",
    "stop": "a stop sequence ends the answer before it",
    "length": "an answer ends at max_tokens",
    "turns": "a second turn remembers the first",
    "loops": "1,000 tokens do not loop",
    "logprobs": "log-probabilities belong to the tokens of the text",
    "usage": "tokens are counted right",
    "template": "no answer has a marker of a chat template in it",
    "pictures": "answers depend on the picture",
    "context": "long prompts are read whole",
}
"""Serving checks, and the promise of each."""

_TOPICS = ("rivers", "bread", "bridges", "winter", "chess", "lighthouses", "bicycles", "honey")
_TOKENS = 32  # tokens of an answer about a topic: long enough to part where something is mixed up
_SHORT_TOKENS = 8
_STREAMED = 4  # answers that are also streamed
_SCORED = 2  # answers with log-probabilities
_LONG_TOKENS = 1000
_CODES = ("4817", "2953", "7306")
_COLORS = ("red", "blue", "green", "yellow")
_EARLY_CHARACTERS = 12  # rounding lets greedy answers part late; another seed or prompt, within the first words
_MIXED_CHARACTERS = 20  # more characters in common with another prompt's answer than with its own
_NOISY = 0.25  # share of answers that rounding may change, of 32 tokens each: more is sampling
_EPSILON = 0.02  # nats: tops are rounded by some servers
_CONTINUED = re.compile(r"\n\s*(?:#+ ?)?(?:User|Human|Assistant|Instruction|Question|Q)\s*:", re.IGNORECASE)
_MARKERS = re.compile(
    r"<\|(?:im_start|im_end|im_sep|eot_id|start_header_id|end_header_id|begin_of_text|end_of_text|endoftext|eom_id"
    r"|user|assistant|system|observation|end|start|message|channel|return|turn|START_OF_TURN_TOKEN"
    r"|END_OF_TURN_TOKEN)\|?>"
    r"|<(?:start|end)_of_turn>|<turn\|>|\[/?INST\]|\[/?SYSTEM_PROMPT\]|<</?SYS>>|<｜[^｜]{1,24}｜>|</?s>|<[be]os>"
    r"|\[e~\[|\]~b\]"
)
_ABOUT_PICTURES = re.compile(r"image|multi-?modal|vision|mmproj|media|content", re.IGNORECASE)
_GROWTH = (0.75, 1.33)  # tokens of the second half of a repeated text, over those of its first half
_CUT = 0.6  # tokens of a long prompt over those that a short one's rate promises, below which it was cut


@dataclass(frozen=True)
class CheckResult:
    """Result of one check: ``right`` of ``asked`` requests, and a sentence with what was seen."""

    name: str
    state: State
    detail: str
    asked: int = 0
    right: int = 0


@dataclass(frozen=True)
class Singles:
    """Answers to single requests, each asked twice: what other ways to ask are compared with."""

    asks: tuple[Ask, ...]
    first: tuple[Outcome, ...]
    second: tuple[Outcome, ...]

    def known(self, n: int) -> tuple[str, ...]:
        """Return the texts of one prompt; empty if it has none."""
        return tuple(one.written for one in (self.first[n], self.second[n]) if isinstance(one, ChatAnswer))

    @property
    def differing(self) -> int:
        """Prompts whose two answers differ."""
        return sum(len(set(self.known(n))) > 1 for n in range(len(self.asks)))

    @property
    def repeats(self) -> bool:
        """Whether answers may be compared at all."""
        return repeat(self).state == "passed"


def user(text: str, max_tokens: int, **more: object) -> Ask:
    """Return a request with one message, whose limit includes reasoning."""
    return replace(Ask(({"role": "user", "content": text},), max_tokens, exact=True), **more)  # type: ignore[arg-type]


def singles(asker: Asker) -> Singles:
    """Ask all topics one after another, and again once all were answered."""
    asks = tuple(user(f"Write three sentences about {topic}.", _TOKENS) for topic in _TOPICS)
    return Singles(asks, tuple(map(asker.one, asks)), tuple(map(asker.one, asks)))


# ---------------------------------------------------------------------------------------- comparing answers


def repeat(base: Singles) -> CheckResult:
    """Check that greedy answers repeat, but for rounding: prefix caches change the order of sums."""
    pairs = [known for n in range(len(base.asks)) if len(known := base.known(n)) == 2]
    if not pairs:
        return _unanswered("repeat", (*base.first, *base.second))
    differing = [pair for pair in pairs if pair[0] != pair[1]]
    early = [pair for pair in differing if _parts_early(*pair)]
    n, right = len(pairs), len(pairs) - len(differing)
    said = f"{right} of {n} answers are the same again"
    if wilson_interval(len(differing), n)[0] > _NOISY or len(early) >= max(2, n // 4):
        a, b = (early or differing)[0]
        return CheckResult("repeat", "failed", f"{said}; one began {_quoted(a)}, then {_quoted(b)}", n, right)
    return CheckResult("repeat", "passed", said, n, right)


def parallel(asker: Asker, base: Singles) -> CheckResult:
    """Check that answers in parallel are those of single requests, but for rounding in batches."""
    if asker.parallel < 2:
        return CheckResult("parallel", "not tested", "--parallel 1")
    outcomes = asker.many(base.asks)
    found = [(n, one.written) for n, one in enumerate(outcomes) if isinstance(one, ChatAnswer) and base.known(n)]
    failures = [one for one in outcomes if isinstance(one, Failure)]
    if not found or any(one.missed for one in failures):
        return _unanswered("parallel", outcomes)
    n = len(outcomes)
    right = sum(text in base.known(number) for number, text in found)
    if failures:
        why = f"{len(failures)} of {n} requests failed: {failures[0].reason}"
        return CheckResult("parallel", "failed", why, n, right)
    for number, text in found:
        if (other := _owner(base, number, text)) is not None:
            why = f"the request about {_TOPICS[number]} got the answer about {_TOPICS[other]}: {_quoted(text)}"
            return CheckResult("parallel", "failed", why, n, right)
    said = f"{right} of {n} answers are those of single requests, {base.differing} of {n} differ when asked alone again"
    early = [(m, text) for m, text in found if all(_parts_early(text, known) for known in base.known(m))]
    if base.repeats and len(early) >= max(2, n // 4):
        m, text = early[0]
        why = f"{said}; one begins {_quoted(text)}, alone {_quoted(base.known(m)[0])}"
        return CheckResult("parallel", "failed", why, n, right)
    return CheckResult("parallel", "passed", said, n, right)


def _owner(base: Singles, number: int, text: str) -> int | None:
    """The prompt whose own answer a text is rather than that of ``number``; ``None`` if there is none."""
    own = max(_shared(text, known) for known in base.known(number))
    for other in range(len(base.asks)):
        theirs = max((_shared(text, known) for known in base.known(other)), default=0)
        if other != number and theirs > own + _MIXED_CHARACTERS:
            return other
    return None


def streaming(asker: Asker, base: Singles) -> CheckResult:
    """Check that the pieces of streamed answers make up the whole ones."""
    asks = [replace(ask, stream=True) for ask in base.asks[:_STREAMED]]
    outcomes = [asker.one(ask) for ask in asks]
    found = [(n, one) for n, one in enumerate(outcomes) if isinstance(one, ChatAnswer) and base.known(n)]
    failures = [one for one in outcomes if isinstance(one, Failure)]
    if any(one.missed for one in failures) or not (found or failures):
        return _unanswered("streaming", outcomes)
    n, right = len(outcomes), sum(one.written in base.known(m) for m, one in found)
    if failures:
        why = f"{len(failures)} of {n} streams failed: {failures[0].reason}"
        return CheckResult("streaming", "failed", why, n, right)
    if open_ := [one for _, one in found if not one.finish]:
        why = f"{len(open_)} of {n} streams end without a finish_reason, after {_quoted(open_[0].written)}"
        return CheckResult("streaming", "failed", why, n, right)
    for m, one in found:
        lost = [text for known in base.known(m) if (text := _missing(one.written, known))]
        if one.written not in base.known(m) and lost:
            return CheckResult("streaming", "failed", f"a stream lacks {_quoted(lost[0])}", n, right)
    early = [one for m, one in found if all(_parts_early(one.written, known) for known in base.known(m))]
    said = f"{right} of {n} streamed answers are those of whole ones"
    if base.repeats and len(early) >= _STREAMED // 2:
        return CheckResult("streaming", "failed", f"{said}; one begins {_quoted(early[0].written)}", n, right)
    return CheckResult("streaming", "passed", said, n, right)


def _missing(short: str, whole: str) -> str:
    """The one piece by which a text is shorter than the whole; empty if it is not."""
    gap = len(whole) - len(short)
    start = _shared(short, whole)
    return whole[start : start + gap] if gap > 0 and whole[start + gap :] == short[start:] and short[start:] else ""


def stop(asker: Asker, base: Singles) -> CheckResult:
    """Check that answers end before a stop sequence: a word of a known answer, and the letter e of any other."""
    words = [(n, word) for n in range(len(base.asks)) if (word := _middle_word(base, n))]
    trials = [*(words[:1] if base.repeats else []), *((n, "e") for n, _ in words[1:3])]
    if not trials:
        return CheckResult("stop", "not tested", "no answer is long enough")
    right, asked, missed = 0, 0, []
    for n, word in trials:
        outcome = asker.one(replace(base.asks[n], stop=(word,)))
        if isinstance(outcome, Failure):
            missed.append(outcome)
            continue
        asked += 1
        if word in outcome.written:
            why = f"the answer goes on after the stop sequence {_quoted(word)}: {_quoted(outcome.written)}"
            return CheckResult("stop", "failed", why, asked, right)
        right += 1
    if not asked:
        return _unanswered("stop", missed)
    return CheckResult("stop", "passed", f"{right} of {asked} answers end before it", asked, right)


def _middle_word(base: Singles, n: int) -> str:
    """A word of at least four letters that first comes in the second quarter of an answer, or later."""
    for text in base.known(n)[:1]:
        for word in re.findall(r"[A-Za-z]{4,}", text):
            if text.index(word) >= len(text) // 4:
                return str(word)
    return ""


def length(asker: Asker, base: Singles) -> CheckResult:
    """Check that answers end at ``max_tokens``: a quarter of the tokens is a shorter text, with its reason."""
    cut = [n for n, one in enumerate(base.first) if isinstance(one, ChatAnswer) and one.finish == "length"]
    longer = [n for n, one in enumerate(base.first) if isinstance(one, ChatAnswer) and len(one.written) > _TOKENS * 2]
    chosen = (cut or longer)[:2]
    if not chosen:
        return CheckResult("length", "not tested", "no answer is long enough")
    outcomes = [asker.one(replace(base.asks[n], max_tokens=_SHORT_TOKENS)) for n in chosen]
    answered = [(n, one) for n, one in zip(chosen, outcomes, strict=True) if isinstance(one, ChatAnswer)]
    if not answered:
        return _unanswered("length", outcomes)
    for n, one in answered:
        whole = base.known(n)[0]
        if len(one.written) > 0.6 * len(whole):
            why = f"{_SHORT_TOKENS} tokens were requested, and the answer has {len(one.written)} characters"
            return CheckResult("length", "failed", why, len(answered))
        if one.finish != "length":
            said = f"finish_reason {one.finish!r}" if one.finish else "no finish_reason"
            return CheckResult("length", "failed", f"an answer that was cut has {said}, not 'length'", len(answered))
    said = f"{len(answered)} of {len(answered)} answers end there"
    return CheckResult("length", "passed", said, len(answered), len(answered))


def turns(asker: Asker) -> CheckResult:
    """Check that the first turn of a conversation reaches the model: answers depend on it."""
    outcomes = [asker.one(_second_turn(code)) for code in _CODES]
    answers = [one for one in outcomes if isinstance(one, ChatAnswer)]
    if len(answers) < len(_CODES):
        return _unanswered("turns", outcomes)
    right = sum(code in one.text for code, one in zip(_CODES, answers, strict=True))
    n = len(_CODES)
    if not right and len({one.text for one in answers}) == 1:
        why = f"three different first turns get the same answer: {_quoted(answers[0].text)}"
        return CheckResult("turns", "failed", why, n)
    said = f"{right} of {n} answers name the number of the first turn"
    return CheckResult("turns", "passed", said if right else f"{said}; they depend on it", n, right)


def _second_turn(code: str) -> Ask:
    messages = (
        {"role": "user", "content": f"My locker number is {code}. Please remember it."},
        {"role": "assistant", "content": f"Your locker number is {code}."},
        {"role": "user", "content": "What is my locker number? Answer with the number only."},
    )
    return Ask(messages, 16)


def loops(asker: Asker) -> CheckResult:
    """Check that a long answer does not repeat itself to its end; see :func:`loop_onset`."""
    ask = user("Write a long story about a lighthouse keeper, in at least 900 words.", _LONG_TOKENS)
    outcome = asker.one(ask)
    if isinstance(outcome, Failure):
        return _unanswered("loops", [outcome])
    words = outcome.written.split()
    numbers: dict[str, int] = {}
    onset = loop_onset([numbers.setdefault(word, len(numbers)) for word in words])
    if onset is not None:
        why = f"from word {onset + 1} of {len(words)} on it repeats {_quoted(' '.join(words[onset:]))}"
        return CheckResult("loops", "failed", why, 1)
    if len(words) < WINDOW:  # no shorter loop counts
        return CheckResult("loops", "not tested", f"the answer has too few words to tell: {len(words)}", 1)
    return CheckResult("loops", "passed", f"an answer of {len(words)} words does not repeat itself", 1, 1)


# --------------------------------------------------------------------------------- log-probabilities and counts


def logprobs(asker: Asker, base: Singles) -> CheckResult:
    """Check that log-probabilities are those of the answer's tokens, and of the most likely ones."""
    outcomes = [asker.one(replace(ask, logprobs=True)) for ask in base.asks[:_SCORED]]
    answers = [one for one in outcomes if isinstance(one, ChatAnswer)]
    if not answers:
        return _unanswered("logprobs", outcomes, refusable=True)
    scored = [one for one in answers if one.positions]
    if not scored:
        return CheckResult("logprobs", "not tested", "the server gives none")
    for n, one in enumerate(scored):
        assert one.positions is not None
        if fault := _logprob_fault(one, one.positions):
            return CheckResult("logprobs", "failed", fault, len(scored), n)
    positions = [position for one in scored for position in one.positions or ()]
    said = f"{len(positions)} tokens agree with the text"
    if n := _unlikely(positions):
        said += f"; {n} are not the most likely ones: the server applies a penalty, or samples"
    return CheckResult("logprobs", "passed", said, len(scored), len(scored))


def _logprob_fault(answer: ChatAnswer, positions: Sequence[Position]) -> str:
    joined = b"".join(position.token for position in positions).decode("utf-8", "replace")
    if _letters(answer.whole) not in _letters(joined):
        return f"they are of {_quoted(joined)}, the text is {_quoted(answer.whole)}"
    for position in positions:
        token = position.token.decode("utf-8", "replace")
        if position.logprob > _EPSILON:
            return f"token {_quoted(token)} has a log-probability of {position.logprob:.3g}, above 0"
        mass = math.fsum(math.exp(min(value, 1.0)) for _, value in position.top)
        if mass > 1 + _EPSILON:
            return f"probabilities at {_quoted(token)} add up to {mass:.3g}"
    if (n := _unlikely(positions)) > len(positions) / 2:
        return f"{n} of {len(positions)} tokens of a greedy answer are not the most likely ones"
    return ""


def _unlikely(positions: Sequence[Position]) -> int:
    """Tokens that are not the most likely ones: a penalty of the server's, which log-probabilities do not show."""
    tops = [(one.logprob, max(value for _, value in one.top)) for one in positions if one.top]
    return sum(own < best - _EPSILON for own, best in tops)


def _letters(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "", text)


def usage(asker: Asker) -> CheckResult:
    """Check the counts of all answers so far, and that a text twice as long counts twice as many tokens."""
    text = "The harbour office lists every boat that came in before noon and left before the tide turned. " * 8
    grown = [asker.one(user(f"{text * n}Answer with yes.", 1)) for n in (1, 2, 3)]
    counted = [(ask, one) for ask, one in asker.asked if one.usage is not None]
    if not counted:
        return CheckResult("usage", "not tested", "the server counts no tokens")
    faults = [fault for ask, one in counted if (fault := _usage_fault(ask, one))]
    prompts: dict[str, set[int]] = {}
    for ask, one in counted:
        if one.usage is not None:
            prompts.setdefault(repr((ask.messages, ask.tools)), set()).add(one.usage.prompt)
    faults += [f"one prompt counts {_either(counts)} tokens" for counts in prompts.values() if len(counts) > 1]
    sizes = [one.usage.prompt for one in grown if isinstance(one, ChatAnswer) and one.usage]
    if len(sizes) == 3:
        first, second = sizes[1] - sizes[0], sizes[2] - sizes[1]
        low, high = _GROWTH
        words = len(text.split())
        if not (first > words / 2 and low * first <= second <= high * first and first < 4 * words):
            faults.append(f"prompts of {words}, {2 * words} and {3 * words} words count {sizes} tokens")
    if (told := _told_count(asker, grown)) is not None:
        faults.append(told)
    if faults:
        more = f" ({len(faults)} such faults)" if len(faults) > 1 else ""
        return CheckResult("usage", "failed", faults[0] + more, len(counted), max(0, len(counted) - len(faults)))
    return CheckResult("usage", "passed", f"the counts of {len(counted)} answers agree", len(counted), len(counted))


def _usage_fault(ask: Ask, answer: ChatAnswer) -> str:
    counted = answer.usage
    assert counted is not None
    if counted.total != counted.prompt + counted.completion:
        return f"{counted.prompt} and {counted.completion} tokens add up to {counted.total}"
    if ask.exact and answer.finish == "length" and counted.completion != ask.max_tokens:
        return f"an answer cut at {ask.max_tokens} tokens counts {counted.completion}"
    if ask.exact and counted.completion > ask.max_tokens:
        return f"an answer of at most {ask.max_tokens} tokens counts {counted.completion}"
    if answer.positions and not len(answer.positions) <= counted.completion + 1 <= len(answer.positions) + 2:
        return f"an answer of {len(answer.positions)} tokens counts {counted.completion}"
    if answer.written and not counted.completion:
        return f"the answer {_quoted(answer.written)} counts no token"
    return ""


def _told_count(asker: Asker, grown: Sequence[Outcome]) -> str | None:
    """A fault if the server's own tokenizer counts a prompt otherwise (vLLM's ``/tokenize``); else ``None``."""
    first = grown[0]
    if not isinstance(first, ChatAnswer) or first.usage is None or asker.chat.plain or asker.gone:
        return None
    ask = next(ask for ask, one in asker.asked if one is first)
    body = {"model": asker.chat.model, "messages": [dict(message) for message in ask.messages]}
    try:
        count = asker.chat.client.post("/tokenize", body, api=False, seconds=asker.timeout).get("count")
    except EngineError:
        return None
    if isinstance(count, int) and count != first.usage.prompt:
        return f"a prompt counts {first.usage.prompt} tokens, and /tokenize counts {count}"
    return None


# --------------------------------------------------------------------------------------------- all answers


def template(answers: Iterable[ChatAnswer]) -> CheckResult:
    """Check that answers hold no markers of a chat template, and do not write the user's next turn."""
    texts = [one.whole for one in answers]
    if not texts:
        return CheckResult("template", "not reached", "no answer")
    marked = [(match[0], text) for text in texts if (match := _MARKERS.search(text))]
    if marked:
        marker, text = marked[0]
        why = f"{len(marked)} of {len(texts)} answers hold a marker such as {marker}: {_quoted(text)}"
        return CheckResult("template", "failed", why, len(texts), len(texts) - len(marked))
    going = [text for text in texts if _CONTINUED.search(text)]
    if len(going) > max(1, len(texts) // 10):
        why = f"{len(going)} of {len(texts)} answers write the user's next turn: {_quoted(going[0])}"
        return CheckResult("template", "failed", why, len(texts), len(texts) - len(going))
    return CheckResult("template", "passed", f"none in {len(texts)} answers", len(texts), len(texts))


def pictures(asker: Asker, *, blind: str = "") -> CheckResult:
    """Check that answers depend on the picture; ``blind``: why the server cannot take any, if that is known."""
    if blind or asker.chat.plain:
        return CheckResult("pictures", "not tested", blind or "the server has no chat template")
    question = "The picture has one color. Which color is it? Answer with one word only."
    outcomes = []
    for color in _COLORS:
        parts = [
            {"type": "text", "text": question},
            {"type": "image_url", "image_url": {"url": data_url(picture({"color": color}))}},
        ]
        outcomes.append(asker.one(Ask(({"role": "user", "content": parts},), 8)))
        refused = outcomes[-1]
        if isinstance(refused, Failure) and not refused.missed and _ABOUT_PICTURES.search(refused.reason):
            return CheckResult("pictures", "not tested", f"the server takes no pictures ({refused.reason})")
    answers = [one for one in outcomes if isinstance(one, ChatAnswer)]
    if len(answers) < len(outcomes):
        return _unanswered("pictures", outcomes, refusable=True)
    n = len(answers)
    if len({one.text for one in answers}) == 1:
        why = f"four pictures of different colors get the same answer: {_quoted(answers[0].text)}"
        return CheckResult("pictures", "failed", why, n)
    return CheckResult("pictures", "passed", "pictures of different colors get different answers", n, n)


def context(asked: Iterable[tuple[int, ChatAnswer]]) -> CheckResult:
    """Check that long prompts count as many tokens as their text has; ``asked``: characters and answer of each."""
    sizes = sorted((n, one.usage.prompt) for n, one in asked if one.usage is not None and n and one.usage.prompt)
    if len({n for n, _ in sizes}) < 2:
        return CheckResult("context", "not tested", "fewer than two lengths have counts of tokens")
    shortest, tokens = sizes[0]
    rate = tokens / shortest
    cut = [(n, count) for n, count in sizes if count < _CUT * rate * n]
    if cut:
        n, count = cut[0]
        why = f"a prompt of about {rate * n:,.0f} tokens counts {count:,}: the server cuts it"
        return CheckResult("context", "failed", why, len(sizes), len(sizes) - len(cut))
    said = f"prompts up to {sizes[-1][1]:,} tokens count whole"
    return CheckResult("context", "passed", said, len(sizes), len(sizes))


# ------------------------------------------------------------------------------------------------ plumbing


def serving_checks(asker: Asker, begin: Callable[[str], None]) -> list[CheckResult]:
    """Run the checks whose requests are short, in order; ``begin`` gets the name of each."""
    begin("repeat")
    base = singles(asker)
    found = [repeat(base)]
    runs: tuple[tuple[str, Callable[[], CheckResult]], ...] = (
        ("parallel", lambda: parallel(asker, base)),
        ("streaming", lambda: streaming(asker, base)),
        ("stop", lambda: stop(asker, base)),
        ("length", lambda: length(asker, base)),
        ("turns", lambda: turns(asker)),
        ("logprobs", lambda: logprobs(asker, base)),
        ("usage", lambda: usage(asker)),
    )
    for name, run in runs:
        begin(name)
        found.append(run())
    return found


def _unanswered(name: str, outcomes: Sequence[Outcome], *, refusable: bool = False) -> CheckResult:
    """A check without enough answers: not reached, or failed by a refusal that no server should make."""
    failures = [one for one in outcomes if isinstance(one, Failure)]
    missed = [one for one in failures if one.missed]
    if missed or not failures:
        return CheckResult(name, "not reached", missed[0].reason if missed else "no answer")
    return CheckResult(name, "not tested" if refusable else "failed", failures[0].reason, len(outcomes))


def _shared(a: str, b: str) -> int:
    """Characters that two texts have in common at their beginning."""
    return next((n for n, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))


def _parts_early(a: str, b: str) -> bool:
    """Whether two texts differ within their first words."""
    return a != b and _shared(a, b) < min(_EARLY_CHARACTERS, max(len(a), len(b)))


def _either(counts: Iterable[int]) -> str:
    return " or ".join(map(str, sorted(counts)))


def _quoted(text: str) -> str:
    line = " ".join(text.split())
    return f"“{line if len(line) <= 60 else line[:59] + '…'}”"
