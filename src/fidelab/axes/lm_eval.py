"""Tasks of EleutherAI's lm-evaluation-harness, answered by any arm. See docs/metrics.md#lm-eval.

The harness builds a task's requests, and its filters and metrics score the answers; in between, arms answer from
captures, as for every other axis.  Continuations whose log-likelihood is requested (multiple choice, ``loglikelihood``,
``loglikelihood_rolling``) are forced token by token; ``generate_until`` is a greedy continuation that is cut at the
task's stop strings afterwards.  Prompts are tokenized as the harness' own ``hf`` model does.

The harness (extra ``lm-eval``) is imported only when the axis is used.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from fidelab.axes.base import (
    OVER_CONTROL,
    Axis,
    AxisInputs,
    AxisScore,
    AxisSettings,
    accuracy_falls,
    lost_and_gained,
    part_name,
    select_groups,
    written_text,
)
from fidelab.axes.rows import CHUNK, item_rows, logits, not_measurable, unmeasurable
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Forced, Generate, Request, Tokens
from fidelab.core import Estimator, canonical_json, digest
from fidelab.core.errors import CaptureError, InputError, UsageError
from fidelab.inputs.tokens import Template, Tokenizer
from fidelab.metrics.divergence import log_softmax
from fidelab.metrics.equivalence import flip_counts
from fidelab.metrics.intervals import PairedDifference, RatioItems, paired_difference, ratio_interval
from fidelab.results.measurement import Coordinates, Definition, Metric
from fidelab.results.numbers import counted
from fidelab.results.plots import Plot, TablePlot

_LIKELIHOOD, _ANSWERS = "loglikelihood", "generate"
_CONTEXT = 2048  # tokens, if the model's limit is unknown; the harness' default
_DEFAULT_ANSWER_TOKENS = 256  # tokens of an answer if the task has no limit; the harness' default
_PREFERRED_METRICS = ("acc", "exact_match")  # preferred metrics to judge a task by
_MAX_SHOWN_DOCUMENTS = 100  # changed documents that the report lists
_ROLLING = {"byte_perplexity": "byte", "bits_per_byte": "byte", "word_perplexity": "word"}

_VALUE = Definition("task_metric", "", None, "Mean of the harness' metric over the documents.")
_REFERENCE = Definition("reference_task_metric", "", None, "The same of the reference.")
_ACCURACY = Definition("accuracy", "share", "higher", "Share of the documents, of all tasks, that the arm gets right.")
_REFERENCE_ACCURACY = Definition("reference_accuracy", "share", None, "The same of the reference.")
_DIFFERENCE = Definition("difference", "points", "higher", "Accuracy minus the reference's, paired by document.")
_CHANGE = Definition("change", "", None, "The task's metric minus the reference's, paired by document.")
_NLL = Definition(
    "nll_change", "nats", "lower", "Negative log-likelihood per unit of text minus the reference's.", name="NLL change"
)
_P = Definition("mcnemar_p", "p", None, "McNemar's exact test of documents lost against gained.", name="McNemar p")
_LOST = Definition("lost", "count", None, "Documents that the reference alone gets right.")
_GAINED = Definition("gained", "count", None, "Documents that the arm alone gets right.")
_TRUNCATED = Definition(
    "shortened_prompts", "count", None, "Requests longer than the model's limit, cut at their start."
)

Floats = NDArray[np.float64]
Document = tuple[str, int]  # task, number of the document
Value = float | tuple[float, float]  # of a metric on a document; sum and count for a ratio


class LMEvalSettings(AxisSettings):
    """Tasks and prompt format; part of the comparability key except for ``batch``."""

    tasks: tuple[str, ...] = Field(default=(), description="names of the harness' tasks, groups or tags")
    include_path: str | None = Field(
        default=None, min_length=1, description="folder of custom task files (YAML); code next to them is run"
    )
    limit: int | None = Field(default=None, ge=1, description="first documents of each task only")
    shots: int | None = Field(default=None, ge=0, description="worked examples; as many as the task says by default")
    n_predict: int | None = Field(default=None, ge=1, description="tokens of an answer; what the task says by default")
    template: Template = Field(default="raw", description="the model's chat template, or plain text")
    batch: int = Field(default=16, ge=1, description="answers decoded together")

    @field_validator("include_path")
    @classmethod
    def _from_any_folder(cls, name: str | None) -> str | None:
        return None if name is None else str(Path(name).expanduser().absolute())


@dataclass(frozen=True)
class _Note:
    """Note of an item for scoring: the request of the harness that it belongs to.

    ``index``: of the request among those of its document.  ``content``: hash of the document.  ``n``: the task's limit
    of an answer in tokens; ``until``: its stop strings.  ``cut``: the prompt lost its start.
    """

    task: str
    document: int
    index: int
    content: str
    n: int = 0
    until: tuple[str, ...] = ()
    cut: bool = False

    @classmethod
    def read(cls, text: str) -> _Note:
        note = json.loads(text)
        return cls(**{**note, "until": tuple(note["until"])})


class LMEval(Axis):
    """Tasks of lm-evaluation-harness, scored by its own metrics and compared document by document.

    See docs/metrics.md#lm-eval.
    """

    name: ClassVar[str] = "lm-eval"
    title: ClassVar[str] = "lm-eval: are the harness' tasks still solved?"
    Settings: ClassVar[type[AxisSettings]] = LMEvalSettings
    excess: ClassVar[Definition] = replace(OVER_CONTROL, unit="points", better="higher")
    quick: ClassVar[Mapping[str, Any]] = {"limit": 20}
    settings: LMEvalSettings

    def requests(self, inputs: AxisInputs) -> Mapping[str, Request]:
        s = self.settings
        tasks = _tasks(s)
        asked = _Asked(inputs, s)
        for name, task in tasks.items():
            if task.OUTPUT_TYPE == "generate_until":
                asked.answers(name, task)
            else:
                asked.likelihoods(name, task)
        return asked.requests(self.name)

    def available(self, inputs: AxisInputs) -> int | None:
        return None

    def repeated(self, request: Request, share: float) -> Request | None:
        notes = map(_Note.read, request.notes)
        return select_groups(request, [(note.task, note.document) for note in notes], share)

    def figures(self, pair: Pair) -> Iterable[tuple[int, Mapping[str, NDArray[Any]]]] | None:
        request = pair.test.request
        if not isinstance(request, Forced) or _topk_refusal(pair):
            return None
        return (
            (t, dict(zip(_COLUMNS, _rows(pair.test, t, request.continuations[t]), strict=True))) for _, t in pair.items
        )

    def score_parts(self, pairs: Mapping[str, Pair], seed: int) -> AxisScore:
        if (nothing := not_measurable(pairs.values())) is not None:
            return nothing
        for pair in pairs.values():
            if (reason := _topk_refusal(pair)) and isinstance(pair.ref.request, Forced):
                return unmeasurable(reason)
        answers = [_Answers(), _Answers()]
        for pair in pairs.values():
            answers[0].read(pair, "ref")
            answers[1].read(pair, "test")
        whole = answers[0].documents() & answers[1].documents()
        asked = {document for pair in pairs.values() for document in _documents(pair)}
        tasks = _tasks(self.settings)
        ref, test = (_scored(tasks, side, sorted(whole), self.settings) for side in answers)
        score = _score(tasks, ref, test, sorted(asked), seed)
        cut = sum(_Note.read(note).cut for pair in pairs.values() for note in pair.ref.request.notes)
        identical = answers[0].values == answers[1].values and whole == asked
        return replace(score, identical=identical).with_measurement(
            metrics=(*score.found.metrics, _TRUNCATED(cut)),
            facts={
                "harness": _version(),
                "tasks": {
                    name: {"version": task.VERSION, "shots": task.config.num_fewshot or 0}
                    for name, task in tasks.items()
                },
                **({} if not (odd := _non_numeric_metrics(ref)) else {"left_out": odd}),
            },
        )


# ----------------------------------------------------------------------------------------------- the harness


_COLUMNS = ("nll", "greedy")
_NO_HARNESS = "axis lm-eval needs lm-evaluation-harness: pip install 'fidelab[lm-eval]'"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the harness' progress bars and remarks; its errors reach the user as one line."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)


def _version() -> str:
    from importlib.metadata import version

    return version("lm-eval")


@lru_cache(maxsize=4)
def _manager(include_path: str | None, defaults: bool) -> Any:
    """Index of tasks, with the harness' own tasks if ``defaults``, which takes seconds to build."""
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "lm_eval":
            raise
        raise UsageError(_NO_HARNESS) from None
    return TaskManager(include_path=include_path, include_defaults=defaults)


