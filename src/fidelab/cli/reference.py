"""The reference pages of the documentation, from the code: ``python -m fidelab.cli.reference docs/reference``.

Commands and options come from the typer application, files from the pydantic models that read or write them, and axes
and benches from their tables.  A test compares the committed pages with the output of this module.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

Schema = Mapping[str, Any]

_HEADER = "<!-- Made from the code: make docs -->\n"
_AS_TEXT = {"KVSpec": "a [KV format](../guide.md#kv-formats)"}  # written as text, read as an object
_PANEL_PAGES = {  # panel of --help: page
    "Compare": "compare",
    "Results": "results",
    "Speed and size": "speed",
    "Diagnosis and checkpoints": "checkpoints",
    "This machine": "machine",
}


def pages() -> dict[str, str]:
    """Return the Markdown of all reference pages by file name."""
    # One page per panel of `fidelab --help`; other packages document their own commands
    import typer

    from fidelab.cli import app

    root: Any = typer.main.get_command(app)
    parts: dict[str, list[str]] = {panel: [] for panel in _PANEL_PAGES}
    for name in root.list_commands(None):
        command = root.commands[name]
        parts[command.rich_help_panel] += _command_sections(f"fidelab {name}", command)
    command_pages = {
        f"{page}.md": f"# Commands: {panel[0].lower()}{panel[1:]}\n\n{_HEADER}\n" + "\n\n".join(parts[panel]) + "\n"
        for panel, page in _PANEL_PAGES.items()
    }
    from fidelab.axes import AXES
    from fidelab.bench import BENCHES

    settings = [
        "# Settings of tests and benches",
        _HEADER.strip(),
        "Given as `--set axes.TEST.SETTING=VALUE` and `--set benches.BENCH.SETTING=VALUE`, or in a file under `axes:` "
        "and `benches:`. [Metrics](../metrics.md) leads to their definitions.",
    ]
    for kind, registry in (("Test", AXES), ("Bench", BENCHES)):
        for name in registry.built_in:
            schema = registry.load(name).Settings.model_json_schema(by_alias=True)
            settings += [f"## {kind} {name}", _fields_table(schema, "setting")]
    texts = {"settings.md": "\n\n".join(settings) + "\n", "formats.md": _cache_formats()}
    return {**command_pages, **_file_pages(), **texts}


def _cache_formats() -> str:
    """The page of the cache formats that engines define, and of what other tools call theirs."""
    from fidelab.core.meant import ELSEWHERE
    from fidelab.engines.base import engines
    from fidelab.engines.cache_formats import CacheFormat

    def bits(row: CacheFormat) -> str:
        """Of a value of a head of 128, keys and values where they differ."""
        if row.latent is not None and row.latent.fixed:
            return f"{row.latent.fixed} bytes a token"
        wide = "as computed"
        sides = [f"{8 * side.head_bytes(128, 2) / 128:g}" if side.bits else wide for side in (row.k, row.v)]
        return "/".join(dict.fromkeys(sides))

    parts = [
        "# Cache formats of engines",
        _HEADER.strip(),
        "Names are the engine's own. Bits are those of a value in a head of 128, scales included. "
        "*Proven by content*: stored and written numbers are compared; *by bytes*: the engine's name of the format and "
        "the bytes of its pages are. fidelab's own formats, on engine `hf`, are in the "
        "[guide](../guide.md#kv-formats); `fidelab setup formats` counts bytes for a model.",
    ]
    for cls in engines():
        rows = []
        for row in cls.cache_formats.values():
            needs = [
                row.needs,
                f"from {row.since} on" if row.since else "",
                f"gone: {row.instead}" if row.instead else "",
            ]
            if row.keeps:
                needs.append("leaves the first and the last two layers in 16 bits, unless the model is a hybrid")
            cells = (f"`{row.name}`", bits(row), row.scales or "–", "; ".join(filter(None, needs)) or "–", row.proof)
            rows.append("| " + " | ".join(cells) + " |")
        if rows:
            head = "| name | bits per value | scales | needs | proven by |\n|---|---|---|---|---|"
            parts += [f"## {cls.title or cls.name}", "\n".join([head, *rows])]
    tools = [f"| {tool.tool} | `{tool.option}` | {tool.values} | {tool.way} |" for tool in ELSEWHERE]
    head = "| tool | option | values | here |\n|---|---|---|---|"
    parts += ["## Other tools", "What tools call their formats that fidelab does not run.", "\n".join([head, *tools])]
    return "\n\n".join(parts) + "\n"


def with_harmless_options(guide: str) -> str:
    """Return the guide to security, with the engines' tables of harmless options regenerated from the code."""
    from fidelab.engines import ENGINES
    from fidelab.engines.harmless import table

    before, _, rest = guide.partition("<!-- harmless options -->\n")
    tables = [
        "\n".join([f"### Engine {name}", "", *table(ENGINES.load(name).harmless)])
        for name in ENGINES.built_in
        if name != "fake"
    ]
    text = "\n\n".join(tables)
    return f"{before}<!-- harmless options -->\n\n{text}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


