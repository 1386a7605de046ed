"""``fidelab import``: turn measurements of other tools into fidelab runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fidelab.cli import options, values
from fidelab.cli.commands import Commands
from fidelab.cli.output import command_line, exit_on, failures, note, open_console, show_report

if TYPE_CHECKING:
    from fidelab.imports.write_run import ImportedArm

_Tests = Annotated[list[Path], typer.Argument(metavar="TEST…", help="The same for one or more candidates.")]
_OptionalTests = Annotated[
    list[Path] | None, typer.Argument(metavar="[TEST…]", help="The same for candidates; none: the figures of REF.")
]
_Names = Annotated[
    list[str] | None, typer.Option("--name", help="Name of a candidate, once per folder (default: the folder's name).")
]


class _RunsOptions(options.RunsOptions):
    output_dir: Annotated[Path, typer.Option(help="Folder for the new run folder.")] = options.RunsOptions.output_dir


app = Commands(help="Import results of other tools and recompute them.")


@app.command("refract")
@options.expand_options
def refract(
    *,
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="REFRACT report (JSON, schema v0.2 or v0.3).")],
    name: Annotated[str | None, typer.Option(help="Name of the candidate (default: its cache formats).")] = None,
    bootstrap: options.SeedOptions,
    runs: _RunsOptions,
    as_json: options.Json = False,
) -> None:
    """Recompute a REFRACT report's scores by its definitions and by fidelab's.

    [bold]Example[/bold]

      fidelab import refract report.json
    """
    from fidelab.imports import IMPORTS

    imported = IMPORTS.load("refract")(report, runs.output_dir, name=name, seed=bootstrap.seed, command=command_line())
    if not as_json:
        # Print the file's figures next to those by REFRACT's definition and by fidelab's
        from fidelab.imports.refract import AXIS
        from fidelab.report.text import print_line, print_table
        from fidelab.results.numbers import ABSENT, one_line
        from fidelab.results.plots import TablePlot

        plot = imported.report.candidates[0].axes[AXIS].plots[0]
        assert isinstance(plot, TablePlot)
        console = open_console()

        def cell(value: str | float | None) -> str:
            if value is None:
                return ABSENT
            return one_line(value) if isinstance(value, str) else f"{value:.4f}"

        print_line(console, plot.title, "bold")
        print_table(console, plot.columns, [[cell(value) for value in row] for row in plot.rows])
    _finish(imported, as_json=as_json)


@app.command("kld-dumps")
@options.expand_options
def kld_dumps(
    *,
    ref_dir: Annotated[Path, typer.Argument(metavar="REF", help="Reference: a folder or a file.")],
    test_dirs: _Tests,
    name: _Names = None,
    model: Annotated[str | None, typer.Option(help="Name of the model.")] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            parser=values.tokens, metavar="N", help="Tokens between windows. \\[default: a quarter of a window's rows]"
        ),
    ] = None,
    bootstrap: options.SeedOptions,
    runs: _RunsOptions,
    as_json: options.Json = False,
) -> None:
    """Compare dumped log-probabilities.

    A dump is a folder (N.safetensors, key log_probs, rows × vocabulary) or a file of llama-perplexity
    --kl-divergence-base.

    [bold]Examples[/bold]

      fidelab import kld-dumps kld/ref kld/awq

      fidelab import kld-dumps kld/ref kld/awq kld/nvfp4 --name AWQ --name NVFP4

      fidelab import kld-dumps f16.kld q8_0.kld
    """
    from fidelab.imports import IMPORTS

    imported = IMPORTS.load("kld-dumps")(
        ref_dir,
        test_dirs,
        runs.output_dir,
        names=name or None,
        model=model,
        stride=stride,
        seed=bootstrap.seed,
        command=command_line(),
        progress=lambda text: note(f"fidelab: {text}"),
    )
    _finish(imported, as_json=as_json)
    exit_on(failures(imported.report))


@app.command("lm-eval")
@options.expand_options
def lm_eval(
    *,
    ref_dir: Annotated[Path, typer.Argument(metavar="REF", help="Output folder of the reference, with samples.")],
    test_dirs: _OptionalTests = None,
    name: _Names = None,
    margin: options.Margin = None,
    bootstrap: options.SeedOptions,
    runs: _RunsOptions,
    as_json: options.Json = False,
) -> None:
    """Compare runs of lm-evaluation-harness sample by sample, from --log_samples.

    [bold]Example[/bold]

      lm_eval --tasks arc_easy --output_path out/bf16 --log_samples …

      fidelab import lm-eval out/bf16 out/fp8 --margin 1%

      fidelab import lm-eval out/bf16
    """
    _compare_samples("lm-eval", ref_dir, test_dirs, name, margin, bootstrap, runs, as_json)


def _compare_samples(
    tool: str,
    ref: Path,
    tests: list[Path] | None,
    names: list[str] | None,
    margin: str | None,
    bootstrap: options.SeedOptions,
    runs: _RunsOptions,
    as_json: bool,
) -> None:
    from fidelab.config.load import validate_as
    from fidelab.config.schema import Limits
    from fidelab.imports import IMPORTS

    given = {} if margin is None else {"margin": validate_as(Limits, {"margin": margin}, f"import {tool}").margin}
    imported = IMPORTS.load(tool)(
        ref, tests or [], runs.output_dir, names=names or None, seed=bootstrap.seed, command=command_line(), **given
    )
    _finish(imported, as_json=as_json)


@app.command("nemo-evaluator")
@options.expand_options
def nemo_evaluator(
    *,
    ref_dir: Annotated[Path, typer.Argument(metavar="REF", help="Output folder of the reference, with its bundles.")],
    test_dirs: _OptionalTests = None,
    name: _Names = None,
    margin: options.Margin = None,
    bootstrap: options.SeedOptions,
    runs: _RunsOptions,
    as_json: options.Json = False,
) -> None:
    """Compare runs of NVIDIA NeMo Evaluator answer by answer, from their bundles.

    fidelab check --policy FILE reads the policy of nel gate for such a run.

    [bold]Example[/bold]

      fidelab import nemo-evaluator out/bf16 out/fp8 --margin 1%

      fidelab check latest --policy gate.yaml
    """
    _compare_samples("nemo-evaluator", ref_dir, test_dirs, name, margin, bootstrap, runs, as_json)


@app.command("loads")
@options.expand_options
def loads(
    *,
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…", help="Results of a configuration's loads; those of the first are the reference."
        ),
    ],
    name: Annotated[
        list[str] | None, typer.Option("--name", help="Name of a configuration, once per file (default: the file's).")
    ] = None,
    runs: _RunsOptions,
    as_json: options.Json = False,
) -> None:
    """Read loads of a server from vllm bench serve, SGLang's bench_serving or GuideLLM.

    [bold]Examples[/bold]

      vllm bench serve --save-result --result-filename bf16.json …

      fidelab import loads bf16.json fp8.json

      fidelab import loads guidellm/benchmarks.json --name bf16
    """
    from fidelab.imports import IMPORTS

    imported = IMPORTS.load("loads")(files, runs.output_dir, names=name or None, command=command_line())
    _finish(imported, as_json=as_json)


def _finish(imported: ImportedArm, *, as_json: bool) -> None:
    from fidelab.results.numbers import one_line

    for line in imported.notes:
        note(f"fidelab: {one_line(line)}")
    show_report(imported.report, as_json=as_json, folder=imported.folder)