def _tasks(settings: LMEvalSettings) -> dict[str, Any]:
    """The tasks by name, groups and tags taken apart.

    Raises:
        UsageError: If the harness is not installed, or no task is named.
        InputError: If there is no such task, it cannot be loaded, or it is not supported here.
    """
    if not settings.tasks:
        raise UsageError("axis lm-eval: name tasks, as in --axes lm-eval:arc_easy, or set axes.lm-eval.tasks")
    if settings.include_path is not None and not Path(settings.include_path).is_dir():
        raise InputError(f"axes.lm-eval.include_path {settings.include_path} is not a folder")
    return _loaded(settings.tasks, settings.include_path, settings.shots)


@lru_cache(maxsize=4)
def _loaded(names: tuple[str, ...], include_path: str | None, shots: int | None) -> dict[str, Any]:
    with _quiet():
        manager = None if include_path is None else _manager(include_path, False)
        if manager is None or not set(names) <= set(manager.task_index):
            manager = _manager(include_path, True)
        if unknown := [name for name in names if name not in manager.task_index]:
            near = _nearest(unknown[0], manager.task_index)
            where = f" nor below {include_path}" if include_path else ""
            raise InputError(f"axis lm-eval: the harness{where} has no task {unknown[0]!r}{near}")
        try:
            tasks: dict[str, Any] = manager.load([*names])["tasks"]
        except Exception as error:  # loading a data set fails in many ways, mostly because of the network
            raise InputError(f"axis lm-eval: {', '.join(names)} cannot be loaded ({_line(error)})") from None
    for name, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False):
            raise InputError(f"axis lm-eval: task {name} runs programs that the model writes; that is not done here")
        if getattr(task, "MULTIMODAL", False):
            raise InputError(f"axis lm-eval: task {name} has images or sound, which are not put to arms here")
        if shots is not None:
            task.set_config(key="num_fewshot", value=shots)
        task.set_fewshot_seed(seed=1234)  # the harness' own default
    return tasks


