"""Engine ``vllm``: the adapter, how it is launched, what captures inside it, and what is read back."""
