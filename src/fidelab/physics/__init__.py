"""Possible gain of a number format, from a model's shape and a device's rates: bytes, rooflines, fits."""
