"""SGLang: a plug-in with a pool and an attention backend; see :mod:`k16v8.plugins.sglang.plugin`."""
