"""Engine ``vllm``: the adapter, its launch, the capture inside it, and the read-back."""
