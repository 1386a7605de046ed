"""Imports: what other tools measured, read from their files, computed again, and left as a run of ours.

Nothing is taken on trust: what a file holds the data for is recomputed, and what it does not hold stays absent.
"""

from fidelab.registry import Registry

IMPORTS = Registry(
    "import",
    {
        "refract": "fidelab.imports.refract:import_refract",
        "kld-dumps": "fidelab.imports.kld_dumps:import_dumps",
        "throughput": "fidelab.imports.throughput:import_throughput",
    },
)