def _nearest(name: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, list(known), 3)
    return f"; near are {', '.join(near)}" if near else ""


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


def _content(document: Any) -> str:
    return digest(json.dumps(document, sort_keys=True, default=str, ensure_ascii=False))[:16]


class _Asked:
    """Collects the requests for arms: the harness' requests as token ids, with a note for each."""

    def __init__(self, inputs: AxisInputs, settings: LMEvalSettings) -> None:
        self.settings, self.tokenizer = settings, inputs.tokenizer
        self.room = inputs.max_positions or _CONTEXT
        self.forced: list[tuple[Tokens, Tokens, _Note]] = []
        self.written: list[tuple[Tokens, _Note]] = []
        self.encoder = _encoder(inputs.tokenizer)

    def likelihoods(self, name: str, task: Any) -> None:
        """Forced continuations of one task; a text that is longer than the model's limit becomes several."""
        for instance, note in self._instances(name, task):
            if instance.request_type == "loglikelihood":
                prompt, continuation = self.encoder.pair(*instance.args)
                windows = [(prompt, continuation)]
            elif instance.request_type == "loglikelihood_rolling":
                windows = self.encoder.windows(instance.args[0], self.room)
            else:
                raise InputError(f"axis lm-eval: task {name} asks for {instance.request_type}, which is unknown here")
            for prompt, continuation in windows:
                if not continuation or len(continuation) > self.room:
                    raise InputError(
                        f"axis lm-eval: task {name}, document {note.document}: a continuation has {len(continuation)} "
                        f"tokens, and the model has {self.room} positions"
                    )
                # as the harness: the start of a text that does not fit is cut; the last token is never read
                kept = prompt[max(0, len(prompt) + len(continuation) - 1 - self.room) :] or prompt[-1:]
                self.forced.append((kept, continuation, replace(note, cut=len(kept) < len(prompt))))

    def answers(self, name: str, task: Any) -> None:
        """Greedy continuations of one task."""
        for instance, note in self._instances(name, task):
            context, options = instance.args[0], dict(instance.args[1])
            if options.get("do_sample") and float(options.get("temperature", 1.0) or 0.0) > 0:
                raise InputError(
                    f"axis lm-eval: task {name} draws its answers (do_sample); arms answer greedily here: copy the "
                    "task and set generation_kwargs.do_sample to false"
                )
            said = next(
                (options[key] for key in ("max_gen_toks", "max_new_tokens", "max_tokens") if options.get(key)),
                _DEFAULT_ANSWER_TOKENS,
            )
            n = self.settings.n_predict or int(said)
            if n >= self.room:
                raise InputError(
                    f"axis lm-eval: task {name} wants answers of {n} tokens, and the model has {self.room} positions: "
                    "set axes.lm-eval.n_predict"
                )
            until = options.get("until") or ()
            prompt = self.encoder.context(context)
            kept = prompt[max(0, len(prompt) + n - self.room) :]
            if not kept:
                raise InputError(f"axis lm-eval: task {name}, document {note.document}: the prompt has no tokens")
            stops = (until,) if isinstance(until, str) else tuple(until)
            self.written.append((kept, replace(note, n=n, until=stops, cut=len(kept) < len(prompt))))

    def _instances(self, name: str, task: Any) -> Iterator[tuple[Any, _Note]]:
        chat = self.settings.template == "chat" and self.tokenizer.template == "chat"

        def template(history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
            return self.tokenizer.render(history, generation=add_generation_prompt)

        instances = _built(name, task, self.settings.limit, template if chat else None)
        counts: Counter[int] = Counter()
        for instance in instances:
            index, counts[instance.doc_id] = counts[instance.doc_id], counts[instance.doc_id] + 1
            yield instance, _Note(name, instance.doc_id, index, _content(instance.doc))

    def requests(self, axis: str) -> dict[str, Request]:
        """Return the requests by part; only parts that have items."""
        s = self.settings
        used = s.template if self.tokenizer.template == "chat" else "raw"
        settings = (("limit", s.limit), ("shots", s.shots), ("tasks", ",".join(s.tasks)), ("template", used))
        found: dict[str, Request] = {}
        if self.forced:
            prompts, continuations, notes = zip(*self.forced, strict=True)
            found[_LIKELIHOOD] = Forced(
                axis=part_name(axis, _LIKELIHOOD),
                prompts=prompts,
                continuations=continuations,
                settings=settings,
                notes=tuple(canonical_json(vars(note)) for note in notes),
            )
        if self.written:
            prompts, written = zip(*self.written, strict=True)
            most = max(note.n for note in written)
            found[_ANSWERS] = Generate(
                axis=part_name(axis, _ANSWERS),
                prompts=prompts,
                max_tokens=most,
                stop=self.tokenizer.stop_ids,
                batch=s.batch,
                settings=(*settings, ("n_predict", most)),
                rows=False,
                notes=tuple(canonical_json(vars(note)) for note in written),
            )
        return found


def _built(name: str, task: Any, limit: int | None, template: Any) -> list[Any]:
    """Return the harness' requests of one task."""
    with _quiet():
        try:
            task.build_all_requests(
                limit=limit,
                rank=0,
                world_size=1,
                apply_chat_template=template is not None,
                chat_template=template,
                fewshot_as_multiturn=template is not None,
                tokenizer_name="fidelab",
            )
        except Exception as error:  # templates of the task, functions next to it
            raise InputError(f"axis lm-eval: task {name} cannot be built ({_line(error)})") from None
    return list(task.instances)


@dataclass(frozen=True)
class _Encoder:
    """Text → ids as the harness' ``hf`` model makes them: a BOS where the tokenizer puts one and the text has none."""

    tokenizer: Tokenizer
    prefix: int
    split: Any

    def context(self, text: str) -> Tokens:
        bos = self.tokenizer.bos_id
        if bos is None or text.startswith(self.tokenizer.decode([bos])):
            return self.tokenizer.encode(text)
        return (bos, *self.tokenizer.encode(text))

    def pair(self, context: str, continuation: str) -> tuple[Tokens, Tokens]:
        if context:
            first, second = self.split(context, continuation)
            return tuple(first), tuple(second)
        ids = self.tokenizer.encode(continuation)
        return (ids[:1], ids[1:]) if ids[:1] == (self.prefix,) else ((self.prefix,), ids)

    def windows(self, text: str, room: int) -> list[tuple[Tokens, Tokens]]:
        """Disjoint parts of a text, each after at least one token of context."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        ids = list(self.context(text))
        parts = get_rolling_token_windows(ids, prefix_token=self.prefix, max_seq_len=room, context_len=1)
        return [(tuple(a), tuple(b)) for a, b in map(make_disjoint_window, parts)]


def _encoder(tokenizer: Tokenizer) -> _Encoder:
    """Encoder of a model's tokenizer; the token before a text is BOS, else EOS."""
    try:
        from lm_eval.api.model import TemplateLM
    except ModuleNotFoundError:
        raise UsageError(_NO_HARNESS) from None
    library = tokenizer.library
    known = (getattr(library, name, None) for name in ("bos_token_id", "eos_token_id"))
    prefix = next((int(each) for each in known if each is not None), tokenizer.stop_ids[0] if tokenizer.stop_ids else 0)

    class Encoding(TemplateLM):  # type: ignore[misc]  # the harness has no types
        """The part of the interface that :meth:`TemplateLM._encode_pair` calls."""

        eot_token_id = prefix

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            return list(encoder.context(string))

        def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

        loglikelihood_rolling = generate_until = _loglikelihood_tokens

    encoder = _Encoder(tokenizer, prefix, Encoding()._encode_pair)
    return encoder


# ----------------------------------------------------------------------------------------------- answers


@dataclass
class _Answers:
    """Answers of one side, by task, document and request.

    A log-likelihood (nats) with whether every token was the most likely one, or a text; ``lacking``: documents of
    which a request failed.
    """

    values: dict[tuple[str, int, int], tuple[float, bool] | str] = field(default_factory=dict)
    contents: dict[Document, str] = field(default_factory=dict)
    lacking: set[Document] = field(default_factory=set)

    def read(self, pair: Pair, side: Literal["ref", "test"]) -> None:
        request = pair.test.request  # equal items share one index on the reference's side
        if len(request.notes) != len(request.items()):
            raise CaptureError(f"capture {pair.test.folder} holds no answers to tasks; capture again")
        for r, t in pair.items:
            note = _Note.read(request.notes[t])
            document, key = (note.task, note.document), (note.task, note.document, note.index)
            self.contents[document] = note.content
            capture, item = (pair.ref, r) if side == "ref" else (pair.test, t)
            value = _value(capture, item, pair, note, request, t)
            if value is None:
                self.lacking.add(document)
                continue
            before = self.values.get(key)
            if isinstance(before, tuple) and isinstance(value, tuple):  # windows of one text
                value = before[0] + value[0], before[1] and value[1]
            self.values[key] = value

    def documents(self) -> set[Document]:
        """Documents for which every request was answered."""
        return {(task, document) for task, document, _ in self.values} - self.lacking


def _value(
    capture: Capture, item: int, pair: Pair, note: _Note, request: Request, t: int
) -> tuple[float, bool] | str | None:
    """Return the answer to one item; ``None`` if the item failed."""
    if capture.items[item]["failed"] is not None:
        return None
    if isinstance(request, Generate):
        return _text(capture, item, note) if "ids" in capture.names(item) else None
    if not isinstance(request, Forced):
        raise CaptureError(f"capture {capture.folder} holds no answers to tasks; capture again")
    targets = request.continuations[t]
    if item_rows(capture, item) != len(targets):
        return None
    if columns := capture.figures(item, pair.ref):
        if columns.keys() != set(_COLUMNS):
            raise CaptureError(f"capture {capture.folder} holds other figures; delete it and capture again")
        nll, greedy = columns["nll"], columns["greedy"]
    else:
        nll, greedy = _rows(capture, item, targets)
    return (-float(nll.sum()), bool(greedy.all())) if np.isfinite(nll).all() else None


def _rows(capture: Capture, item: int, targets: Tokens) -> tuple[Floats, NDArray[np.bool_]]:
    """Negative log-likelihood (nats) of each target, and whether it is the most likely token; NaN without rows."""
    n = len(targets)
    nll, greedy = np.full(n, np.nan), np.zeros(n, dtype=bool)
    if item_rows(capture, item) != n:
        return nll, greedy
    wanted = np.asarray(targets, dtype=np.int64)
    for start in range(0, n, CHUNK):
        at = slice(start, min(start + CHUNK, n))
        scores = logits(capture, item, at.start, at.stop)
        places = np.arange(len(scores))
        nll[at] = -log_softmax(scores)[places, wanted[at]]
        greedy[at] = scores.argmax(-1) == wanted[at]
    return nll, greedy


def _text(capture: Capture, item: int, note: _Note) -> str:
    """Return the text within the task's budget, up to its first stop string."""
    ids = capture.ids(item)
    text = written_text(capture, item) if len(ids) <= note.n else capture.text(ids[: note.n])
    for stop in note.until:
        if stop:
            text = text.split(stop, 1)[0]
    return text


def _topk_refusal(pair: Pair) -> str:
    """Return the reason why log-likelihoods cannot be read from a pair; empty if they can."""
    for capture in (pair.test, pair.ref):
        if capture.estimator is Estimator.TOPK:
            engine = capture.manifest["asked"]["engine"]
            return (
                f"{engine} reports only the most likely tokens: the log-likelihood of a given continuation needs all "
                "of them; tasks of type generate_until work"
            )
    return ""


def _documents(pair: Pair) -> Iterator[Document]:
    notes = (_Note.read(pair.test.request.notes[t]) for _, t in pair.items)
    return ((note.task, note.document) for note in notes)


# ----------------------------------------------------------------------------------------------- scores

Key = tuple[str, str, str]  # task, filter, metric
Table = dict[Key, dict[int, Value]]  # → document → value; values that are not numbers are left out


def _scored(
    tasks: Mapping[str, Any], answers: _Answers, documents: Sequence[Document], settings: LMEvalSettings
) -> Table:
    """The harness' metrics of one side on some documents, by its own filters.

    Raises:
        CaptureError: If the task has other documents now than when it was asked.
    """
    from lm_eval.api.model import LM

    found: Table = {}
    for name, task in tasks.items():
        own = [document for task_name, document in documents if task_name == name]
        if not own:
            continue

        class Replay(LM):  # type: ignore[misc]  # the harness has no types
            """Answers the harness' requests from a capture."""

            def _recorded_answers(
                self, requests: Sequence[Any], task_name: str = name, own: Sequence[int] = own
            ) -> list[Any]:
                given, counts = [], Counter[int]()
                seen: dict[int, int] = {}
                for request in requests:
                    document = own[request.doc_id]
                    if id(request) not in seen:  # a task with repeats asks the same request several times
                        seen[id(request)], counts[document] = counts[document], counts[document] + 1
                    index = seen[id(request)]
                    value = answers.values.get((task_name, document, index))
                    if value is None or _content(request.doc) != answers.contents[task_name, document]:
                        raise CaptureError(
                            f"axis lm-eval: task {task_name} has another document {document} than when arms answered: "
                            "its files changed; delete the captures and run again"
                        )
                    given.append(value)
                return given

            loglikelihood = generate_until = _recorded_answers

            def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[Any]:
                return [value[0] for value in self._recorded_answers(requests)]

        with _quiet():
            from lm_eval.evaluator import evaluate

            try:
                result = evaluate(
                    Replay(),
                    {"tasks": {name: task}, "groups": {}},
                    samples={name: own},
                    bootstrap_iters=0,
                    log_samples=True,
                )
            except CaptureError:
                raise
            except Exception as error:
                raise InputError(f"axis lm-eval: task {name} cannot score these answers ({_line(error)})") from None
        for sample in result["samples"][name]:
            for metric in sample["metrics"]:
                values = found.setdefault((name, str(sample["filter"]), str(metric)), {})
                if (value := _number(sample[metric])) is not None:
                    values[int(sample["doc_id"])] = value
    return found


def _number(value: Any) -> Value | None:
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return float(value) if math.isfinite(float(value)) else None
    pair = isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(each, int | float) for each in value)
    return (float(value[0]), float(value[1])) if pair else None


