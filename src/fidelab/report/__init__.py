"""Report: one :class:`~fidelab.results.record.Report` shown to people: terminal, HTML, Markdown.

``view`` turns the record into plain rows, ``summary`` into the summaries of other axes and of benches next to the main
table, ``sections`` into one section per axis and bench, by the one path of ``tables`` from metrics to rows; ``cells``
holds single strings, ``numbers`` every number format.  The terminal, HTML and Markdown modules only lay them out.
``sentence`` gives the advice on a candidate in one line.  For pages: ``plots`` (which lines a chart shows), ``gallery``
(all charts), ``scales``, ``labels``, ``charts``, ``frontier`` and ``heatmap`` (geometry), ``positions`` (figures of
single positions), ``standalone`` (the frontier as a file).
"""
