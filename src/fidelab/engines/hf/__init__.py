"""Engine ``hf``: Hugging Face Transformers in a worker process."""
