"""Natural mistakes on a command line, each with what to type: by meaning, then by beginning, then by letters.

The words that mean something are in :mod:`fidelab.core.meant`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from fidelab.core.errors import MAX_LISTED, nearest_first
from fidelab.core.meant import COMMAND_WORDS, OPTION_WORDS, SAME

_OPTION = re.compile(r"(?<![\w-])(--?[a-z][a-z0-9-]*)")
_EXTRA = re.compile(r"unexpected extra arguments?(?:\(s\))? \((.*)\)", re.IGNORECASE)
_FILES = (".gguf", ".safetensors")


def explain(error: Any, argv: Sequence[str]) -> str:
    """Return the message for an error of typer's parser; empty if it printed the help.

    Args:
        error: ClickException, with its context where it has one.
        argv: the words after ``fidelab``.
    """
    text = str(error.format_message()).strip().rstrip(".")
    context = getattr(error, "ctx", None)
    if context is None or not text:
        return f"{text} (see: fidelab --help)" if text else ""
    option = getattr(error, "option_name", None)
    if option is not None and "no such option" in text.lower():
        return _unknown_option(context, str(option), argv)
    if extra := _EXTRA.search(text):
        return _extra_words(context, extra[1].split(), argv)
    if text.lower().startswith("no such command"):
        word = text.partition("'")[2].rpartition("'")[0]
        return f"no command '{context.command_path} {word}' (see: {context.command_path} --help)"
    text = text.replace("Invalid value for ", "").replace(
        "Input should be a valid integer, unable to parse string as an integer", "write a whole number"
    )
    return f"{text[:1].lower()}{text[1:]} (see: {context.command_path} --help)"


# ------------------------------------------------------------------------------------------------- options


def _unknown_option(context: Any, option: str, argv: Sequence[str]) -> str:
    """Return the message for an option that a command does not have; parsers may name the first letter alone."""
    typed, value = _as_typed(option, argv)
    key = _dashed(typed)
    known = [*_options(context.command)]
    where = f"no option {typed} for {context.command_path}"
    if key in known:
        return f"{where}: write {key}{f' {value}' if value else ''}"
    if context.parent is None and key in OPTION_WORDS:
        return f"{where}: a command comes first, as in {context.command_path} compare MODEL --kv FORMAT"
    if hint := _meaning(context, key, value, known):
        return f"{where}: write {hint}"
    if others := [path for path, options in _all_options(context) if key in options]:
        return f"{where}: it is an option of {' and '.join(others[:2])}"
    if near := _near(key, known):
        return f"{where}; did you mean {' or '.join(near)}? (see: {_help(context)})"
    return f"{where} (see: {_help(context)})"


def joined_short(words: Sequence[str]) -> str | None:
    """Return the first word such as ``-ctk`` that other tools have and that is not read here as single letters."""
    for n, word in enumerate(words):
        name = word.partition("=")[0]
        before = words[n - 1] if n else ""
        if re.fullmatch(r"-[a-z]{2,}", name) and name in OPTION_WORDS and before not in ("--change", "--serve"):
            return name
    return None


def unknown_joined(context: Any, words: Sequence[str]) -> str:
    """Return the message for a short option of other tools; empty if there is none among the words."""
    option = joined_short(words)
    return "" if option is None else _unknown_option(context, option, words)


def _help(context: Any) -> str:
    has_all = any("--help-all" in parameter.opts for parameter in context.command.params)
    return f"{context.command_path} {'--help-all' if has_all else '--help'}"


def _dashed(option: str) -> str:
    """Return the option in small letters with dashes: ``--cache_type_k`` is ``--cache-type-k``."""
    lead = "--" if option.startswith("--") else "-"
    return lead + option.removeprefix(lead).lower().replace("_", "-")


def _as_typed(option: str, argv: Sequence[str]) -> tuple[str, str]:
    """Return the word that was typed, without its value, and the value."""
    for n, word in enumerate(argv):
        name, equals, value = word.partition("=")
        short = not option.startswith("--") and name.startswith("-") and not name.startswith("--")
        if name == option or (short and (name.startswith(option) or _dashed(name) in OPTION_WORDS)):
            following = argv[n + 1] if n + 1 < len(argv) and not argv[n + 1].startswith("-") else ""
            return name, value if equals else following
    return option, ""


def _meaning(context: Any, key: str, value: str, known: Sequence[str]) -> str:
    """Return what an option of another tool is called here; empty where this command has nothing of the kind."""
    hint = OPTION_WORDS.get(key, "")
    named = _OPTION.findall(hint)
    if not hint or (named and named[0] not in known and "fidelab" not in hint):
        return ""
    value = value.strip("'\"")
    fields = {
        "value": value or "VALUE",
        "format": _same(value) if value else "FORMAT",
        "name": key.lstrip("-"),
        "command": context.command_path.partition(" ")[2],
    }
    return hint.format(**fields)


def _same(name: str) -> str:
    """Return the first of the names of one format."""
    return next((names[0] for names in SAME if name.lower() in names), name)


def _near(key: str, known: Sequence[str]) -> list[str]:
    """Return the nearest options: those that begin so or are contained, else those of similar letters."""
    word = key.lstrip("-")
    begin = [name for name in known if name.startswith("--") and name[2:].startswith(word) and len(word) > 2]
    similar = get_close_matches(key, known, n=3, cutoff=0.7)
    return nearest_first(key, dict.fromkeys([*begin, *similar]))[:3]


def _options(command: Any) -> Iterator[str]:
    for parameter in command.params:
        if not getattr(parameter, "hidden", False):
            yield from (name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("-"))


def _all_options(context: Any) -> Iterator[tuple[str, set[str]]]:
    """Yield each command's words with its options."""
    root = context.find_root()

    def below(command: Any, path: str) -> Iterator[tuple[str, set[str]]]:
        for name, inner in getattr(command, "commands", {}).items():
            if not inner.hidden:
                yield f"{path} {name}", {*_options(inner)}
                yield from below(inner, f"{path} {name}")

    return below(root.command, root.command_path)


