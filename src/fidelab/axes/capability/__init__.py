"""Capability checks: questions with one right answer, as data, and their scoring by parsing.

See docs/metrics.md#capability-checks.

``checks`` holds the set and its version, ``parse`` reads answers, ``code`` runs what a model wrote in the ``sandbox``,
``template`` asks chat templates what they can do, ``vision`` draws images.  Captures name checks by id: answers are
scored again whenever the parsing improves.
"""
