"""Environments: where an engine runs.  Their pins clash, so each may have a Python environment of its own.

``environment`` says which interpreter an engine has, ``link`` is the folder through which fidelab is seen there, and
``answers`` asks the engine about itself.  ``recipes`` and ``install`` make environments, ``listing`` knows them all.
"""