def _non_numeric_metrics(table: Table) -> list[str]:
    """Metrics whose values on a document are not numbers."""
    return sorted(_label(key) for key, values in table.items() if not values)


def _label(key: Key) -> str:
    task, filter_, metric = key
    return ":".join([task, metric, *([] if filter_ == "none" else [filter_])])


def _binary(*sides: Mapping[int, Value]) -> bool:
    return all(value in (0.0, 1.0) for side in sides for value in side.values())


def _score(tasks: Mapping[str, Any], ref: Table, test: Table, asked: Sequence[Document], seed: int) -> AxisScore:
    """Metrics of every task, and the share of right documents of all of them together."""
    metrics: list[Metric] = []
    rows: list[tuple[str | float | None, ...]] = []
    right: dict[Document, tuple[float, float]] = {}
    for name in tasks:
        keys = [key for key in ref if key[0] == name and ref[key] and test.get(key)]
        first = _judged_by([key for key in keys if _binary(ref[key], test[key])])
        for key in keys:
            a, b = ref[key], test[key]
            order = sorted(a.keys() & b.keys())
            metrics += _task_metrics(key, [a[n] for n in order], [b[n] for n in order], seed)
            if key == first:
                right |= {(name, n): (float(a[n]), float(b[n])) for n in order}  # type: ignore[arg-type]
        rows += [_row(key, ref[key], test[key]) for key in keys]
    judged = [document for document in asked if any(document[0] == name for name, _ in right)] or list(asked)
    values = np.array([right.get(document, (math.nan, math.nan)) for document in judged]).reshape(-1, 2)
    usable = np.isfinite(values).all(axis=1)
    table = TablePlot(
        title="Tasks of lm-evaluation-harness",
        columns=("task", "metric", "reference", "candidate", "documents"),
        rows=tuple(rows),
        note="The harness' own metrics over the documents that both answered.",
    )
    if not right:  # only likelihoods of texts: no answer is right or wrong
        done = {document for key, side in test.items() for document in ((key[0], n) for n in side)}
        return _Unpaired(
            num=np.zeros(len(asked)),
            den=np.ones(len(asked)),
            clusters=np.arange(len(asked)),
            usable=np.array([document in done for document in asked], dtype=bool),
        ).with_measurement(metrics=tuple(metrics), plots=(table,), cluster="document")
    own, theirs = values[usable, 1], values[usable, 0]
    clusters = np.arange(len(judged))
    score = AxisScore.percent(values[:, 1], clusters, usable, right=(values[:, 0], values[:, 1]))
    items = RatioItems.of(theirs, 1.0, clusters[usable])
    difference = score.minus_reference(seed)
    flips = flip_counts(theirs, own, clusters[usable])
    outcomes = list(zip(theirs, own, strict=True))
    return score.with_measurement(
        cluster="document",
        metrics=(
            score.score(seed),
            _DIFFERENCE(difference.estimate, difference.interval),
            _ACCURACY(float(own.mean()), score.mean_interval(seed)),
            _REFERENCE_ACCURACY(float(theirs.mean()), ratio_interval(items, seed, bounds=(0.0, 1.0), proportion=True)),
            _P(flips.p),
            _LOST(flips.harmful),
            _GAINED(flips.beneficial),
            *metrics,
        ),
        plots=(table, *_changed(right)),
        summary=lost_and_gained(outcomes),
        reference_summary=f"{int(theirs.sum())} of {counted(len(theirs), 'document')} right",
        downgrades=accuracy_falls("accuracy on lm-eval's tasks", difference),
    )


