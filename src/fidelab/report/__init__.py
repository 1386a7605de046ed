"""Report: one :class:`~fidelab.results.record.Report` shown to people: terminal, HTML, Markdown, notebook, chart files.

``view`` turns the record into plain rows (``cells`` and ``tables`` hold their strings, ``numbers`` every number
format); the faces only lay them out.  ``sentence`` says in one line what to do with a candidate.  ``benches`` holds
speed, memory and serving in the same way (``bench_tables``, ``serving``: a section per bench).  For pages and chart
files: ``sections`` (axes with figures and panels), ``plots`` and ``bench_charts`` (which lines a chart shows),
``gallery`` (all of them), ``scales``, ``labels``, ``charts``, ``bars``, ``frontier`` and ``heatmap`` (geometry),
``positions`` (what single positions say), ``standalone`` (files).
"""
