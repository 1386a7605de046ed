"""LMCache: a serde for the chunks that its L2 adapters store; see :mod:`k16v8.plugins.lmcache.serde`."""
