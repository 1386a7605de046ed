"""K16/V8 inside other people's engines, behind their own hooks: a folder for each; ``shared`` is what engines share."""
