"""What a number format can gain, from a model's shape and a device's rates: bytes, ceilings, rooflines, fits."""
