"""Report: one :class:`~fidelab.results.record.Report` shown to people: terminal, HTML, Markdown, notebook, chart files.

``view`` turns the record into plain rows, ``summary`` into what stands beside the main table for other axes and for
benches, ``sections`` into one section per axis and bench, by the one path of ``tables`` from metrics to rows; ``cells``
holds single strings, ``numbers`` every number format.  The faces only lay them out.  ``sentence`` says in one line what
to do with a candidate.  For pages and chart files: ``plots`` (which lines a chart shows), ``gallery`` (all charts),
``scales``, ``labels``, ``charts``, ``frontier`` and ``heatmap`` (geometry), ``positions`` (what single positions say),
``standalone`` (files).
"""
