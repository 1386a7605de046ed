"""Report: one :class:`~fidelab.results.record.Report` shown to people, as terminal text or as one HTML file.

``view`` turns the record into plain rows and holds all number formatting; ``text`` and ``html`` only lay
them out; ``sentence`` says in one line what to do with a candidate.
"""
