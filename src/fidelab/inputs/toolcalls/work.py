"""Domains of dialogues: files, calendars, tickets and databases."""

from __future__ import annotations

from random import Random

from fidelab.inputs.toolcalls.dialogue import (
    FLAG,
    NUMBER,
    TEXT,
    WHOLE,
    Step,
    array_of,
    described,
    listed,
    object_of,
    one_of,
    tool,
)

# -------------------------------------------------------------------------------------------------------------- files

FILES = (
    tool(
        "search_files",
        "Search a folder for files.",
        {"folder": TEXT, "extension": described(TEXT, "without the dot")},
        {"recursive": described({**FLAG, "default": False}, "also in folders below")},
    ),
    tool(
        "move_file",
        "Move one file.",
        {"source": TEXT, "target": TEXT},
        {"overwrite": {**FLAG, "default": False}},
    ),
    tool(
        "set_permissions",
        "Set the permissions of a file.",
        {
            "path": TEXT,
            "permissions": object_of({"owner": one_of("read", "write"), "group": one_of("none", "read", "write")}),
        },
    ),
    tool(
        "make_archive",
        "Pack files into an archive.",
        {"paths": array_of(TEXT), "target": TEXT, "kind": one_of("zip", "tar", "7z")},
        {"level": described(WHOLE, "of compression, 1 to 9")},
    ),
)


def files(draw: Random) -> list[Step]:
    """Find files, move one that was found, protect it, pack what was named."""
    folder, other = draw.sample(["/srv/reports", "/data/scans", "/srv/plans", "/srv/exports", "/mnt/notes"], 2)
    kind = draw.choice(["csv", "pdf", "md", "log"])
    names = [f"{folder}/{word}-{draw.randrange(100, 999)}.{kind}" for word in draw.sample(_WORDS, 3)]
    at, level = draw.randrange(3), draw.randrange(1, 10)
    moved = f"{other}/{names[at].rsplit('/', 1)[1]}"
    left = [name for name in names if name != names[at]]
    group, form = draw.choice(["none", "read", "write"]), draw.choice(["zip", "tar", "7z"])
    where = _ORDINALS[at]
    return [
        Step(
            f"Find all {kind} files in {folder} and in the folders below it.",
            "search_files",
            {"folder": folder, "extension": kind, "recursive": True},
            {"files": names},
            f"There are {len(names)} files.",
        ),
        Step(
            f"Move the {where} file of that list to {moved}, and overwrite what is there.",
            "move_file",
            {"source": names[at], "target": moved, "overwrite": True},
            {"moved": True},
            "The file was moved.",
        ),
        Step(
            f"Its owner may write it now, its group has the permission {group}.",
            "set_permissions",
            {"path": moved, "permissions": {"owner": "write", "group": group}},
            {"changed": True},
            "The permissions are set.",
        ),
        Step(
            f"Pack the two files that were not moved into {other}/rest.{form}, as {form}, at level {level}. "
            "Keep their order.",
            "make_archive",
            {"paths": left, "target": f"{other}/rest.{form}", "kind": form, "level": level},
            {"bytes": draw.randrange(10_000, 99_999)},
            "The archive is written.",
        ),
        Step(
            f"Is there any txt file directly in {other}? Do not look below it.",
            "search_files",
            {"folder": other, "extension": "txt"},
            {"files": []},
            "No, there is none.",
        ),
    ]


# ----------------------------------------------------------------------------------------------------------- calendar

_MOMENT = object_of({"date": described(TEXT, "YYYY-MM-DD"), "time": described(TEXT, "HH:MM")})
CALENDAR = (
    tool(
        "create_event",
        "Create an event.",
        {"title": TEXT, "start": _MOMENT, "minutes": WHOLE},
        {
            "guests": described({**array_of(TEXT), "default": []}, "names of teams"),
            "online": {**FLAG, "default": False},
        },
    ),
    tool(
        "list_events",
        "List the events of a day.",
        {"date": described(TEXT, "YYYY-MM-DD")},
        {"calendar": one_of("work", "private", default="work")},
    ),
    tool("move_event", "Move an event to another start.", {"id": TEXT, "start": _MOMENT}),
    tool(
        "cancel_event",
        "Cancel an event.",
        {"id": TEXT, "notify": described(FLAG, "tell the guests")},
        {"reason": TEXT},
    ),
)


