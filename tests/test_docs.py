"""The documents: what they and the code point to exists, and every number has a definition."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import runpy
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import fidelab.axes
import fidelab.bench
import fidelab.imports
import fidelab.metrics
import fidelab.results
import fidelab.studies
from fidelab import extend
from fidelab.axes import AXES
from fidelab.bench import BENCHES
from fidelab.cli import reference
from fidelab.results.coverage import coverage
from fidelab.results.measurement import Definition
from tests.report.sample import sample_report
from tests.run.harness import cli

ROOT = Path(__file__).parents[1]
METRICS = ROOT / "docs" / "metrics.md"
DEFINITIONS = sorted((ROOT / "docs" / "metrics").glob("*.md"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")])
TOPS = ("src", "tests", "checkpoints", "benchmarks", "examples")
SOURCES = [path for top in TOPS for path in sorted((ROOT / top).rglob("*.py"))]
SCRIPTS = [path for path in sorted(ROOT.glob("scripts/*")) if path.is_file()] + sorted(ROOT.glob("scripts/*/*.py"))

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CITED = re.compile(r"\bdocs/(?:[\w-]+/)*[\w-]+\.md(?:#[\w-]+)?")
MODULE = re.compile(r"`(fidelab(?:\.\w+)+)`(?:\s+\(((?:`\w+`[,\s]*)+)\))?")
# Section signs, and documents in capitals by name alone, stand for pages that nobody can open.
UNSHIPPED = re.compile(r"§|\b(?:METRICS|DESIGN|FAILURES|ROADMAP)\b(?!\.\w|/| =)")
CAPITALS = re.compile(r"\b[A-Z_]{3,}\.md\b")


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text("utf-8")


@functools.cache
def prose(path: Path) -> str:
    """A document without its code blocks."""
    return FENCE.sub("", text_of(path))


@functools.cache
def headings(path: Path) -> tuple[str, ...]:
    return tuple(HEADING.findall(prose(path)))


@functools.cache
def anchors(path: Path) -> tuple[str, ...]:
    return tuple(map(anchor, headings(path)))


def shipped() -> set[str]:
    """Names of all Markdown files, but those in hidden folders such as the environment."""
    found: set[str] = set()
    for _, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found |= {name for name in files if name.endswith(".md")}
    return found


def anchor(heading: str) -> str:
    """What GitHub calls a heading: letters, digits, hyphens and underscores, in small letters."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def exists(target: str, base: Path) -> bool:
    """A file or folder, and the heading in it that is named behind ``#``."""
    name, _, fragment = target.partition("#")
    path = (base.parent / name).resolve() if name else base
    return path.exists() and (not fragment or fragment in anchors(path))


def module_of(name: str) -> tuple[Path, str]:
    """The file of the longest part of a dotted name that is a module, and what is left of the name."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        path = ROOT / "src" / Path(*parts[:n])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file, ".".join(parts[n:])
    raise AssertionError(f"{name} is not a module")


def defines(module: Path, name: str) -> bool:
    """A module, or one of its package's, defines this name at its top."""
    files = module.parent.glob("*.py") if module.name == "__init__.py" else [module]
    return any(re.search(rf"^(?:def |class )?{name}\b", text_of(file), re.MULTILINE) for file in files)


def public() -> Iterator[tuple[str, str]]:
    """Name and docstring of every public function and class of ``fidelab.metrics``."""
    for info in pkgutil.iter_modules(fidelab.metrics.__path__):
        module = importlib.import_module(f"fidelab.metrics.{info.name}")
        for name, found in vars(module).items():
            own = inspect.isfunction(found) or inspect.isclass(found)
            if own and name[0] != "_" and found.__module__ == module.__name__:
                yield f"{info.name}.{name}", inspect.getdoc(found) or ""


def test_links_and_cited_sections_exist_and_no_two_headings_share_an_anchor() -> None:
    targets = [(path, target) for path in DOCUMENTS for target in LINK.findall(prose(path)) if "://" not in target]
    assert targets
    assert [(str(path.relative_to(ROOT)), target) for path, target in targets if not exists(target, path)] == []
    counts = {path: Counter(anchors(path)) for path in DOCUMENTS if path.name != "CHANGELOG.md"}
    twice = [(str(path.relative_to(ROOT)), [*(names - Counter({*names}))]) for path, names in counts.items()]
    assert [(path, names) for path, names in twice if names] == []
    cited = [(path, target) for path in SOURCES for target in CITED.findall(text_of(path))]
    assert cited
    assert [(str(path), target) for path, target in cited if not exists(target, ROOT / "README.md")] == []