# --------------------------------------------------------------------------------------------- extra words


def _extra_words(context: Any, extra: Sequence[str], argv: Sequence[str]) -> str:
    """Return the message for words that belong to no option: a second value, or a second model."""
    word = extra[0].strip("'\",")
    path = context.command_path
    if (owner := _owner(context, word, argv)) is not None:
        flag, values, several = owner
        if several == "repeat":
            return f"{flag} takes one value: repeat it, as in {' '.join(f'{flag} {value}' for value in values)}"
        if several == "list":
            return f"{flag} takes a list without blanks: {flag} {','.join(values)}"
        return f"{flag} takes one value: leave out {word}"
    if "--candidate" in _options(context.command) and (word.endswith(_FILES) or "/" in word):
        return f"one MODEL is the reference of {path}: write --candidate model={word}"
    return f"no further word belongs to {path}: leave out {word} (see: {_help(context)})"


def _owner(context: Any, word: str, argv: Sequence[str]) -> tuple[str, list[str], str] | None:
    """Return the option that a word follows as a second value, all its values, and how it takes several."""
    if word not in argv:
        return None
    place = argv.index(word)
    begin = next((n for n in range(place - 1, -1, -1) if argv[n].startswith("-")), None)
    if begin is None or place - begin < 2:
        return None
    flag, end = argv[begin], place
    while end < len(argv) and not argv[end].startswith("-"):
        end += 1
    parameter = next((one for one in context.command.params if flag in one.opts), None)
    if parameter is None or getattr(parameter, "is_flag", False):
        return None
    metavar = str(parameter.metavar or "")
    listed = "," in metavar or "comma-separated" in str(parameter.help) or re.search(r"\w,\w", str(parameter.help))
    several = "repeat" if getattr(parameter, "multiple", False) else "list" if listed else "one"
    return flag, list(argv[begin + 1 : end]), several


# ------------------------------------------------------------------------------------------------ commands


def unknown_command(context: Any, word: str, paths: Iterable[tuple[str, str]]) -> str:
    """Return the message for a word that is not a command; empty if nothing is known of it.

    Args:
        paths: name of each command below the group, then of all, with the words that call it.
    """
    root = context.find_root().command_path
    below = f"{context.command_path} ".partition(" ")[2]
    where = f"no command '{context.command_path} {word}'"
    if meant := COMMAND_WORDS.get(f"{below}{word}".lower()):
        return f"{where}; did you mean: {root} {meant}"
    if not below and (word.endswith(_FILES) or "/" in word or word.startswith("smollm2")):
        return f"{where}; did you mean: {root} compare {word} --kv FORMAT"
    known = [*paths]
    for inside in (context.command_path, root):
        names = [name for name, path in known if path.startswith(f"{inside} ")]
        if near := get_close_matches(word.lower(), {*names}, 1):
            found = [path for name, path in known if name == near[0] and path.startswith(f"{inside} ")]
            return f"{where}; did you mean: {' or '.join(found[:MAX_LISTED])}"
    return ""
