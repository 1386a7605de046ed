"""SGLang's bench of one batch, with plug-ins.

``python -m sglang.benchmark.one_batch`` loads no plug-ins, so that it does not know ``--attention-backend k16v8``.
This module loads them as SGLang's server does, then runs that bench with the same words.

::

    K16V8=1 python -m k16v8.bench.sglang --attention-backend k16v8 --disable-cuda-graph --model-path …

The plug-in has no CUDA graphs: it rebuilds the page table in each step, and a graph needs it in one place.
Without graphs small batches are slower, so a comparison is fair only with rivals that have none either.
"""

from __future__ import annotations

import runpy
import sys
from importlib import import_module

BENCH = "sglang.benchmark.one_batch"
NO_GRAPHS = "--disable-cuda-graph"


def main() -> int:
    """Load the plug-ins, run the bench.

    Return the exit code: that of the bench, 2 where SGLang is not installed or graphs are not switched off.
    """
    if "k16v8" in sys.argv and NO_GRAPHS not in sys.argv:
        print(
            f"k16v8: the plug-in has no CUDA graphs, since its table of pages moves in each step: add {NO_GRAPHS}, and "
            "compare with an SGLang that has it, too",
            file=sys.stderr,
        )
        return 2
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
