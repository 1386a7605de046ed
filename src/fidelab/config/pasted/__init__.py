"""Read what people paste as a server's command: shell scripts, systemd units, Compose and Kubernetes files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from fidelab.config.pasted.manifests import is_manifest, read_manifest
from fidelab.config.pasted.notes import Notes
from fidelab.config.pasted.shell import CMD, POSIX, POWERSHELL, Shell, read_script, read_words
from fidelab.config.pasted.units import IS_UNIT, script_of_unit
from fidelab.config.pasted.wrappers import unwrap
from fidelab.core.errors import UsageError
from fidelab.engines.base import engines

__all__ = ["PastedCommand", "read_pasted", "read_pasted_flags", "unwrap_pasted"]

_QUOTES = {**dict.fromkeys("“”„‟″«»＂", '"'), **dict.fromkeys("‘’‚‛′＇", "'")}
_DASHES = "–—―−‐‑‒﹣－"
_LONG_DASHES = "—―"  # editors make these of two hyphens
_BLANKS = re.compile("[\u00a0\u2000-\u200a\u202f\u205f\u3000]")
_NOTHING = re.compile("[\u200b-\u200d\u2060\ufeff\u00ad]")
_FENCE = re.compile(r"(?m)^[ \t]*(?:```|~~~)[\w+-]*[ \t]*(?:\n|\Z)")
_HOST = (
    r"(?:\[[\w.-]+@[^\]\n]*\]|[\w.-]+@[\w.-]+[: ][^\s$#%>❯]*|PS [A-Za-z]:[^>\n]*|[A-Za-z]:\\[^>\n]*|(?:ba|z)?sh-[\d.]+)"
)
_PROMPT = re.compile(
    r"(?m)^[ \t]*(?:\([\w.:/ -]+\)[ \t]*)*"  # environments
    rf"(?:{_HOST}[ \t]*(?:[$#%❯➜][ \t]+|>[ \t]*)|[$%❯➜][ \t]+|![ \t]*(?=\w))"
)
_SECOND_PROMPT = re.compile(r"(?m)^>{1,2}[ \t]+")  # of a line that continues one; an indented one is a redirection
_POWERSHELL_SIGNS = re.compile(r"(?m)[ \t]`[ \t]*\n|\$env:\w+|^[ \t]*\$\w+[ \t]*=|^[ \t]*&[ \t]+[\"']?[A-Za-z.]")
_CMD_SIGNS = re.compile(r"(?mi)[ \t]\^[ \t]*\n|^[ \t]*@?set[ \t]+\"?[a-z_]\w*=|%[a-z_]\w*%|^@echo ")
_WINDOWS_PATHS = re.compile(r"(?<![\w\"'/])[\"']?[A-Za-z]:\\\w|(?:^|\s)\.{1,2}\\\w")
_OTHER_FORMS = (
    (re.compile(r"\A\s*(?:#[^\n]*\n\s*)*(?:FROM|ARG)\s+\S", re.MULTILINE), "a Dockerfile"),
    (re.compile(r"(?m)^\s*(?:ENTRYPOINT|CMD)\s+\["), "a Dockerfile"),
    (re.compile(r"\A\s*(?:#[^\n]*\n\s*)*\[(?:program:[^\]]+|Container|Unit)\]"), "a file of settings"),
    (re.compile(r"\A\s*#!\s*/\S*python|\A\s*(?:from \w[\w.]* import |import \w)"), "a Python program"),
    (re.compile(r"\A\s*\S+\.(?:yaml|yml|sh|txt|service)\s*\Z"), "the name of a file that is not here"),
)


@dataclass(frozen=True)
class PastedCommand:
    """A server's command as it was pasted.

    ``variables``: environment of the command.  ``words``: the server's words, or ``docker run … IMAGE …``.
    ``ignored``: parts that are not read → the reason.  ``translated``: parts as pasted → as they are read.
    ``secrets``: values of variables that no record may hold.
    """

    variables: Mapping[str, str]
    words: tuple[str, ...]
    ignored: Mapping[str, str] = field(default_factory=dict)
    translated: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()


def read_pasted(text: str, where: str) -> PastedCommand:
    """Return the server's command that a pasted text holds.  Nothing of it is run.

    ``read_pasted("$ export A=1\\n$ sudo numactl -N 0 vllm serve m 2>&1 | tee log", "--serve")`` has the variables
    ``{"A": "1"}`` and the words ``("vllm", "serve", "m")``; prompt, numactl and the pipe are in ``ignored``.

    Args:
        text: a command line, a script of a POSIX shell, PowerShell or cmd, a systemd unit, a Compose file, a Kubernetes
            manifest, or a fragment of these.
        where: the place of the text in messages.

    Raises:
        UsageError: If it is another form, has several commands, or has parts that would have to be run.
        ConfigError: If it looks like YAML and is not.
    """
    notes = Notes()
    text = _cleaned(text, notes)
    variables, words = dict[str, str](), list[str]()
    if IS_UNIT.search(text):
        variables, words = read_script(script_of_unit(text, where, notes), where, notes)
    elif (form := next((name for sign, name in _OTHER_FORMS if sign.search(text)), None)) is not None:
        raise UsageError(f"{where}: this is {form}; paste the command that starts the server")
    elif is_manifest(text):
        variables, words = read_manifest(text, where, notes)
    else:
        text = _without_prompts(text, notes)
        shell = _shell_of(text)
        if shell is not POSIX:
            notes.translated[f"{shell.name} command line"] = "the same command for Linux"
        variables, words = read_script(text, where, notes, shell)
    return _pasted(variables, words, where, notes)


def unwrap_pasted(words: Sequence[str], variables: Mapping[str, str], where: str) -> PastedCommand:
    """Return the command in a container without the programs that start it: ``sh -c 'vllm serve m'``.

    ``variables``: the container's.

    Raises:
        UsageError: As :func:`read_pasted`.
    """
    return _pasted({}, words, where, Notes(), variables)


def read_pasted_flags(text: str, where: str) -> PastedCommand:
    """Return variables and flags of a text without a program: ``A=1 --kv-cache-dtype fp8``.

    Raises:
        UsageError: If the text is more than one command.
    """
    notes = Notes()
    variables, words = read_words(_cleaned(text, notes), where, notes)
    return PastedCommand(variables, _straight(words, notes), notes.ignored, notes.translated, tuple(notes.secrets))


def _pasted(
    variables: Mapping[str, str],
    words: Sequence[str],
    where: str,
    notes: Notes,
    context: Mapping[str, str] | None = None,
) -> PastedCommand:
    sets, rest = unwrap(_straight(words, notes), where, notes, {**(context or {}), **variables})
    straight = _straight(rest, notes)  # those of a script in quotes, too
    return PastedCommand({**variables, **sets}, straight, notes.ignored, notes.translated, tuple(notes.secrets))


def _cleaned(text: str, notes: Notes) -> str:
    """Return a text with plain quotes, blanks and line ends, without the fences of a code block."""
    text = _NOTHING.sub("", _BLANKS.sub(" ", text.replace("\r\n", "\n").replace("\r", "\n")))
    if typed := sorted({sign for sign in text if sign in _QUOTES}):
        notes.translated[f"typographic quotes {' '.join(typed)}"] = "plain quotes " + " ".join(
            sorted({_QUOTES[sign] for sign in typed})
        )
        text = text.translate({ord(sign): plain for sign, plain in _QUOTES.items()})
    if (body := text.strip()).startswith("`") and body.endswith("`") and body.count("`") == 2:
        text = body[1:-1]  # a command in running text
    return _FENCE.sub("", text)


def _without_prompts(text: str, notes: Notes) -> str:
    """Return a script without the prompts of a shell in front of its lines."""
    found = [*_PROMPT.finditer(text)]
    if found or text.lstrip().startswith(">"):
        found += _SECOND_PROMPT.finditer(text)
        text = _SECOND_PROMPT.sub("", text)
    prompts = {match[0].strip() for match in found}
    text = _PROMPT.sub("", text)
    first, _, rest = text.strip().partition("\n")
    if first.startswith("# ") and (not rest or first.rstrip().endswith("\\")):  # else it is a comment
        prompts.add("#")
        text = text.strip().removeprefix("# ")
    notes.ignored.update(dict.fromkeys(sorted(prompts), "prompt of a shell"))
    return text


def _shell_of(text: str) -> Shell:
    """Return the shell that a text is written for, by signs that the others do not have."""
    if re.search(r"\\[ \t]*\n", text):
        return POSIX
    if _CMD_SIGNS.search(text):
        return CMD
    return POWERSHELL if _POWERSHELL_SIGNS.search(text) or _WINDOWS_PATHS.search(text) else POSIX


@cache
def _short_flags() -> frozenset[str]:
    """All flags of known servers that begin with one dash."""
    dialects = [cls.dialect for cls in engines() if cls.dialect is not None]
    names = (flag for dialect in dialects for flag in (*dialect.short, *dialect.spellings))
    short = {flag for flag in names if not flag.startswith("--")}
    return frozenset(short | {"-it", "-ti", "-itd", "-dit", "-np"})  # and those of docker and mpirun


def _straight(words: Sequence[str], notes: Notes) -> tuple[str, ...]:
    """Return words whose flags begin with hyphens, where an editor has made other dashes of them."""
    return tuple(_straight_word(word, notes) for word in words)


def _straight_word(word: str, notes: Notes) -> str:
    head = re.match(rf"[-{_DASHES}]+", word)
    if head is None or not any(sign in _DASHES for sign in word.partition("=")[0]):
        return word
    name, equals, value = word[head.end() :].partition("=")
    name = re.sub(rf"[{_DASHES}]", "-", name)
    count = sum(2 if sign in _LONG_DASHES else 1 for sign in head[0])
    single = len(name) == 1 or name[:1].isdigit() or (count == 1 and f"-{name}" in _short_flags())
    plain = f"{'-' if single else '--'}{name}{equals}{value}"
    notes.translated[f"{word.partition('=')[0]} (typographic dash)"] = plain.partition("=")[0]
    return plain
