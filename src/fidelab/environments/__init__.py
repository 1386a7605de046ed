"""Environments: where an engine runs.  Their pins clash, so each may have a Python environment of its own.

``environment`` says which interpreter an engine has, ``answers`` asks the engine about itself, ``recipes`` and
``install`` make environments, ``trial`` tries them out, ``listing`` knows them all.
"""
