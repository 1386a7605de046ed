"""Transformers: an attention function and a cache of pages; see :class:`k16v8.K16V8Cache`."""
