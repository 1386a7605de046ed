"""Engine ``llamacpp``: llama.cpp through its library, and the proof of its cache's format."""
