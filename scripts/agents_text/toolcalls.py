"""Documents of the kind ``tool calls``: dialogues with calls in JSON, and what the tools really return."""

from __future__ import annotations

import hashlib
import json
import random
import re
import sqlite3
import statistics
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from scripts.agents_text.documents import Document, Message, conversed, sizes
from scripts.agents_text.prose import sections
from scripts.agents_text.repository import REVISION, Repository, git

_TOOLS = {
    "search": "search(pattern, folder, limit): lines that match a regular expression",
    "read": "read(path, first, last): lines of a file",
    "lookup": "lookup(schema, name): one definition of a JSON schema",
    "calculate": "calculate(expression): an exact number; fractions are allowed",
    "convert": "convert(value, from, to): lengths, masses, times, sizes of data",
    "query": "query(sql): SQLite over the table figures(run, key, value) of stored results",
    "history": "history(path, limit): subjects of the commits that changed a file",
    "describe": "describe(numbers): mean, median, deviation, extremes",
    "test_pattern": "test_pattern(pattern, strings): which strings a regular expression takes whole",
    "digest": "digest(text, algorithm): hexadecimal digest of a text",
    "section": "section(page, heading): a section of the documentation",
    "outline": "outline(path): classes and functions of a Python file with their lines",
}
_UNITS: dict[str, tuple[str, int | Fraction]] = {
    "m": ("length", 1), "km": ("length", 1000), "ft": ("length", Fraction(3048, 10000)), "mile": ("length", Fraction(1609344, 1000)), "in": ("length", Fraction(254, 10000)),
    "kg": ("mass", 1), "g": ("mass", Fraction(1, 1000)), "lb": ("mass", Fraction(45359237, 10**8)), "oz": ("mass", Fraction(45359237, 16 * 10**8)),
    "s": ("time", 1), "min": ("time", 60), "h": ("time", 3600), "day": ("time", 86400), "MB": ("data", 10**6), "GB": ("data", 10**9), "MiB": ("data", 2**20), "GiB": ("data", 2**30),
}  # fmt: skip
_SYSTEMS = (
    "You work in a source repository. Call a tool when it can answer; one call per message. Never guess what a file says.",
    "You are a careful assistant for engineers. Look things up before you answer, and say where you found them.",
    "Answer briefly. Use the tools below for every fact that is not in the conversation.",
    "You help with reviews. Quote lines with their numbers. If a tool fails, change the call and try again.",
    "You are an agent with read-only tools. Plan, call, read the result, and only then answer.",
)
_THANKS = (
    "Good.",
    "Thanks.",
    "All right.",
    "I see.",
    "That helps.",
    "Fine, next one.",
    "Makes sense.",
    "Hm, I expected something else.",
    "OK.",
    "Noted.",
    "",
    "",
    "",
)
_BEFORE = (
    "",
    "",
    "",
    "I look it up.",
    "Let me check.",
    "One call answers that.",
    "I do not know this by heart.",
    "The tool decides.",
    "First the facts.",
)
Question = tuple[str, dict[str, Any], str, str]


