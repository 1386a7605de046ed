"""Results: what a run found, as one strict record (``report.json``), and how it is read and written.

Nothing here measures or judges: the axes bring the numbers, the conductor the verdicts.
"""