def _judged_by(keys: Sequence[Key]) -> Key | None:
    """The metric that decides whether a document is right: acc or exact_match, else the task's first one of 0 and 1."""
    named = [key for name in _PREFERRED_METRICS for key in keys if key[2] == name]
    return next(iter([*named, *keys]), None)


def _task_metrics(key: Key, ref: Sequence[Value], test: Sequence[Value], seed: int) -> Iterator[Metric]:
    """Values of one metric of one task on both sides, paired by document."""
    task, filter_, metric = key
    cell: Coordinates = {"task": task, "metric": metric if filter_ == "none" else f"{metric}, {filter_}"}
    clusters = np.arange(len(ref))
    if all(isinstance(value, tuple) for value in (*ref, *test)):
        if metric not in _ROLLING or metric == "byte_perplexity":  # the same sums as bits_per_byte
            return
        sums, counts = (np.array([value[i] for value in test]) for i in (0, 1))  # type: ignore[index]
        base, weights = (np.array([value[i] for value in ref]) for i in (0, 1))  # type: ignore[index]
        sides = RatioItems.of(-sums, counts, clusters), RatioItems.of(-base, weights, clusters)
        difference = paired_difference(*sides, seed)
        unit = f"nats per {_ROLLING[metric]}"
        cell = {"task": task, "metric": unit}
        yield _VALUE(float(-sums.sum() / counts.sum()), ratio_interval(sides[0], seed), cell=cell)
        yield _REFERENCE(float(-base.sum() / weights.sum()), ratio_interval(sides[1], seed), cell=cell)
        yield _NLL(difference.estimate, difference.interval, cell=cell)
        return
    if any(isinstance(value, tuple) for value in (*ref, *test)):
        return
    a, b = (np.array(side, dtype=np.float64) for side in (ref, test))
    binary = bool(np.isin([a, b], (0.0, 1.0)).all())
    bounds = {"bounds": (0.0, 1.0), "proportion": True} if binary else {}
    left, right = (RatioItems.of(side, 1.0, clusters) for side in (b, a))
    yield _VALUE(float(b.mean()), ratio_interval(left, seed, **bounds), cell=cell)  # type: ignore[arg-type]
    yield _REFERENCE(float(a.mean()), ratio_interval(right, seed, **bounds), cell=cell)  # type: ignore[arg-type]
    if not binary:
        difference = paired_difference(left, right, seed)
        yield _CHANGE(difference.estimate, difference.interval, cell=cell)
        return
    difference = paired_difference(left, right, seed, scale=100.0, bounds=(0.0, 1.0), proportion=True)
    flips = flip_counts(a, b, clusters)
    yield _DIFFERENCE(difference.estimate, difference.interval, cell=cell)
    yield _P(flips.p, cell=cell)
    yield _LOST(flips.harmful, cell=cell)
    yield _GAINED(flips.beneficial, cell=cell)


