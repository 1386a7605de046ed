"""Documents of the kind ``chat``: dialogues of people with an assistant, about daily life, texts, numbers and this project."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

from scripts.agents_text.documents import Document, Message, conversed, shuffled, sizes
from scripts.agents_text.mathematics import exercises
from scripts.agents_text.prose import sections
from scripts.agents_text.repository import Repository, git

_HERE = Path(__file__).parent / "chat"
_SYSTEMS = (
    "You are a patient assistant. Answer plainly, and ask when a question has two meanings.",
    "You talk with a person over a long afternoon. Be brief unless asked for more.",
    "Answer as a friend would who happens to know. No lists unless they help.",
    "You help with study, household and work. Say so when you are not sure.",
)
_ASK_SECTION = (
    "What does your manual say about {}?", "Tell me about {}.", "{}: what is meant by that?", "Somebody mentioned {} yesterday. I nodded and understood nothing.",
    "Can you quote the part on {}?", "I need to explain {} to a colleague.", "Is there anything written on {}?", "Back to work. {}, please.",
)  # fmt: skip
_ASK_NAME = (
    "What is `{}` for?",
    "In one paragraph: `{}`.",
    "I stumbled over `{}`. Which promise does it make?",
    "What may I expect of `{}`?",
    "How would you describe `{}` to a newcomer?",
)
_READ_ON = (
    "Read on.", "And then?", "Next paragraph, please.", "Go ahead, I am listening.", "I like this. Continue.", "Hm. What follows?", "Wait, I have to fill the kettle. So, and after \"{}\"?",
    "You stopped at \"{}\".", "What comes after \"{}\"?", "\"{}\" is well put. More.", "I am not sure about \"{}\", but continue.", "Slowly. \"{}\". Yes. And now?",
)  # fmt: skip
_BETWEEN = (_HERE / "remarks.txt").read_text("utf-8").splitlines()


def pairs() -> list[tuple[str, str]]:
    """Return the questions and answers that were written for this text."""
    found = []
    for path in sorted(_HERE.glob("[et]*.txt")):
        for block in path.read_text("utf-8").strip().split("\n\n"):
            question, _, answer = block.partition("\n")
            found.append((question.strip(), answer.strip()))
    return found


def _told(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _described(repository: Repository) -> Iterator[tuple[str, str]]:
    for name in repository.under("src/", "k16v8/src/", "checkpoints/src/"):
        for node in ast.walk(ast.parse(repository.files[name])):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) > 220:
                    yield f"{Path(name).stem}.{node.name}", text


class _Talk:
    """What is still to be said; only questions and answers of the files come again, in another document."""

    def __init__(self, repository: Repository, seed: int) -> None:
        self.own = pairs()
        random.Random(seed).shuffle(self.own)
        self.at = 0
        self.described = list(_described(repository))
        random.Random(seed).shuffle(self.described)
        parts = [
            part
            for name in repository.under("docs/", suffix=".md")
            if "reference" not in name
            for part in sections(repository.files[name])
        ]
        self.parts = [part for part in shuffled(parts, seed) if 300 < len(part) < 2600]
        stories = (Path("src/fidelab/inputs/data/prose.md"), Path("src/fidelab/inputs/data/long.md"))
        texts = [
            part.strip()
            for path in stories
            for part in re.split(r"(?m)^(?=# )", git("show", f"{repository.revision}:{path}"))
            if part.strip()
        ]
        self.texts = shuffled(texts, seed)
        commits = git("log", "--format=%s%n%b%x00", repository.revision).split("\0")
        self.commits = [
            (body[0], body[1].strip())
            for one in shuffled(commits, seed)
            if len(body := one.strip().split("\n", 1)) == 2 and len(body[1]) > 120
        ]

    def exchanges(self, order: random.Random, weights: dict[str, float]) -> Iterator[list[Message]]:
        """Yield exchanges of one dialogue."""
        paragraphs: list[str] = []
        last = ""
        tasks = exercises(order)
        while True:
            what = order.choices(list(weights), list(weights.values()))[0]
            before = f"{order.choice(_BETWEEN)} " if order.random() < 0.3 else ""
            if what == "own":
                question, answer = self.own[self.at % len(self.own)]
                self.at += 1
                yield _told(before + question, answer)
            elif what == "read":
                if not paragraphs:
                    if not self.texts:
                        weights = {key: value for key, value in weights.items() if key != "read"}
                        continue
                    title, *paragraphs = self.texts.pop().split("\n\n")
                    first = paragraphs.pop(0)
                    last = first
                    yield _told(f'{before}Please read "{title.lstrip("# ")}" to me, one paragraph at a time.', first)
                else:
                    words = last.rstrip(".").split()
                    asked = order.choice(_READ_ON).format(" ".join(words[-order.randint(3, 7) :]))
                    last = paragraphs.pop(0)
                    yield _told(asked, last)
            elif what == "section" and self.parts:
                heading, _, body = self.parts.pop().partition("\n")
                yield _told(before + order.choice(_ASK_SECTION).format(heading.lstrip("# ").strip("`")), body.strip())
            elif what == "name" and self.described:
                name, text = self.described.pop()
                yield _told(before + order.choice(_ASK_NAME).format(name), text)
            elif what == "commit" and self.commits:
                subject, text = self.commits.pop()
                yield _told(f'{before}What was the reason for the change "{subject}"?', text)
            elif what == "task":
                task, _, solution = next(tasks).split(". ", 1)[1].partition("\n")
                if solution:
                    yield _told(before + task, solution)


def build(repository: Repository, seed: int = 81) -> list[Document]:
    """Return the dialogues; each leans to other topics."""
    talk = _Talk(repository, seed)
    documents = []
    for number, size in enumerate(sizes(3), 1):
        order = random.Random(f"{seed} {number}")
        weights = {"own": 2.0, "read": 2.0, "section": 0.55, "name": 0.7, "task": 0.8, "commit": 0.6}
        weights[order.choice(("own", "read", "task"))] += 1.0
        turns = talk.exchanges(order, weights)
        begin = [{"role": "system", "content": order.choice(_SYSTEMS)}] if number % 3 else []
        documents.append(Document("chat", f"chat-{number:02}", messages=conversed(turns, size, begin)))
    return documents