def test_nothing_cites_a_document_that_is_not_here() -> None:
    found, names = [], shipped()
    for path in [*DOCUMENTS, *SOURCES, *ROOT.glob("benchmarks/*.md"), *SCRIPTS]:
        if path == Path(__file__):
            continue
        text = text_of(path)
        found += [(str(path.relative_to(ROOT)), match[0]) for match in UNSHIPPED.finditer(text)]
        found += [(str(path), name) for name in CAPITALS.findall(text) if name not in names]
    assert found == []


@pytest.mark.parametrize("path", [METRICS, *DEFINITIONS, METRICS.with_name("design.md")], ids=lambda path: path.stem)
def test_every_module_and_name_that_a_definition_points_to_exists(path: Path) -> None:
    missing = []
    for name, listed in MODULE.findall(path.read_text("utf-8")):
        if name == BENCHES.group:  # the others are named as their modules
            continue
        file, rest = module_of(name)
        named = [*re.findall(r"\w+", listed), *([rest.split(".")[0]] if rest else [])]
        missing += [f"{name}: {one}" for one in named if not defines(file, one)]
    assert missing == []


def test_every_axis_and_bench_has_a_definition() -> None:
    wrong = []
    for kind, name in [*(("test", n) for n in AXES.names()), *(("bench", n) for n in BENCHES.names())]:
        rows = [line for line in prose(METRICS).splitlines() if line.startswith(f"| {kind} `{name}` |")]
        sections = LINK.findall(rows[0]) if len(rows) == 1 else []
        if not sections or not all(exists(section, METRICS) for section in sections):
            wrong.append((kind, name))
    assert wrong == []


def test_every_section_of_the_definitions_is_in_their_index_and_on_one_page_only() -> None:
    listed = set(LINK.findall(prose(METRICS)))
    pages = {f"metrics/{path.name}": anchors(path) for path in DEFINITIONS}
    assert len(pages) > 5
    assert {*pages} - listed == set()
    sections = {f"{page}#{section}" for page, [_, *found] in pages.items() for section in found}
    assert sections - listed == set()
    counts = Counter(section for found in pages.values() for section in found)
    assert [section for section, count in counts.items() if count > 1] == []


def test_every_page_of_definitions_leads_back_to_their_index() -> None:
    begins = {path.name: prose(path).partition("\n## ")[0] for path in DEFINITIONS}
    assert [name for name, text in begins.items() if "](../metrics.md#find-a-number)" not in text] == []


def definitions() -> Iterator[Definition]:
    """Every metric that an axis, a bench, a study or an import defines."""
    for room in (fidelab.axes, fidelab.bench, fidelab.results, fidelab.studies, fidelab.imports):
        for info in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            for found in vars(importlib.import_module(info.name)).values():
                held = [*found.values()] if isinstance(found, dict) else found if isinstance(found, tuple) else [found]
                yield from (one for one in held if isinstance(one, Definition))


def test_every_number_is_found_by_its_printed_name_with_its_meaning_and_its_section() -> None:
    index = text_of(METRICS).splitlines()
    lines = [line.replace("\\|", "|").casefold() for line in index if line.startswith("| `")]
    found = {(one.name, one.about) for one in definitions()}
    assert len(found) > 150
    missing = [
        (name, about)
        for name, about in sorted(found)
        if not any(f"`{name}`".casefold() in line and about.rstrip(".").casefold() in line for line in lines)
    ]
    assert missing == []


def test_every_public_function_of_the_metrics_names_its_definition() -> None:
    documented = dict(public())
    assert documented
    cited = {name: {*CITED.findall(doc)} for name, doc in documented.items()}
    sections = {f"docs/metrics/{path.name}#{section}" for path in DEFINITIONS for section in anchors(path)}
    assert [name for name, found in cited.items() if not found & sections] == []


