"""Possible gain of a number format, computed from a model's shape and a device's rates: bytes, ceilings, rooflines,
fits.
"""
