"""The imports that all configurations of SGLang on processors share, before their workers are forked.

Nothing is computed here, and no thread is started.  The scheduler, a process of its own, imports them again.
"""

from fidelab.engines.sglang.launch import set_cpu_engine

set_cpu_engine()  # SGLang reads the variable when it is imported

from sglang.srt.entrypoints import engine  # noqa: E402, F401
