"""Asking an engine: the same answers and the same errors from another interpreter as from this one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fidelab.core import KVSpec
from fidelab.core.errors import EngineError, FidelabError, InputError, UsageError
from fidelab.environments.environment import Environment, locate
from fidelab.environments.queries import EngineAnswers, ask
from fidelab.workers.messages import PROTOCOL
from tests.captures import sample
from tests.environments.conftest import Second
from tests.processes import alive, until

EXACT = KVSpec.parse("exact")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIDELAB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def there(second: Second) -> Iterator[EngineAnswers]:
    with ask(locate("fake", python=second.python)) as asked:
        yield asked


@pytest.fixture
def strange(odd: Second) -> Iterator[EngineAnswers]:
    with ask(locate("odd", python=odd.python), limit=20) as asked:
        yield asked


def stand_in(tmp_path: Path, text: str) -> Environment:
    """An environment whose interpreter is a shell script."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    return Environment("fake", str(script))


def test_another_interpreter_gives_the_answers_of_this_one(there: EngineAnswers) -> None:
    arm = replace(sample.ARM, engine="fake", kv=KVSpec.parse("exact"), options=())
    refused = replace(arm, kv=KVSpec.parse("refused"))
    with ask(locate("fake")) as here:
        assert there.python == here.python
        assert there.versions() == here.versions()
        assert there.kv_names() == here.kv_names()
        assert (there.estimator, there.checkpoint_format) == (here.estimator, here.checkpoint_format)
        assert there.supports(arm) == here.supports(arm)
        assert there.supports(refused) == here.supports(refused)
        assert (there.supports(arm).ok, there.supports(refused).ok) == (True, False)
        assert there.control_for(EXACT, "bf16") == here.control_for(EXACT, "bf16")
        assert (there.about.provenance, there.about.shims) == (here.about.provenance, here.about.shims)


@pytest.mark.parametrize("kv", ["tilt[q=7]", "tilt[z=1]"])
def test_another_interpreter_raises_the_errors_of_this_one(kv: str, there: EngineAnswers) -> None:
    arm = replace(sample.ARM, engine="fake", options=(("colour", "red"),))
    with ask(locate("fake")) as here:
        questions: list[Callable[[EngineAnswers], object]] = [
            lambda asked: asked.check_kv(KVSpec.parse(kv)),
            lambda asked: asked.supports(arm),
        ]
        for question in questions:
            with pytest.raises(UsageError) as ours:
                question(here)
            with pytest.raises(UsageError) as theirs:
                question(there)
            assert str(theirs.value) == str(ours.value)
    there.check_kv(EXACT)  # the process is still able to answer


def test_a_missing_engine_says_what_the_engine_says(strange: EngineAnswers) -> None:
    with pytest.raises(EngineError, match=r"^engine odd needs odd-engine: pip install odd-engine$"):
        strange.versions()


def test_a_broken_import_is_named(strange: EngineAnswers) -> None:
    with pytest.raises(EngineError, match=r"^ModuleNotFoundError: No module named 'odd_native'$"):
        strange.kv_names()


def test_what_an_engine_prints_is_not_an_answer(strange: EngineAnswers) -> None:
    assert strange.control_for(EXACT, "talk") == "exact"
    assert strange.control_for(EXACT, "") == "exact"


def test_an_engine_that_exits_is_an_error_and_not_the_end(strange: EngineAnswers) -> None:
    with pytest.raises(EngineError, match=r"^SystemExit: no licence$"):
        strange.control_for(EXACT, "sys.exit")
    assert strange.control_for(EXACT, "") == "exact"


def test_a_process_that_dies_says_its_last_words(strange: EngineAnswers) -> None:
    with pytest.raises(EngineError, match=r"did not answer about its control_for: libodd.so: undefined symbol$"):
        strange.control_for(EXACT, "exit")


def test_a_process_that_hangs_is_given_up_and_ended(odd: Second) -> None:
    with pytest.raises(EngineError, match=r"within 1 s$"), ask(locate("odd", python=odd.python), limit=1) as asked:
        asked.control_for(EXACT, "hang")


def test_nothing_that_the_engine_started_is_left_behind(odd: Second) -> None:
    with ask(locate("odd", python=odd.python)) as asked:
        pid = int(asked.control_for(EXACT, "fork") or 0)
        os.kill(pid, 0)
    assert until(lambda: not alive(pid))


def failure(environment: Environment, limit: float = 20) -> str:
    with pytest.raises(FidelabError) as error, ask(environment, limit):
        pass
    assert isinstance(error.value, EngineError)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo \"ModuleNotFoundError: No module named 'numpy'\" >&2; exit 1", "has no numpy: install numpy there"),
        (
            "echo \"ImportError: cannot import name 'StrEnum' from 'enum'\" >&2; exit 1",
            "is too old: Python 3.11 or newer is needed there",
        ),
        (
            """echo '{"protocol": 1, "fidelab": "0.0.9", "python": "3.12"}'; cat""",
            f"has fidelab 0.0.9, which speaks protocol 1, this one {PROTOCOL}: install fidelab",
        ),
        ("exit 7", "did not start: it ended with status 7"),
        *((f"echo '{line}'; cat", "prints what is not an answer") for line in ("Welcome to host", "[1]", '"x"')),
        ("echo 'Welcome to host'; cat", "Welcome to host"),
    ],
)
def test_an_interpreter_that_is_none_for_engines_says_so(script: str, said: str, tmp_path: Path) -> None:
    assert said in failure(stand_in(tmp_path, script))


def test_an_interpreter_that_never_greets_is_given_up(tmp_path: Path) -> None:
    began = time.monotonic()
    assert failure(stand_in(tmp_path, "exec sleep 600"), limit=0.5).endswith("did not start within 0.5 s")
    assert time.monotonic() - began < 30


def test_an_error_class_that_is_unknown_here_is_an_engine_error(tmp_path: Path) -> None:
    script = f'echo \'{{"protocol": {PROTOCOL}, "python": "3.12"}}\'; read line; '
    script += 'echo \'{"error": "%s", "text": "why"}\'; cat'
    for kind, cls in (("NewError", EngineError), ("InputError", InputError), ("annotations", EngineError)):
        with ask(stand_in(tmp_path, script % kind), 20) as asked, pytest.raises(cls, match=r"^why$"):
            asked.versions()
