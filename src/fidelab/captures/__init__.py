"""Captures: immutable files with the answers of one arm to one request.

``writer`` runs inside engine processes (standard library and numpy only); ``reader`` opens a finished capture
memory-mapped and refuses a damaged one; ``pair`` refuses captures that must not be compared.
"""
