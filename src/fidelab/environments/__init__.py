"""Environments: where an engine runs.  Their pins clash, so each may have a Python environment of its own.

``environment`` finds an engine's interpreter, ``answers`` asks the engine about itself, ``recipes`` and
``install`` make environments, ``trial`` tries them out, ``listing`` lists them.
"""
