"""Imports: results of other tools, read from their files, recomputed, and written as a run of fidelab.

Figures whose data a file holds are recomputed; figures without data stay absent.
"""

from fidelab.core.registry import Registry

IMPORTS = Registry(
    "import",
    {
        "refract": "fidelab.imports.refract:import_refract",
        "kld-dumps": "fidelab.imports.kld_dumps:import_dumps",
        "lm-eval": "fidelab.imports.lm_eval:import_samples",
    },
)
