"""Paged attention with separate formats for K and V, and products with 4-bit weights.

Of each the definition (``reference``, ``weights``), Triton kernels and a vectorised torch path.  Sees tensors and
scales, never models or engines.  Start with :func:`k16v8.kernels.dispatch.choose` and
:func:`k16v8.kernels.dispatch.choose_weights`.
"""
