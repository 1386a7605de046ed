"""SGLang's bench of one batch, with plug-ins.

``python -m sglang.benchmark.one_batch`` loads no plug-ins, so that it does not know ``--attention-backend k16v8``.
This module loads them as SGLang's server does, then runs that bench with the same words.

::

    K16V8=1 python -m k16v8.bench.sglang --model-path … --attention-backend k16v8 --batch-size 8
"""

from __future__ import annotations

import runpy
import sys
from importlib import import_module

__all__ = ["BENCH", "main"]

BENCH = "sglang.benchmark.one_batch"


def main() -> int:
    """Load the plug-ins, run the bench.  Return the exit code: that of the bench, 2 where SGLang is not installed."""
    try:
        plugins = import_module("sglang.srt.plugins")
    except ModuleNotFoundError as error:
        print(f"k16v8: SGLang cannot be imported ({error}): use the Python that has it", file=sys.stderr)
        return 2
    plugins.load_plugins()
    runpy.run_module(BENCH, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