def _row(key: Key, ref: Mapping[int, Value], test: Mapping[int, Value]) -> tuple[str | float | None, ...]:
    task, filter_, metric = key
    common = sorted(ref.keys() & test.keys())
    sides = ([side[n] for n in common] for side in (ref, test))
    label = metric if filter_ == "none" else f"{metric}, {filter_}"
    return task, label, *(_aggregate(metric, side) for side in sides), len(common)


def _aggregate(metric: str, values: Sequence[Value]) -> float | None:
    """Aggregate values as the harness does: a mean, or a perplexity from sums and counts."""
    pairs = [value for value in values if isinstance(value, tuple)]
    if not pairs:
        return float(np.mean([value for value in values if not isinstance(value, tuple)])) if values else None
    if len(pairs) < len(values) or metric not in _ROLLING:
        return None
    nats = -sum(value[0] for value in pairs) / sum(value[1] for value in pairs)
    return nats / math.log(2) if metric == "bits_per_byte" else math.exp(min(nats, 700.0))


def _changed(right: Mapping[Document, tuple[float, float]]) -> tuple[Plot, ...]:
    """Return the documents that exactly one side gets right."""
    rows = [
        (task, float(document), "lost" if a > b else "gained") for (task, document), (a, b) in right.items() if a != b
    ]
    if not rows:
        return ()
    shown = f"{len(rows)}" if len(rows) <= _MAX_SHOWN_DOCUMENTS else f"first {_MAX_SHOWN_DOCUMENTS} of {len(rows)}"
    return (
        TablePlot(
            title=f"Documents with another result ({shown})",
            columns=("task", "document", "outcome"),
            rows=tuple(rows[:_MAX_SHOWN_DOCUMENTS]),
            note="The document's number in its task.",
        ),
    )


class _Unpaired(AxisScore):
    """Score of text likelihoods, which have no share of right documents to compare with the control's."""

    def excess_over(self, control: AxisScore, seed: int) -> PairedDifference | None:
        return None
