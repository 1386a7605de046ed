"""Source of each kind, as docs/long-contexts.md has it."""

SOURCES = {
    "tool calls": "seeded dialogues; every result is what the tool gave: search and reading in this repository, Python, JSON look-ups, units, tables",
    "code": "this repository: whole files, changes of its history, greps, output of failed tests",
    "logs": "recorded output of this project's commands, tests and linter, with times as seconds since the start, and its history",
    "long document": "this repository's documents, and a handbook of the docstrings of its modules",
    "tables and JSON": "this repository's schemas, golden records and tables, results of benchmarks, tables that a script computes",
    "mathematics": "exercises with every step, made and solved by a seeded script in exact numbers",
    "languages": "texts in 18 languages, written for this project",
    "chat": "dialogues of questions and answers that were written for this project, and of its documents",
}
