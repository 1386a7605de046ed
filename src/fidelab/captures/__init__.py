"""Captures: answers of one arm to one request, on disk, immutable.

``writer`` runs inside engine processes (standard library and numpy only); ``reader`` opens a finished
capture memory-mapped and refuses a damaged one; ``pair`` refuses what must not be compared.
"""