def test_the_reference_pages_are_what_the_code_gives() -> None:
    committed = {path.name: path.read_text("utf-8") for path in (ROOT / "docs" / "reference").glob("*.md")}
    assert committed == reference.pages(), "run: make docs"


SITE = runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))


def test_every_page_is_in_the_navigation_at_most_twenty_three_and_begins_with_a_sentence_that_says_what_it_is() -> None:
    navigated = {file for _, _, file in SITE["navigation"]()}
    pages = [str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page not in navigated] == []
    # 22, and one more: users of four kinds begin on a page of their own, and risks before a deployment have another.
    # Pages in folders are looked up, not read: definitions from docs/metrics.md, reference and gallery from the code.
    assert len(list((ROOT / "docs").glob("*.md"))) <= 23
    shown = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "gallery").glob("*.md"), *DEFINITIONS]
    assert [str(page) for page in shown if len(SITE["first_sentence"](text_of(page))) < 20] == []


def test_the_list_of_pages_for_programs_is_what_the_pages_say() -> None:
    assert (ROOT / "llms.txt").read_text("utf-8") == SITE["llms_text"](), "run: make docs"


def test_the_lines_for_dashboards_log_a_row_of_figures_per_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence = next(text for text in FENCE.findall(text_of(ROOT / "docs" / "sharing.md")) if "trackio" in text)
    logged: list[dict[str, object]] = []
    begun: list[str] = []
    module = types.SimpleNamespace(init=lambda **words: begun.append(words["name"]), log=logged.append, finish=int)
    monkeypatch.setitem(sys.modules, "trackio", module)
    report = sample_report()
    (tmp_path / "runs" / "RUN").mkdir(parents=True)
    (tmp_path / "runs" / "RUN" / "report.json").write_text(report.to_json())
    monkeypatch.chdir(tmp_path)
    exec(fence.strip("`").removeprefix("python"), {})
    arms = [arm.name for arm in (report.reference, *report.candidates)]
    assert {name.partition(" ")[2] for name in begun} >= {*arms}
    assert all("kld" in " ".join(row) for row in logged[-len(report.candidates) :])


def test_the_gallery_shows_what_is_printed_today(tmp_path: Path) -> None:
    """Of its four reports the one on engine ``fake``, which takes seconds."""
    gallery = runpy.run_path(str(ROOT / "scripts" / "gallery"))
    page = text_of(ROOT / "docs" / "gallery" / "README.md")
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == [case.name for case in gallery["CASES"]]
    [case] = [case for case in gallery["CASES"] if case.words[0] == "fake"]
    assert gallery["section"](case, gallery["screen"](case, tmp_path)[0]) in page


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    # --quiet would let everything pass: --strict counts the warnings that are printed
    built = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_site_builds_with_all_links_and_anchors_resolved(site: Path) -> None:
    assert (site / "index.html").is_file()


def test_the_navigation_shows_on_windows_of_1100_pixels(site: Path) -> None:
    """The theme's own width is 76.25 em of 16 pixels."""
    [main] = (site / "assets" / "stylesheets").glob("main.*.css")
    assert ("76.2" in text_of(main), "(min-width:68.75em)" in text_of(main)) == (False, True)


def test_the_site_loads_nothing_from_the_network(site: Path) -> None:
    source = r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//"""
    link = r"""<link\b[^>]*href=["']?(?:https?:)?//"""
    loads = re.compile(f"{source}|{link}")
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 35
    assert [str(page) for page in pages if loads.search(page.read_text("utf-8"))] == []


def test_the_readme_is_short_and_explains_its_words() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 110
    words = ("configuration", "reference", "control", "run-to-run noise", "KLD", "verdict")
    assert [word for word in words if f"**{word}**" not in text] == []


def test_the_first_screen_of_the_readme_says_what_for_whom_one_command_and_what_it_prints() -> None:
    screen = "\n".join((ROOT / "README.md").read_text("utf-8").splitlines()[:60])
    order = (
        "**fidelab measures",
        "![",
        "**For whom:**",
        "## One command",
        "fidelab compare MODEL",
        "\nUse q8_0",
        "pipx install",
    )
    places = [screen.find(part) for part in order]
    assert -1 not in places
    assert places == sorted(places)


