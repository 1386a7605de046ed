"""Capability checks: questions with one right answer, as data, and their scoring by parsing.

See docs/metrics.md#capability-checks.

``checks`` holds the set and its version, ``parse`` reads answers, ``code`` runs programs in the ``sandbox``,
``template`` finds the features of chat templates, ``vision`` draws images.  Captures name checks by id: answers are
scored again whenever the parsing improves.
"""
