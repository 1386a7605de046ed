"""Report: one :class:`~fidelab.results.record.Report` shown to people: terminal, HTML, Markdown, notebook.

``view`` turns the record into plain rows (``cells`` and ``tables`` hold their strings, ``numbers`` every number
format); the faces only lay them out.  ``sentence`` says in one line what to do with a candidate.  For the HTML
page alone: ``sections`` (axes with figures and panels), ``plots`` (which lines a chart shows), ``charts``,
``frontier`` and ``heatmap`` (geometry), ``positions`` (what single positions say).
"""