def test_every_risk_that_a_report_leaves_open_has_a_command_before_a_deployment() -> None:
    page = text_of(ROOT / "docs" / "before-you-deploy.md")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:2] == "| "]
    sections = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    by_anchor = {anchor(name): text for name, text in sections.items()}
    named = {row[0]: LINK.findall(row[2])[0].removeprefix("#") for row in rows[1:]}
    assert {*coverage(AXES, BENCHES).values(), "other kinds of text"} <= {*named}
    assert [name for name, section in named.items() if "\nfidelab " not in by_anchor[section]] == []


def test_the_readme_names_the_commands_that_continuous_integration_runs() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    commands = [
        command
        for command in re.findall(r"^part (make [\w-]+)", (ROOT / ".ci" / "run").read_text("utf-8"), re.M)
        if command != "make setup"  # which each of the others does
    ]
    assert len(commands) >= 5
    assert [command for command in commands if f"`{command}`" not in text] == []


def test_the_recipes_name_their_entry_points_as_tests_do() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    points = (ROOT / "tests" / "thirdparty" / "entry_points.txt").read_text("utf-8").split("\n")
    assert [line for line in points if line not in text] == []


def test_every_name_of_the_public_surface_exists() -> None:
    assert sorted(extend.__all__) == sorted(extend._MODULES)
    assert all(getattr(extend, name) is not None for name in extend.__all__)


def test_the_sizes_of_large_models_follow_from_their_formulas() -> None:
    """In docs/cluster.md#models-of-7b-and-larger: each figure of the table, to the digits that it has."""
    table = (ROOT / "docs" / "cluster.md").read_text("utf-8").partition("# Models of 7B")[2].partition("\n- **")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    for column in (2, 3):
        numbers = rows[0][column].partition("(")[2].rstrip(")").split(", ")
        p, n_layers, heads, dim, d, vocab = (float(number.replace(",", "")) for number in numbers)
        cache = 2 * n_layers * heads * dim
        sizes = [
            2 * p,
            4 * p,
            2 * cache,
            1.5 * cache,
            32768 * 2 * cache,
            2 * d,
            2 * vocab,
            2 * vocab * d,
            4 * vocab * d,
        ]
        for row, size in zip(rows[2:], sizes, strict=True):
            figure, unit = row[column].replace(",", "").split(" ")
            digits = len(figure.partition(".")[2])
            assert figure == f"{size / {'bytes': 1, 'kB': 1e3, 'GB': 1e9}[unit]:.{digits}f}", row[0]


def test_the_projected_costs_of_models_follow_from_their_shapes(tmp_path: Path) -> None:
    """In docs/cluster.md: bytes, saved outputs, the bound of prefill and loads, each to the digits that it has."""
    text = (ROOT / "docs" / "cluster.md").read_text("utf-8").partition("### What a first comparison costs")[2]
    n_tokens, n_positions = (
        int(number.replace(",", "")) for number in re.findall(r"([\d,]+) (?:tokens|scored)", text)[:2]
    )
    rows = [line for line in text.partition("\n\n")[2].splitlines() if re.match(r"\| [A-Z]\S+ \(", line)]
    assert len(rows) == 7
    for row in rows:
        shape, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        numbers = shape.partition("(")[2].rstrip(")").replace(",", "").split(" ")
        words = zip(("--params", "--layers", "--kv-heads", "--head-dim"), numbers[:4], strict=True)
        flags = ("--kv", "q8_0", "--device", "H100", "--context", "2k", "--batch", "1", "--json")
        found = json.loads(cli("estimate", *(word for pair in words for word in pair), *flags, cwd=tmp_path).out)
        weights = found["model"]["weight_bytes"]
        cache = {one["kv"]: f"{one['bytes_per_token']:,}" for one in found["formats"]}
        seconds = n_tokens / found["cells"][0]["prefill"]["H100"]["tokens_per_s"]
        assert cells == [
            f"{_short(weights / 1e9)} GB",
            f"{cache['bf16']} / {cache['q8_0']}",
            f"{_short(n_positions * 2 * int(numbers[4]) / 1e6)} MB",
            f"{_short(seconds)} s",
            f"{_short(4 * weights / 2e9)} s",
        ]


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.{1 if number >= 0.1 else 2}f}"
