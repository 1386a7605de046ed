"""The command line of an engine's own server: how it is recognized, and what its flags mean for an arm."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Target = str | tuple[str, str, str]
"""An option of an arm, ``@`` and a field of it, or an option with its values where the flag is given and negated."""


@dataclass(frozen=True)
class Dialect:
    """Mapping of a server's flags to options of an arm.

    ``programs``: the server's commands as users write them; ``program``: the pattern of them, without a path.
    ``mark``: pattern in the name of a command or of an image, in lower case.  ``port``: where it listens by default.
    ``in_image``: its published images have the Python in which arms run.  ``positional_model``: the model may be a
    word without a flag.  ``short``: flags of one dash → their long names.  ``names``: long names → names in an arm,
    where these differ.  ``switches``: flags that never take a value.  ``ignored``: flag → why no arm has it.
    ``negates``: whether ``--no-NAME`` is a flag.  ``unsaid``: server defaults that differ from an arm's.

    A dialect that knows every flag of its server also has: ``spellings``: flags as written → long names, after ``no-``
    where they switch off.  ``values``: flag → number of its values.  ``refused``: flag → why it cannot be compared, and
    what to do.  ``variables``: environment variable → flag; all variables
    that begin with ``variable_prefix`` are the server's.  ``switch``: whether a variable's value means on.
    ``conversions``: flag → the option's value for a flag's; ``None`` for the default, ``ValueError`` for a wrong value.
    """

    programs: tuple[str, ...]
    program: str
    mark: str
    port: int
    names: Mapping[str, Target]
    in_image: bool = False
    positional_model: bool = False
    short: Mapping[str, str] = field(default_factory=dict)
    spellings: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    variable_prefix: str = ""
    switch: Callable[[str], bool | None] = lambda _: None
    conversions: Mapping[str, Callable[[str], str | None]] = field(default_factory=dict)
    switches: re.Pattern[str] = re.compile(r"(?!disable-access-log-for)(enable|disable)-.*")
    ignored: Mapping[str, str] = field(default_factory=dict)
    negates: bool = True
    unsaid: Mapping[str, str] = field(default_factory=dict)


def pairs(words: str) -> dict[str, str]:
    """Map each short flag to its long name, from a text such as ``-m model -t threads``."""
    flags = words.split()
    return dict(zip(flags[::2], flags[1::2], strict=True))
