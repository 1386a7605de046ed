"""Engine ``hf``: Hugging Face Transformers in a process of ours."""