def calendar(draw: Random) -> list[Step]:
    """Create an event, look at the day, move it, cancel another."""
    day, title = f"2031-{draw.randrange(1, 13):02}-{draw.randrange(1, 28):02}", draw.choice(_TITLES)
    hours = draw.sample(range(8, 18), 3)
    first, second, third = (f"{hour:02}:{draw.choice(['00', '15', '30', '45'])}" for hour in hours)
    guests = draw.sample(["Design", "Sales", "Support", "Finance", "Research", "Quality"], 2)
    minutes, ids = draw.choice([20, 25, 40, 50, 75]), [f"ev-{n}" for n in draw.sample(range(1000, 9999), 2)]
    return [
        Step(
            f'Create an online event with the title "{title}" on {day} at {first}, for {minutes} minutes. '
            f"Guests are {listed(guests)}, in this order.",
            "create_event",
            {
                "title": title,
                "start": {"date": day, "time": first},
                "minutes": minutes,
                "guests": guests,
                "online": True,
            },
            {"id": ids[0]},
            "The event is in the calendar.",
        ),
        Step(
            f"What else is in my private calendar on {day}?",
            "list_events",
            {"date": day, "calendar": "private"},
            {"events": [{"id": ids[1], "title": "Dentist", "time": second}]},
            f"There is one event at {second}.",
        ),
        Step(
            f"Move the event that you created to {third} on the same day.",
            "move_event",
            {"id": ids[0], "start": {"date": day, "time": third}},
            {"moved": True},
            "It was moved.",
        ),
        Step(
            'Cancel the event in the private calendar without telling anybody. The reason is "sick".',
            "cancel_event",
            {"id": ids[1], "notify": False, "reason": "sick"},
            {"cancelled": True},
            "It was cancelled.",
        ),
        Step(
            f'In its place create "Call back" at {second} on that day, for 10 minutes. Nobody is invited.',
            "create_event",
            {"title": "Call back", "start": {"date": day, "time": second}, "minutes": 10},
            {"id": f"ev-{draw.randrange(1000, 9999)}"},
            "Done.",
        ),
    ]


# ------------------------------------------------------------------------------------------------------------ tickets

TICKETS = (
    tool(
        "create_ticket",
        "Open a ticket.",
        {"title": TEXT, "priority": one_of("low", "normal", "high", "urgent"), "labels": array_of(TEXT)},
        {"affected": object_of({"product": TEXT, "version": TEXT})},
    ),
    tool("assign_ticket", "Give a ticket to a team.", {"id": WHOLE, "team": TEXT}, {"due_days": WHOLE}),
    tool(
        "find_tickets",
        "Find tickets.",
        {"status": one_of("open", "waiting", "closed")},
        {"label": TEXT, "limit": {**WHOLE, "default": 10}},
    ),
    tool("close_ticket", "Close a ticket.", {"id": WHOLE, "resolution": one_of("fixed", "duplicate", "rejected")}),
)


def tickets(draw: Random) -> list[Step]:
    """Open a ticket, give it to a team, find others, close one as a duplicate."""
    title, labels = draw.choice(_FAULTS), draw.sample(["network", "billing", "login", "printer", "export"], 2)
    product, version = draw.choice(["Console", "Gateway", "Reader"]), f"{draw.randrange(1, 9)}.{draw.randrange(0, 20)}"
    own, *found = draw.sample(range(2000, 9999), 4)
    priority, team = draw.choice(["low", "high", "urgent"]), draw.choice(["platform", "mobile", "accounts"])
    at, days, limit = draw.randrange(3), draw.randrange(2, 15), draw.randrange(3, 9)
    return [
        Step(
            f'Open a ticket "{title}" with {priority} priority, labels {listed(labels)}. '
            f"It affects {product}, version {version}.",
            "create_ticket",
            {
                "title": title,
                "priority": priority,
                "labels": labels,
                "affected": {"product": product, "version": version},
            },
            {"id": own},
            f"Ticket {own} is open.",
        ),
        Step(
            f"The team {team} should take it, within {days} days.",
            "assign_ticket",
            {"id": own, "team": team, "due_days": days},
            {"assigned": True},
            "It was assigned.",
        ),
        Step(
            f"Show at most {limit} open tickets with the label {labels[1]}.",
            "find_tickets",
            {"status": "open", "label": labels[1], "limit": limit},
            {"ids": found},
            f"There are {len(found)} of them.",
        ),
        Step(
            f"The {_ORDINALS[at]} of these is a duplicate. Close it.",
            "close_ticket",
            {"id": found[at], "resolution": "duplicate"},
            {"closed": True},
            "It is closed.",
        ),
        Step(
            "And the ticket that I opened is fixed. Close it, too.",
            "close_ticket",
            {"id": own, "resolution": "fixed"},
            {"closed": True},
            "Both are closed.",
        ),
    ]


