"""Engine ``llamacpp``: llama.cpp through its library, and the proof of what it stored."""