def _command_sections(name: str, command: Any) -> Iterator[str]:
    if command.context_settings.get("allow_extra_args"):  # passes its words on to another package
        return
    about, _, examples = (command.help or "").partition("[bold]Example")
    # Some helps have text after their examples: lines that do not begin with blanks.
    lines = [line for line in examples.partition("[/bold]")[2].splitlines() if line.strip()]
    shown = [_strip_markup(line.strip()) for line in lines if line[:1] == " "]
    behind = [_prose(line) for line in lines if line[:1] != " "]
    texts = [f"## {name}", "\n\n".join(_prose(part) for part in about.strip().split("\n\n")), *behind]
    if shown:
        texts.append("```\n" + "\n".join(shown) + "\n```")
    yield "\n\n".join(text for text in [*texts, *_parameter_tables(command)] if text)
    for child, inner in getattr(command, "commands", {}).items():
        yield from _command_sections(f"{name} {child}", inner)


def _parameter_tables(command: Any) -> Iterator[str]:
    panels: dict[str, list[str]] = {}
    for parameter in command.params:
        if parameter.hidden or parameter.name in ("help", "install_completion", "show_completion"):
            continue
        argument = not any(option.startswith("-") for option in parameter.opts)
        panel = "Arguments" if argument else parameter.rich_help_panel or "Options"
        text, default = _strip_markup(parameter.help or ""), None
        if found := re.search(r" ?\[default: (.+?)\]$", text):
            text, default = text[: found.start()], found[1]
        if default is None and parameter.show_default and parameter.default not in (None, False, (), []):
            if parameter.is_flag:
                default = str(parameter.opts[0])
            elif isinstance(parameter.default, list | tuple):
                default = ", ".join(map(str, parameter.default))
            else:
                default = str(parameter.default)
        if argument:
            names = [parameter.metavar or parameter.name.upper()]
        else:
            value = "" if parameter.is_flag else f" {parameter.metavar or 'TEXT'}"
            long = [option for option in parameter.opts if option.startswith("--")] or parameter.opts
            names = [f"{long[0]}{value}", *(o for o in parameter.opts if o != long[0]), *parameter.secondary_opts]
        # Mark the options in a help as code, so that lines do not break within them
        about = _about_value(re.sub(r"(?<![\w`'-])(--[a-z][\w-]*)", r"`\1`", text), default)
        panels.setdefault(panel, []).append(_row(" ".join(f"`{name}`" for name in names), about))
    for panel in sorted(panels, key=lambda panel: panel != "Arguments"):
        yield f"| {panel.lower()} | |\n|---|---|\n" + "\n".join(panels[panel])


def _file_pages() -> dict[str, str]:
    """Return one page per kind of file that users write; ``schema/`` describes the files that fidelab writes."""
    from fidelab.config.cross import CrossEngine
    from fidelab.config.profiles import Profile
    from fidelab.config.schema import Experiment, Preset
    from fidelab.environments.checkpoints import checkpoints

    return {
        "experiment.md": _schema_page(
            "Experiment files",
            "Input of `fidelab compare -f FILE`. Every run writes one, `config.resolved.yaml`. "
            "Unknown keys are refused with the nearest known one.",
            {"Experiment": Experiment, "Preset": Preset, "Cross-engine comparison": CrossEngine},
        ),
        "profile.md": _schema_page(
            "Profile files", "Input of `fidelab reproduce FILE --trust FILE`.", {"Profile": Profile}
        ),
        "recipe.md": _schema_page(
            "Recipes",
            "Input of `fidelab checkpoint quantize --recipe FILE` ([quantize](../checkpoints.md#quantize)).",
            {"Recipe": checkpoints.Recipe},
        ),
    }