# ----------------------------------------------------------------------------------------------------------- database

_FILTERS = array_of(object_of({"column": TEXT, "operator": one_of("=", "<", ">"), "value": NUMBER}))
DATABASE = (
    tool(
        "query_rows",
        "Select rows of a table.",
        {"table": one_of("parts", "shipments", "readings"), "filters": _FILTERS},
        {"order_by": object_of({"column": TEXT, "descending": FLAG}), "limit": WHOLE},
    ),
    tool("count_rows", "Count rows of a table.", {"table": one_of("parts", "shipments", "readings")}),
    tool(
        "update_row",
        "Change one value of a row.",
        {"table": one_of("parts", "shipments", "readings"), "id": WHOLE, "column": TEXT, "value": NUMBER},
    ),
    tool(
        "delete_rows",
        "Delete rows of a table.",
        {"table": one_of("parts", "shipments", "readings"), "ids": array_of(WHOLE), "dry_run": FLAG},
    ),
)


def database(draw: Random) -> list[Step]:
    """Count, select with two filters, change one row, delete others."""
    table, column = draw.choice([("parts", "weight"), ("shipments", "distance"), ("readings", "pressure")])
    low, limit = round(draw.uniform(1, 60), 1), draw.randrange(3, 9)
    high, value = round(low + draw.uniform(1, 40), 1), round(draw.uniform(1, 99), 2)
    ids, at = draw.sample(range(100, 999), 3), draw.randrange(3)
    rest = [number for number in ids if number != ids[at]]
    more = {"column": column, "operator": ">", "value": low}
    less = {"column": column, "operator": "<", "value": high}
    rows = [{"id": number, column: round(draw.uniform(low, high), 1)} for number in ids]
    return [
        Step(
            f"How many rows has the table {table}?",
            "count_rows",
            {"table": table},
            {"count": draw.randrange(1000, 9999)},
            "That many.",
        ),
        Step(
            f"Select those with {column} above {low} and below {high}, the largest {column} first, {limit} at most.",
            "query_rows",
            {
                "table": table,
                "filters": [more, less],
                "order_by": {"column": column, "descending": True},
                "limit": limit,
            },
            {"rows": rows},
            f"{len(rows)} rows.",
        ),
        Step(
            f"Set {column} of the {_ORDINALS[at]} of these rows to {value}.",
            "update_row",
            {"table": table, "id": ids[at], "column": column, "value": value},
            {"changed": 1},
            "The row is changed.",
        ),
        Step(
            "Delete the other rows of that list, in its order, as a dry run.",
            "delete_rows",
            {"table": table, "ids": rest, "dry_run": True},
            {"would_delete": len(rest)},
            "Nothing is deleted yet.",
        ),
        Step(
            "Good. Now delete them.",
            "delete_rows",
            {"table": table, "ids": rest, "dry_run": False},
            {"deleted": len(rest)},
            "They are deleted.",
        ),
    ]


_WORDS = ("budget", "harbour", "survey", "archive", "turbine", "minutes", "invoice", "seminar", "forecast")
_ORDINALS = ("first", "second", "third")
_TITLES = ("Weekly review", "Contract talk", "Release planning", "Budget round", "Fire drill", "Lab tour")
_FAULTS = ("Export stops at 99%", "Login page is blank", "Printer loses paper", "Invoice has two dates", "VPN drops")
