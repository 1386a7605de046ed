"""Names of the metrics on an engine's own server."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class MetricNames:
    """Metric names of one server: counters without ``_total``; empty for metrics that it lacks.

    ``server``: the server's name in records.  llama-server's own rate (``predicted_tokens_seconds``) is left out: it is
    that of one slot, not of all together.
    """

    server: str
    generated: str
    usage: str
    running: str
    waiting: str
    drafted: str = ""
    accepted: str = ""
    drafts: str = ""
    preempted: str = ""
    rate: str = ""  # gauge, tok/s
    length: str = ""  # gauge, tokens per verification; 0 without speculation
    accepted_share: str = ""  # gauge, accepted / drafted
    ttft: str = ""  # histograms in seconds: of requests
    tpot: str = ""
    itl: str = ""  # of gaps between tokens
    e2el: str = ""

    def all(self) -> set[str]:
        """Return all names of counters and gauges that the server has."""
        return {name for field, name in asdict(self).items() if field != "server" and name} - {
            *self.histograms.values()
        }

    @property
    def histograms(self) -> dict[str, str]:
        """Latency (``ttft``, ``tpot``, ``itl``, ``e2el``) → the name of its histogram."""
        names = {"ttft": self.ttft, "tpot": self.tpot, "itl": self.itl, "e2el": self.e2el}
        return {latency: name for latency, name in names.items() if name}

    @property
    def counts_drafts(self) -> bool:
        """Whether the server has counters whenever it speculates."""
        return bool(self.drafts)
