"""Read the text of a shell script as one command: what a shell would set, expand and start. Nothing is run.

Three shells are read: POSIX, PowerShell and cmd.  They differ in how a line continues, how a character is escaped and
how a variable is written.  Features that would have to be run are refused by their name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from fidelab.config.pasted.notes import Notes, is_secret_name, secret_words, shorten
from fidelab.core.errors import UsageError


class Quote(Enum):
    """How a shell reads a piece of a word: ``PLAIN`` is split after expansion, ``LITERAL`` is not expanded."""

    PLAIN = 0
    DOUBLE = 1
    LITERAL = 2


class Piece(NamedTuple):
    """A piece of a word with one kind of quotes."""

    text: str
    quote: Quote


Word = tuple[Piece, ...]


@dataclass
class Statement:
    """A command of a script with the operator before it.

    ``arrays``: name of an array that it sets → its words.  ``redirects``: as written.
    """

    before: str = ""
    words: list[Word] = field(default_factory=list)
    arrays: dict[str, list[Word]] = field(default_factory=dict)
    redirects: list[str] = field(default_factory=list)


class Command(NamedTuple):
    """The one command of a script: variables that it gets, and its words."""

    variables: dict[str, str]
    words: list[str]


_POSIX_TOKENS = r"""
    (?P<join>(?<!\S)\\[ \t]*(?:\#[^\n]*)?(?:\n|\Z)(?:[ \t]*\#[^\n]*\n)*|\\[ \t]*(?:\n|\Z)(?:[ \t]*\#[^\n]*\n)*
      |(?<!\S)\\[ \t]+(?=--?[A-Za-z]))
  | (?P<single>'[^']*')
  | (?P<double>"(?:\\.|[^"\\])*")
  | (?P<escape>\\.)
