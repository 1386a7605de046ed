"""The imports that all configurations of vLLM share: before their workers are forked, or ahead of a job on a GPU.

They take 9 of the 13 seconds in which a small model starts on a CPU.  Nothing is computed, and no thread is started.
"""

from fidelab.engines.vllm.launch import set_quiet

set_quiet()  # vLLM reads some of the variables when it is imported

from vllm import LLM, SamplingParams  # noqa: E402, F401
from vllm.inputs.engine import tokens_input  # noqa: E402, F401
from vllm.platforms import current_platform  # noqa: E402

if current_platform.is_cpu():
    from vllm.v1.worker import cpu_worker  # noqa: F401
