"""Plug-ins: what we put into other people's engines (formats and kernels behind the engine's own hooks)."""