class _Desk:
    """Tools over the repository, and a memory that all dialogues share, so that no question is asked twice."""

    def __init__(self, repository: Repository, order: random.Random, words: list[str], asked: set[str]) -> None:
        self.repository, self.order, self.words = repository, order, words
        self.python = repository.under("src/", "k16v8/src/", "checkpoints/src/", "tests/", least=1500)
        self.schemas = {
            name: json.loads(repository.files[name])["$defs"]
            for name in repository.under("schema/", suffix=".json")
            if "$defs" in repository.files[name]
        }
        self.pages = [
            (name, part)
            for name in repository.under("docs/", suffix=".md")
            if "reference" not in name
            for part in sections(repository.files[name])
        ]
        self.asked = asked
        self.lengths: tuple[int, ...] = (25, 40, 60, 80, 110)  # lines that are read at a time
        self.file = ""
        self.base = self.table()

    def table(self) -> sqlite3.Connection:
        """Open the table of figures from a golden file."""
        base = sqlite3.connect(":memory:")
        base.execute("create table figures (run text, key text, value real)")
        for name in self.repository.under("tests/golden/data/", suffix=".json"):
            self._fill(base, name.rsplit("/", 1)[-1].removesuffix(".json"), json.loads(self.repository.files[name]), "")
        return base

    def _fill(self, base: sqlite3.Connection, run: str, value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                self._fill(base, run, inner, f"{path}.{key}".lstrip("."))
        elif isinstance(value, list):
            for number, inner in enumerate(value):
                self._fill(base, run, inner, f"{path}[{number}]")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            base.execute("insert into figures values (?, ?, ?)", (run, path, value))

    # Each question yields: what the user asks, the arguments, the true result, and the answer made of it.
    def search(self) -> Question:
        word, folder = (
            self.order.choice(self.words),
            self.order.choice(("src/fidelab", "tests", "k16v8", "checkpoints", "docs", "benchmarks")),
        )
        lines = self.repository.grep(rf"\b{re.escape(word)}\b", f"{folder}/")
        limit = self.order.choice((5, 8, 12, 20, 30))
        shown = [line[:160] for line in lines[:limit]]
        ask = self.order.choice(
            (
                "Where is `{}` used below {}?",
                "Who touches `{}` in {}?",
                "Find `{}` in {}, please.",
                "I am about to rename `{}`. What in {} would break?",
                "Is `{}` mentioned anywhere under {}?",
            )
        ).format(word, folder)
        files = sorted({line.split(":")[0] for line in lines})
        if not lines:
            answer = f"Nowhere: no line below {folder} has the word `{word}`."
        else:
            answer = (
                f"`{word}` is on {len(lines)} lines of {len(files)} files below {folder}; the first is {shown[0].split(':')[0]}, line {shown[0].split(':')[1]}."
                + (f" I was shown {limit} of them." if len(lines) > limit else "")
            )
            self.file = self.order.choice(files)
        return (
            ask,
            {"pattern": rf"\b{word}\b", "folder": folder, "limit": limit},
            json.dumps(
                {"matches": len(lines), "files": len(files), "lines": shown}, indent=self.order.choice((None, 1))
            ),
            answer,
        )

    def read(self) -> Question:
        name = self.file if self.file.endswith(".py") and self.order.random() < 0.6 else self.order.choice(self.python)
        self.file = ""
        lines = self.repository.files[name].splitlines()
        count = min(len(lines), self.order.choice(self.lengths))
        first = self.order.randrange(max(1, len(lines) - count + 1)) + 1
        shown = lines[first - 1 : first - 1 + count]
        ask = self.order.choice(
            (
                "Show me {0} from line {1}.",
                "Open {0}, lines {1} to {2}.",
                "What happens in {0} around line {1}?",
                "Read {0}:{1}-{2} and tell me what is defined there.",
            )
        ).format(name, first, first + count - 1)
        defined = [found[1] for line in shown if (found := re.match(r"\s*(?:async )?(?:def|class) (\w+)", line))]
        raised = sorted({found for line in shown for found in re.findall(r"raise (\w+)", line)})
        answer = (
            f"These lines define {', '.join(f'`{one}`' for one in defined)}."
            if defined
            else "Nothing is defined in these lines; they belong to a longer body or to data."
        )
        if raised:
            answer += f" They raise {', '.join(raised)}."
        longest = max(range(len(shown)), key=lambda i: len(shown[i]))
        answer += f" The file has {len(lines)} lines; the longest shown is line {first + longest} with {len(shown[longest])} characters."
        return (
            ask,
            {"path": name, "first": first, "last": first + count - 1},
            "\n".join(f"{first + i}: {line}" for i, line in enumerate(shown)),
            answer,
        )

    def lookup(self) -> Question:
        schema = self.order.choice(sorted(self.schemas))
        name = self.order.choice(sorted(key for key, one in self.schemas[schema].items() if "properties" in one))
        value = self.schemas[schema][name]
        fields, needed = list(value.get("properties", {})), value.get("required", [])
        ask = self.order.choice(
            ("Which fields does `{}` have in {}?", "What must a `{}` of {} contain?", "Look up `{}` in {}.")
        ).format(name, schema)
        answer = (
            f"`{name}` has {len(fields)} fields: {', '.join(fields[:8])}{' and others' if len(fields) > 8 else ''}. "
            + (f"Required are {', '.join(needed[:8])}." if needed else "None is required.")
        )
        return (
            ask,
            {"schema": schema, "name": name},
            json.dumps(value, indent=self.order.choice((None, 1, 2)))[:3500],
            answer,
        )

    def calculate(self) -> Question:
        a, b, c, d = (self.order.randint(2, 999) for _ in range(4))
        form, say = self.order.choice((
            (f"{a}*{b} - {c}*{d}", f"what {a} times {b} less {c} times {d} is"), (f"Fraction({a},{b}) + Fraction({c},{d})", f"the sum of {a}/{b} and {c}/{d}"),
            (f"{a}**3 % {b}", f"what {a} cubed leaves when it is divided by {b}"), (f"{a * 1000}*{b % 64 + 1}*2*{c % 8 + 1}/1e9", f"how many GB {a * 1000} tokens take at {b % 64 + 1} layers and {2 * (c % 8 + 1)} bytes"),
            (f"({a} + {b})*({c} - {d})", f"the product of {a} + {b} and {c} - {d}"), (f"{a}/{b}*100", f"how many percent of {b} the number {a} is"), (f"2**{a % 60 + 4} - {b}", f"two to the power of {a % 60 + 4} less {b}"),
        ))  # fmt: skip
        value = eval(form, {"Fraction": Fraction})
        return (
            self.order.choice(("Tell me {}.", "I need {}.", "Work out {}, exactly.", "Quick: {}?")).format(say),
            {"expression": form},
            json.dumps({"result": str(value)}),
            f"It is {value}.",
        )

    def convert(self) -> Question:
        one, two = self.order.choice(
            [(a, b) for a in _UNITS for b in _UNITS if a != b and _UNITS[a][0] == _UNITS[b][0]]
        )
        amount = Fraction(self.order.randint(1, 9999), self.order.choice((1, 2, 10)))
        value = amount * Fraction(_UNITS[one][1]) / Fraction(_UNITS[two][1])
        shown = float(amount)
        return (
            self.order.choice(("Convert {} {} to {}.", "{} {} in {}?", "How much is {} {} in {}?")).format(
                shown, one, two
            ),
            {"value": shown, "from": one, "to": two},
            json.dumps({"value": float(value), "exact": str(value)}),
            f"{shown} {one} are {float(value):.6g} {two}.",
        )

    def query(self) -> Question:
        base = self.base
        runs = [row[0] for row in base.execute("select distinct run from figures order by run")]
        run, least = self.order.choice(runs), self.order.choice((0.1, 0.5, 1, 2, 10, 100))
        ask, sql = self.order.choice((
            (f"How many stored figures of {run} are above {least}?", f"select count(*), max(value) from figures where run = '{run}' and value > {least}"),
            ("Which runs hold the most figures?", "select run, count(*) as n from figures group by run order by n desc limit " + str(self.order.randint(3, 9))),
            (f"List the largest figures of {run}.", f"select key, value from figures where run = '{run}' order by value desc, key limit {self.order.randint(4, 15)}"),
            (f"Average figure of {run} whose key has 'kl'?", f"select count(*), avg(value) from figures where run = '{run}' and key like '%kl%'"),
            (f"Show some figures of {run} between {-least} and {least}.", f"select key, value from figures where run = '{run}' and value between {-least} and {least} order by key limit {self.order.randint(5, 18)} offset {self.order.randint(0, 40)}"),
        ))  # fmt: skip
        cursor = base.execute(sql)
        names = [column[0] for column in cursor.description]
        rows = [[f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in cursor]
        answer = (
            "No row fits."
            if not rows
            else f"{len(rows)} row{'s' if len(rows) > 1 else ''}; the first says {', '.join(f'{n} = {v}' for n, v in zip(names, rows[0], strict=True))}."
        )
        return ask, {"sql": sql}, json.dumps({"columns": names, "rows": rows}), answer

    def history(self) -> Question:
        name, limit = self.order.choice(self.python), self.order.choice((4, 6, 10))
        subjects = [
            f"{line[:9]} {line[10:]}"
            for line in git("log", "--format=%h %s", "--abbrev=9", f"-{limit}", REVISION, "--", name).splitlines()
        ]
        ask = self.order.choice(
            ("How did {} come to be as it is?", "What changed last in {}?", "Recent commits of {}, please.")
        ).format(name)
        result = json.dumps({"commits": subjects}, ensure_ascii=False)
        return (
            ask,
            {"path": name, "limit": limit},
            result,
            f'The last of {len(subjects)} changes shown: "{subjects[0][10:]}"; the first of them: "{subjects[-1][10:]}".',
        )

    def describe(self) -> Question:
        numbers = [round(self.order.gauss(self.order.randint(5, 90), 9), 2) for _ in range(self.order.randint(6, 24))]
        result = {
            "n": len(numbers),
            "mean": round(statistics.fmean(numbers), 4),
            "median": round(statistics.median(numbers), 4),
            "deviation": round(statistics.stdev(numbers), 4),
            "least": min(numbers),
            "most": max(numbers),
        }
        what = self.order.choice(
            (
                "latencies in ms",
                "weights of parcels in kg",
                "temperatures of the reactor",
                "points of the class",
                "lengths of the nails in mm",
                "scores of the reviewers",
            )
        )
        skew = "above" if result["mean"] > result["median"] else "below"
        return (
            f"Summarise these {what}: {', '.join(map(str, numbers))}.",
            {"numbers": numbers},
            json.dumps(result),
            f"Their mean is {result['mean']} with a deviation of {result['deviation']}; it lies {skew} the median {result['median']}. They run from {result['least']} to {result['most']}.",
        )

    def test_pattern(self) -> Question:
        pattern = self.order.choice(
            (
                r"[a-z]+\d{2,3}",
                r"(?:ab|ba)*",
                r"\d+(?:\.\d+)?",
                r"q\d_[01k]",
                r"[^aeiou]+",
                r"(\w)\w*\1",
                r"v\d+\.\d+",
                r"0x[0-9a-f]+",
                r"[A-Z]\w*Error",
            )
        )
        pool = [
            "abba",
            "ab12",
            "x",
            "q4_0",
            "q8_k",
            "v1.2",
            "0xff",
            "3.25",
            "0x",
            "InputError",
            "level",
            "rhythm",
            "baab",
            "kv16",
            "12.",
            "q5_1",
            "noon",
            "Error",
            "v10.03",
            "z999",
            "aba",
            "shy",
            "KeyError",
            "7",
            "sees",
            "fp8",
        ]
        strings = self.order.sample(pool, self.order.randint(5, 12))
        fits = [one for one in strings if re.fullmatch(pattern, one)]
        answer = (
            f"It takes {', '.join(fits)}, and refuses {', '.join(one for one in strings if one not in fits) or 'none'}."
            if fits
            else "It takes none of them."
        )
        return (
            self.order.choice(
                (
                    f"Which of {', '.join(strings)} does `{pattern}` take?",
                    f"I wrote the pattern `{pattern}`. Try it on {', '.join(strings)}.",
                )
            ),
            {"pattern": pattern, "strings": strings},
            json.dumps({one: bool(re.fullmatch(pattern, one)) for one in strings}),
            answer,
        )

    def digest(self) -> Question:
        name, algorithm = self.order.choice(self.python), self.order.choice(("sha256", "md5", "sha1", "blake2s"))
        lines = self.repository.files[name].splitlines()
        text = self.order.choice([line.strip() for line in lines if len(line.strip()) > 20])
        value = hashlib.new(algorithm, text.encode()).hexdigest()
        return (
            f"What is the {algorithm} of the line `{text}`?",
            {"text": text, "algorithm": algorithm},
            json.dumps({algorithm: value}),
            f"`{value}`.",
        )

    def section(self) -> Question:
        name, part = self.order.choice(self.pages)
        heading = part.splitlines()[0].lstrip("# ")
        body = part[:2600]
        words = len(part.split())
        ask = self.order.choice(
            (
                'What do the documents say about "{}"?',
                'Read me the section "{}".',
                'I forgot what "{}" means here. Look it up.',
            )
        ).format(heading)
        first = re.split(r"(?<=[.:])\s", re.sub(r"\s+", " ", part[len(part.splitlines()[0]) :]).strip())[0]
        return (
            ask,
            {"page": name, "heading": heading},
            body,
            f"The section has {words} words. Its first sentence: {first}",
        )

    def outline(self) -> Question:
        name = self.order.choice(self.python)
        found = [
            (number, line.strip().rstrip(":"))
            for number, line in enumerate(self.repository.files[name].splitlines(), 1)
            if re.match(r"\s*(?:async def|def|class) ", line)
        ]
        ask = self.order.choice(("Give me an outline of {}.", "What is in {}?", "How is {} organised?")).format(name)
        classes = sum(line.startswith("class") for _, line in found)
        return (
            ask,
            {"path": name},
            json.dumps(
                [{"line": number, "is": line[:140]} for number, line in found[:45]], indent=self.order.choice((None, 1))
            ),
            f"{name} has {len(found) - classes} functions and methods and {classes} classes"
            + (f"; the last begins at line {found[-1][0]}." if found else "."),
        )

    def exchange(self, weights: dict[str, float]) -> Iterator[list[Message]]:
        """Yield exchanges: a question, a call, a result, an answer, and now and then a failed call before."""
        number = 0
        while True:
            tool = self.order.choices(list(weights), list(weights.values()))[0]
            ask, arguments, result, answer = getattr(self, tool)()
            key = json.dumps([tool, arguments])
            if key in self.asked:
                continue
            self.asked.add(key)
            messages = [{"role": "user", "content": f"{self.order.choice(_THANKS)} {ask}".strip()}]
            if "path" in arguments and self.order.random() < 0.12:
                number += 1
                wrong = (
                    arguments["path"].replace("src/", "", 1)
                    if "src/" in arguments["path"]
                    else arguments["path"] + ".txt"
                )
                messages += self._call(
                    tool, {**arguments, "path": wrong}, json.dumps({"error": f"no file {wrong}"}), number
                )
            number += 1
            messages += self._call(tool, arguments, result, number)
            messages.append({"role": "assistant", "content": answer})
            yield messages

    def _call(self, tool: str, arguments: dict[str, Any], result: str, number: int) -> list[Message]:
        call = json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False)
        before = self.order.choice(_BEFORE)
        return [
            {"role": "assistant", "content": f"{before}\n<tool_call>\n{call}\n</tool_call>".strip()},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": result},
        ]


def build(repository: Repository, seed: int = 21) -> list[Document]:
    """Return the dialogues; each has tools and questions of its own."""
    text = "\n".join(repository.files[name] for name in repository.under("src/"))
    words = sorted({word for word in re.findall(r"\b[a-z]+_[a-z_]+\b", text) if 6 < len(word) < 28})
    documents = []
    asked: set[str] = set()
    for number, size in enumerate(sizes(3), 1):
        order = random.Random(f"{seed} {number}")
        desk = _Desk(repository, order, words, asked)
        tools = order.sample(list(_TOOLS), order.randint(6, 9) if size > 5000 else 5)
        for needed in ("read", "outline", "section"):  # results of some length, so that a dialogue has at most 40 turns
            if needed not in tools:
                tools.append(needed)
        weights = {"read": 4.0, "section": 4.0, "outline": 2.0, "search": 2.0, "lookup": 2.0}
        if size > 20000:
            weights["read"], desk.lengths = 9.0, (80, 110, 150, 190)
        elif size < 4000:
            weights, desk.lengths = {"read": 0.2, "section": 0.1, "outline": 0.1, "lookup": 0.1}, (10, 15)
        system = f"{order.choice(_SYSTEMS)}\n\nTools:\n" + "\n".join(f"- {_TOOLS[tool]}" for tool in tools)
        turns = desk.exchange({tool: weights.get(tool, 0.6) for tool in tools})
        documents.append(
            Document(
                "tool calls",
                f"tools-{number:02}",
                messages=conversed(turns, size, [{"role": "system", "content": system}]),
            )
        )
    return documents
