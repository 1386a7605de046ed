"""The dialogues: five of each domain, drawn with a fixed seed."""

from __future__ import annotations

from functools import lru_cache
from random import Random

from fidelab.inputs.toolcalls import services, work
from fidelab.inputs.toolcalls.dialogue import Dialogue

_PER_DOMAIN = 5
_DOMAINS = {
    "files": (work.FILES, work.files),
    "calendar": (work.CALENDAR, work.calendar),
    "tickets": (work.TICKETS, work.tickets),
    "database": (work.DATABASE, work.database),
    "orders": (services.ORDERS, services.orders),
    "units": (services.UNITS, services.units),
    "building": (services.BUILDING, services.building),
    "trains": (services.TRAINS, services.trains),
}


@lru_cache(maxsize=1)
def load_dialogues() -> tuple[Dialogue, ...]:
    """Return all dialogues, one of each domain after the other, so that the first few are of several domains."""
    return tuple(
        Dialogue(f"{domain}-{number}", tools, tuple(write(Random(f"{domain} {number}"))))
        for number in range(1, 1 + _PER_DOMAIN)
        for domain, (tools, write) in _DOMAINS.items()
    )
