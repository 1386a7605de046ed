"""Imports: read results of other tools from their files, recompute them, and write a run of fidelab.

Figures whose data a file holds are recomputed; figures without data stay absent.
"""

from fidelab.core.registry import Registry

NEMO_EVALUATOR = "nemo-evaluator"
"""Begins the names of its benchmarks in a run: ``nemo-evaluator:gsm8k:reward``."""

IMPORTS = Registry(
    "import",
    {
        "refract": "fidelab.imports.refract:import_refract",
        "kld-dumps": "fidelab.imports.kld_dumps:import_dumps",
        "loads": "fidelab.imports.loads:import_loads",
        NEMO_EVALUATOR: "fidelab.imports.nemo_evaluator:import_bundles",
        "lm-eval": "fidelab.imports.lm_eval:import_samples",
    },
)
