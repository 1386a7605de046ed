"""Asks a server within a time limit, one request at a time or several at once, and keeps all answers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from fidelab.bench.eval.chat import Ask, Chat, ChatAnswer
from fidelab.core.errors import EngineError
from fidelab.engines.openai.http import Refused

_OVER = "not reached within --time-limit"
_ADVICE = re.compile(  # of engine openai, which has other flags
    r": (?:check whether it hangs|look at its log|start the server|correct base-url|lower concurrency"
    r"|put it in an environment variable|give that address|is base-url).*"
)
_MIN_SECONDS = 1.0  # seconds below which a request is not sent any more


@dataclass(frozen=True)
class Failure:
    """A request without an answer.

    Attributes:
        reason: the server's message, or what happened.
        status: HTTP status of a refusal; 0 without a response.
        missed: the request was not sent, or not answered, within the time limit, or the server is gone.
    """

    reason: str
    status: int = 0
    missed: bool = False


Outcome = ChatAnswer | Failure


def reason_of(error: EngineError) -> str:
    """Return the reason of a failed request, without advice on how to start the whole command again."""
    return _ADVICE.sub("", str(error))


@dataclass
class Asker:
    """Sends requests until the time is over.

    Attributes:
        chat: the model on its server.
        parallel: requests in flight at once.
        timeout: seconds for one request.
        limit: seconds for all requests together.
        asked: every request that was answered, with its answer.
        gone: why the server no longer answers; empty if it does.
    """

    chat: Chat
    parallel: int
    timeout: float
    limit: float
    asked: list[tuple[Ask, ChatAnswer]] = field(default_factory=list)
    gone: str = ""
    _began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._began + self.limit - time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds since the first request."""
        return time.monotonic() - self._began

    def one(self, ask: Ask) -> Outcome:
        """Return the outcome of one request.  It raises nothing."""
        if self.gone:
            return Failure(self.gone, missed=True)
        left = self.left
        if left < _MIN_SECONDS:
            return Failure(_OVER, missed=True)
        began = time.monotonic()
        try:
            answer = self.chat.ask(ask, min(left, self.timeout))
        except EngineError as error:
            return self._failure(error, over=time.monotonic() - began >= left - _MIN_SECONDS)
        self.asked.append((ask, answer))
        return answer

    def many(self, asks: Sequence[Ask], said: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
        """Return the outcomes of requests that are sent :attr:`parallel` at a time, in the order of the requests."""

        def ask(one: Ask) -> Outcome:
            outcome = self.one(one)
            said(outcome)
            return outcome

        with ThreadPoolExecutor(max(1, self.parallel)) as pool:
            return list(pool.map(ask, asks))

    def _failure(self, error: EngineError, *, over: bool) -> Failure:
        if isinstance(error, Refused):
            late = over and not error.status
            return Failure(_OVER if late else reason_of(error), error.status, missed=late)
        try:
            self.chat.client.models()
        except Refused:
            pass
        except EngineError as now:
            self.gone = reason_of(now)
            return Failure(self.gone, missed=True)
        return Failure(reason_of(error))
