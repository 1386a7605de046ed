"""Paged attention with separate formats for K and V: the definition, Triton kernels, a vectorised torch path.

Sees tensors and scales, never formats or engines.  Start with :func:`k16v8.kernels.dispatch.choose`.
"""
