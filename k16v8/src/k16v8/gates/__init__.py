"""Check kernels against their definition: gates that must pass, broken kernels that must fail, and compiling.

``run`` holds attention to the definition at many shapes (``cases``), ``writer`` the cache writer, ``soak`` a long
decode through page reuse; ``mutations`` are kernels with known faults; ``weights`` has cases and mutations of products
with 4-bit weights; ``compile`` builds the kernels for processors that are not here.
"""