"""
_POWERSHELL_TOKENS = r"""
    (?P<join>`[ \t]*(?:\n|\Z))
  | (?P<single>'(?:[^']|'')*')
  | (?P<double>"(?:`.|[^"`])*")
  | (?P<escape>`.)
"""
_CMD_TOKENS = r"""
    (?P<join>\^[ \t]*(?:\n|\Z))
  | (?P<double>"(?:\\"|[^"\n])*")
  | (?P<escape>\^.)
  | (?P<variable>%\w+%)
"""
_SHARED_TOKENS = r"""
  | (?P<comment>(?<![^\s;&|()])\#[^\n]*)
  | (?P<runs>\$\(|`|[<>]\()
  | (?P<parameter>\$\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\$env:\w+)
  | (?P<placeholder><[A-Za-z][\w ./-]*>)
  | (?P<document><<<|<<-?)
  | (?P<redirect>&>>?|(?:(?<!\S)\d)?(?:>>|>\||>&|<&|>|<))
  | (?P<operator>&&|\|\||;;|\|&|[;|&()\n])
  | (?P<blank>[ \t]+)
  | (?P<quote>["'])
  | (?P<other>[^\s'"\\#$`<>&;|()^%]+|.)
"""


@dataclass(frozen=True)
class Shell:
    """How a shell writes its commands.  ``escape``: its character before another one that is meant as such."""

    name: str
    tokens: re.Pattern[str]
    escape: str

    @classmethod
    def of(cls, name: str, own: str, escape: str) -> Shell:
        """Return a shell with the tokens that only it has, before those that all have."""
        return cls(name, re.compile(own + _SHARED_TOKENS, re.VERBOSE | re.DOTALL), escape)


POSIX = Shell.of("sh", _POSIX_TOKENS, "\\")
POWERSHELL = Shell.of("PowerShell", _POWERSHELL_TOKENS, "`")
CMD = Shell.of("cmd", _CMD_TOKENS, "^")

_KEYWORDS = {
    **dict.fromkeys(("for", "while", "until", "select", "do", "done", "foreach"), "a loop"),
    **dict.fromkeys(("if", "then", "elif", "else", "fi", "case", "esac", "[", "[[", "test"), "a condition"),
    **dict.fromkeys(("function", "{", "}", "return"), "a function or a block"),
    **dict.fromkeys(("eval", "alias"), "a command made of text"),
}
# Commands around a server's that change nothing in what it computes.
_SIDE_COMMANDS = frozenset(
    (
        *(
            ":",
            "::",
            ".",
            "activate",
            "alias",
            "apt",
            "apt-get",
            "cat",
            "cd",
            "chcp",
            "chmod",
            "clear",
            "conda",
            "curl",
        ),
        *("date", "deactivate", "docker", "docker-compose", "echo", "endlocal", "git", "hf", "huggingface-cli", "jobs"),
        *("journalctl", "ls", "mamba", "micromamba", "mkdir", "modelscope", "module", "nerdctl", "nvidia-smi", "pause"),
        *("pip", "pip3", "pixi", "podman", "poetry", "popd", "printf", "pushd", "pwd", "read", "rem", "setlocal"),
        *("shift", "shopt", "sleep", "source", "systemctl", "tail", "tee", "title", "trap", "true", "ulimit", "umask"),
        *("uname", "uv", "wait", "wget", "which", "whoami"),
    )
)
# Programs that run a command with these words after them; with other words they are side commands.
_STARTERS = {
    **dict.fromkeys(("docker", "podman", "nerdctl"), ("run", "exec", "container", "compose")),
    "docker-compose": ("exec", "run", "up"),
    **dict.fromkeys(("conda", "mamba", "micromamba", "poetry", "pixi"), ("run",)),
    "uv": ("run", "tool"),
}
_READS_OUTPUT = (
    "tee",
    "cat",
    "ts",
    "less",
    "more",
    "grep",
    "egrep",
    "rg",
    "head",
    "tail",
    "logger",
    "sed",
    "awk",
    "jq",
)
_MOST_CHARACTERS = 100_000
_NOT_RUN = "not run: only the server's command is read"
_OUTPUT = "concerns the server's output"
_ASSIGNMENT = re.compile(r"(?:\$env:)?([A-Za-z_]\w*)(\+?)=")
_PARAMETER = re.compile(
    r"\$\{(?P<braced>[A-Za-z_]\w*)\}|\$\{(?P<either>[A-Za-z_]\w*)(?P<operator>:?[-=?+])(?P<other>(?:[^{}]|\{[^{}]*\})*)\}"
    r"|\$env:(?P<windows>\w+)|\$(?P<name>[A-Za-z_]\w*)|%(?P<percent>\w+)%|(?P<special>\$(?:\{[^}]*\}?|[\d@*#?!$-]))",
    re.DOTALL,
)
_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")


def read_script(
    text: str, where: str, notes: Notes, shell: Shell = POSIX, variables: Mapping[str, str] | None = None
) -> Command:
    """Return the only server's command of a script, with what lines before it set.

    ``variables``: those that are set before the script, beside this process's.  Only exported variables and those in
    front of the command are the command's.

    Raises:
        UsageError: If it has several commands, or features that would have to be run.
    """
    return _Script(where, notes, shell, dict(variables or {})).read(text)


def read_words(text: str, where: str, notes: Notes) -> Command:
    """Return the variables and the words of a text that is a part of a command: ``A=1 --kv-cache-dtype fp8``.

    Raises:
        UsageError: If it has operators of a shell, or parts that would have to be run.
    """
    script = _Script(where, notes, POSIX, {})
    found = [
        each for each in statements(text, where) if each.words or each.arrays or each.redirects or each.before.strip()
    ]
    for statement in found:
        if sign := next(iter(statement.redirects), "(" if statement.arrays else statement.before.strip()):
            raise UsageError(f"{where}: {sign.split()[0]!r} is shell syntax; paste flags alone, {_WITH_QUOTES}")
    return script.command([word for statement in found for word in statement.words])


@dataclass
class _Script:
    """The state of a script while it is read."""

    where: str
    notes: Notes
    shell: Shell
    values: dict[str, str]
    arrays: dict[str, list[str]] = field(default_factory=dict)
    exported: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    exports_all: bool = False

    def read(self, text: str) -> Command:
        """Return the command of the whole text."""
        command: list[Word] = []
        expanded: list[str] = []
        own: dict[str, str] = {}
        for statement in statements(text, self.where, self.shell):
            words = self._without_echo_sign(statement.words)
            self._take_arrays(statement)
            plain = [_plain(word) for word in words]
            if statement.before == "&" and command:
                self.notes.ignored["&"] = "the server would run in the background"
            if not words:
                continue
            if plain[0] in _KEYWORDS:
                raise UsageError(
                    f"{self.where}: the script has {_KEYWORDS[plain[0]]} ({plain[0]}), which is not run; "
                    "paste the server's command with its values filled in"
                )
            if self._sets_variables(words, plain) or self._is_side_command(statement, plain, bool(command)):
                continue
            for redirect in statement.redirects:
                if redirect.startswith("<"):
                    raise UsageError(f"{self.where}: {redirect.split()[0]!r} is not read; leave out the input")
                self.notes.ignored[redirect] = _OUTPUT
            if (
                plain[0].startswith("-") and command and statement.before == "\n"
            ):  # no command begins with a dash: the backslash was lost
                self.notes.translated[f"line {plain[0].partition('=')[0]} …"] = "joined with the line above"
                expanded += self._expanded(words)
                continue
            if command:
                raise UsageError(
                    f"{self.where}: more than one command: {plain[0]!r} comes after {_plain(command[0])!r}; paste one"
                )
            own, expanded = self.command(words)
            command = words[len(own) :]
        for name, value in self.values.items():
            if name not in self.exported and name not in self.used and value:
                shown = name if is_secret_name(name) else f"{name}={value}"
                self.notes.ignored.setdefault(shown, "set without export: the server does not see it")
        return Command({**self.exported, **own}, expanded)

    def command(self, words: list[Word]) -> Command:
        """Return the variables in front of a command, and its words with the values of variables."""
        own: dict[str, str] = {}
        at = 0
        while at < len(words) and (match := _assigned(words[at])):
            own[match[1]] = self._value(words[at], match)
            at += 1
        return Command(own, self._expanded(words[at:]))

    def _without_echo_sign(self, words: list[Word]) -> list[Word]:
        """Return words without cmd's ``@``, which only hides a line."""
        if self.shell is CMD and words and _plain(words[0]).startswith("@"):
            first = Piece(words[0][0].text[1:], words[0][0].quote)
            return [(first, *words[0][1:]), *words[1:]]
        return words

    def _take_arrays(self, statement: Statement) -> None:
        for name, words in statement.arrays.items():
            before = self.arrays.get(name.removesuffix("+"), []) if name.endswith("+") else []
            self.arrays[name.removesuffix("+")] = [*before, *self._expanded(words)]
            check_length(" ".join(self.arrays[name.removesuffix("+")]), self.where)

    def _sets_variables(self, words: list[Word], plain: list[str]) -> bool:
        """Take a statement that only sets variables or options of the shell."""
        if self._sets_variable_of_windows(words, plain):
            return True
        first, rest = plain[0], words[1:]
        if first == "set":
            self.exports_all = "-a" in plain or (self.exports_all and "+a" not in plain)
            return True
        if first == "unset":
            for name in plain[1:]:
                self.values.pop(name, None)
                self.exported.pop(name, None)
            return True
        exports = first == "export" or (first in ("declare", "typeset") and "-x" in plain)
        declares = exports or first in ("declare", "typeset", "local", "readonly")
        if not declares and not all(_assigned(word) for word in words):
            return False
        for word in rest if declares else words:
            if match := _assigned(word):
                self._set(match[1], self._value(word, match), exported=exports or word[0].text.startswith("$env:"))
            elif exports and (name := _plain(word)) in self.values:
                self.exported[name] = self.values[name]
        return True

    def _sets_variable_of_windows(self, words: list[Word], plain: list[str]) -> bool:
        """Take ``$env:A = 'b'`` of PowerShell and ``set A=b`` of cmd."""
        first = plain[0]
        if self.shell is POWERSHELL and len(words) > 2 and plain[1] == "=" and first.startswith("$"):
            name, value = first.removeprefix("$env:").removeprefix("$"), " ".join(self._expanded(words[2:]))
            self._set(name, value, exported=first.startswith("$env:"))
            return True
        if self.shell is CMD and first.lower() == "set":
            name, _, value = " ".join(plain[1:]).partition("=")
            self._set(name.strip(), self._substituted(value, secret=is_secret_name(name)), exported=True)
            return True
        return False

    def _set(self, name: str, value: str, *, exported: bool) -> None:
        check_length(value, self.where)
        self.values[name] = value
        if exported or self.exports_all or name in self.exported:
            self.exported[name] = value
        elif is_secret_name(name):
            self.notes.secrets.append(value)

    def _is_side_command(self, statement: Statement, plain: list[str], found: bool) -> bool:
        """Note a command that is not the server's."""
        if plain[0] == "sudo":
            plain = plain[next((n for n, word in enumerate(plain) if n and not word.startswith("-")), 0) :]
        first = plain[0].rpartition("/")[2].lower()
        if statement.before in ("|", "|&") and found and first in _READS_OUTPUT:
            self.notes.ignored[f"| {first}{' …' if plain[1:] else ''}"] = _OUTPUT
            return True
        if first not in _SIDE_COMMANDS or (len(plain) > 1 and plain[1] in _STARTERS.get(first, ())):
            return False
        reason = "not run: paths are read from the current folder" if first in ("cd", "pushd") else _NOT_RUN
        self.notes.ignored[f"{first} …" if plain[1:] else first] = reason  # its words may hold a key
        return True

    # ------------------------------------------------------------------------------------------- expansion

    def _value(self, word: Word, match: re.Match[str]) -> str:
        """Return the value of an assignment, which is not split."""
        rest = (Piece(word[0].text[match.end() :], word[0].quote), *word[1:])
        secret = is_secret_name(match[1])
        text = "".join(self._piece(piece, secret=secret) for piece in rest)
        text = _home(text) if rest[0].quote is Quote.PLAIN else text
        return self.values.get(match[1], "") + text if match[2] else text

    def _piece(self, piece: Piece, *, secret: bool) -> str:
        return piece.text if piece.quote is Quote.LITERAL else self._substituted(piece.text, secret=secret)

    def _expanded(self, words: Sequence[Word]) -> list[str]:
        """Return the words of a command with its variables' values."""
        found: list[str] = []
        raw = ["".join(piece.text for piece in word) for word in words]
        for word, secret in zip(words, secret_words(raw), strict=True):
            if len(word) == 1 and word[0].quote is not Quote.LITERAL and (array := _ARRAY.fullmatch(word[0].text)):
                if array[1] not in self.arrays:
                    raise UsageError(f"{self.where}: {word[0].text} is not set here; write its values")
                found += self.arrays[array[1]]
            else:
                found += self._split(word, secret)
        return found

    def _split(self, word: Word, secret: bool) -> list[str]:
        """Return the words that a shell makes of one: values of variables outside of quotes are split at blanks."""
        done: list[str] = []
        current: str | None = None
        for n, piece in enumerate(word):
            text = self._piece(piece, secret=secret)
            if piece.quote is not Quote.PLAIN or text == piece.text or self.shell is not POSIX:
                text = _home(text) if piece.quote is Quote.PLAIN and n == 0 else text
                current = (current or "") + text
                continue
            for m, part in enumerate(re.split(r"\s+", text)):
                if m and current is not None:
                    done.append(current)
                    current = None
                current = (current or "") + part if part else current
        return done if current is None else [*done, current]

    def _substituted(self, text: str, *, secret: bool = False) -> str:
        """Replace variables in a text by their values.

        ``secret``: the text holds a key or a token, whose variable need not be set here.

        Raises:
            UsageError: If a variable is not set, or holds a secret where none belongs.
        """

        def value(match: re.Match[str]) -> str:
            name = match["braced"] or match["either"] or match["windows"] or match["name"] or match["percent"]
            if bool(match["percent"]) is not (self.shell is CMD):  # no variable in this shell
                return match[0]
            if name is None:
                special = match["special"]
                if special in ("$@", "$*", "${@}", "${*}"):
                    self.notes.ignored[special] = "arguments of the script: none are known here"
                    return ""
                if re.fullmatch(r"\$\{?\d\}?", special):
                    raise UsageError(f"{self.where}: {special} is an argument of the script; write its value")
                raise UsageError(f"{self.where}: {shorten(special)} is not read; write its value")
            self.used.add(name)
            found = self.values.get(name, os.environ.get(name))
            operator = match["operator"] or ""
            if operator and (found is None or (not found and operator.startswith(":"))):
                found = None if operator.endswith("?") else "" if operator.endswith("+") else match["other"]
                found = found and self._substituted(found, secret=secret)
            elif operator.endswith("+"):
                found = self._substituted(match["other"], secret=secret)
            if secret:
                return match[0] if found is None or name not in self.values else found
            if is_secret_name(name):
                raise UsageError(f"{self.where}: ${name} is a secret, which the report would show; remove that flag")
            if found is None:
                raise UsageError(f"{self.where}: ${name} is not set here; write its value")
            return found

        return _PARAMETER.sub(value, text)


def check_length(value: str, where: str) -> None:
    """Refuse a value that no command line has: variables of variables may grow without end.

    Raises:
        UsageError: If it is longer than 100,000 characters.
    """
    if len(value) > _MOST_CHARACTERS:
        raise UsageError(f"{where}: a variable has more than {_MOST_CHARACTERS:,} characters; write its value")


def _plain(word: Word) -> str:
    """The text of a word as written, without its quotes."""
    return "".join(piece.text for piece in word)


def _assigned(word: Word) -> re.Match[str] | None:
    return _ASSIGNMENT.match(word[0].text) if word and word[0].quote is Quote.PLAIN else None


def _home(text: str) -> str:
    return re.sub(r"^((?:--?[\w-]+=)?)~(?=/|$)", lambda match: f"{match[1]}{Path.home()}", text)


# --------------------------------------------------------------------------------------------- statements and words


def statements(text: str, where: str, shell: Shell = POSIX) -> Iterator[Statement]:
    """Split a script into its commands, without comments.

    Raises:
        UsageError: If a quote is not closed, or the script has a substitution, a here-document or a subshell.
    """
    current = Statement()
    array: list[Word] | None = None
    redirect = ""
    for token in _tokens(text, where, shell):
        if isinstance(token, tuple):
            if array is not None:
                array.append(token)
            elif redirect:
                current.redirects.append(f"{redirect}{'' if redirect.endswith('&') else ' '}{_plain(token)}")
                redirect = ""
            else:
                current.words.append(token)
        elif array is not None:
            array = None if token == ")" else array
        elif token == "(" and current.words and (name := re.fullmatch(r"(\w+\+?)=", _plain(current.words[-1]))):
            current.words.pop()
            array = current.arrays[name[1]] = []
        elif token in ("(", ")"):
            raise UsageError(f"{where}: {token!r} is shell syntax; paste only the server's command, {_WITH_QUOTES}")
        elif token == "&" and shell is POWERSHELL and not current.words:
            continue  # its operator that calls what follows
        elif token[-1] in "<>&|" and token not in ("&", "&&", "|", "||", "|&"):
            redirect = token
        else:
            yield current
            current = Statement(before=token)
    yield current


_WITH_QUOTES = "with quotes around values that hold such signs"


def _tokens(text: str, where: str, shell: Shell) -> Iterator[Word | str]:
    """Yield words, and operators as text."""
    pieces: list[Piece] = []
    for match in shell.tokens.finditer(text):
        kind, written = str(match.lastgroup), match[0]
        if kind in ("join", "blank", "comment", "redirect", "operator") and pieces:
            yield _merged(pieces)
            pieces = []
        if kind in ("redirect", "operator"):
            yield written
        elif kind in ("single", "double", "escape"):
            pieces += _quoted(kind, written, where, shell)
        elif kind == "runs":
            shown = "`" if written == "`" else f"{written}…)"
            raise UsageError(f"{where}: {shown} runs a command; write its result instead")
        elif kind == "document":
            raise UsageError(f"{where}: {written} begins a here-document; paste only the server's command")
        elif kind == "placeholder":
            raise UsageError(f"{where}: {written} is a placeholder; write its value")
        elif kind == "quote" and shell is not CMD:
            raise UsageError(f"{where}: the command cannot be split into words: no closing quotation")
        elif kind in ("parameter", "variable", "other", "quote"):
            pieces.append(Piece(written, Quote.PLAIN))
    if pieces:
        yield _merged(pieces)


def _quoted(kind: str, written: str, where: str, shell: Shell) -> Iterator[Piece]:
    """Yield the pieces of a text in quotes, and of an escaped character."""
    if kind == "escape":
        yield Piece(written[1:], Quote.LITERAL)
    elif kind == "single":
        inner = written[1:-1]
        yield Piece(inner.replace("''", "'").replace('\\"', '"') if shell is POWERSHELL else inner, Quote.LITERAL)
    else:
        inner = written[1:-1]
        if shell is CMD:
            yield Piece(inner.replace('\\"', '"'), Quote.DOUBLE)
            return
        escaped = re.escape(shell.escape)
        if not inner:
            yield Piece("", Quote.DOUBLE)  # an empty word
        for match in re.finditer(rf"(?s){escaped}(.)|\$\(|`|(?:(?!{escaped}|\$\(|`).)+", inner):
            if match[1] is not None:
                kept = shell is POSIX and match[1] not in '"\\$`\n'
                yield Piece(match[0] if kept else match[1].removesuffix("\n"), Quote.LITERAL)
            elif match[0] in ("$(", "`"):
                shown = "`" if match[0] == "`" else "$(…)"
                raise UsageError(f"{where}: {shown} runs a command; write its result instead")
            else:
                yield Piece(match[0], Quote.DOUBLE)


def _merged(pieces: Sequence[Piece]) -> Word:
    """Join neighbours with the same quotes, so that a name and its ``=`` are one piece."""
    merged: list[Piece] = []
    for piece in pieces:
        if merged and merged[-1].quote is piece.quote:
            merged[-1] = Piece(merged[-1].text + piece.text, piece.quote)
        else:
            merged.append(piece)
    return tuple(merged)
