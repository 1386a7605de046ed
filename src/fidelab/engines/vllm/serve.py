"""``vllm serve`` in vLLM's environment: ``python -m fidelab.engines.vllm.serve serve MODEL …``.

A CPU build may be a distribution with another name than the one by which vLLM finds its own version and
device.  Processes that vLLM spawns import this module again.
"""

from __future__ import annotations

import sys
from importlib import metadata

from fidelab.engines.vllm.launch import PACKAGES

_VLLM, _CPU = PACKAGES
_version = metadata.version


def _distribution_version(distribution_name: str) -> str:
    """The version of a distribution; of vLLM also where its CPU build is installed under another name."""
    try:
        return _version(distribution_name)
    except metadata.PackageNotFoundError:
        if distribution_name != _VLLM:
            raise
        return f"{_version(_CPU)}+cpu"


metadata.version = _distribution_version

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()