def _schema_page(title: str, about: str, models: Mapping[str, type[BaseModel]]) -> str:
    """Return a section with a table of fields for each model, and for each record that it refers to."""
    parts = [f"# {title}", _HEADER.strip(), about]
    seen = {*_AS_TEXT, "FormatSpec"}
    for name, model in models.items():
        schema: Schema = model.model_json_schema(by_alias=True)
        inner = sorted((one, definition) for one, definition in schema.get("$defs", {}).items() if one not in seen)
        seen.update(one for one, _ in inner)
        for one, fields in [(name, schema), *inner]:
            about = str(fields.get("description", "")).partition("\n\n")[0].replace("``", "`")
            parts += [f"## {one}", _prose(about) if about else "", _fields_table(fields, "field")]
    return "\n\n".join(part for part in parts if part) + "\n"


def _fields_table(schema: Schema, word: str) -> str:
    """Return a table of fields."""
    if "enum" in schema:
        return "One of " + ", ".join(f"`{value}`" for value in schema["enum"]) + "."
    required = schema.get("required", [])
    rows = [
        _row(
            f"`{name}`",
            _type(field),
            _about_value(
                _prose(str(field.get("description", "")).replace("``", "`")),
                None if field.get("default") in (None, [], {}) else json.dumps(field["default"], ensure_ascii=False),
                required=name in required,
            ),
        )
        for name, field in schema.get("properties", {}).items()
    ]
    return f"| {word} | type | |\n|---|---|---|\n" + "\n".join(rows) if rows else ""


def _type(field: Schema) -> str:
    """Return a JSON type in words; records are links to their sections."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return _AS_TEXT.get(name) or f"[{name}](#{name.lower()})"
    if "anyOf" in field or "oneOf" in field:
        kinds = [_type(kind) for kind in field.get("anyOf") or field["oneOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind))
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    kind = field.get("type")
    if kind == "array":
        inner = field.get("items") or {"anyOf": field.get("prefixItems", [])}
        return f"list of {_type(inner)}" if inner else "list"
    if kind == "object":
        inner = field.get("additionalProperties")
        return f"mapping to {_type(inner)}" if isinstance(inner, dict) and inner else "mapping"
    words = {"integer": "integer", "number": "number", "string": "text", "boolean": "true, false", "null": "null"}
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = ", ".join(f"{sign} {field[key]:g}" for key, sign in signs.items() if key in field)
    return f"{words.get(str(kind), 'any')} {limits}".rstrip()


def _strip_markup(text: str) -> str:
    """Remove Rich markup."""
    return re.sub(r"\[/?(?:bold|italic|dim)\]", "", text).replace("\\[", "[")


def _prose(text: str) -> str:
    """Escape a paragraph of a docstring or a help for Markdown: angle brackets, asterisks and brackets."""
    text = _strip_markup(re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", text))
    pieces = re.split(r"(`[^`]*`)", text.replace("\n", " "))
    text = "".join(piece if piece[:1] == "`" else re.sub(r"([<*\[\]])", r"\\\1", piece) for piece in pieces)
    return re.sub(r"docs/([\w-]+)\.md((?:#[\w-]+)?)", r"[\1](../\1.md\2)", text)


def _about_value(text: str, default: str | None, *, required: bool = False) -> str:
    """Return the description of a value, followed by its default or whether it is required."""
    sentences = [_cell(text).rstrip(".")] if text else []
    sentences += ["Required"] if required else []
    sentences += [] if default is None else [f"Default: `{_cell(default)}`"]
    return " ".join(f"{sentence}." for sentence in sentences)


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    made = pages()
    for path in folder.glob("*.md"):
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        (folder / name).write_text(text, "utf-8")
    guide = folder.parent / "security.md"
    guide.write_text(with_harmless_options(guide.read_text("utf-8")), "utf-8")
