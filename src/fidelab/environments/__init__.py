"""Environments: where an engine runs.  The pins of engines clash, so each may have its own Python environment.

``environment`` finds an engine's interpreter, ``answers`` asks the engine about itself, ``recipes`` and ``install``
make environments, ``trial`` tries them out, ``listing`` lists them.
"""
